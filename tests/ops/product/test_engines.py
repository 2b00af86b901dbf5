"""Who multiplies: the table, what it cannot do, what is recorded, and the calls of other libraries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.ops.product.test import EVERY, check, operands
from weft.ops.common.results import plain_result
from weft.ops.product.arguments import MatmulArgs, OperandCodes
from weft.ops.product.engines import TABLE, by_table, pair_of, scaled_operands
from weft.ops.product.operands import Form
from weft.quant.copies import allocate_copies
from weft.runtime import Capabilities, recording


def forms(pair: str) -> tuple[Form, Form]:
    settings = EVERY[pair]
    dtype = settings.get("dtype", torch.bfloat16)
    specs = (settings.get(name) for name in ("a", "b"))
    a, b = (Form.of(dtype, None if spec is None else weft.Format.of(spec).spec) for spec in specs)
    return a, b


def test_the_table_names_what_there_is() -> None:
    pairs = {pair_of(*forms(pair)) for pair in EVERY}
    assert len({(target, pair) for rule in TABLE for target in rule.targets for pair in rule.pairs}) == sum(
        len(rule.targets) * len(rule.pairs) for rule in TABLE
    ), "two entries for one product"
    for rule in TABLE:
        assert {pair.removeprefix("grouped ") for pair in rule.pairs} <= pairs
        assert rule.why
        for target in rule.targets:
            assert Capabilities.of(target)
    assert by_table("bf16", 65, "sm_90") == "torch"
    assert by_table("bf16", 64, "sm_90") == "weft"
    assert by_table("fp8 1x128 x 128x128", 4096, "sm_100") == "weft"


def test_what_ran_is_recorded() -> None:
    call = operands("bf16", 70, 40, 128)
    plain = {name: call[name] for name in ("a", "b")}
    with weft.record_engines() as outer:
        weft.matmul(**plain)
        with weft.record_engines() as inner:
            weft.matmul(**plain, engine="weft")
            weft.matmul(**plain, bias=torch.ones(40))
            weft.matmul(**operands("fp8-blocks", 5, 40, 128) | {"engine": "auto"})
    assert [used.engine for used in outer] == ["torch", "weft", "weft", "weft"]
    assert [used.pair for used in inner] == ["bf16", "bf16", "fp8 1x128 x 128x128"]
    assert (outer[0].m, outer[0].n, outer[0].k) == (70, 40, 128)
    weft.matmul(**plain)
    assert len(outer) == 4


@pytest.mark.parametrize("shape", [(70, 40, 2048), (5, 300, 640), (1, 1, 16)])
def test_products_of_torch_are_as_accurate(shape: tuple[int, int, int]) -> None:
    for threads in (1, 2):
        torch.set_num_threads(threads)
        check(**operands("bf16", *shape) | {"engine": "torch"})
    a, b = torch.randn(3, *shape[::2]).bfloat16(), torch.randn(3, *shape[:0:-1]).bfloat16()
    got = weft.matmul(a, b, engine="torch")
    for i in range(3):
        assert torch.equal(got[i], torch.mm(a[i], b[i]))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"bias": torch.ones(40)}, "lacks bias"),
        ({"activation": "silu"}, "an activation"),
        ({"out_dtype": torch.float32}, "another dtype"),
        ({"quantize": "mx"}, "quantised"),
        ({"batch_invariant": True}, "batch_invariant"),
        ({"engine": "cublas"}, "must be 'auto'"),
    ],
)
def test_what_torch_lacks_is_refused_in_words(more: dict[str, Any], words: str) -> None:
    call = operands("bf16", 5, 40, 128) | {"engine": "torch"}
    with pytest.raises(ValueError, match=words):
        weft.matmul(**call | more)
    with pytest.raises(ValueError, match="on a CPU"):
        weft.matmul(**operands("fp8-row", 5, 48, 128) | {"engine": "torch"})


@pytest.mark.parametrize("pair", ["fp8-row", "fp8-tensor", "fp8-blocks", "mxfp8"])
def test_scaled_products_of_torch(pair: str) -> None:
    """PyTorch multiplies these on a GPU, but its meta functions check shapes, dtypes and most strides."""
    m, n, k = 256, 384, 512
    specs = [weft.Format.of(EVERY[pair][name]).spec for name in ("a", "b")]
    device = torch.device("meta")
    codes = []
    for spec, rows in zip(specs, (m, n), strict=True):
        copy, _ = allocate_copies(weft.Format.of(spec), rows, k, device, rowwise=True, columnwise=False)
        assert copy is not None
        codes.append(OperandCodes(copy.data, copy.scale, copy.global_scale, spec))
    a, b, y = (torch.empty(*shape, dtype=torch.bfloat16, device=device) for shape in ((m, k), (k, n), (m, n)))
    result = plain_result(torch.bfloat16)
    args = MatmulArgs(a, b, *codes, None, None, None, 1.0, None, False, None, False, "torch", result)
    out = torch._scaled_mm(*scaled_operands(args), out_dtype=torch.bfloat16)
    assert (out.shape, out.dtype) == (y.shape, y.dtype)
    short = codes[1]._replace(data=torch.empty(n - 8, k, device=device, dtype=torch.float8_e4m3fn))
    with pytest.raises((RuntimeError, ValueError)):
        torch._scaled_mm(*scaled_operands(args._replace(b_codes=short)), out_dtype=torch.bfloat16)
    # The overload that writes to a tensor has no meta function; it takes the same arguments.
    plain, into = (getattr(torch.ops.aten._scaled_mm, name)._schema.arguments for name in ("default", "out"))
    assert [argument.name for argument in into] == [*(argument.name for argument in plain), "out"]


def test_a_graph_keeps_its_engine() -> None:
    call = operands("bf16", 70, 48, 128) | {"engine": "auto"}
    compiled = torch.compile(weft.matmul, fullgraph=True, backend="aot_eager")
    with weft.record_engines() as used:
        compiled(**call)
        compiled(**call | {"engine": "weft"})
    assert [one.engine for one in used] == ["torch", "weft"]


@pytest.mark.parametrize("pair", ["bf16", "fp8-row", "mxfp8"])
def test_recording_meets_no_product_of_torch(pair: str) -> None:
    """Kernels are recorded on meta tensors, for which PyTorch has not all of its products."""
    with recording("sm_100") as variants, weft.record_engines() as used:
        x, w = (torch.empty(rows, 256, dtype=torch.bfloat16, device="meta") for rows in (128, 512))
        a, b = (
            x if spec is None else weft.quantize(x, spec)
            for x, spec in ((x, EVERY[pair].get("a")), (w, EVERY[pair].get("b")))
        )
        assert weft.matmul(a, b.T).shape == (128, 512)
    assert [one.engine for one in used] == ["torch"]
    assert "matmul_kernel" not in {variant.kernel for variant in variants}

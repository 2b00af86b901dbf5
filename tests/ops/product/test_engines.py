"""Engine selection: the table, unsupported calls, records, and the calls of other libraries."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import weft
from tests.ops.product.test import EVERY, check, operands
from tests.ops.product.test_grouped import problem
from weft.lab.families import Call
from weft.lab.families.product import grouped_matmul_truth, matmul_truth
from weft.lab.truth import near
from weft.ops.common.groups import Groups
from weft.ops.common.results import Result, plain_result
from weft.ops.product.arguments import GroupedArgs, MatmulArgs, ProductOutputs, grouped_args, matmul_args
from weft.ops.product.engines import (
    TABLE,
    by_table,
    choose_engine,
    choose_grouped_engine,
    pair_of,
    products_on,
)
from weft.ops.product.libraries import (
    INSTALLED,
    groups_by_torch,
    multiply,
    multiply_groups,
    nvfp4_operands,
    scaled_operands,
)
from weft.ops.product.operands import Form
from weft.quant import PLAIN
from weft.quant.copies import allocate_copies
from weft.runtime import Capabilities, recording


def forms(pair: str) -> tuple[Form, Form]:
    settings = EVERY[pair]
    dtype = settings.get("dtype", torch.bfloat16)
    specs = (settings.get(name) for name in ("a", "b"))
    a, b = (Form.of(dtype, None if spec is None else weft.Format.of(spec).spec) for spec in specs)
    return a, b


def test_the_table_names_existing_pairs_and_targets() -> None:
    pairs = {pair_of(*forms(pair)) for pair in EVERY}
    entries = [
        (target, pair, rule.engine) for rule in TABLE for target in rule.targets for pair in rule.pairs
    ]
    assert len(set(entries)) == len(entries), "two entries for one product"
    for rule in TABLE:
        assert {pair.removeprefix("grouped ") for pair in rule.pairs} <= pairs
        assert rule.why
        for target in rule.targets:
            assert Capabilities.of(target)
    assert by_table("bf16", few=False, target="sm_90") == ("torch",)
    assert by_table("bf16", few=True, target="sm_90") == ()
    assert by_table("fp8 1x128 x 128x128", few=False, target="sm_90") == ("deep_gemm", "torch")
    assert by_table("fp8 1x128 x 128x128", few=False, target="sm_120") == ()


def test_engines_are_recorded() -> None:
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
        ({"quantize": "mx"}, "quantized"),
        ({"batch_invariant": True}, "batch_invariant"),
        ({"engine": "cublas"}, "must be 'auto'"),
    ],
)
def test_unsupported_calls_of_torch_raise(more: dict[str, Any], words: str) -> None:
    call = operands("bf16", 5, 40, 128) | {"engine": "torch"}
    with pytest.raises(ValueError, match=words):
        weft.matmul(**call | more)
    with pytest.raises(ValueError, match="on a CPU"):
        weft.matmul(**operands("fp8-row", 5, 48, 128) | {"engine": "torch"})


def on_meta(pair: str, m: int = 256, n: int = 384, k: int = 512) -> MatmulArgs:
    """Return the arguments of a product on the meta device."""
    device = torch.device("meta")
    codes = []
    for name, rows in (("a", m), ("b", n)):
        spec = EVERY[pair].get(name)
        if spec is None:
            codes.append(PLAIN)
            continue
        f = weft.Format.of(spec)
        copy, _ = allocate_copies(f, rows, k, device, rowwise=True, columnwise=False)
        assert copy is not None
        codes.append(copy)
    a, b = (torch.empty(*shape, dtype=torch.bfloat16, device=device) for shape in ((m, k), (k, n)))
    return matmul_args(a, b, plain_result(torch.bfloat16), a_codes=codes[0], b_codes=codes[1])


@pytest.mark.parametrize("pair", ["fp8-row", "fp8-tensor", "fp8-blocks", "mxfp8", "nvfp4"])
def test_scaled_products_of_torch(pair: str) -> None:
    """PyTorch multiplies these only on a GPU, but its meta functions check shapes, dtypes and most strides."""
    args = on_meta(pair)

    def product(a: MatmulArgs) -> torch.Tensor:
        if pair == "nvfp4":
            return torch.nn.functional.scaled_mm(**nvfp4_operands(a), output_dtype=torch.bfloat16)
        return torch._scaled_mm(*scaled_operands(a), out_dtype=torch.bfloat16)

    out = product(args)
    assert (out.shape, out.dtype) == ((256, 384), torch.bfloat16)
    assert args.b_codes.data is not None
    short = args.b_codes._replace(data=args.b_codes.data[:-8])
    with pytest.raises((RuntimeError, ValueError)):
        product(args._replace(b_codes=short))
    # The overload that writes to a tensor has no meta function; it takes the same arguments.
    plain, into = (getattr(torch.ops.aten._scaled_mm, name)._schema.arguments for name in ("default", "out"))
    assert [argument.name for argument in into] == [*(argument.name for argument in plain), "out"]


@pytest.mark.parametrize(
    ("pair", "dtype"),
    [("int8-row", torch.bfloat16), ("int8-row", torch.float32), ("int8-tensor", torch.float32)],
)
def test_int8_of_torch_has_the_same_bits(pair: str, dtype: torch.dtype) -> None:
    for shape in ((70, 33, 100), (5, 33, 100)):
        call = operands(pair, *shape) | {"out_dtype": dtype}
        call["a"], call["b"] = (x.to(dtype) for x in (call["a"], call["b"]))
        with weft.record_engines() as used:
            assert torch.equal(weft.matmul(**call | {"engine": "torch"}), weft.matmul(**call))
        assert [one.engine for one in used] == ["torch", "weft"]


def groups_of(p: dict[str, Any]) -> GroupedArgs:
    """Return the arguments of a grouped product."""
    codes = {}
    for name in ("x", "w"):
        x = p[name]
        if isinstance(x, weft.QTensor):
            assert x.rowwise is not None
            lead = (len(x), -1) if name == "w" else (-1,)
            codes[f"{name}_codes"] = x.rowwise.map(lambda t, lead=lead: t.unflatten(0, lead))  # type: ignore[misc]
    return grouped_args(p["x"], p["w"], Groups(p["ends"], p["align"]), plain_result(torch.bfloat16), **codes)


def filled(rows: int, n: int) -> torch.Tensor:
    return torch.full((rows, n), torch.nan, dtype=torch.bfloat16)


@pytest.mark.parametrize("align", [1, 16])
def test_groups_of_torch(align: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's grouped product writes zeros into padding rows, even though x and the output start as NaN there."""
    functional = torch.nn.functional
    product = functional.grouped_mm

    def checked(x: torch.Tensor, w: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        assert offs.dtype is torch.int32  # a GPU requires it, or reads past the end
        assert offs.max() <= len(x)
        return product(x, w, offs=offs)

    monkeypatch.setattr(functional, "grouped_mm", checked)
    for seed, rest in (("a", 0), ("b", 0), ("b", 20)):  # in the last case groups end after the last row
        p = problem("bf16", 5, align, seed)
        p["x"] = p["x"][: len(p["x"]) - rest]
        args = groups_of(p)
        y = filled(len(p["x"]), 256)
        groups_by_torch(y, args)
        call = {name: p[name] for name in ("x", "w", "ends", "align")}
        near(y, grouped_matmul_truth(Call(weft.grouped_matmul, call), {})["y"])  # type: ignore[arg-type]


class DeepGemm:
    """Fake DeepGEMM with its signatures, its requirements on sm_90 and sm_100, and its results."""

    scales = torch.float32  # on sm_90; on sm_100 they are int32

    def _decode(self, operand: tuple[torch.Tensor, torch.Tensor], height: int) -> torch.Tensor:
        """Decode codes [.., rows, K] with one scale per [height, 128]."""
        data, scale = operand
        assert scale.dtype is self.scales
        assert data.dtype is torch.float8_e4m3fn
        assert data.stride(-1) == 1
        rows, k = data.shape[-2:]
        if scale.dtype is torch.int32:  # packed exponents, one scale per row
            assert scale.stride() == (1, -(-rows // 4) * 4)
            bytes_ = scale.contiguous().view(torch.uint8).reshape(rows, -1)[:, : k // 128]
            scale, height = torch.exp2(bytes_.float() - 127), 1
        assert scale.shape[-2:] == (-(-rows // height), k // 128)
        spread = scale.repeat_interleave(height, -2)[..., :rows, :].repeat_interleave(128, -1)
        return data.double() * spread.double()

    def fp8_gemm_nt(
        self, a: Any, b: Any, d: torch.Tensor, c: Any = None, recipe: Any = None, recipe_a: Any = None,
        recipe_b: Any = None, compiled_dims: str = "nk", disable_ue8m0_cast: bool = False, alpha: Any = None,
    ) -> None:  # fmt: skip
        assert a[1].stride(0) == 1
        assert d.dtype is torch.bfloat16
        d.copy_(self._decode(a, 1) @ self._decode(b, 128).T)

    def m_grouped_fp8_gemm_nt_contiguous(
        self, a: Any, b: Any, d: torch.Tensor, grouped_layout: torch.Tensor, recipe: Any = None, recipe_a: Any = None,
        recipe_b: Any = None, compiled_dims: str = "nk", disable_ue8m0_cast: bool = False,
        use_psum_layout: bool = False, ensure_zero_padding: bool = True, expected_m_for_psum_layout: Any = None,
    ) -> None:  # fmt: skip
        assert grouped_layout.dtype is torch.int32
        assert grouped_layout.is_contiguous()
        assert grouped_layout.shape == a[0].shape[:1]
        assert b[1].is_contiguous()
        x, w = self._decode(a, 1), self._decode(b, 128)
        for first in range(0, len(x), 128):  # a tile takes the group of its first row; padding is not written
            group = int(grouped_layout[first])
            assert set(grouped_layout[first : first + 128].tolist()) <= {group, -1}
            if group >= 0:
                d[first : first + 128] = (x[first : first + 128] @ w[group].T).bfloat16()


@pytest.fixture
def deep_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INSTALLED, "deep_gemm", True)
    monkeypatch.setitem(sys.modules, "deep_gemm", DeepGemm())  # type: ignore[misc]


@pytest.mark.usefixtures("deep_gemm")
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_deep_gemm(target: str) -> None:
    call = operands("fp8-blocks", 130, 192, 640)
    a, w = call["a"], call["b"].T
    args = matmul_args(a, call["b"], plain_result(torch.bfloat16), a_codes=a.rowwise, b_codes=w.rowwise)
    y = filled(130, 192)
    sys.modules["deep_gemm"].scales = torch.int32 if target == "sm_100" else torch.float32  # type: ignore[attr-defined]
    multiply("deep_gemm", ProductOutputs(Result(y)), args, target)
    near(y, matmul_truth(Call(weft.matmul, call), {})["y"])  # type: ignore[arg-type]


@pytest.mark.usefixtures("deep_gemm")
def test_deep_gemm_of_groups() -> None:
    """Padding and empty groups become zeros."""
    for seed in ("a", "b"):
        p = problem("fp8-blocks", 5, 128, seed)
        y = filled(len(p["x"]), 256)
        multiply_groups("deep_gemm", ProductOutputs(Result(y)), groups_of(p))
        call = {name: p[name] for name in ("x", "w", "ends", "align")}
        near(y, grouped_matmul_truth(Call(weft.grouped_matmul, call), {})["y"])  # type: ignore[arg-type]


def chosen(args: MatmulArgs | GroupedArgs, target: str) -> str:
    with weft.record_engines() as used:
        choose = choose_engine if isinstance(args, MatmulArgs) else choose_grouped_engine
        engine = choose(args, Capabilities.of(target))  # type: ignore[operator]
    assert [one.engine for one in used] == [engine]
    return engine  # type: ignore[no-any-return]


@pytest.mark.usefixtures("deep_gemm")
def test_chosen_engines() -> None:
    """The first engine of the table that supports the call is chosen."""
    blocks = on_meta("fp8-blocks")
    assert chosen(blocks, "sm_90") == chosen(blocks, "sm_100") == "deep_gemm"
    assert chosen(blocks, "sm_120") == "weft"
    assert chosen(on_meta("fp8-blocks", k=528), "sm_90") == "torch"
    assert chosen(on_meta("fp8-blocks", m=254, k=528), "sm_90") == "weft"  # cuBLASLt needs a multiple of 4
    assert chosen(blocks._replace(factor=2.0), "sm_90") == "weft"
    loose = [codes._replace(format="e4m3:1x128:te") for codes in (blocks.a_codes, blocks.b_codes)]
    loose[1] = loose[1]._replace(format="e4m3:128x128:te")
    args = blocks._replace(a_codes=loose[0], b_codes=loose[1])  # scales that are not powers of two
    assert (chosen(args, "sm_90"), chosen(args, "sm_100")) == ("deep_gemm", "weft")
    for pair in ("int8-row", "int8-tensor", "nvfp4", "mxfp8"):
        assert chosen(on_meta(pair), "sm_100") == "torch", pair
        assert chosen(on_meta(pair), "sm_120") == "weft", pair
        assert chosen(on_meta(pair, n=388 if pair[:4] != "int8" else 387), "sm_100") == "weft", pair
    assert chosen(on_meta("nvfp4", k=528), "sm_100") == "weft"  # rows have 264 bytes
    assert chosen(on_meta("int8-row", m=65), "sm_90") == "weft"
    e5m2 = on_meta("fp8-tensor")
    assert chosen(e5m2, "sm_90") == "torch"
    both = e5m2.b_codes._replace(format="e5m2:tensor:te")
    assert chosen(e5m2._replace(b_codes=both), "sm_90") == "weft"


@pytest.mark.usefixtures("deep_gemm")
def test_chosen_engines_of_grouped_products() -> None:
    def plain(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    x, w, ends = plain(512, 256), plain(4, 384, 256), torch.empty(4, dtype=torch.int32, device="meta")
    args = grouped_args(x, w, Groups(ends, 16), plain_result(torch.bfloat16))
    assert chosen(args, "sm_100") == "torch"
    assert chosen(args._replace(w=plain(4, 256, 384).mT), "sm_100") == "torch"
    assert chosen(args, "sm_90") == "weft"  # public figures favor Weft there
    for other in (
        {"x": plain(512, 257)[:, :256]},
        {"x": plain(512, 264)[:, 4:260]},
        {"w": plain(4, 388, 256)[:, :380]},
        {"w": plain(4, 384, 260)[..., :256]},
        {"w": plain(4 * 384 * 260).as_strided((4, 384, 256), (384 * 256 + 4, 256, 1))},
        {"activation": "silu"},
        {"result": plain_result(torch.float32)},
    ):
        assert chosen(args._replace(**other), "sm_100") == "weft", other
    with recording("sm_90"):
        xq, wq = weft.quantize(x, "1x128"), weft.quantize(w, "128x128")
    blocks = groups_of({"x": xq, "w": wq, "ends": ends, "align": 128})
    assert chosen(blocks, "sm_90") == "deep_gemm"
    assert chosen(blocks._replace(align=64), "sm_90") == "weft"
    assert chosen(blocks._replace(x=plain(500, 256)), "sm_90") == "weft"


def test_missing_libraries_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INSTALLED, "deep_gemm", False)
    assert chosen(on_meta("fp8-blocks"), "sm_90") == "torch"
    assert chosen(on_meta("fp8-blocks"), "sm_100") == "weft"
    assert "deep_gemm if it were installed: fp8 1x128 x 128x128" in products_on("sm_90")
    with pytest.raises(ValueError, match="lacks an installation"):
        weft.matmul(**operands("fp8-blocks", 5, 64, 128) | {"engine": "deep_gemm"})
    monkeypatch.setitem(INSTALLED, "deep_gemm", True)
    assert "deep_gemm: fp8 1x128 x 128x128" in products_on("sm_90")
    with pytest.raises(ValueError, match="lacks CPU support"):
        weft.matmul(**operands("fp8-blocks", 5, 64, 128) | {"engine": "deep_gemm"})


def test_a_graph_keeps_its_engine() -> None:
    call = operands("bf16", 70, 48, 128) | {"engine": "auto"}
    compiled = torch.compile(weft.matmul, fullgraph=True, backend="aot_eager")
    with weft.record_engines() as used:
        compiled(**call)
        compiled(**call | {"engine": "weft"})
    assert [one.engine for one in used] == ["torch", "weft"]


@pytest.mark.parametrize("pair", ["bf16", "fp8-row", "mxfp8"])
def test_recording_skips_products_of_torch(pair: str) -> None:
    """Kernels are recorded on meta tensors, for which PyTorch lacks some products."""
    with recording("sm_100") as variants, weft.record_engines() as used:
        x, w = (torch.empty(rows, 256, dtype=torch.bfloat16, device="meta") for rows in (128, 512))
        a, b = (
            x if spec is None else weft.quantize(x, spec)
            for x, spec in ((x, EVERY[pair].get("a")), (w, EVERY[pair].get("b")))
        )
        assert weft.matmul(a, b.T).shape == (128, 512)
    assert [one.engine for one in used] == ["torch"]
    assert "matmul_kernel" not in {variant.kernel for variant in variants}

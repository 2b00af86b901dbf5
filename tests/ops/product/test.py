"""Products of every pair of formats, against float64 over random shapes and layouts, and bit for bit."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_loom.testing import words

import weft
from tests.catalogue.layouts import LAYOUTS, far_apart
from tests.support.covering import covering
from weft import Format, QTensor
from weft.lab.families import Call
from weft.lab.families.product import PAIRS, matmul_truth, numbers
from weft.lab.truth import near
from weft.runtime import choosing_for

# Further supported pairs: different elements and blocks, or one operand plain.
MORE: dict[str, dict[str, Any]] = {
    "fp16": {"dtype": torch.float16},
    "tf32": {"dtype": torch.float32, "precision": "tf32"},
    "int8-tensor": {"a": "int8:tensor:te", "b": "int8:tensor:te"},
    "int8-blocks": {"a": "int8:1x128:te", "b": "int8:128x128:te"},
    "e5m2-row": {"a": "e5m2:row:te", "b": "row"},
    "row-tensor": {"a": "row", "b": "tensor"},
    "tensor-row": {"a": "tensor", "b": "row"},
    "blocks-row": {"a": "1x128", "b": "row"},
    "tensor-blocks": {"a": "tensor", "b": "1x128"},
    "squares-blocks": {"a": "128x128", "b": "e5m2:1x128:te"},
    "mx-e5m2": {"a": "e5m2:mx:te", "b": "mx"},
    "mx-mixed": {"a": "mx", "b": "e2m1:mx:te"},
    "weight-row": {"b": "row"},
    "weight-nvfp4": {"b": "nvfp4"},
    "weight-mx": {"b": "mx"},
    "squares-nvfp4": {"a": "nvfp4_16x16", "b": "nvfp4"},
    "weight-nvfp4-squares": {"b": "nvfp4_16x16"},
    "weight-fp32": {"dtype": torch.float32, "b": "1x128"},
    "weight-fp16": {"dtype": torch.float16, "b": "int8:128x128:te"},
    "plain-weight": {"a": "row"},
}
EVERY = PAIRS | MORE


def operands(pair: str, m: int, n: int, k: int, seed: int = 0) -> dict[str, Any]:
    settings = dict(EVERY[pair])
    generator = torch.Generator().manual_seed(seed)
    dtype = settings.pop("dtype", torch.bfloat16)
    a, w = (torch.randn(rows, k, generator=generator).to(dtype) for rows in (m, n))
    formats = settings.pop("a", None), settings.pop("b", None)
    a, w = (x if f is None else weft.quantize(x, f) for x, f in zip((a, w), formats, strict=True))
    return {"a": a, "b": w.T, "engine": "weft", **settings}


def check(**call: Any) -> None:
    """Compare a product with its float64 truth."""
    wanted = matmul_truth(Call(weft.matmul, call), {})["y"]
    near(weft.matmul(**call), wanted)  # type: ignore[arg-type]


# ---- sizes --------------------------------------------------------------------------------------------------


def shapes(count: int, seed: str) -> list[tuple[int, int, int]]:
    """Draw product sizes: few and many rows, one past a tile, K of one and of several blocks, odd and even."""
    draw = random.Random(seed)
    rows = (1, 2, 3, 7, 16, 33, 64, 65, 100, 128, 129, 200)
    cols = (1, 2, 5, 16, 40, 64, 100, 127, 128, 129, 200, 260)
    depths = (1, 2, 15, 16, 31, 32, 64, 100, 127, 128, 129, 255, 256, 272, 384, 400)
    return [(draw.choice(rows), draw.choice(cols), draw.choice(depths)) for _ in range(count)]


def some_shapes(pair: str) -> list[tuple[int, int, int]]:
    return [(5, 200, 272), (129, 40, 384), *shapes(1, pair)]


@pytest.mark.parametrize(("turn", "pair"), enumerate(EVERY), ids=list(EVERY))
def test_one_shape(turn: int, pair: str) -> None:
    """Each pair runs one of several shapes, in turn."""
    check(**operands(pair, *some_shapes(pair)[turn % 3]))


@pytest.mark.slow
@pytest.mark.parametrize("pair", EVERY)
def test_some_shapes(pair: str) -> None:
    for shape in some_shapes(pair):
        check(**operands(pair, *shape))


@pytest.mark.slow
@pytest.mark.parametrize("pair", EVERY)
def test_many_shapes(pair: str) -> None:
    """More than 500 shapes over all pairs."""
    for seed, (m, n, k) in enumerate([*shapes(18, f"more {pair}"), (70, 100, 2880)]):
        check(**operands(pair, m, n, k, seed))


@pytest.mark.parametrize("pair", ["bf16", "fp32", "fp8-blocks", "nvfp4", "weight-int8"])
@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 8), (5, 0, 8), (5, 3, 0), (0, 0, 0)])
def test_empty_products(pair: str, m: int, n: int, k: int) -> None:
    y = weft.matmul(**operands(pair, m, n, k), bias=torch.ones(n))
    assert y.shape == (m, n)
    assert (y == 1).all()


def test_int8_is_exact() -> None:
    a, w = (torch.randint(-127, 128, (rows, 4096), dtype=torch.float32) for rows in (70, 40))
    a[:, 0] = w[:, 0] = 127.0  # so that all scales are 1
    one = {"a": weft.quantize(a, "int8:row:te"), "b": weft.quantize(w, "int8:row:te").T}
    assert torch.equal(one["a"].rowwise.scale, torch.ones(70, 1))  # type: ignore[union-attr]
    wanted = a.long() @ w.long().T
    for rows in (70, 5):  # 5 rows cut K into spans
        got = weft.matmul(one["a"][:rows], one["b"])
        assert torch.equal(got, wanted[:rows].float())


def test_offsets_have_64_bits() -> None:
    a, w = far_apart(4, 96), torch.randn(40, 96).bfloat16()
    columns = a[:, :4]
    for left, right in ((a, w.T), (w, a.T), (w[:, :4], columns)):
        wanted = weft.matmul(left.contiguous(), right.contiguous(), engine="weft")
        assert torch.equal(weft.matmul(left, right, engine="weft"), wanted)


# ---- bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pair", ["bf16", "fp8-row", "fp8-blocks", "mxfp8", "nvfp4", "weight-fp8", "int8-row"]
)
def test_a_row_does_not_depend_on_the_others(pair: str) -> None:
    """`batch_invariant` makes a row's bits independent of the number of rows, though K is cut into spans."""
    call = operands(pair, 150, 40, 2048)
    full = weft.matmul(**call, batch_invariant=True)
    for rows in (1, 2, 33, 64, 65, 149):
        a = call["a"][:rows]
        part = weft.matmul(**call | {"a": a}, batch_invariant=True)
        assert torch.equal(words(part), words(full[:rows])), f"{rows} rows"
    few = weft.matmul(**call | {"a": call["a"][:8]})
    near(few, matmul_truth(Call(weft.matmul, call | {"a": call["a"][:8]}), {})["y"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "pair",
    [
        "bf16",
        "fp8-blocks",
        "mxfp8",
        "nvfp4",
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("fp32", "fp8-row", "int8-blocks", "mxfp4")),
    ],
)
@pytest.mark.parametrize(
    "target", ["sm_90", *(pytest.param(t, marks=pytest.mark.slow) for t in ("sm_80", "sm_120", "gfx950"))]
)
def test_as_launched_on(target: str, pair: str) -> None:
    """Products are right with a GPU's tiles, conversions and descriptors, run on the CPU."""
    with choosing_for(target):
        check(**operands(pair, 130, 260, 400))
        check(**operands(pair, 7, 100, 2048))
        check(**operands(pair, 40, 100, 2048))


@pytest.mark.parametrize("pair", ["mxfp8", "mx-e5m2", "mxfp4", "nvfp4"])
def test_scaled_dots_equal_dots_of_decoded_values(pair: str) -> None:
    """Both multiply the same exact values in the same order, so bits agree."""
    call = operands(pair, 70, 130, 400)
    scaled = weft.matmul(**call, out_dtype=torch.float32)
    decoded = weft.matmul(numbers(call["a"]).float(), numbers(call["b"], of_b=True).float())
    assert (
        torch.equal(scaled, decoded) or pair == "nvfp4"
    )  # nvfp4's global scale is part of the decoded values here
    with choosing_for("sm_80"):
        assert torch.equal(weft.matmul(**call, out_dtype=torch.float32), scaled)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_fnuz_types_give_the_same_products(element: Any) -> None:
    """gfx942's types have another bias and no -0; tested with -0, the largest and smallest values, and NaN."""
    a, w = torch.randn(70, 256), torch.randn(40, 256)
    a[0, 0], w[3] = -0.0, -0.0
    a[1, :3] = torch.tensor([448.0, -448.0, 2.0**-9])
    f = Format("row", element)
    call = {"a": weft.quantize(a, f), "b": weft.quantize(w, f).T, "out_dtype": torch.float32}
    wanted = weft.matmul(**call)
    with choosing_for("gfx942"):
        assert torch.equal(weft.matmul(**call), wanted)
        a[5, 7] = torch.nan
        lost = weft.matmul(weft.quantize(a, f), call["b"])
    assert lost[5].isnan().all()
    assert not lost[:5].isnan().any()


# ---- layouts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_layouts(layout: Any) -> None:
    a, b = torch.randn(2, 70, 64).bfloat16(), torch.randn(2, 64, 48).bfloat16()
    for left, right in ((layout(a), b), (a, layout(b)), (layout(a[0]), layout(b[0])), (layout(a[0]), b[1])):
        wanted = weft.matmul(left.contiguous(), right.contiguous(), engine="weft")
        assert torch.equal(weft.matmul(left, right, engine="weft"), wanted)
    check(a=layout(a[0]), b=layout(b[0]), engine="weft")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((16,), (16,)), ((16,), (16, 5)), ((3, 16), (16,)), ((2, 3, 16), (16,)), ((2, 3, 16), (16, 5)),
        ((16,), (2, 16, 5)), ((2, 3, 16), (2, 16, 5)), ((4, 1, 3, 16), (2, 16, 5)), ((3, 16), (2, 1, 16, 5)),
        ((2, 0, 16), (2, 16, 5)), ((0, 3, 16), (0, 16, 5)),
    ],
)  # fmt: skip
def test_shapes_match_torch(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    left, right = torch.randint(-8, 8, a).float(), torch.randint(-8, 8, b).float()
    assert torch.equal(weft.matmul(left, right), torch.matmul(left, right))
    leaves = [x.clone().requires_grad_() for x in (left, right)]
    twins = [x.clone().requires_grad_() for x in (left, right)]
    weft.matmul(*leaves).square().sum().backward()
    torch.matmul(*twins).square().sum().backward()
    for leaf, twin in zip(leaves, twins, strict=True):
        assert torch.equal(leaf.grad, twin.grad)  # type: ignore[arg-type]


def test_batches_of_few_rows() -> None:
    """Batched products cut K into spans too."""
    a, b = torch.randn(3, 5, 2048).bfloat16(), torch.randn(3, 2048, 40).bfloat16()
    residual = torch.randn(3, 5, 40).bfloat16()
    got = weft.matmul(a, b, residual=residual)
    for i in range(3):
        assert torch.equal(got[i], weft.matmul(a[i], b[i], residual=residual[i]))


@pytest.mark.parametrize("block", ["tensor", "128x128"])
def test_either_copy_works_if_both_hold_the_same_codes(block: Any) -> None:
    """The gradient of x reads the weight's only copy."""
    w = weft.quantize(torch.randn(200, 260), block)
    dy = weft.quantize(torch.randn(70, 200), "1x128" if block == "128x128" else block)
    check(a=dy, b=w)
    column = weft.quantize(torch.randn(70, 200), block, rowwise=False, columnwise=True)
    other = weft.quantize(torch.randn(40, 200), "1x128" if block == "128x128" else block).T
    check(a=column, b=other)


def test_transposes_of_quantized_matrices() -> None:
    w = weft.quantize(torch.randn(40, 300), "1x128", columnwise=True)
    for transposed in (w.T, w.t(), w.mT, w.transpose(0, 1), w.permute(1, 0), w.transpose(-1, 0)):
        assert isinstance(transposed, QTensor)
        assert transposed.shape == (300, 40)
        assert transposed.rowwise is w.columnwise
        assert transposed.columnwise is w.rowwise
        assert torch.equal(transposed.T.dequantize(), w.dequantize())
    assert not isinstance(weft.quantize(torch.randn(3, 4, 32), "mx").transpose(0, 1), QTensor)


# ---- epilogues ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pair", "rows"), covering(["bf16", "fp8-blocks", "int8-row"], ["spans", "whole"], together=1)
)
def test_epilogues(pair: str, rows: str) -> None:
    (m, k), n = {"spans": (5, 2048), "whole": (70, 256)}[rows], 260
    call = operands(pair, m, n, k)
    bias, residual = torch.randn(n), torch.randn(m, n)
    for more in (
        {"bias": bias, "activation": "gelu", "residual": residual, "alpha": 0.25},
        {"bias": bias, "glu": "silu", "alpha": torch.tensor(0.125), "residual": residual[:, : n // 2]},
        {"activation": "relu2", "residual": residual.bfloat16().T.contiguous().T},
        {"bias": bias.bfloat16(), "activation": "sigmoid", "batch_invariant": True},
    ):
        check(**call, **more, out_dtype=torch.float32)


@pytest.mark.parametrize(
    ("m", "spec"),
    covering(
        [5, 130],
        ["1x128", "mx", "e2m1:mx:te", "row", "tensor", "128x128", "nvfp4", "int8:1x128:te"],
        together=1,
    ),
)
def test_quantized_results_match_quantize(m: int, spec: str) -> None:
    """The product's kernel quantizes formats whose scales lie within its tiles; others are quantized afterwards."""
    call = operands("fp8-blocks", m, 300, 2048)
    plain = weft.matmul(**call, glu="silu")
    for columnwise in (False, True) if spec != "row" else (False,):
        got = weft.matmul(**call, glu="silu", quantize=spec, columnwise=columnwise)
        wanted = weft.quantize(plain, spec, columnwise=columnwise)
        assert isinstance(got, QTensor)
        for mine, its in ((got.rowwise, wanted.rowwise), (got.columnwise, wanted.columnwise)):
            assert (mine is None) == (its is None)
            for part, its_part in zip((mine or ())[:3], (its or ())[:3], strict=True):
                assert (part is None) == (its_part is None)
                assert part is None or torch.equal(words(part), words(its_part))


def test_out_and_accumulate() -> None:
    call = operands("bf16", 70, 40, 128)
    out = torch.randn(70, 40)
    before = out.clone()
    assert weft.matmul(**call, out=out, accumulate=True, out_dtype=torch.float32) is out
    wanted = weft.matmul(**call, residual=before, out_dtype=torch.float32)
    assert torch.equal(out, wanted)
    three = torch.empty(2, 35, 40, dtype=torch.bfloat16)
    assert weft.matmul(call["a"].view(2, 35, 128), call["b"], out=three) is three
    assert torch.equal(three.view(70, 40), weft.matmul(**call))
    few = operands("fp8-blocks", 5, 40, 2048)  # K in spans
    main = torch.randn(5, 40)
    twin = weft.matmul(**few, residual=main.clone(), out_dtype=torch.float32)
    assert torch.equal(weft.matmul(**few, out=main, accumulate=True, out_dtype=torch.float32), twin)


# ---- gradients ------------------------------------------------------------------------------------------------


def test_gradients_pass_straight_through_quantized_operands() -> None:
    x = torch.randn(70, 256, requires_grad=True)
    w = torch.randn(40, 256, requires_grad=True)
    xq, wq = weft.quantize(x, "1x128"), weft.quantize(w, "128x128")
    y = weft.matmul(xq, wq.T)
    dy = torch.randn(70, 40)
    y.backward(dy)
    wanted = weft.matmul(dy, wq.detach().dequantize())
    assert torch.equal(x.grad, wanted)  # type: ignore[arg-type]
    wanted = weft.matmul(xq.detach().dequantize().T, dy).T
    assert torch.allclose(w.grad, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))  # type: ignore[arg-type]


@pytest.mark.parametrize("pair", ["bf16", "fp8-blocks", "nvfp4"])
def test_compiled_is_eager(pair: str) -> None:
    call = operands(pair, 5, 48, 256)
    function = torch.compile(weft.matmul, fullgraph=True)
    assert torch.equal(function(**call, activation="silu"), weft.matmul(**call, activation="silu"))


def test_twice_differentiable() -> None:
    a, b = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradgradcheck(lambda a, b: weft.matmul(a, b), (a, b))


# ---- PyTorch's own products ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pair", ["fp8-blocks", *(pytest.param(p, marks=pytest.mark.slow) for p in ("int8-row", "mxfp8"))]
)
def test_torch_multiplies_codes(pair: str) -> None:
    """`@` and `F.linear` of two quantized matrices run `matmul`, with the gradients of the decoded matrices."""
    call = operands(pair, 6, 48, 256)
    a, w, bias = call["a"], call["b"].T, torch.randn(48).bfloat16()
    wanted = weft.matmul(a, w.T, engine="weft")
    with_bias = weft.matmul(a, w.T, bias=bias, engine="weft")
    linear = torch.nn.functional.linear
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    with weft.record_engines() as used:
        assert torch.equal(a @ w.T, wanted)
        assert torch.equal(linear(a.view(2, 3, 256), w).view(6, 48), wanted)
        assert torch.equal(linear(a, w, bias), with_bias)
        assert torch.equal(compiled(a, w, bias), with_bias)
    assert len(used) == 4
    leaves = [x.dequantize().requires_grad_() for x in (a, w)]
    quantized = [weft.quantize(x, q.spec) for x, q in zip(leaves, (a, w), strict=True)]
    dy = torch.randn(6, 48).bfloat16()
    linear(*quantized).backward(dy)
    for leaf, right in zip(leaves, (dy @ w.dequantize(), dy.T @ a.dequantize()), strict=True):
        assert torch.equal(leaf.grad, right)


def test_torch_dequantizes_unsupported_pairs() -> None:
    """Unsupported formats, a missing copy, different dtypes, or a plain operand fall back to dequantization."""
    a, w = _plain(6, 64), _plain(16, 64)
    blocks, mx = weft.quantize(a, "1x128"), weft.quantize(w, "mx")
    columns = weft.quantize(w, "mx", rowwise=False, columnwise=True)
    row = weft.quantize(w, "row")
    with weft.record_engines() as used:
        for left, right in ((blocks, mx), (weft.quantize(a, "mx"), columns), (a, row), (blocks, w)):
            values = [x.dequantize() if isinstance(x, QTensor) else x for x in (left, right)]
            assert torch.equal(left @ right.T, values[0] @ values[1].T)
        scaled = torch.addmm(torch.ones(16).bfloat16(), blocks, row.T, alpha=2)
        assert torch.equal(
            scaled, torch.addmm(torch.ones(16).bfloat16(), blocks.dequantize(), row.dequantize().T, alpha=2)
        )
        with pytest.raises(RuntimeError, match="dtype"):
            blocks.float() @ row.T
    assert not used


# ---- mistakes -------------------------------------------------------------------------------------------------


def _plain(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(dtype)


ROTATED = "e2m1:nvfp4:te:hadamard-columnwise"


def _rotated(*shape: int) -> QTensor:
    return weft.quantize(_plain(*shape), ROTATED, columnwise=True)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: weft.matmul(_plain(4, 8), _plain(5, 8)), "Pass a weight .* as w.T"),
        (lambda: weft.matmul(_plain(4, 8), _plain(8, 5, dtype=torch.float16)), "one dtype"),
        (lambda: weft.matmul(_plain(4, 8), _plain(8, 5), precision="tf32"), "requires fp32 operands"),
        (lambda: weft.matmul(_plain(4, 8), _plain(8, 5), precision="high"), "must be 'ieee'"),
        (lambda: weft.matmul(_plain(4, 8), _plain(8, 5), activation="swish"), "must be one of silu"),
        (lambda: weft.matmul(_plain(4, 8), _plain(8, 5), glu="silu"), "2N"),
        (lambda: weft.matmul(_plain(4, 8), _plain(8, 6), glu="silu", activation="silu"), "give one"),
        (lambda: weft.matmul(_plain(4, 8), _plain(8, 5), accumulate=True), "out="),
        (
            lambda: weft.matmul(_plain(4, 8), _plain(8, 5), residual=torch.ones(4, 5).double()),
            "residual must be",
        ),
        (lambda: weft.matmul(_plain(4, 8), _plain(8, 5), bias=_plain(4)), "shape"),
        (lambda: weft.matmul(_plain(4, 8), _plain(8, 5), residual=_plain(4)), "shape"),
        (lambda: weft.matmul(_plain(4, 8), weft.quantize(_plain(8, 5), "1x128")), "column-wise"),
        (
            lambda: weft.matmul(weft.quantize(_plain(4, 8), "mx"), weft.quantize(_plain(5, 8), "row").T),
            "one format",
        ),
        (
            lambda: weft.matmul(
                weft.quantize(_plain(4, 8), "128x128"), weft.quantize(_plain(5, 8), "128x128").T
            ),
            "1x128",
        ),
        (
            lambda: weft.matmul(
                weft.quantize(_plain(4, 8), "row"), weft.quantize(_plain(5, 8), "int8:row:te").T
            ),
            "int8",
        ),
        (lambda: weft.matmul(_plain(4, 8, dtype=torch.float16), weft.quantize(_plain(5, 8), "mx").T), "bf16"),
        (lambda: weft.matmul(_plain(2, 4, 8), weft.quantize(_plain(2, 8, 5), "row")), "grouped_matmul"),
        (lambda: weft.matmul(_plain(4, 8), [[1.0]]), "must be a tensor"),
        (lambda: weft.matmul(_rotated(16, 8).T, _plain(16, 8)), "a is rotated along K .* and b is not"),
        (lambda: weft.matmul(_plain(8, 16), _rotated(16, 8)), "b is rotated along K .* and a is not"),
        (
            lambda: weft.matmul(_rotated(16, 8).T, weft.quantize(_plain(16, 8), "nvfp4", columnwise=True)),
            "a is rotated along K .* and b is not",
        ),
    ],
)
def test_mistakes_raise_clear_errors(call: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        call()


@pytest.mark.parametrize("m", [48, 70], ids=["whole", "padded"])
def test_rotated_operands(m: int) -> None:
    """A weight gradient sums over the dimension along which both operands are rotated, so it is the product of the
    rotated values. Its own gradients use values that are rotated back."""
    generator = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(m, n, generator=generator, requires_grad=True) for n in (40, 24))
    xq, dyq = (weft.quantize(t, ROTATED, columnwise=True) for t in (x, dy))
    length = -(-m // 16) * 16
    rotated = [
        QTensor((q.shape[1], length), q.dtype, "nvfp4", q.columnwise).dequantize().double() for q in (xq, dyq)
    ]
    wanted = rotated[1] @ rotated[0].T
    dw = weft.matmul(dyq.T, xq, engine="weft")
    assert torch.allclose(dw.double(), wanted, rtol=1e-5, atol=1e-4)
    with weft.backend("reference"):
        assert torch.allclose(weft.matmul(dyq.T, xq).double(), wanted, rtol=1e-5, atol=1e-4)
    exact = dy.double().T @ x.double()
    assert (dw - exact).norm() < 0.2 * exact.norm()
    upstream = torch.randn(24, 40, generator=generator)
    dw.backward(upstream)
    assert x.grad is not None
    back = QTensor(dyq.shape, dyq.dtype, dyq.format, None, dyq.columnwise).dequantize()
    assert torch.allclose(x.grad, back @ upstream, rtol=1e-5, atol=1e-4)


def test_rotated_operands_compiled() -> None:
    def call(x: Tensor, dy: Tensor) -> Tensor:
        xq, dyq = (weft.quantize(t, ROTATED, columnwise=True) for t in (x, dy))
        return weft.matmul(dyq.T, xq)

    def decode(x: Tensor, dy: Tensor) -> Tensor:
        q = weft.quantize(x, ROTATED, rowwise=False, columnwise=True)
        return dy.T @ q.dequantize()

    x, dy = torch.randn(40, 32), torch.randn(40, 16)
    for function in (call, decode):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, dy), function(x, dy))


def test_every_pair_multiplies_or_raises() -> None:
    """Every pair of formats, or a format and a plain operand, multiplies or raises an error that says what to do."""
    x, w = torch.randn(5, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    specs = [None, *sorted({f"{f.element}:{f.block}:te" for f in Format.all()})]
    errors = []
    with weft.backend("reference"):
        left, right = ([t if spec is None else weft.quantize(t, spec) for spec in specs] for t in (x, w))
        for a, b in itertools.product(left, right):
            try:
                assert weft.matmul(a, b.T).shape == (5, 16)
            except ValueError as error:
                errors.append(str(error))
    assert 50 < len(errors) < len(specs) ** 2 - 80
    assert all("uantize" in error for error in errors), errors

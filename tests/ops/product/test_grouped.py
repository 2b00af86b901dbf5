"""Grouped products, against float64 over random groups and bit for bit, including padding."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_loom.testing import words

import weft
from weft import QTensor
from weft.lab.families import Call
from weft.lab.families.product import grouped_matmul_truth, grouped_wgrad_truth, spans
from weft.lab.truth import Near, near
from weft.runtime import choosing_for

# Formats of rows, weights and gradients; None if unquantized.
PAIRS: dict[str, tuple[str | None, str | None, str | None]] = {
    "bf16": (None, None, None),
    "fp8-blocks": ("1x128", "128x128", "1x128"),
    "mxfp8": ("mx", "mx", "mx"),
    "nvfp4": ("nvfp4", "nvfp4", "nvfp4"),
    "fp8-row": ("row", "row", "row"),
    "fp8-tensor": ("tensor", "tensor", "e5m2:tensor:te"),
    "int8-row": ("int8:row:te", "int8:row:te", "int8:row:te"),
    "weight-fp8": (None, "128x128", None),
    "weight-int4": (None, "int4:1x128:te", None),
    "weight-mxfp4": (None, "e2m1:mx:te", None),
}
N, K = 256, 128  # multiples of 128, as 128x128 weights need


def random_ends(draw: random.Random, groups: int, align: int, most: int) -> tuple[Tensor, int]:
    """Draw ends of groups, including empty and one-row groups, and a number of rows that may exceed the last end."""
    ends, begin = [], 0
    for _ in range(groups):
        end = begin + draw.choice((0, 0, 1, 7, most // 4, most, draw.randrange(most)))
        ends.append(max(end, ends[-1] if ends and end == begin else 0))
        begin = -(-end // align) * align
    spare = draw.choice((0, 1, 130))
    return torch.tensor(ends, dtype=draw.choice((torch.int32, torch.int64))), begin + spare


def rows_of(ends: Tensor, rows: int, align: int) -> Tensor:
    """Return a mask [rows] of the rows that belong to a group."""
    real = torch.zeros(rows, dtype=torch.bool)
    for _, begin, end in spans({"ends": ends, "align": align}):
        real[begin:end] = True
    return real


def quantized(x: Tensor, spec: str | None, **copies: bool) -> Tensor:
    return x if spec is None else weft.quantize(x, spec, **copies)


def problem(pair: str, groups: int, align: int, seed: str, n: int = N, k: int = K) -> dict[str, Any]:
    """Draw rows, gradients and weights. Padding is NaN in plain operands and zero in quantized ones."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    ends, rows = random_ends(draw, groups, align, 150)
    real = rows_of(ends, rows, align)
    x_spec, w_spec, dy_spec = PAIRS[pair]
    x, dy = (torch.randn(rows, width, generator=generator).bfloat16() for width in (k, n))
    w = torch.randn(groups, n, k, generator=generator).bfloat16() / 8
    for operand, spec in ((x, x_spec), (dy, dy_spec)):
        operand[~real] = torch.nan if spec is None else 0.0
    return {
        "x": quantized(x, x_spec, columnwise=True),
        "dy": quantized(dy, dy_spec, columnwise=True),
        "w": quantized(w, w_spec, columnwise=True),
        "ends": ends,
        "align": align,
    }


def check(**call: Any) -> None:
    """Compare a product with its truth; `out` starts as NaN, so padding, empty groups and tails must be written."""
    call = {"engine": "weft", **call}
    wanted = grouped_matmul_truth(Call(weft.grouped_matmul, call), {})["y"]
    out = torch.full(wanted.truth.shape, torch.nan, dtype=call["x"].dtype)  # type: ignore[union-attr]
    assert weft.grouped_matmul(**call, out=out) is out
    near(out, wanted)  # type: ignore[arg-type]


def check_wgrad(**call: Any) -> None:
    call = {"engine": "weft", **call}
    wanted = grouped_wgrad_truth(Call(weft.grouped_wgrad, call), {})["y"]
    out = torch.full(wanted.truth.shape, torch.nan)  # type: ignore[union-attr]
    assert weft.grouped_wgrad(**call, out=out) is out
    near(out, wanted)  # type: ignore[arg-type]
    near(weft.grouped_wgrad(**call), wanted)  # type: ignore[arg-type]


def check_all(pair: str, groups: int, align: int, seed: str) -> None:
    """Check the product and the products of both gradients."""
    p = problem(pair, groups, align, seed)
    shared = {"ends": p["ends"], "align": align}
    check(x=p["x"], w=p["w"], **shared)
    check(x=p["dy"], w=p["w"], transpose=True, **shared)
    if PAIRS[pair][1] is None or PAIRS[pair][0] is not None:
        check_wgrad(dy=p["dy"], x=p["x"], **shared)


# ---- groups -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS)
def test_some_groups(pair: str) -> None:
    check_all(pair, 5, 128, pair)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_many_groups(pair: str) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        check_all(pair, draw.choice((1, 2, 3, 9, 33)), 128, f"{pair} {seed}")


@pytest.mark.parametrize("align", [1, 8, 96])
def test_groups_begin_anywhere(align: int) -> None:
    check_all("bf16", 7, align, str(align))
    p = problem("fp8-row", 7, align, str(align))  # scales without blocks along the rows
    check_wgrad(dy=p["dy"], x=p["x"], ends=p["ends"], align=align)


def test_more_groups_than_are_read_at_a_time() -> None:
    p = problem("bf16", 300, 1, "many", n=24, k=16)
    check(x=p["x"], w=p["w"], ends=p["ends"])
    check_wgrad(dy=p["dy"], x=p["x"], ends=p["ends"])


@pytest.mark.parametrize("ends", [[0, 0, 0], [70, 70, 70], [0, 0, 70], [3, 50, 70]])
def test_distributions_of_rows(ends: list[int]) -> None:
    x, dy = torch.randn(70, 24).bfloat16(), torch.randn(70, 40).bfloat16()
    w = torch.randn(3, 40, 24).bfloat16()
    check(x=x, w=w, ends=torch.tensor(ends))
    check_wgrad(dy=dy, x=x, ends=torch.tensor(ends))


def test_an_empty_group_may_begin_past_the_rows() -> None:
    """The first group's rows are not padded, so the second group would begin at row 128."""
    x, dy = torch.randn(70, 24).bfloat16(), torch.randn(70, 40).bfloat16()
    check_wgrad(dy=dy, x=x, ends=torch.tensor([67, 67]), align=64)
    check_wgrad(dy=dy, x=x, ends=torch.tensor([67, 70]), align=128)


@pytest.mark.parametrize(
    ("rows", "n", "k", "groups"), [(0, 5, 8, 3), (5, 0, 8, 3), (5, 3, 0, 3), (5, 3, 8, 0)]
)
def test_empty_products(rows: int, n: int, k: int, groups: int) -> None:
    ends = torch.full((groups,), rows, dtype=torch.int32)
    y = weft.grouped_matmul(torch.randn(rows, k), torch.randn(groups, n, k), ends)
    assert y.shape == (rows, n)
    assert not y.any() or k * groups
    dw = weft.grouped_wgrad(torch.randn(rows, n), torch.randn(rows, k), ends)
    assert dw.shape == (groups, n, k)
    assert not dw.any() or rows


@pytest.mark.parametrize("pair", ["1x128", "mx"])
def test_blocks_that_restart_at_groups(pair: str) -> None:
    """`glu` restarts the blocks of column-wise copies at groups; align need not be a multiple of 128."""
    draw = random.Random(pair)
    ends, rows = random_ends(draw, 5, 16, 150)
    real = rows_of(ends, rows, 16)
    gate = torch.randn(rows, 256).bfloat16()
    gate[~real] = 0
    operands = [
        weft.glu(part, ends=ends, align=16, quantize=pair, columnwise=True) for part in (gate, gate.flip(1))
    ]
    got = weft.grouped_wgrad(*operands, ends, align=16, out_dtype=torch.float32)
    for group, begin, end in spans({"ends": ends, "align": 16}):
        # A group's codes equal those of `glu` on its rows alone.
        alone = [
            weft.glu(part[begin:end], quantize=pair, columnwise=True).columnwise  # type: ignore[union-attr]
            for part in (gate, gate.flip(1))
        ]
        if begin == end:
            assert not got[group].any()
            continue
        shape = (end - begin, 128)
        left, right = (QTensor(shape, torch.bfloat16, pair, None, copy) for copy in alone)
        call = {"dy": left, "x": right, "ends": torch.tensor([end - begin])}
        wanted = grouped_wgrad_truth(Call(weft.grouped_wgrad, call), {})["y"]
        assert isinstance(wanted, Near)
        near(got[group], Near(wanted.truth[0], wanted.noise[0]))


# ---- bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", ["bf16", "fp8-blocks"])
def test_a_row_depends_on_its_group_alone(pair: str) -> None:
    """A row's bits do not depend on where its group begins, on other groups, or on empty groups."""
    x_spec, w_spec, _ = PAIRS[pair]
    x, w = torch.randn(300, K).bfloat16(), torch.randn(3, N, K).bfloat16() / 8
    ends = torch.tensor([100, 140, 300])
    call = {"engine": "weft"}
    full = weft.grouped_matmul(quantized(x, x_spec), quantized(w, w_spec), ends, **call)  # type: ignore[arg-type]
    order = torch.cat([torch.arange(140, 300), torch.arange(100, 140), torch.arange(100)])
    others = torch.stack([w[2], torch.zeros_like(w[0]), w[1], w[0]])
    moved = weft.grouped_matmul(
        quantized(x[order], x_spec),
        quantized(others, w_spec),
        torch.tensor([160, 160, 200, 300]),
        **call,  # type: ignore[arg-type]
    )
    assert torch.equal(words(full[order]), words(moved))
    repeated = weft.grouped_matmul(quantized(x, x_spec), quantized(w, w_spec), ends, **call)  # type: ignore[arg-type]
    assert torch.equal(words(full), words(repeated))


@pytest.mark.parametrize(
    "pair", ["bf16", "fp8-blocks", *(pytest.param(p, marks=pytest.mark.slow) for p in ("mxfp8", "nvfp4"))]
)
@pytest.mark.parametrize(
    "target",
    ["sm_90", *(pytest.param(t, marks=pytest.mark.slow) for t in ("sm_80", "sm_100", "sm_120", "gfx950"))],
)
def test_as_launched_on(target: str, pair: str) -> None:
    """Grouped products are right with a GPU's tiles, conversions and descriptors, run on the CPU."""
    with choosing_for(target):
        check_all(pair, 4, 128, "gpu")
        p = problem(pair, 40, 1, "few rows for each")
        few = {"w": p["w"], "ends": torch.arange(1, 41), "align": 1}
        check(x=p["x"][:40], **few)


# ---- options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", ["fp8-blocks", pytest.param("bf16", marks=pytest.mark.slow)])
def test_epilogues(pair: str) -> None:
    p = problem(pair, 4, 128, "follows")
    call = {"x": p["x"], "w": p["w"], "ends": p["ends"], "align": 128}
    bias = torch.randn(4, N)
    check(**call, bias=bias, activation="gelu")
    check(**call, bias=bias.bfloat16(), glu="silu")
    plain = weft.grouped_matmul(**call, glu="silu", engine="weft")
    for spec in ("1x128", "mx", "row", "nvfp4"):
        got = weft.grouped_matmul(**call, glu="silu", quantize=spec)
        wanted = weft.quantize(plain, spec)
        assert isinstance(got, QTensor)
        for part, its in zip((got.rowwise or ())[:3], (wanted.rowwise or ())[:3], strict=True):
            assert part is None or torch.equal(words(part), words(its))


@pytest.mark.parametrize("pair", ["bf16", "fp8-blocks"])
def test_gathered_rows_match_permuted_rows(pair: str) -> None:
    x_spec, w_spec, _ = PAIRS[pair]
    x, w = torch.randn(70, K).bfloat16(), torch.randn(4, N, K).bfloat16() / 8
    experts = torch.randint(-1, 4, (70, 3))  # some slots are empty
    rows = weft.row_map(experts, 4, align=16)
    call = {"ends": rows.ends, "align": 16, "engine": "weft"}
    tokens, weights = quantized(x, x_spec), quantized(w, w_spec)
    gathered = weft.grouped_matmul(tokens, weights, gather=rows, **call)
    assert torch.equal(gathered, weft.grouped_matmul(weft.permute(tokens, rows), weights, **call))
    check(x=tokens, w=weights, gather=rows, **call)
    # If groups include their padding, padding rows have no token.
    padded = weft.grouped_matmul(tokens, weights, gather=rows, **call | {"ends": rows.offsets})
    assert torch.equal(padded, gathered)


def test_accumulate() -> None:
    p = problem("bf16", 4, 8, "accumulate")
    main = torch.randn(4, N, K)
    before = main.clone()
    call = {"dy": p["dy"], "x": p["x"], "ends": p["ends"], "align": 8}
    wanted = grouped_wgrad_truth(Call(weft.grouped_wgrad, call | {"out": before, "accumulate": True}), {})[
        "y"
    ]
    assert weft.grouped_wgrad(**call, out=main, accumulate=True) is main
    near(main, wanted)  # type: ignore[arg-type]
    empty = weft.grouped_wgrad(**call | {"ends": p["ends"] * 0}, out=main.clone(), accumulate=True)
    assert torch.equal(empty, main)


def test_engines() -> None:
    """On a CPU PyTorch computes one product per group, with zeros in padding."""
    p = problem("bf16", 5, 16, "engines")
    call = {"x": p["x"], "w": p["w"], "ends": p["ends"], "align": 16}
    with weft.record_engines() as used:
        check(**call, engine="torch")
        weft.grouped_matmul(**call)
        weft.grouped_matmul(**call, bias=torch.ones(5, N))
        check_wgrad(dy=p["dy"], x=p["x"], ends=p["ends"], align=16, engine="auto")
    assert [u.engine for u in used] == ["torch", "torch", "weft", "weft", "torch"]
    assert used[0].pair == "grouped bf16"


# ---- gradients ----------------------------------------------------------------------------------------------


def test_gradients() -> None:
    """float64 gradients of every argument match finite differences, with gathered rows."""
    rows = weft.row_map(torch.tensor([[0, 2], [1, 0], [2, -1]]), 3, align=2)
    x, w = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 6, 4, dtype=torch.float64)
    bias = torch.randn(3, 6, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (x, w, bias)]

    def function(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return weft.grouped_matmul(x, w, rows.ends, align=2, gather=rows, bias=bias, glu="silu")

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("pair", ["bf16", "fp8-blocks"])
def test_compiled_is_eager(pair: str) -> None:
    p = problem(pair, 3, 128, "compiled")
    x_spec, w_spec, _ = PAIRS[pair]
    x = torch.randn(300, K).bfloat16()
    ends = torch.tensor([40, 140, 256 + 9])

    def function(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        x = quantized(x, x_spec)
        return weft.grouped_matmul(x, quantized(w, w_spec), ends, align=128, activation="silu")

    w = p["w"].dequantize() if isinstance(p["w"], QTensor) else p["w"]
    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        leaves = [t.detach().clone().requires_grad_() for t in (x, w)]
        y = call(*leaves, ends)
        results.append([y, *torch.autograd.grad(y, leaves, torch.ones_like(y))])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


# ---- mistakes -----------------------------------------------------------------------------------------------


def _plain(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


_ENDS = torch.tensor([3, 5])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: weft.grouped_matmul(_plain(5, 8), _plain(2, 8, 4), _ENDS), "do not fit together"),
        (lambda: weft.grouped_matmul(_plain(5, 8), _plain(3, 4, 8), _ENDS), "do not fit together"),
        (lambda: weft.grouped_matmul(_plain(5, 8), _plain(4, 8), _ENDS), "groups, N, K"),
        (lambda: weft.grouped_matmul(_plain(5, 8), _plain(2, 4, 8), _ENDS.float()), "ends"),
        (lambda: weft.grouped_matmul(_plain(5, 8), _plain(2, 4, 8), [3, 5]), "ends"),
        (lambda: weft.grouped_matmul(_plain(5, 8), _plain(2, 4, 8), _ENDS, align=0), "align"),
        (lambda: weft.grouped_matmul(_plain(5, 8), _plain(2, 5, 8), _ENDS, glu="silu"), "2N"),
        (lambda: weft.grouped_matmul(_plain(5, 8), _plain(2, 4, 8).half(), _ENDS), "one dtype"),
        (lambda: weft.grouped_matmul(_plain(5, 8), weft.quantize(_plain(2, 4, 8), "128x128"), _ENDS), "two groups"),
        (
            lambda: weft.grouped_matmul(_plain(5, 4), weft.quantize(_plain(2, 4, 8), "row"), _ENDS, transpose=True),
            "column-wise",
        ),
        (lambda: weft.grouped_matmul(_plain(5, 8), _plain(2, 4, 8), _ENDS, bias=_plain(4)), "shape"),
        (lambda: weft.grouped_matmul(_plain(5, 8), _plain(2, 4, 8), _ENDS, engine="torch", bias=_plain(2, 4)), "lacks"),
        (lambda: weft.grouped_wgrad(_plain(5, 8), _plain(4, 8), _ENDS), "one device"),
        (lambda: weft.grouped_wgrad(_plain(5, 8), _plain(5, 8), _ENDS, accumulate=True), "out="),
        (
            lambda: weft.grouped_wgrad(
                _plain(5, 8), _plain(5, 8), _ENDS, out=_plain(2, 8, 8).double(), accumulate=True
            ),
            "out must be bfloat16",
        ),
        (
            lambda: weft.grouped_wgrad(
                *(weft.quantize(_plain(5, 8), "mx", columnwise=True) for _ in range(2)), _ENDS
            ),
            "align=32",
        ),
        (
            lambda: weft.grouped_wgrad(*(weft.quantize(_plain(5, 8), "1x128") for _ in range(2)), _ENDS, align=128),
            "column-wise",
        ),
    ],
)  # fmt: skip
def test_mistakes_raise_clear_errors(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()

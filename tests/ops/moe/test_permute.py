"""Permute and unpermute beyond the catalogue's checks: unusual routings, pads, quantized rows, and a layer."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton_loom
from torch import Tensor
from triton_loom.testing import EPS32, check

import weft
from tests.catalogue.calls import arguments_of, opcheck
from tests.catalogue.layouts import LAYOUTS, far_apart
from tests.support.covering import covering
from weft import Format, QTensor, RowMap
from weft.lab.calls import assert_same, results
from weft.lab.families import Call, for_op
from weft.lab.families.permute import permute_truth, row_map_truth, unpermute_truth
from weft.lab.truth import near
from weft.ops.common.results import plain_result
from weft.ops.moe.permute.arguments import (
    PermuteArgs,
    UnpermuteArgs,
    UnpermuteBackwardArgs,
    UnpermuteGradients,
)
from weft.ops.moe.permute.permute import permute_op, unpermute_op
from weft.quant import PLAIN, Codes
from weft.runtime import choosing_for, recording


def routing(tokens: int, slots: int, experts: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).topk(slots).indices


def layer(
    tokens: int = 37, slots: int = 3, experts: int = 7, align: int = 8, cols: int = 96, dtype: Any = torch.bfloat16
) -> tuple[Tensor, RowMap, Tensor]:  # fmt: skip
    """Return tokens, their row map, and their probabilities; one expert has no tokens, one token no experts."""
    chosen = routing(tokens, slots, experts - 1)
    chosen[chosen == 2] = experts - 1
    chosen[tokens // 2] = -1
    rows = weft.row_map(chosen, experts, align=align)
    assert rows.counts[2] == 0
    return torch.randn(tokens, cols).to(dtype), rows, torch.rand(tokens, slots)


# ---- the row map ---------------------------------------------------------------------------------------


def check_map(**kwargs: Any) -> RowMap:
    """Check kernels and reference against the truth, and return the row map."""
    call = Call(weft.row_map, kwargs)
    wanted = row_map_truth(call, {})
    for backend in ("triton", "reference"):
        with weft.backend(backend):  # type: ignore[arg-type]
            rows: RowMap = call()
        for name, value in wanted.items():
            assert torch.equal(getattr(rows, name), value), f"{name} of the {backend}"  # type: ignore[arg-type]
        start, ends = 0, []
        for offset in rows.offsets.tolist():
            ends.append(start + int((rows.slot_of_row[start:offset] >= 0).sum()))
            start = offset
        assert rows.ends.tolist() == ends, f"ends of the {backend}"
    return rows


def odd_experts(shape: tuple[int, ...]) -> Tensor:
    """Draw experts with repetitions, -1, and invalid values, some of which are valid in their low 32 bits."""
    drawn = torch.randint(-2, 9, shape)
    return torch.where(torch.rand(shape) < 0.1, drawn + 2**32, drawn)


@pytest.mark.parametrize(
    ("chosen", "experts", "align", "rows"),
    [
        (routing(300, 8, 32), 32, 16, None),
        (routing(700, 6, 300), 300, 128, None),  # more experts than bins, more slots than a program's
        (routing(1, 1, 1), 1, 1, None),
        (odd_experts((501, 3)), 7, 4, None),
        (odd_experts((10, 3, 2)).int(), 7, 3, 57),
        (torch.zeros(1100, 2, dtype=torch.int32), 5, 16, None),  # all slots to the first expert
        (torch.full((600, 2), 4), 5, 16, 1216),  # all to the last, with the exact number of rows
        (torch.full((9, 2), -1), 5, 16, 32),
    ],
    ids=["many", "experts", "one", "odd", "nested", "first", "last", "none"],
)
def test_row_map(chosen: Tensor, experts: int, align: int, rows: int | None) -> None:
    check_map(routing=chosen, experts=experts, align=align, rows=rows)
    with choosing_for("sm_90"):
        check_map(routing=chosen, experts=experts, align=align, rows=rows)


@pytest.mark.parametrize(
    ("tokens", "experts", "slots", "rows"),
    [(70, 9, 4, None), (33, 300, None, None), (1, 2, 2, 5), (600, 5, 7, None)],
)
def test_row_map_of_a_mask(tokens: int, experts: int, slots: int | None, rows: int | None) -> None:
    """Some tokens have more experts than slots, and some masks more slots than experts."""
    mask = torch.rand(tokens, experts) < 0.4
    got = check_map(routing=mask, align=4, slots=slots, rows=rows)
    assert got.experts is not None
    check_map(routing=mask.t().contiguous().t(), align=4, slots=slots, rows=rows)


def test_row_map_of_fewer_tokens_than_align() -> None:
    """Regions are aligned, and the input is unchanged."""
    chosen = routing(3, 2, 4)
    before = chosen.clone()
    rows = check_map(routing=chosen, experts=4, align=16)
    assert torch.equal(chosen, before)
    assert (rows.offsets % 16 == 0).all()
    assert rows.offsets[-1] == 16 * rows.counts.count_nonzero()


def test_rows_that_do_not_fit_are_dropped() -> None:
    """Nothing is written past the end, and counts include the dropped rows."""
    chosen = routing(64, 2, 4)
    rows = check_map(routing=chosen, experts=4, align=16, rows=100)
    assert rows.counts.sum() == 128
    assert rows.offsets.max() == 100
    assert (rows.row_of_slot < 0).any()
    x = torch.randn(64, 32)
    y = weft.permute(x, rows)
    call = Call(weft.unpermute, {"y": y, "rows": rows})
    near(weft.unpermute(y, rows), unpermute_truth(call, {})["y"])  # type: ignore[arg-type]


def gated(x: Tensor) -> Tensor:
    """Compute SwiGLU with PyTorch's own functions."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize(
    ("fit", "dense"),
    covering([(1, 0), (1, 37), (16, 100), (16, 1), (128, 200), (128, 256)], [False, True], together=1),
)
def test_too_few_rows_are_safe_for_every_consumer(fit: tuple[int, int], dense: bool) -> None:
    """Forward and backward neither read nor write past the last row, and a slot without a row counts as zero. Grouped
    products rely on `ends`, which they do not check."""
    align, row_count = fit
    chosen = routing(64, 2, 4).sort(1).values
    mask = torch.zeros(64, 4, dtype=torch.bool).scatter_(1, chosen, True)
    routing_args: dict[str, Any] = (
        {"routing": mask, "slots": 2} if dense else {"routing": chosen, "experts": 4}
    )
    rows = check_map(**routing_args, align=align, rows=row_count)
    has_row = rows.row_of_slot >= 0
    assert 0 <= int(has_row.sum()) < 128
    assert rows.counts.sum() - (rows.slot_of_row >= 0).sum() == 128 - has_row.sum()
    for ends in (rows.ends, rows.offsets):
        assert (ends.diff() >= 0).all()
        assert ends.max() <= row_count
    leaves = [torch.randn(64, 64).requires_grad_(), torch.rand(64, 4 if dense else 2).requires_grad_()]
    dz = torch.randn(64, 32)
    with triton_loom.sanitize() as seen:
        y, probs = weft.permute(leaves[0], rows, leaves[1])
        h = weft.glu(y, probs=probs, ends=rows.ends, align=align)
        got = [weft.unpermute(h, rows)]
        got += torch.autograd.grad(got[0], leaves, dz)
        weft.permute(leaves[0].detach(), rows, quantize="mx", columnwise=align == 128)
    assert seen.launches > 5 or row_count == 0
    x, probs = (leaf.detach().double().requires_grad_() for leaf in leaves)
    weights = (probs.gather(1, chosen) if dense else probs) * has_row
    z = weights.sum(1, keepdim=True) * gated(x)
    wanted = [z, *torch.autograd.grad(z, (x, probs), dz.double())]
    for a, b in zip(got, wanted, strict=True):
        if row_count == 0:
            assert not a.count_nonzero()
        else:  # a dozen roundings of the largest of at most 32 terms
            check(a, b, 32 * EPS32 * b.abs().max())


def test_row_map_is_deterministic() -> None:
    chosen = routing(5000, 4, 16)
    first = weft.row_map(chosen, 16, align=16)
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        for a, b in zip(weft.row_map(chosen, 16, align=16), first, strict=True):
            assert a is b or (torch.equal(a, b) if isinstance(a, Tensor) else a == b)


@pytest.mark.parametrize("shape", [(64, 2), (5, 3), (0, 2)])
@pytest.mark.parametrize("align", [1, 16, 128])
def test_default_rows_are_the_worst_case(shape: tuple[int, int], align: int) -> None:
    """The worst routing, one slot per expert and the others to the last, fills the default rows exactly."""
    slots = shape[0] * shape[1]
    worst = torch.arange(slots).clamp(max=7).view(shape)
    rows = check_map(routing=worst, experts=8, align=align)
    documented = (slots + min(8, slots) * (align - 1)) // align * align
    assert rows.slot_of_row.shape == (documented,)
    assert rows.offsets.tolist()[-1] == documented
    assert weft.row_map.__doc__
    assert (
        "`(tokens * slots + min(experts, tokens * slots) * (align - 1)) // align * align`"
        in weft.row_map.__doc__
    )


def test_ends_are_where_the_pads_begin() -> None:
    rows = weft.row_map(torch.tensor([[3, 0], [3, 1], [0, 3], [-1, 0]]), 5, align=4)
    begin = 0
    for end, offset in zip(rows.ends.tolist(), rows.offsets.tolist(), strict=True):
        assert (rows.slot_of_row[begin:end] >= 0).all()
        assert (rows.slot_of_row[end:offset] == -1).all()
        begin = offset
    assert rows.ends.tolist() == [3, 5, 8, 11, 12]


@pytest.mark.parametrize("dense", [False, True])
def test_every_index_is_written(dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs start as 77, since the suite's poison would be -1 by chance."""
    chosen = torch.rand(40, 6) < 0.3 if dense else odd_experts((400, 3))  # more than a program's
    options = {"slots": 5} if dense else {"experts": 7}
    wanted = weft.row_map(chosen, align=8, rows=2000, **options)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kinds: empty(*size, **kinds).fill_(77))
    for a, b in zip(weft.row_map(chosen, align=8, rows=2000, **options), wanted, strict=True):
        assert a is b or (torch.equal(a, b) if isinstance(a, Tensor) else a == b)


def test_row_map_takes_two_launches() -> None:
    with recording("sm_90") as seen:
        weft.row_map(torch.empty(8192, 8, dtype=torch.int64, device="meta"), 256, align=16)
    assert [variant.kernel for variant in seen] == ["count_kernel", "place_kernel"]


def test_linghe_rows_suffice() -> None:
    """The published shape, 67,584 rows, fits this routing, and hardly fewer rows would do."""
    (workload,) = [w for w in for_op("row_map") if w.name == "linghe/routing"]
    call = workload.make()
    rows = call()
    assert len(rows.slot_of_row) == 67584
    assert (rows.row_of_slot >= 0).all()
    assert rows.counts.sum() == 65536
    assert rows.offsets[-1] > 67300


def test_linghe_rows_suffice_on_a_gpu() -> None:
    """A GPU's launch has more programs than one block of counts."""
    (workload,) = [w for w in for_op("row_map") if w.name == "linghe/routing"]
    call = workload.make()
    with choosing_for("sm_90"):
        got = call()
    for a, b in zip(got, call(), strict=True):
        assert a is b or (torch.equal(a, b) if isinstance(a, Tensor) else a == b)


# ---- rows past every sentinel ----------------------------------------------------------------------------


def test_more_than_2_to_the_20_rows() -> None:
    """More than 1,050,000 rows survive the round trip, with row 1,048,576 in the middle of an expert."""
    tokens, slots, experts = 131_250, 8, 8
    chosen = torch.argsort(torch.rand(tokens, experts), dim=1)
    x = torch.randn(tokens, 8).bfloat16()
    with triton_loom.sanitize() as seen:
        rows = weft.row_map(chosen, experts, align=16)
        y, row_probs = weft.permute(x, rows, torch.rand(tokens, slots))
        back = weft.unpermute(y, rows)
    assert seen.launches >= 4
    assert len(y) > 1_050_000
    slot = rows.slot_of_row.long()
    order = chosen.flatten().argsort(stable=True)
    assert torch.equal(slot[slot >= 0], order)
    assert torch.equal(y[slot >= 0], x[order // slots])
    assert not y[slot < 0].count_nonzero()
    assert not row_probs[slot < 0].count_nonzero()
    assert torch.equal(back, (x.float() * slots).bfloat16())


@pytest.mark.slow
def test_more_than_2_to_the_31_elements() -> None:
    """The last rows are right. The test takes 5 GB."""
    tokens, slots = 2**20 + 2, 8
    x = torch.zeros(tokens, 256, dtype=torch.bfloat16)
    x[-8:] = torch.randn(8, 256).bfloat16()
    q = weft.quantize(x, "row")
    rows = weft.row_map(torch.arange(slots).expand(tokens, slots), slots)
    y = weft.permute(q, rows)
    assert y.rowwise.data.numel() > 2**31
    assert torch.equal(y.rowwise.data[-8:].view(torch.uint8), q.rowwise.data[-8:].view(torch.uint8))
    back = weft.unpermute(y, rows)
    near_zero = (back[-8:].float() - 8 * q.dequantize()[-8:].float()).abs()
    assert (near_zero <= 2.0**-8 * back[-8:].float().abs()).all()
    assert back[-8:].count_nonzero()


# ---- bits ------------------------------------------------------------------------------------------------


def test_permute_moves_bits() -> None:
    """NaN payloads, signed zeros and infinities are preserved, even if the probability is 0."""
    x, rows, probs = layer()
    x.view(torch.int16).random_(-(2**15), 2**15)
    probs.zero_()
    y = weft.permute(x, rows, probs)[0]
    slot = rows.slot_of_row.long()
    has_slot = slot >= 0
    assert torch.equal(y.view(torch.int16)[has_slot], x.view(torch.int16)[slot[has_slot] // 3])
    assert not y.view(torch.int16)[~has_slot].count_nonzero()


def test_a_token_without_rows_is_zero_even_if_others_are_not_finite() -> None:
    _, rows, probs = layer()
    y = torch.full((len(rows.slot_of_row), 96), torch.nan)
    probs[18], probs[0] = torch.inf, torch.nan
    back = weft.unpermute(y, rows, probs)
    assert (rows.row_of_slot[18] < 0).all()
    assert not back[18].count_nonzero()
    assert back[0].isnan().all()


def test_round_trip_multiplies_by_the_slots() -> None:
    x = torch.randn(50, 64).bfloat16()
    rows = weft.row_map(routing(50, 4, 8), 8, align=16)
    assert torch.equal(weft.unpermute(weft.permute(x, rows), rows), x * 4)


def test_sums_are_in_the_order_of_the_slots() -> None:
    """Sums of 2^24, 1 and -2^24 differ between orders."""
    terms = torch.tensor([2.0**24, 1.0, -(2.0**24), 1.0])
    for order in ([0, 1, 2, 3], [0, 2, 1, 3], [1, 3, 0, 2]):
        rows = weft.row_map(torch.tensor([[3, 1, 2, 0]]), 4)
        y = torch.empty(4, 16)
        y[rows.row_of_slot[0].long()] = terms[order][:, None].expand(4, 16)
        wanted = torch.zeros(())
        for i in order:
            wanted = wanted + terms[i]
        assert torch.equal(weft.unpermute(y, rows), wanted.expand(1, 16))


CONFIGURED = [
    ("sm_90", 2100),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("sm_90", 96), ("gfx942", 33), ("sm_80", 1024), ("gfx950", 512))
    ),
]


@pytest.mark.parametrize(("target", "cols"), CONFIGURED)
def test_every_configuration_gives_the_same_bits(target: str, cols: int) -> None:
    """Every configuration sums by a chain of fused multiply-adds."""
    x, rows, probs = layer(cols=cols, align=32)
    gradient = torch.randn(37, cols).bfloat16()

    def everything() -> dict[str, Tensor]:
        leaf = x.clone().requires_grad_()
        y, row_probs = weft.permute(leaf, rows, probs)
        back = weft.unpermute(y * row_probs[:, None].bfloat16(), rows, probs)
        (dx,) = torch.autograd.grad(back, leaf, gradient)
        q = weft.permute(x, rows, quantize="mx", columnwise=True)
        moved = weft.permute(weft.quantize(x, "1x128"), rows)
        plain = {"y": y, "row_probs": row_probs, "back": back, "dx": dx, "q": q, "moved": moved}
        return {
            **plain,
            "codes": weft.permute(x, rows, quantize="1x128"),
            "codes of rows": weft.permute(x, rows, quantize="row"),
            "sum": weft.unpermute(moved, rows, probs),
        }

    wanted = everything()
    with choosing_for(target):
        got = everything()
    assert_same(got, wanted, target)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("probs_dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, probs_dtype: torch.dtype) -> None:
    x, rows, probs = layer(dtype=dtype)
    probs = probs.to(probs_dtype).requires_grad_()
    y, row_probs = weft.permute(x.requires_grad_(), rows, probs)
    assert (y.dtype, row_probs.dtype) == (dtype, probs_dtype)
    call = Call(weft.unpermute, {"y": y.detach().requires_grad_(), "rows": rows, "probs": probs})
    back = call()
    gradient = torch.randn(back.shape).to(dtype)
    expected = unpermute_truth(call, {"y": gradient})
    dy, dprobs = torch.autograd.grad(back, [call["y"], probs], gradient)
    for name, value in {"y": back, "dy": dy, "dprobs": dprobs}.items():
        near(value, expected[name])  # type: ignore[arg-type]
    assert (dy.dtype, dprobs.dtype) == (dtype, probs_dtype)


# ---- quantized rows --------------------------------------------------------------------------------------

QUANTIZED = [("1x128", 301), ("e2m1:mx:torchao", 96), ("row", 1030)]
QUANTIZED_SLOWLY = [
    (format, cols)
    for format in (
        "1x128", "mx", "e2m1:mx:torchao", "e5m2:1x128:deepgemm", "e4m3:1x128:vllm", "int8:1x128:sglang",
        "e5m2:mx:deepgemm", "row", "int8:row:vllm", "e5m2:row:te",
    )
    for cols in (96, 301, 1030)
    if (format, cols) not in QUANTIZED
]  # fmt: skip


@pytest.mark.parametrize(
    ("format", "cols"),
    [*QUANTIZED, *(pytest.param(*case, marks=pytest.mark.slow) for case in QUANTIZED_SLOWLY)],
)
def test_quantized_while_permuting(format: str, cols: int) -> None:
    """Either copy, or both, has the bytes of quantizing afterwards, including pads and tails."""
    x, rows, probs = layer(cols=cols, align=128)
    wanted = weft.quantize(weft.permute(x, rows), format, columnwise=True)
    # With one scale per row there is no columnwise copy: a column's scale would belong to several experts.
    by_columns = [] if wanted.format.block == "row" else [(False, True), (True, True)]
    for rowwise, columnwise in [(True, False), *by_columns]:
        q, row_probs = weft.permute(x, rows, probs, quantize=format, rowwise=rowwise, columnwise=columnwise)
        assert torch.equal(row_probs, weft.permute(x, rows, probs)[1])
        copies = (wanted.rowwise if rowwise else None, wanted.columnwise if columnwise else None)
        expected = QTensor(wanted.shape, wanted.dtype, wanted.format, *copies)
        assert_same({"q": q}, {"q": expected}, f"rowwise {rowwise}, columnwise {columnwise}")
        with weft.backend("reference"):
            again = weft.permute(x, rows, quantize=format, rowwise=rowwise, columnwise=columnwise)
        assert_same({"q": again}, {"q": expected}, "reference")


def scale_bits(codes: Codes) -> Tensor:
    return codes.scale.view(torch.uint8 if codes.scale.element_size() == 1 else torch.int32)


@pytest.mark.parametrize("format", ["1x128", "mx", "row", "e2m1:mx:te", "int8:row:vllm", "e5m2:1x128:sglang"])
@pytest.mark.parametrize("cols", [96, pytest.param(301, marks=pytest.mark.slow)])
def test_quantized_rows_are_moved(format: str, cols: int) -> None:
    """Codes and scales equal those of the token; pads have codes 0 and scale 1."""
    x, rows, probs = layer(cols=cols)
    q = weft.quantize(x, format)
    for backend in ("triton", "reference"):
        with weft.backend(backend):  # type: ignore[arg-type]
            y, row_probs = weft.permute(q, rows, probs)
        assert isinstance(y, QTensor)
        assert (y.shape, y.dtype, y.format) == ((len(rows.slot_of_row), cols), x.dtype, q.format)
        slot = rows.slot_of_row.long()
        has_slot = slot >= 0
        token = slot[has_slot] // 3
        codes, from_codes = y.rowwise.data.view(torch.uint8), q.rowwise.data.view(torch.uint8)
        assert torch.equal(codes[has_slot], from_codes[token])
        assert torch.equal(scale_bits(y.rowwise)[has_slot], scale_bits(q.rowwise)[token])
        assert not codes[~has_slot].count_nonzero()
        assert (y.rowwise.scale[~has_slot].float() == 1.0).all()
        assert y.rowwise.scale.stride() == weft.quantize(y.dequantize(), format).rowwise.scale.stride()
        assert torch.equal(row_probs, weft.permute(x, rows, probs)[1])


@pytest.mark.parametrize(
    "format",
    [
        "1x128",
        "mx",
        "row",
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("e5m2:1x128:te", "int8:row:vllm")),
    ],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_quantized_rows_are_summed(format: str, weighted: bool) -> None:
    """Sums and gradients match those of the dequantized rows."""
    _, rows, probs = layer(cols=301)
    y = torch.randn(len(rows.slot_of_row), 301).bfloat16().requires_grad_()
    probs = probs.requires_grad_()
    q = weft.quantize(y, format)
    call = Call(weft.unpermute, {"y": q, "rows": rows, "probs": probs if weighted else None})
    back = call()
    gradient = torch.randn(back.shape).bfloat16()
    expected = unpermute_truth(call.with_(y=weft.quantize(y.detach(), format)), {"y": gradient})
    got = torch.autograd.grad(back, [y, probs] if weighted else [y], gradient)
    near(back, expected["y"])  # type: ignore[arg-type]
    for name, value in zip(("dy", "dprobs"), got, strict=False):
        near(value, expected[name])  # type: ignore[arg-type]


def test_gradients_pass_through_quantized_rows() -> None:
    """Quantizing before, while or after permuting gives the gradient of permuting alone."""
    x, rows, _ = layer()
    gradient = torch.randn(len(rows.slot_of_row), 96).bfloat16()
    gradients = []
    for f in (
        lambda x: weft.permute(x, rows),
        lambda x: weft.permute(x, rows, quantize="1x128").dequantize(),
        lambda x: weft.permute(x, rows, quantize="row").dequantize(),
        lambda x: weft.permute(weft.quantize(x, "1x128"), rows).dequantize(),
    ):
        leaf = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad(f(leaf), leaf, gradient)[0])
    for other in gradients[1:]:
        assert torch.equal(gradients[0], other)
    call = Call(weft.permute, {"x": x, "rows": rows})
    near(gradients[0], permute_truth(call, {"y": gradient})["dx"])  # type: ignore[arg-type]


# ---- nothing at all --------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [None, "1x128", "mx", "row"])
@pytest.mark.parametrize("row_count", [0, 32])
def test_a_rank_without_tokens(format: str | None, row_count: int) -> None:
    """A rank without tokens gets the promised shapes, and gradients for all inputs."""
    x = torch.randn(0, 96).bfloat16().requires_grad_()
    probs = torch.rand(0, 2).requires_grad_()
    rows = weft.row_map(torch.zeros(0, 2, dtype=torch.int64), 4, align=128, rows=row_count)
    assert rows.offsets.tolist() == rows.counts.tolist() == [0] * 4
    assert rows.slot_of_row.tolist() == [-1] * row_count
    columnwise = format in ("1x128", "mx")
    y, row_probs = weft.permute(x, rows, probs, quantize=format, columnwise=columnwise)
    assert y.shape == (row_count, 96)
    if format is not None:
        zeros = weft.quantize(torch.zeros(row_count, 96).bfloat16(), format, columnwise=columnwise)
        assert_same({"y": y}, {"y": zeros}, "pads")
        y = y.dequantize()
    assert not y.count_nonzero()
    assert not row_probs.count_nonzero()
    weight = torch.randn(96, 96).bfloat16().requires_grad_()
    expert = (y @ weight) * row_probs[:, None].bfloat16()
    back = weft.unpermute(expert, rows, probs)
    assert back.shape == (0, 96)
    grads = torch.autograd.grad(back.sum(), [x, probs, weight])
    assert [g.shape for g in grads] == [(0, 96), (0, 2), (96, 96)]
    assert not grads[2].count_nonzero()


RANK = """
import sys
import torch, weft
import torch.distributed as dist

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
generator = torch.Generator().manual_seed(0)
draw = lambda *shape: torch.randn(shape, generator=generator)
every, weight, logits, gradient = draw(24, 32), draw(4, 32, 32), draw(24, 4), draw(24, 32)


def step(mine):
    x = every[mine].clone().requires_grad_()
    w = weight.clone().requires_grad_()
    probs, chosen = logits[mine].softmax(-1).topk(2)
    rows = weft.row_map(chosen, 4, align=16, rows=128)
    y = weft.permute(x, rows)
    ends = rows.offsets.tolist()
    parts = [y[a:b] @ w[e] for e, (a, b) in enumerate(zip([0, *ends], ends))]
    out = torch.cat([*parts, y.new_zeros(128 - ends[-1], 32)])
    return torch.autograd.grad(weft.unpermute(out, rows, probs), (x, w), gradient[mine])


dx, dw = step(slice(0, 24) if rank == 0 else slice(0, 0))
dist.all_reduce(dw)
assert dx.shape == (24 if rank == 0 else 0, 32)
assert torch.equal(dw, step(slice(0, 24))[1])
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_one_rank_of_two_without_tokens(tmp_path: Path) -> None:
    """The empty rank takes part in the backward and in sums over the ranks."""
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(i), str(tmp_path / "meet")]) for i in (0, 1)]
    try:
        assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


def test_no_columns() -> None:
    _, rows, probs = layer()
    x = torch.randn(37, 0, requires_grad=True)
    y, row_probs = weft.permute(x, rows, probs)
    assert y.shape == (len(rows.slot_of_row), 0)
    assert torch.equal(row_probs, weft.permute(torch.randn(37, 4), rows, probs)[1])
    assert weft.unpermute(y, rows, probs).shape == (37, 0)


# ---- layouts and gradients -------------------------------------------------------------------------------


def moe(x: Tensor, probs: Tensor, rows: RowMap) -> Tensor:
    y, row_probs = weft.permute(x, rows, probs)
    return weft.unpermute(y * row_probs[:, None].to(y.dtype), rows, probs)  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_layouts(layout: Callable[[Tensor], Tensor]) -> None:
    """Any strides of x, rows, probabilities and gradients give the bits of contiguous ones."""
    x, rows, probs = layer()
    y = torch.randn(len(rows.slot_of_row), 96).bfloat16()
    gradient, gradient_rows = torch.randn(37, 96).bfloat16(), torch.randn(y.shape).bfloat16()

    def run(
        x: Tensor, probs: Tensor, y: Tensor, gradient: Tensor, gradient_rows: Tensor
    ) -> dict[str, Tensor]:
        x, probs, y = (t.detach().requires_grad_() for t in (x, probs, y))
        permuted, row_probs = weft.permute(x, rows, probs)
        back = weft.unpermute(y, rows, probs)
        plain = weft.unpermute(y, rows)
        tensors = [permuted, row_probs, back, plain, weft.permute(x, rows, quantize="1x128")]
        tensors += torch.autograd.grad(permuted, x, gradient_rows, retain_graph=True)
        tensors += torch.autograd.grad(row_probs, probs, row_probs.detach()[:1].expand(len(row_probs)))
        tensors += torch.autograd.grad(back, [y, probs], gradient)
        tensors += torch.autograd.grad(plain, y, gradient)
        return {str(i): t for i, t in enumerate(tensors)}

    plain = {"x": x, "probs": probs, "y": y, "gradient": gradient, "gradient_rows": gradient_rows}
    for name, tensor in plain.items():
        laid_out = layout(tensor)
        wanted = run(**{**plain, name: laid_out.contiguous().clone()})
        assert_same(run(**{**plain, name: laid_out}), wanted, f"{layout.__name__} {name}")


def test_offsets_have_64_bits() -> None:
    x = far_apart(4, 96)
    rows = weft.row_map(routing(4, 2, 3), 3, align=128)
    for options in ({}, {"quantize": "1x128"}, {"quantize": "row"}, {"quantize": "mx", "columnwise": True}):
        got = weft.permute(x, rows, **options)
        assert_same({"y": got}, {"y": weft.permute(x.contiguous(), rows, **options)}, "far apart")
    few = weft.row_map(torch.tensor([[0, 1], [1, 0]]), 2)
    y, gradient = far_apart(4, 96), far_apart(2, 96)
    probs = torch.rand(2, 2).requires_grad_()
    results = []
    for values, dy in ((y, gradient), (y.contiguous(), gradient.contiguous())):
        leaf = values.detach().requires_grad_()
        back = weft.unpermute(leaf, few, probs)
        grads = torch.autograd.grad(back, [leaf, probs], dy)
        results.append({str(i): t for i, t in enumerate((back, *grads))})
    assert_same(results[0], results[1], "far apart")


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("used", [("y",), ("row_probs",), ("y", "row_probs")])
def test_gradients_of_a_subset(wanted: tuple[bool, bool], used: tuple[str, ...]) -> None:
    """Any subset of inputs may need gradients, and any subset of outputs may have them."""
    x, rows, probs = layer()
    leaves = [t.clone().requires_grad_(need) for t, need in zip((x, probs), wanted, strict=True)]
    outputs = dict(zip(("y", "row_probs"), weft.permute(leaves[0], rows, leaves[1]), strict=True))
    assert outputs["y"].requires_grad
    gradients = {name: torch.randn(outputs[name].shape).to(outputs[name].dtype) for name in used}
    torch.autograd.backward([outputs[name] for name in used], [*gradients.values()])
    call = Call(weft.permute, {"x": x, "rows": rows, "probs": probs})
    named = {{"row_probs": "output1"}.get(name, name): g for name, g in gradients.items()}
    expected = permute_truth(call, named)
    for leaf, name, need, source in zip(leaves, ("dx", "dprobs"), wanted, ("y", "row_probs"), strict=True):
        if need and source in used:
            near(leaf.grad, expected[name])  # type: ignore[arg-type]
        else:
            assert leaf.grad is None or not leaf.grad.count_nonzero()


def test_carried_and_weighted_together() -> None:
    _, rows, probs = layer()
    y = torch.randn(len(rows.slot_of_row), 96)
    leaves = [t.clone().requires_grad_() for t in (y, probs, torch.randn(len(y)))]
    call = Call(weft.unpermute, dict(zip(("y", "probs", "carried"), leaves, strict=True), rows=rows))
    outputs = call()
    gradients = [torch.randn(t.shape) for t in outputs]
    expected = unpermute_truth(call, {"y": gradients[0], "output1": gradients[1]})
    got = torch.autograd.grad(outputs, leaves, gradients)
    for name, value in zip(("y", "output1", "dy", "dprobs", "dcarried"), (*outputs, *got), strict=True):
        near(value, expected[name])  # type: ignore[arg-type]


@pytest.mark.parametrize("dense", [False, True])
def test_gradcheck_of_the_reference(dense: bool) -> None:
    chosen: Tensor = torch.rand(5, 4) < 0.6 if dense else routing(5, 3, 4)
    rows = weft.row_map(chosen, 4, slots=3 if dense else None, align=4)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(5, 4 if dense else 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(len(rows.slot_of_row), 3, dtype=torch.float64, requires_grad=True)
    carried = torch.randn(len(y), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, p: weft.permute(x, rows, p), (x, probs))
    assert torch.autograd.gradcheck(
        lambda y, p, c: weft.unpermute(y, rows, p, carried=c), (y, probs, carried)
    )
    assert torch.autograd.gradcheck(lambda y, c: weft.unpermute(y, rows, carried=c), (y, carried))
    # Without probabilities each op is the other's backward, so second derivatives exist.
    assert torch.autograd.gradgradcheck(lambda x: weft.permute(x, rows), (x,))
    assert torch.autograd.gradgradcheck(lambda y: weft.unpermute(y, rows), (y,))


# ---- PyTorch's own machinery -----------------------------------------------------------------------------


def through_topk(x: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    probs, chosen = logits.softmax(-1).topk(2)
    rows = weft.row_map(chosen, 6, align=16)
    return (moe(x, probs, rows),)


def through_a_mask(x: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    probs = logits.softmax(-1)
    mask = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, probs.topk(2).indices, True)
    rows = weft.row_map(mask, slots=2, align=16)
    return (moe(x, probs, rows),)


def through_fp8(x: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    probs, chosen = logits.softmax(-1).topk(2)
    rows = weft.row_map(chosen, 6, align=128)
    q = weft.permute(x, rows, quantize="1x128", columnwise=True)
    moved = weft.permute(weft.quantize(x, "mx"), rows)
    return weft.unpermute(q, rows, probs), weft.unpermute(moved.dequantize(), rows)


@pytest.mark.parametrize(
    "function",
    [through_topk, pytest.param(through_a_mask, marks=pytest.mark.slow), through_fp8],
    ids=lambda f: f.__name__,
)
def test_compiled_equals_eager(function: Callable[..., tuple[Tensor, ...]]) -> None:
    """Full graphs with dynamic sizes match eager mode bit for bit, forward and backward."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (20, 33):
        inputs = [torch.randn(tokens, 96).bfloat16(), torch.randn(tokens, 6)]
        runs = []
        for f in (function, compiled):
            leaves = [t.clone().requires_grad_() for t in inputs]
            outputs = f(*leaves)
            torch.manual_seed(5)
            grads = torch.autograd.grad(outputs, leaves, [torch.randn_like(o) for o in outputs])
            runs.append({str(i): t for i, t in enumerate((*outputs, *grads))})
        assert_same(runs[1], runs[0], f"compiled with {tokens} tokens")


def opchecked(name: str, call: Call, **options: Any) -> None:
    leaves = {n: t.detach().requires_grad_() for n, t in call.tensors().items() if t.is_floating_point()}
    opcheck(name, arguments_of(call.with_(**leaves), name, results)[0], **options)


@pytest.mark.parametrize("dense", [False, True])
def test_opcheck(dense: bool) -> None:
    x, rows, probs = layer(dtype=torch.float32)
    if dense:
        mask = torch.rand(37, 7) < 0.3
        rows, probs = weft.row_map(mask, slots=3, align=8), torch.rand(37, 7)
        opchecked("row_map", Call(weft.row_map, {"routing": mask, "slots": 3, "align": 8}))
    else:
        opchecked("row_map", Call(weft.row_map, {"routing": routing(37, 3, 7), "experts": 7, "align": 8}))
    y = torch.randn(len(rows.slot_of_row), 96)
    opchecked("permute", Call(weft.permute, {"x": x, "rows": rows, "probs": probs}))
    opchecked(
        "unpermute", Call(weft.unpermute, {"y": y, "rows": rows, "probs": probs, "carried": y[:, 0].clone()})
    )
    op = weft.catalogue["unpermute_backward"]
    a = UnpermuteBackwardArgs(torch.randn(37, 96), y, PLAIN, probs, rows, UnpermuteGradients(True, True))
    torch.library.opcheck(op.overload, op.arguments.flatten(a))


def test_opcheck_of_fp8() -> None:
    x, rows, probs = layer(align=32)
    checks = ("test_autograd_registration", "test_faketensor")
    call = Call(weft.permute, {"x": x, "rows": rows, "probs": probs, "quantize": "mx", "columnwise": True})
    opchecked("permute", call, test_utils=checks)
    q = weft.quantize(x, "1x128")
    opchecked("permute", Call(weft.permute, {"x": q, "rows": rows, "probs": probs}), test_utils=checks)
    y = weft.permute(q, rows)
    opchecked("unpermute", Call(weft.unpermute, {"y": y, "rows": rows, "probs": probs}), test_utils=checks)


# ---- what is refused -------------------------------------------------------------------------------------


def test_invalid_arguments_raise() -> None:
    x, rows, probs = layer()
    nested = torch.zeros(4, 2, dtype=torch.int64)
    q = weft.quantize(x, "1x128")
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("routing must be int32, int64 or bool", lambda: weft.row_map(torch.zeros(4, 2), 3)),
        ("pass `experts`", lambda: weft.row_map(nested)),
        ("the mask has 2 experts, but experts=3", lambda: weft.row_map(nested.bool(), 3)),
        ("at least 1", lambda: weft.row_map(nested, 3, align=0)),
        ("rows must be from 0", lambda: weft.row_map(nested, 3, rows=-1)),
        ("32 bits", lambda: weft.row_map(torch.empty(2**28, 8, dtype=torch.int64, device="meta"), 3)),
        (r"x must be \[37, K\]", lambda: weft.permute(x[:5], rows)),
        ("x must be bfloat16", lambda: weft.permute(x.int(), rows)),
        (r"probs must have the shape \(37, 3\)", lambda: weft.permute(x, rows, probs[:, :2])),
        ("go with quantize", lambda: weft.permute(x, rows, columnwise=True)),
        ("align=128", lambda: weft.permute(x, rows, quantize="1x128", columnwise=True)),
        ("blocks 1x128, mx, row", lambda: weft.permute(x, rows, quantize="tensor")),
        ("one scale per whole column", lambda: weft.permute(x, rows, quantize="row", columnwise=True)),
        ("at least one copy", lambda: weft.permute(x, rows, quantize="1x128", rowwise=False)),
        ("already quantized", lambda: weft.permute(q, rows, quantize="1x128")),
        ("rowwise copy", lambda: weft.permute(weft.quantize(x, "128x128"), rows)),
        (r"y must be \[", lambda: weft.unpermute(x, rows)),
        ("dequantize e2m1", lambda: weft.unpermute(weft.permute(weft.quantize(x, "e2m1:mx:te"), rows), rows)),
        ("carried must have the shape", lambda: weft.unpermute(weft.permute(x, rows), rows, carried=probs)),
    ]
    for message, call in wrong:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("spec", ["128x128", "tensor", "nvfp4"])
def test_ops_reject_rows_that_share_a_scale(spec: str) -> None:
    """Codes that share a scale across rows would meet other scales when moved, so the ops reject them themselves."""
    x, rows = torch.randn(128, 128), weft.row_map(torch.randint(2, (128, 1)), 2, align=128)
    q = weft.quantize(x, spec)
    assert q.rowwise is not None
    options = plain_result(x.dtype)._replace(format=q.spec)
    for call in (
        lambda: permute_op(PermuteArgs(x, q.rowwise, None, rows, options)),
        lambda: unpermute_op(UnpermuteArgs(x, q.rowwise, None, None, rows)),
    ):
        with pytest.raises(ValueError, match=r"cannot be (moved|summed)"):
            call()


def test_ops_reject_an_unused_global_scale() -> None:
    x, rows = torch.randn(128, 128), weft.row_map(torch.randint(2, (128, 1)), 2, align=128)
    q = weft.quantize(x, "1x128")
    assert q.rowwise is not None
    codes = q.rowwise._replace(global_scale=torch.ones(()))
    options = plain_result(x.dtype)._replace(format=q.spec)
    for call in (
        lambda: permute_op(PermuteArgs(x, codes, None, rows, options)),
        lambda: unpermute_op(UnpermuteArgs(x, codes, None, None, rows)),
    ):
        with pytest.raises(ValueError, match="global_scale is left over"):
            call()


def test_public_options_are_documented() -> None:
    for function in (weft.row_map, weft.permute, weft.unpermute):
        for name in inspect.signature(function).parameters:
            assert name in (function.__doc__ or ""), f"{function.__name__}: {name}"
    assert Format.of("1x128").group == 128


# ---- a layer ---------------------------------------------------------------------------------------------


def dense_moe(x: Tensor, router: Tensor, up: Tensor, down: Tensor, slots: int) -> Tensor:
    """Apply every expert to every token, then weigh the results."""
    probs = (x @ router.t()).softmax(-1)
    best, chosen = probs.topk(slots)
    weights = torch.zeros_like(probs).scatter(-1, chosen, best)
    every = torch.einsum("teh,ehd->ted", torch.nn.functional.silu(torch.einsum("td,edh->teh", x, up)), down)
    return (every * weights[..., None]).sum(1)


def fused_moe(x: Tensor, router: Tensor, up: Tensor, down: Tensor, slots: int, on_combine: bool) -> Tensor:
    """Apply only the chosen experts, to their rows; the probability is applied before or after the last product."""
    best, chosen = (x @ router.t()).softmax(-1).topk(slots)
    experts = len(up)
    rows = weft.row_map(chosen, experts, align=16)
    y, row_probs = weft.permute(x, rows, best)
    ends = rows.offsets.tolist()
    parts = []
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        h = torch.nn.functional.silu(y[start:end] @ up[expert])
        parts.append((h if on_combine else h * row_probs[start:end, None]) @ down[expert])
    out = torch.cat([*parts, y.new_zeros(len(y) - ends[-1], y.shape[1])])
    return weft.unpermute(out, rows, best if on_combine else None)  # type: ignore[no-any-return]


@pytest.mark.parametrize("on_combine", [False, True])
def test_a_layer_equals_the_dense_one(on_combine: bool) -> None:
    """Outputs and all gradients match to 1e-5, although one expert gets no tokens."""
    torch.manual_seed(1)
    x, router = torch.randn(90, 32), torch.randn(6, 32)
    router[4] = 0.0
    router[4, 0] = -1e3
    x[:, 0] = x[:, 0].abs() + 0.1
    up, down = torch.randn(6, 32, 48) / 6, torch.randn(6, 48, 32) / 7
    gradient = torch.randn(90, 32)
    runs = []
    for f in (dense_moe, fused_moe):
        leaves = [t.clone().requires_grad_() for t in (x, router, up, down)]
        out = f(*leaves, 2) if f is dense_moe else f(*leaves, 2, on_combine)  # type: ignore[call-arg]
        runs.append((out, *torch.autograd.grad(out, leaves, gradient)))
    for got, wanted in zip(runs[1], runs[0], strict=True):
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        assert wanted.count_nonzero()
    assert not runs[1][3][4].count_nonzero()
    assert EPS32 < 1e-6


def test_out() -> None:
    """Experts that a token did not choose get zeros, whatever the caller's memory holds."""
    x, mask = torch.randn(6, 64), torch.rand(6, 4) > 0.5
    rows, probs = weft.row_map(mask, slots=4), torch.rand(6, 4)
    wanted = weft.permute(x, rows, probs)
    out = [torch.full_like(t, torch.nan) for t in wanted]
    y, carried = weft.permute(x, rows, probs, out=(out[0], out[1]))
    assert (y is out[0], carried is out[1]) == (True, True)
    assert torch.equal(y, wanted[0])
    assert torch.equal(carried, wanted[1])
    back = weft.unpermute(y, rows, carried=carried)
    into = [torch.full_like(t, torch.nan) for t in back]
    got = weft.unpermute(y, rows, carried=carried, out=(into[0], into[1]))
    for result, each, expected in zip(got, into, back, strict=True):
        assert result is each
        assert torch.equal(result, expected)
    with pytest.raises(ValueError, match="row_probs of out must have the shape"):
        weft.permute(x, rows, probs, out=(out[0], torch.empty(3)))
    with pytest.raises(ValueError, match="out must be a tuple of 2 results, y, row_probs; got 3"):
        weft.permute(x, rows, probs, out=(*out, None))  # type: ignore[call-overload]

"""What permute and unpermute must give, from their definition: one row, one slot, one number at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from triton_loom.testing import EPS32

from ... import QTensor, RowMap
from .. import oracle
from ..calls import results
from ..families import Call
from ..symbolic.loaded import Given, Loaded
from ..truth import Near


def sorted_slots(routing: Tensor, experts: int, slots: int) -> list[list[int]]:
    """The slots of each expert, in order."""
    found: list[list[int]] = [[] for _ in range(experts)]
    for token, chosen in enumerate(routing.reshape(-1, routing.shape[-1]).tolist()):
        if routing.dtype == torch.bool:
            chosen = [expert for expert, one in enumerate(chosen) if one][:slots]
        for j, expert in enumerate(chosen):
            if 0 <= expert < experts:
                found[expert].append(token * slots + j)
    return found


def row_map(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    routing, align = call["routing"], call["align"] or 1
    dense = routing.dtype == torch.bool
    experts = call["experts"] or routing.shape[-1]
    slots = call["slots"] or routing.shape[-1]
    tokens = routing.numel() // routing.shape[-1]
    by_expert = sorted_slots(routing, experts, slots)
    slot_of_row: list[int] = []
    ends = []
    for mine in by_expert:
        slot_of_row += mine + [-1] * (-len(mine) % align)
        ends.append(len(slot_of_row))
    room = call["rows"]
    if room is None:  # the worst case
        room = (tokens * slots + min(experts, tokens * slots) * (align - 1)) // align * align
        assert len(slot_of_row) <= room
    slot_of_row = (slot_of_row + [-1] * room)[:room]
    row_of_slot = [-1] * (tokens * slots)
    for row, slot in enumerate(slot_of_row):
        if slot >= 0:
            row_of_slot[slot] = row
    expert_of_slot = [-1] * (tokens * slots)
    for expert, mine in enumerate(by_expert):
        for slot in mine:
            expert_of_slot[slot] = expert
    lead = routing.shape[:-1]
    whole = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    found: dict[str, Near | Tensor] = {
        "row_of_slot": whole(row_of_slot).view(*lead, slots),
        "slot_of_row": whole(slot_of_row),
        "counts": whole([len(mine) for mine in by_expert]),
        "offsets": whole([min(end, room) for end in ends]),
    }
    if dense:
        found["experts"] = whole(expert_of_slot).view(*lead, slots)
    return found


def taken(rows: RowMap) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    """(row, token, slot of the token, where its probability is) of the rows that are no pads."""
    slots = rows.row_of_slot.shape[-1]
    experts = None if rows.experts is None else rows.experts.reshape(-1, slots).tolist()
    for row, slot in enumerate(rows.slot_of_row.tolist()):
        if slot >= 0:
            token, j = divmod(slot, slots)
            yield row, token, j, (token, j if experts is None else experts[token][j])


def values_of(x: Tensor) -> Tensor:
    """The numbers [M, K] in float64."""
    if isinstance(x, QTensor):
        assert x.rowwise is not None
        copy = oracle.Quantized(x.rowwise.data.view(torch.uint8), x.rowwise.scale, None)
        f, (rows, cols) = x.format, x.shape
        assert f.element is not None
        return oracle.dequantize(copy, block=f.block, element=f.element, shape=(rows, cols)).double()
    return x.detach().double().reshape(-1, x.shape[-1])


def exactly(value: Tensor) -> Near:
    return Near(value, torch.zeros_like(value))


def permute(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    rows: RowMap = call["rows"]
    x, probs = values_of(call["x"]), call["probs"]
    y = torch.zeros(len(rows.slot_of_row), x.shape[1], dtype=torch.float64)
    dx, size = torch.zeros_like(x), torch.zeros_like(x)
    dy = gradients.get("y", torch.zeros(1, 1)).detach().double().expand(y.shape)
    row_probs = torch.zeros(len(y), dtype=torch.float64)
    flat_probs = None if probs is None else probs.detach().double().reshape(-1, probs.shape[-1])
    dprobs = None if flat_probs is None else torch.zeros_like(flat_probs)
    for row, token, _, place in taken(rows):
        y[row] = x[token]
        dx[token] += dy[row]
        size[token] += dy[row].abs()
        if flat_probs is not None and dprobs is not None:
            row_probs[row] = flat_probs[place]
            if "output1" in gradients:
                dprobs[place] = gradients["output1"][row].double()
    found: dict[str, Near | Tensor] = {"y": exactly(y)}
    noise = rows.row_of_slot.shape[-1] * EPS32 * size
    found["dx"] = Near(dx.view(call["x"].shape), noise.view(call["x"].shape))
    if probs is not None and dprobs is not None:
        found["output1"] = exactly(row_probs)
        found["dprobs"] = exactly(dprobs.view(probs.shape))
    return found


def unpermute(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    rows: RowMap = call["rows"]
    values, probs, carried = values_of(call["y"]), call["probs"], call["carried"]
    slots = rows.row_of_slot.shape[-1]
    tokens = rows.row_of_slot.numel() // slots
    lead = tuple(rows.row_of_slot.shape[:-1])
    cols = values.shape[1]
    wide = slots if rows.experts is None else len(rows.counts)
    weight = torch.ones(tokens, wide, dtype=torch.float64)
    if probs is not None:
        weight = probs.detach().double().reshape(tokens, wide)
    x, size = (torch.zeros(tokens, cols, dtype=torch.float64) for _ in range(2))
    dy = gradients.get("y", torch.zeros(1, 1)).detach().double().expand(tokens, cols)
    drows, dsize = (torch.zeros_like(values) for _ in range(2))
    back, dprobs, dprobs_size = (torch.zeros(tokens, wide, dtype=torch.float64) for _ in range(3))
    dcarried = torch.zeros(len(values), dtype=torch.float64)
    for row, token, _, place in taken(rows):
        x[token] += weight[place] * values[row]
        size[token] += (weight[place] * values[row]).abs()
        drows[row] = weight[place] * dy[token]
        dsize[row] = drows[row].abs()
        dprobs[place] = (dy[token] * values[row]).sum()
        dprobs_size[place] = (dy[token] * values[row]).abs().sum()
        if carried is not None:
            back[place] = carried[row].double()
            if "output1" in gradients:
                dcarried[row] = gradients["output1"].reshape(tokens, wide)[place].double()
    quantised = isinstance(call["y"], QTensor)  # q * d is rounded once
    noise = (slots + quantised) * EPS32 * size
    found: dict[str, Near | Tensor] = {"y": Near(x.view(*lead, cols), noise.view(*lead, cols))}
    found["dy"] = Near(drows, EPS32 * dsize if probs is not None else torch.zeros_like(dsize))
    if probs is not None:
        found["dprobs"] = Near(dprobs.view(probs.shape), (8 * EPS32 * dprobs_size).view(probs.shape))
    if carried is not None:
        found["output1"] = exactly(back.view(*lead, wide))
        found["dcarried"] = exactly(dcarried)
    return found


def unpermute_backward(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    y, codes = call["rows"], call["codes"]
    if y is None:
        shape = (len(codes.data), call["dy"].shape[-1])
        y = QTensor(shape, call["dy"].dtype, codes.format, codes)
    forward = Call(unpermute, {"y": y, "rows": call["map"], "probs": call["probs"]})
    found = unpermute(forward, {"y": call["dy"]})
    return {"y": found["dy"], "output1": found["dprobs"]}


TRUTHS = {f.__name__: f for f in (row_map, permute, unpermute, unpermute_backward)}


def _encoded(call: Call) -> dict[str, Tensor]:
    """Quantised rows that are only moved are not encoded again."""
    if isinstance(call["x"], QTensor):
        return {}
    return results(Call(call.function, {name: call[name] for name in ("x", "rows")}))


ENCODED = {"permute": _encoded}


MOVED = {
    "unpermute_kernel": ({"rows_ptr"}, {"y_ptr"}),
    "unpermute_backward_kernel": ({"dy_ptr", "rows_ptr"}, {"drows_ptr"}),
}


def _experts(given: Given) -> Any:
    """How many experts a token's probabilities, or their gradients, are of."""
    present = (name for name in ("probs_ptr", "back_ptr", "dprobs_ptr") if name in given.shapes)
    return given[next(present), -1]


# Indices that `row_map` makes: -1 stands for no row, or no slot. Experts of a mask are -1 where a token has fewer.
_ROW = Loaded(least=-1, below="rows", inverse="slot_of_row_ptr")
_SLOT = Loaded(least=-1, below=lambda given: given["tokens"] * given["slots"], inverse="row_of_slot_ptr")
_EXPERT = Loaded(least=-1, below=lambda given: _experts(given))

LOADED = {
    ("permute_kernel", "row_of_slot_ptr"): _ROW,
    ("permute_kernel", "slot_of_row_ptr"): _SLOT,
    ("permute_kernel", "experts_ptr"): _EXPERT,
    ("permute_stripe_kernel", "slot_of_row_ptr"): Loaded(
        least=-1, below=lambda given: given.rows("x_ptr") * given["slots"]
    ),
    ("permute_stripe_kernel", "experts_ptr"): _EXPERT,
    ("unpermute_kernel", "row_of_slot_ptr"): Loaded(least=-1, below=lambda given: given.rows("rows_ptr")),
    ("unpermute_kernel", "experts_ptr"): _EXPERT,
    ("unpermute_backward_kernel", "row_of_slot_ptr"): _ROW,
    ("unpermute_backward_kernel", "slot_of_row_ptr"): _SLOT,
    ("unpermute_backward_kernel", "experts_ptr"): _EXPERT,
    ("matmul_kernel", "gather.slot_of_row"): Loaded(
        least=-1, below=lambda given: given["gather.tokens"] * given["gather.slots"]
    ),
}

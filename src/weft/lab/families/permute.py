"""Permute and unpermute: tokens of MoE layers moved to their experts and back."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops import RowMap, permute, quantize, row_map, unpermute
from ...ops.moe.permute.arguments import UnpermuteGradients
from ...quant import PLAIN, QTensor
from ...quant.straight import take_apart
from ..chain import Chain
from ..family import Compute, Family, Moved
from ..problem import Call, Inputs, Size, Workload, run_op
from ..symbolic.loaded import Given, Loaded
from ..truth import EPS32, Near


class Layer(NamedTuple):
    """An MoE layer as one rank sees it."""

    hidden: int
    experts: int
    slots: int  # experts per token


LAYERS: dict[str, Layer] = {
    "linghe/hidden": Layer(2048, 256, 8),
    "qwen3-30b-a3b/hidden": Layer(2048, 128, 8),
    "deepseek-v3/hidden": Layer(7168, 256, 8),
    "mixtral-8x7b/hidden": Layer(4096, 8, 2),
    "odd/33": Layer(33, 5, 3),
    "odd/200": Layer(200, 7, 3),
}

# Sets of options: arguments of the function, and these settings of a workload:
#   align    alignment of the experts' regions
#   probs    pass probabilities, which permute moves and unpermute multiplies by
#   carried  unpermute also moves one value per row back
#   mask     routing and probabilities are [tokens, experts]
#   payload  format of quantized input rows
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"align": 16},
    "probs": {"align": 16, "probs": True},
    "carried": {"align": 16, "carried": True},
    "mask": {"align": 16, "probs": True, "mask": True},
    "1x128": {"align": 16, "probs": True, "quantize": "1x128"},
    "row-fp8": {"align": 16, "probs": True, "quantize": "row"},
    "1x128-both": {"align": 128, "probs": True, "quantize": "1x128", "columnwise": True},
    "mx-both": {"align": 32, "probs": True, "quantize": "mx", "columnwise": True},
    "1x128-payload": {"align": 16, "probs": True, "payload": "1x128"},
    "mx-payload": {"align": 32, "probs": True, "payload": "mx"},
}

_USED: dict[str, dict[str, tuple[str, ...]]] = {
    "permute": {
        "plain": ("deepseek-v3/hidden",),
        "probs": ("linghe/hidden", "odd/33"),
        "mask": ("qwen3-30b-a3b/hidden", "odd/200"),
        "1x128": ("qwen3-30b-a3b/hidden", "odd/200"),
        "row-fp8": ("qwen3-30b-a3b/hidden", "odd/200"),
        "1x128-both": ("mixtral-8x7b/hidden", "odd/200"),
        "mx-both": ("mixtral-8x7b/hidden", "odd/33"),
        "1x128-payload": ("deepseek-v3/hidden",),
        "mx-payload": ("odd/200",),
    },
    "unpermute": {
        "plain": ("deepseek-v3/hidden",),
        "carried": ("linghe/hidden", "odd/33"),
        "probs": ("qwen3-30b-a3b/hidden", "odd/200"),
        "mask": ("odd/200",),
        "1x128-payload": ("deepseek-v3/hidden",),
        "mx-payload": ("odd/200",),
    },
    "unpermute_backward": {
        "probs": ("qwen3-30b-a3b/hidden", "odd/200"),
        "mask": ("odd/200",),
        "1x128-payload": ("deepseek-v3/hidden",),
    },
}


def _routing(inputs: Inputs, tokens: int, layer: Layer, mask: bool) -> Tensor:
    """Draw random scores and return the best experts of every token."""
    scores = inputs.normal(tokens, layer.experts, dtype=torch.float32)
    chosen = scores.topk(layer.slots).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True) if mask else chosen


def rows_of(name: str, tokens: int, layer: Layer, align: int) -> int | None:
    """Return the number of rows to allocate, or None for the worst case.

    For linghe's layer, `align / 2` pads per expert suffice for its tokens, as in the published row."""
    suffices = name.startswith("linghe") and tokens >= 4096
    return tokens * layer.slots + layer.experts * align // 2 if suffices else None


def _rows(workload: Workload, inputs: Inputs, tokens: int) -> RowMap:
    settings = dict(workload.settings)
    layer = LAYERS[workload.name]._replace(experts=settings["experts"], slots=settings["slots"])
    mask = settings.get("mask", False)
    return row_map(
        _routing(inputs, tokens, layer, mask),
        layer.experts,
        slots=layer.slots if mask else None,
        align=settings["align"],
        rows=rows_of(workload.name, tokens, layer, settings["align"]),
    )


def _probs(inputs: Inputs, rows: RowMap) -> Tensor:
    last = rows.row_of_slot.shape[-1] if rows.experts is None else rows.counts.shape[0]
    return inputs.normal(*rows.row_of_slot.shape[:-1], last, mean=0.3, std=0.1, dtype=torch.float32)


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = dict(workload.settings)
    rows = _rows(workload, inputs, shape[0])
    inverse = workload.op == "unpermute"
    values: Tensor = inputs.activation(rows.slot_of_row.shape[0] if inverse else shape[0], shape[-1])
    if "payload" in settings:
        values = quantize(values, settings["payload"])
    kwargs: dict[str, Any] = {"y" if inverse else "x": values, "rows": rows}
    if settings.get("probs"):
        kwargs["probs"] = _probs(inputs, rows)
    if settings.get("carried"):
        kwargs["carried"] = inputs.normal(rows.slot_of_row.shape[0], dtype=torch.float32)
    for name in ("quantize", "columnwise"):
        if name in settings:
            kwargs[name] = settings[name]
    return Call(unpermute if inverse else permute, kwargs)


def _build_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    """Build the backward of an unpermute with probabilities."""
    settings = dict(workload.settings)
    rows = _rows(workload, inputs, shape[0])
    values = inputs.activation(rows.slot_of_row.shape[0], shape[-1])
    codes = PLAIN
    if "payload" in settings:
        _, codes = take_apart(quantize(values, settings["payload"]))
    kwargs: dict[str, Any] = {
        "dy": inputs.normal(*shape),
        "rows": values if codes is PLAIN else None,
        "codes": codes,
        "probs": _probs(inputs, rows),
        "map": rows,
        "needs": UnpermuteGradients(True, True),
    }
    return Call(functools.partial(run_op, "unpermute_backward"), kwargs)


def _build_map(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = dict(workload.settings)
    tokens, last = shape
    layer = LAYERS[workload.name.replace("routing", "hidden")]
    if settings.get("mask"):
        layer = layer._replace(experts=last, slots=min(layer.slots, last))
    else:
        layer = layer._replace(experts=max(layer.experts, last), slots=last)
    kwargs = {
        "routing": _routing(inputs, tokens, layer, settings.get("mask", False)),
        "experts": layer.experts,
        "align": settings["align"],
        "rows": rows_of(workload.name, tokens, layer, settings["align"]),
    }
    return Call(row_map, {**kwargs, "slots": layer.slots} if settings.get("mask") else kwargs)


def _map_shape(name: str, options: str) -> tuple[Size, ...]:
    layer = LAYERS[name.replace("routing", "hidden")]
    return ("rows", layer.experts if options == "mask" else layer.slots)


_GATHERED = (
    "a group along the rows has rows of many tokens, so a token's row is read once for each of its slots"
)

_LANES = "a scale is asked for by each number of its group, and those of a row lie far apart"


def _rereads(op: str, options: str) -> dict[str, Any]:
    """Return `moves` and `rereads` of a workload that moves more than the minimum bytes."""
    if OPTIONS[options].get("columnwise"):
        return {"moves": 1.33, "rereads": _GATHERED}
    if options == "row-fp8":
        return {
            "moves": 1.2,
            "rereads": "the amax of a row comes before its first code: the row is read twice",
        }
    if op.startswith("unpermute") and options == "1x128-payload":
        return {"moves": 3.9, "rereads": _LANES}
    return {}


WORKLOADS: tuple[Workload, ...] = (
    *(
        Workload(
            op=op,
            name=name,
            options=options,
            shape=("rows", LAYERS[name].hidden),
            rows=8192,
            build=_build_backward if op == "unpermute_backward" else _build,
            tags=frozenset({"training", "backward"} if op == "unpermute_backward" else {"training"}),
            settings=(
                *(("experts", LAYERS[name].experts), ("slots", LAYERS[name].slots)),
                *OPTIONS[options].items(),
            ),
            **_rereads(op, options),
        )
        for op, used in _USED.items()
        for options, names in used.items()
        for name in names
    ),
    *(
        Workload(
            op="row_map",
            name=name,
            options=options,
            shape=_map_shape(name, options),
            rows=8192,
            build=_build_map,
            settings=tuple(OPTIONS[options].items()),
            rereads="a token's place follows from the counts of all blocks before it, which are written and read back",
            moves=2.3,
        )
        for name, options in (
            ("linghe/routing", "plain"),
            ("qwen3-30b-a3b/routing", "mask"),
            ("odd/33", "plain"),
        )
    ),
)


# ---- truth: one row, one slot, one element at a time ----------------------------------------------------------


def sorted_slots(routing: Tensor, experts: int, slots: int) -> list[list[int]]:
    """Return the slots of each expert, in order."""
    slots_of_expert: list[list[int]] = [[] for _ in range(experts)]
    for token, chosen in enumerate(routing.reshape(-1, routing.shape[-1]).tolist()):
        if routing.dtype == torch.bool:
            chosen = [expert for expert, one in enumerate(chosen) if one][:slots]
        for j, expert in enumerate(chosen):
            if 0 <= expert < experts:
                slots_of_expert[expert].append(token * slots + j)
    return slots_of_expert


def row_map_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the maps between slots and rows, and the experts' counts and ends."""
    routing, align = call["routing"], call["align"] or 1
    dense = routing.dtype == torch.bool
    experts = call["experts"] or routing.shape[-1]
    slots = call["slots"] or routing.shape[-1]
    tokens = routing.numel() // routing.shape[-1]
    by_expert = sorted_slots(routing, experts, slots)
    slot_of_row: list[int] = []
    ends = []
    for own_slots in by_expert:
        slot_of_row += own_slots + [-1] * (-len(own_slots) % align)
        ends.append(len(slot_of_row))
    row_count = call["rows"]
    if row_count is None:  # the worst case
        row_count = (tokens * slots + min(experts, tokens * slots) * (align - 1)) // align * align
        assert len(slot_of_row) <= row_count
    slot_of_row = (slot_of_row + [-1] * row_count)[:row_count]
    row_of_slot = [-1] * (tokens * slots)
    for row, slot in enumerate(slot_of_row):
        if slot >= 0:
            row_of_slot[slot] = row
    expert_of_slot = [-1] * (tokens * slots)
    for expert, own_slots in enumerate(by_expert):
        for slot in own_slots:
            expert_of_slot[slot] = expert
    lead = routing.shape[:-1]
    int32 = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    expected: dict[str, Near | Tensor] = {
        "row_of_slot": int32(row_of_slot).view(*lead, slots),
        "slot_of_row": int32(slot_of_row),
        "counts": int32([len(own_slots) for own_slots in by_expert]),
        "offsets": int32([min(end, row_count) for end in ends]),
    }
    if dense:
        expected["experts"] = int32(expert_of_slot).view(*lead, slots)
    return expected


def filled_rows(rows: RowMap) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    """Yield (row, token, slot of the token, index of its probability) of every row that is not a pad."""
    slots = rows.row_of_slot.shape[-1]
    experts = None if rows.experts is None else rows.experts.reshape(-1, slots).tolist()
    for row, slot in enumerate(rows.slot_of_row.tolist()):
        if slot >= 0:
            token, j = divmod(slot, slots)
            yield row, token, j, (token, j if experts is None else experts[token][j])


def values_of(x: Tensor) -> Tensor:
    """Decode to float64 [M, K]."""
    if isinstance(x, QTensor):
        from .. import oracle

        assert x.rowwise is not None
        data, scale, global_scale, _ = x.rowwise
        copy = oracle.Quantized(data.view(torch.uint8), scale, global_scale)
        f, (rows, cols) = x.format, x.shape
        assert f.element is not None
        return oracle.dequantize(copy, block=f.block, element=f.element, shape=(rows, cols)).double()
    return x.detach().double().reshape(-1, x.shape[-1])


def exactly(value: Tensor) -> Near:
    """Return `value` as a truth without noise."""
    return Near(value, torch.zeros_like(value))


def permute_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the rows of experts and their probabilities, and the gradients."""
    rows: RowMap = call["rows"]
    x, probs = values_of(call["x"]), call["probs"]
    y = torch.zeros(len(rows.slot_of_row), x.shape[1], dtype=torch.float64)
    dx, size = torch.zeros_like(x), torch.zeros_like(x)
    dy = gradients.get("y", torch.zeros(1, 1)).detach().double().expand(y.shape)
    row_probs = torch.zeros(len(y), dtype=torch.float64)
    flat_probs = None if probs is None else probs.detach().double().reshape(-1, probs.shape[-1])
    dprobs = None if flat_probs is None else torch.zeros_like(flat_probs)
    for row, token, _, prob_index in filled_rows(rows):
        y[row] = x[token]
        dx[token] += dy[row]
        size[token] += dy[row].abs()
        if flat_probs is not None and dprobs is not None:
            row_probs[row] = flat_probs[prob_index]
            if "output1" in gradients:
                dprobs[prob_index] = gradients["output1"][row].double()
    expected: dict[str, Near | Tensor] = {"y": exactly(y)}
    noise = rows.row_of_slot.shape[-1] * EPS32 * size
    expected["dx"] = Near(dx.view(call["x"].shape), noise.view(call["x"].shape))
    if probs is not None and dprobs is not None:
        expected["output1"] = exactly(row_probs)
        expected["dprobs"] = exactly(dprobs.view(probs.shape))
    return expected


def unpermute_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the sums of tokens' rows, the carried values, and the gradients."""
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
    for row, token, _, prob_index in filled_rows(rows):
        x[token] += weight[prob_index] * values[row]
        size[token] += (weight[prob_index] * values[row]).abs()
        drows[row] = weight[prob_index] * dy[token]
        dsize[row] = drows[row].abs()
        dprobs[prob_index] = (dy[token] * values[row]).sum()
        dprobs_size[prob_index] = (dy[token] * values[row]).abs().sum()
        if carried is not None:
            back[prob_index] = carried[row].double()
            if "output1" in gradients:
                dcarried[row] = gradients["output1"].reshape(tokens, wide)[prob_index].double()
    quantized = isinstance(call["y"], QTensor)  # a code times its scale is rounded once
    noise = (slots + quantized) * EPS32 * size
    expected: dict[str, Near | Tensor] = {"y": Near(x.view(*lead, cols), noise.view(*lead, cols))}
    expected["dy"] = Near(drows, EPS32 * dsize if probs is not None else torch.zeros_like(dsize))
    if probs is not None:
        expected["dprobs"] = Near(dprobs.view(probs.shape), (8 * EPS32 * dprobs_size).view(probs.shape))
    if carried is not None:
        expected["output1"] = exactly(back.view(*lead, wide))
        expected["dcarried"] = exactly(dcarried)
    return expected


def unpermute_backward_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the gradients of rows and probabilities."""
    y, codes = call["rows"], call["codes"]
    if y is None:
        shape = (len(codes.data), call["dy"].shape[-1])
        y = QTensor(shape, call["dy"].dtype, codes.format, codes)
    forward = Call(unpermute, {"y": y, "rows": call["map"], "probs": call["probs"]})
    expected = unpermute_truth(forward, {"y": call["dy"]})
    return {"y": expected["dy"], "output1": expected["dprobs"]}


def _encoded(call: Call, compute: Compute) -> dict[str, Tensor]:
    """Return the rows before quantization, or nothing for quantized input, which is moved without encoding."""
    if isinstance(call["x"], QTensor):
        return {}
    return compute(Call(call.function, {name: call[name] for name in ("x", "rows")}))


# ---- in plain PyTorch -----------------------------------------------------------------------------------------


def _permute_chain(call: Call) -> Chain:
    """Gather rows, and probabilities if present."""
    rows, x, probs = call["rows"], call["x"], call["probs"]
    slots = rows.row_of_slot.shape[-1]

    def gathered(x: Tensor, slot_of_row: Tensor) -> Tensor:
        return torch.where((slot_of_row >= 0)[:, None], x[slot_of_row.clamp(min=0) // slots], 0.0)

    def with_probs(x: Tensor, slot_of_row: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        carried = torch.where(slot_of_row >= 0, probs.flatten()[slot_of_row.clamp(min=0)], 0.0)
        return gathered(x, slot_of_row), carried

    if probs is None:
        return Chain(gathered, (x, rows.slot_of_row))
    return Chain(with_probs, (x, rows.slot_of_row, probs))


def _unpermute_chain(call: Call) -> Chain:
    """Gather the rows of each token and add them up."""
    y, carried, slots = call["y"], call["carried"], call["rows"].row_of_slot

    def summed(y: Tensor, row_of_slot: Tensor) -> Tensor:
        return y[row_of_slot].float().sum(1).to(y.dtype)

    def with_carried(y: Tensor, row_of_slot: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        return summed(y, row_of_slot), carried[row_of_slot]

    return Chain(summed, (y, slots)) if carried is None else Chain(with_carried, (y, slots, carried))


# ---- kernels --------------------------------------------------------------------------------------------------


def _experts(launch: Given) -> Any:
    """Return the number of experts that a token's probabilities, or their gradients, have."""
    present = (name for name in ("probs_ptr", "back_ptr", "dprobs_ptr") if name in launch.shapes)
    return launch[next(present), -1]


# Indices from `row_map`: -1 means no row or no slot. Experts of a mask are -1 for unused slots.
_ROW = Loaded(least=-1, below="rows", inverse="slot_of_row_ptr")
_SLOT = Loaded(least=-1, below=lambda launch: launch["tokens"] * launch["slots"], inverse="row_of_slot_ptr")
_EXPERT = Loaded(least=-1, below=lambda launch: _experts(launch))

FAMILY = Family(
    workloads=WORKLOADS,
    truths={
        "row_map": row_map_truth,
        "permute": permute_truth,
        "unpermute": unpermute_truth,
        "unpermute_backward": unpermute_backward_truth,
    },
    encoded={"permute": _encoded},
    chains={
        ("permute", "plain"): _permute_chain,
        ("permute", "probs"): _permute_chain,
        ("unpermute", "plain"): _unpermute_chain,
        ("unpermute", "carried"): _unpermute_chain,
    },
    moved={
        "unpermute_kernel": Moved({"rows_ptr"}, {"y_ptr"}),
        "unpermute_backward_kernel": Moved({"dy_ptr", "rows_ptr"}, {"drows_ptr"}),
    },
    loaded={
        ("permute_kernel", "row_of_slot_ptr"): _ROW,
        ("permute_kernel", "slot_of_row_ptr"): _SLOT,
        ("permute_kernel", "experts_ptr"): _EXPERT,
        ("permute_stripe_kernel", "slot_of_row_ptr"): Loaded(
            least=-1, below=lambda launch: launch.rows("x_ptr") * launch["slots"]
        ),
        ("permute_stripe_kernel", "experts_ptr"): _EXPERT,
        ("unpermute_kernel", "row_of_slot_ptr"): Loaded(
            least=-1, below=lambda launch: launch.rows("rows_ptr")
        ),
        ("unpermute_kernel", "experts_ptr"): _EXPERT,
        ("unpermute_backward_kernel", "row_of_slot_ptr"): _ROW,
        ("unpermute_backward_kernel", "slot_of_row_ptr"): _SLOT,
        ("unpermute_backward_kernel", "experts_ptr"): _EXPERT,
        ("matmul_kernel", "gather.slot_of_row"): Loaded(
            least=-1, below=lambda launch: launch["gather.tokens"] * launch["gather.slots"]
        ),
    },
)

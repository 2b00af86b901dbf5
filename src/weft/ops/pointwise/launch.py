"""Launches of scalar functions: dimensions merged over all operands, and one bound launch per layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import BoundLaunch, Capabilities, Launch, capabilities_of, choice, remembered
from ..common.rows import align_of
from ..common.sums import sum_rows
from .kernels import Form, Operand, kernel_for
from .lowering import Scalar, Typed, kind_of


class TileConfig(NamedTuple):
    """Launch configuration: elements of a program, and its warps."""

    tile: int
    num_warps: int


@choice("pointwise", tile=(256, 16384), num_warps=(1, 16))
def tile_config(operands: int, target: Capabilities) -> TileConfig:
    """Choose the tile: 128 bits of bf16 for each lane of four warps; on a CPU, tiles that stay in the first cache."""
    return TileConfig(2048 if target.is_cpu else 32 * target.warp_size, 4)


class _Layout(NamedTuple):
    """Sizes and strides of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Dimension(NamedTuple):
    """Dimension of all operands: its size, and the stride of each operand along it."""

    size: int
    strides: tuple[int, ...]


def layout_of(t: Tensor) -> _Layout:
    return _Layout(tuple(t.shape), t.stride())


def merged(shape: Sequence[int], layouts: Sequence[_Layout]) -> list[_Dimension]:
    """Return the dimensions of a loop over `shape`, outermost first: in the order in memory of the first operand that
    has them all. Two become one where that changes no operand's addresses."""
    strides = []
    for layout in layouts:
        missing = len(shape) - len(layout.shape)
        own = [0 if size == 1 else s for size, s in zip(layout.shape, layout.strides, strict=True)]
        strides.append([0] * missing + own)
    dimensions = [
        _Dimension(size, tuple(each[i] for each in strides)) for i, size in enumerate(shape) if size != 1
    ]
    whole = next((i for i in range(len(layouts)) if all(each.strides[i] for each in dimensions)), -1)
    dimensions.sort(key=lambda each: -each.strides[whole])
    result: list[_Dimension] = []
    for each in dimensions:
        outer = result[-1] if result else None
        if outer is not None and all(
            a == b * each.size for a, b in zip(outer.strides, each.strides, strict=True)
        ):
            result[-1] = _Dimension(outer.size * each.size, each.strides)
        else:
            result.append(each)
    return result or [_Dimension(1, (1,) * len(layouts))]


class Plan(NamedTuple):
    """What a call of a layout needs besides its addresses and floats."""

    outputs: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]  # shape, strides, dtype
    tensors: tuple[int, ...]  # parameters that the kernel reads, by number
    floats: tuple[int, ...]  # parameters that are floats
    bound: BoundLaunch


@remembered
def plan(
    op: Any, layout: tuple[Any, ...], out_dtype: torch.dtype | None, target: Capabilities
) -> Plan | None:
    """Plan calls of an op with such a layout: for each parameter the shape, strides and dtype of a tensor, an integer,
    or `float`. Return None if no kernel serves them."""
    tensors = [
        torch.empty_strided(each[0], each[1], dtype=each[2], device="meta")
        if isinstance(each, tuple)
        else None
        for each in layout
    ]
    numbers = [None if isinstance(each, tuple) else 0.0 if each is float else each for each in layout]
    a = op.arguments.cls(*tensors, *numbers, out_dtype)
    if any(t.dtype is torch.float64 or not t.numel() for t in op.tensors(a).values()):
        return None
    outputs = op.allocate(a)._asdict()
    if any(t.dtype is torch.float64 for t in outputs.values()):
        return None
    used = op.scalar.parameters
    return Plan(
        tuple((tuple(t.shape), t.stride(), t.dtype) for t in outputs.values()),
        tuple(
            i
            for i, (name, t) in enumerate(zip(op.parameters, tensors, strict=True))
            if name in used and t is not None
        ),
        tuple(
            i
            for i, (name, each) in enumerate(zip(op.parameters, layout, strict=True))
            if name in used and each is float
        ),
        _bound_for(op.name, op.scalar, op.values(a), outputs, target),
    )


@remembered
def _bound(
    name: str, scalar: Scalar, kinds: tuple[Typed, ...], layouts: tuple[tuple[str, _Layout], ...],
    inputs: int, integers: tuple[tuple[str, int], ...], target: Capabilities,
) -> BoundLaunch:  # fmt: skip
    """Bind the launch for a layout of inputs and outputs. The last operand is an output, which has all dimensions."""
    names = [name for name, _ in layouts]
    dimensions = merged(layouts[-1][1].shape, [layout for _, layout in layouts])
    *outer, last = dimensions
    # A transposed operand is dense along another dimension: that one comes next, and tiles are square.
    dense = [d for d in outer if 1 in d.strides]
    outer = [d for d in outer if d not in dense[:1]] + dense[:1]
    operands = [
        Operand(
            each,
            "0" if last.strides[i] == 0 else "1" if last.strides[i] == 1 else "any",
            any(d.strides[i] for d in outer),
        )
        for i, each in enumerate(names)
    ]
    form = Form(kinds, tuple(operands[:inputs]), tuple(operands[inputs:]), len(outer))
    kernel = kernel_for(name, scalar, form)
    tile, warps = tile_config(len(names), target)
    steps = {f"{o.name}_step": last.strides[i] for i, o in enumerate(operands) if o.step == "any"}
    if not outer:
        launch = Launch.of(kernel, num_warps=warps, TILE=tile, ALIGN=align_of(last.size))
        return launch.bind((-(-last.size // tile), 1, 1), **dict(integers), count=last.size, **steps)
    rows = 1
    for each in outer:
        rows *= each.size
    cols = min(64 if dense else tile, 1 << max(last.size - 1, 1).bit_length())
    height = tile // cols
    moving = [i for i, o in enumerate(operands) if o.varies and o.step == "1"]
    align = align_of(last.size, *(d.strides[i] for i in moving for d in outer))
    launch = Launch.of(kernel, num_warps=warps, ROWS=height, COLS=cols, ALIGN=align)
    sizes = {f"size{i}": outer[i].size for i in range(1, len(outer))}
    strides = {
        f"{o.name}_stride{k}": d.strides[i]
        for i, o in enumerate(operands)
        if o.varies
        for k, d in enumerate(outer)
    }
    grid = (-(-rows // height) * -(-last.size // cols), 1, 1)
    return launch.bind(grid, **dict(integers), rows=rows, cols=last.size, **sizes, **strides, **steps)


def _bound_for(
    name: str, scalar: Scalar, values: Mapping[str, Any], outputs: Mapping[str, Tensor], target: Capabilities
) -> BoundLaunch:
    """Bind the launch of a scalar function for tensors and numbers like these."""
    used = {parameter: values[parameter] for parameter in scalar.parameters}
    tensors = {name: value for name, value in used.items() if isinstance(value, Tensor)}
    integers = ((n, int(v)) for n, v in used.items() if n not in tensors and not isinstance(v, float))
    layouts = ((n, layout_of(t)) for n, t in (tensors | dict(outputs)).items())
    return _bound(
        name,
        scalar,
        tuple(map(kind_of, used.values())),
        tuple(layouts),
        len(tensors),
        tuple(integers),
        target,
    )


def launch_scalar(
    name: str, scalar: Scalar, values: Mapping[str, Any], outputs: Mapping[str, Tensor]
) -> None:
    """Compute a scalar function of tensors and numbers into outputs of the full shape."""
    used = [values[parameter] for parameter in scalar.parameters]
    device = next(iter(outputs.values())).device
    bound = _bound_for(name, scalar, values, outputs, capabilities_of(device))
    tensors = [value for value in used if isinstance(value, Tensor)]
    bound((*tensors, *outputs.values()), tuple(value for value in used if isinstance(value, float)))


# ---- gradients of arguments that were broadcast -------------------------------------------------------------


def _summed_first(shape: Sequence[int], out: Tensor) -> list[int]:
    """Return the dimensions of a shape in another order: first those along which `out` was broadcast."""
    own = (1,) * (len(shape) - out.dim()) + tuple(out.shape)
    along = [i for i, size in enumerate(own) if size != shape[i]]
    return along + [i for i in range(len(shape)) if i not in along]


def room_for(shape: Sequence[int], out: Tensor) -> Tensor:
    """Allocate an fp32 gradient of the shape that `out` was broadcast to, so that sums run over rows in memory."""
    order = _summed_first(shape, out)
    memory = torch.empty([shape[i] for i in order], dtype=torch.float32, device=out.device)
    return memory.permute([order.index(i) for i in range(len(shape))])


def sum_into(out: Tensor, gradient: Tensor) -> None:
    """Sum a gradient over the dimensions along which `out` was broadcast, in order."""
    rows = gradient.permute(_summed_first(gradient.shape, out)).view(-1, out.numel())
    total = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    sum_rows(rows, total.view(-1))
    if total is not out:
        out.copy_(total)

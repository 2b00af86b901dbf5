"""Launches of functions: dimensions merged over all operands, and one bound launch per layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...quant import Codes, Format
from ...runtime import BoundLaunch, Capabilities, Launch, capabilities_of, choice, remembered, scratch
from ..common.copies import cast_mode, copy_arguments, count_stripes, stripe_config
from ..common.passes import make_copies
from ..common.results import Result, ResultOptions
from ..common.rows import STRIPE, align_of
from ..common.sums import sum_rows
from ..quantize.launch import quantize_into
from .kernels import kernel_for
from .lowering import DTYPES, UNQUANTIZED, Scalar, Typed, kind_of
from .rows import LONGEST_TILE, scans_both_ways
from .text import Form, Operand

LONGEST_GROUP = 128  # elements of a row that share a scale


class TileConfig(NamedTuple):
    """Launch configuration: elements of a program, and its warps."""

    tile: int
    num_warps: int


@choice("pointwise", tile=(256, 16384), num_warps=(1, 16))
def tile_config(operands: int, target: Capabilities) -> TileConfig:
    """Choose the tile: 128 bits of bf16 for each lane of four warps; on a CPU, tiles that stay in the first cache."""
    return TileConfig(2048 if target.is_cpu else 32 * target.warp_size, 4)


@choice("rowwise", tile=(1024, 16384), num_warps=(1, 16))
def row_config(cols: int, operands: int, target: Capabilities) -> TileConfig:
    """Choose the tile of a function of rows: whole rows of up to 8192 elements, 16 for each lane, or 4 if there are
    many operands; longer ones in parts of 4096. On a CPU, parts that stay in the first cache."""
    if target.is_cpu:
        return TileConfig(2048 if cols > LONGEST_TILE else max(_power_of_two(cols), 1024), 1)
    tile = 4096 if cols > LONGEST_TILE else max(_power_of_two(cols), 1024)
    per_lane = 16 if operands <= 5 else 4
    return TileConfig(tile, min(max(tile // (per_lane * target.warp_size), 1), 16))


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 1).bit_length()


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


def merged(shape: Sequence[int], layouts: Sequence[_Layout], in_order: bool = False) -> list[_Dimension]:
    """Return the dimensions of a loop over `shape`, outermost first: in the order in memory of the first operand that
    has them all, or as they are. Two become one where that changes no operand's addresses."""
    strides = [_strides_in(shape, layout) for layout in layouts]
    dimensions = [
        _Dimension(size, tuple(each[i] for each in strides)) for i, size in enumerate(shape) if size != 1
    ]
    if not in_order:
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


def _are_alike(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.stride() == y.stride() and x.dtype is y.dtype


class Plan(NamedTuple):
    """What a call of a layout needs besides its addresses and floats."""

    # Of each output: an argument with the same shape, strides and dtype or None, and these three.
    outputs: tuple[tuple[int | None, tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    tensors: tuple[int, ...]  # parameters that the kernel reads, by number
    floats: tuple[int, ...]  # parameters that are floats
    bound: BoundLaunch


@remembered
def plan(
    op: Any, layout: tuple[Any, ...], out_dtype: torch.dtype | None, target: Capabilities
) -> Plan | None:
    """Plan calls of an op with such a layout: for each parameter the shape, strides, dtype and device of a tensor, the
    type and value of an integer, or `float`. Return None if no kernel serves them."""
    tensors: list[Tensor | None] = []
    numbers: list[Any] = []
    for each in layout:
        is_tensor = each is not None and each is not float and len(each) == 4
        tensors.append(
            torch.empty_strided(each[0], each[1], dtype=each[2], device="meta") if is_tensor else None
        )
        numbers.append(None if is_tensor or each is None else 0.0 if each is float else each[1])
    described = [each for each, t in zip(layout, tensors, strict=True) if t is not None]
    if any(dtype not in DTYPES or device != described[0][3] for _, _, dtype, device in described):
        return None
    a = op.arguments.cls(*tensors, *numbers, out_dtype, *UNQUANTIZED)
    op.validate(a)
    given = dict(zip(op.parameters, tensors, strict=True))
    if not op.tensors(a) or not op.has_kernel(a, [t for t in tensors if t is not None]):
        return None
    outputs, scalar = op.by_result(op.allocate(a)), op.function_of(a)
    elements = [name for name in scalar.parameters if given[name] is not None]
    return Plan(
        tuple(
            (
                next((i for i, x in enumerate(tensors) if x is not None and _are_alike(x, t)), None),
                tuple(t.shape),
                t.stride(),
                t.dtype,
            )
            for t in outputs.values()
        ),
        tuple(op.parameters.index(name) for name in (*elements, *scalar.tables)),
        tuple(
            i
            for i, (name, each) in enumerate(zip(op.parameters, layout, strict=True))
            if name in scalar.parameters and each is float
        ),
        _bound_for(op.name, scalar, op.values(a), outputs, target),
    )


class _Stored(NamedTuple):
    """How a pass stores a quantized result."""

    format: str
    stripes: bool  # tiles are stripes of 128 rows
    strides: tuple[int, ...]  # of the codes and scales of the row-wise copy
    strides_t: tuple[int, ...]  # of the column-wise copy


@remembered
def _bound(
    name: str, scalar: Scalar, kinds: tuple[Typed, ...], layouts: tuple[tuple[str, _Layout], ...],
    inputs: int, integers: tuple[tuple[str, int], ...], to: _Stored | None, target: Capabilities,
) -> BoundLaunch:  # fmt: skip
    """Bind the launch for a layout of inputs and outputs. The last operand is an output; that of a function of elements
    has all dimensions."""
    if scalar.dims or to is not None:
        return _bound_rows(name, scalar, kinds, layouts, inputs, integers, to, target)
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
        flat_align = 16 if last.size % 16 == 0 else 1  # two variants, whatever the sizes
        launch = Launch.of(kernel, num_warps=warps, TILE=tile, ALIGN=flat_align)
        return launch.bind((-(-last.size // tile), 1, 1), **dict(integers), count=last.size, **steps)
    cols = min(64 if dense else tile, _power_of_two(last.size))
    sizes, align = _outer_arguments(outer, operands)
    launch = Launch.of(
        kernel, num_warps=warps, ROWS=tile // cols, COLS=cols, ALIGN=align_of(last.size, *align)
    )
    rows = math.prod(each.size for each in outer)
    grid = (-(-rows // (tile // cols)) * -(-last.size // cols), 1, 1)
    return launch.bind(grid, **dict(integers), rows=rows, cols=last.size, **sizes, **steps)


def _outer_arguments(
    outer: Sequence[_Dimension], operands: Sequence[Operand]
) -> tuple[dict[str, int], list[int]]:
    """Return the sizes and strides of the outer dimensions as a kernel takes them, and the strides between rows that
    are read densely."""
    arguments = {f"size{i}": outer[i].size for i in range(1, len(outer))}
    dense = []
    for i, each in enumerate(operands):
        if each.varies:
            arguments |= {f"{each.name}_stride{k}": d.strides[i] for k, d in enumerate(outer)}
            dense += [d.strides[i] for d in outer] if each.step == "1" else []
    return arguments, dense


def _bound_rows(
    name: str, scalar: Scalar, kinds: tuple[Typed, ...], layouts: tuple[tuple[str, _Layout], ...],
    inputs: int, integers: tuple[tuple[str, int], ...], to: _Stored | None, target: Capabilities,
) -> BoundLaunch:  # fmt: skip
    """Bind the launch of a function of rows, or of one whose result is quantized. Then the rows are those of the result
    in order, and each tile of a function of elements has a program."""
    shape = torch.broadcast_shapes(*(layout.shape for _, layout in layouts))
    before = len(shape) - (scalar.dims or 1)
    inner = shape[before:]
    cols, rows = math.prod(inner), math.prod(shape[:before])
    whole = [_Layout(shape, _strides_in(shape, layout)) for _, layout in layouts]
    outer = [_Dimension(1, (0,) * len(layouts))]
    if rows > 1:
        leading = [_Layout(shape[:before], each.strides[:before]) for each in whole]
        outer = merged(shape[:before], leading, in_order=to is not None)
    row_strides = [each.strides[before:] for each in whole]
    operands = [
        Operand(
            each,
            _step(inner, row_strides[i]),
            rows == 1 or any(d.strides[i] for d in outer),
            _along(inner, row_strides[i]),
        )
        for i, (each, _) in enumerate(layouts)
    ]
    if to is not None:
        operands[-1] = Operand(layouts[-1][0], "codes", False)
    strides_of_rows, dense = _outer_arguments(outer, operands)
    by_row = to is not None and Format.of(to.format).block == "row"
    tile, warps = row_config(cols if scalar.dims or by_row else min(cols, 1024), len(layouts), target)
    one_tile = by_row or scans_both_ways(scalar)
    split = any(each.along for each in operands) and not one_tile
    tile = max(tile, _power_of_two(cols)) if one_tile else tile
    loops = split or (scalar.dims > 0 and cols > tile)
    if split:
        operands = [
            o._replace(step="part") if o.along and scalar.dims - 1 not in o.along else o for o in operands
        ]
    width = min(tile, _power_of_two(inner[-1] if split else cols)) if cols > 1 else 1
    form = Form(kinds, tuple(operands[:inputs]), tuple(operands[inputs:]), len(outer), loops)
    arguments: dict[str, Any] = strides_of_rows | {
        f"inner{i}": inner[i] for i in form.inner_sizes(scalar.dims)
    }
    for each, strides in zip(operands, row_strides, strict=True):
        arguments |= {f"{each.name}_step{i}": strides[i] for i in each.along}
        if each.step == "any":
            arguments[f"{each.name}_step"] = _merged_step(inner, strides) or 0
    align = align_of(cols, *dense, *inner[-1:] if split else ())
    constants: dict[str, Any] = {"ALIGN": align}
    if to is not None:
        format = Format.of(to.format)
        constants |= {"FORMAT": format, "CAST": cast_mode(target)}
        arguments["out"] = (to.strides, to.strides_t)
        width = max(width, LONGEST_GROUP)
        if to.stripes:
            width, warps = stripe_config("pointwise", format.block, align, target)
            tile = STRIPE * width
    height = tile // width
    tiles = 1 if scalar.dims else -(-cols // width)
    launch = Launch.of(kernel_for(name, scalar, form), num_warps=warps, ROWS=height, COLS=width, **constants)
    return launch.bind(
        (-(-rows // height) * tiles, 1, 1), **dict(integers), rows=rows, cols=cols, **arguments
    )


def _strides_in(shape: Sequence[int], layout: _Layout) -> tuple[int, ...]:
    """Return a tensor's strides along the dimensions of the shape it is broadcast to."""
    own = (0 if size == 1 else s for size, s in zip(layout.shape, layout.strides, strict=True))
    return (0,) * (len(shape) - len(layout.shape)) + tuple(own)


def _merged_step(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """Return the stride of dimensions that are one in memory; None if they are not."""
    real = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    for (_, outer), (size, stride) in itertools.pairwise(real):
        if outer != stride * size:
            return None
    return real[-1][1] if real else 0


def _along(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions of a row along which an operand varies, if they are not one in memory."""
    if _merged_step(sizes, strides) is not None:
        return ()
    return tuple(i for i, stride in enumerate(strides) if stride)


def _step(sizes: Sequence[int], strides: Sequence[int]) -> str:
    """Return how an operand is addressed along a row."""
    step = _merged_step(sizes, strides)
    return "split" if step is None else str(step) if step in (0, 1) else "any"


def _bound_for(
    name: str, scalar: Scalar, values: Mapping[str, Any], outputs: Mapping[str, Tensor], target: Capabilities,
    to: _Stored | None = None,
) -> BoundLaunch:  # fmt: skip
    """Bind the launch of a scalar function for tensors and numbers like these."""
    used = {parameter: values[parameter] for parameter in scalar.parameters}
    tensors = {name: value for name, value in used.items() if isinstance(value, Tensor)}
    integers = [
        (f"{n}_value", int(v)) for n, v in used.items() if n not in tensors and not isinstance(v, float)
    ]
    for table in scalar.tables:
        integers += [(f"{table}_size{i}", size) for i, size in enumerate(values[table].shape)]
        integers += [(f"{table}_stride{i}", stride) for i, stride in enumerate(values[table].stride())]
    layouts = [(n, layout_of(t)) for n, t in tensors.items()]
    for result, (n, t) in zip(scalar.results, outputs.items(), strict=True):
        layout = layout_of(t)
        ones = (1,) * (scalar.dims if result in scalar.narrow else 0)
        layouts.append((n, _Layout(layout.shape + ones, layout.strides + ones)))
    return _bound(
        name,
        scalar,
        tuple(map(kind_of, used.values())),
        tuple(layouts),
        len(tensors),
        tuple(integers),
        to,
        target,
    )


def launch_scalar(
    name: str, scalar: Scalar, values: Mapping[str, Any], outputs: Mapping[str, Tensor]
) -> None:
    """Compute a scalar function of tensors and numbers into outputs of the full shape."""
    device = next(iter(outputs.values())).device
    bound = _bound_for(name, scalar, values, outputs, capabilities_of(device))
    _start(bound, scalar, values, outputs.values())


def _start(
    bound: BoundLaunch, scalar: Scalar, values: Mapping[str, Any], outputs: Iterable[Tensor | None]
) -> None:
    """Start a launch with the tensors and floats among the values, and with its outputs."""
    used = [values[parameter] for parameter in scalar.parameters]
    tensors = [value for value in used if isinstance(value, Tensor)]
    tensors += [values[table] for table in scalar.tables]
    bound((*tensors, *outputs), tuple(value for value in used if isinstance(value, float)))


# ---- quantized results --------------------------------------------------------------------------------------


class _Quantized:
    """Passes of a call whose result is quantized."""

    def __init__(
        self, name: str, scalar: Scalar, values: Mapping[str, Any], result: Result, format: str
    ) -> None:
        self.name, self.scalar, self.values, self.y, self.format = name, scalar, values, result.y, format
        self.rows, self.cols = math.prod(self.y.shape[:-1]), self.y.shape[-1]

    def rows_pass(
        self, copy: Codes | None, amax: Tensor | None, wants_amax: bool, has_stats: bool
    ) -> Tensor | None:
        return self.run(False, copy, None, amax, wants_amax)

    def stripes_pass(
        self, row: Codes | None, col: Codes | None, amax: Tensor | None, wants_amax: bool
    ) -> Tensor | None:
        count_stripes(self.rows, self.cols)
        return self.run(True, row, col, amax, wants_amax)

    def run(
        self, stripes: bool, row: Codes | None, col: Codes | None, amax: Tensor | None, wants_amax: bool
    ) -> Tensor | None:
        """Launch a pass; return the amax of each of its tiles if wanted."""
        data, scale, *strides = copy_arguments(row)
        data_t, scale_t, *strides_t = copy_arguments(col)
        to = _Stored(self.format, stripes, tuple(strides), tuple(strides_t))
        target = capabilities_of(self.y.device)
        bound = _bound_for(self.name, self.scalar, self.values, {"out": self.y}, target, to)
        partials = None
        if wants_amax:
            height, width = bound.launch.constants["ROWS"], bound.launch.constants["COLS"]
            tiles = -(-self.rows // height) * -(-self.cols // width)
            partials = scratch((tiles,), torch.float32, self.y.device)
        _start(bound, self.scalar, self.values, (amax, partials, data, scale, data_t, scale_t))
        return partials


def launch_quantized(
    name: str, scalar: Scalar, values: Mapping[str, Any], result: Result, options: ResultOptions
) -> None:
    """Compute a scalar function of tensors and numbers into a quantized result."""
    assert options.format is not None
    format, y = Format.of(options.format), result.y
    if _fills_copies(scalar, values, format, options.columnwise, y.shape[-1]):
        call = _Quantized(name, scalar, values, result, options.format)
        make_copies(
            result, options, call.rows_pass, call.stripes_pass, direct=not format.square, statistics=False
        )
        return
    wide = scratch(y.shape, torch.float32, y.device)
    launch_scalar(name, scalar, values, {"out": wide})
    quantize_into(result, options._replace(dtype=torch.float32), wide)


def _fills_copies(
    scalar: Scalar, values: Mapping[str, Any], format: Format, columnwise: bool, cols: int
) -> bool:
    """Return whether the kernel of a function can store the codes: its tiles hold whole groups, and whole rows if these
    have one scale."""
    if format.block == "row" and cols > LONGEST_TILE:
        return False
    if scalar.dims > 1 or (scalar.dims == 1 and (columnwise or format.square)):
        return False
    return any(isinstance(values[name], Tensor) for name in scalar.parameters)


# ---- gradients of arguments that were broadcast -------------------------------------------------------------


def _summed_first(shape: Sequence[int], out: Tensor) -> list[int]:
    """Return the dimensions of a shape in another order: first those along which `out` was broadcast."""
    own = (1,) * (len(shape) - out.dim()) + tuple(out.shape)
    along = [i for i, size in enumerate(own) if size != shape[i]]
    return along + [i for i in range(len(shape)) if i not in along]


def room_for(shape: Sequence[int], out: Tensor) -> Tensor:
    """Allocate an fp32 gradient of the shape that `out` was broadcast to, so that sums run over rows in memory."""
    order = _summed_first(shape, out)
    memory = scratch(tuple(shape[i] for i in order), torch.float32, out.device)
    return memory.permute([order.index(i) for i in range(len(shape))])


def sum_into(out: Tensor, gradient: Tensor) -> None:
    """Sum a gradient over the dimensions along which `out` was broadcast, in order."""
    rows = gradient.permute(_summed_first(gradient.shape, out)).view(-1, out.numel())
    total = out if out.is_contiguous() else scratch(out.shape, out.dtype, out.device)
    sum_rows(rows, total.view(-1))
    if total is not out:
        out.copy_(total)

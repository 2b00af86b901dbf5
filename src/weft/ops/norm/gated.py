"""RMSNorm of the output of an attention, times a gate: over whole rows or groups of their columns, transposed on the
way.

    r = 1 / sqrt(mean(x^2) + eps)              over each of the `groups` equal parts of a row
    z = x * r                                  casting="llama" rounds z to x's dtype, and the next product to that which
    y = z * (weight + weight_offset)           x's and the weight's promote to
    y = y * f(gate)                            f = sigmoid, or silu: f(g) = g * sigmoid(g)
    out = round(y), or its codes and scales

All of it in fp32 with one rounding to each stored tensor; a quantised result is made from the fp32 y. With
`transpose`, x and its gradient are [B, L, ...] while gate, y and their gradients are [L, B, ...]: each is read and
written where it lies. Backward, with dy the gradient of y, d = dy * f(gate) and t = d * (weight + weight_offset):

    dx = r * (t - z * mean(t * z))             the mean over the group
    dgate = dy * z * (weight + weight_offset) * f'(gate)
    dweight = sum over rows of d * z

The sums over rows are fp32 partial sums, one per program, added up in order: the same bits every run. Rounding
steps are passed straight through: with casting="llama" dgate and dweight have the rounded numbers in them, as the
forward multiplies them, and dx the exact z.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor

from ...quant import Codes, Format, QTensor
from ...runtime import (
    LATER,
    Backward,
    BoundLaunch,
    Capabilities,
    Gradients,
    Launch,
    Op,
    Sharding,
    capabilities_of,
    choice,
)
from ..common.activations import activation_reference
from ..common.checks import FLOATS, check_input, check_tensor, epsilon, real, whole
from ..common.copies import STRIPE, cast_mode, copy_arguments, count_stripes, stripe_config
from ..common.results import (
    Result,
    ResultOptions,
    allocate_result,
    make_copies,
    result_options,
    result_reference,
)
from ..common.rows import align_of, compute_dtype, contiguous, count_rows, cpu_tile, empty_where, tile_warps
from ..common.sums import sum_partials
from ..quantize import quantize_into
from .gated_kernels import gated_norm_backward_kernel, gated_norm_kernel, gated_norm_stripe_kernel

if TYPE_CHECKING:
    from typing_extensions import Unpack

Activation = Literal["sigmoid", "silu"]

# ---- arguments and outputs ------------------------------------------------------------------------------


class GatedNormArgs(NamedTuple):
    x: Tensor  # [..., K]
    gate: Tensor  # like x, or [L, B, ..., K] of an x [B, L, ..., K]
    weight: Tensor | None  # [K]
    groups: int
    act: str
    eps: float
    weight_offset: float
    casting: str
    transpose: bool
    stats: bool  # rstd is wanted, for the backward
    result: ResultOptions


class GatedNormOutputs(NamedTuple):
    result: Result
    rstd: Tensor | None  # fp32 [rows of y * groups]


class GatedNormNeeds(NamedTuple):
    """Which gradients are wanted."""

    x: bool = False
    gate: bool = False
    weight: bool = False


class GatedNormGradients(NamedTuple):
    x: Tensor | None
    gate: Tensor | None
    weight: Tensor | None


class GatedNormBackwardArgs(NamedTuple):
    x: Tensor
    gate: Tensor
    dy: Tensor
    weight: Tensor | None
    rstd: Tensor
    groups: int
    act: str
    weight_offset: float
    casting: str
    transpose: bool
    needs: GatedNormNeeds


# ---- reference ------------------------------------------------------------------------------------------


def _in_order(x: Tensor, transpose: bool) -> Tensor:
    """A view of x with its rows in the order of the rows of y."""
    return x.transpose(0, 1) if transpose else x


def _by_group(x: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[rows, groups, columns of a group]."""
    return x.reshape(count_rows(x), groups, x.shape[-1] // groups).to(dtype)


def _rounded(value: Tensor, a: GatedNormArgs | GatedNormBackwardArgs, *factors: Tensor) -> Tensor:
    """With casting="llama" the value as PyTorch stores the product of these factors."""
    if a.casting != "llama":
        return value
    dtype = functools.reduce(torch.promote_types, [factor.dtype for factor in factors])
    return value.to(dtype).to(value.dtype)


# ---- launch ---------------------------------------------------------------------------------------------


class GroupConfig(NamedTuple):
    """How groups are cut: a program has `rows` of them, `tile` columns at a time, in a loop if a group has more."""

    rows: int
    tile: int
    num_warps: int


@choice("gated_norm", rows=(1, 64), tile=(64, 16384), num_warps=(1, 16))
def group_config(
    cols: int, smallest_tile: int, backward: bool, align: int, target: Capabilities
) -> GroupConfig:
    if target.is_cpu:
        return GroupConfig(
            1, cpu_tile(cols, 128, 4096 if backward else 1024), 4
        )  # 128: a block of any format
    # The group rounded up to a power of two, as far as registers hold it: backward has three tiles and a sum.
    tile = max(1 << max(cols - 1, 0).bit_length(), smallest_tile, 64)
    most = 8192 if backward else 16384
    loop = tile > most
    tile = min(tile, most // 2 if loop else most)
    # Where accesses are one element wide, addresses take more registers than the elements.
    rows = max(1, (1024 if backward else 2048) // (4 if align == 1 else 1) // tile)
    return GroupConfig(rows, tile, tile_warps(rows * tile * (2 if loop and backward else 1), target))


@functools.lru_cache(maxsize=4096)
def _levels(shape: tuple[int, ...], groups: int, *strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """(second, third, three strides of each tensor): how kernels count the groups of tensors of this shape, and where
    those of each tensor lie; None if that takes more than three dimensions, or if the numbers of a group are apart."""
    *sizes, cols = shape
    if cols > 1 and any(stride[-1] != 1 for stride in strides):
        return None
    merged: list[tuple[int, list[int]]] = []
    for size, *steps in zip((*sizes, groups), *((*s[:-1], cols // groups) for s in strides), strict=True):
        if size == 1:
            continue
        if merged and all(before == size * step for before, step in zip(merged[-1][1], steps, strict=True)):
            merged[-1] = (merged[-1][0] * size, steps)
        else:
            merged.append((size, steps))
    if len(merged) > 3:
        return None
    merged = [(1, [0] * len(strides))] * (3 - len(merged)) + merged
    found = [merged[1][0], merged[2][0]]
    for i in range(len(strides)):
        found += [steps[i] for _, steps in merged]
    return tuple(found)


def _strides_in_order(x: Tensor, transpose: bool) -> tuple[int, ...]:
    """The strides of `_in_order(x, transpose)`. Kernels take no more than these and the address, which is x's."""
    if not transpose:
        return x.stride()
    first, second, *rest = x.stride()
    return second, first, *rest


def _laid_out(
    groups: int, transpose: bool, x: Tensor, read: tuple[Tensor, ...], written: Tensor | None = None
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """x and other tensors that are read, with their `_levels` and those of the gradient of x that is written; copies of
    those that lie in too many ways. The one that is written has no gaps. x and its gradient are transposed, or not."""
    shape = read[0].shape
    rest = [] if written is None else [_strides_in_order(written, transpose)]
    levels = _levels(shape, groups, _strides_in_order(x, transpose), *[t.stride() for t in read], *rest)
    if levels is None:
        x, *others = (t if t.is_contiguous() else t.contiguous() for t in (x, *read))
        read = tuple(others)
        levels = _levels(shape, groups, _strides_in_order(x, transpose), *[t.stride() for t in read], *rest)
        assert levels is not None
    return (x, *read), levels


def _within_groups(format: Format, groups: int, cols: int) -> bool:
    """Whether no block of the row-wise copy reaches from one group into the next."""
    if format.block == "128x128":
        return False
    if groups == 1:
        return True
    return format.block != "row" and cols % max(format.group, format.packed) == 0


class _Layout(NamedTuple):
    """Where the groups of x and of the gate lie, in the order in which kernels take it."""

    rows: int  # groups of all tokens
    cols: int  # of a group
    groups: int
    levels: tuple[int, ...]

    @property
    def align(self) -> int:
        """Of which the columns of a group and all strides are multiples."""
        return align_of(self.cols, *self.levels[2:])


class _Pass(NamedTuple):
    """What a pass over groups makes, as far as it decides the launch."""

    smallest_tile: int = 1
    format: str | None = None  # of the row-wise copy
    cast: int = 0
    static: bool = False  # the scale is given
    known: bool = False  # the statistics are given
    strides: tuple[int, ...] = (0, 0)  # of the scales of the copy


_PLAIN = _Pass()


@functools.lru_cache(maxsize=4096)
def _groups_launch(layout: _Layout, act: str, casting: str, target: Capabilities, made: _Pass) -> BoundLaunch:
    """A pass over groups."""
    align = layout.align
    config = group_config(layout.cols, made.smallest_tile, False, align, target)
    launch = Launch.of(
        gated_norm_kernel,
        num_warps=config.num_warps,
        ACT=act,
        LLAMA=casting == "llama",
        FORMAT=made.format and Format.of(made.format),
        CAST=made.cast,
        STATIC=made.static,
        KNOWN=made.known,
        ROWS=config.rows,
        TILE=config.tile,
        LOOP=config.tile < layout.cols,
        ALIGN=align,
        COLS_MASKED=layout.cols % config.tile != 0,
    )
    rows, cols, groups, levels = layout
    programs = -(-rows // config.rows)
    return launch.bind((programs, 1, 1), (programs * config.rows, rows, cols, groups, *levels, *made.strides))


class _GatedNorm:
    """One call: where its tensors lie, and its passes."""

    def __init__(self, o: GatedNormOutputs, a: GatedNormArgs) -> None:
        self.o, self.a = o, a
        width = a.gate.shape[-1]
        self.target = capabilities_of(a.x.device)
        self.weight = contiguous(a.weight)
        (self.x, self.gate), levels = _laid_out(a.groups, a.transpose, a.x, (a.gate,))
        self.layout = _Layout(a.gate.numel() // width * a.groups, width // a.groups, a.groups, levels)
        self.rstd = o.rstd

    def plain(self, y: Tensor, made: _Pass = _PLAIN) -> None:
        _groups_launch(self.layout, self.a.act, self.a.casting, self.target, made)(
            (self.x, self.gate, self.weight, None, y, self.rstd, None, None, None),
            (self.a.eps, self.a.weight_offset),
        )

    def quantized(self) -> None:
        o, a = self.o, self.a
        assert a.result.format is not None
        self.format = f = Format.of(a.result.format)
        self.cast = cast_mode(self.target)
        direct = _within_groups(f, a.groups, self.layout.cols)
        if f.block == "row" and not direct:
            # One scale for several groups: y is stored in fp32 and then quantised.
            y = torch.empty(a.gate.shape, dtype=torch.float32, device=self.x.device)
            self.plain(y, _Pass(f.group, cast=self.cast, static=a.result.scale is not None))
            quantize_into(o.result, a.result, y)
            return
        by_tensor = f.needs_tensor_amax and a.result.scale is None
        if self.rstd is None and (by_tensor or a.result.columnwise or not direct):
            # There is more than one pass, and the later ones read the statistics that the first one writes.
            self.rstd = torch.empty(self.layout.rows, dtype=torch.float32, device=self.x.device)
        make_copies(o.result, a.result, self.groups_pass, self.stripes_pass, direct=direct, statistics=True)

    def groups_pass(
        self, copy: Codes | None, given: Tensor | None, wants_amax: bool, known: bool
    ) -> Tensor | None:
        a, to = self.a, self.a.result
        data, data_scale, _, *strides = copy_arguments(copy)
        format = None if copy is None else to.format
        made = _Pass(self.format.group, format, self.cast, to.scale is not None, known, tuple(strides))
        launch = _groups_launch(self.layout, a.act, a.casting, self.target, made)
        partials = (
            torch.empty(launch.grid[0], dtype=torch.float32, device=self.x.device) if wants_amax else None
        )
        gate, weight = self.gate, self.weight
        if copy is None and partials is None:  # computes the statistics alone
            gate = weight = None  # type: ignore[assignment]
        launch(
            (self.x, gate, weight, given if copy else None, None, self.rstd, partials, data, data_scale),
            (a.eps, a.weight_offset),
        )
        return partials

    def stripes_pass(
        self, row: Codes | None, col: Codes | None, given: Tensor | None, wants_amax: bool
    ) -> Tensor | None:
        rows, cols, groups, levels = self.layout
        tokens, width, align = rows // groups, cols * groups, self.layout.align
        tile, num_warps = stripe_config("gated_norm", self.format.block, align, self.target)
        stripes = count_stripes(tokens, width)
        tiles = stripes * -(-width // tile)
        partials = torch.empty(tiles, dtype=torch.float32, device=self.x.device) if wants_amax else None
        data, data_scale, *strides = copy_arguments(row)
        data_t, data_t_scale, *strides_t = copy_arguments(col)
        launch = Launch.of(
            gated_norm_stripe_kernel,
            num_warps=num_warps,
            ACT=self.a.act,
            LLAMA=self.a.casting == "llama",
            FORMAT=self.format,
            CAST=self.cast,
            STATIC=self.a.result.scale is not None,
            ROWS=STRIPE,
            TILE=tile,
            WITHIN=cols % tile == 0,
            ALIGN=align,
            COLS_MASKED=width % tile != 0,
        )
        launch(
            (tiles, 1, 1),
            (
                self.x,
                self.gate,
                self.weight,
                given,
                self.rstd,
                partials,
                data,
                data_scale,
                data_t,
                data_t_scale,
            ),
            (stripes * STRIPE * groups, tokens, width, groups, *levels, *strides, *strides_t),
            (self.a.weight_offset,),
        )
        return partials


# ---- registration ---------------------------------------------------------------------------------------


class GatedNormBackwardOp(
    Op[GatedNormBackwardArgs, GatedNormGradients], name="gated_norm_backward", variants=32
):
    def allocate(self, a: GatedNormBackwardArgs) -> GatedNormGradients:
        return GatedNormGradients(*empty_where(a.needs, (a.x, a.gate, a.weight)))

    def present(self, a: GatedNormBackwardArgs) -> Any:
        return a.needs

    def launch(self, o: GatedNormGradients, a: GatedNormBackwardArgs) -> None:
        groups, width = a.groups, a.gate.shape[-1]
        cols, tokens = width // groups, a.gate.numel() // width
        target = capabilities_of(a.x.device)
        (x, gate, dy), levels = _laid_out(groups, a.transpose, a.x, (a.gate, a.dy), o.x)
        if o.x is None:
            levels = (*levels, 0, 0, 0)
        align = align_of(cols, *levels[2:])
        config = group_config(cols, 1, True, align, target)
        # Four programs for each multiprocessor, shared out evenly among the groups; no more than a group has tiles of
        # tokens.
        parts = min(-(-tokens // config.rows), max(1, -(-target.multiprocessors * 4 // groups)))
        program_tokens = -(-tokens // parts)
        program_tokens = -(-program_tokens // config.rows) * config.rows
        parts = -(-tokens // program_tokens)
        sums = None
        if o.weight is not None:
            sums = torch.empty((parts, width), dtype=torch.float32, device=x.device)
        launch = Launch.of(
            gated_norm_backward_kernel,
            num_warps=config.num_warps,
            ACT=a.act,
            LLAMA=a.casting == "llama",
            ROWS=config.rows,
            TILE=config.tile,
            LOOP=config.tile < cols,
            ALIGN=align,
            COLS_MASKED=cols % config.tile != 0,
        )
        launch(
            (parts * groups, 1, 1),
            (x, gate, dy, contiguous(a.weight), a.rstd, o.x, o.gate, sums),
            (parts * program_tokens * groups, tokens, program_tokens, cols, groups, *levels),
            (a.weight_offset,),
        )
        if o.weight is not None and sums is not None:
            sum_partials(sums, o.weight)

    def reference(self, a: GatedNormBackwardArgs) -> GatedNormGradients:
        dtype, groups = compute_dtype(a.x), a.groups
        h, g, d = (_by_group(t, groups, dtype) for t in (_in_order(a.x, a.transpose), a.gate, a.dy))
        r = a.rstd.to(dtype).view(len(h), groups, 1)
        z = h * r
        w = 1.0 if a.weight is None else (a.weight.to(dtype) + a.weight_offset).view(groups, -1)
        f, slope = activation_reference(g, a.act)
        seen = _rounded(z, a, a.x)  # as the weight multiplies it
        weighted = seen if a.weight is None else _rounded(seen * w, a, a.x, a.weight)
        dx = dgate = dweight = None
        if a.needs.x:
            t = d * f * w
            dx = (r * (t - z * (t * z).mean(2, keepdim=True))).to(a.x.dtype)
            dx = _in_order(dx.view(a.gate.shape), a.transpose).contiguous()
        if a.needs.gate:
            dgate = (d * weighted * slope).to(a.gate.dtype).view(a.gate.shape)
        if a.needs.weight and a.weight is not None:
            dweight = (d * f * seen).sum(0).flatten().to(a.weight.dtype)
        return GatedNormGradients(dx, dgate, dweight)


gated_norm_backward_op = GatedNormBackwardOp()


class GatedNormOp(Op[GatedNormArgs, GatedNormOutputs], name="gated_norm", variants=72):
    def allocate(self, a: GatedNormArgs) -> GatedNormOutputs:
        rstd = None
        if a.stats:
            rstd = torch.empty(count_rows(a.gate) * a.groups, dtype=torch.float32, device=a.x.device)
        return GatedNormOutputs(allocate_result(a.result, a.gate), rstd)

    def present(self, a: GatedNormArgs) -> Any:
        return GatedNormOutputs(a.result.present(), a.stats)  # type: ignore[arg-type]

    def launch(self, o: GatedNormOutputs, a: GatedNormArgs) -> None:
        call = _GatedNorm(o, a)
        if a.result.format is None:
            call.plain(o.result.y)
        else:
            call.quantized()

    def reference(self, a: GatedNormArgs) -> GatedNormOutputs:
        """The definition."""
        dtype = compute_dtype(a.x)
        h = _by_group(_in_order(a.x, a.transpose), a.groups, dtype)
        rstd = 1.0 / torch.sqrt(h.square().mean(2) + a.eps)
        y = (h * rstd[:, :, None]).reshape(len(h), a.gate.shape[-1])
        y = _rounded(y, a, a.x)
        if a.weight is not None:
            y = _rounded(y * (a.weight.to(dtype) + a.weight_offset), a, a.x, a.weight)
        y = y * activation_reference(a.gate.reshape(y.shape).to(dtype), a.act)[0]
        return GatedNormOutputs(
            result_reference(a.result, y, a.gate.shape, a.x), rstd.flatten() if a.stats else None
        )

    def keep(self, a: GatedNormArgs, o: GatedNormOutputs) -> GatedNormBackwardArgs:
        assert o.rstd is not None
        return GatedNormBackwardArgs(
            x=a.x,
            gate=a.gate,
            dy=LATER,
            weight=a.weight,
            rstd=o.rstd,
            groups=a.groups,
            act=a.act,
            weight_offset=a.weight_offset,
            casting=a.casting,
            transpose=a.transpose,
            needs=GatedNormNeeds(),
        )

    def backward(self, b: Backward) -> Gradients:
        args: GatedNormBackwardArgs = b.kept
        needs = GatedNormNeeds(b.needs.x, b.needs.gate, b.needs.weight)
        return gated_norm_backward_op(args._replace(dy=b.grads.result.y, needs=needs))._asdict()

    def shard(self, a: GatedNormArgs) -> Sharding:
        joint, block = a.result.blocks()
        of_x = " ".join(["1", "0", *map(str, range(2, a.x.dim() - 1)), "k"]) if a.transpose else "... k"
        return Sharding(
            {"gate": "... k", "x": of_x, "weight": "k", "result_scale": ""},
            {"result_y": "... k", "result_amax": "max:"},
            {"k": "the norm is taken over it", **joint},
            block,
        )


gated_norm_op = GatedNormOp()


# ---- public function ------------------------------------------------------------------------------------


class GatedNormOptions(TypedDict, total=False):
    """The options of `gated_norm` that do not decide what it returns."""

    groups: int
    act: Activation
    eps: float | None
    weight_offset: float
    casting: Literal["fp32", "llama"]
    transpose: bool
    out_dtype: torch.dtype | None
    rowwise: bool
    columnwise: bool
    quant_scale: Tensor | None


@overload
def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None = None, *, quantize: None = None,
    **options: Unpack[GatedNormOptions],
) -> Tensor: ...  # fmt: skip
@overload
def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None = None, *, quantize: Format | str,
    return_amax: Literal[False] = False, **options: Unpack[GatedNormOptions],
) -> QTensor: ...  # fmt: skip
@overload
def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None = None, *, quantize: Format | str,
    return_amax: Literal[True], **options: Unpack[GatedNormOptions],
) -> tuple[QTensor, Tensor]: ...  # fmt: skip
@overload
def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None = None, *, quantize: Format | str | None = None,
    return_amax: bool = False, **options: Unpack[GatedNormOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    *,
    groups: int = 1,
    act: Activation = "sigmoid",
    eps: float | None = 1e-6,
    weight_offset: float = 0.0,
    casting: Literal["fp32", "llama"] = "fp32",
    transpose: bool = False,
    out_dtype: torch.dtype | None = None,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    quant_scale: Tensor | None = None,
    return_amax: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm of x times a gate: `y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset) * f(gate)`.

    x: [..., K], or the heads [..., H, d] of an attention with H * d = K; gate: [..., K]; weight: [K]. All in bf16,
    fp16 or fp32, x and gate of any strides. Returns y in the shape of the gate, and the largest |y| with
    `return_amax`.

    - `groups`: the mean is taken over each of this many equal parts of the last dimension. For heads that share a
      weight [d], give x and gate as [..., H, d] and leave groups=1.
    - `act`: f, "sigmoid" or "silu".
    - `eps`: None means the same as for `weft.rms_norm`.
    - `transpose`: x and its gradient are [B, L, ...], as attention leaves them; gate and y are [L, B, ...], as the
      layers around it want them.
    - `weight_offset`: 1 for weights stored around zero.
    - `casting`: "fp32" rounds once, at the end; "llama" rounds the normalised x to x's dtype before the weight, and the
      product of both before the gate, to the dtype to which PyTorch promotes x's and the weight's: HuggingFace's order
      for Qwen3-Next, Qwen3.5 and OLMo Hybrid.
    - `out_dtype`: of y, x's by default.
    - `quantize`, `rowwise`, `columnwise`, `quant_scale`, `return_amax`: as for `weft.rms_norm`; the rows of the
      codes are those of y. A row-wise copy is made in the same pass if no block of it reaches from one group into
      the next.

    >>> import torch, weft
    >>> x = torch.randn(2, 5, 4, 64, dtype=torch.bfloat16)  # heads of 2 sequences
    >>> gate = torch.randn(5, 2, 256, dtype=torch.bfloat16)
    >>> y = weft.gated_norm(x, gate, torch.ones(256), groups=4, transpose=True)
    >>> y.shape
    torch.Size([5, 2, 256])
    >>> q = weft.gated_norm(x, gate, groups=2, transpose=True, quantize="1x128")
    >>> q.rowwise.data.shape
    torch.Size([10, 256])
    """
    check_input("x", x)
    check_input("gate", gate)
    if x.dim() == gate.dim() + 1 and x.shape[-2] * x.shape[-1] == gate.shape[-1]:
        x = x.flatten(-2)
    shape = x.shape
    if transpose:
        if len(shape) < 3:
            raise ValueError(f"transpose=True is for an x of shape [B, L, ..., K]; got {tuple(shape)}")
        shape = torch.Size((shape[1], shape[0], *shape[2:]))
    check_tensor("gate", gate, FLOATS, x.device, shape)
    cols = shape[-1]
    if whole("groups", groups) < 1 or cols % groups:
        raise ValueError(f"groups must be equal parts of the last dimension, {cols}; got {groups}")
    if weight is not None:
        check_tensor("weight", weight, FLOATS, x.device, (cols,))
    if act not in ("sigmoid", "silu"):
        raise ValueError(f"act must be 'sigmoid' or 'silu'; got {act!r}")
    if casting not in ("fp32", "llama"):
        raise ValueError(f"casting must be 'fp32' or 'llama'; got {casting!r}")
    options = result_options(
        x, quantize, rowwise=rowwise, columnwise=columnwise, quant_scale=quant_scale, return_amax=return_amax,
        out_dtype=out_dtype,
    )  # fmt: skip
    stats = torch.is_grad_enabled() and (
        x.requires_grad or gate.requires_grad or (weight is not None and weight.requires_grad)
    )
    offset = real("weight_offset", weight_offset)
    a = GatedNormArgs(
        x, gate, weight, groups, act, epsilon(eps, x), offset, casting, transpose, stats, options
    )
    result = gated_norm_op(a).result
    y = result.value(options)
    return y if result.amax is None else (y, result.amax)

"""The router's projection: logits in true fp32 from activations that stay in bf16.

    y[t, e] = sum_h x[t, h] * weight[e, h] + bias[e]               fp32, [T, E]
    dx = round(dy @ weight)         dweight = round(dy^T @ x)      dbias = round(sum_t dy)

x is bf16 (or fp16, fp32), weight fp32 or bf16; y and its gradient are fp32. No operand is rounded: on matrix units an
fp32 number is taken as the sum of its three bf16 parts (`tiles.split`), elsewhere products are fp32 multiply-adds. So
each result is an fp32 sum with a rounding for every addition, and one rounding to its dtype at the end. Sums run over
tiles of columns (of experts, of tokens): each tile is added up from zero and then added to the total, which makes the
chains of additions shorter. The only fp32 tensors in memory are results and, where several programs share a sum, their
partial sums, which are added up in order: every run gives the same bits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...language import tl
from ...runtime import (
    Backward,
    Capabilities,
    Gradients,
    Launch,
    Op,
    Sharding,
    capabilities_of,
    choice,
    kernel,
)
from ...tiles.split import dot_fp32
from ..common.checks import FLOATS, check_input, check_tensor
from ..common.rows import align_of, compute_dtype, contiguous, count_rows, flat_rows
from ..common.sums import sum_partials

# ---- arguments and outputs ------------------------------------------------------------------------------


class RouterLinearArgs(NamedTuple):
    x: Tensor  # [..., H]
    weight: Tensor  # [E, H]
    bias: Tensor | None  # [E]


class RouterLinearOutputs(NamedTuple):
    y: Tensor  # fp32 [..., E]


class RouterLinearNeeds(NamedTuple):
    """Which gradients are wanted."""

    x: bool
    weight: bool
    bias: bool


class RouterLinearGradients(NamedTuple):
    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class RouterLinearBackwardArgs(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dy: Tensor
    needs: RouterLinearNeeds


# ---- reference ------------------------------------------------------------------------------------------


# ---- kernels --------------------------------------------------------------------------------------------


@kernel
def _router_linear_kernel(
    x_ptr,  # [rows, cols]
    weight_ptr,  # [experts, cols]
    bias_ptr,  # [experts], or None
    y_ptr,  # fp32 [splits, rows, experts]
    rows,
    cols,
    experts,
    x_stride,
    split_cols,  # columns of a split, a multiple of TILE
    SPLIT: tl.constexpr,  # multiply bf16 parts
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,  # columns at a time
    ALIGN: tl.constexpr,  # cols and x_stride are multiples of it
    EXPERT_ALIGN: tl.constexpr,  # experts is a multiple of it
    COLS_MASKED: tl.constexpr,  # cols is not a multiple of TILE
):
    """A tile of logits, summed over the columns of one split."""
    cols = (cols // ALIGN) * ALIGN
    experts = (experts // EXPERT_ALIGN) * EXPERT_ALIGN
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)  # [EXPERTS]
    split = tl.program_id(2)
    x_off = tl.multiple_of(row * x_stride, ALIGN)
    weight_off = tl.multiple_of(expert.to(tl.int64) * cols, ALIGN)
    split_cols = (split_cols // TILE) * TILE
    first = split * split_cols
    last = tl.minimum(first + split_cols, cols)
    total = tl.zeros((ROWS, EXPERTS), tl.float32)
    for start in range(first, last, TILE):
        col = start + tl.arange(0, TILE)  # [TILE]
        x_mask = (row < rows)[:, None] & (col >= 0)[None, :]
        weight_mask = (expert < experts)[:, None] & (col >= 0)[None, :]
        if COLS_MASKED:
            x_mask = x_mask & (col < cols)[None, :]
            weight_mask = weight_mask & (col < cols)[None, :]
        x = tl.load(x_ptr + x_off[:, None] + col[None, :], mask=x_mask, other=0.0)  # [ROWS, TILE]
        weight = tl.load(weight_ptr + weight_off[:, None] + col[None, :], mask=weight_mask, other=0.0)
        # Not `total += dot(...)`: Triton would fuse that into one chain of additions over all columns.
        total -= dot_fp32(x, tl.trans(weight), SPLIT)
    total = 0.0 - total
    if bias_ptr is not None:
        there = (expert < experts) & (split == 0)  # only one of the splits adds the bias
        total += tl.load(bias_ptr + expert, mask=there, other=0.0).to(tl.float32)[None, :]
    y_off = tl.multiple_of((split.to(tl.int64) * rows + row) * experts, EXPERT_ALIGN)
    mask = (row < rows)[:, None] & (expert < experts)[None, :]
    tl.store(y_ptr + y_off[:, None] + expert[None, :], total, mask=mask)


@kernel
def _router_linear_dx_kernel(
    dy_ptr,  # [rows, experts]
    weight_ptr,  # [experts, cols]
    dx_ptr,  # [rows, cols]
    rows,
    cols,
    experts,
    dy_stride,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TILE: tl.constexpr,  # experts at a time
    ALIGN: tl.constexpr,  # cols is a multiple of it
    EXPERT_ALIGN: tl.constexpr,  # experts and dy_stride are multiples of it
    COLS_MASKED: tl.constexpr,  # cols is not a multiple of COLS
):
    """A tile of dx, summed over all experts."""
    cols = (cols // ALIGN) * ALIGN
    experts = (experts // EXPERT_ALIGN) * EXPERT_ALIGN
    tiles = tl.cdiv(cols, COLS)
    # Programs of the same rows follow each other: they read the same dy.
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    col = tl.multiple_of((tl.program_id(0) % tiles) * COLS, COLS) + tl.arange(0, COLS)  # [COLS]
    dy_off = tl.multiple_of(row * dy_stride, EXPERT_ALIGN)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, experts, TILE):
        expert = start + tl.arange(0, TILE)  # [TILE]
        dy_mask = (row < rows)[:, None] & (expert < experts)[None, :]
        weight_mask = (expert < experts)[:, None] & (col >= 0)[None, :]
        if COLS_MASKED:
            weight_mask = weight_mask & (col < cols)[None, :]
        dy = tl.load(dy_ptr + dy_off[:, None] + expert[None, :], mask=dy_mask, other=0.0)  # [ROWS, TILE]
        weight_off = tl.multiple_of(expert.to(tl.int64) * cols, ALIGN)
        weight = tl.load(weight_ptr + weight_off[:, None] + col[None, :], mask=weight_mask, other=0.0)
        total -= dot_fp32(dy, weight, SPLIT)
    total = 0.0 - total
    mask = (row < rows)[:, None] & (col >= 0)[None, :]
    if COLS_MASKED:
        mask = mask & (col < cols)[None, :]
    dx_off = tl.multiple_of(row * cols, ALIGN)
    tl.store(dx_ptr + dx_off[:, None] + col[None, :], total.to(dx_ptr.dtype.element_ty), mask=mask)


@kernel
def _router_linear_dweight_kernel(
    x_ptr,  # [rows, cols], or None
    dy_ptr,  # [rows, experts]
    dweight_ptr,  # [splits, experts, cols], or None
    dbias_ptr,  # [splits, experts], or None
    rows,
    cols,
    experts,
    x_stride,
    dy_stride,
    split_rows,  # rows of a split, a multiple of TILE
    SPLIT: tl.constexpr,
    EXPERTS: tl.constexpr,
    COLS: tl.constexpr,
    TILE: tl.constexpr,  # rows at a time
    ALIGN: tl.constexpr,  # cols and x_stride are multiples of it
    EXPERT_ALIGN: tl.constexpr,  # experts and dy_stride are multiples of it
    COLS_MASKED: tl.constexpr,  # cols is not a multiple of COLS
):
    """A tile of dweight, and of dbias, summed over the rows of one split."""
    cols = (cols // ALIGN) * ALIGN
    experts = (experts // EXPERT_ALIGN) * EXPERT_ALIGN
    tiles = tl.cdiv(experts, EXPERTS)
    # Programs of the same columns follow each other: they read the same x.
    expert = tl.multiple_of((tl.program_id(0) % tiles) * EXPERTS, EXPERTS) + tl.arange(
        0, EXPERTS
    )  # [EXPERTS]
    col = tl.multiple_of((tl.program_id(0) // tiles) * COLS, COLS) + tl.arange(0, COLS)  # [COLS]
    split = tl.program_id(1).to(tl.int64)
    first = split * split_rows
    last = tl.minimum(first + split_rows, rows)
    total = tl.zeros((COLS, EXPERTS), tl.float32)
    total_bias = tl.zeros((EXPERTS,), tl.float32)
    for start in range(first, last, TILE):
        row = start + tl.arange(0, TILE).to(tl.int64)  # [TILE]
        dy_off = tl.multiple_of(row * dy_stride, EXPERT_ALIGN)
        dy_mask = (row < last)[:, None] & (expert < experts)[None, :]
        dy = tl.load(dy_ptr + dy_off[:, None] + expert[None, :], mask=dy_mask, other=0.0)  # [TILE, EXPERTS]
        if dbias_ptr is not None:
            total_bias += tl.sum(dy.to(tl.float32), axis=0)
        if dweight_ptr is not None:
            x_off = tl.multiple_of(row * x_stride, ALIGN)
            x_mask = (row < last)[:, None] & (col >= 0)[None, :]
            if COLS_MASKED:
                x_mask = x_mask & (col < cols)[None, :]
            x = tl.load(x_ptr + x_off[:, None] + col[None, :], mask=x_mask, other=0.0)  # [TILE, COLS]
            # The product is computed transposed: Triton would load a transposed fp32 tile one number at a time.
            total -= dot_fp32(tl.trans(x), dy, SPLIT)
    total = 0.0 - total
    if dweight_ptr is not None:
        mask = (expert < experts)[:, None] & (col >= 0)[None, :]
        if COLS_MASKED:
            mask = mask & (col < cols)[None, :]
        off = tl.multiple_of((split * experts + expert) * cols, ALIGN)
        dweight = tl.trans(total).to(dweight_ptr.dtype.element_ty)  # [EXPERTS, COLS]
        tl.store(dweight_ptr + off[:, None] + col[None, :], dweight, mask=mask)
    if dbias_ptr is not None:
        there = (expert < experts) & (tl.program_id(0) // tiles == 0)
        tl.store(dbias_ptr + split * experts + expert, total_bias.to(dbias_ptr.dtype.element_ty), mask=there)


# ---- launch ---------------------------------------------------------------------------------------------


class ProductConfig(NamedTuple):
    """How a product [M, K] x [K, N] is cut: tiles of `m` x `n`, summed `k` at a time."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int
    split: bool  # multiply bf16 parts


LIMITS = {"m": (16, 256), "n": (16, 512), "k": (16, 256), "num_warps": (1, 16), "num_stages": (1, 5)}


@choice("router_linear.forward", **LIMITS)
def forward_config(experts: int, products: int, target: Capabilities) -> ProductConfig:
    """Rows x experts, summed over columns."""
    if target.is_cpu:
        # A tile of the weight is converted and transposed for every tile of rows, so long tiles of rows were
        # measured to be faster.
        return ProductConfig(128, _side(experts, 256), 128, 4, 1, False)
    # All of 256 experts in one tile, so that x is read once. Compiled for sm_90 with fp32 weights: 254 registers,
    # 124 KB of shared memory; twice the columns at a time spill.
    n = _side(experts, 256 if products < 6 else 64)
    narrow = products > 1 and target.warp_size == 32
    tile, stages = (32, 3) if narrow else (64, 2)
    return ProductConfig(64, n, tile, 8 if n > 128 else 4, stages, True)


@choice("router_linear.dx", **LIMITS)
def dx_config(experts: int, cols: int, products: int, target: Capabilities) -> ProductConfig:
    """Rows x columns, summed over experts."""
    if target.is_cpu:
        return ProductConfig(128, _side(cols, 512), _side(experts, 128), 4, 1, False)
    # Compiled for sm_90: 164 registers with fp32 weights, 196 with bf16. With twice the columns the six products of
    # fp32 weights spill on sm_89, and on sm_100 ask for more tensor memory than there is.
    return ProductConfig(64, _side(cols, 128 if products < 6 else 64), _side(experts, 32), 4, 2, True)


@choice("router_linear.dweight", **LIMITS)
def dweight_config(experts: int, cols: int, products: int, target: Capabilities) -> ProductConfig:
    """Experts x columns, summed over rows."""
    if target.is_cpu:
        return ProductConfig(_side(experts, 256), _side(cols, 256), 128, 4, 1, False)
    # Compiled for sm_90: 179 registers. On sm_80, sm_89 and sm_120 a warp keeps its sums in its own registers: half
    # the tile takes 170 registers there, and the whole tile spills.
    largest = 64 if products == 6 or target.target in ("sm_80", "sm_86", "sm_89", "sm_120") else 128
    return ProductConfig(_side(experts, largest), _side(cols, 128 if products < 6 else 64), 32, 8, 2, True)


def _products(a: torch.dtype, b: torch.dtype) -> int:
    """How many products of bf16 parts make up a product of these dtypes, at most."""
    return {2: 1, 1: 3, 0: 6}[(a is torch.bfloat16) + (b is torch.bfloat16)]


def _side(size: int, largest: int) -> int:
    """The side of a tile for `size` elements: a power of two, at least the 16 that a matrix unit needs."""
    return min(max(1 << max(size - 1, 0).bit_length(), 16), largest)


SPLIT_COLS = 512  # columns of a split where programs share a sum over columns; a multiple of every configuration's tile


def _four(*sizes: int) -> int:
    """4 if all sizes are multiples of it, 128 bits of fp32; else 1."""
    return min(4, align_of(*sizes, least=4))


@functools.cache
def _forward_launch(config: ProductConfig, align: int, expert_align: int, cols_masked: bool) -> Launch:
    return Launch.of(
        _router_linear_kernel,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        SPLIT=config.split,
        ROWS=config.m,
        EXPERTS=config.n,
        TILE=config.k,
        ALIGN=align,
        EXPERT_ALIGN=expert_align,
        COLS_MASKED=cols_masked,
    )


def _launch_dx(dx: Tensor, dy: Tensor, weight: Tensor) -> None:
    rows, dy_stride = dy.shape[0], dy.stride(0)
    experts, cols = weight.shape
    products = _products(dy.dtype, weight.dtype)
    config = dx_config(experts, cols, products, capabilities_of(dy.device))
    launch = Launch.of(
        _router_linear_dx_kernel,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        SPLIT=config.split,
        ROWS=config.m,
        COLS=config.n,
        TILE=config.k,
        ALIGN=align_of(cols),
        EXPERT_ALIGN=_four(experts, dy_stride),
        COLS_MASKED=cols % config.n != 0,
    )
    programs = -(-rows // config.m) * -(-cols // config.n)
    launch((programs, 1, 1), (dy, weight, dx), (rows, cols, experts, dy_stride))


def _launch_dweight(o: RouterLinearGradients, x: Tensor, dy: Tensor) -> None:
    """The sums over rows, of weight and bias."""
    rows, cols, experts, stride, dy_stride = *x.shape, dy.shape[1], x.stride(0), dy.stride(0)
    target = capabilities_of(x.device)
    config = dweight_config(experts, cols, _products(x.dtype, dy.dtype), target)
    tiles = -(-experts // config.m) * (1 if o.weight is None else -(-cols // config.n))
    # Enough splits of the rows to fill the device twice, but each with at least four steps.
    splits = min(-(-rows // (4 * config.k)), max(1, 2 * target.multiprocessors // tiles))
    split_rows = -(-rows // splits)
    split_rows = -(-split_rows // config.k) * config.k
    splits = -(-rows // split_rows)

    def room(grad: Tensor | None) -> Tensor | None:
        if grad is None or splits == 1:
            return grad
        return torch.empty((splits, grad.numel()), dtype=torch.float32, device=x.device)

    dweight, dbias = room(o.weight), room(o.bias)
    launch = Launch.of(
        _router_linear_dweight_kernel,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        SPLIT=config.split,
        EXPERTS=config.m,
        COLS=config.n,
        TILE=config.k,
        ALIGN=align_of(cols, stride),
        EXPERT_ALIGN=_four(experts, dy_stride),
        COLS_MASKED=cols % config.n != 0,
    )
    integers = (rows, cols, experts, stride, dy_stride, split_rows)
    launch((tiles, splits, 1), (x, dy, dweight, dbias), integers)
    for grad, partials in ((o.weight, dweight), (o.bias, dbias)):
        if grad is not None and partials is not None and partials is not grad:
            sum_partials(partials, grad, few=True)


# ---- registration ---------------------------------------------------------------------------------------


_SHARDING = Sharding(
    {"x": "... h", "weight": "e h", "bias": "e"}, {"y": "... e"}, {"h": "products are summed along it"}
)


class RouterLinearBackwardOp(
    Op[RouterLinearBackwardArgs, RouterLinearGradients], name="router_linear_backward", variants=96
):
    def allocate(self, a: RouterLinearBackwardArgs) -> RouterLinearGradients:
        return RouterLinearGradients(
            *(
                torch.empty(t.shape, dtype=t.dtype, device=a.x.device) if t is not None and needed else None
                for t, needed in zip((a.x, a.weight, a.bias), a.needs, strict=True)
            )
        )

    def present(self, a: RouterLinearBackwardArgs) -> Any:
        return a.needs

    def launch(self, o: RouterLinearGradients, a: RouterLinearBackwardArgs) -> None:
        dy = flat_rows(a.dy)
        if o.x is not None:
            _launch_dx(o.x, dy, a.weight.contiguous())
        if o.weight is not None or o.bias is not None:
            _launch_dweight(o, flat_rows(a.x), dy)

    def reference(self, a: RouterLinearBackwardArgs) -> RouterLinearGradients:
        x, weight, dtype = a.x, a.weight, compute_dtype(a.x)
        rows = count_rows(x)
        flat, d = x.reshape(rows, x.shape[-1]).to(dtype), a.dy.reshape(rows, weight.shape[0]).to(dtype)
        return RouterLinearGradients(
            (d @ weight.to(dtype)).to(x.dtype).view(x.shape) if a.needs.x else None,
            (d.t() @ flat).to(weight.dtype) if a.needs.weight else None,
            d.sum(0).to(a.bias.dtype) if a.needs.bias and a.bias is not None else None,
        )


router_linear_backward_op = RouterLinearBackwardOp()


class RouterLinearOp(Op[RouterLinearArgs, RouterLinearOutputs], name="router_linear", variants=32):
    def allocate(self, a: RouterLinearArgs) -> RouterLinearOutputs:
        shape = (*a.x.shape[:-1], a.weight.shape[0])
        return RouterLinearOutputs(torch.empty(*shape, dtype=torch.float32, device=a.x.device))

    def launch(self, o: RouterLinearOutputs, a: RouterLinearArgs) -> None:
        experts, cols = a.weight.shape
        target = capabilities_of(a.x.device)
        x, weight, bias = flat_rows(a.x), a.weight.contiguous(), contiguous(a.bias)
        rows, stride = x.shape[0], x.stride(0)
        # An x that is not bf16 is split into parts, which take room too (on sm_100 that of the sums): smallest tiles.
        products = _products(x.dtype, weight.dtype) if x.dtype is torch.bfloat16 else 6
        config = forward_config(experts, products, target)
        grid = (-(-rows // config.m), -(-experts // config.n))
        y, splits, split_cols = o.y, 1, -(-cols // config.k) * config.k
        if not target.is_cpu and 2 * grid[0] * grid[1] <= target.multiprocessors and cols > SPLIT_COLS:
            splits, split_cols = -(-cols // SPLIT_COLS), SPLIT_COLS
            y = torch.empty((splits, rows * experts), dtype=torch.float32, device=x.device)
        launch = _forward_launch(config, align_of(cols, stride), _four(experts), cols % config.k != 0)
        launch((*grid, splits), (x, weight, bias, y), (rows, cols, experts, stride, split_cols))
        if splits > 1:
            sum_partials(y, o.y, few=True)

    def reference(self, a: RouterLinearArgs) -> RouterLinearOutputs:
        """The definition."""
        dtype = compute_dtype(a.x)
        y = a.x.to(dtype) @ a.weight.to(dtype).t()
        return RouterLinearOutputs(y if a.bias is None else y + a.bias.to(dtype))

    def keep(self, a: RouterLinearArgs, o: RouterLinearOutputs) -> Any:
        return a

    def backward(self, b: Backward) -> Gradients:
        kept: RouterLinearArgs = b.kept
        needs = RouterLinearNeeds(*b.needs)
        args = RouterLinearBackwardArgs(kept.x, kept.weight, kept.bias, b.grads.y, needs)
        return router_linear_backward_op(args)._asdict()

    def shard(self, a: RouterLinearArgs) -> Sharding:
        return _SHARDING


router_linear_op = RouterLinearOp()


# ---- public function ------------------------------------------------------------------------------------


def router_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` in fp32, whatever the dtypes of x and weight are, and without a copy of x in fp32.

    x: [..., H] in bf16, fp16 or fp32, of any strides. weight: [E, H], bias: [E], in any of these. Returns fp32
    [..., E]. Its only error is that of adding up in fp32: no operand is rounded to TF32 or bf16. Gradients have the
    dtypes of their tensors, rounded once from fp32 sums.

    >>> import torch, weft
    >>> x, weight = torch.randn(6, 64, dtype=torch.bfloat16), torch.randn(8, 64)
    >>> logits = weft.router_linear(x, weight)
    >>> logits.dtype, logits.shape
    (torch.float32, torch.Size([6, 8]))
    """
    check_input("x", x)
    check_tensor("weight", weight, FLOATS, x.device)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"x must be [..., H] and weight [E, H] with one H; got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if weight.shape[0] == 0:
        raise ValueError("weight must have a row for each of one or more experts; it has none")
    if bias is not None:
        check_tensor("bias", bias, FLOATS, x.device, weight.shape[:1])
    return router_linear_op(RouterLinearArgs(x, weight, bias)).y

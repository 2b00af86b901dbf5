"""Launches of the router's projection and its gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....runtime import BoundLaunch, Capabilities, Launch, capabilities_of, choice, remembered, scratch
from ...common.rows import align_of, contiguous, flat_rows
from ...common.sums import sum_partials
from .arguments import RouterLinearArgs, RouterLinearBackwardArgs, RouterLinearGradients, RouterLinearOutputs
from .kernels import router_linear_dweight_kernel, router_linear_dx_kernel, router_linear_kernel


class ProductConfig(NamedTuple):
    """Tiling of a product [M, K] x [K, N]: tiles of `m` x `n`, summed `k` at a time."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int
    split: bool  # multiply bf16 parts


LIMITS = {"m": (16, 256), "n": (16, 512), "k": (16, 256), "num_warps": (1, 16), "num_stages": (1, 5)}


@choice("router_linear.forward", **LIMITS)
def forward_config(experts: int, products: int, target: Capabilities) -> ProductConfig:
    """Return the tiling of rows x experts, summed over columns."""
    if target.is_cpu:
        # Long tiles of rows were measured to be faster, since a tile of the weight is converted and transposed for
        # every tile of rows.
        return ProductConfig(128, _side(experts, 256), 128, 4, 1, False)
    # Up to 256 experts in one tile, so that x is read once. Compiled for sm_90 with fp32 weights: 254 registers,
    # 124 KB of shared memory; twice the columns at a time would spill.
    n = _side(experts, 256 if products < 6 else 64)
    narrow = products > 1 and target.warp_size == 32
    tile, stages = (32, 3) if narrow else (64, 2)
    return ProductConfig(64, n, tile, 8 if n > 128 else 4, stages, True)


@choice("router_linear.dx", **LIMITS)
def dx_config(experts: int, cols: int, products: int, target: Capabilities) -> ProductConfig:
    """Return the tiling of rows x columns, summed over experts."""
    if target.is_cpu:
        return ProductConfig(128, _side(cols, 512), _side(experts, 128), 4, 1, False)
    # Compiled for sm_90: 164 registers with fp32 weights, 196 with bf16. With twice the columns, the six products of
    # fp32 weights spill on sm_89 and exceed the tensor memory of sm_100.
    return ProductConfig(64, _side(cols, 128 if products < 6 else 64), _side(experts, 32), 4, 2, True)


@choice("router_linear.dweight", **LIMITS)
def dweight_config(experts: int, cols: int, products: int, target: Capabilities) -> ProductConfig:
    """Return the tiling of experts x columns, summed over rows."""
    if target.is_cpu:
        return ProductConfig(_side(experts, 256), _side(cols, 256), 128, 4, 1, False)
    # Compiled for sm_90: 179 registers. On sm_80, sm_89 and sm_120 a warp accumulates in its own registers: half the
    # tile takes 170 registers there, and the whole tile spills.
    largest = 64 if products == 6 or target.family in ("sm_80", "sm_89", "sm_120") else 128
    return ProductConfig(_side(experts, largest), _side(cols, 128 if products < 6 else 64), 32, 8, 2, True)


def _products(a: torch.dtype, b: torch.dtype) -> int:
    """Return the maximum number of products of bf16 parts that make up a product of these dtypes."""
    return {2: 1, 1: 3, 0: 6}[(a is torch.bfloat16) + (b is torch.bfloat16)]


def _side(size: int, largest: int) -> int:
    """Return the side of a tile for `size` elements: a power of two, at least the 16 that a matrix unit needs."""
    return min(max(1 << max(size - 1, 0).bit_length(), 16), largest)


SPLIT_COLS = (
    512  # columns per split if programs share a sum over columns; a multiple of every configuration's tile
)


def _align4(*sizes: int) -> int:
    """Return 4 (128 bits of fp32) if it divides all sizes, else 1."""
    return min(4, align_of(*sizes, least=4))


@remembered
def _forward_launch(
    rows: int, cols: int, experts: int, stride: int, products: int, target: Capabilities
) -> BoundLaunch:
    """Bind y = x @ weight^T. The grid's last size is the number of splits of the columns."""
    config = forward_config(experts, products, target)
    tiles = -(-rows // config.m), -(-experts // config.n)
    splits, split_cols = 1, -(-cols // config.k) * config.k
    if not target.is_cpu and 2 * tiles[0] * tiles[1] <= target.multiprocessors and cols > SPLIT_COLS:
        splits, split_cols = -(-cols // SPLIT_COLS), SPLIT_COLS
    launch = Launch.of(
        router_linear_kernel,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        SPLIT=config.split,
        ROWS=config.m,
        EXPERTS=config.n,
        TILE=config.k,
        ALIGN=align_of(cols, stride),
        EXPERT_ALIGN=_align4(experts),
        COLS_MASKED=cols % config.k != 0,
    )
    return launch.bind(
        (*tiles, splits), rows=rows, cols=cols, experts=experts, x_stride=stride, split_cols=split_cols
    )


def _launch_dx(dx: Tensor, dy: Tensor, weight: Tensor) -> None:
    rows, dy_stride = dy.shape[0], dy.stride(0)
    experts, cols = weight.shape
    products = _products(dy.dtype, weight.dtype)
    config = dx_config(experts, cols, products, capabilities_of(dy.device))
    launch = Launch.of(
        router_linear_dx_kernel,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        SPLIT=config.split,
        ROWS=config.m,
        COLS=config.n,
        TILE=config.k,
        ALIGN=align_of(cols),
        EXPERT_ALIGN=_align4(experts, dy_stride),
        COLS_MASKED=cols % config.n != 0,
    )
    programs = -(-rows // config.m) * -(-cols // config.n)
    launch(
        (programs, 1, 1),
        *router_linear_dx_kernel.arguments(
            dy_ptr=dy,
            weight_ptr=weight,
            dx_ptr=dx,
            rows=rows,
            cols=cols,
            experts=experts,
            dy_stride=dy_stride,
        ),
    )


def _launch_dweight(o: RouterLinearGradients, x: Tensor, dy: Tensor) -> None:
    """Launch the sums over rows: the gradients of weight and bias."""
    rows, cols, experts, stride, dy_stride = *x.shape, dy.shape[1], x.stride(0), dy.stride(0)
    target = capabilities_of(x.device)
    config = dweight_config(experts, cols, _products(x.dtype, dy.dtype), target)
    tiles = -(-experts // config.m) * (1 if o.weight is None else -(-cols // config.n))
    # Enough splits of the rows to fill the device twice, but each with at least four steps.
    splits = min(-(-rows // (4 * config.k)), max(1, 2 * target.multiprocessors // tiles))
    split_rows = -(-rows // splits)
    split_rows = -(-split_rows // config.k) * config.k
    splits = -(-rows // split_rows)

    def allocate(grad: Tensor | None) -> Tensor | None:
        if grad is None or splits == 1:
            return grad
        return scratch((splits, grad.numel()), torch.float32, x.device)

    dweight, dbias = allocate(o.weight), allocate(o.bias)
    launch = Launch.of(
        router_linear_dweight_kernel,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        SPLIT=config.split,
        EXPERTS=config.m,
        COLS=config.n,
        TILE=config.k,
        ALIGN=align_of(cols, stride),
        EXPERT_ALIGN=_align4(experts, dy_stride),
        COLS_MASKED=cols % config.n != 0,
    )
    launch(
        (tiles, splits, 1),
        *router_linear_dweight_kernel.arguments(
            x_ptr=x,
            dy_ptr=dy,
            dweight_ptr=dweight,
            dbias_ptr=dbias,
            rows=rows,
            cols=cols,
            experts=experts,
            x_stride=stride,
            dy_stride=dy_stride,
            split_rows=split_rows,
        ),
    )
    for grad, partials in ((o.weight, dweight), (o.bias, dbias)):
        if grad is not None and partials is not None and partials is not grad:
            sum_partials(partials, grad, few=True)


def launch_router_linear_backward(o: RouterLinearGradients, a: RouterLinearBackwardArgs) -> None:
    dy = flat_rows(a.dy)
    if o.x is not None:
        _launch_dx(o.x, dy, contiguous(a.weight))
    if o.weight is not None or o.bias is not None:
        _launch_dweight(o, flat_rows(a.x), dy)


def launch_router_linear(o: RouterLinearOutputs, a: RouterLinearArgs) -> None:
    experts, cols = a.weight.shape
    x, weight, y = flat_rows(a.x), contiguous(a.weight), o.y
    rows = x.shape[0]
    # An x that is not bf16 is split into parts, which take space too (on sm_100, that of the sums): smallest tiles.
    products = _products(x.dtype, weight.dtype) if x.dtype is torch.bfloat16 else 6
    launch = _forward_launch(rows, cols, experts, x.stride(0), products, capabilities_of(x.device))
    splits = launch.grid[2]
    if splits > 1:
        y = scratch((splits, rows * experts), torch.float32, x.device)
    launch(*router_linear_kernel.tensors(x_ptr=x, weight_ptr=weight, bias_ptr=contiguous(a.bias), y_ptr=y))
    if splits > 1:
        sum_partials(y, o.y, few=True)

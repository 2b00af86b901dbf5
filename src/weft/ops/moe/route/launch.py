"""Launches of routing and its backward."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ....runtime import BoundLaunch, Capabilities, Launch, capabilities_of, choice, remembered, scratch
from ...common.rows import align_of, contiguous, flat_rows, one_stride
from ...common.sums import SumConfig
from .arguments import SCORES, Groups, RouteArgs, RouteBackwardArgs, RouteGradients, RouteOutputs, Weighing
from .kernels import route_backward_kernel, route_kernel, route_totals_kernel


class RouteConfig(NamedTuple):
    """Tiling of rows: `rows` at a time, in `groups` tiles of `tile` experts."""

    rows: int
    groups: int
    tile: int
    num_warps: int


@choice("route", rows=(1, 1024), num_warps=(1, 16))
def route_config(kernel: str, groups: int, group_size: int, target: Capabilities) -> RouteConfig:
    """Return the tiling of the kernel "forward" or "backward"."""
    group_tiles = 1 << max(groups - 1, 0).bit_length()
    tile = max(1 << max(group_size - 1, 0).bit_length(), 64 // group_tiles, 1)
    width = group_tiles * tile
    if target.is_cpu:
        return RouteConfig(max(1, CPU_ELEMENTS // width), group_tiles, tile, 4)
    # A warp has a few whole rows, so the k rounds reduce by shuffles alone. Long rows take more warps.
    lanes = target.warp_size
    num_warps = min(16, max(1, width // (16 * lanes)))
    return RouteConfig(max(1, 16 * lanes * num_warps // width), group_tiles, tile, num_warps)


CPU_ELEMENTS = 1024


@choice("route.totals", rows=(1, 128), tile=(16, 1024), num_warps=(1, 16))
def totals_config(experts: int, target: Capabilities) -> SumConfig:
    return SumConfig(1, 256, 4) if target.is_cpu else SumConfig(32, 32, 4)


@remembered
def _route_launch(
    rows: int, experts: int, stride: int, k: int, how: Weighing, groups: Groups, target: Capabilities
) -> BoundLaunch:
    group_size = experts // groups.number
    config = route_config("forward", groups.number, group_size, target)
    # Few programs, since each writes a row of counts, yet enough warps to hide the latency of the k dependent rounds.
    programs = min(-(-rows // config.rows), max(1, 8 * target.multiprocessors // config.num_warps))
    program_rows = -(-rows // programs)
    program_rows = -(-program_rows // config.rows) * config.rows
    launch = Launch.of(
        route_kernel,
        num_warps=config.num_warps,
        SCORE=SCORES.index(how.score),
        POST=how.post_softmax,
        RENORMALIZE=how.renormalize,
        MASKED_IS_ZERO=groups.masked_is_zero,
        ROWS=config.rows,
        GROUPS=config.groups,
        TILE=config.tile,
        K=1 << (k - 1).bit_length(),
        ALIGN=align_of(group_size, stride, least=4),
    )
    return launch.bind(
        (-(-rows // program_rows), 1, 1),
        rows=rows,
        experts=experts,
        stride=stride,
        k=k,
        groups=groups.number,
        group_size=group_size,
        group_topk=groups.topk,
        group_best=groups.best,
        program_rows=program_rows,
    )


def launch_route_backward(o: RouteGradients, a: RouteBackwardArgs) -> None:
    how = a.weighing
    logits, indices = flat_rows(a.logits), contiguous(a.indices)
    dweights, dweights_stride = one_stride(a.dweights)
    dscores, dscores_stride = one_stride(a.dscores)
    rows, experts = logits.shape
    stride = logits.stride(0)
    config = route_config("backward", 1, experts, capabilities_of(logits.device))
    launch = Launch.of(
        route_backward_kernel,
        num_warps=config.num_warps,
        SCORE=SCORES.index(how.score),
        POST=how.post_softmax,
        RENORMALIZE=how.renormalize,
        ROWS=config.rows,
        TILE=config.tile,
        ALIGN=align_of(experts, stride, dscores_stride, least=4),
    )
    launch(
        (-(-rows // config.rows), 1, 1),
        *route_backward_kernel.arguments(
            logits_ptr=logits,
            indices_ptr=indices,
            dweights_ptr=dweights,
            dscores_ptr=dscores,
            dscore_sums_ptr=contiguous(a.dscore_sums),
            dz_ptr=a.dz,
            dlogits_ptr=o.logits,
            rows=rows,
            experts=experts,
            stride=stride,
            k=indices.shape[-1],
            dweights_stride=dweights_stride,
            dscores_stride=dscores_stride,
            eps=how.eps,
            scale=how.scale,
        ),
    )


def launch_route(o: RouteOutputs, a: RouteArgs) -> None:
    how, target, logits = a.weighing, capabilities_of(a.logits.device), flat_rows(a.logits)
    rows, experts = logits.shape
    launch = _route_launch(rows, experts, logits.stride(0), a.k, how, a.groups, target)
    programs = launch.grid[0]
    totals: tuple[Tensor | None, ...] = (o.counts, o.score_sums, o.score_counts, o.z)
    partials = totals
    if programs > 1:
        partials = tuple(
            None if t is None else scratch((programs, *t.shape), t.dtype, t.device) for t in totals
        )
    counts, score_sums, score_counts, z = partials
    launch(
        *route_kernel.tensors(
            logits_ptr=logits,
            bias_ptr=contiguous(a.bias),
            weights_ptr=o.weights,
            indices_ptr=o.indices,
            scores_ptr=o.scores,
            counts_ptr=counts,
            score_sums_ptr=score_sums,
            score_counts_ptr=score_counts,
            z_ptr=z,
            eps=how.eps,
            scale=how.scale,
        )
    )
    if programs > 1:
        block, tile, num_warps = totals_config(experts, target)
        Launch.of(route_totals_kernel, num_warps=num_warps, ROWS=block, TILE=tile)(
            (-(-experts // tile), 1, 1),
            *route_totals_kernel.arguments(
                counts_ptr=counts,
                score_sums_ptr=score_sums,
                score_counts_ptr=score_counts,
                z_ptr=z,
                total_counts_ptr=o.counts,
                total_score_sums_ptr=o.score_sums,
                total_score_counts_ptr=o.score_counts,
                total_z_ptr=o.z,
                programs=programs,
                experts=experts,
            ),
        )

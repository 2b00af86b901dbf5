"""Launches of selections and draws."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime import Capabilities, Launch, capabilities_of, choice, scratch
from ..common.rows import align_of, contiguous, flat_rows
from .arguments import SampleArgs, Sampled, TopK, TopKArgs
from .draw_kernels import Partial, Requests, draw_kernel, join_draws_kernel
from .limit_kernels import Candidates, Collected, candidates_kernel, choose_kernel
from .loads import IntegerArgument, NumberArgument
from .select_kernels import select_kernel, sort_kernel

# Bits of an element that tell the order of all values.
RANK_BITS = {torch.bfloat16: 16, torch.float16: 19, torch.float32: 32}


class SelectConfig(NamedTuple):
    """Launch configuration: elements of a tile, and its warps."""

    tile: int
    num_warps: int


@choice("top_k", tile=(64, 16384), num_warps=(1, 16))
def select_config(cols: int, k: int, target: Capabilities) -> SelectConfig:
    """Choose the tile: at least four times what is kept of it, so that each pass leaves a fourth."""
    tile = max(4096, 4 * _power_of_two(k))
    if target.is_cpu:
        return SelectConfig(min(tile, max(_power_of_two(cols), 64)), 1)
    return SelectConfig(tile, min(16, tile // (8 * target.warp_size)))


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def largest_columns(
    x: Tensor, k: int, room: int, starts: Tensor | None = None, ends: Tensor | None = None
) -> Tensor:
    """Return columns of x [rows, cols] in ascending order, at most `room` >= k of each row, among which are the columns
    of its k largest: int32, -1 for none."""
    rows, cols = x.shape
    target = capabilities_of(x.device)
    chosen: Tensor | None = None
    count = cols
    while chosen is None or count > room:
        tile, warps = select_config(count, k, target)
        tiles = -(-count // tile)
        kept = min(k, tile)
        columns = scratch((rows, tiles * kept), torch.int32, x.device)
        launch = Launch.of(
            select_kernel,
            num_warps=warps,
            ONE=kept == 1,
            BITS=RANK_BITS[x.dtype],
            TILE=tile,
            ALIGN=align_of(cols, x.stride(0)),
        )
        launch(
            (rows * tiles, 1, 1),
            *select_kernel.arguments(
                x_ptr=x if chosen is None else None,
                listed_ptr=None if chosen is None else x,
                list_ptr=chosen,
                starts_ptr=starts,
                ends_ptr=ends,
                chosen_ptr=columns,
                cols=cols,
                count=count,
                x_stride=x.stride(0),
                tiles=tiles,
                k=kept,
            ),
        )
        chosen, count = columns, tiles * kept
    return chosen


def launch_top_k(o: TopK, a: TopKArgs) -> None:
    x = flat_rows(a.x)
    rows, cols = x.shape
    chosen = largest_columns(x, a.k, a.k, contiguous(a.starts), contiguous(a.ends))
    tile = _power_of_two(a.k)
    Launch.of(sort_kernel, num_warps=max(1, min(8, tile // 128)), TILE=tile)(
        (rows, 1, 1),
        *sort_kernel.arguments(
            x_ptr=x,
            chosen_ptr=chosen,
            value_ptr=o.values,
            index_ptr=o.indices,
            x_stride=x.stride(0),
            cols=cols,
            count=chosen.shape[1],
            k=a.k,
        ),
    )


# ---- draws ----------------------------------------------------------------------------------------------

KEPT = 64  # of a tile: candidates of top_k, top_p and min_p
ROOM = 4096  # elements of a row around a limit


@choice("sample", tile=(64, 16384), num_warps=(1, 16))
def draw_config(cols: int, target: Capabilities) -> SelectConfig:
    """Choose the tile of a row: 16 elements for each thread. The bits of log-probabilities depend on it, so it depends
    on nothing but the length of a row."""
    if target.is_cpu:
        return SelectConfig(min(4096, max(_power_of_two(cols), 64)), 1)
    return SelectConfig(4096, 4096 // (16 * target.warp_size))


def _requests(a: SampleArgs, rows: int) -> Requests:
    return Requests(
        NumberArgument.of(a.temperature, rows),
        NumberArgument.of(a.top_k, rows),
        NumberArgument.of(a.top_p, rows),
        NumberArgument.of(a.min_p, rows),
        IntegerArgument.of(a.seed, rows),
        IntegerArgument.of(a.step, rows),
    )


def launch_sample(o: Sampled, a: SampleArgs) -> None:
    x = flat_rows(a.logits)
    rows, cols = x.shape
    target = capabilities_of(x.device)
    tile, warps = draw_config(cols, target)
    tiles = -(-cols // tile)
    common = {
        "logits_ptr": x,
        "requests": _requests(a, rows),
        "cols": cols,
        "stride": x.stride(0),
        "tiles": tiles,
    }
    constants = {"TILE": tile, "ALIGN": align_of(cols, x.stride(0))}
    results = {"token_ptr": o.tokens, "logprob_ptr": o.logprobs, "lse_ptr": o.lse}
    few = 1 if tiles == 1 else 8 if tiles <= 8 else max(_power_of_two(tiles), 32)
    of_tiles = scratch((4, rows, tiles), torch.float32, x.device)
    if not a.limited:
        token = scratch((rows, tiles), torch.int32, x.device)
        largest, total, score, z = of_tiles
        partial = Partial(largest, total, score, z, token)
        Launch.of(draw_kernel, num_warps=warps, **constants)(
            (rows * tiles, 1, 1), *draw_kernel.arguments(partial=partial, **common)
        )
        Launch.of(join_draws_kernel, num_warps=1, TILES=few)(
            (rows, 1, 1), *join_draws_kernel.arguments(partial=partial, tiles=tiles, **results)
        )
        return
    width = tiles * KEPT
    token, value = scratch((2, rows, width), torch.int32, x.device)
    tokens, values = scratch((2, rows, ROOM), torch.int32, x.device)
    largest, total, smallest, floor = of_tiles
    candidates = Candidates(
        token, value.view(torch.float32), width, largest, total, smallest, floor.view(torch.int32)
    )
    bits = RANK_BITS[x.dtype]
    Launch.of(candidates_kernel, num_warps=warps, BITS=bits, KEPT=KEPT, **constants)(
        (rows * tiles, 1, 1), *candidates_kernel.arguments(candidates=candidates, **common)
    )
    count = few * KEPT
    launch = Launch.of(
        choose_kernel,
        num_warps=1 if target.is_cpu else max(8, min(16, count // (8 * target.warp_size))),
        JOINT=a.joint,
        BITS=bits,
        TILES=few,
        KEPT=KEPT,
        COUNT=count,
        ROOM=ROOM,
        TILE=2048,
    )
    launch(
        (rows, 1, 1),
        *choose_kernel.arguments(
            candidates=candidates,
            collected=Collected(tokens, values.view(torch.float32)),
            **common,
            **results,
        ),
    )

"""Launch of processed logits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ....runtime import Capabilities, Launch, capabilities_of, choice
from ...common.rows import align_of, cpu_tile, flat_rows
from ..loads import NumberArgument
from .arguments import ProcessArgs, ProcessOutputs
from .kernels import OfRequests, process_kernel


class ProcessConfig(NamedTuple):
    """Tiling of processed logits: `tile` columns per program."""

    tile: int
    num_warps: int


@choice("process_logits", tile=(64, 8192), num_warps=(1, 16))
def process_config(cols: int, target: Capabilities) -> ProcessConfig:
    """Choose 2048 columns, 16 per thread."""
    tile = cpu_tile(cols) if target.is_cpu else min(max(1 << max(cols - 1, 0).bit_length(), 128), 2048)
    return ProcessConfig(tile, min(max(tile // (16 * target.warp_size), 1), 16))


def _of_requests(x: Tensor | None, rows: int) -> OfRequests:
    """Return a tensor of requests as the kernel reads it."""
    if x is None:
        return OfRequests(None, 0, 1)
    flat = flat_rows(x)
    return OfRequests(flat, flat.stride(0), rows // len(flat))


def launch_process(o: ProcessOutputs, a: ProcessArgs) -> None:
    logits, y = flat_rows(a.logits), o.y.view(-1, o.y.shape[-1])
    rows, cols = logits.shape
    counts, prompt, bias, allowed = (_of_requests(x, rows) for x in (a.counts, a.prompt, a.bias, a.allowed))
    tile, warps = process_config(cols, capabilities_of(logits.device))
    tiles = -(-cols // tile)
    launch = Launch.of(
        process_kernel,
        num_warps=warps,
        REPEATS=not (a.repetition.is_always(1.0) or (counts.ptr is None and prompt.ptr is None)),
        SCALED=not (a.temperature.is_always(1.0) or a.temperature.is_always(0.0)),
        TILE=tile,
        ALIGN=align_of(cols, logits.stride(0), y.stride(0), counts.stride, prompt.stride, bias.stride),
    )
    launch(
        (rows * tiles, 1, 1),
        *process_kernel.arguments(
            logits_ptr=logits,
            y_ptr=y,
            temperature=NumberArgument.of(a.temperature, rows),
            repetition=NumberArgument.of(a.repetition, rows),
            presence=NumberArgument.of(a.presence, rows),
            frequency=NumberArgument.of(a.frequency, rows),
            counts=counts,
            prompt=prompt,
            bias=bias,
            allowed=allowed,
            cols=cols,
            tiles=tiles,
            logits_stride=logits.stride(0),
            y_stride=y.stride(0),
        ),
    )

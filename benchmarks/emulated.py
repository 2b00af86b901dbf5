"""Compare every op, with every set of its options, on an emulated GPU with Loom using the same tiles.

python benchmarks/emulated.py sm_80 [op ...]

For each op: sets of options that ran, how many have the same bits as Loom's results, the largest share of a result that
differs, possible reasons, and what was executed. A hazard ends the run with an error. *Emulated*, not measured on a
GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import torch
import triton_loom
from torch import Tensor

import weft
from weft.lab.selection import KNOWN, by_options
from weft.runtime.launch import choosing_for

ROWS = 5


def tensors(result: object) -> Iterator[Tensor]:
    """Yield the plain tensors of a result, codes and scales among them."""
    if isinstance(result, weft.QTensor):
        yield from tensors((result.rowwise, result.columnwise))
    elif isinstance(result, Tensor):
        yield result.detach()
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from tensors(part)


def words(tensor: Tensor) -> Tensor:
    return (
        tensor.contiguous().flatten().view(torch.uint8).view(tensor.numel(), -1) if tensor.numel() else tensor
    )


def differing(result: Tensor, wanted: Tensor) -> float:
    """Return the share of elements whose bits differ."""
    if not wanted.numel():
        return 0.0
    return float((words(result) != words(wanted)).any(-1).float().mean())


def main(target: str, ops: list[str]) -> None:
    print("| emulated | options | same bits | most that differs | why | warp instructions | seconds |")
    print("|---|---:|---:|---:|---|---:|---:|")
    ran = same = instructions = 0
    begin = time.perf_counter()
    for op in ops or list(weft.catalogue):
        shares, why, executed, unsupported, start = [], set(), 0, 0, time.perf_counter()
        for workload in by_options(op):
            call = workload.make(rows=ROWS)
            try:
                with choosing_for(target):
                    wanted = list(tensors(call()))
            except ValueError:  # the target cannot multiply this format
                unsupported += 1
                continue
            with triton_loom.emulate(target, ignore=KNOWN) as gpu:
                emulated = list(tensors(call()))
            shares.append(max(map(differing, emulated, wanted), default=0.0))
            why |= {reason for launch in gpu.launches for reason in launch.inexact} if shares[-1] else set()
            executed += sum(sum(launch.outcome.executed) for launch in gpu.launches)
        equal = sum(share == 0 for share in shares)
        ran, same, instructions = ran + len(shares), same + equal, instructions + executed
        print(
            f"| `{op}` | {len(shares)} | {equal} | {max(shares, default=0.0):.2%} | {', '.join(sorted(why))} "
            f"| {executed:,} | {time.perf_counter() - start:.0f} |",
            flush=True,
        )
    print(f"| all | {ran} | {same} | | | {instructions:,} | {time.perf_counter() - begin:.0f} |")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

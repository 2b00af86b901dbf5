"""Count the bytes that Liger's kernels move at every access, and compare them with the minimum and with Weft's.

    python benchmarks/peers_traffic.py

Kernels run here, on the CPU, and are counted as they would be launched on a GPU with 132 multiprocessors (an H100). The
memory traffic of such a GPU is modelled from the counts by `weft.lab.traffic`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import triton_loom
from liger_kernel.ops.cross_entropy import cross_entropy_forward
from liger_kernel.ops.rms_norm import _rms_norm_backward_kernel, rms_norm_forward
from liger_kernel.ops.utils import torch_to_triton_dtype
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from triton_loom.witness.counters import LaunchCount

from weft.lab.families.norm import WORKLOADS
from weft.lab.traffic import Totals, count_traffic, totals

MULTIPROCESSORS = 132
NORMS = [(8192, 2048), (8192, 4096), (4096, 7168)]
LOSSES = [(1024, 32000), (512, 128256)]
LLAMA = 0  # Liger's code for Llama's way of casting


@dataclass(frozen=True)
class Row:
    """Bytes of one call."""

    what: str
    shape: tuple[int, int]
    whose: str
    least: int
    total: Totals


Measure = Callable[[int, int], Row]


# ---- minimum: every input is read once, every output is written once --------------------------------------


def least_forward(rows: int, cols: int) -> int:
    """Read x and the weight, write y (all bfloat16) and a float32 per row for the backward."""
    return 2 * rows * cols + 2 * cols + 2 * rows * cols + 4 * rows


def least_backward(rows: int, cols: int) -> int:
    """Read x, dy, the weight and a float32 per row; write dx and the weight's gradient."""
    return 2 * 2 * rows * cols + 2 * cols + 4 * rows + 2 * rows * cols + 2 * cols


def least_loss(rows: int, cols: int) -> int:
    """Read logits and an int64 target per row; write the logits' gradient and a bfloat16 loss per row."""
    return 2 * rows * cols + 8 * rows + 2 * rows * cols + 2 * rows


# ---- Liger ------------------------------------------------------------------------------------------------


def liger(
    what: str, shape: tuple[int, int], least: int, launches: list[LaunchCount], by_torch: int = 0
) -> Row:
    """Return a row from counted launches and the bytes that a PyTorch operator moves besides them."""
    total = Totals(*(count + by_torch for count in totals(launches)))
    return Row(what, shape, "Liger", least, total)


def liger_forward(rows: int, cols: int) -> Row:
    x, weight = torch.randn(rows, cols).bfloat16(), torch.rand(cols).bfloat16()
    with triton_loom.count() as counted:
        rms_norm_forward(x, weight, 1e-6, 0.0, "llama", False)
    return liger("RMSNorm forward", (rows, cols), least_forward(rows, cols), counted.launches)


def liger_backward(rows: int, cols: int) -> Row:
    """Launch like `rms_norm_backward`, which only knows multiprocessors of GPUs; dx overwrites dy."""
    x, dy, weight = (
        torch.randn(rows, cols).bfloat16(),
        torch.randn(rows, cols).bfloat16(),
        torch.rand(cols).bfloat16(),
    )
    _, _, rstd, block, warps, _ = rms_norm_forward(x, weight, 1e-6, 0.0, "llama", False)
    partial = torch.empty(MULTIPROCESSORS, cols)
    with triton_loom.count() as counted:
        _rms_norm_backward_kernel[(MULTIPROCESSORS,)](
            *(dy, dy.stride(0), dy, dy.stride(0), x, x.stride(0), torch_to_triton_dtype[x.dtype]),
            *(weight, weight.stride(0), rstd, rstd.stride(0), partial, partial.stride(0)),
            *(rows, cols, 0.0, -(-rows // MULTIPROCESSORS), LLAMA),
            elementwise_affine=True,
            BLOCK_SIZE=block,
            COMPUTE_DW=True,
            num_warps=warps,
        )
    summed = partial.nbytes + 2 * cols  # `partial.sum(0)` reads it and writes the weight's gradient
    return liger("RMSNorm backward", (rows, cols), least_backward(rows, cols), counted.launches, summed)


def liger_loss(rows: int, cols: int) -> Row:
    """Run forward; the gradient overwrites the logits."""
    logits, target = torch.randn(rows, cols).bfloat16().requires_grad_(), torch.randint(cols, (rows,))
    with torch.no_grad(), triton_loom.count() as counted:
        cross_entropy_forward(logits, target, None, -100, 0.0, 0.0, "mean", None, False)
    return liger("cross entropy", (rows, cols), least_loss(rows, cols), counted.launches)


# ---- Weft -------------------------------------------------------------------------------------------------


def weft(what: str, op: str, rows: int, cols: int) -> Row:
    plain = next(w for w in WORKLOADS if (w.op, w.name, w.options) == (op, "linghe/hidden", "plain"))
    moved = count_traffic(replace(plain, shape=("rows", cols), rows=rows))
    return Row(what, (rows, cols), "Weft", moved.least, moved.total)


def weft_forward(rows: int, cols: int) -> Row:
    return weft("RMSNorm forward", "norm", rows, cols)


def weft_backward(rows: int, cols: int) -> Row:
    return weft("RMSNorm backward", "norm_backward", rows, cols)


# ---- table --------------------------------------------------------------------------------------------------


def measures() -> Iterator[tuple[Measure, tuple[int, int]]]:
    for shape in NORMS:
        yield from ((measure, shape) for measure in (liger_forward, weft_forward))
        yield from ((measure, shape) for measure in (liger_backward, weft_backward))
    yield from ((liger_loss, shape) for shape in LOSSES)


def table(rows: list[Row]) -> Table:
    output = Table(title=f"MB moved, on a GPU with {MULTIPROCESSORS} multiprocessors")
    for heading in ("", "rows x columns", "kernels of"):
        output.add_column(heading)
    for heading in ("least", "requested", "per program", "per launch", "modelled", "x least"):
        output.add_column(heading, justify="right")
    last = None
    for row in rows:
        if last not in (None, (row.what, row.shape)):
            output.add_section()
        first = (row.what, "{} x {}".format(*row.shape)) if last != (row.what, row.shape) else ("", "")
        megabytes = (row.least, *row.total)
        ratio = f"{row.total.modelled / row.least:.3f}"
        output.add_row(*first, row.whose, *(f"{count / 1e6:,.1f}" for count in megabytes), ratio)
        last = row.what, row.shape
    return output


def main() -> None:
    torch.manual_seed(0)
    todo = list(measures())
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("counting", total=len(todo))
        for measure, shape in todo:
            progress.update(task, description=f"{measure.__name__} {shape[0]} x {shape[1]}")
            rows.append(measure(*shape))
            progress.advance(task)
    console.print(table(rows))
    console.print("per program, per launch: sums of the 32-byte sectors that each one touches")


if __name__ == "__main__":
    main()

"""Compare the loss head with its rivals on this CPU: peak extra memory and time of forward and backward.

    python benchmarks/linear_cross_entropy.py                       V=151936, H=1024, 4096 tokens, bf16
    python benchmarks/linear_cross_entropy.py --tokens 512 --vocab 16384
    python benchmarks/linear_cross_entropy.py --tiles               binaries for GPUs, tile by tile

Each contender runs in its own process, so that none inherits another's memory. There, kernels are compiled and
libraries warmed up with a few tokens first; then the inputs are made, the operating system's peak of the resident size
is reset, and forward and backward run once. `extra` is that peak minus what was resident before: gradients, workspaces
and memory that the allocator keeps. The time is of the same run, on all cores; other load on the machine lengthens it
for everyone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from memory import extra_memory
from rich.console import Console
from rich.table import Table
from torch import Tensor

# ---- contenders ----------------------------------------------------------------------------------------


def weft_head(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    import weft

    loss: Tensor = weft.linear_cross_entropy(hidden, weight, target)
    return loss


def torch_chunked(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = F.linear_cross_entropy(hidden, weight, target)
    return loss


def naive(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.t()).float(), target)


def naive_bf16(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Skip the fp32 copy of the logits that trainers make, which is less exact."""
    return F.cross_entropy(hidden @ weight.t(), target)


def liger(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    import liger_kernel.ops as ops

    loss: Tensor = ops.LigerFusedLinearCrossEntropyFunction.apply(
        hidden, weight, target, None, None, -100, 0.0, 0.0, "mean", None, False, None
    )[0]
    return loss


CONTENDERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "weft": weft_head,
    "F.linear_cross_entropy": torch_chunked,
    "naive": naive,
    "naive-bf16": naive_bf16,
    "liger": liger,
}


# ---- measurement ---------------------------------------------------------------------------------------


def measure(name: str, tokens: int, hidden_size: int, vocab: int) -> dict[str, Any]:
    """Measure extra bytes and seconds of one forward and backward, in this process."""
    contender = CONTENDERS[name]

    def inputs(tokens: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        hidden = torch.randn(tokens, hidden_size, dtype=torch.bfloat16).requires_grad_()
        weight = (torch.randn(vocab, hidden_size, dtype=torch.bfloat16) / hidden_size**0.5).requires_grad_()
        return hidden, weight, torch.randint(0, vocab, (tokens,))

    # Compile, with the full vocabulary because a rival's tiles depend on it.
    contender(*inputs(32, vocab)).backward()
    hidden, weight, target = inputs(tokens, vocab)
    times = [time.perf_counter()]
    losses = []

    def run() -> None:
        losses.append(contender(hidden, weight, target))
        times.append(time.perf_counter())
        losses[0].backward()
        times.append(time.perf_counter())

    extra = extra_memory(run)
    assert hidden.grad is not None
    assert weight.grad is not None
    start, forward, end = times
    return {
        "name": name, "extra": extra, "forward": forward - start, "whole": end - start, "loss": losses[0].item(),
        "dhidden": hidden.grad.float().norm().item(), "dweight": weight.grad.float().norm().item(),
    }  # fmt: skip


# ---- tiles compiled for GPUs ---------------------------------------------------------------------------

# Dense bf16 TFLOPS and memory TB/s, as stated by vendors.
MACHINES = {
    "sm_80": (312, 2.0), "sm_89": (181, 0.86), "sm_90": (989, 3.35), "sm_100": (2250, 8.0),
    "sm_120": (210, 1.79), "gfx942": (1307, 5.3), "gfx950": (2300, 8.0),
}  # fmt: skip


def tiles(targets: list[str], tokens: int, hidden_size: int, vocab: int) -> None:
    """Print what the products of one forward and backward are compiled to."""
    import weft
    from weft.lab.compiled import compile_all
    from weft.lab.compiled.offline import Binary
    from weft.runtime import recording

    table = Table(
        "target",
        "kernel",
        "tile",
        "warps",
        "stages",
        "registers",
        "spilled",
        "shared",
        "matrix",
        "bulk",
        "flop/B",
    )
    for target in targets:
        with recording(target) as seen:
            hidden = torch.empty(tokens, hidden_size, dtype=torch.bfloat16, device="meta", requires_grad=True)
            weight = torch.empty(vocab, hidden_size, dtype=torch.bfloat16, device="meta", requires_grad=True)
            labels = torch.empty(tokens, dtype=torch.int64, device="meta")
            weft.linear_cross_entropy(hidden, weight, labels).backward()
        products = [
            v for v in dict.fromkeys(seen) if "TILE" in dict(v.constants) and "ALIGN" in dict(v.constants)
        ]
        for variant, binary in zip(products, compile_all([(v, target) for v in products]), strict=True):
            if not isinstance(binary, Binary):
                raise binary
            c = dict(variant.constants)
            sides: list[int] = [int(str(c[name])) for name in ("ROWS", "VOCAB", "COLS") if name in c]
            m, n, k = sides[0], sides[1], c["TILE"]
            matrix = {
                name: binary.count(pattern)
                for name, pattern in (
                    ("wgmma", "HGMMA"),
                    ("tcgen05", r"UTC\w*MMA"),
                    ("mma", "HMMA"),
                    ("mfma", "v_mfma"),
                )
            }
            table.add_row(
                target, variant.kernel.strip("_").removesuffix("_kernel"), f"{m}x{n}x{k}", str(variant.num_warps),
                str(variant.num_stages), str(binary.registers), str(binary.spill_bytes), f"{binary.shared // 1024} KB",
                " ".join(f"{count} {name}" for name, count in matrix.items() if count),
                str(binary.count("UTMALDG") or "-"), f"{m * n / (m + n):.0f}",
            )  # fmt: skip
    console = Console(width=150)
    console.print(table)
    for target in targets:
        flops, bandwidth = MACHINES[target]
        operand_bytes = 2 * (2 * tokens * hidden_size + 2 * vocab * hidden_size)
        console.print(
            f"{target}: machine balance {flops / bandwidth:.0f} flop/B of memory; forward and backward are "
            f"{8 * tokens * hidden_size * vocab / operand_bytes:.0f} flop per byte of operands and gradients: bound by "
            f"{'products' if 8 * tokens * hidden_size * vocab / operand_bytes > flops / bandwidth else 'memory'}, "
            f"{8 * tokens * hidden_size * vocab / flops / 1e9:.1f} ms at the stated peak (modelled)"
        )


# ---- command line --------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=[*CONTENDERS])
    parser.add_argument("--one", choices=CONTENDERS, help="measure this one in this process and print JSON")
    parser.add_argument("--tiles", nargs="*", choices=MACHINES, help="compile for these GPUs (default: all)")
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.tokens, options.hidden, options.vocab)))
        return
    if options.tiles is not None:
        tiles(options.tiles or [*MACHINES], options.tokens, options.hidden, options.vocab)
        return
    table = Table("contender", "extra MiB", "without dW", "forward s", "whole s", "loss")
    dweight = options.vocab * options.hidden * 2
    results = []
    for name in options.only:
        command = [sys.executable, __file__, "--one", name, "--tokens", str(options.tokens)]
        command += ["--hidden", str(options.hidden), "--vocab", str(options.vocab)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
        if done.returncode:
            table.add_row(name, "failed", (done.stderr.strip().splitlines() or ["killed"])[-1][:60])
            continue
        result = json.loads(done.stdout.strip().splitlines()[-1])
        results.append(result)
        table.add_row(
            name, f"{result['extra'] / 2**20:.0f}", f"{(result['extra'] - dweight) / 2**20:.0f}",
            f"{result['forward']:.2f}", f"{result['whole']:.2f}", f"{result['loss']:.5f}",
        )  # fmt: skip
    Console().print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()

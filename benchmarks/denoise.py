"""Time a request of the policy of examples/denoise.py: plain PyTorch, eager and compiled, beside captured Weft.

python benchmarks/denoise.py [SIZE] [ROUNDS]        # the table of docs/denoise.md: python benchmarks/denoise.py pi05

Contenders take turns; medians. "hoisted" is plain PyTorch that computes the modulations of all steps once, as Weft.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import weft.nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from denoise import SIZES, Denoiser, Plain, Policy, build, is_inner, request


class Hoisted(Plain):
    """Plain PyTorch with the modulations of all steps computed before the first."""

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        super().__init__(policy, dtype)
        width = 3 * self.sizes.expert_width
        self.table = policy.modulations().unflatten(-1, (-1, width))

    def modulations(self, step: Tensor) -> Iterator[Tensor]:
        return iter(self.table.index_select(0, step[None])[0].unbind())


def seconds(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the medians of interleaved calls."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, run in contenders.items():
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
            print(f"{name}: {times[name][-1]:.2f} s", file=sys.stderr, flush=True)
    return {name: statistics.median(each[1:]) for name, each in times.items()}


@torch.no_grad()
def main(size: str = "small", rounds: str = "5") -> None:
    s, policy = SIZES[size], build(SIZES[size])
    images, prompt, lengths, noise = request(s)
    with torch.device("meta"):
        frozen = build(s)
    frozen.load_state_dict(policy.state_dict(), assign=True)  # the same parameters
    scales = weft.calibrate(policy, [request(s, seed=seed) for seed in (1, 2)], filter=is_inner)
    weft.nn.convert(frozen, "fp8_static", scales=scales, filter=is_inner)

    read: dict[str, Callable[[], object]] = {}
    steps: dict[str, Callable[[], object]] = {}

    def add_plain(name: str, plain: Plain, compiled: bool) -> None:
        velocity, reader = (
            (torch.compile(plain.velocity), torch.compile(plain.read))
            if compiled
            else (plain.velocity, plain.read)
        )
        caches = plain.read(images, prompt, lengths)

        def denoise() -> Tensor:
            actions = noise
            for step in torch.arange(s.steps):
                actions = actions - velocity(actions, step, lengths, caches) / s.steps
            return actions

        read[name], steps[name] = lambda: reader(images, prompt, lengths), denoise

    def add_weft(name: str, policy: Policy) -> None:
        denoiser = Denoiser(policy, 1)
        policy.read(images, prompt, lengths, denoiser.caches)
        denoiser.capture()
        read[name] = lambda: policy.read(images, prompt, lengths, denoiser.caches)
        steps[name] = lambda: denoiser.denoise(lengths, noise)

    add_plain("PyTorch, eager", Plain(policy, torch.bfloat16), False)
    add_plain("PyTorch, eager, hoisted", Hoisted(policy, torch.bfloat16), False)
    add_plain("torch.compile, hoisted", Hoisted(policy, torch.bfloat16), True)
    add_weft("Weft, bf16, captured", policy)
    add_weft("Weft, FP8 with frozen scales, captured", frozen)
    of_steps = seconds(steps, int(rounds))
    of_read = seconds(read, max(int(rounds) // 2, 1))
    print("| | images and prompt, s | ten steps, s | request, s |")
    print("|---|---:|---:|---:|")
    for name in steps:
        print(
            f"| {name} | {of_read[name]:.2f} | {of_steps[name]:.2f} | {of_read[name] + of_steps[name]:.2f} |"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])

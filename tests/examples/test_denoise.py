"""One captured step, replayed ten times, equals the eager loop and agrees with plain PyTorch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import weft.nn
from tests.support.allocations import allocations_of
from tests.support.examples import example

EXAMPLE = Path(__file__).parents[2] / "examples/denoise.py"


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
def test_the_policy_agrees_with_pytorch(batch: int) -> None:
    # A process of its own: here, allocations are filled with poison, which counts as kernels.
    command = [sys.executable, str(EXAMPLE), "--batch", str(batch)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    plain, fused, frozen = (
        (float(error), int(kernels))
        for error, kernels in re.findall(r"  (0\.\d+) +(\d+)$", printed, re.MULTILINE)
    )
    assert fused[0] < 1.25 * plain[0]
    # Frozen scales of e4m3 cost about as much as 3 bits of a mantissa, averaged over the terms of a product.
    assert plain[0] < frozen[0] < 0.02
    assert max(fused[1], frozen[1]) * 5 <= plain[1]
    assert "equal the eager loop" in printed


def test_a_step_is_captured_once_for_all_requests() -> None:
    """Lengths, positions and the time of a step are read on the device: other requests need no other recording, and a
    replay of Weft's own products allocates nothing. A recording refuses whatever would wait for the device."""
    denoise = example("denoise")
    s = denoise.Sizes(1, 28, 14, 32, 64, 2, 1, 64, 9, 64, 64, 64, 64, 1, 2, 32, 3, 16, 4)
    with torch.no_grad():
        policy = denoise.build(s)
        *inputs, noise = denoise.request(s, 2, seed=9)
        exact = denoise.Plain(policy, torch.float64).run(*inputs, noise) - noise
        denoiser = denoise.Denoiser(policy, 2)
        denoiser.capture()
        # Roundings of bf16; a step at another time is off by more.
        assert denoise.relative_error(denoiser.run(*inputs, noise) - noise, exact) < 0.01
        scales = weft.calibrate(policy, [denoise.request(s, 2, seed=9)])
        weft.nn.convert(policy, "fp8_static", scales=scales)
        eager, replayed = denoise.Denoiser(policy, 2), denoise.Denoiser(policy, 2)
        replayed.capture()
        at = denoise.Place.of(torch.tensor([3, 5]), s)
        assert allocations_of(lambda: replayed.step(*at)) == []
        assert allocations_of(lambda: eager.step(*at))
        results = []
        for seed in range(3):
            inputs = denoise.request(s, 2, seed)
            results.append(replayed.run(*inputs).clone())
            assert torch.equal(results[-1], eager.run(*inputs))
    assert not torch.equal(results[0], results[1])

"""One captured step, replayed ten times, equals the eager loop and agrees with plain PyTorch."""

from __future__ import annotations

import pytest
import torch

import weft.nn
from tests.support.allocations import allocations_of
from tests.support.examples import example


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
def test_the_policy_agrees_with_pytorch(batch: int, capsys: pytest.CaptureFixture[str]) -> None:
    plain, fused, frozen = example("denoise").main(batch=batch)
    assert fused.error < 1.25 * plain.error
    # Frozen scales of e4m3 cost about as much as 3 bits of a mantissa, averaged over the terms of a product.
    assert plain.error < frozen.error < 0.02
    assert fused.kernels * 5 <= plain.kernels
    assert frozen.kernels * 5 <= plain.kernels * 1.1
    assert "equal the eager loop" in capsys.readouterr().out


def test_a_step_is_captured_once_for_all_requests() -> None:
    """Lengths, positions and the time of a step are read on the device: other requests need no other recording, and a
    replay of Weft's own products allocates nothing. A recording refuses whatever would wait for the device."""
    denoise = example("denoise")
    s = denoise.Sizes(1, 28, 14, 32, 64, 2, 1, 64, 9, 64, 64, 64, 64, 1, 2, 32, 3, 16, 4)
    with torch.no_grad():
        policy = denoise.build(s)
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

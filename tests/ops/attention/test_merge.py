"""Parts of attention joined: the same as attention over all keys, and the same gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import weft
from tests.ops.attention.own import attend
from tests.support.examples import run_ranks


def halves(layout: str) -> tuple[list[Tensor], Tensor]:
    """Query, key and value of 90 queries and 130 keys in a layout, and a gradient."""
    generator = torch.Generator().manual_seed(0)
    order = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}[layout]
    made = [
        torch.randn(2, n, t, 64, generator=generator).permute(order) for n, t in ((4, 90), (2, 130), (2, 130))
    ]
    return [x.requires_grad_() for x in made], torch.randn(made[0].shape, generator=generator)


@pytest.mark.parametrize(("layout", "at"), [("bhsd", 2), ("bshd", 1), ("sbhd", 0)])
def test_parts_are_the_whole(layout: str, at: int) -> None:
    (q, k, v), upstream = halves(layout)
    whole, lse, _ = attend(q, k, v, layout=layout, return_lse=True)
    wanted = torch.autograd.grad(whole, (q, k, v), upstream)
    parts = []
    for begin, length in ((0, 40), (40, 1), (41, 89)):
        kp, vp = (x.narrow(at, begin, length) for x in (k, v))
        parts.append(attend(q, kp, vp, layout=layout, return_lse=True))
    merged = weft.merge_attention([p.out for p in parts], [p.lse for p in parts], layout=layout)  # type: ignore[union-attr]
    torch.testing.assert_close(merged.out, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(merged.lse, lse, rtol=1e-6, atol=1e-6)
    found = torch.autograd.grad(merged.out, (q, k, v), upstream)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_part_that_saw_nothing_has_no_weight() -> None:
    out, lse = torch.randn(5, 2, 8), torch.randn(2, 5)
    nothing, least = torch.zeros(5, 2, 8), torch.full((2, 5), -math.inf)
    merged = weft.merge_attention([out, nothing], [lse, least])
    assert torch.equal(merged.out, out)
    assert torch.equal(merged.lse, lse)
    merged = weft.merge_attention([nothing, nothing], [least, least])
    assert not merged.out.count_nonzero()
    assert (merged.lse == -math.inf).all()


def test_mistakes_are_named() -> None:
    out, lse = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5)
    with pytest.raises(ValueError, match="as many outs as lses"):
        weft.merge_attention([out], [])
    with pytest.raises(ValueError, match="lses must have the shape"):
        weft.merge_attention([out], [lse.transpose(1, 2)])
    with pytest.raises(ValueError, match="outs must have the shape"):
        weft.merge_attention([out, out[:, :1]], [lse, lse])


def test_a_ring_of_ranks() -> None:
    """Four ranks compute what one does, gradients included."""
    said = run_ranks("ring_attention", "--tokens", "256", ranks=4)
    assert said.count("largest difference") == 4

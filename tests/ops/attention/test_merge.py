"""Merged partial attention equals attention over all keys, gradients included."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import weft
from tests.ops.attention.own import attend
from tests.support.examples import run_ranks


def halves(layout: str) -> tuple[list[Tensor], Tensor]:
    """Draw 90 queries, 130 keys and values in a layout, and an upstream gradient."""
    generator = torch.Generator().manual_seed(0)
    order = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}[layout]
    tensors = [
        torch.randn(2, n, t, 64, generator=generator).permute(order) for n, t in ((4, 90), (2, 130), (2, 130))
    ]
    return [x.requires_grad_() for x in tensors], torch.randn(tensors[0].shape, generator=generator)


@pytest.mark.parametrize(("layout", "at"), [("bhsd", 2), ("bshd", 1), ("sbhd", 0)])
def test_merged_parts_equal_the_whole(layout: str, at: int) -> None:
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
    result = torch.autograd.grad(merged.out, (q, k, v), upstream)
    for one, other in zip(result, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_part_that_saw_nothing_has_no_weight() -> None:
    out, lse = torch.randn(5, 2, 8), torch.randn(2, 5)
    nothing, minus_infinity = torch.zeros(5, 2, 8), torch.full((2, 5), -math.inf)
    merged = weft.merge_attention([out, nothing], [lse, minus_infinity])
    assert torch.equal(merged.out, out)
    assert torch.equal(merged.lse, lse)
    merged = weft.merge_attention([nothing, nothing], [minus_infinity, minus_infinity])
    assert not merged.out.count_nonzero()
    assert (merged.lse == -math.inf).all()


def test_the_gradient_of_a_query_that_sees_nothing_is_0() -> None:
    """A query that sees no key in any part, or in one of two, has a finite gradient; it used to be NaN, with those of
    all keys."""
    generator = torch.Generator().manual_seed(0)
    q, *keys = (
        torch.randn(1, 2, tokens, 64, generator=generator).requires_grad_() for tokens in (8, 4, 4, 6, 6)
    )
    lower = {"is_causal": True, "causal_align": "lower_right", "return_lse": True}
    for count in (1, 2):
        parts = [attend(q, keys[2 * i], keys[2 * i + 1], **lower) for i in range(count)]
        merged = weft.merge_attention([p.out for p in parts], [p.lse for p in parts])
        upstream = torch.randn(merged.out.shape, generator=generator)
        result = torch.autograd.grad(
            (merged.out, merged.lse), (q, *keys[: 2 * count]), (upstream, torch.ones_like(merged.lse))
        )
        nothing = 4 if count == 1 else 2  # so many queries see nothing
        assert (merged.lse[..., :nothing] == -math.inf).all()
        assert not merged.out[:, :, :nothing].count_nonzero()
        assert not result[0][:, :, :nothing].count_nonzero()
        assert result[0][:, :, nothing:].count_nonzero()
        assert all(grad.isfinite().all() for grad in result)
    doubles = [x.detach().double().requires_grad_() for x in (q, *keys)]
    scores = doubles[0] @ torch.cat([doubles[1], doubles[3]], 2).mT / 8
    own = torch.arange(8)[:, None]
    seen = torch.cat([torch.arange(4) <= own - 4, torch.arange(6) <= own - 2], 1)
    p = scores.masked_fill(~seen, -math.inf)[:, :, 2:].softmax(-1)
    out = p @ torch.cat([doubles[2], doubles[4]], 2)
    lse = scores.masked_fill(~seen, -math.inf)[:, :, 2:].logsumexp(-1)
    wanted = torch.autograd.grad((out, lse), doubles, (upstream[:, :, 2:].double(), torch.ones_like(lse)))
    for one, other in zip(result, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_a_part_whose_sink_is_infinite_has_all_the_weight() -> None:
    q, k, other = (torch.randn(1, 2, 9, 64).requires_grad_() for _ in range(3))
    sinks = torch.tensor([math.inf, 0.0]).requires_grad_()
    parts = [attend(q, k, k, sinks=sinks, return_lse=True), attend(q, other, other, return_lse=True)]
    merged = weft.merge_attention([p.out for p in parts], [p.lse for p in parts])
    assert not merged.out[:, 0].count_nonzero()
    assert (merged.lse[:, 0] == math.inf).all()
    whole = attend(q, torch.cat([k, other], 2), torch.cat([k, other], 2), sinks=sinks, return_lse=True)
    torch.testing.assert_close(merged.out, whole.out, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(merged.out.shape)
    for one, two in zip(
        torch.autograd.grad(merged.out, (q, k, other, sinks), upstream),
        torch.autograd.grad(whole.out, (q, k, other, sinks), upstream),
        strict=True,
    ):
        assert one.isfinite().all()
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_a_nan_lse_is_not_swallowed() -> None:
    out, lse = torch.randn(5, 2, 8), torch.randn(2, 5)
    lse[0, 3] = math.nan
    merged = weft.merge_attention([out, out], [lse, torch.randn(2, 5)])
    assert torch.equal(merged.lse.isnan(), lse.isnan())
    assert torch.equal(merged.out.isnan().all(-1), lse.isnan().t())


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
    output = run_ranks("ring_attention", "--tokens", "256", ranks=4)
    assert output.count("largest difference") == 4

"""Routing: every convention against a reimplementation, and ties, gradients, losses, sizes and layouts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton_loom.testing import EPS32, assert_rounded_once

import weft
from tests.catalogue.layouts import LAYOUTS, far_apart
from tests.support.covering import covering
from weft.lab.calls import assert_same
from weft.lab.families.route import Rule, route_truth, scores_truth
from weft.lab.truth import Near
from weft.ops import CONVENTIONS, Routing
from weft.ops.moe.route.arguments import Groups, RouteArgs, RouteBackwardArgs, Weighing
from weft.runtime import choosing_for, recording

# ---- the peers, in plain PyTorch, with the lowest index first among equals ----------------------------------


def topk(x: Tensor, k: int) -> Tensor:
    """Return top-k indices, the lowest first among equals (unlike torch.topk), with NaN above all (like torch.topk)."""
    key = -np.nan_to_num(x.detach().double().numpy(), nan=np.inf, posinf=1e300, neginf=-np.inf)
    return torch.from_numpy(np.argsort(key, axis=-1, kind="stable"))[..., :k]


@dataclass(frozen=True)
class Settings:
    """Arguments that all conventions share."""

    score: str = "softmax"
    experts: int = 64
    k: int = 8
    groups: int = 1
    group_topk: int = 1
    biased: bool = False
    renormalize: bool = False
    scale: float = 1.0
    options: tuple[tuple[str, Any], ...] = field(default=())


def _in_groups(choice: Tensor, at: Settings, best: int, masked: float) -> Tensor:
    by_group = choice.view(len(choice), at.groups, -1)
    group_scores = by_group.topk(best, dim=-1).values.sum(-1)
    allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(
        1, topk(group_scores, at.group_topk), True
    )
    return by_group.masked_fill(~allowed.unsqueeze(-1), masked).view_as(choice)


def megatron(x: Tensor, bias: Tensor | None, at: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Return (weights, indices, scores that decided the choice), like all peers below."""

    def compute_topk(scores: Tensor) -> tuple[Tensor, Tensor]:
        if at.groups > 1:
            scores = _in_groups(scores, at, at.k // at.group_topk, -torch.inf)
        return topk(scores, at.k), scores

    if at.score == "softmax":
        if dict(at.options).get("post_softmax", True):
            indices, choice = compute_topk(x)
            weights = torch.softmax(x.gather(1, indices), -1)
        else:
            scores = torch.softmax(x, -1)
            indices, choice = compute_topk(scores)
            weights = scores.gather(1, indices)
    else:
        scores = torch.sigmoid(x) if at.score == "sigmoid" else torch.nn.functional.softplus(x).sqrt()
        indices, choice = compute_topk(scores if bias is None else scores + bias)
        weights = scores.gather(1, indices)
        if at.k > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * at.scale, indices, choice


def torchtitan(x: Tensor, bias: Tensor | None, at: Settings) -> tuple[Tensor, Tensor, Tensor]:
    scores = scores_truth(x, at.score)
    choice = scores if bias is None else scores + bias
    if at.groups > 1:
        choice = _in_groups(choice, at, 2, -torch.inf)
    indices = topk(choice, at.k)
    weights = scores.gather(1, indices)
    if at.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * at.scale, indices, choice


def vllm(x: Tensor, bias: Tensor | None, at: Settings) -> tuple[Tensor, Tensor, Tensor]:
    scores = scores_truth(x, at.score)
    choice = scores if bias is None else scores + bias
    if at.groups > 1:
        choice = _in_groups(choice, at, 1 if bias is None else 2, -torch.inf)
    indices = topk(choice, at.k)
    weights = scores.gather(1, indices)
    if at.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return (weights * at.scale if at.scale != 1.0 else weights), indices, choice


def sglang(x: Tensor, bias: Tensor | None, at: Settings) -> tuple[Tensor, Tensor, Tensor]:
    scores = scores_truth(x, at.score)
    choice = scores if bias is None else scores + bias
    if at.groups > 1:
        choice = _in_groups(choice, at, 1 if bias is None else 2, 0.0 if bias is None else -torch.inf)
    indices = topk(choice, at.k)
    weights = scores.gather(1, indices)
    if at.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * at.scale
    return weights, indices, choice


# ---- models, as written in HuggingFace transformers ---------------------------------------------------------


def qwen3(x: Tensor, bias: Tensor | None, at: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Route like Qwen3MoeTopKRouter."""
    router_probs = torch.nn.functional.softmax(x, dim=-1, dtype=wide(x))
    router_indices = topk(router_probs, at.k)
    router_top_value = router_probs.gather(1, router_indices)
    router_top_value = router_top_value / router_top_value.sum(dim=-1, keepdim=True)
    return router_top_value.to(x.dtype), router_indices, router_probs


def mixtral(x: Tensor, bias: Tensor | None, at: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Route like MixtralTopKRouter."""
    weights, indices, choice = qwen3(x.to(wide(x)), bias, at)
    return weights, indices, choice


def gpt_oss(x: Tensor, bias: Tensor | None, at: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Route like GptOssTopKRouter."""
    router_indices = topk(x, at.k)
    router_top_value = x.gather(1, router_indices)
    return torch.nn.functional.softmax(router_top_value, dim=1, dtype=x.dtype), router_indices, x


def deepseek_v3(x: Tensor, bias: Tensor | None, at: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Route like DeepseekV3TopkRouter."""
    scores = x.to(wide(x)).sigmoid()
    scores_for_choice = scores + (torch.zeros(at.experts) if bias is None else bias)
    group_scores = (
        scores_for_choice.view(-1, at.groups, at.experts // at.groups).topk(2, dim=-1)[0].sum(dim=-1)
    )
    group_mask = torch.zeros_like(group_scores).scatter_(1, topk(group_scores, at.group_topk), 1)
    score_mask = group_mask.unsqueeze(-1).expand(-1, -1, at.experts // at.groups).reshape(-1, at.experts)
    scores_for_choice = scores_for_choice.masked_fill(~score_mask.bool(), float("-inf"))
    topk_indices = topk(scores_for_choice, at.k)
    topk_weights = scores.gather(1, topk_indices)
    topk_weights = topk_weights / (topk_weights.sum(dim=-1, keepdim=True) + 1e-20)
    return topk_weights * at.scale, topk_indices, scores_for_choice


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype of scores: float32, or float64 if x is the truth."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


Peer = Callable[[Tensor, Tensor | None, Settings], tuple[Tensor, Tensor, Tensor]]
LIBRARIES: dict[str, Peer] = {
    "megatron": megatron,
    "torchtitan": torchtitan,
    "vllm": vllm,
    "sglang": sglang,
}
MODELS: dict[str, Peer] = {
    "qwen3": qwen3,
    "mixtral": mixtral,
    "gpt_oss": gpt_oss,
    "deepseek_v3": deepseek_v3,
}
PEERS = LIBRARIES | MODELS


def ours(convention: str, x: Tensor, bias: Tensor | None, at: Settings, **more: Any) -> Routing:
    if convention in MODELS:  # the name implies everything but the model's configuration
        if convention == "deepseek_v3":
            more |= {"bias": bias, "groups": at.groups, "group_topk": at.group_topk, "scale": at.scale}
        return weft.route(x, at.k, convention=convention, **more)
    if convention != "megatron":
        more["renormalize"] = at.renormalize
    return weft.route(
        x,
        at.k,
        convention=convention,
        score=at.score,  # type: ignore[arg-type]
        bias=bias,
        groups=at.groups,
        group_topk=at.group_topk,
        scale=at.scale,
        **dict(at.options),
        **more,
    )


# ---- cases --------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[torch.Generator, int, int], Tensor]] = {
    "normal": lambda g, t, e: torch.randn(t, e, generator=g),
    # Values are equal or at least 1/1024 apart, so the rounding of exp changes no order.
    "coarse": lambda g, t, e: (torch.randn(t, e, generator=g) * 1024).round() / 1024,
    "bfloat16": lambda g, t, e: torch.randn(t, e, generator=g).bfloat16().float(),
    "three values": lambda g, t, e: torch.randint(-1, 2, (t, e), generator=g) / 2,
    "all equal": lambda g, t, e: torch.randn(t, 1, generator=g).expand(t, e).contiguous(),
    "zeros of both signs": lambda g, t, e: torch.randint(0, 2, (t, e), generator=g).float() * -0.0,
    "far apart": lambda g, t, e: torch.randint(-3, 4, (t, e), generator=g) * 1e4,
    "some minus infinity": lambda g, t, e: torch.where(
        torch.rand(t, e, generator=g) < 0.3, -torch.inf, torch.randn(t, e, generator=g)
    ),
}


def cases(at: Settings, rows: int, seed: int) -> tuple[Tensor, Tensor | None]:
    """Return logits of all kinds, and a bias with some equal elements."""
    draw = torch.Generator().manual_seed(seed)
    each = -(-rows // len(KINDS))
    x = torch.cat([make(draw, each, at.experts) for make in KINDS.values()])
    bias = (torch.randn(at.experts, generator=draw) * 2).round() / 8 if at.biased else None
    return x, bias


def near_tie(choice: Tensor, mine: Tensor, theirs: Tensor) -> Tensor:
    """Return the rows whose two selections differ only in scores that fp32 barely distinguishes."""
    a, b = choice.gather(1, mine).double(), choice.gather(1, theirs).double()
    size = choice.double().abs().nan_to_num(0, 0, 0).amax(1, keepdim=True)
    return ((a - b).abs() <= 8 * EPS32 * size).all(1)


def near_tie_of_groups(convention: str, x: Tensor, bias: Tensor | None, at: Settings) -> Tensor:
    """Return the rows in which fp32 barely distinguishes the last allowed group from the first excluded one: sums of
    scores and biases that are equal in real arithmetic differ in their last bits."""
    if at.groups == 1:
        return torch.zeros(len(x), dtype=torch.bool)
    post = convention == "megatron" and at.score == "softmax" and dict(at.options).get("post_softmax", True)
    choice = x.double() if post else scores_truth(x.double(), at.score)
    if bias is not None:
        choice = choice + bias.double()
    always = {"megatron": at.k // at.group_topk, "torchtitan": 2, "deepseek_v3": 2}
    best = always.get(convention, 1 if bias is None else 2)
    group_scores = (
        choice.view(len(x), at.groups, -1).topk(best).values.sum(-1).sort(1, descending=True).values
    )
    if at.group_topk == at.groups:
        return torch.zeros(len(x), dtype=torch.bool)
    return (
        group_scores[:, at.group_topk - 1] - group_scores[:, at.group_topk]
    ).abs() <= 8 * EPS32 * best * group_scores.abs().amax(1)


FEW = {
    "megatron": [
        Settings(),
        Settings(score="sigmoid", experts=256, groups=8, group_topk=2, biased=True, scale=2.5),
        Settings(score="sqrtsoftplus", k=6, experts=60),
        Settings(experts=160, k=6, groups=8, group_topk=3, scale=16.0, options=(("post_softmax", False),)),
    ],
    "torchtitan": [
        Settings(renormalize=True),
        Settings(
            score="sigmoid", experts=256, groups=8, group_topk=4, biased=True, renormalize=True, scale=2.5
        ),
        Settings(score="sigmoid", experts=160, k=6, groups=8, group_topk=3),
    ],
    "vllm": [
        Settings(k=4, experts=60, renormalize=True),
        Settings(
            score="sigmoid", experts=256, groups=8, group_topk=4, biased=True, renormalize=True, scale=2.5
        ),
        Settings(experts=160, k=6, groups=8, group_topk=3, scale=16.0),
    ],
    "sglang": [
        Settings(score="sqrtsoftplus", renormalize=True, scale=1.5),
        Settings(score="sigmoid", experts=160, k=6, groups=8, group_topk=3, renormalize=True, scale=2.0),
        Settings(experts=160, k=6, groups=8, group_topk=3, scale=16.0),
    ],
    "qwen3": [Settings(experts=128), Settings(experts=60, k=4)],
    "mixtral": [Settings(experts=8, k=2), Settings(experts=16, k=1)],
    "gpt_oss": [Settings(experts=128, k=4), Settings(experts=32, k=4)],
    "deepseek_v3": [
        Settings("sigmoid", experts=256, groups=8, group_topk=4, biased=True, scale=2.5),
        Settings("sigmoid", experts=256, groups=8, group_topk=4, scale=2.5),
        Settings("sigmoid", experts=64, k=6, biased=True, scale=2.446),
        Settings("sigmoid", experts=64, k=1, biased=True),
    ],
}


def many() -> Iterator[tuple[str, Settings]]:
    """Yield every combination, for the slow tests."""
    for convention, score, (experts, k), grouped, biased, renormalize in itertools.product(
        LIBRARIES,
        ("softmax", "sigmoid", "sqrtsoftplus"),
        ((64, 8), (96, 6), (257, 1), (128, 64)),
        (False, True),
        (False, True),
        (False, True),
    ):
        if convention == "megatron" and (renormalize or (biased and score == "softmax")):
            continue
        if grouped and experts % 8:
            continue
        groups = (8, 8 if k == 64 else 4 if k == 8 else 3) if grouped else (1, 1)
        yield convention, Settings(score, experts, k, *groups, biased, renormalize, 1.5)


def compare(convention: str, at: Settings, rows: int, seed: int) -> int:
    """Compare one convention with its peer; return the number of rows compared."""
    x, bias = cases(at, rows, seed)
    got = ours(convention, x, bias, at)
    weights, indices, choice = PEERS[convention](x, bias, at)
    same = chosen_alike(convention, x, bias, at, got.indices.long(), indices, choice)
    a, b = got.weights[same], weights[same]
    assert torch.equal(a.isnan(), b.isnan())
    torch.testing.assert_close(a, b, rtol=3e-6, atol=1e-30, equal_nan=True)
    counts = torch.bincount(got.indices.flatten(), minlength=at.experts)
    assert torch.equal(got.counts.long(), counts)
    return len(x)


def chosen_alike(
    convention: str, x: Tensor, bias: Tensor | None, at: Settings, mine: Tensor, indices: Tensor, choice: Tensor
) -> Tensor:  # fmt: skip
    """Return the rows with the same experts in the same order, which must be all but a few near ties."""
    assert (mine.sort(1).values.diff(dim=1) > 0).all()
    same = (mine == indices).all(1)
    excused = ~same & (near_tie(choice, mine, indices) | near_tie_of_groups(convention, x, bias, at))
    wrong = ~(same | excused)
    assert not wrong.any(), f"{int(wrong.sum())} rows differ, the first {int(wrong.nonzero()[0])}"
    assert excused.float().mean() < 1e-2, f"{int(excused.sum())} near ties"
    return same


@pytest.mark.parametrize("convention", PEERS)
def test_convention_equals_its_peer(convention: str) -> None:
    """10,000 random and tie-heavy rows have the same experts in the same order, and the same weights."""
    compared = 0
    settings = FEW[convention]
    for i, at in enumerate(settings):
        compared += compare(convention, at, -(-10_000 // len(settings)), seed=i)
    assert compared >= 10_000


@pytest.mark.parametrize("model", MODELS)
def test_model_equals_its_router_in_transformers(model: str) -> None:
    """Experts are equal in float64, and weights agree to the last digits; for bf16 and fp16 logits, weights have the
    model's dtype and agree to a rounding."""
    for i, at in enumerate(FEW[model]):
        x, bias = cases(at, 2000, seed=i)
        x = torch.cat([x.double(), torch.randn(2000, at.experts, dtype=torch.float64)])
        got = ours(model, x, bias, at)
        weights, indices, _ = MODELS[model](x, bias, at)
        assert torch.equal(got.indices.long(), indices)
        torch.testing.assert_close(got.weights, weights, rtol=1e-14, atol=0.0)
        for dtype in (torch.bfloat16, torch.float16):
            got = ours(model, x.to(dtype), bias, at)
            weights, indices, choice = MODELS[model](x.to(dtype), bias, at)
            same = chosen_alike(model, x.to(dtype), bias, at, got.indices.long(), indices, choice)
            assert (
                got.weights.dtype
                == weights.dtype
                == (dtype if model in ("qwen3", "gpt_oss") else torch.float32)
            )
            rtol = torch.finfo(dtype).eps if weights.dtype == dtype else 3e-6
            torch.testing.assert_close(got.weights[same], weights[same], rtol=rtol, atol=1e-7)


def test_models_support_only_the_options_of_their_routers() -> None:
    """A bias of the choice with softmax, and groups without group_score, raise; explicit arguments work."""
    x = torch.randn(4, 12)
    for model in ("qwen3", "mixtral", "gpt_oss"):
        with pytest.raises(ValueError, match=f"'{model}' has none for softmax.*weft.router_linear"):
            weft.route(x, 2, convention=model, bias=torch.zeros(12))
        with pytest.raises(ValueError, match=f"'{model}' does not define the score of a group"):
            weft.route(x, 2, convention=model, groups=3, group_topk=1)
        assert weft.route(
            x, 2, convention=model, groups=3, group_topk=1, group_score="max"
        ).indices.shape == (4, 2)
    plain = weft.route(x, 2, convention="qwen3", renormalize=False).weights
    torch.testing.assert_close(plain, torch.softmax(x, -1).topk(2).values)


@pytest.mark.slow
@pytest.mark.parametrize("convention", LIBRARIES)
def test_every_combination_equals_its_peer(convention: str) -> None:
    for i, (name, at) in enumerate(many()):
        if name == convention:
            compare(convention, at, 400, seed=i)


# ---- the conventions differ ---------------------------------------------------------------------------------


def telling(first: str, second: str) -> tuple[Settings, Tensor, Tensor | None]:
    """Return a case that two conventions answer differently."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 128, generator=draw)
    pair = {first, second}
    if "megatron" in pair:  # a group's four best, not its two best or its best
        return Settings("sigmoid", 128, 8, 8, 2, renormalize=True), x, None
    if pair == {"torchtitan", "vllm"}:  # without a bias: a group's two best, or its best
        return Settings("sigmoid", 128, 8, 8, 4, renormalize=True), x, None
    if pair == {"torchtitan", "sglang"}:  # sglang scales only if it renormalizes
        return Settings("sigmoid", 128, 8, scale=2.5), x, None
    # vllm and sglang: all weights underflow, and vllm divides by zero
    return Settings("sigmoid", 128, 8, renormalize=True), x - 200, None


@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(LIBRARIES, 2)])
def test_all_pairs_of_conventions_differ(first: str, second: str) -> None:
    """Every pair of conventions has a case that tells them apart, so the comparison above would detect a mix-up."""
    at, x, bias = telling(first, second)
    mine = ours(first, x, bias, at)
    right, wrong = (PEERS[name](x, bias, at) for name in (first, second))
    assert torch.equal(mine.indices.long(), right[1])
    torch.testing.assert_close(mine.weights, right[0], rtol=3e-6, atol=1e-30, equal_nan=True)
    other_experts = (mine.indices.long() != wrong[1]).any(1).float().mean()
    same_weights = torch.isclose(mine.weights, wrong[0], rtol=1e-3, equal_nan=True).all(1).float().mean()
    assert other_experts > 0.3 or same_weights < 0.1


def test_group_scores_differ() -> None:
    """Scoring by the sum of two or by the maximum differs for half of the tokens."""
    x = torch.randn(2000, 256, generator=torch.Generator().manual_seed(0))
    chosen = {}
    for kind in ("share", "top2", "max"):
        chosen[kind] = (
            weft.route(x, 8, score="sigmoid", groups=8, group_topk=2, group_score=kind).indices.sort(1).values
        )
    for a, b in itertools.combinations(chosen.values(), 2):
        assert (a != b).any(1).float().mean() > 0.3
    same = weft.route(x, 8, score="sigmoid", groups=8, group_topk=4, group_score="share").indices
    assert torch.equal(
        same, weft.route(x, 8, score="sigmoid", groups=8, group_topk=4, group_score="top2").indices
    )


def test_masked_groups_count_as_zero_only_with_sglang() -> None:
    """The allowed group's scores underflow to zero, so the other group's tie with them at lower indices."""
    x = torch.full((1, 8), -200.0)
    x[0, 7] = 1.0
    args = {"score": "sigmoid", "groups": 2, "group_topk": 1}
    assert weft.route(x, 3, convention="vllm", **args).indices.tolist() == [[7, 4, 5]]
    assert weft.route(x, 3, convention="sglang", **args).indices.tolist() == [[7, 0, 1]]


def test_renormalizing_without_epsilon() -> None:
    """If every weight underflows, vLLM divides by zero; the others divide by 1e-20."""
    x = torch.full((2, 8), -200.0)
    for convention in LIBRARIES:
        weights = weft.route(x, 2, convention=convention, score="sigmoid", renormalize=True).weights
        assert weights.isnan().all() if convention == "vllm" else not weights.count_nonzero()


def test_megatron_renormalizes_scores_other_than_softmax() -> None:
    x = torch.randn(50, 16)
    sums = {
        (score, k, post): weft.route(x, k, score=score, post_softmax=post).weights.sum(1)
        for score, k, post in (
            ("sigmoid", 4, None),
            ("sigmoid", 1, None),
            ("softmax", 4, False),
            ("softmax", 4, True),
        )
    }
    one = torch.ones(50)
    torch.testing.assert_close(sums["sigmoid", 4, None], one)
    torch.testing.assert_close(sums["softmax", 4, True], one)
    torch.testing.assert_close(sums["sigmoid", 1, None], x.sigmoid().amax(1))
    torch.testing.assert_close(sums["softmax", 4, False], x.softmax(1).topk(4)[0].sum(1))


# ---- the bias, ties, special values -------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus", "softmax"])
def test_the_bias_never_affects_the_weights(score: str) -> None:
    """Scores below 1e-3 survive a bias of about 2; computed as (s + b) - b they would be lost."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(300, 64, generator=draw) - (
        9.0 if score == "sigmoid" else 16.0 if score == "sqrtsoftplus" else 0.0
    )
    x[:, 1::2] = x[:, ::2]  # every score occurs twice
    bias = torch.randn(64, generator=draw) + 2
    got = weft.route(x, 6, convention="torchtitan", score=score, bias=bias)  # type: ignore[arg-type]
    exact = scores_truth(x.double(), score)
    chosen = got.indices.long()
    if score != "softmax":
        assert exact.max() < 5e-2
    torch.testing.assert_close(got.weights.double(), exact.gather(1, chosen), rtol=3e-6, atol=0)
    assert (chosen != topk(exact, 6)).any(1).float().mean() > 0.9, "the bias had no effect"
    # The weights equal those of the same experts without a bias, bit for bit.
    every = weft.route(x, 64, convention="torchtitan", score=score)  # type: ignore[arg-type]
    unbiased = torch.empty(300, 64).scatter_(1, every.indices.long(), every.weights)
    assert torch.equal(got.weights, unbiased.gather(1, chosen))


@pytest.mark.parametrize(
    ("score", "experts"), covering(("softmax", "sigmoid", "sqrtsoftplus"), (5, 64, 200), together=1)
)
def test_every_row_has_k_different_experts(score: str, experts: int) -> None:
    """This holds for rows that are all equal, huge, infinite or NaN."""
    values = (0.0, -0.0, 1.0, 1e6, -1e6, 3e38, -3e38, 1e-42, torch.inf, -torch.inf, torch.nan, -torch.nan)
    rows = [torch.full((experts,), value) for value in values]
    mixed = torch.tensor([0.0, torch.nan, torch.inf, -torch.inf]).repeat(experts)[:experts]
    x = torch.stack([*rows, mixed, torch.randn(experts)])
    for convention, k in itertools.product(("megatron", "torchtitan"), (1, 3, 5)):
        got = weft.route(x, k, convention=convention, score=score)  # type: ignore[arg-type]
        ordered = got.indices.sort(1).values
        assert (ordered[:, 1:] > ordered[:, :-1]).all()
        assert ordered.min() >= 0
        assert ordered.max() < experts
        assert torch.equal(got.indices[: len(rows)], torch.arange(k, dtype=torch.int32).expand(len(rows), k))
        assert got.counts.sum() == k * len(x)


def test_nan_is_visible_in_the_weights() -> None:
    """A NaN logit is chosen first and makes its row's weights NaN; other rows are unaffected."""
    x = torch.randn(4, 16)
    clean = weft.route(x, 4, score="sigmoid")
    x[2, 9] = torch.nan
    got = weft.route(x, 4, score="sigmoid")
    assert got.indices[2, 0] == 9
    assert got.weights[2].isnan().all()
    others = [0, 1, 3]
    assert torch.equal(got.weights[others], clean.weights[others])


def test_the_best_comes_first() -> None:
    x = torch.randn(100, 40)
    got = weft.route(x, 10, convention="vllm")
    assert (got.weights[:, 1:] <= got.weights[:, :-1]).all()
    assert torch.equal(got.indices.long(), x.topk(10).indices)


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_a_token_is_routed_equally_in_any_batch(target: str) -> None:
    x = torch.randn(70, 48)
    options = {"score": "sigmoid", "groups": 4, "group_topk": 2, "bias": torch.randn(48)}
    with choosing_for(target):
        batch = weft.route(x, 4, **options)
        for rows in (1, 2, 33):
            part = weft.route(x[5 : 5 + rows], 4, **options)
            assert torch.equal(part.indices, batch.indices[5 : 5 + rows])
            assert torch.equal(part.weights, batch.weights[5 : 5 + rows])


# ---- sizes --------------------------------------------------------------------------------------------------

SIZES = [
    (1, 1, 1),
    (3, 2, 2),
    (17, 7, 3),
    (5, 60, 4),
    (9, 96, 33),
    (4, 257, 64),
    (2, 1000, 10),
    (300, 128, 8),
]


@pytest.mark.parametrize(
    ("target", "size"),
    covering(("cpu", "sm_90", "gfx942"), SIZES, together=1),
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else value,
)
def test_sizes(target: str, size: tuple[int, int, int]) -> None:
    """Any number of experts and any k work, with several rows per program and several programs."""
    rows, experts, k = size
    x = torch.randn(rows, experts, generator=torch.Generator().manual_seed(experts))
    with choosing_for(target):
        check(x, k, Rule("sigmoid", renormalize=k > 1), {"score": "sigmoid"})


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "experts", "k"), [(3, 5000, 100), (2, 20000, 3), (5000, 3, 2)])
def test_large_sizes(rows: int, experts: int, k: int) -> None:
    check(torch.randn(rows, experts), k, Rule("softmax", post=True), {})


GROUPINGS = [(6, 3, 2, 1), (20, 5, 2, 4), (96, 3, 2, 8), (72, 9, 4, 8), (48, 48, 5, 3)]


@pytest.mark.parametrize(("experts", "groups", "group_topk", "k"), GROUPINGS)
def test_groups_of_any_size(experts: int, groups: int, group_topk: int, k: int) -> None:
    x = torch.randn(40, experts, generator=torch.Generator().manual_seed(1))
    at = Settings("sigmoid", experts, k, groups, group_topk)
    got = ours("vllm", x, None, at)
    weights, indices, _ = vllm(x, None, at)
    assert torch.equal(got.indices.long(), indices)
    torch.testing.assert_close(got.weights, weights, rtol=3e-6, atol=0)


# ---- gradients and losses -----------------------------------------------------------------------------------

RULES: dict[str, tuple[Rule, dict[str, Any]]] = {
    "softmax-post": (Rule("softmax", post=True, scale=1.5), {"scale": 1.5}),
    "softmax-pre": (Rule("softmax", scale=1.5), {"post_softmax": False, "scale": 1.5}),
    "softmax-renormalized": (
        Rule("softmax", renormalize=True, eps=0.0),
        {"convention": "vllm", "renormalize": True},
    ),
    "sigmoid": (Rule("sigmoid", renormalize=True, scale=2.5), {"score": "sigmoid", "scale": 2.5}),
    "sigmoid-plain": (Rule("sigmoid"), {"score": "sigmoid", "convention": "torchtitan"}),
    "sqrtsoftplus": (Rule("sqrtsoftplus", renormalize=True), {"score": "sqrtsoftplus"}),
    "sqrtsoftplus-plain": (Rule("sqrtsoftplus"), {"score": "sqrtsoftplus", "convention": "torchtitan"}),
}
UPSTREAMS = ("weights", "scores", "balance_loss", "z_loss")


def upstream(routing: Routing, names: tuple[str, ...], seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    values = {name: getattr(routing, name) for name in names}
    return {n: torch.randn(v.shape, generator=draw).to(v.dtype) for n, v in values.items()}


def near(got: Tensor, expected: Near) -> None:
    if got.numel() > 1 and expected.truth.count_nonzero():
        assert_rounded_once(got, expected.truth, expected.noise)
    else:
        assert ((got.double() - expected.truth).abs() <= expected.noise + 1e-30).all()


def check(
    x: Tensor, k: int, rule: Rule, options: dict[str, Any], names: tuple[str, ...] = UPSTREAMS
) -> Tensor:
    """Check weights, scores, losses and the gradient of logits against float64."""
    leaf = x.detach().requires_grad_()
    got = weft.route(leaf, k, balance_coefficient=0.7, z_coefficient=0.3, return_scores=True, **options)
    gradients = upstream(got, names)
    (dlogits,) = torch.autograd.grad([getattr(got, n) for n in names], leaf, [*gradients.values()])
    assert got.score_counts is not None
    expected = route_truth(x, got.indices, got.score_counts, rule, gradients, 0.7, 0.3)
    for name, wanted in expected.items():
        near(dlogits if name == "dlogits" else getattr(got, name), wanted)
    # No expert that was not chosen is better.
    flat = x.reshape(-1, x.shape[-1])
    chosen = got.indices.reshape(-1, k).long()
    assert torch.equal(got.counts.long(), torch.bincount(chosen.flatten(), minlength=x.shape[-1]))
    if not options.get("groups") and options.get("bias") is None:
        assert torch.equal(chosen, topk(flat, k))
    return dlogits


@pytest.mark.parametrize("rule", RULES)
def test_gradients(rule: str) -> None:
    """Upstream gradients of the weights, the scores and both losses are random and applied together."""
    check(torch.randn(37, 40, generator=torch.Generator().manual_seed(2)) * 2, 5, *RULES[rule])


@pytest.mark.parametrize(
    "names", [("weights",), ("scores",), ("balance_loss",), ("z_loss",), ("weights", "z_loss")]
)
@pytest.mark.parametrize("rule", ["softmax-post", "sigmoid"])
def test_gradients_of_some_outputs(rule: str, names: tuple[str, ...]) -> None:
    check(torch.randn(37, 40, generator=torch.Generator().manual_seed(2)), 5, *RULES[rule], names)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("rule", ["softmax-post", "sigmoid"])
def test_gradients_on_gpus(target: str, rule: str) -> None:
    with choosing_for(target):
        check(torch.randn(37, 40, generator=torch.Generator().manual_seed(2)), 5, *RULES[rule])


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_softmax_is_invariant_to_a_shift(shift: float) -> None:
    """Adding a constant to all logits changes neither choice nor weights."""
    x = (torch.randn(20, 32) * 64).round() / 64
    for options in ({}, {"post_softmax": False}):
        plain, shifted = (weft.route(t, 4, z_coefficient=1.0, **options) for t in (x, x + shift))
        assert torch.equal(plain.indices, shifted.indices)
        torch.testing.assert_close(plain.weights, shifted.weights, rtol=1e-5, atol=1e-7)
        assert shifted.z_loss.isfinite()


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
def test_gradients_where_scores_vanish(score: str) -> None:
    """Logits of -200 and 200 have finite gradients."""
    x = torch.tensor([[-200.0, 200.0, 0.0, 1.0], [-200.0, -200.0, -200.0, -200.0]], requires_grad=True)
    weft.route(x, 2, score=score).weights.sum().backward()  # type: ignore[arg-type]
    assert x.grad.isfinite().all()


def test_balance_loss_counts_a_plain_top_k() -> None:
    """n ignores bias and groups, so it differs from the number of routed tokens."""
    draw = torch.Generator().manual_seed(0)
    x, bias = torch.randn(200, 32, generator=draw), torch.randn(32, generator=draw)
    got = weft.route(x, 4, score="sigmoid", bias=bias, groups=4, group_topk=2, balance_coefficient=1e-2)
    plain = weft.route(x, 4, score="sigmoid", balance_coefficient=1e-2)
    assert torch.equal(got.score_counts, plain.counts)
    assert not torch.equal(got.counts, plain.counts)
    assert torch.equal(plain.score_counts, plain.counts)
    s = x.double().sigmoid()
    share = s / s.sum(1, keepdim=True)
    exact = 1e-2 * 32 / (4 * 200 * 200) * (share.sum(0) * plain.counts).sum()
    torch.testing.assert_close(got.balance_loss.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(got.score_sums.double(), share.sum(0), rtol=1e-6, atol=0)


def test_balance_loss_of_a_uniform_router_equals_its_coefficient() -> None:
    x = torch.eye(8).repeat(4, 1) * 1e-3  # every expert once in a while the best, all of nearly equal score
    loss = weft.route(x, 1, post_softmax=False, balance_coefficient=0.25).balance_loss
    torch.testing.assert_close(loss, torch.tensor(0.25), rtol=1e-5, atol=0)


def test_balance_loss_over_two_ranks() -> None:
    """Counts summed over ranks, times each rank's score_sums, give the gradient over all tokens."""
    x = torch.randn(60, 16, generator=torch.Generator().manual_seed(0))
    leaf = x.clone().requires_grad_()
    weft.route(leaf, 2, balance_coefficient=0.5).balance_loss.backward()
    ranks = [part.clone().requires_grad_() for part in x.split((20, 40))]
    routed = [weft.route(part, 2, balance_coefficient=0.5) for part in ranks]
    counts = sum(r.score_counts for r in routed)
    for r in routed:
        (0.5 * 16 / (2 * 60 * 60) * (r.score_sums * counts).sum()).backward()
    torch.testing.assert_close(torch.cat([r.grad for r in ranks]), leaf.grad, rtol=1e-5, atol=1e-9)


def test_losses_are_none_by_default() -> None:
    got = weft.route(torch.randn(4, 8), 2)
    assert (got.balance_loss, got.z_loss, got.score_sums, got.score_counts) == (None,) * 4


# ---- dtypes, layouts, launches, PyTorch ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.randn(37, 40, generator=torch.Generator().manual_seed(2)).to(dtype)
    dlogits = check(x, 5, *RULES["sigmoid"])
    assert dlogits.dtype == dtype
    for convention, wanted in (("megatron", dtype), ("torchtitan", torch.float32), ("vllm", torch.float32)):
        assert weft.route(x, 2, convention=convention).weights.dtype == wanted
    got = weft.route(x, 2, out_dtype=torch.float32, index_dtype=torch.int64)
    assert (got.weights.dtype, got.indices.dtype, got.counts.dtype) == (
        torch.float32,
        torch.int64,
        torch.int32,
    )


def run(x: Tensor, dweights: Tensor, dscores: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
    leaf = x.detach().requires_grad_()
    got = weft.route(
        leaf, dweights.shape[-1], score="sigmoid", z_coefficient=1.0, return_scores=True, **options
    )
    if dscores is None:
        dscores = torch.ones(()).expand(x.shape)
    gradients = (dweights, dscores, torch.ones(()))
    (grad,) = torch.autograd.grad((got.weights, got.scores, got.z_loss), leaf, gradients)
    return {
        "weights": got.weights,
        "scores": got.scores,
        "indices": got.indices,
        "counts": got.counts,
        "z": got.z_loss,
        "dlogits": grad,
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_layouts(layout: Callable[[Tensor], Tensor]) -> None:
    """Any strides of logits, bias and gradients give the bits of contiguous ones."""
    x, dweights, bias = torch.randn(21, 48), torch.randn(21, 4), torch.randn(48)
    laid_out = layout(x)
    assert_same(run(laid_out, dweights), run(laid_out.contiguous().clone(), dweights), "logits")
    laid_out = layout(dweights)
    assert_same(run(x, laid_out), run(x, laid_out.contiguous().clone()), "gradient")
    laid_out = layout(torch.randn(21, 48))
    wanted = run(x, dweights, laid_out.contiguous().clone())
    assert_same(run(x, dweights, laid_out), wanted, "gradient of the scores")
    stepped = bias.repeat_interleave(2)[::2]
    assert_same(run(x, dweights, bias=stepped), run(x, dweights, bias=bias), "bias")


def test_leading_dimensions() -> None:
    x, dweights = torch.randn(24, 48), torch.randn(24, 4)
    wanted = run(x, dweights)
    got = run(x.view(2, 3, 4, 48), dweights.view(2, 3, 4, 4))
    assert got["weights"].shape == got["indices"].shape == (2, 3, 4, 4)
    assert_same({n: t.reshape(wanted[n].shape) for n, t in got.items()}, wanted, "leading dimensions")


def test_offsets_have_64_bits() -> None:
    x, dweights = far_apart(4, 96), torch.randn(4, 4).bfloat16()
    assert_same(run(x, dweights), run(x.contiguous(), dweights), "far apart")


@pytest.mark.parametrize("shape", [(0, 48), (2, 0, 48)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, requires_grad=True)
    got = weft.route(x, 4, score="sigmoid", balance_coefficient=1.0, z_coefficient=1.0)
    assert got.weights.shape == got.indices.shape == (*shape[:-1], 4)
    assert not got.counts.count_nonzero()
    (got.weights.sum() + got.balance_loss + got.z_loss).backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_deterministic(target: str) -> None:
    x, dweights = torch.randn(3000, 48), torch.randn(3000, 4)
    with choosing_for(target):
        first = run(x, dweights, balance_coefficient=1.0)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert_same(run(x, dweights, balance_coefficient=1.0), first, f"{threads} threads")


def test_launches() -> None:
    """Forward takes one launch, plus the sums over programs unless there is only one; backward takes one."""
    for rows, kernels in ((8192, ["route_kernel", "route_totals_kernel"]), (2, ["route_kernel"])):
        x = torch.empty(rows, 256, device="meta", requires_grad=True)
        with recording("sm_90") as seen:
            got = weft.route(x, 8, balance_coefficient=1.0, z_coefficient=1.0)
        assert [v.kernel for v in seen] == kernels
        with recording("sm_90") as seen:
            (got.weights.sum() + got.balance_loss + got.z_loss).backward()
        assert [v.kernel for v in seen] == ["route_backward_kernel"]


@pytest.mark.parametrize("rule", RULES)
def test_gradcheck_of_the_reference(rule: str) -> None:
    x = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)

    def f(x: Tensor) -> tuple[Tensor, ...]:
        got = weft.route(
            x, 3, balance_coefficient=1.0, z_coefficient=1.0, return_scores=True, **RULES[rule][1]
        )
        return got.weights, got.scores, got.balance_loss, got.z_loss

    assert torch.autograd.gradcheck(f, x)


def test_opcheck() -> None:
    x = torch.randn(9, 48, requires_grad=True)
    weighing = Weighing("sigmoid", post_softmax=False, renormalize=True, eps=1e-20, scale=1.5)
    groups = Groups(number=4, topk=2, best=2, masked_is_zero=False)
    a = RouteArgs(x, torch.randn(48), 4, weighing, groups, torch.float32, torch.int64, True, True, True)
    op = weft.catalogue["route"]
    torch.library.opcheck(op.overload, op.arguments.flatten(a))
    gradients = (torch.randn(9, 4), torch.randn(9, 48), torch.randn(48), torch.randn(()))
    backward = weft.catalogue["route_backward"]
    b = RouteBackwardArgs(x.detach(), op(a).indices, *gradients, weighing)
    torch.library.opcheck(backward.overload, backward.arguments.flatten(b))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_equals_eager(backend: str) -> None:
    torch._dynamo.reset()

    def f(x: Tensor, bias: Tensor) -> Any:
        got = weft.route(
            x, 4, score="sigmoid", bias=bias, scale=2.5, balance_coefficient=0.1, z_coefficient=0.1
        )
        return got.weights, got.balance_loss, got.z_loss, got.indices, got.counts

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=backend)
    bias = torch.randn(48)
    for rows in (5, 33):
        x = torch.randn(rows, 48)
        results = []
        for g in (f, compiled):
            leaf = x.clone().requires_grad_()
            weights, balance, z, indices, counts = g(leaf, bias)
            ones = torch.ones(())
            (grad,) = torch.autograd.grad((weights, balance, z), leaf, (x[:, :4], ones, ones))
            results.append({"w": weights, "i": indices, "n": counts, "z": z, "grad": grad})
        assert_same(results[1], results[0], "compiled")


def test_invalid_arguments_raise() -> None:
    x, bias = torch.randn(4, 12), torch.randn(12)
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"convention": "switch"},
            "convention must be one of megatron, torchtitan, vllm, sglang, qwen3, mixtral, gpt_oss, deepseek_v3",
        ),
        ({"convention": "transformers"}, "Its models route differently"),
        ({"score": "tanh"}, "score must be one of"),
        ({"k": 0}, "k must be from 1 to .* 12"),
        ({"k": 13}, "k must be from 1 to .* 12"),
        ({"score": "sigmoid", "post_softmax": True}, "post_softmax goes with"),
        ({"bias": bias}, "a bias of the choice goes with sigmoid"),
        ({"bias": bias[:5], "score": "sigmoid"}, "bias must have the shape"),
        ({"groups": 5, "group_topk": 1}, "groups must divide"),
        ({"groups": 4}, "group_topk must be from 1"),
        ({"groups": 4, "group_topk": 3}, "group_topk must not exceed k"),
        ({"groups": 12, "group_topk": 2, "group_score": "top2"}, "sum of its 2 best experts"),
        (
            {"groups": 4, "group_topk": 1, "k": 4, "group_score": "max"},
            "k=4 experts cannot be chosen from group_topk=1 groups",
        ),
        ({"groups": 4, "group_topk": 1, "group_score": "mean"}, "group_score must be"),
        ({"group_topk": 2}, "needs groups"),
        ({"index_dtype": torch.int16}, "index_dtype"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            weft.route(x, **{"k": 2, **options})
    with pytest.raises(ValueError, match="logits must be"):
        weft.route(x.int(), 2)


def test_every_convention_has_a_peer() -> None:
    assert PEERS.keys() == CONVENTIONS.keys()

"""Draws: distributions, kept sets, the same tokens in any batch and any tiles, odd logits, and mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton_loom
from torch import Tensor

import weft
from tests.catalogue.layouts import far_apart
from weft.ops.sampling import launch
from weft.ops.sampling.arguments import SampleArgs
from weft.ops.sampling.noise import gumbel, gumbel_of
from weft.ops.sampling.parameters import Integer, Number
from weft.ops.sampling.reference import kept_tokens
from weft.runtime import choosing_for

INF, NAN = float("inf"), float("nan")
LIMITS: dict[str, dict[str, Any]] = {
    "full": {},
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 1.7},
    "k": {"top_k": 7},
    "large k": {"top_k": 700},
    "p": {"top_p": 0.9},
    "p of 0": {"top_p": 0.0},
    "p near 1": {"top_p": 0.9999},
    "p of 1": {"top_p": 1.0, "top_k": 0},
    "k, then p": {"top_k": 30, "top_p": 0.5},
    "large k, then p": {"top_k": 700, "top_p": 0.5},
    "joint": {"top_k": 700, "top_p": 0.05, "order": "joint"},
    "min p": {"min_p": 0.1},
    "low min p": {"min_p": 1e-6},
    "min p of flat rows": {"min_p": 0.6},
    "greedy of many": {"temperature": 0.0, "top_k": 700},
    "all": {"top_k": 300, "top_p": 0.95, "min_p": 0.01, "temperature": 0.8},
    "k of all": {"top_k": 10**6},
}


def sample(*args: Any, **options: Any) -> Any:
    """Call `weft.sample` with the seed and the step 0 unless others are given."""
    return weft.sample(*args, **{"seed": 0, "step": 0} | options)


def assert_equal(got: Any, wanted: Any) -> None:
    assert torch.equal(got.tokens, wanted.tokens)
    for mine, its in zip(got[1:], wanted[1:], strict=True):
        torch.testing.assert_close(mine, its, rtol=2e-6, atol=2e-6, equal_nan=True)


# ---- values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_are_those_of_sorted_rows(limits: str, dtype: torch.dtype) -> None:
    """Peaked and flat rows, ties and minus infinity, in rows of one tile and of several."""
    for cols in (33, 9001):
        x = torch.randn(24, cols) * torch.tensor([0.1, 1.0, 4.0])[torch.arange(24) % 3][:, None]
        x[0], x[1, ::3], x[2] = 0.5, -INF, (x[2] * 2).round() / 2
        x = x.to(dtype)
        step = torch.arange(24)
        got = sample(x, seed=3, step=step, **LIMITS[limits])
        with weft.backend("reference"):
            assert_equal(got, sample(x, seed=3, step=step, **LIMITS[limits]))


def test_limits_below_what_one_tile_passes_on() -> None:
    """The 100 largest are all in the first tile, of which 64 are candidates."""
    x, step = torch.randn(64, 9001), torch.arange(64)
    x[:, :4096] += 5
    got = sample(x, top_k=100, step=step)
    with weft.backend("reference"):
        assert_equal(got, sample(x, top_k=100, step=step))


def long_rows(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return rows whose limits lie among many elements."""
    x = torch.randn(60_000)
    masked, grammar = x * 2, torch.full_like(x, -INF)
    masked[::2] = -INF
    grammar[500:540] = x[500:540]
    first = x * 2
    first[torch.randperm(4096)[:400]] += 10
    two = torch.where(torch.rand_like(x) < 0.5, 1.0, 2.0)
    rows = {
        "flat": x * 0.1, "normal": x, "first tile": first, "masked": masked, "few": grammar, "two values": two,
        "equal": torch.ones_like(x), "below zero": -x.abs() - 1, "zipf": -1.2 * torch.arange(1.0, 60_001).log(),
    }  # fmt: skip
    return {name: row.to(dtype) for name, row in rows.items()}


FAR_LIMITS: list[dict[str, Any]] = [
    {"top_k": 50}, {"top_k": 100}, {"top_k": 700}, {"top_k": 20_000}, {"top_k": 40_000}, {"top_p": 0.5},
    {"top_p": 0.99}, {"top_p": 0.9999}, {"min_p": 1e-4}, {"top_k": 300, "top_p": 0.9},
    {"top_k": 30_000, "top_p": 0.7}, {"top_k": 30_000, "top_p": 0.3, "order": "joint"},
    {"top_k": 3000, "top_p": 0.9999, "order": "joint"},
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_limits_far_below_candidates(dtype: torch.dtype) -> None:
    """Of rows that are read again, each limit is found, and drawn from. Draws by top_k are almost even, so that a token
    too many is soon drawn."""
    x = torch.stack(list(long_rows(dtype).values()))
    noise = gumbel(torch.tensor(0), torch.tensor(1), torch.arange(x.shape[1]))
    for limits in FAR_LIMITS:
        temperature = 50.0 if limits.keys() == {"top_k"} else 1.0
        t, none = Number(None, temperature), Integer(None, 0)
        k, p, least = (
            Number(None, limits.get(n, off)) for n, off in (("top_k", 0), ("top_p", 1), ("min_p", 0))
        )
        z = x.float() * (1.0 / temperature)
        m = z.amax(-1, keepdim=True)
        a = SampleArgs(x, t, k, p, least, none, none, "order" in limits)
        kept = kept_tokens(a, z, m, (z - m).exp().sum(-1, keepdim=True))
        wanted = (z + noise).masked_fill(~kept, -INF).argmax(-1)
        got = sample(x, step=1, temperature=temperature, **limits)
        assert got.tokens.tolist() == wanted.tolist(), limits


@pytest.mark.parametrize("row", long_rows(torch.float32))
def test_a_row_is_read_few_times(row: str) -> None:
    """Once for the candidates; for a limit below those, at most twice to narrow it and once to draw."""
    x = long_rows(torch.bfloat16)[row][None]
    for limits in FAR_LIMITS:
        with triton_loom.count() as counted:
            sample(x, **limits)
        read = sum(
            launch.arguments["logits_ptr"].loads.requested
            for launch in counted.launches
            if "logits_ptr" in launch.arguments
        )
        passes = read / (x.numel() * x.element_size())
        two_limits = limits.get("top_k", 0) > 64 and "top_p" in limits
        assert passes <= (7 if two_limits else 4), limits
        if limits == {"top_k": 50} or row == "few":
            assert passes == 1


def test_ties_around_limits_of_long_rows() -> None:
    """More equal elements than there is memory for: the lowest tokens are kept."""
    x, step = torch.zeros(300, 9000), torch.arange(300)
    x[:, ::3] = 1.0
    for limits, kept in (({"top_k": 2000}, 2000), ({"top_k": 3003}, 3000 + 3)):
        tokens = sample(x, step=step, **limits).tokens
        largest = tokens[tokens % 3 == 0]
        assert largest.max() < 3 * min(kept, 3000)
        assert tokens[tokens % 3 != 0].lt(5).all()
        assert (tokens > 5000).any()
    # The 3000 largest have e / (e + 2) of the mass: 0.1 of it is that of 521.
    assert 1200 < sample(x, step=step, top_p=0.1).tokens.max() <= 3 * 521


def test_of_each_request() -> None:
    x = torch.randn(40, 3000)
    row = torch.arange(40)
    each = {
        "temperature": (row % 3).float() / 2,
        "top_k": row % 5 * 11,
        "top_p": 1 - (row % 4).float() / 5,
        "min_p": (row % 2).float() / 100,
    }
    got = sample(x, seed=row * 7, step=row, **each)
    for i in range(40):
        one = {name: float(t[i]) for name, t in each.items()} | {"top_k": int(each["top_k"][i])}
        alone = sample(x[i : i + 1], seed=i * 7, step=i, **one)
        assert alone.tokens == got.tokens[i]
        assert alone.logprobs == got.logprobs[i]


def test_log_probabilities_and_the_largest() -> None:
    x = torch.randn(9, 5000)
    got = sample(x, temperature=0.5, top_k=20)
    truth = (x.double() / 0.5).log_softmax(-1)
    torch.testing.assert_close(
        got.logprobs.double(), truth.gather(-1, got.tokens[:, None])[:, 0], rtol=0, atol=2e-6
    )
    largest = weft.top_k(x, 5)
    torch.testing.assert_close(
        (largest.values / 0.5 - got.lse[:, None]).double(),
        truth.gather(-1, largest.indices),
        rtol=0,
        atol=4e-6,
    )


# ---- distributions --------------------------------------------------------------------------------------


def test_probabilities_by_enumeration() -> None:
    """Integrated over a grid of the numbers that the noise is made of, each token wins with its probability."""
    bits = torch.arange(2**11, 2**32, 2**12)  # 2^20 of them, in the middle of equal parts
    noise = np.sort(gumbel_of(bits).double().numpy())
    for logits in ([0.0, 0.0], [1.5, -2.0, 0.25], [0.0, 0.1, -0.1, 3.0, -3.0, 1.0, 2.0, -1.0]):
        z = np.array(logits)
        wins = []
        for i, own in enumerate(z):
            score, chance = noise + own, np.ones(len(noise))
            for j, other in enumerate(z):
                if j != i:
                    below = (
                        np.searchsorted(noise, score - other, "left"),
                        np.searchsorted(noise, score - other, "right"),
                    )
                    chance *= (below[0] + below[1]) / (2 * len(noise))
            wins.append(chance.mean())
        softmax = np.exp(z) / np.exp(z).sum()
        assert np.abs(np.array(wins) - softmax).max() < 1e-6


def chi_square(counts: Tensor, p: Tensor) -> float:
    """Return how many standard deviations the statistic is above its mean."""
    expected = p * counts.sum()
    likely = expected > 5
    statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum().item()
    free = int(likely.sum()) - 1
    return (statistic - free) / math.sqrt(2 * max(free, 1))


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.7},
        {"top_k": 9, "top_p": 0.6},
        pytest.param({"top_k": 9, "top_p": 0.6, "order": "joint"}, marks=pytest.mark.slow),
        {"min_p": 0.2, "temperature": 1.3},
    ],
)
@pytest.mark.parametrize("draws", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_draws_have_their_distribution(limits: dict[str, Any], draws: int) -> None:
    logits = torch.randn(24)
    counts = torch.zeros(24, dtype=torch.float64)
    for first in range(0, draws, 50_000):
        step = torch.arange(first, first + 50_000)
        counts += torch.bincount(
            sample(logits.expand(50_000, 24), step=step, seed=11, **limits).tokens, minlength=24
        )
    p = (logits.double() / limits.get("temperature", 1.0)).softmax(-1)
    order = p.argsort(descending=True)
    kept = p[order]
    among = torch.arange(24) < limits.get("top_k", 24)
    whole = 1.0 if "order" in limits else kept[among].sum()
    among &= kept.cumsum(0) - kept < limits.get("top_p", 2.0) * whole
    among &= kept >= limits.get("min_p", 0.0) * kept[0]
    p = torch.zeros_like(p).scatter(0, order[among], kept[among])
    assert counts[p == 0].sum() == 0
    assert abs(chi_square(counts, p / p.sum())) < 4.5


def test_ties_are_kept_by_the_lowest_tokens() -> None:
    x = torch.zeros(2000, 5000)
    step = torch.arange(2000)
    assert sample(x, top_k=5, step=step).tokens.unique().tolist() == [0, 1, 2, 3, 4]
    assert sample(x, top_p=0.00099, step=step).tokens.unique().tolist() == [0, 1, 2, 3, 4]
    assert sample(x, temperature=0.0).tokens.eq(0).all()
    for k in (700, 3000):
        assert sample(x[:3], temperature=0.0, top_k=k).tokens.eq(0).all()
    assert sample(x, top_k=100, step=step).tokens.max() == 99
    few = x[:, :40].contiguous()
    assert sample(few, top_k=5, step=step).tokens.unique().tolist() == [0, 1, 2, 3, 4]
    assert sample(few, top_p=0.12, step=step).tokens.unique().tolist() == [0, 1, 2, 3, 4]
    x[:, 4000] = 3.0
    assert sample(x, top_k=3, step=step).tokens.unique().tolist() == [0, 1, 4000]


# ---- the same bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", ["full", "k, then p", "p near 1"])
def test_a_draw_depends_on_its_row_alone(limits: str) -> None:
    x, seed, step = torch.randn(12, 9001), torch.arange(12) * 5, torch.arange(12) + 100
    whole = sample(x, seed=seed, step=step, **LIMITS[limits])
    order = torch.randperm(12)
    mixed = sample(x[order], seed=seed[order], step=step[order], **LIMITS[limits])
    alone = [sample(x[i], seed=seed[i], step=step[i], **LIMITS[limits]) for i in range(12)]
    for part, name in enumerate(whole._fields):
        assert torch.equal(mixed[part], whole[part][order]), name
        assert torch.equal(torch.stack([each[part] for each in alone]), whole[part]), name


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_targets_draw_the_same(target: str) -> None:
    x = torch.randn(5, 9001)
    for limits in ("full", "k, then p", "p near 1"):
        wanted = sample(x, step=9, **LIMITS[limits])
        with choosing_for(target):
            got = sample(x, step=9, **LIMITS[limits])
        assert torch.equal(got.tokens, wanted.tokens)
        assert torch.equal(got.logprobs, wanted.logprobs)


@pytest.mark.parametrize("tile", [256, 1024])
def test_tokens_do_not_depend_on_the_tile(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, 9001) * torch.tensor([[0.1], [3.0]]).repeat(4, 1)
    wanted = {name: sample(x, step=2, **each).tokens for name, each in LIMITS.items()}
    monkeypatch.setattr(launch, "draw_config", lambda cols, target: launch.SelectConfig(tile, 1))
    for name, each in LIMITS.items():
        assert torch.equal(sample(x, step=2, **each).tokens, wanted[name]), name


def test_shards_of_the_vocabulary_draw_what_the_whole_draws() -> None:
    """The noise of a token is that of its number in the whole vocabulary: the best of the shards' best is the draw."""
    x = torch.randn(6, 1000)
    whole = sample(x, seed=4, step=1).tokens
    noise = gumbel(torch.tensor(4), torch.tensor(1), torch.arange(1000))
    for cut in (1, 333, 999):
        best = [
            (part + noise[first : first + part.shape[1]]).max(-1)
            for first, part in ((0, x[:, :cut]), (cut, x[:, cut:]))
        ]
        assert torch.equal(torch.where(best[0][0] >= best[1][0], best[0][1], best[1][1] + cut), whole)


@pytest.mark.parametrize("limits", ["full", "all"])
def test_replays_draw_anew_if_the_step_advances(limits: str) -> None:
    """A recording refuses whatever would wait for the device. Its replays draw what calls draw, and a step that stands
    still is noticed."""
    x, step = torch.randn(4, 100), torch.zeros(4, dtype=torch.int64)
    replay = weft.capture(lambda x, step: sample(x, step=step, **LIMITS[limits]), x, step)
    drawn = []
    for _ in range(100):
        drawn.append(replay(x, step).tokens.clone())
        assert torch.equal(drawn[-1], sample(x, step=step, **LIMITS[limits]).tokens)
        step += 1
    assert all(len(row.unique()) > 20 for row in torch.stack(drawn, 1))
    frozen = torch.stack([replay(x, step).tokens.clone() for _ in range(5)])
    assert (frozen == frozen[0]).all()


def test_seeds_and_steps_of_64_bits() -> None:
    x = torch.zeros(1, 5000)
    numbers = [0, 1, 2**32, 2**32 + 1, 2**62, -1]
    for name in ("seed", "step"):
        tokens = [sample(x, **{name: n}).tokens.item() for n in numbers]  # type: ignore[arg-type]
        assert len(set(tokens)) == len(numbers)


# ---- odd logits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", ["full", "greedy", "k", "p", "all"])
def test_odd_rows(limits: str) -> None:
    x = torch.randn(7, 300)
    x[0] = -INF
    x[1], x[1, 250] = -INF, -80.0
    x[2, 7] = INF
    x[3] = NAN
    x[4, 1:] = NAN
    x[5] = 1e30
    x[6, 299] = 300.0
    got = sample(x, **LIMITS[limits])
    assert got.tokens[[0, 1, 2, 3, 4, 6]].tolist() == [-1, 250, 7, -1, 0, 299]
    assert 0 <= got.tokens[5] < 300
    assert got.logprobs[[1, 2, 6]].tolist() == [0.0, 0.0, 0.0]
    assert got.logprobs[[0, 3, 4]].isnan().all()


def test_a_low_temperature_is_greedy() -> None:
    x = torch.randn(50, 1000)
    step = torch.arange(50)
    assert torch.equal(sample(x, temperature=1e-6, step=step).tokens, x.argmax(-1))


@pytest.mark.parametrize("limits", ["full", "k, then p"])
def test_every_token_is_in_range(limits: str) -> None:
    """flashinfer#3529: ids past the vocabulary, whose length is no multiple of 16."""
    for cols in (1, 2, 15, 17, 4095, 4097):
        tokens = sample(torch.randn(64, cols), step=torch.arange(64), **LIMITS[limits]).tokens
        assert tokens.min() >= 0
        assert tokens.max() < cols


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{"top_k": 300}, {"top_p": 0.95}, {"top_k": 2000, "top_p": 0.9}])
@pytest.mark.parametrize("target", ["sm_90", "sm_80"])
def test_flashinfer_3624_no_race_between_threads(limits: dict[str, Any], target: str) -> None:
    """The GPU's own code reads flat rows again, and collects elements in memory that threads share. The emulator raises
    a HazardError where nothing orders two accesses."""
    x = torch.randn(2, 9001) * torch.tensor([[0.1], [1.0]])
    wanted = sample(x, step=4, **limits)
    with triton_loom.emulate(target):
        assert_equal(sample(x, step=4, **limits), wanted)


def test_layouts() -> None:
    x = torch.randn(4, 3, 300)
    step = torch.arange(12).view(4, 3)
    wanted = sample(x, step=step)
    assert wanted.tokens.shape == (4, 3)
    assert_equal(sample(x.transpose(0, 1), step=step.t()), type(wanted)(*(t.t() for t in wanted)))
    assert_equal(sample(torch.randn(0, 9)), type(wanted)(*(t.reshape(-1)[:0] for t in wanted)))
    wide = torch.randn(4, 3, 600)
    wide[..., ::2] = x
    assert_equal(sample(wide[..., ::2], step=step), wanted)
    far = far_apart(4, 96)
    for limits in ("full", "k, then p", "p near 1"):
        assert_equal(sample(far, **LIMITS[limits]), sample(far.contiguous(), **LIMITS[limits]))


def test_nothing_is_differentiated() -> None:
    x, t = torch.randn(3, 20, requires_grad=True), torch.ones(3, requires_grad=True)
    got = sample(x, temperature=t)
    assert not any(each.requires_grad for each in got)


@pytest.mark.parametrize("limits", ["full", "all"])
def test_compiled_is_eager(limits: str) -> None:
    """Numbers may change from call to call of one graph."""
    x, step = torch.randn(3, 200), torch.tensor([1, 2, 3])
    options = LIMITS[limits] | {"temperature": 0.7}
    compiled = torch.compile(
        lambda t, s, **options: sample(t, step=s, **options),
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    for temperature in (0.7, 0.8):
        options["temperature"] = temperature
        assert torch.equal(compiled(x, step, **options).tokens, sample(x, step=step, **options).tokens)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: sample(x, temperature=-1.0), "temperature must be at least 0"),
        (lambda x: sample(x, temperature=NAN), "temperature must be a number"),
        (lambda x: sample(x, top_p=1.5), "top_p must be from 0 to 1"),
        (lambda x: sample(x, min_p=-0.1), "min_p must be from 0 to 1"),
        (lambda x: sample(x, top_k=2.5), "top_k must be"),
        (lambda x: sample(x, top_k=torch.ones(3)), "top_k must be int32 or int64"),
        (lambda x: sample(x, top_p=torch.ones(2)), "top_p must have the shape"),
        (lambda x: sample(x, temperature=torch.ones(3).double()), "temperature must be float32"),
        (lambda x: sample(x, step=torch.ones(3)), "step must be int64"),
        (lambda x: sample(x, seed=torch.ones(2).long()), "seed must have the shape"),
        (lambda x: weft.sample(x), "a draw needs seed= and step="),
        (lambda x: weft.sample(x, seed=1), "a draw needs seed= and step="),
        (lambda x: weft.sample(x, step=1, temperature=torch.zeros(3)), "a draw needs seed= and step="),
        (lambda x: sample(x, order="p_then_k"), "order must be"),
        (lambda x: sample(x.long()), "logits must be"),
        (lambda x: sample(x[:, :0]), "0 < V"),
        (lambda x: sample(x[0, 0]), "at least one dimension"),
        (lambda x: sample(x[0, 0].expand(2**22 + 1), top_p=0.9), "at most 4,194,304 tokens"),
    ],
)
def test_mistakes_are_named(call: Callable[[Tensor], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        call(torch.randn(3, 5))

"""Draws from a linear head: tokens against float64, log-probabilities bit for bit, distributions, shards, PyTorch."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import triton_loom
from torch import Tensor
from triton_loom.testing import results_of

import weft
from tests.ops.sampling import ranks_linear_sample as ranks
from weft.lab.families import Call, truth_of
from weft.lab.truth import near
from weft.ops.loss.linear_logprobs.arguments import LinearLogprobsArgs, LinearStatisticsArgs
from weft.ops.loss.linear_logprobs.linear_logprobs import linear_logprobs_op, linear_statistics_op
from weft.ops.loss.statistics import LinearSampled, Softmax, Wanted
from weft.ops.sampling.linear_sample.arguments import LinearSampleArgs
from weft.ops.sampling.linear_sample.linear_sample import linear_sample_op, linear_sample_statistics_op
from weft.ops.sampling.parameters import Number
from weft.runtime import choosing_for, observing
from weft.runtime.launch import recorded_by

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NOISE = {"seed": 3, "step": 5}
CAPPED: dict[str, Any] = {"logit_scale": 1.5, "softcap": 20.0, "temperature": 0.7}


def problem(
    rows: int = 70, cols: int = 40, vocab: int = 300, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> dict[str, Tensor]:
    """Return hidden states and a head."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, cols, generator=generator)
    weight = 2.0 * torch.randn(vocab, cols, generator=generator) / cols**0.5
    return {"hidden": hidden.to(dtype), "weight": weight.to(dtype)}


def check(**arguments: Any) -> LinearSampled:
    """Check tokens and log-probabilities against float64, and the latter against `linear_logprobs` bit for bit."""
    call = Call(weft.linear_sample, arguments)
    got: LinearSampled = call()
    expected = truth_of("linear_sample")
    assert expected is not None
    wanted = expected(call, {})
    assert torch.equal(got.tokens, wanted["tokens"])
    near(got.logprobs, wanted["logprobs"])
    assert torch.equal(got.logprobs, logprobs_of(got.tokens, **arguments))
    return got


def logprobs_of(tokens: Tensor, *, hidden: Tensor, weight: Tensor, **options: Any) -> Tensor:
    """Return the results of `linear_logprobs` for the same options."""
    options = {name: value for name, value in options.items() if name not in NOISE}
    if options.get("temperature") == 0:
        del options["temperature"]
    return weft.linear_logprobs(hidden, weight, tokens, **options)


# ---- tokens and log-probabilities ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_have_the_highest_scores(dtype: torch.dtype) -> None:
    """Rows and columns fill several tiles and part of another; each row has its own noise."""
    tensors = problem(150, 72, 333, dtype)
    noise = {"seed": torch.arange(150) * 10**12 - 5, "step": torch.arange(150) % 3}
    got = check(**tensors, **noise, **CAPPED)
    assert len(got.tokens.unique()) > 30


def test_scaled_and_capped_logits() -> None:
    for options in ({"temperature": 0.3}, {"temperature": 0, "logit_scale": 1.75, "softcap": 4.0}):
        check(**problem(20, 24, 140), **NOISE, **options)


@pytest.mark.parametrize(("cols", "vocab"), [(1, 1), (7, 129), (16, 3), (65, 1)])
def test_odd_sizes(cols: int, vocab: int) -> None:
    tensors = problem(5, cols, vocab)
    for temperature in (1.0, 0):
        check(**tensors, **NOISE, temperature=temperature)


def test_layouts() -> None:
    """Results do not depend on strides, leading dimensions, or the form of seed and step."""
    tensors = problem(24, 40, 130)
    hidden, weight = tensors["hidden"], tensors["weight"]
    wanted = weft.linear_sample(hidden, weight, **NOISE)
    padded = torch.full((24, 57), torch.nan).bfloat16()
    padded[:, :40] = hidden
    seed, step = torch.tensor(3), torch.tensor([5])
    for arguments in (
        {"hidden": padded[:, :40]},
        {"hidden": hidden.t().contiguous().t()},
        {"hidden": hidden.view(2, 3, 4, 40)},
        {"hidden": hidden.view(2, 3, 4, 40), "seed": seed.expand(2, 3, 4), "step": step},
        {"weight": weight.t().contiguous().t()},
        {"seed": torch.stack([seed.expand(24), torch.zeros(24).long()], 1)[:, 0], "step": step.expand(24)},
    ):
        got = weft.linear_sample(**(tensors | NOISE | arguments))
        shape = arguments.get("hidden", hidden).shape[:-1]
        assert got.tokens.shape == got.logprobs.shape == shape
        assert torch.equal(got.tokens.flatten(), wanted.tokens)
        assert torch.equal(got.logprobs.flatten(), wanted.logprobs)


def test_an_empty_batch() -> None:
    tensors = problem(0)
    for shape in ((0, 40), (3, 0, 40)):
        got = weft.linear_sample(tensors["hidden"].view(shape), tensors["weight"], **NOISE)
        assert got.tokens.shape == got.logprobs.shape == shape[:-1]
        assert (got.tokens.dtype, got.logprobs.dtype) == (torch.int64, torch.float32)


def test_the_first_of_equal_logits() -> None:
    """All rows of the weight are equal, in one split and across splits."""
    tensors = problem(6, 16, 2500)
    tensors["weight"][:] = tensors["weight"][0]
    assert not weft.linear_sample(**tensors, temperature=0, **NOISE).tokens.any()
    tensors["weight"][:130] = -100 * tensors["hidden"].mean(0)
    bias = torch.zeros(2500)
    bias[:130] = -1e4
    got = weft.linear_sample(**tensors, bias=bias, temperature=0, **NOISE)
    assert got.tokens.tolist() == [130] * 6


@pytest.mark.parametrize("temperature", [1.0, 0])
def test_logits_that_are_no_numbers(temperature: float) -> None:
    """NaN and minus infinity are never drawn, infinity always is, and without any other logit there is no token."""
    vocab = 300
    tensors = {"hidden": torch.ones(1, 1), "weight": torch.zeros(vocab, 1)}

    def sample(bias: Tensor) -> tuple[int, float]:
        tokens, logprobs = weft.linear_sample(**tensors, bias=bias, temperature=temperature, **NOISE)
        return int(tokens), float(logprobs)

    nothing = torch.full((vocab,), -torch.inf)
    for other in (-torch.inf, torch.nan):
        bias = nothing.clone()
        bias[::2] = other
        token, logprob = sample(bias)
        assert token == -1
        assert logprob != logprob
        bias[251] = -1e30
        token, logprob = sample(bias)
        assert token == 251
        assert logprob == 0 if other == -torch.inf else logprob != logprob
    bias = torch.zeros(vocab)
    bias[[7, 200]] = torch.inf
    assert sample(bias)[0] == 7


# ---- draws from the largest logits ----------------------------------------------------------------------

TOP: dict[str, dict[str, Any]] = {
    "k": {"top_k": 7},
    "1": {"top_k": 1},
    "k, then p": {"top_k": 50, "top_p": 0.8},
    "all": {"top_k": 64, "top_p": 0.95, "min_p": 0.02},
}


@pytest.mark.parametrize("limits", TOP)
@pytest.mark.parametrize("dtype", DTYPES[::2])
def test_draws_from_the_largest_are_those_of_logits(limits: str, dtype: torch.dtype) -> None:
    """`sample` draws the same tokens from the same logits, in one tile and in several, and in long lists."""
    for rows, vocab in ((5, 33), (140, 1000), (2, 12000)):
        tensors = problem(rows, 24, vocab, dtype)
        noise = {"seed": torch.arange(rows) + 2**40, "step": torch.tensor(7)}
        got = weft.linear_sample(**tensors, temperature=0.8, **noise, **TOP[limits])
        logits = tensors["hidden"].float() @ tensors["weight"].float().t()
        wanted = weft.sample(logits, temperature=0.8, **noise, **TOP[limits])
        assert torch.equal(got.tokens, wanted.tokens)
        assert torch.equal(got.logprobs, logprobs_of(got.tokens, **tensors, temperature=0.8))


def test_the_largest_for_each_row() -> None:
    """Limits as tensors hold for their rows, and a row draws the same in any batch."""
    tensors = problem(20, 24, 700)
    seed, top_p = torch.arange(20), torch.linspace(0, 1, 20)
    options: dict[str, Any] = {"weight": tensors["weight"], "top_k": 30, "min_p": torch.tensor(0.001)}
    whole = weft.linear_sample(tensors["hidden"], seed=seed, step=1, top_p=top_p, **options)
    order = torch.randperm(20)[:11]
    part = weft.linear_sample(
        tensors["hidden"][order], seed=seed[order], step=1, top_p=top_p[order], **options
    )
    assert torch.equal(part.tokens, whole.tokens[order])
    assert torch.equal(part.logprobs, whole.logprobs[order])
    for i in (0, 7, 19):
        alone = weft.linear_sample(tensors["hidden"][i], seed=i, step=1, top_p=float(top_p[i]), **options)
        assert alone.tokens == whole.tokens[i]
    assert torch.equal(
        whole.tokens[:1], weft.linear_sample(tensors["hidden"][:1], **options, temperature=0, **NOISE).tokens
    )


def test_the_first_of_equal_largest() -> None:
    """Lists keep the lowest tokens of equal logits, in one tile and across tiles; what is no number is never drawn."""
    tensors = {"hidden": torch.ones(3000, 1), "weight": torch.zeros(1500, 1)}
    noise = {"seed": torch.arange(3000), "step": 1}
    for first in (0, 100, 700):
        bias = torch.zeros(1500)
        bias[:first:2], bias[1:first:2] = -torch.inf, torch.nan
        tokens = weft.linear_sample(**tensors, bias=bias, top_k=5, **noise).tokens
        assert tokens.unique().tolist() == list(range(first, first + 5))
    bias[1200] = 1.0
    tokens = weft.linear_sample(**tensors, bias=bias, top_k=3, **noise).tokens
    assert tokens.unique().tolist() == [700, 701, 1200]
    bias[:] = -torch.inf
    assert weft.linear_sample(**tensors, bias=bias, top_k=3, **noise).tokens.eq(-1).all()
    bias[1499] = -3e38
    assert weft.linear_sample(**tensors, bias=bias, top_k=3, **noise).tokens.eq(1499).all()
    bias[[3, 9]] = torch.inf
    assert weft.linear_sample(**tensors, bias=bias, top_k=3, **noise).tokens.eq(3).all()


@pytest.mark.parametrize("limits", ["k", "all"])
@pytest.mark.parametrize("cuts", [(0, 300, 600, 900), (0, 3, 3, 130, 899, 900)])
def test_shards_list_their_largest(cuts: tuple[int, ...], limits: str) -> None:
    """Any cuts, with shards that have fewer columns than are drawn from."""
    tensors = problem(20, 40, 900)
    whole = weft.linear_sample(**tensors, **NOISE, **TOP[limits])
    softmax = Softmax(0, 900, -100, None, 1.0)
    top_p, min_p = (Number(None, TOP[limits].get(n, off)) for n, off in (("top_p", 1.0), ("min_p", 0.0)))
    more = TOP[limits]["top_k"], top_p, min_p
    listed = []
    for first, last in itertools.pairwise(cuts):
        part = (tensors["hidden"], tensors["weight"][first:last].contiguous(), None)
        a = LinearSampleArgs(
            *part, torch.tensor(3), torch.tensor(5), None, softmax._replace(start=first), *more
        )
        listed.append(linear_sample_statistics_op(a).stats)
        with weft.backend("reference"):
            reference = linear_sample_statistics_op(a).stats
        torch.testing.assert_close(listed[-1][:5], reference[:5], rtol=1e-4, atol=1e-5, equal_nan=True)
        lists = [x[5:].sort(0).values for x in (listed[-1], reference)]  # kernels list in another order
        torch.testing.assert_close(*lists, rtol=1e-5, atol=1e-6, equal_nan=True)
    stats = torch.stack(listed)
    before = stats.clone()
    joined = a._replace(stats=stats, softmax=softmax)
    got = linear_sample_op(joined)
    assert torch.equal(got.tokens, whole.tokens)
    torch.testing.assert_close(got.logprobs, whole.logprobs, rtol=1e-5, atol=1e-6)
    assert torch.equal(stats.view(torch.int32), before.view(torch.int32))
    with weft.backend("reference"):
        assert torch.equal(linear_sample_op(joined).tokens, got.tokens)


@pytest.mark.parametrize("fill", [torch.zeros, torch.ones])
def test_lists_may_hold_anything(fill: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits below zero, of which there are fewer than a list holds: what stood there before is larger."""
    tensors, noise = problem(40, 8, 20, torch.float32), {"seed": 1, "step": torch.arange(40)}
    bias = torch.full((20,), -50.0)
    wanted = weft.linear_sample(**tensors, bias=bias, top_k=60, **noise)
    monkeypatch.setattr(torch, "empty", fill)
    assert torch.equal(weft.linear_sample(**tensors, bias=bias, top_k=60, **noise).tokens, wanted.tokens)


def test_draws_from_the_largest_have_their_distribution() -> None:
    p = torch.tensor([0.02, 0.4, 0.03, 0.25, 0.2, 0.1], dtype=torch.float64)
    draws = 60_000
    tokens, logprobs = weft.linear_sample(
        torch.zeros(draws, 1),
        torch.zeros(6, 1),
        bias=p.log().float(),
        top_k=4,
        seed=11,
        step=torch.arange(draws),
    )
    kept = torch.where(p >= 0.1, p, 0.0) / 0.95
    places = torch.tensor([-1, 0, -1, 1, 2, 3])[tokens]
    assert places.min() == 0
    assert chi_square(places, kept[kept > 0]) < 33  # 3 degrees of freedom: 1e-7
    torch.testing.assert_close(logprobs, p.log().float()[tokens], atol=1e-6, rtol=1e-6)


# ---- the same bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        *(("cpu", dtype) for dtype in DTYPES),
        ("sm_90", torch.bfloat16),
        ("gfx942", torch.float32),
        *(
            pytest.param(target, dtype, marks=pytest.mark.slow)
            for target, dtype in itertools.product(("sm_80", "sm_90", "sm_100", "gfx942"), DTYPES)
        ),
    ],
)
def test_bits_of_a_row_in_any_batch(dtype: torch.dtype, target: str) -> None:
    """Batches of any size, in any order, with rows beside it that are NaN or huge."""
    tensors = problem(130, 40, 2500 if target == "cpu" else 600, dtype)
    hidden, weight = tensors["hidden"], tensors["weight"]
    options: dict[str, Any] = {"weight": weight, **CAPPED}
    seed, step = torch.arange(130), torch.arange(130) // 7
    order = torch.randperm(130)
    other = hidden.clone()
    other[::2] = torch.tensor([torch.nan, torch.inf, 3e4, -3e4, 0.0]).repeat(13)[:, None]
    with choosing_for(target):
        wanted = weft.linear_sample(hidden, seed=seed, step=step, **options)
        assert torch.equal(logprobs_of(wanted.tokens, hidden=hidden, **options), wanted.logprobs)
        for batch, rows in ((hidden, [17]), (hidden, [128, 3, 64]), (hidden, order), (other, range(130))):
            part = torch.as_tensor(rows)
            got = weft.linear_sample(batch[part], seed=seed[part], step=step[part], **options)
            same = slice(1, None, 2) if batch is other else slice(None)
            assert torch.equal(got.tokens[same], wanted.tokens[part][same])
            assert torch.equal(got.logprobs[same], wanted.logprobs[part][same])
            logprobs = logprobs_of(wanted.tokens[part], hidden=batch[part], **options)
            assert torch.equal(logprobs[same], wanted.logprobs[part][same])


@pytest.mark.parametrize("target", ["cpu", "sm_90", "gfx942"])
def test_splits_do_not_depend_on_the_batch(target: str) -> None:
    """One tile of tokens keeps all multiprocessors busy; statistics of more tokens have as many splits."""
    splits = set()

    def note(launch: Any, grid: tuple[int, int, int], *_: Any) -> None:
        if launch.kernel.name == "linear_logprobs_kernel":
            splits.add(grid[1])

    weight = torch.empty(151936, 64, dtype=torch.bfloat16, device="meta")
    with recorded_by(note, target):
        for rows in (1, 130, 8192):
            hidden = torch.empty(rows, 64, dtype=torch.bfloat16, device="meta")
            weft.linear_logprobs(hidden, weight, torch.empty(rows, dtype=torch.int64, device="meta"))
            weft.linear_sample(hidden, weight, temperature=0, **NOISE)
    (count,) = splits
    multiprocessors = weft.Capabilities.of(target).multiprocessors
    assert 0.8 * multiprocessors <= count <= multiprocessors


def test_bits_do_not_depend_on_the_stride_of_hidden_states() -> None:
    """At an odd stride, a GPU would load element by element, with another tile."""
    tensors = problem(9, 40, 600)
    padded = torch.full((9, 41), torch.nan).bfloat16()
    padded[:, :40] = tensors["hidden"]
    with choosing_for("sm_90"):
        wanted = weft.linear_sample(**tensors, **NOISE)
        for hidden in (padded[:, :40], padded[:1, :40]):
            got = weft.linear_sample(hidden, tensors["weight"], **NOISE)
            assert torch.equal(got.logprobs, wanted.logprobs[: len(hidden)])


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "sm_80"])
@pytest.mark.parametrize("limits", [{}, TOP["all"]])
def test_bits_of_emulated_gpus(target: str, limits: dict[str, Any]) -> None:
    """The GPU's own code: the log-probability is that of `linear_logprobs`, and the token that of the CPU."""
    tensors = problem(5, 64, 300) | {"temperature": 0.7}
    noise = NOISE | limits
    wanted = weft.linear_sample(**tensors, **noise)
    with triton_loom.emulate(target):
        got = weft.linear_sample(**tensors, **noise)
        few = weft.linear_sample(**(tensors | {"hidden": tensors["hidden"][3:]}), **noise)
        logprobs = logprobs_of(got.tokens, **tensors)
    assert torch.equal(got.tokens, wanted.tokens)
    assert torch.equal(got.logprobs, logprobs)
    assert torch.equal(few.logprobs, logprobs[3:])


# ---- distributions ------------------------------------------------------------------------------------


def chi_square(tokens: Tensor, p: Tensor) -> float:
    """Return the chi-square statistic of draws."""
    expected = len(tokens) * p
    return float(((tokens.bincount(minlength=len(p)) - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("draws", [60_000, pytest.param(2_000_000, marks=pytest.mark.slow)])
def test_draws_follow_the_softmax(draws: int) -> None:
    """Draws of one seed at successive steps, and of successive seeds at one step. With 6 degrees of freedom, the
    statistic exceeds 38 with a probability of 1e-6."""
    p = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.03, 0.015, 0.005], dtype=torch.float64)
    hidden, weight = torch.zeros(draws, 1), torch.zeros(7, 1)
    for seed, step in ((11, torch.arange(draws)), (torch.arange(draws), 11)):
        tokens, logprobs = weft.linear_sample(hidden, weight, bias=p.log().float(), seed=seed, step=step)
        assert chi_square(tokens, p) < 38
        torch.testing.assert_close(logprobs, p.log().float()[tokens], atol=1e-6, rtol=1e-6)
        halves = tokens.view(2, -1)  # independent of each other
        pairs = halves[0] * 7 + halves[1]
        assert chi_square(pairs, torch.outer(p, p).flatten()) < 120  # 48 degrees: 1e-7


def test_steps_and_seeds_make_draws() -> None:
    """The same numbers draw the same tokens; a step that is advanced in place, or another seed, draws others."""
    hidden, weight = torch.zeros(64, 8), torch.zeros(5000, 8)
    seed, step = torch.arange(64), torch.zeros(64, dtype=torch.int64)
    first = weft.linear_sample(hidden, weight, seed=seed, step=step).tokens
    assert len(first.unique()) > 60, "rows with one seed have one token"
    assert torch.equal(weft.linear_sample(hidden, weight, seed=seed, step=step).tokens, first)
    step += 1
    second = weft.linear_sample(hidden, weight, seed=seed, step=step).tokens
    assert (first == second).sum() < 3
    for value in (1, 2**33, -1, 2**63 - 1):
        assert (weft.linear_sample(hidden, weight, seed=seed, step=value).tokens == first).sum() < 3
        assert len(weft.linear_sample(hidden, weight, seed=value, step=7).tokens.unique()) == 1


# ---- shards ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 0])
@pytest.mark.parametrize("cuts", [(0, 100, 200, 300), (0, 3, 3, 130, 299, 300)])
def test_simulated_shards(cuts: tuple[int, ...], temperature: float) -> None:
    """Any cuts, with empty shards and starts within a block of noise, draw the token of the whole vocabulary, with the
    log-probability of `linear_logprobs` over the same shards."""
    tensors = problem(20, 40, 300) | {"bias": torch.randn(300)}
    hidden, weight, bias = tensors.values()
    softmax, wanted = Softmax(0, 300, -100, None, 1 / (temperature or 1.0)), Wanted(False, False, False)
    noise = (None, None) if temperature == 0 else (torch.tensor(3), torch.tensor(5))
    whole = weft.linear_sample(hidden, weight, bias=bias, temperature=temperature, **NOISE)
    drawn, labeled = [], []
    for first, last in itertools.pairwise(cuts):
        part = (hidden, weight[first:last].contiguous(), bias[first:last].contiguous())
        of_shard = softmax._replace(start=first)
        drawn.append(linear_sample_statistics_op(LinearSampleArgs(*part, *noise, None, of_shard)).stats)
        arguments = LinearStatisticsArgs(*part, whole.tokens, None, of_shard, wanted)
        labeled.append(linear_statistics_op(arguments).stats)
    got = linear_sample_op(LinearSampleArgs(*part, *noise, torch.stack(drawn), of_shard))
    assert torch.equal(got.tokens, whole.tokens)
    stats = torch.stack(labeled)
    logprobs = linear_logprobs_op(
        LinearLogprobsArgs(*part, whole.tokens, None, stats, of_shard, wanted, None)
    )
    assert torch.equal(got.logprobs, logprobs.tokens.logprobs)
    torch.testing.assert_close(got.logprobs, whole.logprobs, rtol=1e-5, atol=1e-6)
    with weft.backend("reference"):
        again = linear_sample_op(LinearSampleArgs(*part, *noise, torch.stack(drawn), of_shard))
    assert torch.equal(again.tokens, got.tokens)
    torch.testing.assert_close(again.logprobs, got.logprobs, rtol=1e-5, atol=1e-6)


def test_a_token_of_nobody_across_shards() -> None:
    """A shard of minus infinities draws nothing; a NaN in any shard makes the log-probability NaN."""
    stats = torch.tensor([[-3.4e38, 0, 0, -torch.inf, 0], [-3.4e38, 0, 0, -torch.inf, 0]])[..., None]
    stats[:, 4] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    a = LinearSampleArgs(
        torch.zeros(1, 1), torch.zeros(2, 1), None, None, None, stats, Softmax(2, 4, -100, None, 1.0)
    )
    tokens, logprobs = linear_sample_op(a)
    assert tokens.tolist() == [-1]
    assert logprobs.isnan().all()


@pytest.mark.slow
def test_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Both ranks have the tokens of one process, and the bits of `linear_logprobs` over the same shards."""
    tensors, options = ranks.inputs()
    whole = weft.linear_sample(**tensors, **options)
    for got in results_of(Path(ranks.__file__), tmp_path_factory)(2):
        assert torch.equal(got["tokens"], whole.tokens)
        assert torch.equal(got["logprobs"], got["wanted"])
        assert torch.equal(got["compiled tokens"], whole.tokens)
        assert torch.equal(got["compiled logprobs"], got["wanted"])


# ---- PyTorch -----------------------------------------------------------------------------------------------


def test_two_launches_without_reading_the_device() -> None:
    launched: list[str] = []
    tensors = problem(3)
    noise = {"seed": torch.arange(3), "step": torch.tensor(2)}
    with observing(lambda launch, *_: launched.append(launch.kernel.name)):
        weft.linear_sample(**tensors, **noise)
    assert launched == ["linear_logprobs_kernel", "_join_statistics_kernel"]


@pytest.mark.parametrize("limits", [{}, {"top_k": 60}])
def test_captured_steps_differ(limits: dict[str, Any]) -> None:
    """Replays of one recording, in which only the step advances, draw what calls of their own draw."""
    hidden, weight = torch.zeros(4, 8), torch.zeros(5000, 8)
    seed = torch.arange(4)
    replay = weft.capture(
        lambda hidden, step: weft.linear_sample(hidden, weight, seed=seed, step=step, **limits),
        hidden,
        torch.tensor(0),
    )
    drawn = []
    for step in range(8):
        tokens, logprobs = replay(hidden, torch.tensor(step))
        wanted = weft.linear_sample(hidden, weight, seed=seed, step=step, **limits)
        assert torch.equal(tokens, wanted.tokens)
        assert torch.equal(logprobs, wanted.logprobs)
        drawn.append(tokens.clone())
    assert len(torch.stack(drawn).unique()) > 20


def test_results_into_the_same_memory() -> None:
    tensors = problem(5)
    softmax = Softmax(0, 300, -100, None, 1.0)
    results = LinearSampled(torch.full((5,), -7), torch.full((5,), 99.0))
    for step in range(3):
        a = LinearSampleArgs(*tensors.values(), None, torch.tensor(3), torch.tensor(step), None, softmax)
        linear_sample_op.into(results, a)
        wanted = weft.linear_sample(**tensors, seed=3, step=step)
        assert torch.equal(results.tokens, wanted.tokens)
        assert torch.equal(results.logprobs, wanted.logprobs)


@pytest.mark.parametrize("temperature", [1.0, 0])
def test_compiled_equals_eager(temperature: float) -> None:
    tensors = problem(20, 24, 140)

    def sample(hidden: Tensor, weight: Tensor, step: Tensor) -> LinearSampled:
        return weft.linear_sample(hidden, weight, temperature=temperature, seed=3, step=step)

    torch._dynamo.reset()
    compiled = torch.compile(sample, fullgraph=True, backend="aot_eager", dynamic=True)
    for step in torch.arange(2):
        for got, wanted in zip(
            compiled(*tensors.values(), step), sample(*tensors.values(), step), strict=True
        ):
            assert torch.equal(got, wanted)


def test_opcheck() -> None:
    softmax = Softmax(0, 300, -100, None, 1.0)
    a = LinearSampleArgs(*problem(6).values(), None, torch.arange(6), torch.tensor([1]), None, softmax)
    for op in (linear_sample_op, linear_sample_statistics_op):
        torch.library.opcheck(
            op.overload, op.arguments.flatten(a), test_utils=("test_schema", "test_faketensor")
        )


def test_results_have_no_gradient() -> None:
    tensors = {name: tensor.requires_grad_() for name, tensor in problem(4).items()}
    tokens, logprobs = weft.linear_sample(**tensors, **NOISE)
    assert not tokens.requires_grad
    assert not logprobs.requires_grad


def test_operands_of_other_kinds() -> None:
    """A block of autocast, and a quantized weight, which is dequantized."""
    tensors = problem(6, 256, 300)
    wanted = weft.linear_sample(**tensors, **NOISE)
    with torch.autocast("cpu", torch.bfloat16):
        got = weft.linear_sample(tensors["hidden"].float(), tensors["weight"].float(), **NOISE)
    assert torch.equal(got.logprobs, wanted.logprobs)
    codes = weft.quantize(tensors["weight"], "128x128")
    got = weft.linear_sample(tensors["hidden"], codes, **NOISE)
    wanted = weft.linear_sample(tensors["hidden"], codes.dequantize(), **NOISE)
    assert torch.equal(got.tokens, wanted.tokens)
    assert torch.equal(got.logprobs, wanted.logprobs)


def test_invalid_arguments_raise() -> None:
    tensors = problem(4, 8, 10) | NOISE
    for wrong, error, message in (
        ({"hidden": tensors["hidden"][:, :7]}, ValueError, r"with one H and at least one row; got \(4, 7\) and"),
        ({"weight": tensors["weight"].t()}, ValueError, "pass weight.t()"),
        ({"weight": tensors["weight"][:0]}, ValueError, "at least one row"),
        ({"bias": torch.zeros(9)}, ValueError, "bias must have the shape"),
        ({"temperature": -1.0}, ValueError, "above 0"),
        ({"temperature": torch.tensor(0.5)}, TypeError, "temperature must be a number"),
        ({"seed": 1.5}, TypeError, "seed must be an integer; got the float 1.5"),
        ({"seed": 2**63}, ValueError, "seed must fit 64 bits"),
        ({"step": torch.zeros(4)}, ValueError, "step must be int64 on cpu like hidden; got torch.float32"),
        ({"step": torch.zeros(3).long()}, ValueError, r"one for each row of hidden, \(4,\); got the shape \(3,\)"),
        ({"step": torch.zeros(4, device="meta").long()}, ValueError, "step must be int64 on cpu"),
        ({"shard": 3}, TypeError, "weft.VocabShard"),
        ({"top_k": 65}, ValueError, "top_k must be from 1 to 64; got 65. To draw from more tokens, pass logits"),
        ({"top_k": 0}, ValueError, "top_k must be at least 1"),
        ({"top_p": 0.5}, ValueError, "top_p= needs top_k="),
        ({"top_k": 3, "min_p": torch.zeros(3)}, ValueError, r"min_p must have the shape \(4,\)"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            weft.linear_sample(**(tensors | wrong))
    softmax = Softmax(0, 10, -100, None, 1.0)
    with pytest.raises(ValueError, match="both a seed and a step"):
        linear_sample_op(
            LinearSampleArgs(tensors["hidden"], tensors["weight"], None, torch.tensor(1), None, None, softmax)
        )

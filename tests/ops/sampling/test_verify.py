"""Verification of drafts from distributions: by enumeration, against the definition, and by counting."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.catalogue.layouts import far_apart
from weft.ops.sampling.parameters import Integer, Number
from weft.ops.sampling.verify.arguments import PART, AcceptArgs, Relaxed, Verified, VerifyArgs
from weft.ops.sampling.verify.reference import chances
from weft.ops.sampling.verify.verify import accept_op, verify_op
from weft.runtime import choosing_for


def verify(*args: Any, **options: Any) -> Any:
    """Call `weft.verify` with the seed and the step 0 unless others are given."""
    return weft.verify(*args, **{"seed": 0, "step": 0} | options)


def sample(*args: Any, **options: Any) -> Any:
    """Call `weft.sample` with the seed and the step 0 unless others are given."""
    return weft.sample(*args, **{"seed": 0, "step": 0} | options)


def same(got: Verified, expected: Verified) -> bool:
    return all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


# ---- distributions by enumeration -----------------------------------------------------------------------


class Model:
    """Distributions of the next token after every context, some of them with zeros."""

    def __init__(self, size: int, longest: int, seed: int, sharp: float = 2.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.of: dict[tuple[int, ...], Tensor] = {}
        for length in range(longest + 1):
            for context in itertools.product(range(size), repeat=length):
                logits = torch.randn(size, generator=generator, dtype=torch.float64) * sharp
                logits[torch.rand(size, generator=generator) < 0.2] = -math.inf
                logits[torch.randint(size, (1,), generator=generator)] = 0.0
                self.of[context] = logits.softmax(0)

    def rows(self, drafts: tuple[int, ...]) -> Tensor:
        """Return the distributions after each prefix of drafts, [len(drafts) + 1, V]."""
        return torch.stack([self.of[drafts[:i]] for i in range(len(drafts) + 1)])

    def probability(self, tokens: tuple[int, ...], known: int = 0) -> float:
        """Return the probability of tokens after the first `known` of them."""
        return math.prod(self.of[tokens[:i]][tokens[i]].item() for i in range(known, len(tokens)))


def lengths(accept: Tensor, joint: bool) -> list[float]:
    """Return the probability that n drafts are accepted, for each n, by integrating over the random numbers."""
    k = len(accept)
    if joint:
        return [
            (accept[n - 1].item() if n else 1.0) * math.prod(1 - a for a in accept[n:].tolist())
            for n in range(k + 1)
        ]
    return [math.prod(accept[:n].tolist()) * (1 - accept[n].item() if n < k else 1.0) for n in range(k + 1)]


@pytest.mark.parametrize(("size", "count"), [(8, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("method", ["chain", "block"])
def test_texts_have_the_distribution_of_the_target(method: str, size: int, count: int) -> None:
    """Every text of drafts, every number of accepted ones, every token after them: the probabilities of all texts,
    which the target model completes, are those of the target model."""
    target, drafter = Model(size, count, seed=size), Model(size, count, seed=10 + size)
    texts: dict[tuple[int, ...], float] = {}
    mean = 0.0
    for drafts in itertools.product(range(size), repeat=count):
        drawn = drafter.probability(drafts)
        if drawn == 0.0:
            continue
        p, q = target.rows(drafts)[None], drafter.rows(drafts)[None, :-1]
        accept, residual = (x[0] for x in chances(p, q, torch.tensor([drafts]), method == "block"))
        for n, weight in enumerate(lengths(accept, method == "block")):
            mean += drawn * weight * n
            after = residual[n] / residual[n].sum() if residual[n].sum() > 1e-12 else p[0, n]
            for token in range(size):
                start = (*drafts[:n], token)
                mass = drawn * weight * after[token].item()
                for rest in itertools.product(range(size), repeat=count - n) if mass else ():
                    text = (*start, *rest)
                    texts[text] = texts.get(text, 0.0) + mass * target.probability(text, n + 1)
    for text in itertools.product(range(size), repeat=count + 1):
        assert abs(texts.get(text, 0.0) - target.probability(text)) < 1e-12, text
    MEANS[method, size] = mean
    assert mean >= MEANS.get(("chain", size), 0.0) - 1e-12


MEANS: dict[tuple[str, int], float] = {}


def test_blocks_accept_more() -> None:
    """The example of the paper: 11/9 tokens in the mean rather than 10/9."""
    p, q = (torch.tensor(x, dtype=torch.float64) for x in ([1 / 3, 2 / 3], [2 / 3, 1 / 3]))
    means = []
    for joint in (False, True):
        mean = 0.0
        for drafts in itertools.product(range(2), repeat=2):
            drawn = q[list(drafts)].prod().item()
            c = chances(p.expand(1, 3, 2), q.expand(1, 2, 2), torch.tensor([drafts]), joint)
            mean += sum(drawn * weight * n for n, weight in enumerate(lengths(c.accept[0], joint)))
        means.append(mean)
    assert means == pytest.approx([10 / 9, 11 / 9], rel=1e-12)


# ---- the op against the definition ----------------------------------------------------------------------


def drawn(requests: int, count: int, size: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Draw logits, and drafts from distributions near the target's."""
    logits = (torch.randn(requests, count + 1, size) * 2).to(dtype)
    q = (logits[:, :-1].float() + torch.randn(requests, count, size)).softmax(-1)
    drafts = torch.multinomial(q.reshape(-1, size), 1).view(requests, count)
    seeds = torch.randint(-(2**62), 2**62, (requests,))
    return {"logits": logits, "drafts": drafts, "draft_probs": q, "seed": seeds, "step": 2**33 + 1}


@pytest.mark.parametrize("method", ["chain", "block"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_results_are_those_of_the_definition(count: int, method: Any) -> None:
    """Same numbers, same tokens: the definition draws them with Philox in integers of PyTorch."""
    call = drawn(150, count, 53)
    got = verify(**call, method=method)
    with weft.backend("reference"):
        assert same(got, verify(**call, method=method))
    assert set(got.accepted.tolist()) >= set(range(min(count, 3) + 1))


@pytest.mark.parametrize("method", ["chain", "block"])
def test_rows_of_several_parts(method: Any) -> None:
    call = drawn(40, 5, 2 * PART + 77, torch.bfloat16)
    call["draft_probs"] = call["draft_probs"].bfloat16()
    got = verify(**call, method=method, temperature=0.9)
    with weft.backend("reference"):
        assert same(got, verify(**call, method=method, temperature=0.9))
    assert got.tokens.max() > PART


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_every_pattern_of_drafts_that_must_and_cannot_pass(count: int) -> None:
    """With p > q a draft is accepted and with p = 0 rejected; after it comes the one token that p has more of."""
    patterns = torch.tensor(list(itertools.product([False, True], repeat=count)))
    logits = torch.full((len(patterns), count + 1, 5), -math.inf)
    logits[..., 3] = 0.0
    drafts = torch.where(patterns, 3, 1)
    q = torch.full((len(patterns), count, 5), 0.2)
    for method in ("chain", "block"):
        tokens, accepted, path = verify(logits, drafts, q, seed=torch.arange(len(q)), method=method)
        for b, pattern in enumerate(patterns.tolist()):
            n = [*pattern, False].index(False)
            assert accepted[b] == n
            assert tokens[b].tolist() == [3] * (n + 1) + [-1] * (count - n)
            assert path[b].tolist() == list(range(n + 1)) + [-1] * (count - n)


def counted(cells: Tensor, probabilities: Tensor) -> None:
    """Assert that counts of cells have these probabilities: chi-square, five deviations above its mean at most."""
    expected = probabilities * cells.sum()
    assert cells[expected == 0].sum() == 0
    few = expected > 0
    chi = ((cells - expected)[few] ** 2 / expected[few]).sum().item()
    freedom = int(few.sum()) - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom), f"{chi:.0f} with {freedom} degrees of freedom"


def tables(models: list[Model], prefix: Tensor, size: int) -> list[Tensor]:
    """Return each model's distributions after prefixes [N, length], [N, V]."""
    length = prefix.shape[1]
    index = (prefix * size ** torch.arange(length - 1, -1, -1)).sum(1)
    contexts = list(itertools.product(range(size), repeat=length))
    return [torch.stack([model.of[c] for c in contexts])[index] for model in models]


@pytest.mark.parametrize(
    "drafted_with", ["the same numbers", pytest.param("other numbers", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("method", ["chain", "block"])
def test_texts_are_distributed_as_the_target_s(method: Any, drafted_with: str) -> None:
    """100,000 texts of three tokens. The drafter may use the seed and the steps of the verification."""
    size, requests = 4, 100_000
    models = [Model(size, 2, seed=1), Model(size, 2, seed=2)]
    seeds = torch.arange(requests) + 2**35
    drafts = torch.empty(requests, 0, dtype=torch.int64)
    rows = []
    for step in range(3):
        p, q = tables(models, drafts, size)
        rows.append((p.float(), q.float()))
        if step == 2:
            break
        if drafted_with == "the same numbers":
            token = sample(q.log().float(), seed=seeds, step=step).tokens[:, None]
        else:
            token = torch.multinomial(q, 1)
        drafts = torch.cat([drafts, token], 1)
    logits, probs = (torch.stack([row[i] for row in rows], 1) for i in (0, 1))
    got = verify(logits.log(), drafts, probs[:, :-1].contiguous(), seed=seeds, method=method)
    text = got.tokens
    for at in range(1, 3):  # the target model completes what was not emitted
        p = tables(models[:1], text[:, :at], size)[0]
        text[:, at] = torch.where(text[:, at] < 0, torch.multinomial(p, 1)[:, 0], text[:, at])
    cells = torch.bincount((text * torch.tensor([16, 4, 1])).sum(1), minlength=64).double()
    texts = itertools.product(range(size), repeat=3)
    counted(cells, torch.tensor([models[0].probability(t) for t in texts]).double())
    assert 0.1 < got.accepted.float().mean() < 1.9


# ---- bugs of others -------------------------------------------------------------------------------------


def test_vllm_40149_draft_probabilities_count() -> None:
    """A draft with p = q is always accepted, however unlikely; without q only with probability p."""
    logits = torch.tensor([0.1, 0.9]).log().expand(2000, 2, 2)
    q = torch.tensor([0.1, 0.9]).expand(2000, 1, 2)
    drafts = torch.zeros(2000, 1, dtype=torch.int64)
    for method in ("chain", "block"):
        got = verify(logits, drafts, q, seed=torch.arange(2000), method=method)
        assert got.accepted.float().mean() > 0.999
    assert 0.05 < verify(logits, drafts, seed=torch.arange(2000)).accepted.float().mean() < 0.15


@pytest.mark.parametrize("cols", [1, 7, 1025, PART + 1])
def test_flashinfer_3529_tokens_are_in_range(cols: int) -> None:
    """Draft probabilities above the target's everywhere leave nothing of the residual: the draw is then from p."""
    logits = torch.randn(64, 3, cols)
    logits[:, :, -1] = 3.0
    q = torch.full((64, 2, cols), 1.0)
    drafts = torch.randint(0, cols, (64, 2))
    for method in ("chain", "block"):
        tokens, accepted, _ = verify(logits, drafts, q, seed=torch.arange(64), method=method)
        emitted = tokens[torch.arange(3) <= accepted[:, None]]
        assert emitted.min() >= 0
        assert emitted.max() < cols


def test_flashinfer_879_rows_without_drafts_add_none() -> None:
    """Requests of fewer drafts have rows of zeros, and -1 as drafts."""
    call = drawn(200, 4, 9)
    call["drafts"][:, 2:], call["draft_probs"][:, 2:] = -1, 0.0
    for method in ("chain", "block"):
        got = verify(**call, method=method)
        assert got.accepted.max() == 2
        assert (got.tokens[:, 3:] == -1).all()


# ---- values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["chain", "block"])
@pytest.mark.parametrize("draft", [-1, 9, 14, 2**31, -(2**40)])
def test_drafts_that_are_no_tokens_end_in_a_draw_from_the_target(draft: int, method: Any) -> None:
    """The token is the one that a row without drafts draws in that step, and is not read at that index."""
    call = drawn(60, 2, 9)
    call["drafts"][:, 1] = draft
    got = verify(**call, method=method)
    assert got.accepted.max() == 1
    at = got.accepted == 1
    alone = sample(call["logits"][:, 1], seed=call["seed"], step=call["step"] + 1).tokens
    assert torch.equal(got.tokens[at, 1], alone[at])
    call["drafts"][:, 0] = draft
    alone = sample(call["logits"][:, 0], seed=call["seed"], step=call["step"]).tokens
    assert torch.equal(verify(**call, method=method).tokens[:, 0], alone)


def test_draft_probabilities_of_zero_reject() -> None:
    """A draft that its own distribution cannot draw is rejected, and the draw is from the target if all are 0."""
    call = drawn(400, 1, 6)
    call["draft_probs"] = torch.zeros(400, 1, 6)
    got = verify(**call)
    assert not got.accepted.any()
    call["logits"] = call["logits"][:1].expand(400, 2, 6)
    tokens = verify(**call).tokens[:, 0]
    p = call["logits"][0, 0].double().softmax(0)
    counted(torch.bincount(tokens, minlength=6).double(), p)


@pytest.mark.parametrize("method", ["chain", "block"])
def test_equal_distributions_accept_all(method: Any) -> None:
    logits = torch.randn(300, 5, 101)
    q = logits[:, :-1].softmax(-1)
    drafts = torch.multinomial(q.reshape(-1, 101), 1).view(300, 4)
    assert (verify(logits, drafts, q, seed=torch.arange(300), method=method).accepted == 4).all()


@pytest.mark.parametrize("method", ["chain", "block", "without probabilities"])
def test_rows_without_a_distribution(method: Any) -> None:
    """NaN is never drawn; from nothing but minus infinity the token is -1; one plus infinity is certain."""
    logits = torch.zeros(4, 2, 50)
    logits[0, 0, 7], logits[1, 0], logits[2:, 0, 41] = math.nan, -math.inf, math.inf
    logits[0, 0, 8:] = -math.inf
    drafts, q = torch.tensor([[7], [3], [41], [3]]), torch.full((4, 1, 50), 0.02)
    options: dict[str, Any] = (
        {} if method == "without probabilities" else {"draft_probs": q, "method": method}
    )
    got = verify(logits, drafts, seed=torch.arange(4), **options)
    assert got.accepted.tolist() == [0, 0, 1, 0]
    assert 0 <= got.tokens[0, 0] < 7
    assert got.tokens[1:, 0].tolist() == [-1, 41, 41]
    assert got.tokens[[0, 1, 3], 1].tolist() == [-1] * 3


@pytest.mark.parametrize("method", ["chain", "block"])
def test_greedy_requests_among_others(method: Any) -> None:
    """At temperature 0 a draft is accepted if it is the first largest logit, whatever its own probability."""
    call = drawn(200, 3, 13)
    call["logits"][:, :, 12] = call["logits"].amax(-1)
    temperature = torch.arange(200) % 2 * 0.7
    best = call["logits"].argmax(-1)
    right = torch.rand(200, 3) < 0.7
    call["drafts"] = torch.where(right, best[:, :-1], call["drafts"])
    call["draft_probs"][:40] = 0.0
    call["draft_probs"][40:80:2] = torch.tensor([math.nan, -1.0]).repeat(7)[:13]
    got = verify(**call, method=method, temperature=temperature)
    matches = (call["drafts"] == best[:, :-1]).cumprod(1).sum(1)
    greedy = temperature == 0
    assert torch.equal(got.accepted[greedy], matches[greedy])
    last = got.tokens.gather(1, got.accepted[:, None])
    assert torch.equal(last[greedy], best.gather(1, matches[:, None])[greedy])
    with weft.backend("reference"):
        assert same(got, verify(**call, method=method, temperature=temperature))


def test_temperatures_divide() -> None:
    call = drawn(100, 2, 30)
    t = torch.rand(100) + 0.5
    got = verify(**call, temperature=t)
    assert same(got, verify(**call | {"logits": call["logits"] / t[:, None, None]}))
    one = verify(**call, temperature=0.5)
    assert same(one, verify(**call | {"logits": call["logits"] / 0.5}))


def test_seeds_and_steps_choose_the_numbers() -> None:
    logits, q, drafts = torch.zeros(1, 2, 4001), torch.zeros(1, 1, 4001), torch.tensor([[-1]])
    token = verify(logits, drafts, q, seed=5, step=6).tokens
    again = verify(logits, drafts, q, seed=torch.tensor([5]), step=torch.tensor([6]))
    assert torch.equal(again.tokens, token)
    for seed, step in ((6, 6), (5, 7), (5 + 2**32, 6), (5, 6 + 2**32), (-5, 6)):
        assert not torch.equal(verify(logits, drafts, q, seed=seed, step=step).tokens, token)


@pytest.mark.parametrize("parents", [None, torch.tensor([0, 0, 1])])
def test_drawn_as_sample_draws(parents: Tensor | None) -> None:
    """The options of `sample` hold for all rows of a request, whose depths are the steps."""
    logits = torch.randn(30, 4, 60)
    k, p = torch.randint(1, 9, (30,)), torch.rand(30)
    depth = torch.tensor([0, 1, 2, 3] if parents is None else [0, 1, 1, 2])
    rows = {name: x[:, None].expand(30, 4) for name, x in (("top_k", k), ("top_p", p))}
    chosen = sample(logits, **rows, min_p=0.01, temperature=0.8, seed=4, step=(depth + 9).expand(30, 4))
    right = chosen.tokens[:, [0, 1, 2] if parents is None else parents]
    drafts = torch.where(torch.rand(30, 3) < 0.8, right, 0)
    got = verify(
        logits, drafts, top_k=k, top_p=p, min_p=0.01, temperature=0.8, seed=4, step=9, parents=parents
    )
    assert same(got, accept_op(AcceptArgs(chosen.tokens, drafts, parents)))
    assert got.accepted.max() > 1


# ---- requests among others, memory ----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["chain", "block", "without probabilities"])
def test_a_request_does_not_depend_on_others(method: Any) -> None:
    call = drawn(40, 3, PART + 101)
    call["step"] = torch.arange(40) * 3
    options: dict[str, Any] = {"method": method}
    if method == "without probabilities":
        call.pop("draft_probs")
        options = {}
    got = verify(**call, **options)
    order = torch.randperm(40)[:11]
    some = verify(**{name: value[order] for name, value in call.items()}, **options)
    assert same(some, Verified(*(each[order] for each in got)))


def test_strided_arguments() -> None:
    call = drawn(20, 3, 35)
    expected = verify(**call)
    padded = torch.full((20, 4, 50), math.nan)
    padded[..., 3:38] = call["logits"]
    call["logits"] = padded[..., 3:38]
    call["drafts"] = call["drafts"].t().contiguous().t().int()
    around = torch.full((20, 3, 50), math.nan)
    around[..., 1:36] = call["draft_probs"]
    call["draft_probs"] = around[..., 1:36]
    assert same(verify(**call), expected)


def test_offsets_have_64_bits() -> None:
    """Rows past 2^31 elements, of the target model and of the drafter: all drafts are near certain."""
    tokens = torch.arange(5) * 7
    logits, q = far_apart(5, 96), far_apart(4, 96)
    logits.zero_()[torch.arange(5), tokens] = 30.0
    q.zero_()[torch.arange(4), tokens[:4]] = 0.9
    for temperature in (1.0, 0.0):
        got = verify(logits[None], tokens[None, :4], q[None], temperature=temperature)
        assert got.tokens.tolist() == [tokens.tolist()]


def test_a_logit_far_above_the_others() -> None:
    """It is in the first tile, and the rest of the row adds nothing."""
    logits, q = torch.zeros(1, 2, PART + 101), torch.zeros(1, 1, PART + 101)
    logits[..., 5], q[..., 5] = 200.0, 0.9
    for temperature in (1.0, 0.0):
        got = verify(logits, torch.tensor([[5]]), q, seed=torch.arange(1), temperature=temperature)
        assert got.tokens.tolist() == [[5, 5]]


def test_the_last_of_many_parts() -> None:
    logits = torch.zeros(1, 2, 65 * PART + 3)
    logits[..., -1] = 200.0
    q = torch.zeros(1, 1, 65 * PART + 3)
    q[..., -1] = 0.9
    for method in ("chain", "block"):
        got = verify(logits, torch.tensor([[65 * PART + 2]]), q, seed=torch.arange(1), method=method)
        assert got.tokens.tolist() == [[65 * PART + 2, 65 * PART + 2]]


def test_tiles_of_gpus() -> None:
    call = drawn(10, 2, 5003)
    got = verify(**call)
    with choosing_for("sm_90"):
        assert same(verify(**call), got)


def test_captured_steps_advance() -> None:
    """A replay reads seeds and steps anew; nothing else changes its tokens."""
    call = drawn(6, 2, PART + 101)
    seed, step = call.pop("seed"), torch.zeros(6, dtype=torch.int64)
    logits, q = call["logits"][:1].expand(6, 3, PART + 101).contiguous() * 0.1, call["draft_probs"]

    def run(logits: Tensor, q: Tensor, seed: Tensor, step: Tensor) -> Verified:
        return verify(logits, call["drafts"], q, seed=seed, step=step)

    captured = weft.capture(run, logits, q, seed, step)
    texts = []
    for _ in range(20):
        got = captured(logits, q, seed, step)
        assert same(Verified(*got), run(logits, q, seed, step))
        texts.append(tuple(got[0].flatten().tolist()))
        step = step + 3
    assert len(set(texts)) == 20
    frozen = [tuple(captured(logits, q, seed, step)[0].flatten().tolist()) for _ in range(2)]
    assert frozen[0] == frozen[1]


@pytest.mark.parametrize("options", [{"method": "block"}, {"parents": torch.tensor([0, 0])}])
def test_compiled(options: dict[str, Any]) -> None:
    call = drawn(5, 2, 70)
    if "parents" in options:
        call.pop("draft_probs")
    compiled = torch.compile(lambda **kwargs: verify(**kwargs), fullgraph=True, backend="aot_eager")
    assert same(compiled(**call, **options), verify(**call, **options))


@pytest.mark.parametrize("count", [0, 2])
def test_no_requests(count: int) -> None:
    logits, drafts = torch.ones(0, count + 1, 7), torch.ones(0, count, dtype=torch.int64)
    for method in ("chain", "block"):
        got = verify(logits, drafts, torch.ones(0, count, 7), method=method)
        assert [each.shape for each in got] == [(0, count + 1), (0,), (0, count + 1)]
    assert verify(logits, drafts).tokens.shape == (0, count + 1)


# ---- mistakes -------------------------------------------------------------------------------------------

Z, D, Q = torch.randn(2, 3, 9), torch.zeros(2, 2, dtype=torch.int64), torch.full((2, 2, 9), 1 / 9)
RULE, INSIDE = Relaxed(2, 1.0, 0), torch.ones(2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: weft.verify(Z, D), "a draw needs seed= and step="),
        (lambda: verify(Z[0], D), r"logits must be \[B, K \+ 1, V\]"),
        (lambda: verify(Z[:, :0], D), r"logits must be \[B, K \+ 1, V\]"),
        (lambda: verify(Z, D[:, :1]), r"drafts must be \[B, K\]"),
        (lambda: verify(Z, D.float()), "drafts must be int32 or int64"),
        (lambda: verify(Z, D, Q[:, :1]), "draft_probs must have the shape"),
        (lambda: verify(Z, D, Q.double()), "draft_probs must be"),
        (lambda: verify(Z, D, Q, parents=torch.tensor([0, 0])), "parents= goes without draft_probs="),
        (lambda: verify(Z, D, Q, top_k=3), "top_k= goes without draft_probs="),
        (lambda: verify(Z, D, method="block"), "needs draft_probs="),
        (lambda: verify(Z, D, Q, method="tree"), "'chain' or 'block'"),
        (lambda: verify(Z, D, parents=torch.tensor([0])), "parents must have the shape"),
        (lambda: verify(Z, D, parents=torch.tensor([0.0, 1.0])), "parents must be int32 or int64"),
        (lambda: verify(Z, D, temperature=-1.0), "temperature must be at least 0"),
        (lambda: verify(Z, D, Q, temperature=torch.ones(3)), "temperature must be a number or"),
        (lambda: verify(Z, D, Q, seed=torch.ones(2)), "seed must be int64"),
        (lambda: verify(Z, D, Q, seed=1.5), "seed must be an integer"),
        (lambda: verify(Z, D, Q, seed=2**63), "seed must fit in 64 bits"),
        (lambda: verify(Z, D, Q, step=torch.ones(3).long()), "step must be a number or"),
        (lambda: verify(Z, D, step=torch.ones(3).long()), "step must be a number or"),
        (lambda: verify(Z, D, seed=torch.ones(3).long()), "seed must be a number or"),
        (lambda: verify(Z, D, relaxed=RULE), "go together"),
        (lambda: verify(Z, D, relaxed=RULE, inside=INSIDE), "temperature=0.0"),
        (lambda: verify(Z, D, relaxed=(2, 1.0, 0), inside=INSIDE, temperature=0.0), "weft.Relaxed"),
        (lambda: verify(Z, D, Q, relaxed=RULE, inside=INSIDE, temperature=0.0), "relaxed= goes without"),
        (lambda: verify(Z, D, relaxed=RULE, inside=INSIDE.long(), temperature=0.0), "inside must be bool"),
        (
            lambda: verify(Z, D, relaxed=RULE, inside=INSIDE, temperature=0.0, parents=torch.tensor([0, 0])),
            "relaxed= verifies chains",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_the_op_refuses_what_it_would_misread() -> None:
    numbers = Number(None, 1.0), Integer(None, 0), Integer(None, 0), False
    for logits, drafts, words in (
        (torch.empty(1, 2, 2**30, device="meta"), D[:1, :1], "tokens are numbered in 32 bits"),
        (Z, D[:, :1], r"drafts must be \[B, K\]"),
        (Z[:, :1], D[:, :0], "draw with weft.sample"),
    ):
        with pytest.raises(ValueError, match=words):
            verify_op(VerifyArgs(logits, drafts, Q, *numbers))

"""Verification of drafts without distributions: chains and trees, greedy and sampled, strict and relaxed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft.ops.sampling.verify.arguments import AcceptArgs, Verified
from weft.ops.sampling.verify.verify import accept_op


def accept(chosen: Any, drafts: Any, parents: Any = None) -> Verified:
    """Call the op with lists or tensors."""
    chosen, drafts = torch.as_tensor(chosen), torch.as_tensor(drafts)
    return accept_op(AcceptArgs(chosen, drafts, None if parents is None else torch.as_tensor(parents)))


def walk(chosen: list[int], drafts: list[int], parents: list[int]) -> tuple[list[int], int, list[int]]:
    """Walk a tree in Python: the children of a row are those after it whose parent it is."""
    path = [0]
    while True:
        row = path[-1]
        children = [
            i + 1
            for i, (draft, parent) in enumerate(zip(drafts, parents, strict=True))
            if parent == row and i + 1 > row and draft == chosen[row] and draft >= 0
        ]
        if not children:
            break
        path.append(children[0])
    rest = [-1] * (len(chosen) - len(path))
    return [chosen[row] for row in path] + rest, len(path) - 1, path + rest


def assert_walks(got: Verified, chosen: Tensor, drafts: Tensor, parents: Tensor) -> None:
    expected = [
        walk(*each)
        for each in zip(chosen.tolist(), drafts.tolist(), parents.expand(drafts.shape).tolist(), strict=True)
    ]
    for value, wanted in zip(got, zip(*expected, strict=True), strict=True):
        assert value.dtype is torch.int64
        assert value.tolist() == list(wanted)


# ---- chains ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_every_pattern_of_right_and_wrong_drafts(count: int) -> None:
    """Greedy: the drafts before the first wrong one are accepted, whatever comes after it."""
    patterns = torch.tensor(list(itertools.product([False, True], repeat=count)))
    logits = torch.randn(len(patterns), count + 1, 11)
    best = logits.argmax(-1)
    drafts = torch.where(patterns, best[:, :-1], (best[:, :-1] + 1) % 11)
    tokens, accepted, path = weft.verify(logits, drafts, temperature=0.0)
    for b, pattern in enumerate(patterns.tolist()):
        n = [*pattern, False].index(False)
        assert accepted[b] == n
        assert tokens[b].tolist() == best[b, : n + 1].tolist() + [-1] * (count - n)
        assert path[b].tolist() == list(range(n + 1)) + [-1] * (count - n)


def test_the_first_of_equal_logits_is_chosen() -> None:
    logits = torch.zeros(1, 2, 5000)
    logits[0, 0, [4700, 33, 4100]] = 1.0
    assert weft.verify(logits, torch.tensor([[33]]), temperature=0.0).tokens.tolist() == [[33, 0]]


@pytest.mark.parametrize("nodes", [1, 2, 64, 65, 66, 300])
def test_chains_of_any_length(nodes: int) -> None:
    chosen = torch.arange(3 * nodes).view(3, nodes)
    drafts = chosen[:, :-1].clone()
    if nodes > 1:
        drafts[1, -1] += 1
        drafts[2, 0] += 1
    got = accept(chosen, drafts.int())
    assert_walks(got, chosen, drafts, torch.arange(nodes - 1))
    assert got.accepted.tolist() == [nodes - 1, max(nodes - 2, 0), 0]


@pytest.mark.parametrize("draft", [-1, 7, 2**31 + 3, -(2**40)])
def test_drafts_that_are_no_tokens_are_not_accepted(draft: int) -> None:
    """Not even after a row without a choice, whose token is -1."""
    for chosen in ([[3, 3]], [[-1, 3]]):
        assert accept(chosen, [[draft]]).accepted.tolist() == [0]
    got = weft.verify(torch.randn(1, 2, 7), torch.tensor([[draft]]), temperature=0.0)
    assert got.accepted.tolist() == [0]


# ---- trees ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("nodes", [5, 64, 150])
def test_trees(nodes: int, shared: bool, dtype: torch.dtype) -> None:
    """Trees of tokens from a few, so that walks are long and siblings are equal."""
    lead = (nodes - 1,) if shared else (40, nodes - 1)
    parents = (torch.rand(lead).sqrt() * torch.arange(1, nodes)).to(dtype)
    chosen, drafts = torch.randint(0, 3, (40, nodes)), torch.randint(0, 3, (40, nodes - 1))
    got = accept(chosen, drafts.to(dtype), parents)
    assert_walks(got, chosen, drafts, parents)
    assert got.accepted.max() > (0 if nodes == 5 else 2)


def test_parents_that_are_no_earlier_row() -> None:
    """Their children are never reached, and the walk ends."""
    parents = torch.tensor([0, 7, 5, -1, 3, 2**31 - 1, 1], dtype=torch.int32)
    chosen, drafts = torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 7, dtype=torch.int64)
    got = accept(chosen, drafts, parents)
    assert got.path.tolist() == [[0, 1, 7, -1, -1, -1, -1, -1]]
    assert_walks(got, chosen, drafts, parents)


def test_the_only_child_that_was_chosen_may_be_the_last() -> None:
    drafts = torch.ones(1, 199, dtype=torch.int64)
    drafts[0, -1] = 5
    chosen = torch.full((1, 200), 5)
    assert accept(chosen, drafts, torch.zeros(199, dtype=torch.int32)).path[0, :3].tolist() == [0, 199, -1]


def test_the_path_lists_rows_to_gather() -> None:
    """Row 0 has the children 1 and 2; row 2 has the child 3."""
    got = accept([[7, 1, 8, 9]], [[5, 7, 8]], [0, 0, 2])
    assert [each.tolist() for each in got] == [[[7, 8, 9, -1]], [2], [[0, 2, 3, -1]]]


# ---- distributions by enumeration -----------------------------------------------------------------------

SHAPES = {"chain": [0, 1, 2], "siblings": [0, 0, 0], "tree": [0, 0, 1], "late": [0, 1, 0]}


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_have_the_distribution_of_the_target(shape: str) -> None:
    """Every outcome of draws in all four rows, with its exact probability. The next token of each context that was
    reached has the target's distribution, which depends on that context."""
    parents, size = SHAPES[shape], 4
    drafts = [1, 2, 1]
    generator = torch.Generator().manual_seed(3)
    p = torch.rand(4, size, generator=generator, dtype=torch.float64) + 0.05
    p /= p.sum(1, keepdim=True)
    outcomes = torch.tensor(list(itertools.product(range(size), repeat=4)))
    weight = p.gather(1, outcomes.t()).prod(0)
    got = accept(outcomes, torch.tensor(drafts).expand(len(outcomes), 3), parents)
    contexts: dict[tuple[int, ...], Tensor] = {}
    for tokens, w in zip(got.tokens.tolist(), weight, strict=True):
        emitted = [token for token in tokens if token >= 0]
        for at, token in enumerate(emitted):
            counted = contexts.setdefault(tuple(emitted[:at]), torch.zeros(size, dtype=torch.float64))
            counted[token] += w
    rows = {(): 0}
    for i, parent in enumerate(parents):
        above = next(context for context, row in rows.items() if row == parent)
        rows.setdefault((*above, drafts[i]), i + 1)
    assert contexts.keys() == rows.keys()
    for context, counted in contexts.items():
        torch.testing.assert_close(counted / counted.sum(), p[rows[context]], rtol=1e-12, atol=0.0)
    # A draft is accepted with the target's probability of it.
    torch.testing.assert_close(contexts[drafts[0],].sum(), p[0, drafts[0]], rtol=1e-12, atol=0.0)


# ---- speculation changes no token -----------------------------------------------------------------------

VOCABULARY, REQUESTS = 40, 12
MODEL = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(5)) * 2
SEEDS = torch.arange(REQUESTS) * 2**40 - 3


def decoded(count: int, temperature: Any) -> Tensor:
    """Return the tokens of requests, one step after another; the model sees the last token."""
    tokens = [torch.zeros(REQUESTS, dtype=torch.int64)]
    for step in range(count):
        logits = MODEL[tokens[-1]]
        tokens.append(weft.sample(logits, temperature=temperature, seed=SEEDS, step=step).tokens)
    return torch.stack(tokens[1:], 1)


@pytest.mark.parametrize("temperature", [0.0, 0.6, torch.linspace(0.0, 1.1, REQUESTS)])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_speculation_with_chains_changes_no_token(count: int, temperature: Any) -> None:
    """Each request has its own place in its text, as its own drafts are accepted."""
    wanted = decoded(20, temperature)
    at, last = torch.zeros(REQUESTS, dtype=torch.int64), torch.zeros(REQUESTS, dtype=torch.int64)
    texts: list[list[int]] = [[] for _ in range(REQUESTS)]
    most = 0
    while min(map(len, texts)) < 20:
        ahead = torch.nn.functional.pad(wanted, (0, 30))[
            torch.arange(REQUESTS)[:, None], at[:, None] + torch.arange(count)
        ]
        drafts = torch.where(torch.rand(ahead.shape) < 0.7, ahead, torch.randint(0, VOCABULARY, ahead.shape))
        logits = MODEL[torch.cat([last[:, None], drafts], 1)]
        got = weft.verify(logits, drafts, temperature=temperature, seed=SEEDS, step=at)
        for text, tokens, n in zip(texts, got.tokens.tolist(), got.accepted.tolist(), strict=True):
            text += tokens[: n + 1]
        last = got.tokens.gather(1, got.accepted[:, None])[:, 0]
        at += got.accepted + 1
        most = max(most, int(got.accepted.max()))
    assert most == count
    assert [text[:20] for text in texts] == wanted.tolist()


def test_speculation_with_trees_changes_no_token() -> None:
    """Of every request another tree, whose nodes are right tokens of their depth or wrong ones."""
    wanted, nodes = decoded(12, 0.8), 30
    parents = (torch.rand(REQUESTS, nodes - 1).sqrt() * torch.arange(1, nodes)).long()
    depth = torch.zeros(REQUESTS, nodes, dtype=torch.int64)
    for i in range(nodes - 1):
        depth[:, i + 1] = depth.gather(1, parents[:, i : i + 1])[:, 0] + 1
    right = wanted.gather(1, (depth[:, 1:] - 1).clamp(max=11))
    drafts = torch.where(torch.rand(right.shape) < 0.8, right, torch.randint(0, VOCABULARY, right.shape))
    logits = MODEL[torch.nn.functional.pad(drafts, (1, 0))]
    got = weft.verify(logits, drafts, temperature=0.8, seed=SEEDS, step=0, parents=parents)
    assert got.accepted.min() >= 0
    assert got.accepted.max() > 3
    for b, n in enumerate(got.accepted.tolist()):
        assert got.tokens[b, : n + 1].tolist() == wanted[b, : n + 1].tolist()
        assert depth[b, got.path[b, : n + 1]].tolist() == list(range(n + 1))


# ---- relaxed acceptance ---------------------------------------------------------------------------------


def test_relaxed_acceptance() -> None:
    """A Python loop: near the largest logit, inside a span, up to the token that closes it."""
    rule = weft.Relaxed(top_k=3, margin=1.5, close=2)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(400, 5, 9, generator=generator)
    logits[:, :, 5] = logits[:, :, 4]  # of equal logits the first is in front
    order = logits.argsort(stable=True, dim=-1, descending=True)
    drafts = order[:, :-1].gather(-1, torch.randint(0, 4, (400, 4, 1), generator=generator))[..., 0]
    drafts[::9, 2] = -1
    inside = torch.rand(400, generator=generator) < 0.8
    got = weft.verify(logits, drafts, temperature=0.0, relaxed=rule, inside=inside)
    lengths = set()
    for b in range(400):
        relaxed, n, tokens = bool(inside[b]), 0, []
        for i in range(4):
            draft, z = int(drafts[b, i]), logits[b, i]
            near = draft >= 0 and (z.max() - z[draft] <= 1.5).item() and draft in order[b, i, :3].tolist()
            if draft != order[b, i, 0] and not (relaxed and near):
                break
            n, tokens = n + 1, [*tokens, draft]
            relaxed &= draft != 2
        tokens.append(int(order[b, n, 0]))
        assert got.accepted[b] == n
        assert got.tokens[b, : n + 1].tolist() == tokens
        lengths.add(n)
    assert lengths == {0, 1, 2, 3, 4}
    strict = weft.verify(logits, drafts, temperature=0.0)
    assert (got.accepted >= strict.accepted).all()
    assert (got.accepted > strict.accepted).any()

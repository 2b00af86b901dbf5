"""Kernels of the verification of drafts; `verify` documents the formulas.

Rows are cut into parts of a fixed length, a program for each. The results of parts are merged in order, so that the
bits of a request depend neither on other requests nor on their number.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ....language import tl, triton
from ....runtime import kernel
from ....tiles.exponentials import exp_below
from ....tiles.noise import ACCEPT, GUMBEL, RESIDUAL, gumbel, random_bits, random_tile, uniform
from ....tiles.scores import key_of
from ....tiles.softmax import LOWEST
from ..loads import IntegerArgument, NumberArgument, load_integer, load_number
from .arguments import PART

LENGTH = tl.constexpr(PART)

# ---- tokens that were chosen ----------------------------------------------------------------------------


@kernel
def accept_kernel(
    chosen_ptr,  # int64 [requests, nodes]
    drafts_ptr,  # int32 or int64 [requests, nodes - 1], or None if there is one node
    parents_ptr,  # int32 or int64 [requests, nodes - 1], or None for a chain
    tokens_ptr,  # int64 [requests, nodes]
    accepted_ptr,  # int64 [requests]
    path_ptr,  # int64 [requests, nodes]
    nodes,
    parents_stride,
    BLOCK: tl.constexpr,
):
    """Walk from row 0 of a request to the first child whose token was chosen, until there is none. A child comes after
    its parent, so the walk ends."""
    request = tl.program_id(0).to(tl.int64)
    off, drafts_off, parents_off = request * nodes, request * (nodes - 1), request * parents_stride
    row, length = request * 0, request * 0
    for at in range(nodes):
        inside = (row >= 0) & (row < nodes)
        token = tl.load(chosen_ptr + off + row, mask=inside, other=-1)
        tl.store(tokens_ptr + off + at, token)
        tl.store(path_ptr + off + at, row)
        length += inside.to(tl.int64)
        child = request * 0 + nodes
        if drafts_ptr is not None:
            for start in range(tl.where(inside & (token >= 0), row, nodes), nodes - 1, BLOCK):
                draft = start + tl.arange(0, BLOCK)  # [BLOCK]
                exists = (draft >= 0) & (draft < nodes - 1)
                parent = draft
                if parents_ptr is not None:
                    parent = tl.load(parents_ptr + parents_off + draft, mask=exists, other=-1)
                drafted = tl.load(drafts_ptr + drafts_off + draft, mask=exists, other=-1)
                follows = exists & (parent == row) & (drafted == token)
                child = tl.minimum(child, tl.min(tl.where(follows, draft + 1, nodes), axis=0))
        row = tl.where(child < nodes, child, -1)
    tl.store(accepted_ptr + request, length - 1)


# ---- keys: scores and their tokens, in an order ---------------------------------------------------------

NONE = tl.constexpr(-(2**63))  # no token
_MASK = tl.constexpr(2**31 - 1)


@triton.jit
def _keys(score, token, preferred):
    """Return int64 keys whose order is that of the scores, and among equal scores that of descending tokens. Any
    preferred token comes before all others. NaN and minus infinity have none."""
    tier = tl.where(preferred, tl.cast(2**62, tl.int64), tl.cast(-(2**62), tl.int64))
    key = (key_of(score).to(tl.int64) << 31) + (_MASK - token.to(tl.int64)) + tier
    return tl.where(score > -float("inf"), key, NONE)


@triton.jit
def _token(key):
    """Return the token of the largest key; -1 if there is none."""
    return tl.where(key == NONE, -1, _MASK - (key & _MASK))


# ---- statistics of rows ---------------------------------------------------------------------------------


class Parts(NamedTuple):
    """Statistics of the parts of rows, [rows, number] each."""

    largest: Tensor  # fp32: m
    total: Tensor  # fp32: sum of exp(z - m), NaN if a z is
    top: Tensor  # int64: key of the largest logit
    number: int


class Drafts(NamedTuple):
    """Drafts of requests, and the distributions from which they were drawn."""

    ptr: Tensor  # int32 or int64 [requests, nodes - 1]
    probs: Tensor  # [requests * (nodes - 1), cols]
    stride: int  # of the rows of probs


class Target(NamedTuple):
    """Logits of the target model, and the random numbers of the requests."""

    logits: Tensor  # [requests * nodes, cols]
    stride: int
    nodes: int
    temperature: NumberArgument
    seed: IntegerArgument
    step: IntegerArgument


@triton.jit
def _load_logits(target, row, col, exists, t, ALIGN: tl.constexpr):
    """Load scaled logits of a row, minus infinity where they do not exist."""
    off = tl.multiple_of(row * target.stride, ALIGN)
    z = tl.load(target.logits + off + col, mask=exists, other=-float("inf")).to(tl.float32)
    return z * (1.0 / tl.where(t > 0.0, t, 1.0))  # the bits of `sample`


@kernel
def statistics_kernel(
    target: Target,
    parts: Parts,
    cols,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,  # divides cols and the strides of rows
):
    """Compute the statistics of a part of a row."""
    cols = (cols // ALIGN) * ALIGN
    row, part = (tl.program_id(0) // parts.number).to(tl.int64), tl.program_id(0) % parts.number
    t = load_number(target.temperature, row // target.nodes)
    first = part * LENGTH
    m, total, top = LOWEST + 0.0, 0.0, tl.cast(NONE, tl.int64)
    for start in range(0, tl.minimum(cols - first, LENGTH), TILE):
        col = first + start + tl.arange(0, TILE)  # [TILE]
        z = _load_logits(target, row, col, col < cols, t, ALIGN)
        top = tl.maximum(top, tl.max(_keys(z, col, col >= 0), axis=0))
        m_new = tl.maximum(m, tl.max(z, axis=0))
        total = total * exp_below(m, m_new) + tl.sum(exp_below(z, m_new), axis=0)
        m = m_new
    at = row * parts.number + part
    tl.store(parts.largest + at, m)
    tl.store(parts.total + at, total)
    tl.store(parts.top + at, top)


@triton.jit
def _statistics(parts, row, LANES: tl.constexpr):
    """Return (m, total, top) of a row from its parts."""
    m, total, top = LOWEST + 0.0, 0.0, tl.cast(NONE, tl.int64)
    for start in range(0, parts.number, LANES):
        part = start + tl.arange(0, LANES)  # [LANES]
        exists = part < parts.number
        m_i = tl.load(parts.largest + row * parts.number + part, mask=exists, other=LOWEST)
        m = tl.maximum(m, tl.max(m_i, axis=0))
    for start in range(0, parts.number, LANES):
        part = start + tl.arange(0, LANES)
        exists = part < parts.number
        at = row * parts.number + part
        m_i = tl.load(parts.largest + at, mask=exists, other=LOWEST)
        total += tl.sum(tl.load(parts.total + at, mask=exists, other=0.0) * exp_below(m_i, m), axis=0)
        top = tl.maximum(top, tl.max(tl.load(parts.top + at, mask=exists, other=NONE), axis=0))
    return m, total, top


@triton.jit
def _load_draft(drafts, request, at, nodes, cols):
    """Return (token, whether it is one) of a draft; row `nodes - 1` has none."""
    exists = (at >= 0) & (at < nodes - 1)
    token = tl.load(drafts.ptr + request * (nodes - 1) + at, mask=exists, other=-1).to(tl.int64)
    real = (token >= 0) & (token < cols)
    return tl.where(real, token, 0), real


@triton.jit
def _probabilities(target, drafts, parts, request, at, cols, t, LANES: tl.constexpr):
    """Return (draft, p, q): the probability of a draft under the target model, 0 if the draft is no token, and under
    its own distribution, which does not count at temperature 0."""
    token, real = _load_draft(drafts, request, at, target.nodes, cols)
    row = request * target.nodes + at
    m, total, top = _statistics(parts, row, LANES)
    z = _load_logits(target, row, token, real, t, 1)
    p = tl.where(t > 0.0, tl.div_rn(exp_below(z, m), total), (_token(top) == token).to(tl.float32))
    q_off = (request * (target.nodes - 1) + at) * drafts.stride
    q = tl.load(drafts.probs + q_off + token, mask=real, other=0.0).to(tl.float32)
    return token, tl.where(real, p, 0.0), tl.where(t > 0.0, q, 1.0)


@triton.jit
def _uniform(target, request, at, token):
    """Return the number that decides about a draft."""
    seed, step = load_integer(target.seed, request), load_integer(target.step, request)
    return uniform(random_bits(seed, step + at, token, ACCEPT))


# ---- residuals ------------------------------------------------------------------------------------------


@kernel
def residual_kernel(
    target: Target,
    drafts: Drafts,
    parts: Parts,
    best_ptr,  # int64 [requests, parts], or [rows, parts] if JOINT
    accepted_ptr,  # int64 [requests], or None if JOINT
    weight_ptr,  # fp32 [rows], or None unless JOINT
    mass_ptr,  # fp32 [rows, parts], or None unless JOINT
    cols,
    JOINT: tl.constexpr,  # drafts are verified as a block
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Draw from a part of a row's residual: the row after the accepted drafts, or if JOINT every row."""
    cols = (cols // ALIGN) * ALIGN
    item, part = (tl.program_id(0) // parts.number).to(tl.int64), tl.program_id(0) % parts.number
    request = item // target.nodes if JOINT else item
    t = load_number(target.temperature, request)
    weight = 1.0
    if JOINT:
        at = (item % target.nodes).to(tl.int32)
        for i in range(at):
            _, p, q = _probabilities(target, drafts, parts, request, i, cols, t, LANES)
            ratio = tl.where(q > 0.0, tl.div_rn(weight * p, tl.where(q > 0.0, q, 1.0)), 0.0)
            weight = tl.where(ratio >= 1.0, 1.0, tl.where(ratio > 0.0, ratio, 0.0))
        tl.store(weight_ptr + item, weight, mask=part == 0)
    else:
        at = part * 0
        for i in range(target.nodes - 1):
            if at == i:
                token, p, q = _probabilities(target, drafts, parts, request, i, cols, t, LANES)
                is_accepted = (q > 0.0) & ((p >= q) | (_uniform(target, request, i, token) * q < p))
                at += is_accepted.to(tl.int32)
        tl.store(accepted_ptr + request, at.to(tl.int64), mask=part == 0)
    row = request * target.nodes + at
    _, drafted = _load_draft(drafts, request, at, target.nodes, cols)
    m, total, _ = _statistics(parts, row, LANES)
    q_off = tl.multiple_of((request * (target.nodes - 1) + at) * drafts.stride, ALIGN)
    seed = load_integer(target.seed, request) + tl.zeros((1,), tl.int64)
    step = load_integer(target.step, request) + at + tl.zeros((1,), tl.int64)
    stream = tl.where(drafted, RESIDUAL, GUMBEL).to(tl.uint32)
    first = part * LENGTH
    best, mass = tl.cast(NONE, tl.int64), 0.0
    for start in range(0, tl.minimum(cols - first, LENGTH), TILE):
        col = first + start + tl.arange(0, TILE)  # [TILE]
        exists = col < cols
        z = _load_logits(target, row, col, exists, t, ALIGN)
        noise = tl.reshape(gumbel(random_tile(seed, step, first + start, TILE, stream)), (TILE,))
        q = tl.load(drafts.probs + q_off + col, mask=exists & drafted, other=0.0).to(tl.float32)
        q = tl.where(t > 0.0, q, 1.0)
        r = weight * tl.div_rn(exp_below(z, m), total) - q
        positive = exists & (r > 0.0)
        mass += tl.sum(tl.where(positive, r, 0.0), axis=0)
        # Tokens without a residual are drawn from p if no token has one.
        score = tl.where(drafted & positive, tl.log(tl.where(positive, r, 1.0)), z)
        score = tl.where(t > 0.0, score + noise, z)
        preferred = positive | (drafted == 0)
        best = tl.maximum(best, tl.max(_keys(score, col, preferred), axis=0))
    tl.store(best_ptr + item * parts.number + part, best)
    if JOINT:
        tl.store(mass_ptr + item * parts.number + part, mass)


# ---- results --------------------------------------------------------------------------------------------


@kernel
def verify_kernel(
    target: Target,
    drafts: Drafts,
    best_ptr,  # int64 [requests, parts], or [rows, parts] if JOINT
    weight_ptr,  # fp32 [rows], or None unless JOINT
    mass_ptr,  # fp32 [rows, parts], or None unless JOINT
    tokens_ptr,  # int64 [requests, nodes]
    accepted_ptr,  # int64 [requests]; the result of the residual kernel unless JOINT
    path_ptr,  # int64 [requests, nodes]
    cols,
    parts,
    JOINT: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the results of a request."""
    request = tl.program_id(0).to(tl.int64)
    nodes = target.nodes
    lane = tl.arange(0, LANES)
    if JOINT:
        accepted = request * 0
        for length in range(1, nodes):
            row = request * nodes + length
            mass = 0.0
            for start in range(0, parts, LANES):
                part = start + lane
                mass += tl.sum(tl.load(mass_ptr + row * parts + part, mask=part < parts, other=0.0), axis=0)
            weight = tl.load(weight_ptr + row)
            _, drafted = _load_draft(drafts, request, length, nodes, cols)
            share = tl.div_rn(mass, tl.where(weight < 1.0, mass + (1.0 - weight), 1.0))
            chance = tl.where(weight < 1.0, tl.where(drafted, share, weight), 1.0)
            last, _ = _load_draft(drafts, request, length - 1, nodes, cols)
            passes = _uniform(target, request, length - 1, last) < chance
            accepted = tl.where(passes, length, accepted).to(tl.int64)
        tl.store(accepted_ptr + request, accepted)
        item = request * nodes + accepted
    else:
        accepted = tl.load(accepted_ptr + request)
        item = request
    best = tl.cast(NONE, tl.int64)
    for start in range(0, parts, LANES):
        part = start + lane
        key = tl.load(best_ptr + item * parts + part, mask=part < parts, other=NONE)
        best = tl.maximum(best, tl.max(key, axis=0))
    for start in range(0, nodes, BLOCK):
        at = start + tl.arange(0, BLOCK)  # [BLOCK]
        exists = (at < accepted) & (at < nodes - 1)
        draft = tl.load(drafts.ptr + request * (nodes - 1) + at, mask=exists, other=-1).to(tl.int64)
        token = tl.where(at == accepted, _token(best), draft)
        tl.store(tokens_ptr + request * nodes + at, token, mask=at < nodes)
        path = tl.where(at <= accepted, at, -1).to(tl.int64)
        tl.store(path_ptr + request * nodes + at, path, mask=at < nodes)

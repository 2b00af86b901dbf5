"""Device functions that find a program's sequence and the keys that its queries see.

Starts and lengths may hold any integers. Kernels replace starts by their running maximum, clamped to the number of
tokens, and clamp lengths to the keys of their sequence, so that no address leaves a tensor. A sequence whose starts
change this way, or whose length exceeds its keys, is unsound: its results and gradients are NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...language import tl, triton

CHUNK = tl.constexpr(128)  # starts that a program loads at a time


class Lengths(NamedTuple):
    """Lengths of sequences. Packed sequences follow each other: sequence s begins at token starts[s]."""

    q_starts: Tensor | None  # [number + 1], or None: each sequence has q queries and k keys
    k_starts: Tensor | None
    kv_lengths: Tensor | None  # [number]: keys that each sequence uses, or None: all of them
    prefix_lengths: Tensor | None  # [number]: first tokens of each sequence, which see each other; or None
    kv_limits: Tensor | None  # [batch, q]: a query sees none of the keys from here on; or None
    number: int  # of sequences
    q: int  # queries of a sequence; of all sequences if packed
    k: int


class Band(NamedTuple):
    """Band of keys that a query sees, from `left` before its own to `right` after it."""

    left: int
    right: int
    lower: int  # 1: the last query is aligned with the last key; 0: the first query with the first key


class Sequence(NamedTuple):
    """Sequence, its location, and a tile of its queries or keys."""

    number: Any  # int64
    batch: Any  # equal to number in unpacked tensors; 0 in packed ones
    q_start: Any  # int64, first token in packed tensors
    k_start: Any
    q: Any  # number of queries, int32
    k: Any
    first: Any  # first row of the tile, counted in the sequence, int32
    exist: Any  # number of tile rows inside the tensor
    offset: Any  # query i's own key is i + offset
    prefix: Any  # number of first keys whose own queries see them all
    sound: Any  # starts and length are in range


# ---- packed sequences -----------------------------------------------------------------------------------


@triton.jit
def _clamped(start, tokens):
    return tl.minimum(tl.maximum(start.to(tl.int64), 0), tokens)


@triton.jit
def _count(begin, end, tokens):
    """Count the tokens from `begin`, which is in range, to `end`, which may be any integer."""
    return tl.minimum(tl.maximum(_clamped(end, tokens) - begin, 0), tokens - begin)


@triton.jit
def _span(number, starts, tokens):
    """Return (first token, number of tokens, whether the starts were in range) of packed sequence `number`."""
    begin = number * 0
    for first in range(0, number.to(tl.int32) + 1, CHUNK):
        index = first + tl.arange(0, CHUNK)
        start = tl.load(starts + index, mask=index <= number, other=0)
        begin = tl.maximum(begin, tl.max(_clamped(start, tokens), axis=0))
    begin = _clamped(begin, tokens)  # no effect; the prover cannot see the bound through the loop
    start, end = tl.load(starts + number), tl.load(starts + number + 1)
    count = _count(begin, end, tokens)
    return begin, count, (start == begin) & (end == begin + count)


@triton.jit
def _tile_span(tile, starts, sequences, tokens, ROWS: tl.constexpr):
    """Return (sequence, its first token, its number of tokens, whether the starts were in range, first row of the tile,
    number of its rows) of a tile of ROWS packed tokens.

    Tiles start at sequence starts. Two groups of tokens belong to no sequence: group 0 before the first sequence, which
    is group 1, and the last group, after the last sequence. The first tile of group g is tile start_g // ROWS + g, so
    cdiv(tokens, ROWS) + sequences + 1 tiles cover all tokens. Tile numbers between groups have no rows.
    """
    last = sequences + 1
    following = tl.minimum(tile, last) + 1  # first group that starts after this tile
    begin = tile * 0
    for first in range(0, last, CHUNK):
        group = first + 1 + tl.arange(0, CHUNK)
        exists = group <= last
        start = _clamped(tl.load(starts + group - 1, mask=exists, other=0), tokens)
        later = tl.maximum(group, tile - start // ROWS + 1)
        following = tl.minimum(following, tl.min(tl.where(exists, later, last + 1), axis=0))
        begin = tl.maximum(begin, tl.max(tl.where(exists & (group < following), start, 0), axis=0))
    begin, group = _clamped(begin, tokens), _clamped(following - 1, last)  # no effect; for the prover
    start = tl.load(starts + group - 1, mask=group > 0, other=0)
    end = tl.load(starts + group, mask=group < last, other=0)
    count = tl.where(group < last, _count(begin, end, tokens), tokens - begin)
    sound = (start == begin) & (end == begin + count)
    skipped = tl.minimum(tl.maximum(tile - begin // ROWS - group, 0) * ROWS, count)
    return group - 1, begin, count, sound, begin + skipped, tl.minimum(count - skipped, ROWS)


@triton.jit
def _used(number, keys, lengths):
    """Return (number of keys that a sequence uses, whether it has that many), for `keys` in int64."""
    if lengths.kv_lengths is None:
        return keys.to(tl.int32), number == number
    else:
        length = tl.load(lengths.kv_lengths + number).to(tl.int64)
        return tl.minimum(tl.maximum(length, 0), keys).to(tl.int32), length <= keys


@triton.jit
def _prefix(number, k, lengths):
    """Return how many of k keys belong to the prefix of a sequence."""
    if lengths.prefix_lengths is None:
        return k * 0
    else:
        return tl.minimum(tl.maximum(tl.load(lengths.prefix_lengths + number), 0), k).to(tl.int32)


@triton.jit
def sequence_of(number, lengths, band):
    """Return sequence `number` with one tile of all its queries."""
    if lengths.q_starts is None:
        batch, q_start, k_start, sound = number, number * 0, number * 0, number == number
        q, keys = q_start + lengths.q, k_start + lengths.k
    else:
        batch = number * 0
        q_start, q, q_sound = _span(number, lengths.q_starts, lengths.q)
        k_start, keys, k_sound = _span(number, lengths.k_starts, lengths.k)
        sound = q_sound & k_sound
    k, enough = _used(number, keys, lengths)
    q = q.to(tl.int32)
    prefix = _prefix(number, k, lengths)
    return Sequence(
        number, batch, q_start, k_start, q, k, q * 0, q, (k - q) * band.lower, prefix, sound & enough
    )


@triton.jit
def sequence_at(tile, rest, lengths, band, OF_KEYS: tl.constexpr, ROWS: tl.constexpr):
    """Return the sequence of a tile of queries or keys. `rest` is its number if nothing is packed."""
    starts = lengths.k_starts if OF_KEYS else lengths.q_starts
    size = lengths.k if OF_KEYS else lengths.q
    if starts is None:
        batch = rest.to(tl.int64)
        number = batch
        q_start, k_start = batch * 0, batch * 0
        q, keys = q_start + lengths.q, k_start + lengths.k
        first = (tile * ROWS).to(tl.int32)
        exist = tl.minimum(size.to(tl.int32) - first, ROWS)
        sound = number == number
        in_sequence = sound
    else:
        number, begin, count, sound, row, exist = _tile_span(
            tile.to(tl.int64), starts, lengths.number, size, ROWS
        )
        # Tokens before the first sequence and after the last form an empty sequence.
        in_sequence = (number >= 0) & (number < lengths.number)
        number = tl.minimum(tl.maximum(number, 0), lengths.number - 1)
        batch = number * 0
        if OF_KEYS:
            q_start, q, other_sound = _span(number, lengths.q_starts, lengths.q)
            k_start, keys = begin, count
        else:
            q_start, q = begin, count
            k_start, keys, other_sound = _span(number, lengths.k_starts, lengths.k)
        sound &= other_sound
        q, keys = tl.where(in_sequence, q, 0), tl.where(in_sequence, keys, 0)
        first = (row - begin).to(tl.int32)
        exist = exist.to(tl.int32)
    k, enough = _used(number, keys, lengths)
    q = q.to(tl.int32)
    sound = (sound & enough) | (in_sequence == 0)
    prefix = _prefix(number, k, lengths)
    return Sequence(number, batch, q_start, k_start, q, k, first, exist, (k - q) * band.lower, prefix, sound)


@triton.jit
def or_nan(x, sequence, lengths):
    """Return x, or NaN for an unsound sequence."""
    if lengths.q_starts is None and lengths.kv_lengths is None:
        return x
    else:
        return tl.where(sequence.sound, x, float("nan"))


# ---- visibility -----------------------------------------------------------------------------------------


@triton.jit
def sees(query, key, sequence, band, BANDED: tl.constexpr):
    """Return which queries see which keys; both are indices in their sequence and broadcast against each other."""
    seen = key < sequence.k
    if BANDED:
        own = query + sequence.offset
        seen = seen & (key <= own + band.right) & (key >= own - band.left)
    return seen


@triton.jit
def bounds_of(query, sequence, lengths, band, BANDED: tl.constexpr):
    """Return (begin, end) of the keys that each of the queries [R] sees; none for a query that does not exist."""
    begin, end = query * 0, query * 0 + sequence.k
    own = query + sequence.offset
    if BANDED:
        begin, end = tl.maximum(own - band.left, 0), tl.minimum(own + band.right + 1, sequence.k)
    if lengths.prefix_lengths is not None:
        inside = (own >= 0) & (own < sequence.prefix)
        begin, end = tl.where(inside, 0, begin), tl.where(inside, tl.maximum(end, sequence.prefix), end)
    exists = query < sequence.q
    if lengths.kv_limits is not None:
        off = sequence.batch * lengths.q + sequence.q_start + query
        limit = tl.load(lengths.kv_limits + off, mask=exists, other=0)
        end = tl.minimum(end, tl.minimum(tl.maximum(limit, 0), sequence.k).to(tl.int32))
    return begin, tl.where(exists, end, 0)


@triton.jit
def keys_between(begin, end, k):
    """Return what `keys_seen` does, from the bounds of each query [R]."""
    first = tl.min(tl.where(end > begin, begin, k), axis=0)
    return first, tl.max(end, axis=0), tl.max(begin, axis=0), tl.min(end, axis=0)


@triton.jit
def keys_seen(sequence, band, rows, BANDED: tl.constexpr):
    """Return (begin, end, all_begin, all_end) for a tile of `rows` queries: some query sees keys in [begin, end) only,
    and every query sees all keys in [all_begin, all_end)."""
    if BANDED:
        first = sequence.first + sequence.offset  # own key of the first query
        last = tl.minimum(sequence.first + rows, sequence.q) - 1 + sequence.offset
        begin = tl.maximum(first - band.left, 0)
        end = tl.minimum(last + band.right + 1, sequence.k)
        return begin, end, last - band.left, tl.minimum(first + band.right + 1, sequence.k)
    else:
        return sequence.first * 0, sequence.k, sequence.first * 0, sequence.k


@triton.jit
def keys_seen_by_any(sequence, band, BANDED: tl.constexpr):
    """Return (begin, end) of the keys that some query of the whole sequence sees."""
    if BANDED:
        begin = tl.maximum(sequence.offset - band.left, 0)
        return begin, tl.minimum(sequence.q + sequence.offset + band.right, sequence.k)
    else:
        return sequence.k * 0, sequence.k


@triton.jit
def queries_seeing(sequence, lengths, band, ROWS: tl.constexpr, BANDED: tl.constexpr):
    """Return (begin, end, all_begin, all_end) of the queries that see keys of a tile, as `keys_seen` does."""
    if BANDED:
        first = sequence.first - sequence.offset  # query whose own key is the first of the tile
        last = tl.minimum(sequence.first + ROWS, sequence.k) - 1 - sequence.offset
        begin = tl.maximum(first - band.right, 0)
        end = tl.minimum(last + band.left + 1, sequence.q)
        if lengths.prefix_lengths is not None:
            # The queries of the prefix see all its keys.
            inside = sequence.first < sequence.prefix
            begin = tl.where(inside, tl.minimum(begin, tl.maximum(-sequence.offset, 0)), begin)
            last_inside = tl.minimum(sequence.prefix - sequence.offset, sequence.q)
            end = tl.where(inside, tl.maximum(end, last_inside), end)
        return begin, end, last - band.right, first + band.left + 1
    else:
        return sequence.first * 0, sequence.q, sequence.first * 0, sequence.q


@triton.jit
def queries_between(
    begin, end, sequence, lengths, band, ROWS: tl.constexpr, STEP: tl.constexpr, BANDED: tl.constexpr
):
    """Return [begin, end) without the queries at its ends that see no key of a tile, STEP at a time."""
    first, last = end, begin
    for start in range(begin // STEP * STEP, end, STEP):
        query = start + tl.arange(0, STEP)
        key, key_end = bounds_of(query, sequence, lengths, band, BANDED)  # [STEP]
        seeing = (key < key_end) & (key < sequence.first + ROWS) & (key_end > sequence.first)
        first = tl.minimum(first, tl.min(tl.where(seeing, query, end), axis=0))
        last = tl.maximum(last, tl.max(tl.where(seeing, query + 1, begin), axis=0))
    # No effect; the prover cannot see the bounds through the loop.
    return tl.maximum(tl.minimum(first, end), begin), tl.maximum(tl.minimum(last, end), begin)

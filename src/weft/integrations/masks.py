"""Attention masks of transformers as arguments of `weft.attention`.

A transformers model asks a *mask interface* for its masks, once per forward, and hands the result to every attention
layer. Most masks are a band: each query sees the keys up to its own, those of a window, or all of them, minus padding
on either side, or within its own sequence of a packed batch. `attention_mask` recognizes these from the mask functions
of transformers and returns a `BandMask`, which holds no matrix. Everything else becomes a plain dense mask.

Masks follow transformers' eager convention, which every model supports: 0 where a query sees a key, the lowest finite
value elsewhere. A model that reads or edits its mask gets exactly that, as a plain tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

MaskFunction = Callable[..., Any]

# ---- the mask -------------------------------------------------------------------------------------------


class Visible(NamedTuple):
    """Keys that queries see, as arguments of `weft.attention`. All tensors are int32."""

    left: int | None  # keys seen before a query's own key, None for all
    right: int | None  # keys seen after it, None for all
    lower_right: bool  # if so the last query's own key is the last key, else the first query's is the first
    q_starts: Tensor | None = None  # [sequences + 1], in batch * queries
    k_starts: Tensor | None = None  # [sequences + 1], in batch * keys
    kv_lengths: Tensor | None = None  # [batch]

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `weft.attention`; with `cu_seqlens` it takes packed heads."""
        arguments: dict[str, Any] = {"window": (self.left, self.right)}
        arguments["causal_align"] = "lower_right" if self.lower_right else "upper_left"
        if self.q_starts is not None:
            arguments |= {"cu_seqlens": self.q_starts, "cu_seqlens_k": self.k_starts}
        if self.kv_lengths is not None:
            arguments["kv_lengths"] = self.kv_lengths
        return arguments

    def is_everything(self) -> bool:
        """Return whether every query sees every key."""
        return self.is_plain() and (self.left, self.right) == (None, None)

    def is_plain(self) -> bool:
        """Return whether samples are neither packed nor padded."""
        return self.q_starts is None and self.kv_lengths is None

    def dense(self, batch: int, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return the rule as a bool mask [batch, 1, queries, keys]."""
        query, key = torch.arange(queries, device=device), torch.arange(keys, device=device)
        if self.q_starts is None or self.k_starts is None:
            used = torch.full((1,), keys, device=device) if self.kv_lengths is None else self.kv_lengths
            own = query + (used[:, None] - queries) * self.lower_right  # [batch, queries]
            position, seen = key.expand(1, keys), (key < used[:, None])[:, None, :]
        else:
            q_of, q_position, q_length = _sequences(self.q_starts, batch, queries, device)
            k_of, position, _ = _sequences(self.k_starts, batch, keys, device)
            k_length = self.k_starts.diff()[q_of]
            own = q_position + (k_length - q_length) * self.lower_right
            seen = q_of[:, :, None] == k_of[:, None, :]
        distance = position[:, None, :] - own[:, :, None]
        if self.left is not None:
            seen = seen & (distance >= -self.left)
        if self.right is not None:
            seen = seen & (distance <= self.right)
        return seen.expand(batch, queries, keys)[:, None]


def _sequences(
    starts: Tensor, batch: int, length: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's sequence, its position there and the sequence's length, all [batch, length]."""
    token = torch.arange(batch * length, device=device)
    sequence = torch.searchsorted(starts[1:].long(), token, right=True)
    parts = (sequence, token - starts[sequence], starts.diff()[sequence])
    return tuple(part.view(batch, length) for part in parts)  # type: ignore[return-value]


class BandMask(torch.Tensor):
    """Additive mask [batch, 1, queries, keys] that becomes dense only for code that reads it.

    `attention_forward` takes the rule in `visible`, or the bools in `seen` of a mask without one. Any op sees the mask
    of eager attention and returns plain tensors. The helpers are functions rather than methods because torch.compile
    only looks into functions.
    """

    visible: Visible | None
    seen: Tensor | None  # bool, of the same shape
    is_banded: bool  # within packed sequences only a window hides keys, not padding or chunks
    local_size: int | None  # tokens of the window or chunk; compiled graphs hide which of the two it is
    has_views: bool  # code that has a view of the dense mask may write to it
    _dense: Tensor | None
    _anchor: Tensor | None

    @staticmethod
    def __new__(
        cls,
        visible: Visible | None,
        seen: Tensor | None,
        like: tuple[Any, ...],
        is_banded: bool = False,
        local_size: int | None = None,
    ) -> BandMask:
        shape, dtype, device = like
        self: BandMask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self.visible, self.seen, self.has_views = visible, seen, False
        self.is_banded, self.local_size = is_banded, local_size
        self._dense = self._anchor = None
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"BandMask({tuple(self.shape)}, {self.dtype}, {self.visible})"

    # Protocol of torch.compile: the tensors, and the rest.

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = ("seen", "q_starts", "k_starts", "kv_lengths")
        present = [name for name in names if getattr(self, name) is not None]
        rule = None if self.visible is None else self.visible[:3]
        return present or ["anchor"], (rule, self.is_banded, self.local_size, self.dtype, self.device)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[Any, ...], size: Any, stride: Any
    ) -> BandMask:
        rule, is_banded, local_size, dtype, device = context
        starts = (inner.get(name) for name in ("q_starts", "k_starts", "kv_lengths"))
        visible = None if rule is None else Visible(*rule, *starts)
        mask = BandMask(visible, inner.get("seen"), (size, dtype, device), is_banded, local_size)
        mask._anchor = inner.get("anchor")
        return mask

    @property
    def anchor(self) -> Tensor:
        """Empty tensor, since torch.compile expects at least one."""
        if self._anchor is None:
            self._anchor = torch.empty(0, device=self.device)
        return self._anchor

    @property
    def q_starts(self) -> Tensor | None:
        return None if self.visible is None else self.visible.q_starts

    @property
    def k_starts(self) -> Tensor | None:
        return None if self.visible is None else self.visible.k_starts

    @property
    def kv_lengths(self) -> Tensor | None:
        return None if self.visible is None else self.visible.kv_lengths

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        mask = args[0] if args else None
        if isinstance(mask, BandMask) and not mask.has_views:
            dtype = _changes_at_most_the_dtype(func, args, kwargs or {})
            if dtype is not None:
                like = (mask.shape, dtype, mask.device)
                return BandMask(mask.visible, mask.seen, like, mask.is_banded, mask.local_size)
        plain = tree_map_only(BandMask, _dense, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        if isinstance(mask, BandMask) and any(argument.alias_info for argument in func._schema.arguments):
            mask.has_views = True
        return mask if isinstance(mask, BandMask) and result is mask._dense else result


def _changes_at_most_the_dtype(
    func: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> torch.dtype | None:
    """Return the dtype of an op's result if that is still the same mask: `mask[:, :, :, :keys]` of a mask with that
    many keys, `mask.detach()`, `mask.to(dtype)`."""
    mask: BandMask = args[0]
    if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        return mask.dtype
    if func is torch.ops.aten._to_copy.default:
        dtype = options.get("dtype", mask.dtype)
        others = {name: value for name, value in options.items() if name not in ("dtype", "non_blocking")}
        moves = any(
            value is not None and value != getattr(mask, name, None) for name, value in others.items()
        )
        return dtype if dtype.is_floating_point and not moves else None
    if func is torch.ops.aten.slice.Tensor:
        value: tuple[Any, ...] = (*args[1:], *(0, None, None, 1)[len(args) - 1 :])
        dim, start, end, step = value
        is_identity = start in (None, 0) and step == 1 and (end is None or end >= mask.shape[dim])
        return mask.dtype if is_identity else None
    return None


def _dense(mask: BandMask) -> Tensor:
    if mask._dense is None:
        mask._dense = additive(bools(mask), mask.dtype)
    return mask._dense


def is_edited(mask: BandMask) -> bool:
    """Return whether the dense mask was written to, in which case it takes precedence. Where PyTorch does not count
    writes, in inference mode and in compiled graphs, any view counts as a write."""
    if not mask.has_views:
        return False
    return torch.compiler.is_compiling() or mask.is_inference() or mask._version > 0


def bools(mask: BandMask) -> Tensor:
    """Return a mask as bools: True where a query sees a key."""
    if mask.seen is not None:
        return mask.seen
    assert mask.visible is not None
    batch, _, queries, keys = mask.shape
    seen = mask.visible.dense(batch, queries, keys, mask.device)
    if not torch.compiler.is_compiling():
        mask.seen = seen  # for the next layer
    return seen


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the eager form of a bool mask: 0 where it is True, the lowest finite value elsewhere."""
    return torch.where(seen, torch.zeros((), dtype=dtype, device=seen.device), torch.finfo(dtype).min)


@torch.compiler.allow_in_graph
def _without_rule(
    seen: Tensor, dtype: torch.dtype, is_banded: bool = False, local_size: int | None = None
) -> BandMask:
    like = (seen.shape, dtype, seen.device)
    return BandMask(None, seen, like, is_banded, local_size)


# ---- the rule of a mask function ------------------------------------------------------------------------


class Band(NamedTuple):
    """Rule of a transformers mask function: a window around each query, within sequences if there are any."""

    left: int | None = None
    right: int | None = None
    sequences: Tensor | None = None  # [batch, tokens]: the sequence number of each token
    positions: Tensor | None = None  # [batch, tokens]: the positions that the window refers to

    def __and__(self, other: Band) -> Band | None:
        if self.sequences is not None and other.sequences is not None:
            return None
        return Band(
            _minimum(self.left, other.left),
            _minimum(self.right, other.right),
            self.sequences if other.sequences is None else other.sequences,
            self.positions if other.positions is None else other.positions,
        )


def _minimum(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def band_of(function: MaskFunction) -> Band | None:
    """Return the rule of a mask function built from transformers' own, or None.

    The functions are closures; they are recognized by their code, which leaves no doubt about what they compute, and
    their parameters are read from their cells. Anyone else's function has no rule here, whatever it computes.
    """
    from transformers import masking_utils

    if function is masking_utils.causal_mask_function:
        return Band(right=0)
    if function is masking_utils.bidirectional_mask_function:
        return Band()
    if not isinstance(function, FunctionType):
        return None
    name = _factories().get(function.__code__)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    values = {variable: cell.cell_contents for variable, cell in cells.items()}
    if name == "and_masks":
        return _intersection(values["mask_functions"])
    if name == "sliding_window_overlay":
        return Band(left=values["sliding_window"] - 1)
    if name == "sliding_window_bidirectional_overlay":
        return Band(left=values["sliding_window"], right=values["sliding_window"])
    if name == "packed_sequence_mask_function":
        return Band(sequences=values["packed_sequence_mask"])
    if name == "remap_positions_for_packed_sequence":
        inner = band_of(values["mask_function"])
        if inner is not None and inner.sequences is None and inner.positions is None:
            return inner._replace(positions=values["position_ids"])
    return None


def _intersection(functions: tuple[MaskFunction, ...]) -> Band | None:
    result: Band | None = Band()
    for function in functions:
        band = band_of(function)
        result = None if result is None or band is None else result & band
    return result


@functools.cache
def _factories() -> dict[CodeType, str]:
    """Return the names of transformers' factories by the code of the closures that they return."""
    from transformers import masking_utils

    arguments: dict[str, tuple[Any, ...]] = {
        "and_masks": (masking_utils.causal_mask_function,),
        "sliding_window_overlay": (1,),
        "sliding_window_bidirectional_overlay": (1,),
        "packed_sequence_mask_function": (torch.zeros(1, 1),),
        "remap_positions_for_packed_sequence": (masking_utils.causal_mask_function, torch.zeros(1, 1)),
    }
    factories = {name: getattr(masking_utils, name, None) for name in arguments}
    return {
        factory(*arguments[name]).__code__: name for name, factory in factories.items() if factory is not None
    }


# ---- from rules to arguments ----------------------------------------------------------------------------


def visible_keys(
    band: Band,
    shape: tuple[int, int, int],
    offset: int | Tensor,
    padding: Tensor | None,
    device: torch.device | str,
) -> Visible | None:
    """Return the arguments for `weft.attention`, or None if it has no equivalent.

    `shape`: batch, queries and keys. `offset`: the own key of the first query. `padding`: bool [batch, keys], True for
    real keys. The host reads it once per mask, as transformers does for its other implementations.
    """
    batch, queries, keys = shape
    left, right = band.left, band.right
    if band.sequences is not None or band.positions is not None:
        is_self_attention = isinstance(offset, int) and offset == 0 and queries == keys and padding is None
        return _packed(band, batch, queries) if is_self_attention else None
    if left is None and right is None:
        return Visible(None, None, False) if padding is None else _padded(band, shape, 0, padding)
    if padding is not None:
        offset = int(offset)
    if isinstance(offset, int) and not 0 <= offset <= max(keys - queries, 0):
        return None
    if padding is not None:
        return _padded(band, shape, int(offset), padding)
    if isinstance(offset, int) and (offset == 0 or offset + queries == keys):
        return Visible(left, right, offset != 0)
    if right != 0:
        return None
    # A static cache has keys that are not written yet. No query may see them, so they can be omitted.
    if isinstance(offset, Tensor):
        used = (offset + queries).to(torch.int32).expand(batch).contiguous()
    else:
        used = torch.full((batch,), offset + queries, dtype=torch.int32, device=device)
    return Visible(left, 0, True, kv_lengths=used)


def _packed(band: Band, batch: int, tokens: int) -> Visible | None:
    """Return the rule of a packed batch whose positions count up by one within each sequence, or None."""
    sequences, positions = band.sequences, band.positions
    if sequences is None or sequences.shape != (batch, tokens):
        return None
    step = sequences.diff(dim=1)
    is_valid = (step >= 0).all()  # no sequence resumes after another one
    if positions is not None:
        is_valid = is_valid & ((positions.expand_as(sequences).diff(dim=1) == 1) | (step > 0)).all()
    if not bool(is_valid):
        return None
    first = torch.ones_like(sequences, dtype=torch.bool)
    first[:, 1:] = step > 0
    end = torch.full((1,), sequences.numel(), dtype=torch.int32, device=sequences.device)
    starts = torch.cat([first.flatten().nonzero()[:, 0].int(), end])
    return Visible(band.left, band.right, False, starts, starts)


def _padded(band: Band, shape: tuple[int, int, int], offset: int, padding: Tensor) -> Visible | None:
    """Return the rule of a batch whose samples have padding before or after their tokens, or None."""
    _batch, queries, keys = shape
    left, right = band.left, band.right
    banded = left is not None or right is not None
    # Causal queries see no later keys, whatever the padding says about them.
    reachable = min(keys, offset + queries) if right == 0 else keys
    if reachable == 0:
        return None
    real, position = padding[:, :reachable], torch.arange(reachable, device=padding.device)
    last = torch.where(real, position + 1, 0).amax(1)
    first = torch.minimum(torch.where(real, position, reachable).amin(1), last)
    firsts, lasts, counts = torch.stack([first, last, real.sum(1)]).tolist()
    if any(n != end - begin for begin, end, n in zip(firsts, lasts, counts, strict=True)):
        return None  # padding between tokens
    before, after = any(firsts), any(end != reachable for end in lasts)
    if not before and not after:
        return visible_keys(band, shape, offset, None, padding.device)
    if not before and (offset == 0 or not banded):
        return Visible(left, right, False, kv_lengths=last.int())
    if banded and not (right == 0 and (offset == 0 or not after)):
        return None
    # Four sequences per sample: queries that see no key, keys before its tokens, its tokens, keys after them.
    begin = (first - offset).clamp(0, queries) if banded else torch.zeros_like(first)
    q_starts = _starts([begin, begin, torch.full_like(first, queries)], queries)
    k_starts = _starts([torch.zeros_like(first), first, last], keys)
    return Visible(left, right, offset != 0, q_starts, k_starts)


def _starts(cuts: list[Tensor], length: int) -> Tensor:
    """Return where sequences begin in a flattened batch of samples of this length, each cut at these positions
    [batch]."""
    rows = torch.arange(len(cuts[0]), device=cuts[0].device) * length
    marks = torch.stack([rows, *(rows + cut for cut in cuts)], 1).flatten()
    return torch.cat([marks, marks.new_full((1,), len(rows) * length)]).int()


# ---- the interface of transformers ----------------------------------------------------------------------


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor | None:
    """Return the mask for `attention_forward`: a `BandMask`, a dense mask, or None where every query sees every key."""
    from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

    function = causal_mask_function if mask_function is None else mask_function

    def dense(skip: bool) -> Tensor | None:
        seen: Tensor | None = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=function,
            attention_mask=attention_mask,
            device=device,
            **options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": skip},
        )
        return seen

    if torch.compiler.is_compiling():
        seen = dense(allow_is_bidirectional_skip)
        # transformers sets `use_vmap` for mask functions that a model adds to its own.
        is_banded = attention_mask is None and not options.get("use_vmap")
        local_size = options.get("local_size")
        return None if seen is None else _without_rule(seen, dtype, is_banded, local_size)
    band = band_of(function)
    visible = None
    if band is not None:
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        if padding is not None:
            padding = padding[:, kv_offset : kv_offset + kv_length].bool()
        shape = (batch_size, q_length, kv_length)
        visible = visible_keys(band, shape, q_offset - kv_offset, padding, device)
    if visible is None:
        seen = dense(allow_is_bidirectional_skip)
        return None if seen is None else _without_rule(seen, dtype)
    if allow_is_bidirectional_skip and visible.is_everything():
        return None
    is_banded = visible.is_plain() or (band is not None and band.sequences is not None)
    like = ((batch_size, 1, q_length, kv_length), dtype, torch.device(device))
    return BandMask(visible, None, like, is_banded)

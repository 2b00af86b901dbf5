"""Attention masks of transformers as arguments of `weft.attention`.

A model of transformers asks a *mask interface* for its masks, once for each forward, and hands the result to every
attention layer. Most masks are a band: each query sees the keys up to its own, those of a window, or all of them, less
padding on either side, or within its own sequence of a packed batch. `attention_mask` recognizes these from the mask
functions of transformers and returns a `BandMask`, which holds no matrix. Everything else becomes a plain dense mask.

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
    right: int | None  # and after it
    lower_right: bool  # the last query's own key is the last key; otherwise the first query's is the first
    q_starts: Tensor | None = None  # [sequences + 1], in batch * queries
    k_starts: Tensor | None = None  # [sequences + 1], in batch * keys
    kv_lengths: Tensor | None = None  # [batch]

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `weft.attention`; with `cu_seqlens` it takes packed heads."""
        found: dict[str, Any] = {"window": (self.left, self.right)}
        found["causal_align"] = "lower_right" if self.lower_right else "upper_left"
        if self.q_starts is not None:
            found |= {"cu_seqlens": self.q_starts, "cu_seqlens_k": self.k_starts}
        if self.kv_lengths is not None:
            found["kv_lengths"] = self.kv_lengths
        return found

    def is_everything(self) -> bool:
        """Whether every query sees every key."""
        return self.is_plain() and (self.left, self.right) == (None, None)

    def is_plain(self) -> bool:
        """Whether samples are neither packed nor padded."""
        return self.q_starts is None and self.kv_lengths is None

    def dense(self, batch: int, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return the same as bool [batch, 1, queries, keys]."""
        query, key = torch.arange(queries, device=device), torch.arange(keys, device=device)
        if self.q_starts is None or self.k_starts is None:
            used = torch.full((1,), keys, device=device) if self.kv_lengths is None else self.kv_lengths
            own = query + (used[:, None] - queries) * self.lower_right  # [batch, queries]
            position, seen = key.expand(1, keys), (key < used[:, None])[:, None, :]
        else:
            q_of, q_place, q_length = _sequences(self.q_starts, batch, queries, device)
            k_of, position, _ = _sequences(self.k_starts, batch, keys, device)
            k_length = self.k_starts.diff()[q_of]
            own = q_place + (k_length - q_length) * self.lower_right
            seen = q_of[:, :, None] == k_of[:, None, :]
        apart = position[:, None, :] - own[:, :, None]
        if self.left is not None:
            seen = seen & (apart >= -self.left)
        if self.right is not None:
            seen = seen & (apart <= self.right)
        return seen.expand(batch, queries, keys)[:, None]


def _sequences(
    starts: Tensor, batch: int, length: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sequence of each token, its place there and the sequence's length, all [batch, length]."""
    token = torch.arange(batch * length, device=device)
    number = torch.searchsorted(starts[1:].long(), token, right=True)
    found = (number, token - starts[number], starts.diff()[number])
    return tuple(part.view(batch, length) for part in found)  # type: ignore[return-value]


class BandMask(torch.Tensor):
    """An additive mask [batch, 1, queries, keys] that is dense only for those who read it.

    `attention_forward` takes the rule in `visible`, or the bools in `seen` of a mask that has none. Any op sees the
    mask of eager attention, and returns plain tensors. What uses a mask is a function and no method: torch.compile
    looks into functions alone.
    """

    visible: Visible | None
    seen: Tensor | None  # bool, of the same shape
    is_banded: bool  # within packed sequences it leaves out keys by a window alone, not by padding or chunks
    local_size: int | None  # tokens of the window or chunk, where compiled graphs hide which of the two it is
    is_lent: bool  # somebody has a view of the dense mask and may write to it
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
        self.visible, self.seen, self.is_lent = visible, seen, False
        self.is_banded, self.local_size = is_banded, local_size
        self._dense = self._anchor = None
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"BandMask({tuple(self.shape)}, {self.dtype}, {self.visible})"

    # For torch.compile: its tensors, and the rest.

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
        """An empty tensor, since torch.compile expects one."""
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
        if isinstance(mask, BandMask) and not mask.is_lent:
            dtype = _changes_at_most_the_dtype(func, args, kwargs or {})
            if dtype is not None:
                like = (mask.shape, dtype, mask.device)
                return BandMask(mask.visible, mask.seen, like, mask.is_banded, mask.local_size)
        plain = tree_map_only(BandMask, _dense, (args, kwargs or {}))
        found = func(*plain[0], **plain[1])
        if isinstance(mask, BandMask) and any(given.alias_info for given in func._schema.arguments):
            mask.is_lent = True
        return mask if isinstance(mask, BandMask) and found is mask._dense else found


def _changes_at_most_the_dtype(
    func: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> torch.dtype | None:
    """Return the dtype of what an op makes of a mask if it is the same mask: `mask[:, :, :, :keys]` of one that has so
    many keys, `mask.detach()`, `mask.to(dtype)`."""
    mask: BandMask = args[0]
    if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        return mask.dtype
    if func is torch.ops.aten._to_copy.default:
        dtype = options.get("dtype", mask.dtype)
        others = {name: given for name, given in options.items() if name not in ("dtype", "non_blocking")}
        moves = any(
            given is not None and given != getattr(mask, name, None) for name, given in others.items()
        )
        return dtype if dtype.is_floating_point and not moves else None
    if func is torch.ops.aten.slice.Tensor:
        given: tuple[Any, ...] = (*args[1:], *(0, None, None, 1)[len(args) - 1 :])
        dim, start, end, step = given
        whole = start in (None, 0) and step == 1 and (end is None or end >= mask.shape[dim])
        return mask.dtype if whole else None
    return None


def _dense(mask: BandMask) -> Tensor:
    if mask._dense is None:
        mask._dense = additive(bools(mask), mask.dtype)
    return mask._dense


def is_edited(mask: BandMask) -> bool:
    """Whether somebody has written to the dense mask, which counts from then on. Where PyTorch does not count what is
    written, in inference mode and in a compiled graph, whoever has a view may have."""
    if not mask.is_lent:
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
    """Rule of a mask function of transformers: a window around each query, within sequences if some are told."""

    left: int | None = None
    right: int | None = None
    sequences: Tensor | None = None  # [batch, tokens]: tokens of one sequence have one number
    positions: Tensor | None = None  # [batch, tokens]: the window counts in these

    def __and__(self, other: Band) -> Band | None:
        if self.sequences is not None and other.sequences is not None:
            return None
        return Band(
            _least(self.left, other.left),
            _least(self.right, other.right),
            self.sequences if other.sequences is None else other.sequences,
            self.positions if other.positions is None else other.positions,
        )


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def band_of(function: MaskFunction) -> Band | None:
    """Return the rule of a mask function that is made of transformers' own, or None.

    The functions are closures; they are recognized by their code, which leaves no doubt about what they compute, and
    read by the contents of their cells. One of somebody else's has no rule here, whatever it computes.
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
    known = {variable: cell.cell_contents for variable, cell in cells.items()}
    if name == "and_masks":
        return _intersection(known["mask_functions"])
    if name == "sliding_window_overlay":
        return Band(left=known["sliding_window"] - 1)
    if name == "sliding_window_bidirectional_overlay":
        return Band(left=known["sliding_window"], right=known["sliding_window"])
    if name == "packed_sequence_mask_function":
        return Band(sequences=known["packed_sequence_mask"])
    if name == "remap_positions_for_packed_sequence":
        inner = band_of(known["mask_function"])
        if inner is not None and inner.sequences is None and inner.positions is None:
            return inner._replace(positions=known["position_ids"])
    return None


def _intersection(functions: tuple[MaskFunction, ...]) -> Band | None:
    found: Band | None = Band()
    for function in functions:
        band = band_of(function)
        found = None if found is None or band is None else found & band
    return found


@functools.cache
def _factories() -> dict[CodeType, str]:
    """The codes of the closures that transformers' factories return, and which factory each is of."""
    from transformers import masking_utils

    arguments: dict[str, tuple[Any, ...]] = {
        "and_masks": (masking_utils.causal_mask_function,),
        "sliding_window_overlay": (1,),
        "sliding_window_bidirectional_overlay": (1,),
        "packed_sequence_mask_function": (torch.zeros(1, 1),),
        "remap_positions_for_packed_sequence": (masking_utils.causal_mask_function, torch.zeros(1, 1)),
    }
    made = {name: getattr(masking_utils, name, None) for name in arguments}
    return {factory(*arguments[name]).__code__: name for name, factory in made.items() if factory is not None}


# ---- from rules to arguments ----------------------------------------------------------------------------


def visible_keys(
    band: Band,
    shape: tuple[int, int, int],
    offset: int | Tensor,
    padding: Tensor | None,
    device: torch.device | str,
) -> Visible | None:
    """Return the arguments for `weft.attention`, or None if it has none that mean the same.

    `shape`: batch, queries and keys. `offset`: the own key of the first query. `padding`: bool [batch, keys], True
    where a key counts. The host reads it, once for each mask, as transformers does for its other implementations.
    """
    batch, queries, keys = shape
    left, right = band.left, band.right
    if band.sequences is not None or band.positions is not None:
        same = isinstance(offset, int) and offset == 0 and queries == keys and padding is None
        return _packed(band, batch, queries) if same else None
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
    # A static cache has keys that nobody has written yet. No query may see them, so they can be left out.
    if isinstance(offset, Tensor):
        used = (offset + queries).to(torch.int32).expand(batch).contiguous()
    else:
        used = torch.full((batch,), offset + queries, dtype=torch.int32, device=device)
    return Visible(left, 0, True, kv_lengths=used)


def _packed(band: Band, batch: int, tokens: int) -> Visible | None:
    """Rule of a packed batch whose positions count up by one within each sequence."""
    numbers, positions = band.sequences, band.positions
    if numbers is None or numbers.shape != (batch, tokens):
        return None
    step = numbers.diff(dim=1)
    sound = (step >= 0).all()  # no sequence goes on after another one
    if positions is not None:
        sound = sound & ((positions.expand_as(numbers).diff(dim=1) == 1) | (step > 0)).all()
    if not bool(sound):
        return None
    first = torch.ones_like(numbers, dtype=torch.bool)
    first[:, 1:] = step > 0
    end = torch.full((1,), numbers.numel(), dtype=torch.int32, device=numbers.device)
    starts = torch.cat([first.flatten().nonzero()[:, 0].int(), end])
    return Visible(band.left, band.right, False, starts, starts)


def _padded(band: Band, shape: tuple[int, int, int], offset: int, padding: Tensor) -> Visible | None:
    """Rule of a batch whose samples have pads before or behind their tokens."""
    _batch, queries, keys = shape
    left, right = band.left, band.right
    banded = left is not None or right is not None
    # Causal queries see no later keys, whatever the padding says of them.
    within = min(keys, offset + queries) if right == 0 else keys
    if within == 0:
        return None
    real, place = padding[:, :within], torch.arange(within, device=padding.device)
    last = torch.where(real, place + 1, 0).amax(1)
    first = torch.minimum(torch.where(real, place, within).amin(1), last)
    firsts, lasts, counts = torch.stack([first, last, real.sum(1)]).tolist()
    if any(n != end - begin for begin, end, n in zip(firsts, lasts, counts, strict=True)):
        return None  # pads between tokens
    before, behind = any(firsts), any(end != within for end in lasts)
    if not before and not behind:
        return visible_keys(band, shape, offset, None, padding.device)
    if not before and (offset == 0 or not banded):
        return Visible(left, right, False, kv_lengths=last.int())
    if banded and not (right == 0 and (offset == 0 or not behind)):
        return None
    # Four sequences a sample: queries that see no key, keys before its tokens, its tokens, keys behind them.
    begin = (first - offset).clamp(0, queries) if banded else torch.zeros_like(first)
    q_starts = _starts([begin, begin, torch.full_like(first, queries)], queries)
    k_starts = _starts([torch.zeros_like(first), first, last], keys)
    return Visible(left, right, offset != 0, q_starts, k_starts)


def _starts(cuts: list[Tensor], length: int) -> Tensor:
    """Where sequences begin in a flattened batch of samples of this length, each cut at these places [batch]."""
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

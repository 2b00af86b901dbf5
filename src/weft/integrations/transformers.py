"""Hugging Face transformers: attention and experts by name.

    import weft.integrations.transformers
    weft.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="weft", experts_implementation="weft")

`register` adds "weft" to the registries of attention functions, of masks and of experts.

Models with causal or full attention, sliding windows, softcaps and sinks, dense or packed batches, and padding on
either side are served. A model whose mask is something else (chunks, prefixes, images that see each other) is served by
PyTorch's attention with that mask, as `attn_implementation="sdpa"` would, or refused where it also needs a softcap or
sinks. Experts are computed by `weft.experts`; those whose gated unit Weft does not have are refused in words.
`weft.integrations.apply` needs no names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops import attention
from . import adopt
from .recognise import LeftAlone, UnitOptions, recognise_experts

NAME = "weft"


def register(name: str = NAME) -> None:
    """Make `attn_implementation=name` and `experts_implementation=name` known to transformers."""
    from transformers import AttentionInterface
    from transformers.integrations.moe import ExpertsInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    ExpertsInterface.register(name, experts_forward)


# ---- experts --------------------------------------------------------------------------------------------


def experts_forward(
    module: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Experts as transformers calls them: tokens [T, K], the chosen experts and their weights [T, k]."""
    unit = getattr(module, _UNIT, None)
    if unit is None:
        unit = _recognise(module)
    return adopt.experts_forward(module, unit, hidden_states, top_k_index, top_k_weights)


_UNIT = "weft_gated_unit"  # where a module keeps what it was recognised as


@torch.compiler.disable(  # type: ignore[no-untyped-call]
    reason="experts are recognised by trying them: call the model once before it is compiled"
)
def _recognise(module: torch.nn.Module) -> UnitOptions:
    try:
        unit = recognise_experts(module)
    except LeftAlone as reason:
        raise NotImplementedError(
            f"experts_implementation='{NAME}' cannot compute {type(module).__name__}: {reason}. Take 'grouped_mm'"
        ) from reason
    setattr(module, _UNIT, unit)
    return unit


# ---- masks ----------------------------------------------------------------------------------------------


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor | None:
    """What transformers hands to `attention_forward` as a mask: None where every key counts, bool [batch, keys] where
    some are pads, or [batch, 1, queries, keys] where queries see something else than a band of keys."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    function = causal_mask_function if mask_function is None else mask_function
    if not sees_a_band(function):
        whole: Tensor = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=function,
            attention_mask=attention_mask,
            device=device,
            **options | {"allow_is_causal_skip": False},
        )
        return whole
    end = (
        q_offset + q_length - kv_offset
    )  # keys from there on are room in a cache that nobody has written yet
    filled = isinstance(end, int) and end >= kv_length
    if attention_mask is not None:
        own = attention_mask[:, -kv_length:] if attention_mask.shape[1] > kv_length else attention_mask
        own = own.bool()
        # The mask of a batch without pads has no zeros. Transformers looks at it as well for its other functions.
        if filled and own.shape[1] == kv_length and not torch.compiler.is_compiling() and bool(own.all()):
            return None
        keys = own.new_zeros(batch_size, kv_length)
        keys[:, : own.shape[1]] = own
    elif filled:
        return None
    else:
        keys = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    return keys & (torch.arange(kv_length, device=keys.device) < end)


def sees_a_band(function: Callable[..., Any]) -> bool:
    """Whether a mask function of transformers lets a query see all keys, those up to its own, or those of a window
    that moves along with it. It is asked about a few queries and keys far from the beginning; a function that looks
    something up (which sequence a token is of, which tokens are an image) fails there, or answers otherwise."""

    def seen(query: int, *keys: int) -> list[bool]:
        at = torch.tensor(keys)
        answer = function(torch.tensor(0), torch.tensor(0), torch.tensor(query), at)
        return torch.as_tensor(answer).expand(at.shape).tolist()

    def first(query: int) -> int:
        """The first key that a query sees, of those before it without a gap."""
        low, high = 0, query
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if seen(query, middle)[0] else (middle + 1, high)
        return low

    far = 1 << 20
    try:
        if not all(seen(far, far) + seen(far + 1, far + 1)):
            return False
        if seen(far, 0)[0]:
            probes = [1 << i for i in range(20)]
            return all(seen(far, *(far - probe for probe in probes)))
        return first(far) + 1 == first(far + 1) and first(far + 1000) == first(far) + 1000
    except (IndexError, RuntimeError, TypeError):
        return False


# ---- attention ------------------------------------------------------------------------------------------


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: heads [batch, heads, tokens, dim] in, [batch, tokens, heads, dim] out."""
    if dropout:
        raise ValueError(
            f"attn_implementation='{NAME}' has no dropout; got {dropout}. Set attention_dropout=0.0 in the config"
        )
    if attention_mask is not None and attention_mask.dim() == 4:
        return _with_any_mask(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            softcap=softcap,
            s_aux=s_aux,
            **options,
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    left = None if sliding_window is None else sliding_window - 1
    band: dict[str, Any] = {
        "window": (left, 0 if causal else left),
        "causal_align": "lower_right",
        "scale": scaling,
        "softcap": softcap,
        "sinks": s_aux,
    }
    starts = options.get("cu_seq_lens_q")
    if starts is not None:
        band |= {"cu_seqlens": starts, "cu_seqlens_k": options.get("cu_seq_lens_k")}
    elif attention_mask is not None:
        q_starts, k_starts = _without_pads(attention_mask, query.shape[2])
        band |= {"cu_seqlens": q_starts, "cu_seqlens_k": k_starts}
    else:
        out = attention(query, key, value, **band)
        return out.transpose(1, 2), None
    packed = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = attention(*packed, **band)
    return out.unflatten(0, (query.shape[0], -1)), None


def _without_pads(keys: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """Where sequences begin in the flattened queries and keys of a batch with pads, bool [batch, keys]. What lies
    before and behind the tokens of a sample counts as sequences of their own, whose results nobody reads: nothing is
    moved, and nobody waits for the device."""
    batch, room = keys.shape
    place = torch.arange(room, device=keys.device)
    begin = torch.where(keys, place, room).amin(1)
    end = torch.where(keys, place + 1, 0).amax(1)
    begin = torch.minimum(begin, end)
    torch._assert_async((keys.sum(1) == end - begin).all(), "the tokens of a sample must follow each other")
    # The own key of the last query is the last one that is there, but where all queries have keys, the last of all.
    own = torch.zeros_like(end) if queries == room else end - queries
    q_begin, q_end = (begin - own).clamp(0, queries), (end - own).clamp(0, queries)

    def starts(first: Tensor, last: Tensor, length: int) -> Tensor:
        rows = torch.arange(batch, device=keys.device) * length
        marks = torch.stack([rows, rows + first, rows + last], 1).flatten()
        return torch.cat([marks, marks.new_full((1,), batch * length)]).int()

    return starts(q_begin, q_end, queries), starts(begin, end, room)


def _with_any_mask(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if softcap is not None or s_aux is not None:
        raise NotImplementedError(
            f"attn_implementation='{NAME}' takes masks other than causal ones and windows only without softcap and "
            "sinks: take 'eager' for this model"
        )
    out, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)
    return out, None

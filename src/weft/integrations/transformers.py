"""Hugging Face transformers: attention and experts by name.

    import weft.integrations.transformers
    weft.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="weft", experts_implementation="weft")

`register` adds "weft" to the registries of attention functions, of masks and of experts.

`weft.attention` computes causal, full and cross attention, sliding windows, softcaps and sinks, for dense batches,
padding on either side, static caches, and batches packed by `position_ids` or `cu_seq_lens_q`. PyTorch computes what
Weft's kernels lack, as the model's own `sdpa` or `eager` attention would: dropout, position biases, other kinds of
masks (chunks, prefixes, padding between tokens, masks that the model edits), heads wider than 256, and requested
attention weights. An option on neither list is refused.

Experts are computed by `weft.experts`; those whose gated unit Weft lacks are refused with the reason.
`weft.integrations.apply` needs no names.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops import attention
from ..ops.attention.configs import WIDEST
from ..ops.common.checks import FLOATS
from . import adopt
from .masks import BandMask, additive, attention_mask, bools, is_edited
from .recognize import UnitOptions, recognize_experts
from .trials import LeftAlone

NAME = "weft"


def register(name: str = NAME) -> None:
    """Register `attn_implementation=name` and `experts_implementation=name` with transformers."""
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
    """Compute experts as transformers calls them: tokens [T, K], the chosen experts and their weights [T, k]."""
    if adopt.is_hooked_within(module):
        own: Tensor = inspect.unwrap(type(module).forward)(module, hidden_states, top_k_index, top_k_weights)
        return own
    unit = getattr(module, _UNIT, None)
    if unit is None:
        unit = _recognize(module)
    return adopt.experts_forward(module, unit, hidden_states, top_k_index, top_k_weights)


_UNIT = "weft_gated_unit"  # attribute in which a module caches its recognized unit


@torch.compiler.disable(
    reason="experts are recognized by trying them: call the model once before compiling it"
)
def _recognize(module: torch.nn.Module) -> UnitOptions:
    try:
        unit = recognize_experts(module)
    except LeftAlone as reason:
        raise NotImplementedError(
            f"experts_implementation='{NAME}' cannot compute {type(module).__name__}: {reason}. Use 'grouped_mm'"
        ) from reason
    setattr(module, _UNIT, unit)
    return unit


# ---- attention ------------------------------------------------------------------------------------------

# Options that do not change the result, with the reason. Those from `position_ids` on come from the model's caller,
# through `TransformersKwargs` or keyword arguments that models pass on.
HARMLESS = {
    "sliding_window": "the mask has the window; this is used only for cu_seq_lens_q, which has no mask",
    "max_length_q": "Weft finds the lengths of packed sequences itself",
    "max_length_k": "like max_length_q",
    "deterministic": "Weft always is",
    "position_ids": "queries and keys are already rotated, and the mask knows packed sequences",
    "seq_idx": "for recurrent layers; attention has cu_seq_lens_q",
    "cache_position": "the cache is already updated",
    "use_cache": "an option of the model",
    "num_items_in_batch": "an option of the loss",
    "output_hidden_states": "an option of the model",
    "output_router_logits": "an option of the model",
    "return_dict": "an option of the model",
}
# Options that PyTorch's attention serves: added to the scores, a score per query, returned beside the result.
OF_PYTORCH = ("position_bias", "sinks", "output_attentions")


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    indices: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention as transformers calls it: heads [batch, heads, tokens, dim] in, [batch, tokens, heads, dim]
    out.

    `attention_mask` tells what a query sees; without one it sees every key, or those up to its own if `is_causal`, or
    else the module, says so. `cu_seq_lens_q`, `cu_seq_lens_k`: where packed sequences begin. `indices` [batch, queries,
    k]: the only keys that a query sees (DeepSeek-V3.2's indexer). Of the other options, those in `HARMLESS` are
    ignored, and those in `OF_PYTORCH` need PyTorch's attention. Setting any other is an error.
    """
    requested = {
        name: setting for name, setting in options.items() if setting is not None and name not in HARMLESS
    }
    requested = {name: setting for name, setting in requested.items() if setting is not False}
    if not requested.keys() <= set(OF_PYTORCH):
        raise NotImplementedError(
            f"attn_implementation='{NAME}' does not know the options {sorted(requested.keys() - set(OF_PYTORCH))} of "
            f"{type(module).__name__}: use 'sdpa' or 'eager' for this model"
        )
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    mask = attention_mask
    if isinstance(mask, BandMask) and is_edited(mask):
        mask = mask + 0.0  # a plain tensor
    packed = None
    if cu_seq_lens_q is not None:
        packed = (cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k)
    if indices is not None:
        mask = _named_keys_mask(indices, mask, query, key, causal)
    plain = not dropout and not requested and (scaling is None or scaling > 0)
    window = options.get("sliding_window")
    arguments = _arguments(mask, packed, query.shape[2], causal, window) if plain else None
    if arguments is None or not _fits(query, key, value, mask):
        if packed is not None:
            mask = _packed_mask(packed, mask, query, key, causal)
        return _by_pytorch(
            module,
            query,
            key,
            value,
            mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=causal,
            softcap=softcap,
            s_aux=s_aux,
            **requested,
        )
    arguments |= {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    if "cu_seqlens" not in arguments:
        return attention(query, key, value, **arguments).transpose(1, 2), None
    heads = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = attention(*heads, **arguments)
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


def _arguments(
    mask: Tensor | None,
    packed: tuple[Tensor, Tensor] | None,
    queries: int,
    causal: bool,
    sliding_window: int | None,
) -> dict[str, Any] | None:
    """Return the arguments of `weft.attention` for what queries see, or None if that takes a dense mask."""
    rule = mask.visible if isinstance(mask, BandMask) else None
    if packed is not None:
        # FlashAttention's convention: sequences and window come from the options, unless the mask says otherwise.
        if mask is not None and not (isinstance(mask, BandMask) and mask.is_banded):
            return None
        if isinstance(mask, BandMask) and rule is None and mask.local_size != sliding_window:
            return None  # chunks
        left = None if sliding_window is None else sliding_window - 1
        window = (left, 0 if causal else left) if rule is None else (rule.left, rule.right)
        return {
            "window": window,
            "causal_align": "lower_right",
            "cu_seqlens": packed[0],
            "cu_seqlens_k": packed[1],
        }
    if mask is None:
        return {"is_causal": causal and queries > 1, "causal_align": "upper_left"}
    return None if rule is None else rule.arguments()


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether Weft's kernel supports these heads, and the mask has their shape."""
    shape = (len(query), 1, query.shape[2], key.shape[2])
    return (
        query.dtype in FLOATS
        and query.dtype == key.dtype == value.dtype
        and len(query) == len(key)
        and max(query.shape[-1], value.shape[-1]) <= WIDEST
        and (mask is None or tuple(mask.shape) == shape)
    )


def _named_keys_mask(
    indices: Tensor, mask: Tensor | None, query: Tensor, key: Tensor, causal: bool
) -> Tensor:
    """Return a mask by which a query sees only the keys it names."""
    chosen = torch.zeros(*indices.shape[:2], key.shape[2], dtype=torch.bool, device=key.device)
    return _intersected(chosen.scatter(-1, indices.long(), True)[:, None], mask, query, key, causal)


def _packed_mask(
    packed: tuple[Tensor, Tensor], mask: Tensor | None, query: Tensor, key: Tensor, causal: bool
) -> Tensor:
    """Return a mask by which a query sees only keys of its own packed sequence."""
    q_of, k_of = (
        torch.searchsorted(starts[1:].long(), torch.arange(len(x) * x.shape[2], device=x.device), right=True)
        for starts, x in zip(packed, (query, key), strict=True)
    )
    same = q_of.view(len(query), -1, 1) == k_of.view(len(key), 1, -1)
    return _intersected(same[:, None], mask, query, key, causal)


def _intersected(seen: Tensor, mask: Tensor | None, query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """Return the intersection of two masks."""
    if mask is None:
        return seen & _upper_left(query, key) if causal and query.shape[2] > 1 else seen
    dense = bools(mask) if isinstance(mask, BandMask) else mask
    if dense.dtype == torch.bool:
        return dense & seen
    return dense.masked_fill(~seen, torch.finfo(dense.dtype).min)


def _upper_left(query: Tensor, key: Tensor) -> Tensor:
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()[None, None]


def _by_pytorch(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    softcap: float | None,
    s_aux: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention like the model itself: by `sdpa`, or by its own `eager` function if `sdpa` lacks an option."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if isinstance(mask, BandMask):
        rule, square = mask.visible, mask.shape[2] == mask.shape[3]
        window = (rule.left, rule.right) if rule is not None and rule.is_plain() else ()
        is_causal = square and window == (None, 0)
        mask = None if is_causal or window == (None, None) else bools(mask)
    own = {name: setting for name, setting in (("softcap", softcap), ("s_aux", s_aux)) if setting is not None}
    if not own and "sinks" not in options and not options.get("output_attentions"):
        if mask is not None and mask.dtype not in (torch.bool, query.dtype):
            # Under autocast scores are half precision, which cannot hold the lowest value of the mask's dtype.
            mask = mask.clamp(min=torch.finfo(query.dtype).min).to(query.dtype)
        return sdpa_attention_forward(module, query, key, value, mask, is_causal=is_causal, **options)
    eager: Callable[..., Any] | None = getattr(
        sys.modules[type(module).__module__], "eager_attention_forward", None
    )
    if eager is None:
        raise NotImplementedError(
            f"attn_implementation='{NAME}' leaves this call of {type(module).__name__} to the model's eager attention, "
            "but found none: use 'eager' or 'sdpa' for this model"
        )
    if mask is None and is_causal and query.shape[2] > 1:
        mask = _upper_left(query, key)
    if mask is not None and mask.dtype == torch.bool:
        mask = additive(mask, query.dtype)
    if options["scaling"] is None:
        options["scaling"] = query.shape[-1] ** -0.5
    out, weights = eager(module, query, key, value, mask, **options, **own)
    return out, weights

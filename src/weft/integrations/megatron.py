"""Megatron-core: layers by spec, and replacements for what its fusion flags take from TransformerEngine.

    from weft.integrations.megatron import block_spec, fusions

    with fusions():  # around everything that creates configurations and models, and runs them
        config = TransformerConfig(..., moe_grouped_gemm=True, moe_permute_fusion=True, moe_router_fusion=True,
                                   cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")
        model = GPTModel(config, transformer_layer_spec=block_spec(config), ...)

`layer_spec` and `block_spec` are Megatron's local specs, which need neither TransformerEngine nor apex, with Weft's
modules: norms (including zero-centered gamma and sequence parallelism, which the local norm refuses), gated units, and
experts as grouped products. State dicts have the names of Megatron's modules.

`fusions` gives Megatron functions with the signatures of TransformerEngine's for permutation, routing and the loss.
They are active only inside the `with`, whether TransformerEngine is installed or not.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..ops import Recipe, RowMap, VocabShard
from ..ops.common.activations import Act
from .common import experts_of_sorted_rows, needs

VERSIONS = ">=0.15,<0.17"
try:
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.models.common.language_module import language_module
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.moe import grouped_gemm_util, moe_utils
    from megatron.core.transformer.moe import router as router_module
    from megatron.core.transformer.moe.experts import GroupedMLP
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
except ImportError as error:
    raise needs("megatron-core", VERSIONS, error) from error


# ---- modules --------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """RMSNorm or LayerNorm, depending on `config.normalization`."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **options: Any
    ) -> None:
        super().__init__()
        if config.normalization not in ("RMSNorm", "LayerNorm"):
            raise ValueError(
                f"Weft has RMSNorm and LayerNorm, but the config asks for {config.normalization!r}"
            )
        self.eps = eps
        self.weight_offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        shape: dict[str, Any] = {"size": (hidden_size,), "dtype": config.params_dtype, "device": device}
        self.weight = nn.Parameter(torch.full(fill_value=1.0 - self.weight_offset, **shape))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.full(fill_value=0.0, **shape))
        for parameter in self.parameters():  # Megatron then sums their gradients over the ranks of a sequence
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.normalize = ops.rms_norm if config.normalization == "RMSNorm" else ops.layer_norm

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x, self.weight, self.bias, eps=self.eps, weight_offset=self.weight_offset)


def _unit_of(config: TransformerConfig) -> dict[str, Any] | None:
    """Return the arguments of `weft.glu` for the activation of an MLP, or None if it has none for it."""
    unit: dict[str, Any] = {"layout": "concat" if config.gated_linear_unit else "none"}
    if config.activation_func is F.silu:
        unit["act"] = "silu"
    elif config.activation_func is quick_gelu:
        unit["act"] = "quick_gelu"
    elif config.activation_func is F.gelu:
        # Megatron's fused functions approximate the error function by tanh.
        unit["act"] = "gelu_tanh" if config.bias_activation_fusion else "gelu"
    elif config.activation_func is F.relu:
        unit["act"] = "relu"
    elif config.activation_func is squared_relu:
        unit["act"] = "relu2"
    else:
        return None
    if config.gated_linear_unit:
        unit["limit"] = getattr(config, "activation_func_clamp_value", None)
        unit["up_offset"] = getattr(config, "glu_linear_offset", 0.0)
    return unit


class GatedMLP(MLP):
    """Megatron's MLP with bias, activation, gate and token scale in one kernel. Its tensor-parallel group is the one in
    `parallel_state`: Megatron passes the groups of a `pg_collection` to classes it knows, and warns about others."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        unit = None if self.config.use_te_activation_func else _unit_of(self.config)
        if unit is None:
            return super().forward(hidden_states, per_token_scale, **options)
        z, bias = self.linear_fc1(hidden_states)
        y, out_bias = self.linear_fc2(ops.glu(z, bias=bias, probs=per_token_scale, **unit))
        if per_token_scale is not None and out_bias is not None:
            y, out_bias = y + out_bias * per_token_scale.unsqueeze(-1), None
        return y, out_bias


class SharedExperts(SharedExpertMLP, GatedMLP):
    """Megatron's shared experts as a `GatedMLP`. With `moe_shared_expert_overlap` Megatron splits them into steps of
    its own, which are not replaced."""


class Experts(GroupedMLP):
    """Megatron's experts as two grouped products, by `weft.grouped_matmul` in place of the package grouped_gemm. A
    `recipe` sets the format of both products and their gradients."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *args: Any,
        recipe: Recipe | str | None = None,
        **options: Any,
    ) -> None:
        if not config.gated_linear_unit or config.activation_func not in (F.silu, F.gelu):
            raise ValueError(
                "Weft's experts need a silu or gelu gate: set gated_linear_unit=True and activation_func=F.silu or "
                "F.gelu, or moe_grouped_gemm=False"
            )
        with replaced(grouped_gemm_util, assert_grouped_gemm_is_available=lambda: None):
            super().__init__(num_local_experts, config, *args, **options)
        self.recipe = None if recipe is None else Recipe.of(recipe)
        self.act: Act = "silu" if config.activation_func is F.silu else "gelu"

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        x, probs, count = permuted_local_hidden_states, permuted_probs, self.num_local_experts
        if self.config.moe_apply_probs_on_input:
            x, probs = (probs.unsqueeze(-1) * x).to(x.dtype), torch.ones_like(probs)
        up = self.weight1.view(count, self.config.hidden_size, -1)  # [experts, K, 2H]
        down = self.weight2.view(count, -1, self.config.hidden_size)  # [experts, H, K]
        counts = tokens_per_expert.to(x.device, non_blocking=True)
        if self.recipe is not None:
            transposed = up.transpose(1, 2), down.transpose(1, 2)
            y = experts_of_sorted_rows(x, *transposed, counts, probs, recipe=self.recipe, act=self.act)
        else:
            ends = counts.cumsum(0, dtype=torch.int32)
            z = ops.grouped_matmul(x, up, ends, transpose=True)
            h = ops.glu(z, act=self.act, probs=probs, ends=ends)
            y = ops.grouped_matmul(h, down, ends, transpose=True)
        return y, None


# ---- specs ----------------------------------------------------------------------------------------------


def layer_spec(
    config: TransformerConfig, *, moe: bool | None = None, recipe: Recipe | str | None = None
) -> ModuleSpec:
    """Return the spec of one transformer layer, for `transformer_layer_spec=`. A model's final norm does not belong to
    its layers: use `block_spec`, which Megatron takes in the same place, to replace it too.

    - `moe`: whether the layer has experts; by default if the config has some.
    - `recipe`: the format of the experts' products, as in `weft.experts`; needs `moe_grouped_gemm`.
    """
    has_experts = config.num_moe_experts is not None if moe is None else moe
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
        qk_l2_norm=getattr(config, "qk_l2_norm", False),  # 0.15 has no such setting
    )
    return _with_weft(spec, recipe)


def block_spec(
    config: TransformerConfig, *, vp_stage: int | None = None, recipe: Recipe | str | None = None
) -> TransformerBlockSubmodules:
    """Return the spec of all layers of this pipeline stage and the final norm, for `transformer_layer_spec=`."""
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=False,
        normalization=config.normalization,
        qk_l2_norm=getattr(config, "qk_l2_norm", False),  # 0.15 has no such setting
        vp_stage=vp_stage,
    )
    return _with_weft(block, recipe)


# Megatron's local spec uses apex's norm for LayerNorm if apex is installed.
_NORMS = (WrappedTorchNorm, gpt_layer_specs.LNImpl)


def _with_weft(spec: Any, recipe: Recipe | str | None) -> Any:
    """Return a copy of a spec, or of a part of one, with Weft's modules in place of Megatron's."""
    if spec in _NORMS:
        return Norm
    if isinstance(spec, list):
        return [_with_weft(part, recipe) for part in spec]
    if isinstance(spec, ModuleSpec):
        copied = copy.copy(spec)
        copied.module = {MLP: GatedMLP, SharedExpertMLP: SharedExperts, GroupedMLP: Experts}.get(
            spec.module, spec.module
        )
        if copied.module is Experts and recipe is not None:
            copied.params = {**spec.params, "recipe": recipe}
        copied.submodules = _with_weft(spec.submodules, recipe)
        return copied
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        copied = copy.copy(spec)
        for field in dataclasses.fields(spec):
            setattr(copied, field.name, _with_weft(getattr(spec, field.name), recipe))
        return copied
    return spec


# ---- replacements for TransformerEngine's functions -----------------------------------------------------


@contextlib.contextmanager
def fusions() -> Iterator[None]:
    """Use Weft's functions where Megatron's flags `moe_permute_fusion`, `moe_router_fusion` and, with
    `cross_entropy_fusion_impl="te"`, `cross_entropy_loss_fusion` call TransformerEngine's. The router's product is
    Weft's regardless of flags."""
    replacements = {
        "HAVE_TE": True,
        "fused_permute": fused_permute,
        "fused_permute_with_probs": fused_permute_with_probs,
        "fused_unpermute": fused_unpermute,
        "fused_sort_chunks_by_index": fused_sort_chunks_by_index,
        "fused_sort_chunks_by_index_with_probs": fused_sort_chunks_by_index_with_probs,
        "fused_topk_with_score_function": fused_topk_with_score_function,
        "fused_compute_score_for_moe_aux_loss": fused_compute_score_for_moe_aux_loss,
        "fused_moe_aux_loss": fused_moe_aux_loss,
    }
    with (
        replaced(moe_utils, **replacements),
        replaced(router_module, router_gating_linear=router_gating_linear),
        replaced(language_module, te_parallel_cross_entropy=te_parallel_cross_entropy),
    ):
        yield


@contextlib.contextmanager
def replaced(module: ModuleType, **names: Any) -> Iterator[None]:
    """Replace these names of a module inside the `with`."""
    absent = object()
    originals = {name: getattr(module, name, absent) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        for name, value in originals.items():
            if value is absent:
                delattr(module, name)
            else:
                setattr(module, name, value)


def _rows_of(routing_map: Tensor, num_out_tokens: int | Tensor | None) -> RowMap:
    """Return the row map of a mask [tokens, experts]. Megatron knows the number of rows, unless a caller omits it."""
    rows = -1 if num_out_tokens is None else int(num_out_tokens)
    return ops.row_map(routing_map.bool(), rows=int(routing_map.sum()) if rows < 0 else rows)


def fused_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int | Tensor | None = None
) -> tuple[Tensor, RowMap]:
    rows = _rows_of(routing_map, num_out_tokens)
    return ops.permute(inp, rows), rows


def fused_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int | Tensor | None = None
) -> tuple[Tensor, Tensor, RowMap]:
    rows = _rows_of(routing_map, num_out_tokens)
    return *ops.permute(inp, rows, probs), rows


def fused_unpermute(
    inp: Tensor,
    row_id_map: RowMap,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
) -> Tensor:
    return ops.unpermute(inp, row_id_map, merging_probs)


def _rows_of_chunks(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> RowMap:
    """Return the row map that reorders chunks: chunk `sorted_index[i]` comes i-th, so its rows belong to expert i."""
    sizes, order = split_sizes.to(inp.device), sorted_index.to(inp.device, torch.int64)
    position = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=inp.device))
    expert = position.repeat_interleave(sizes, output_size=len(inp))
    return ops.row_map(expert[:, None], len(order))


def fused_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    return ops.permute(inp, _rows_of_chunks(inp, split_sizes, sorted_index))


def fused_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    return ops.permute(inp, _rows_of_chunks(inp, split_sizes, sorted_index), probs[:, None])


def router_gating_linear(
    inp: Tensor, weight: Tensor, bias: Tensor | None, router_dtype: torch.dtype
) -> Tensor:
    if router_dtype == torch.float64:
        return F.linear(inp.double(), weight.double(), None if bias is None else bias.double())
    return ops.router_linear(inp, weight, bias).to(router_dtype)


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the probabilities [tokens, experts] of the chosen experts, zero for others, and the mask of the chosen
    ones."""
    chosen = ops.route(
        logits,
        topk,
        convention="megatron",
        score=score_function,  # type: ignore[arg-type]
        post_softmax=score_function == "softmax" and not use_pre_softmax,
        bias=expert_bias,
        groups=num_groups or 1 if group_topk else 1,
        group_topk=group_topk or None,
        scale=scaling_factor or 1.0,
        index_dtype=torch.int64,
    )
    mask = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen.indices, True)
    return torch.zeros_like(logits).scatter(1, chosen.indices, chosen.weights), mask


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str
) -> tuple[Tensor, Tensor]:
    """Return the mask of each token's best experts, and all its scores, through which the balance loss is
    differentiated. PyTorch's own functions compute them, since the scores must be materialized."""
    if score_function == "softmax":
        scores = logits.softmax(-1, dtype=torch.float32)
    else:
        scores = logits.float().sigmoid()
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    mask = torch.zeros_like(logits, dtype=torch.bool).scatter(1, scores.topk(topk, dim=1).indices, True)
    return mask, scores


def fused_moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    topk: int,
    num_experts: int,
    coeff: float,
) -> Tensor:
    share = num_experts * coeff / (topk * total_num_tokens * total_num_tokens)
    return (probs.sum(0) * tokens_per_expert).sum() * share


def te_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    tp_group: torch.distributed.ProcessGroup,
    is_cg_capturable: bool = False,
) -> Tensor:
    """Return the loss of each token, for logits [sequence, batch, columns of this rank]."""
    ranks, columns = tp_group.size(), logits.shape[-1]
    shard = None
    if ranks > 1:  # Megatron pads the vocabulary so that all ranks have equally many columns
        start = tp_group.rank() * columns
        shard = VocabShard(tp_group, start, start + columns, ranks * columns)
    return ops.cross_entropy(logits, labels, reduction="none", shard=shard)

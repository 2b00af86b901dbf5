"""Tiny transformers models with random weights, and the same models built from `weft.nn`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft.nn

pytest.importorskip("transformers", reason="needs transformers: pip install 'weft[transformers]'")

import transformers

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "norm_topk_prob": True,
        },
    ),
    # The first layer is dense, the second has experts; queries come from a latent.
    "deepseek-v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 128,
            "first_k_dense_replace": 1,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "rope_parameters": YARN,
        },
    ),
}


def of_transformers(name: str) -> Any:
    """Return the model of transformers, with weights that make every part matter."""
    kind, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL | options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            mean = 1.0 if tensor.dim() == 1 else 0.0
            tensor.data.normal_(mean, 0.08)
    for rotary in (m for m in model.modules() if hasattr(m, "inv_freq")):
        rotary.__init__(config)  # type: ignore[misc]
    return model


class Decoder(nn.Module):
    """The `model.` part of a checkpoint."""

    def __init__(self, config: Any, **factory_kwargs: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, device=factory_kwargs.get("device")
        )
        self.layers = nn.ModuleList(
            layer(config, i, **factory_kwargs) for i in range(config.num_hidden_layers)
        )
        self.norm = weft.nn.RMSNorm(
            config.hidden_size, config.rms_norm_eps, device=factory_kwargs.get("device")
        )


class Model(nn.Module):
    """The full model of a checkpoint."""

    def __init__(self, config: Any, **factory_kwargs: Any) -> None:
        super().__init__()
        self.model = Decoder(config, **factory_kwargs)
        self.lm_head = weft.nn.LinearCrossEntropy(
            config.hidden_size, config.vocab_size, device=factory_kwargs.get("device")
        )

    def hidden(self, ids: Tensor, **options: Any) -> Tensor:
        h = self.model.embed_tokens(ids)
        caches = options.pop("caches", [None] * len(self.model.layers))
        for one, cache in zip(self.model.layers, caches, strict=True):
            h = one(h, **options) if cache is None else one(h, cache=cache, **options)
        return self.model.norm(h)

    def forward(self, ids: Tensor, labels: Tensor | None = None, **options: Any) -> Tensor:
        h = self.hidden(ids, **options)
        return self.lm_head.logits(h) if labels is None else self.lm_head(h[:, :-1], labels[:, 1:])


def layer(config: Any, index: int, **factory_kwargs: Any) -> weft.nn.DecoderLayer:
    """Return a layer of the model with this configuration."""
    hidden = config.hidden_size
    moe = getattr(config, "moe_intermediate_size", None)
    if moe is None or index < getattr(config, "first_k_dense_replace", 0):
        bias = getattr(config, "mlp_bias", False)
        mlp: nn.Module = weft.nn.GLU(hidden, config.intermediate_size, bias=bias, **factory_kwargs)
    else:
        mlp = mixture(config, moe, **factory_kwargs)
    bare = {name: value for name, value in factory_kwargs.items() if name != "recipe"}
    return weft.nn.DecoderLayer(attention(config, **factory_kwargs), mlp, eps=config.rms_norm_eps, **bare)


def attention(config: Any, **factory_kwargs: Any) -> nn.Module:
    if hasattr(config, "kv_lora_rank"):
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        rotary = weft.nn.Rotary.of(
            config.rope_parameters, dim=config.qk_rope_head_dim, style="interleaved", first=False
        )
        sizes = {name: getattr(config, name) for name in names}
        return weft.nn.LatentAttention(
            config.hidden_size, config.num_attention_heads, **sizes, rotary=rotary, **factory_kwargs
        )
    return weft.nn.Attention(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim=config.head_dim,
        rotary=weft.nn.Rotary.of(config.rope_parameters),
        qk_norm=config.rms_norm_eps if config.model_type.startswith("qwen3") else None,
        bias=config.attention_bias,
        **factory_kwargs,
    )


def mixture(config: Any, width: int, **factory_kwargs: Any) -> weft.nn.MoE:
    hidden, bare = (
        config.hidden_size,
        {name: value for name, value in factory_kwargs.items() if name != "recipe"},
    )
    deepseek = config.model_type == "deepseek_v3"
    num_experts = config.n_routed_experts if deepseek else config.num_experts
    options: dict[str, Any] = {"convention": "qwen3", "renormalize": config.norm_topk_prob}
    if deepseek:
        options |= {
            "convention": "deepseek_v3",
            "correction_bias": True,
            "groups": config.n_group,
            "group_topk": config.topk_group,
            "scale": config.routed_scaling_factor,
        }
    gate = weft.nn.Router(hidden, num_experts, config.num_experts_per_tok, **options, **bare)
    experts = weft.nn.Experts(num_experts, hidden, width, **factory_kwargs)
    shared = weft.nn.GLU(hidden, width * config.n_shared_experts, **factory_kwargs) if deepseek else None
    return weft.nn.MoE(gate, experts, shared_experts=shared)


def ids(batch: int = 2, tokens: int = 24) -> Tensor:
    return torch.randint(199, (batch, tokens), generator=torch.Generator().manual_seed(1))

"""Tiny transformers models with random weights: dense, with softcap and tied head, and three mixtures of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'weft[transformers]'")

import transformers

VOCABULARY = 203
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma3": (
        "Gemma3",
        {"head_dim": 32, "sliding_window": 16, "final_logit_softcapping": 30.0, "tie_word_embeddings": True},
    ),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 32, "num_experts": 8, "norm_topk_prob": True, **EXPERTS}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 24,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            **EXPERTS,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16},
    ),
}


def build(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return a model for training."""
    kind, own = MODELS[name]
    torch.manual_seed(0)
    config_of = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")(config_of(**SMALL | own | options))
    draw = torch.Generator().manual_seed(1)
    for path, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=draw) * 0.08
        parameter.data = parameter.data + noise if "norm" in path else noise
    return model.to(dtype).train()


def batch(samples: int = 2, tokens: int = 24) -> dict[str, Tensor]:
    """Return tokens and labels; some labels are ignored."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCABULARY, (samples, tokens), generator=draw)
    labels = ids.clone()
    labels[0, :7] = -100
    return {"input_ids": ids, "labels": labels}


def step(model: Any, inputs: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a batch, and the gradients of all parameters."""
    model.zero_grad()
    loss = model(**inputs or batch(), use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def distance(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the distance of two sets of gradients, relative to the norm of the second."""
    assert actual.keys() == expected.keys()
    difference = sum((actual[n].double() - expected[n].double()).square().sum() for n in expected)
    return float((difference / sum(expected[n].double().square().sum() for n in expected)) ** 0.5)

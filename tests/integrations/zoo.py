"""Tiny transformers models with random weights: those that its auto classes list for text, images and speech.

`entries()` names them, `build(entry)` builds one. Sizes follow from the names of a configuration's fields; `SPECIAL`
has what a model needs besides. A model that still has more than `LARGEST` parameters is left out.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 160
LARGEST = 1_500_000
LENGTH = 24  # tokens of a sample

_WIDTH = (
    "hidden_size",
    "d_model",
    "n_embd",
    "dim",
    "embedding_size",
    "word_embed_proj_dim",
    "emb_dim",
    "projection_size",
)
_INNER = (
    *(
        "intermediate_size",
        "ffn_dim",
        "n_inner",
        "d_ff",
        "ffn_hidden_size",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
    ),
    *("hidden_dim", "dff", "shared_intermediate_size", "intermediate_size_mlp"),
)
_LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers"),
    *("decoder_layers", "num_encoder_layers"),
)
_HEADS = (
    *(
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
    ),
    *("num_encoder_attention_heads", "num_decoder_attention_heads"),
)
_POSITIONS = (
    *("max_position_embeddings", "n_positions", "n_ctx", "max_source_positions", "max_target_positions"),
    *(
        "max_encoder_position_embeddings",
        "max_decoder_position_embeddings",
        "original_max_position_embeddings",
    ),
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SIZES: dict[str, Any] = {
    **dict.fromkeys(_WIDTH, 64),
    **dict.fromkeys(_INNER, 96),
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_POSITIONS, 128),
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "global_head_dim", "swa_head_dim"), 16),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32
    ),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    "vocab_size": VOCABULARY,
    "type_vocab_size": 2,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "state_size": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "rotary_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 16,
    "conv_dim": (32, 32),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 2,
}
_MLA = {"num_key_value_heads": 4, "head_dim": 16}
_HYBRID = ["linear_attention", "full_attention"]
_SLIDING = ["sliding_attention", "full_attention"]

# Extra configuration besides SIZES, by model type.
SPECIAL: dict[str, dict[str, Any]] = {
    "axk1": _MLA,
    "axk2": _MLA,
    "deepseek_v2": {**_MLA, "topk_method": "greedy"},
    "deepseek_v3": {**_MLA, "n_routed_experts": 8, "n_group": 2},
    "flint": {"layer_types": _SLIDING},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "deepseek_v32": {**_MLA, "n_routed_experts": 8, "n_group": 2},
    "glm4_moe_lite": _MLA,
    "glm_moe_dsa": _MLA,
    "longcat_flash": {**_MLA, "num_layers": 2},
    "minicpm3": _MLA,
    "bamba": {"attn_layer_indices": [1]},
    "bailing_hybrid": {**_MLA, "layer_types": _HYBRID},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "logits_scaling": 4.0},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "kimi_linear": {**_MLA, "layer_types": _HYBRID},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gemma2": {"layer_types": _SLIDING, "query_pre_attn_scalar": 16},
    "gemma3_text": {"layer_types": _SLIDING, "query_pre_attn_scalar": 16, "final_logit_softcapping": 9.0},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": _SLIDING * 2,
        "num_kv_shared_layers": 0,
        "intermediate_size": [96] * 4,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "laurel_rank": 8,
    },
    "llama4_text": {
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "moe_layers": [1],
    },
    **{
        key: {"layer_types": _HYBRID}
        for key in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text")
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
        "num_key_value_heads": 4,
        "hybrid_layer_ids": [1],
        "chunk_size": 8,
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "lm_head_multiplier": 0.5},
    "minimax": {"layer_types": ["full_attention", "linear_attention"], "block_size": 8},
    "recurrent_gemma": {
        "lru_width": 64,
        "attention_window_size": 8,
        "block_types": ["recurrent", "attention"],
    },
    "youtu": _MLA,
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "mamba_dt_rank": 8,
        "n_mamba_heads": 2,
        "num_key_value_heads": 4,
        "use_mamba_kernels": False,
    },
    "zaya": {"num_experts_per_tok": 1},
    "esm": {"token_dropout": False},
    "esmc": {"num_key_value_heads": 4},
    "led": {"attention_window": 8},
    **{
        key: {"decoder_start_token_id": 0}
        for key in ("t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano")
    },
    "gemma4_text": {
        "layer_types": _SLIDING * 2,
        "num_hidden_layers": 4,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "cohere_compass_text": {"layer_types": _SLIDING},
    "falcon": {"new_decoder_architecture": True, "bias": False, "alibi": False},
}


# By model type: seeds for which no activation lies at the kink of a ReLU, where the last bit decides a gradient.
SEEDS = {"mobilebert": 1}


class Entry(NamedTuple):
    """Class of transformers, its configuration, and the kind of its inputs."""

    name: str
    model_type: str
    kind: str  # "causal", "seq2seq", "masked", "image", "sound" or "speech"


def entries() -> list[Entry]:
    """Return the classes that transformers' auto classes list, each once, without importing anything."""
    lists = {
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        "sound": modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
        "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    }
    by_name: dict[str, Entry] = {}
    for kind, names in lists.items():
        for model_type, name in names.items():
            # Of a text model inside a larger one, the configuration with "text" in its name is its own.
            fits = kind == "seq2seq" or model_type not in lists["seq2seq"]
            if fits and isinstance(name, str) and (name not in by_name or "text" in model_type):
                by_name[name] = Entry(name, model_type, kind)
    return list(by_name.values())


def _fields(model_type: str) -> set[str]:
    return {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}


class CannotBuild(Exception):
    """Reason a model is not in the zoo."""


def config_of(entry: Entry, *, dropout: float = 0.0) -> Any:
    """Return a small configuration; `dropout` goes into every dropout field."""
    kind = CONFIG_MAPPING[entry.model_type]
    fields = _fields(entry.model_type)
    if fields & {"text_config", "vision_config", "audio_config", "backbone_config"}:
        raise CannotBuild("it is made of several models")
    special = SPECIAL.get(entry.model_type, {})
    noisy = [
        name
        for name in fields
        if name.endswith(("dropout", "pdrop", "dropout_prob", "dropout_rate", "dropout_p"))
    ]
    options = {name: value for name, value in SIZES.items() if name in fields}
    options |= {
        name: dropout for name in noisy if name not in ("classifier_dropout", "token_dropout")
    } | special
    options |= {
        name: 0.0 for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop") if name in fields
    }
    return kind(**options)


def build(entry: Entry, *, dropout: float = 0.0) -> Any:
    """Return the model for training, with weights that make attention and routing uneven."""
    kind = getattr(transformers, entry.name)
    config = config_of(entry, dropout=dropout)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > LARGEST:
        raise CannotBuild(f"it has over {LARGEST / 1e6} million parameters")
    seed = SEEDS.get(entry.model_type, 0)
    torch.manual_seed(seed)
    return randomize(kind(config), seed).train()


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Redraw all weights: initial weights make attention nearly uniform, which hides mistakes."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if parameter.dim() >= 2:
                parameter.copy_(noise * 0.12)
            elif not name.endswith(("A_log", "dt_bias", ".D")):
                parameter.add_(noise * (0.2 if "norm" in name.lower() and "weight" in name else 0.1))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=draw) * 0.05)
    return model


def batch(entry: Entry, samples: int = 2, tokens: int = LENGTH) -> dict[str, Tensor]:
    """Return inputs and labels; some token labels are ignored."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCABULARY, (samples, tokens), generator=draw)
    labels = torch.randint(3, VOCABULARY, (samples, tokens), generator=draw)
    if entry.kind == "image":
        return {"pixel_values": torch.randn(samples, 3, 32, 32, generator=draw), "labels": labels[:, 0] % 2}
    if entry.kind == "sound":
        return {"input_values": torch.randn(samples, 400, generator=draw), "labels": labels[:, :4]}
    if entry.kind == "speech":
        return {"input_features": torch.randn(samples, 16, 256, generator=draw), "labels": labels}
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}

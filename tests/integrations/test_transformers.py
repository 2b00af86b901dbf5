"""`attn_implementation="weft"` beside transformers' own eager attention, on tiny models with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import masking_utils

from tests.integrations.tiny import batch as tokens
from tests.integrations.tiny import build, distance, step
from weft.integrations import transformers as integration

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}
# Dense, window, window with softcap, window with sinks.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 8, "attn_logit_softcapping": 5.0}),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    integration.register()
    kind, options = MODELS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL, **options)
    made = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in made.parameters():
        parameter.data.normal_(0.0 if parameter.dim() > 1 else 1.0, 0.08)
    return made


def both(model: Any, compute: Any) -> tuple[Any, Any]:
    """What eager attention and Weft's give."""
    found = []
    for name in ("eager", "weft"):
        model.set_attn_implementation(name)
        found.append(compute())
    return found[0], found[1]


def batch() -> tuple[Tensor, Tensor]:
    """Three samples of 20 tokens, and a mask with pads on the left."""
    ids = torch.randint(3, 199, (3, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :7] = mask[1, :1] = 0
    return ids, mask


def test_logits(model: Any) -> None:
    """With pads on either side, and without."""
    ids, left = batch()
    with torch.no_grad():
        for mask in (None, left, left.flip(1)):
            wanted, found = both(model, lambda mask=mask: model(ids, attention_mask=mask).logits)
            real = slice(None) if mask is None else mask.bool()
            torch.testing.assert_close(found[real], wanted[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_the_same_tokens_are_generated(model: Any, options: dict[str, Any]) -> None:
    ids, mask = batch()
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "attention_mask": mask, **options}
    wanted, found = both(model, lambda: model.generate(ids, **options))
    assert found.shape == (3, 40)
    assert torch.equal(found, wanted)


def test_gradients(model: Any) -> None:
    """Of a batch with pads: a token after a pad has no token that predicts it."""
    ids, mask = batch()
    labels = ids.masked_fill(mask.cumsum(1) < 2, -100)

    def gradients() -> Tensor:
        model.zero_grad()
        model(ids, attention_mask=mask, labels=labels).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    wanted, found = both(model, gradients)
    assert (found - wanted).abs().max() < 5e-6 * wanted.abs().max()


def test_which_masks_are_bands() -> None:
    sequences = torch.tensor([[0] * 5 + [1] * 5])
    assert integration.sees_a_band(masking_utils.causal_mask_function)
    assert integration.sees_a_band(masking_utils.bidirectional_mask_function)
    assert integration.sees_a_band(masking_utils.sliding_window_causal_mask_function(128))
    chunks = masking_utils.chunked_causal_mask_function(128, torch.zeros(1, dtype=torch.int))
    assert not integration.sees_a_band(chunks)
    assert not integration.sees_a_band(
        masking_utils.and_masks(
            masking_utils.packed_sequence_mask_function(sequences), masking_utils.causal_mask_function
        )
    )


def test_other_masks_are_pytorchs() -> None:
    """A mask that is no band reaches the model as it is."""
    module = torch.nn.Module()
    module.num_key_value_groups = 1  # type: ignore[assignment]
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    mask = torch.rand(1, 1, 6, 6) > 0.3
    mask |= torch.eye(6, dtype=torch.bool)
    found, _ = integration.attention_forward(module, q, k, v, mask)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(found, wanted.transpose(1, 2))
    with pytest.raises(NotImplementedError, match="eager"):
        integration.attention_forward(module, q, k, v, mask, softcap=5.0)


def test_what_cannot_be_served_is_refused() -> None:
    q = torch.randn(1, 2, 6, 8)
    with pytest.raises(ValueError, match="no dropout"):
        integration.attention_forward(torch.nn.Module(), q, q, q, None, dropout=0.1)
    holes = torch.tensor([[True, False, True, True, True, True]])
    with pytest.raises(RuntimeError, match="follow each other"):
        integration.attention_forward(torch.nn.Module(), q, q, q, holes)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_by_name(name: str) -> None:
    """Gradients beside those of transformers' own loop over the experts, eager and as one graph."""
    integration.register()
    model = build(name)
    loss, gradients = step(model)
    model.set_experts_implementation("weft")
    mine, found = step(model)
    torch.testing.assert_close(mine, loss, rtol=1e-6, atol=1e-6)
    assert distance(found, gradients) < 5e-6
    if name == "qwen3_moe":
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(**tokens(), use_cache=False).loss.detach(), mine)


def test_experts_that_weft_does_not_have_are_refused() -> None:
    integration.register()
    model = build("qwen3_moe", experts_implementation="weft")
    model.model.layers[0].mlp.experts.act_fn = torch.nn.Hardtanh()
    with pytest.raises(NotImplementedError, match=r"Qwen3MoeExperts.*Take 'grouped_mm'"):
        step(model)

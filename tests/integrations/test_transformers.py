"""`attn_implementation="weft"` compared with transformers' own eager attention, on tiny models with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'weft[transformers]'")

import transformers

from tests.integrations import sweep, zoo
from tests.integrations.tiny import batch as tokens
from tests.integrations.tiny import build, distance, step
from weft.integrations import masks
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
# Dense, window, window with softcap, and window with sinks.
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
    network = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in network.parameters():
        parameter.data.normal_(0.0 if parameter.dim() > 1 else 1.0, 0.08)
    return network


def both(model: Any, compute: Any) -> tuple[Any, Any]:
    """Return the results of eager attention and of Weft's."""
    results = []
    for name in ("eager", "weft"):
        model.set_attn_implementation(name)
        results.append(compute())
    return results[0], results[1]


def batch() -> tuple[Tensor, Tensor]:
    """Return three samples of 20 tokens, and a mask with padding on the left."""
    ids = torch.randint(3, 199, (3, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :7] = mask[1, :1] = 0
    return ids, mask


def test_logits_match_eager_attention(model: Any) -> None:
    """Logits match with padding on either side, and without."""
    ids, left = batch()
    with torch.no_grad():
        for mask in (None, left, left.flip(1)):
            expected, actual = both(model, lambda mask=mask: model(ids, attention_mask=mask).logits)
            real = slice(None) if mask is None else mask.bool()
            torch.testing.assert_close(actual[real], expected[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_the_same_tokens_are_generated(model: Any, options: dict[str, Any]) -> None:
    ids, mask = batch()
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "attention_mask": mask, **options}
    expected, actual = both(model, lambda: model.generate(ids, **options))
    assert actual.shape == (3, 40)
    assert torch.equal(actual, expected)


def test_gradients_match_eager_attention(model: Any) -> None:
    """The batch has padding; no token predicts the first token after it."""
    ids, mask = batch()
    labels = ids.masked_fill(mask.cumsum(1) < 2, -100)

    def gradients() -> Tensor:
        model.zero_grad()
        model(ids, attention_mask=mask, labels=labels).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    expected, actual = both(model, gradients)
    assert (actual - expected).abs().max() < 5e-6 * expected.abs().max()


# ---- special cases --------------------------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the engine of each attention call: "weft", "packed" sequences by Weft, or "pytorch"."""
    engines: list[str] = []
    weft, pytorch = integration.attention, integration._by_pytorch

    def by_weft(*args: Any, **options: Any) -> Any:
        engines.append("packed" if options.get("cu_seqlens") is not None else "weft")
        return weft(*args, **options)

    def by_pytorch(*args: Any, **options: Any) -> Any:
        engines.append("pytorch")
        return pytorch(*args, **options)

    monkeypatch.setattr(integration, "attention", by_weft)
    monkeypatch.setattr(integration, "_by_pytorch", by_pytorch)
    return engines


def entry(name: str) -> zoo.Entry:
    return next(entry for entry in zoo.entries() if entry.name == name)


def relative_distance(model: Any, compute: Any) -> float:
    """Return the distance of Weft's attention from the model's own, all queries included."""
    integration.register()
    results = []
    for name in ("sdpa" if model._supports_sdpa else "eager", "weft"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            results.append(compute())
    expected, actual = results
    return float((actual - expected).norm() / expected.norm())


def test_cross_attention_sees_all_keys_of_the_encoder(served: list[str]) -> None:
    one = entry("MarianMTModel")
    model, inputs = zoo.build(one).eval(), zoo.batch(one)
    short = {"input_ids": inputs["input_ids"], "decoder_input_ids": inputs["labels"][:, 6:11].clone()}
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, -7:] = 0
    for options in ({}, {"attention_mask": mask}, {"attention_mask": mask.flip(1)}):
        assert relative_distance(model, lambda options=options: model(**short, **options).logits) < 5e-6
    assert "pytorch" not in served
    changed = short["input_ids"].clone()
    changed[:, -1] += 1
    with torch.no_grad():
        difference = model(**short).logits - model(**short | {"input_ids": changed}).logits
    assert difference.abs().max() > 1e-3, "the last key of the encoder counts"


def test_position_biases_are_added(served: list[str]) -> None:
    one = entry("T5ForConditionalGeneration")
    model = zoo.build(one).eval()
    assert relative_distance(model, lambda: model(**zoo.batch(one)).logits) < 5e-6
    assert set(served) == {"pytorch"}


@pytest.mark.parametrize("name", ["DogeForCausalLM", "DeepseekV32ForCausalLM", "Gemma4ForCausalLM"])
def test_models_may_edit_their_mask(name: str) -> None:
    """Doge adds to its mask, DeepSeek-V3.2 reads it to choose keys, Gemma 4 slices it when it drops queries."""
    one = entry(name)
    model = zoo.build(one).eval()
    ids = zoo.batch(one)["input_ids"]
    assert relative_distance(model, lambda: model(ids, logits_to_keep=3).logits) < 5e-6


def test_padded_queries_match_sdpa() -> None:
    """SigLIP's text model uses the result of the last token, whether padding or not."""
    config = transformers.SiglipTextConfig(
        **{
            name: SMALL[name]
            for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
        },
        num_attention_heads=4,
        max_position_embeddings=32,
        projection_size=64,
    )
    torch.manual_seed(0)
    model = zoo.randomize(transformers.SiglipTextModel(config)).eval()
    ids, mask = batch()
    for pads in (mask, mask.flip(1)):
        assert (
            relative_distance(model, lambda pads=pads: model(ids, attention_mask=pads).pooler_output) < 5e-6
        )


def test_padding_between_tokens_is_served(model: Any) -> None:
    """A batch has a hole; another generates with padding on the right, so that its new tokens follow the padding."""
    ids, mask = batch()
    hole = torch.ones_like(ids)
    hole[0, 4:6] = 0
    with torch.no_grad():
        expected, actual = both(model, lambda: model(ids, attention_mask=hole).logits)
        torch.testing.assert_close(actual[hole.bool()], expected[hole.bool()], rtol=1e-5, atol=1e-5)
    for options in ({}, {"cache_implementation": "static"}):
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **options}
        expected, actual = both(
            model, lambda options=options: model.generate(ids, attention_mask=mask.flip(1), **options)
        )
        assert torch.equal(actual, expected)


LENGTHS = [[7, 1, 12], [20], [5, 15]]


def positions() -> Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


def starts() -> Tensor:
    flat = [n for row in LENGTHS for n in row]
    return torch.tensor([0, *flat]).cumsum(0).int()


@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens", "compiled cu_seq_lens"])
def test_packed_batches_reach_packed_attention(
    model: Any, how: str, served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No dense mask is built, and each sequence has the logits it has alone."""
    if how == "position_ids" and model.config.model_type == "gpt_oss":
        pytest.skip(
            "this model does not pass positions to its masks: its own attention ignores packed sequences"
        )
    ids, _ = batch()
    expected = []
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for row, lengths in zip(ids, LENGTHS, strict=True):
            expected += [model(one[None], use_cache=False).logits[0] for one in row.split(lengths)]
    model.set_attn_implementation("weft")
    options = {"position_ids": positions(), "use_cache": False}
    if how != "position_ids":
        options |= {
            "cu_seq_lens_q": starts(),
            "cu_seq_lens_k": starts(),
            "max_length_q": 20,
            "max_length_k": 20,
        }
    call = model
    if how.startswith("compiled"):
        call = torch.compile(model, backend="aot_eager")
    else:
        monkeypatch.setattr(masks, "bools", lambda mask: pytest.fail("a dense mask was built"))
        monkeypatch.setattr(integration, "bools", lambda mask: pytest.fail("a dense mask was built"))
    with torch.no_grad():
        actual = call(ids, **options).logits
    assert set(served) == {"packed"}
    torch.testing.assert_close(actual.flatten(0, 1), torch.cat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_batches_keep_their_chunks(compiled: bool, served: list[str]) -> None:
    """Starts of sequences do not tell which chunk a token is in; the mask does."""
    integration.register()
    one = entry("Llama4ForCausalLM")
    model = zoo.build(one).eval()
    ids = zoo.batch(one)["input_ids"]
    first, tokens = 10, ids.shape[1]
    options = {
        "position_ids": torch.cat([torch.arange(first), torch.arange(tokens - first)]).expand(2, -1),
        "use_cache": False,
    }
    cuts = torch.tensor([0, first, tokens, tokens + first, 2 * tokens], dtype=torch.int32)
    with torch.no_grad():
        expected = model(ids, **options).logits
        model.set_attn_implementation("weft")
        call = torch.compile(model, backend="aot_eager") if compiled else model
        actual = call(ids, **options, cu_seq_lens_q=cuts, cu_seq_lens_k=cuts).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert set(served) == {"packed", "pytorch"}


def test_dropout_is_left_to_pytorch(served: list[str]) -> None:
    """Training drops attention weights by the random numbers that the model's own attention draws."""
    one = entry("LlamaForCausalLM")
    model, inputs = zoo.build(one, dropout=0.3), zoo.batch(one)

    def loss(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(**inputs).loss

    assert relative_distance(model, lambda: loss(1)) < 5e-6
    assert set(served) == {"pytorch"}
    with torch.no_grad():
        assert abs(loss(1) - loss(2)) > 1e-3
        served.clear()
        model.eval()
        assert torch.equal(loss(1), loss(2))
    assert set(served) == {"weft"}


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "GptOssForCausalLM"])
def test_dropout_with_softcap_or_sinks_is_left_to_the_model(name: str, served: list[str]) -> None:
    """`sdpa` has neither, so the model's eager attention computes them."""
    one = entry(name)
    model, inputs = zoo.build(one, dropout=0.3), zoo.batch(one)

    def loss() -> Tensor:
        torch.manual_seed(1)
        return model(**inputs).loss

    assert relative_distance(model, loss) < 5e-6
    assert set(served) == {"pytorch"}


def test_attention_weights_are_returned(served: list[str]) -> None:
    one = entry("LlamaForCausalLM")
    model, inputs = zoo.build(one).eval(), zoo.batch(one)
    model.set_attn_implementation("eager")
    expected = model(**inputs, output_attentions=True).attentions
    model.set_attn_implementation("weft")
    actual = model(**inputs, output_attentions=True).attentions
    assert set(served) == {"pytorch"}
    torch.testing.assert_close(actual, expected)


def test_attention_in_both_directions_on_request(served: list[str]) -> None:
    """Given `is_causal=False` by the caller, transformers makes another mask."""
    one = entry("LlamaForCausalLM")
    model = zoo.build(one).eval()
    ids = zoo.batch(one)["input_ids"]
    assert relative_distance(model, lambda: model(ids, is_causal=False, use_cache=False).logits) < 5e-6
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    assert (
        relative_distance(
            model, lambda: model(ids, is_causal=False, attention_mask=mask, use_cache=False).logits
        )
        < 5e-6
    )
    with torch.no_grad():
        both_ways = model(ids, is_causal=False, use_cache=False).logits
        assert (both_ways - model(ids, use_cache=False).logits).abs().max() > 1e-2
    assert "pytorch" not in served


def test_a_causal_mask_overrides_the_flag() -> None:
    """Modules with a mask pass `is_causal=False`, since the mask tells what queries see."""
    q = torch.randn(2, 2, 6, 8)
    mask = masks.attention_mask(2, 6, 6, allow_is_causal_skip=True)
    assert isinstance(mask, masks.BandMask)
    actual, _ = integration.attention_forward(torch.nn.Module(), q, q, q, mask, is_causal=False)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(actual, expected.transpose(1, 2))


def test_one_query_without_a_mask_sees_all_keys() -> None:
    """`sdpa` does likewise: its causal flag is for prompts."""
    module = torch.nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 6, 8)
    for options in ({}, {"output_attentions": False, "dropout": 0.0}):
        actual, _ = integration.attention_forward(module, q, k, k, None, **options)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, k)
        torch.testing.assert_close(actual, expected.transpose(1, 2))
    three = torch.randn(1, 2, 3, 8)
    actual, _ = integration.attention_forward(module, three, k, k, None)
    expected = torch.nn.functional.scaled_dot_product_attention(three, k, k, is_causal=True)
    torch.testing.assert_close(actual, expected.transpose(1, 2))


def test_wide_heads_are_left_to_pytorch(served: list[str]) -> None:
    q = torch.randn(1, 2, 6, 288)
    actual, _ = integration.attention_forward(torch.nn.Module(), q, q, q, None, is_causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(actual, expected.transpose(1, 2))
    assert served == ["pytorch"]


def test_other_masks_are_left_to_pytorch() -> None:
    """A mask other than a band reaches the model unchanged, as bools or as an additive float."""
    module = torch.nn.Module()
    module.num_key_value_groups = 1  # type: ignore[assignment]
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    mask = torch.rand(1, 1, 6, 6) > 0.3
    mask |= torch.eye(6, dtype=torch.bool)
    for dense_mask in (mask, torch.randn(1, 2, 6, 6)):
        actual, _ = integration.attention_forward(module, q, k, v, dense_mask)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask)
        torch.testing.assert_close(actual, expected.transpose(1, 2))
    with pytest.raises(NotImplementedError, match="but found none: use 'eager'"):
        integration.attention_forward(module, q, k, v, mask, softcap=5.0)


def test_unknown_options_are_refused() -> None:
    q = torch.randn(1, 2, 6, 8)
    for name in ("block_indices", "relative_attention"):
        with pytest.raises(
            NotImplementedError, match=rf"does not know the options \['{name}'\] of Module: use 'sdpa'"
        ):
            integration.attention_forward(torch.nn.Module(), q, q, q, None, **{name: q})
        integration.attention_forward(torch.nn.Module(), q, q, q, None, **{name: None})


def test_options_of_the_model_that_reach_attention_are_ignored() -> None:
    """Hubert passes `return_dict` down to its layers."""
    assert not sweep.examine(entry("HubertForCTC"), "evaluation").failures
    assert sweep.examine(entry("HubertForCTC"), "evaluation").engines.keys() == {"Weft"}


def test_every_option_of_transformers_is_on_a_list() -> None:
    """Each name that a model passes to its attention function is served, harmless, or refused intentionally."""
    import ast
    import inspect
    from pathlib import Path

    from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
    from transformers.utils.generic import TransformersKwargs

    served = set(inspect.signature(integration.attention_forward).parameters) | set(integration.OF_PYTORCH)
    passed = set()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        if "attention_interface(" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "attention_interface":
                passed |= {keyword.arg for keyword in node.keywords if keyword.arg}
    assert {"scaling", "s_aux", "position_bias", "indices"} <= passed
    passed |= TransformersKwargs.__annotations__.keys() | FlashAttentionKwargs.__annotations__.keys()
    assert passed - served - integration.HARMLESS.keys() <= {"block_indices"}


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_selected_by_name_match(name: str) -> None:
    """Gradients match those of transformers' own loop over the experts, eager and as one graph."""
    integration.register()
    model = build(name)
    loss, gradients = step(model)
    model.set_experts_implementation("weft")
    weft_loss, weft_gradients = step(model)
    torch.testing.assert_close(weft_loss, loss, rtol=1e-6, atol=1e-6)
    assert distance(weft_gradients, gradients) < 5e-6
    if name == "qwen3_moe":
        torch._dynamo.reset()  # other tests compiled models with the same code
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(**tokens(), use_cache=False).loss.detach(), weft_loss)


def test_hooks_on_the_activation_of_experts_run() -> None:
    """The experts' own loop calls it once per expert that has tokens."""
    integration.register()
    model, calls = build("qwen3_moe"), []
    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeExperts":
            module.act_fn.register_forward_hook(lambda *arguments: (calls.append(1), arguments[-1] * 0.5)[1])
    loss, gradients = step(model)
    wanted = len(calls)
    assert wanted > 2
    gradients = {name: grad.clone() for name, grad in gradients.items()}
    model.set_experts_implementation("weft")
    weft_loss, weft_gradients = step(model)
    assert len(calls) == 2 * wanted
    torch.testing.assert_close(weft_loss, loss)
    assert distance(weft_gradients, gradients) < 5e-6


def test_unsupported_experts_are_refused() -> None:
    integration.register()
    model = build("qwen3_moe", experts_implementation="weft")
    model.model.layers[0].mlp.experts.act_fn = torch.nn.Hardtanh()
    with pytest.raises(NotImplementedError, match=r"Qwen3MoeExperts.*Use 'grouped_mm'"):
        step(model)

"""Modules compared with those of transformers, whose checkpoints they load, and with each other in FP8."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
import weft.nn
from tests.nn.models import MODELS, SMALL, Model, ids, of_transformers
from weft import QTensor


def relative(actual: Tensor, wanted: Tensor) -> float:
    return float((actual.double() - wanted.double()).norm() / wanted.double().norm())


# ---- transformers ---------------------------------------------------------------------------------------


# Only the last one needs the kernels of latents, which take long to build: nightly.
NIGHTLY = ("deepseek-v3",)


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.slow if name in NIGHTLY else ()) for name in MODELS]
)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Model]:
    """Return a model of transformers, and the `weft.nn` one that has loaded its checkpoint strictly."""
    original = of_transformers(request.param)
    model = Model(original.config, device="meta").to_empty(device="cpu")
    model.load_state_dict(original.state_dict(), strict=True)
    return original, model


def test_logits_and_gradients_match_transformers(pair: tuple[Any, Model]) -> None:
    original, model = pair
    tokens = ids()
    wanted = original(tokens, labels=tokens, output_hidden_states=True)
    torch.testing.assert_close(model.hidden(tokens), wanted.hidden_states[-1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(tokens), wanted.logits, rtol=1e-5, atol=1e-5)
    loss = model(tokens, tokens)
    torch.testing.assert_close(loss, wanted.loss, rtol=1e-6, atol=1e-6)
    wanted.loss.backward()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in original.named_parameters():
        assert (
            gradients.pop(name) - parameter.grad
        ).abs().max() < 5e-6 * parameter.grad.abs().max() + 1e-8, name
    assert not gradients


# ---- FP8 ------------------------------------------------------------------------------------------------


def decoder_layer(recipe: str | None = None, **options: Any) -> weft.nn.DecoderLayer:
    torch.manual_seed(3)
    rotary = weft.nn.Rotary(10000.0)
    attention = weft.nn.Attention(128, 4, 2, rotary=rotary, qk_norm=1e-6, recipe=recipe, **options)
    return weft.nn.DecoderLayer(attention, weft.nn.GLU(128, 256, recipe=recipe))


def results(layer: Any, x: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    leaf = x.detach().clone().requires_grad_()
    y = layer(leaf)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *parameters], upstream)]


@pytest.mark.slow
def test_codes_flow_between_layers() -> None:
    """Norms, attention and the gated unit write FP8; no projection quantizes its input. Results are close to those of
    fp32, and bit for bit the same with recomputed activations. A test of the examples compiles the decoder layer."""
    layer, x = decoder_layer("fp8_block"), torch.randn(2, 24, 128).bfloat16()
    input_types: dict[str, type] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, name=name: input_types.__setitem__(name, type(args[0]))
        )
        for name, module in layer.named_modules()
        if isinstance(module, weft.nn.Linear)
    ]
    parameters = list(layer.parameters())
    actual = results(layer, x, parameters)
    assert len(input_types) == 7
    assert set(input_types.values()) == {QTensor}
    for hook in hooks:
        hook.remove()
    exact = decoder_layer()
    wanted = results(exact, x.float(), list(exact.parameters()))
    assert 0.001 < max(map(relative, actual, wanted)) < 0.15
    again = results(
        lambda leaf: torch.utils.checkpoint.checkpoint(layer, leaf, use_reentrant=False), x, parameters
    )
    assert all(map(torch.equal, actual, again))
    with torch.no_grad():
        assert torch.equal(layer(x), actual[0])


def test_input_is_quantized_once() -> None:
    """A layer quantizes a plain input once, and only if all its projections use the same format."""
    mlp, x = weft.nn.GLU(128, 128, recipe="fp8_block"), torch.randn(3, 128)
    assert torch.equal(mlp(x), mlp(weft.quantize(x, "1x128", columnwise=True)))
    assert weft.nn.numbers_for(mlp.gate_proj).columnwise
    with torch.no_grad():
        assert weft.nn.numbers_for(mlp.gate_proj) == (weft.quantize(x, "1x128").spec, False, None)
    for recipe in (None, "bf16", "fp8_row", "nvfp4"):
        mlp.up_proj.recipe = recipe
        assert weft.nn.numbers_for(mlp.gate_proj, mlp.up_proj) == (None, False, None)
        assert weft.nn.numbers_for(mlp.up_proj) == (None, False, None)
    assert weft.nn.numbers_for(nn.Linear(2, 2)) == (None, False, None)


# ---- attention ------------------------------------------------------------------------------------------


def test_attention_with_a_window_and_sinks() -> None:
    """A window and sinks match scores computed explicitly."""
    layer = decoder_layer(sliding_window=8, sinks=True).self_attn
    assert isinstance(layer, weft.nn.Attention)
    assert layer.sinks is not None
    assert layer.rotary_emb is not None
    nn.init.normal_(layer.sinks)
    x = torch.randn(2, 24, 128)
    q, k, v = (proj(x).unflatten(-1, (-1, 32)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = (
        layer.rotary_emb(nn.functional.rms_norm(t, (32,), eps=1e-6)).transpose(1, 2)
        for t in (q, k.repeat_interleave(2, 2))
    )
    scores = q @ k.mT / 32**0.5
    behind = torch.arange(24)[:, None] - torch.arange(24)
    scores = scores.masked_fill((behind < 0) | (behind >= 8), -torch.inf)
    scores = torch.cat([scores, layer.sinks[None, :, None, None].expand(2, 4, 24, 1)], -1).softmax(-1)[
        ..., :-1
    ]
    wanted = layer.o_proj((scores @ v.repeat_interleave(2, 2).transpose(1, 2)).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-5)
    starts = torch.tensor([0, 24, 48])  # packed
    torch.testing.assert_close(
        layer(x.flatten(0, 1), cu_seqlens=starts), wanted.flatten(0, 1), rtol=1e-5, atol=1e-5
    )


@torch.no_grad()
def test_decoding_matches_whole_sequences() -> None:
    """A prompt, padded for the shorter sequence, and then single tokens give the logits of the whole sequences."""
    original = of_transformers("qwen3")
    model = Model(original.config)
    model.load_state_dict(original.state_dict())
    for one in model.model.layers:
        one.self_attn.sliding_window = 8
    tokens, lengths = ids(2, 12), torch.tensor([8, 5])
    shape, table = (8, 4, SMALL["num_key_value_heads"], 32), torch.tensor([[5, 1, 3], [0, 7, 2]])
    caches = [weft.KVCache(torch.full(shape, torch.nan), torch.full(shape, torch.nan)) for _ in range(2)]
    wanted = [model(row[None])[0] for row in tokens]
    prompt = torch.stack([tokens[0, :8], torch.cat([tokens[1, :3], tokens[1, :5]])])
    for step in range(4):
        new = 8 if step == 0 else 1
        pages = weft.nn.Pages.of(table, lengths + step, tokens=new, page_size=4)
        assert pages.slots[1].tolist() == ([-1] * 3 + [0, 1, 2, 3, 28] if step == 0 else [28 + step])
        new_tokens = (
            prompt if step == 0 else torch.stack([tokens[i, lengths[i] + step - 1, None] for i in range(2)])
        )
        logits = model(new_tokens, caches=caches, pages=pages)
        for i in range(2):
            count = min(new, int(lengths[i]))
            end = int(lengths[i]) + step
            torch.testing.assert_close(logits[i, -count:], wanted[i][end - count : end], rtol=1e-5, atol=1e-5)


# ---- modules in general ---------------------------------------------------------------------------------


def every_module() -> list[nn.Module]:
    rotary = weft.nn.Rotary(10000.0, dim=16, style="interleaved", first=False)
    sizes = {"q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
    factory_kwargs: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
    router = weft.nn.Router(64, 4, 2, convention="deepseek_v3", correction_bias=True, **factory_kwargs)
    experts = weft.nn.Experts(4, 64, 32, recipe="mxfp8", **factory_kwargs)
    return [
        weft.nn.Linear(64, 32, recipe="fp8_block", **factory_kwargs),
        weft.nn.GroupedLinear(3, 64, 32, recipe="mxfp8", **factory_kwargs),
        weft.nn.RMSNorm(64, **factory_kwargs),
        weft.nn.LayerNorm(64, **factory_kwargs),
        weft.nn.LatentAttention(64, 4, v_head_dim=32, rotary=rotary, **sizes, **factory_kwargs),  # type: ignore[arg-type]
        weft.nn.MoE(router, experts, shared_experts=weft.nn.GLU(64, 32, act="gelu", **factory_kwargs)),
        weft.nn.DecoderLayer(
            weft.nn.Attention(64, 2, sinks=True, **factory_kwargs),
            weft.nn.GLU(64, 32, **factory_kwargs),
            **factory_kwargs,
        ),
        weft.nn.LinearCrossEntropy(64, 100, z_loss=1e-3, **factory_kwargs),
    ]


@pytest.mark.parametrize("module_on_meta", every_module(), ids=lambda module: type(module).__name__)
def test_modules_materialize_from_meta_copy_and_pickle(module_on_meta: nn.Module) -> None:
    assert {p.device.type for p in module_on_meta.parameters()} == {"meta"}
    assert {p.dtype for p in module_on_meta.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in module_on_meta.half().bfloat16().buffers()} <= {
        torch.float32
    }  # the correction bias
    module = module_on_meta.to_empty(device="cpu")
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.fill_(torch.nan)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    assert all(tensor.isfinite().all() for tensor in module.state_dict().values())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(other) == repr(module)
        assert list(other.state_dict()) == list(module.state_dict())
        assert all(map(torch.equal, other.state_dict().values(), module.state_dict().values()))


def test_grouped_linear_computes_each_group() -> None:
    layer = weft.nn.GroupedLinear(3, 128, 128)
    x, ends = torch.randn(9, 128), torch.tensor([2, 4, 7])  # rows 0-1, 2-3 and 4-6
    y = layer(x, ends)
    for group, rows in enumerate((slice(0, 2), slice(2, 4), slice(4, 7))):
        assert layer.bias is not None
        wanted = nn.functional.linear(x[rows], layer.weight[group], layer.bias[group])
        torch.testing.assert_close(y[rows], wanted, rtol=1e-5, atol=1e-5)
    assert not y[7:].any()
    layer.recipe = "fp8_block"
    with pytest.raises(ValueError, match="align=128"):
        layer(x, ends)
    with pytest.raises(ValueError, match="rows, 128"):
        layer(x[:, :64], ends)


def test_norms_match_torch() -> None:
    x, h = torch.randn(2, 3, 5, 128)
    for ours, reference in (
        (weft.nn.RMSNorm(128), nn.RMSNorm(128, eps=1e-6)),
        (weft.nn.LayerNorm(128), nn.LayerNorm(128)),
    ):
        nn.init.normal_(reference.weight)
        ours.load_state_dict(reference.state_dict())
        torch.testing.assert_close(ours(x), reference(x), rtol=1e-5, atol=1e-5)
        y, total = ours(x, h)
        assert torch.equal(total, x + h)
        torch.testing.assert_close(y, reference(x + h), rtol=1e-5, atol=1e-5)


def test_mixture_returns_its_routing() -> None:
    experts, x = weft.nn.Experts(8, 128, 128), torch.randn(2, 5, 128)
    moe = weft.nn.MoE(weft.nn.Router(128, 8, 2, balance_coefficient=0.01), experts)
    y, routing = moe(x, return_routing=True)
    assert torch.equal(y, moe(x))
    assert int(routing.counts.sum()) == 20
    assert routing.balance_loss.requires_grad
    layer = weft.nn.DecoderLayer(decoder_layer().self_attn, moe)
    h, routing = layer(x, return_routing=True)
    assert torch.equal(h, layer(x))
    assert routing.balance_loss is not None


def test_mistakes_are_refused_with_a_reason() -> None:
    layer = weft.nn.DecoderLayer(weft.nn.Attention(64, 2), weft.nn.GLU(64, 32))
    x = torch.randn(1, 3, 64)
    with pytest.raises(ValueError, match=r"weft\.nn\.MoE"):
        layer(x, return_routing=True)
    with pytest.raises(ValueError, match="go together"):
        layer(x, cache=weft.KVCache(torch.zeros(4, 2, 32)))
    with pytest.raises(ValueError, match="rope_type"):
        weft.nn.Rotary.of({"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ValueError, match="dim="):
        weft.nn.Rotary.of({"rope_theta": 1e4, "partial_rotary_factor": 0.5})
    with pytest.raises(ValueError, match="recipe must be"):
        weft.nn.Linear(64, 32, recipe="fp9")

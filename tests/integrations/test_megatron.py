"""Small Megatron-core GPT with Weft's specs and fusions, compared with Megatron's own, on one rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'weft[megatron]'")

from megatron.core import parallel_state
from megatron.core.models.common.language_module import language_module
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.integrations import without_gpu
from tests.integrations.page import run_script
from tests.integrations.parity import Step, gradient_distance
from weft.integrations import megatron as integration

# Megatron warns about every optional package that is missing.
pytestmark = pytest.mark.filterwarnings("ignore")

VOCABULARY, TOKENS = 199, 24
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 96,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "moe_token_dispatcher_type": "alltoall",
}
FUSED_LOSS = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """Megatron on a CPU: CUDA's device, streams and random states are stand-ins, and functions that PyTorch would
    compile run uncompiled."""
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
        without_gpu.for_megatron(patch.setattr)
        if not hasattr(moe_utils, "te_general_gemm"):
            # Megatron 0.16 reads this name but does not define it without TransformerEngine.
            patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def config(**options: Any) -> TransformerConfig:
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 96,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "layernorm_epsilon": 1e-6,
    }
    return TransformerConfig(**settings | options)


def local_spec(c: TransformerConfig) -> Any:
    return gpt_layer_specs.get_gpt_decoder_block_spec(
        c, use_transformer_engine=False, normalization=c.normalization
    )


def model(spec: Any, c: TransformerConfig) -> GPTModel:
    torch.manual_seed(0)
    gpt = GPTModel(
        config=c,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(gpt.named_parameters()):
            scale = 0.1 if "norm" in name else 0.05
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * scale)
    return gpt


def step(gpt: GPTModel) -> Step:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCABULARY, (2, TOKENS), generator=generator)
    mask = torch.triu(torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool), 1)
    losses = gpt(ids, torch.arange(TOKENS).expand(2, TOKENS), mask, labels=ids.roll(-1, 1))
    assert losses.shape == ids.shape
    return Step.of(losses.float().mean(), gpt)


def compared(fused: dict[str, Any] | None = None, **options: Any) -> float:
    expected = step(model(local_spec(config(**options)), config(**options)))
    with integration.fusions():
        c = config(**options, **(fused or {}))
        gpt = model(integration.block_spec(c), c)
        assert isinstance(gpt.decoder.final_layernorm, integration.Norm)
        actual = step(gpt)
    assert abs(actual.loss - expected.loss) < 1e-5 * expected.loss
    return gradient_distance(actual, expected)


# ---- whole models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qk_layernorm": True},
        {"normalization": "LayerNorm", "activation_func": F.gelu, "add_bias_linear": True},
        {"activation_func": F.gelu, "bias_activation_fusion": True, "add_bias_linear": True},
    ],
    ids=["plain", "qk norm", "LayerNorm and GeGLU with biases", "Megatron's fused GeGLU"],
)
def test_gradients_of_a_dense_model_match_megatron(options: dict[str, Any]) -> None:
    assert compared(FUSED_LOSS, **options) < 5e-6


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_gradients_of_a_fused_mixture_match_megatron(dispatcher: str) -> None:
    fused = FUSED_LOSS | {"moe_permute_fusion": True, "moe_router_fusion": True}
    options = EXPERTS | {"moe_token_dispatcher_type": dispatcher, "moe_shared_expert_intermediate_size": 96}
    assert compared(fused, **options) < 5e-6


class ZeroCenteredNorm(nn.Module):
    """RMSNorm with gamma around zero, in PyTorch's own functions."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(hidden_size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


def test_gamma_may_be_centered_around_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's own norm refuses it without TransformerEngine, so the norm compared with Weft's is written here."""
    options = {"layernorm_zero_centered_gamma": True, "qk_layernorm": True}
    c = config(**options)
    with pytest.raises(AssertionError, match="zero_centered_gamma"):
        model(local_spec(c), c)
    gpt = model(integration.block_spec(c), c)
    with monkeypatch.context() as patch:
        patch.setattr(integration, "Norm", ZeroCenteredNorm)
        other = model(integration.block_spec(c), c)
    other.load_state_dict(gpt.state_dict())
    assert gradient_distance(step(gpt), step(other)) < 5e-6


def test_parameters_of_norms_are_marked_for_sequence_parallelism() -> None:
    c = config()
    c.sequence_parallel = True
    norm = integration.Norm(c, 64)
    assert all(parameter.sequence_parallel for parameter in norm.parameters())  # type: ignore[attr-defined]


# ---- grouped experts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, "fp8_block"])
def test_grouped_experts_match_a_list_of_experts(recipe: str | None) -> None:
    sizes = {"hidden_size": 128, "moe_ffn_hidden_size": 128, "ffn_hidden_size": 128}
    plain = config(**EXPERTS | sizes)
    one_by_one = model(local_spec(plain), plain)
    expected = step(one_by_one)
    with integration.fusions():
        c = config(**EXPERTS | sizes, moe_grouped_gemm=True, moe_permute_fusion=True)
        grouped = model(integration.block_spec(c, recipe=recipe), c)
        grouped.load_state_dict(one_by_one.state_dict(), strict=False)
        for layer, other in zip(grouped.decoder.layers, one_by_one.decoder.layers, strict=True):
            experts, listed = layer.mlp.experts, other.mlp.experts.local_experts
            assert isinstance(experts, integration.Experts)
            up = torch.stack([expert.linear_fc1.weight.data.T for expert in listed])
            down = torch.stack([expert.linear_fc2.weight.data.T for expert in listed])
            experts.weight1.data = up.reshape(experts.weight1.shape)
            experts.weight2.data = down.reshape(experts.weight2.shape)
        actual = step(grouped)
    shared = {name: grad for name, grad in expected.grads.items() if name in actual.grads}
    assert any("router" in name for name in shared)
    trimmed = Step(actual.loss, {name: actual.grads[name] for name in shared})
    difference = gradient_distance(trimmed, Step(expected.loss, shared))
    assert difference < 5e-6 if recipe is None else 1e-3 < difference < 0.1
    for layer, layer_index in enumerate(("0", "1")):
        prefix = f"decoder.layers.{layer_index}.mlp.experts."
        listed = [expected.grads[f"{prefix}local_experts.{e}.linear_fc1.weight"].T for e in range(4)]
        w1 = actual.grads[f"{prefix}weight1"].view(4, 128, -1)
        error = (w1 - torch.stack(listed)).norm() / torch.stack(listed).norm()
        assert error < (5e-6 if recipe is None else 0.15), layer


# ---- functions ------------------------------------------------------------------------------------------


def test_fusions_are_undone() -> None:
    before = dict(vars(moe_utils)), dict(vars(language_module))

    def fails() -> None:
        with integration.fusions():
            assert moe_utils.fused_permute is integration.fused_permute
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert (vars(moe_utils), vars(language_module)) == before


@pytest.mark.parametrize("probs", [False, True])
def test_sorted_chunks_match_megatron(probs: bool) -> None:
    sizes, order = torch.tensor([3, 0, 5, 2]), torch.tensor([2, 0, 3, 1])
    x, p = torch.randn(10, 32, requires_grad=True), torch.rand(10, requires_grad=True)
    weights = torch.randn(10, 32)
    results = []
    for fused in (False, True):
        with integration.fusions():
            y, q = moe_utils.sort_chunks_by_idxs(x, sizes, order, probs=p if probs else None, fused=fused)
        total = (y * weights).sum() + (0 if q is None else (q * weights[:, 0]).sum())
        results.append((y, q, *torch.autograd.grad(total, [x, p] if probs else [x])))
    for actual, expected in zip(*results, strict=True):
        assert (actual is None and expected is None) or torch.equal(actual, expected)


GROUPED = {"num_groups": 4, "group_topk": 2}


@pytest.mark.parametrize(
    ("topk", "options"),
    [
        *((topk, {}) for topk in (1, 4)),
        *((topk, {"use_pre_softmax": True, "scaling_factor": 2.0}) for topk in (1, 4)),
        *((topk, {"score_function": "sigmoid", "scaling_factor": 2.5}) for topk in (1, 4)),
        (4, {"score_function": "sigmoid", "bias": True, **GROUPED}),
        (4, {"use_pre_softmax": True, **GROUPED}),
    ],
)
def test_the_router_matches_megatron(topk: int, options: dict[str, Any]) -> None:
    options = dict(options)
    logits = torch.randn(37, 16, requires_grad=True)
    weights = torch.randn(37, 16)
    options["expert_bias"] = torch.randn(16) * 0.1 if options.pop("bias", False) else None
    results = []
    for fused in (False, True):
        with integration.fusions():
            probs, mask = moe_utils.topk_routing_with_score_function(logits, topk, fused=fused, **options)
        results.append((probs, mask, *torch.autograd.grad((probs * weights).sum(), logits)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_the_balance_loss_matches_megatron(score_function: str) -> None:
    logits = torch.randn(37, 16, requires_grad=True)
    results = []
    for fused in (False, True):
        with integration.fusions():
            mask, scores = moe_utils.compute_routing_scores_for_aux_loss(
                logits, 2, score_function, fused=fused
            )
            loss = moe_utils.switch_load_balancing_loss_func(
                scores, mask.sum(0), 37, topk=2, num_experts=16, moe_aux_loss_coeff=0.1, fused=fused
            )
        results.append((mask, loss, *torch.autograd.grad(loss, logits)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_the_page_runs() -> None:
    prelude = (
        ""
        if torch.cuda.is_available()
        else "from tests.integrations import without_gpu; without_gpu.for_megatron()\n"
    )
    printed = run_script("Megatron-core", prelude)
    assert re.match(r"loss \d\.\d{3} <class 'weft.integrations.megatron.Experts'>", printed)

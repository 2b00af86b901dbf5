"""torchtitan's debug models with overrides, compared with the same models without."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("torchtitan", reason="needs torchtitan: pip install 'weft[torchtitan]'")

from torchtitan.components.loss import ChunkedLossWrapper, MSELoss
from torchtitan.config.configurable import Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE
from torchtitan.models.qwen3 import model_registry

from tests.integrations.page import section
from tests.integrations.parity import Step, gradient_distance
from weft.integrations import torchtitan as integration

DENSE = ["rms_norm", "feed_forward", "attention_linear", "rope", "linear_loss"]
MIXTURE = ["rms_norm", "attention_linear", "rope", "router", "experts", "linear_loss"]
TOKENS = 48


@dataclass(kw_only=True, slots=True)
class Root(Configurable.Config):
    """The part of a trainer's configuration to which overrides apply here."""

    model: Any
    loss: Any


def configuration(flavor: str) -> Root:
    """Return two layers of a debug model, with fewer experts. Attention is PyTorch's, which needs no compiler on a
    CPU."""
    spec = model_registry(flavor, attn_backend="flex")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        if layer.moe is not None:
            moe, routed = layer.moe, layer.moe.routed_experts
            for part in (moe, moe.router, routed.inner_experts, routed.token_dispatcher):
                part.num_experts = 8
            moe.router.gate.out_features, routed.inner_experts.hidden_dim = 8, 256
            moe.router.top_k = routed.token_dispatcher.top_k = 2
    return Root(model=spec.model, loss=ChunkedLossWrapper.Config(num_chunks=4))


def overridden(root: Root, *names: str | tuple[str, dict[str, Any]]) -> list[str]:
    """Apply overrides like `--override.imports`, and return torchtitan's messages."""
    prefix = integration.__name__
    imports = [f"{prefix}.{n}" if isinstance(n, str) else (f"{prefix}.{n[0]}", n[1]) for n in names]
    lines: list[str] = apply_overrides(OverrideConfig(imports=imports), root) if names else []
    return lines


def built(root: Root, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = root.model.build()
    model.init_states(buffer_device=torch.device("cpu"))
    if dtype != torch.float32:  # parameters only: tables of angles keep their dtype
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    loss = root.loss.build()
    loss.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    return model, loss


def step(model: Any, loss: Any, seed: int = 0) -> Step:
    generator = torch.Generator().manual_seed(1 + seed)
    ids = torch.randint(0, 2048, (2, TOKENS), generator=generator)
    labels = ids.roll(-1, 1)
    labels[0, -5:] = -100
    positions = torch.arange(TOKENS).expand(2, TOKENS)
    total, metrics = loss(model(ids, positions), labels, torch.tensor(91.0))
    assert metrics == {}
    return Step.of(total, model)


def compared(flavor: str, *names: str | tuple[str, dict[str, Any]], dtype: torch.dtype) -> float:
    """Return the distance of the gradients of a model with overrides from those of one without."""
    without, root = configuration(flavor), configuration(flavor)
    assert overridden(root, *names)
    expected, actual = step(*built(without, dtype)), step(*built(root, dtype))
    assert abs(actual.loss - expected.loss) < (1e-5 if dtype == torch.float32 else 2e-2) * expected.loss
    return gradient_distance(actual, expected)


# ---- whole models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flavor", "names"), [("debugmodel", DENSE), ("debugmodel_moe", MIXTURE)])
def test_gradients_in_fp32_match_the_model_without_overrides(
    flavor: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # torchtitan's experts multiply in bf16 whatever dtype the model has, which would hide smaller differences.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self)
    assert compared(flavor, *names, dtype=torch.float32) < 5e-6


@pytest.mark.parametrize(("flavor", "names"), [("debugmodel", DENSE), ("debugmodel_moe", MIXTURE)])
def test_gradients_in_bf16_are_close(flavor: str, names: list[str]) -> None:
    assert compared(flavor, *names, dtype=torch.bfloat16) < 0.03


def test_a_recipe_is_an_argument_of_an_override() -> None:
    fp8 = {"recipe": "fp8_block"}
    names = [("experts", fp8), ("attention_linear", fp8), "rms_norm", "linear_loss"]
    difference = compared("debugmodel_moe", *names, dtype=torch.bfloat16)
    assert 0.03 < difference < 0.3  # beyond the error of bf16, within that of FP8


def test_torchtitan_reports_every_module_and_state_dicts_stay() -> None:
    root = configuration("debugmodel_moe")
    others = [name for name in MIXTURE if name != "experts"]
    lines = overridden(root, *others, ("experts", {"recipe": "fp8_block"}))
    assert len([line for line in lines if "RMSNorm" in line]) == 2 * 3 + 1
    assert len([line for line in lines if "Experts" in line and "recipe='fp8_block'" in line]) == 2
    model, _ = built(root)
    without, _ = built(configuration("debugmodel_moe"))
    assert model.state_dict().keys() == without.state_dict().keys()
    for name, value in without.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_invalid_overrides_are_refused_before_training() -> None:
    with pytest.raises(ValueError, match="recipe must be one of"):
        overridden(configuration("debugmodel_moe"), ("experts", {"recipe": "fp9"}))
    root = configuration("debugmodel")
    root.loss = ChunkedLossWrapper.Config(loss_fn=MSELoss.Config())
    with pytest.raises(ValueError, match="remove the override"):
        overridden(root, "linear_loss")


def test_the_command_line_of_the_page_names_overrides() -> None:
    (command,) = re.findall(r"^```text\n(.*?)^```$", section("torchtitan"), re.M | re.S)
    words = shlex.split(command)
    imports = parse_cli_imports(words[words.index("--override.imports") + 1 :])
    assert len(imports) == 6
    root = configuration("debugmodel_moe")
    assert len(apply_overrides(OverrideConfig(imports=imports), root)) == 7 + 2 + 2 + 1 + 2 + 2 * 2


# ---- modules --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CosSinRoPE, ComplexRoPE])
@pytest.mark.parametrize("batch", [None, 1, 3])
def test_rotations_match_torchtitan(kind: Any, batch: int | None) -> None:
    config = kind.Config(dim=64, max_seq_len=100, theta=10000.0)
    positions = None if batch is None else torch.randint(0, 100, (batch, 17))
    q, k = torch.randn(3, 17, 4, 64), torch.randn(3, 17, 2, 64)
    own, other = config.build(), integration.rope(config).build()
    assert type(other) is not type(own)
    for actual, expected in zip(other(q, k, positions), own(q, k, positions), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"score_func": "softmax", "route_norm": True},
        {"score_func": "sigmoid", "route_scale": 2.5},
        {"score_func": "sigmoid", "num_expert_groups": 4, "num_limited_groups": 2, "route_norm": True},
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_a_router_matches_torchtitan(options: dict[str, Any], biased: bool) -> None:
    config = configuration("debugmodel_moe").model.layers[0].moe.router
    for name, value in options.items():
        setattr(config, name, value)
    own, other = config.build(), integration.router(config).build()
    own.gate.weight.data.normal_(std=0.05)  # distinct scores, since the choice among ties is unspecified
    other.load_state_dict(own.state_dict())
    x = torch.randn(2, 33, 256)  # in fp32: torchtitan's autocast to fp32 does not work on CPUs
    bias = torch.randn(8) * 0.1 if biased else None
    weights, experts, scores = own(x, bias)
    actual = other(x, bias)
    torch.testing.assert_close(actual[2], scores)
    expected_order, actual_order = experts.argsort(-1), actual[1].argsort(-1)
    assert torch.equal(actual[1].gather(-1, actual_order), experts.gather(-1, expected_order))
    torch.testing.assert_close(actual[0].gather(-1, actual_order), weights.gather(-1, expected_order))


@pytest.mark.parametrize("recipe", [None, "bf16", "fp8_block"])
def test_rows_beyond_the_last_expert_are_zeros(recipe: str | None) -> None:
    """A dispatcher that does not wait for the device passes a buffer that may be larger than its tokens."""
    config = GroupedExperts.Config(dim=128, hidden_dim=256, num_experts=3)
    experts = integration.experts(config, recipe=recipe).build()
    for parameter in experts.parameters():
        parameter.data.normal_(std=0.1)
    counts = torch.tensor([5, 0, 9])
    x = torch.randn(20, 128, dtype=torch.bfloat16)
    x[14:] = float("nan")
    actual = experts(x, counts)
    assert not actual[14:].any()
    own = config.build()
    own.load_state_dict(experts.state_dict())
    expected = own(x[:14], counts)
    error = (actual[:14] - expected).float().norm() / expected.float().norm()
    assert error < (0.1 if recipe == "fp8_block" else 0.01)


# ---- sharded --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(flavor: str, *, apart_from_norm: bool) -> list[float]:
    """Return how far the gradients of a model sharded over this process group are from those of the whole model. Each
    rank has its own tokens, and FSDP averages over ranks. There are two steps, since FSDP starts the second in the
    state that the first left."""
    from torch.distributed.fsdp import fully_shard

    rank, world = dist.get_rank(), dist.get_world_size()
    alone = [step(*built(configuration(flavor)), seed) for seed in range(world)]
    mean = {name: sum(one.grads[name] for one in alone) / world for name in alone[0].grads}
    expected = Step(alone[rank].loss, mean)
    root = configuration(flavor)
    overridden(root, "rms_norm", "linear_loss")
    model, loss = built(root)
    fully_shard(model.lm_head if apart_from_norm else [model.norm, model.lm_head])
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    distances = []
    for _ in range(2):
        model.zero_grad()
        result = step(model, loss, rank)
        grads = {name: grad.full_tensor() for name, grad in result.grads.items()}  # type: ignore[attr-defined]
        distances.append(gradient_distance(Step(result.loss, grads), expected))
    return distances


# torchtitan itself shards norm and head as one group.
@pytest.mark.parametrize("apart_from_norm", [False, True])
def test_the_head_of_a_sharded_model_is_gathered_for_the_loss(
    apart_from_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self)
    with one_rank():
        assert max(sharded("debugmodel_moe", apart_from_norm=apart_from_norm)) < 5e-6


@pytest.mark.slow
def test_the_head_is_gathered_from_two_ranks() -> None:
    """On a single rank the head's weight is whole even if it is not gathered."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(Path(__file__).parent / "ranks_torchtitan.py")
    done = subprocess.run([*launch, script], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    distances = [float(number) for line in done.stdout.splitlines() for number in line.split()]
    assert len(distances) == 4
    assert max(distances) < 5e-6


def test_no_logits_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    root = configuration("debugmodel")
    overridden(root, "linear_loss")
    model, loss = built(root)

    def refuse(self: Any, x: Tensor) -> Tensor:
        raise AssertionError("the head computes logits")

    monkeypatch.setattr(type(model.lm_head), "forward", refuse)
    model.layers.clear()
    step(model, loss)
    assert "forward" not in vars(model.lm_head)


# ---- torchtitan's trainer -------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "band"), [(None, 1e-3), ("fp8_block", 1e-2)])
def test_torchtitans_trainer_trains_alike_with_overrides(recipe: str | None, band: float) -> None:
    """The example runs both in a process of its own: torchtitan looks for its device at import."""
    pytest.importorskip("datasets", reason="torchtitan's trainer needs it")
    options = ["--steps", "3", *(["--recipe", recipe] if recipe else [])]
    example = Path(__file__).parents[2] / "examples/torchtitan_moe.py"
    done = subprocess.run([sys.executable, str(example), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = re.findall(r"(\d) +│ ([\d.]+) +│ ([\d.]+)", done.stdout)
    assert [row[0] for row in rows] == ["1", "2", "3"]
    for _, without, weft_loss in rows:
        assert abs(float(weft_loss) - float(without)) < band * float(without)
    assert recipe is None or any(without != weft_loss for _, without, weft_loss in rows)
    assert float(rows[-1][1]) < float(rows[0][1]) - 0.5

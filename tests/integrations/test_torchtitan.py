"""torchtitan's debug models with overrides beside the same models without."""

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
from tests.integrations.parity import Step, apart
from weft.integrations import torchtitan as integration

DENSE = ["rms_norm", "feed_forward", "attention_linear", "rope", "linear_loss"]
MIXTURE = ["rms_norm", "attention_linear", "rope", "router", "experts", "linear_loss"]
TOKENS = 48


@dataclass(kw_only=True, slots=True)
class Root(Configurable.Config):
    """The part of a trainer's configuration that overrides apply to here."""

    model: Any
    loss: Any


def configuration(flavor: str) -> Root:
    """Two layers of a debug model, with fewer experts. Attention is PyTorch's, which needs no compiler on a CPU."""
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
    """Apply these overrides, as `--override.imports` does; what torchtitan says about it."""
    prefix = integration.__name__
    imports = [f"{prefix}.{n}" if isinstance(n, str) else (f"{prefix}.{n[0]}", n[1]) for n in names]
    lines: list[str] = apply_overrides(OverrideConfig(imports=imports), root) if names else []
    return lines


def built(root: Root, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = root.model.build()
    model.init_states(buffer_device=torch.device("cpu"))
    if dtype != torch.float32:  # parameters alone: tables of angles stay as they are
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
    found, metrics = loss(model(ids, positions), labels, torch.tensor(91.0))
    assert metrics == {}
    return Step.of(found, model)


def compared(flavor: str, *names: str | tuple[str, dict[str, Any]], dtype: torch.dtype) -> float:
    """How far the gradients of a model with overrides are from those of one without."""
    without, root = configuration(flavor), configuration(flavor)
    assert overridden(root, *names)
    wanted, found = step(*built(without, dtype)), step(*built(root, dtype))
    assert abs(found.loss - wanted.loss) < (1e-5 if dtype == torch.float32 else 2e-2) * wanted.loss
    return apart(found, wanted)


# ---- whole models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flavor", "names"), [("debugmodel", DENSE), ("debugmodel_moe", MIXTURE)])
def test_gradients_in_fp32_are_those_of_the_model_without(
    flavor: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # torchtitan's experts multiply in bf16 whatever the model is in, which would hide differences of less.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self)
    assert compared(flavor, *names, dtype=torch.float32) < 5e-6


@pytest.mark.parametrize(("flavor", "names"), [("debugmodel", DENSE), ("debugmodel_moe", MIXTURE)])
def test_gradients_in_bf16_are_near(flavor: str, names: list[str]) -> None:
    assert compared(flavor, *names, dtype=torch.bfloat16) < 0.03


def test_a_recipe_is_an_argument_of_an_override() -> None:
    fp8 = {"recipe": "fp8_block"}
    names = [("experts", fp8), ("attention_linear", fp8), "rms_norm", "linear_loss"]
    difference = compared("debugmodel_moe", *names, dtype=torch.bfloat16)
    assert 0.03 < difference < 0.3  # more than bf16 differs by, and as little as FP8 does


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


def test_what_cannot_be_overridden_is_said_before_training() -> None:
    with pytest.raises(ValueError, match="recipe must be one of"):
        overridden(configuration("debugmodel_moe"), ("experts", {"recipe": "fp9"}))
    root = configuration("debugmodel")
    root.loss = ChunkedLossWrapper.Config(loss_fn=MSELoss.Config())
    with pytest.raises(ValueError, match="leave the override out"):
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
def test_rotations_are_those_of_torchtitan(kind: Any, batch: int | None) -> None:
    config = kind.Config(dim=64, max_seq_len=100, theta=10000.0)
    positions = None if batch is None else torch.randint(0, 100, (batch, 17))
    q, k = torch.randn(3, 17, 4, 64), torch.randn(3, 17, 2, 64)
    own, other = config.build(), integration.rope(config).build()
    assert type(other) is not type(own)
    for found, wanted in zip(other(q, k, positions), own(q, k, positions), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"score_func": "softmax", "route_norm": True},
        {"score_func": "sigmoid", "route_scale": 2.5},
        {"score_func": "sigmoid", "num_expert_groups": 4, "num_limited_groups": 2, "route_norm": True},
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_a_router_chooses_and_weighs_as_torchtitan_does(options: dict[str, Any], biased: bool) -> None:
    config = configuration("debugmodel_moe").model.layers[0].moe.router
    for name, value in options.items():
        setattr(config, name, value)
    own, other = config.build(), integration.router(config).build()
    own.gate.weight.data.normal_(std=0.05)  # scores that differ: which of equal ones is chosen is not said
    other.load_state_dict(own.state_dict())
    x = torch.randn(2, 33, 256)  # in fp32: torchtitan's autocast to fp32 does not work on CPUs
    bias = torch.randn(8) * 0.1 if biased else None
    weights, experts, scores = own(x, bias)
    found = other(x, bias)
    torch.testing.assert_close(found[2], scores)
    order, same = experts.argsort(-1), found[1].argsort(-1)
    assert torch.equal(found[1].gather(-1, same), experts.gather(-1, order))
    torch.testing.assert_close(found[0].gather(-1, same), weights.gather(-1, order))


@pytest.mark.parametrize("recipe", [None, "bf16", "fp8_block"])
def test_rows_behind_the_last_expert_are_zeros(recipe: str | None) -> None:
    """A dispatcher that does not wait for the device hands over a buffer that may be larger than its tokens."""
    config = GroupedExperts.Config(dim=128, hidden_dim=256, num_experts=3)
    experts = integration.experts(config, recipe=recipe).build()
    for parameter in experts.parameters():
        parameter.data.normal_(std=0.1)
    counts = torch.tensor([5, 0, 9])
    x = torch.randn(20, 128, dtype=torch.bfloat16)
    x[14:] = float("nan")
    found = experts(x, counts)
    assert not found[14:].any()
    own = config.build()
    own.load_state_dict(experts.state_dict())
    wanted = own(x[:14], counts)
    error = (found[:14] - wanted).float().norm() / wanted.float().norm()
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
    """How far the gradients of a model sharded over the ranks of this process group are from those of the whole model.
    Each rank has tokens of its own, and FSDP takes the mean over ranks. Two steps, since FSDP begins the second where
    the first ended."""
    from torch.distributed.fsdp import fully_shard

    rank, world = dist.get_rank(), dist.get_world_size()
    alone = [step(*built(configuration(flavor)), seed) for seed in range(world)]
    mean = {name: sum(one.grads[name] for one in alone) / world for name in alone[0].grads}
    wanted = Step(alone[rank].loss, mean)
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
        found = step(model, loss, rank)
        grads = {name: grad.full_tensor() for name, grad in found.grads.items()}  # type: ignore[attr-defined]
        distances.append(apart(Step(found.loss, grads), wanted))
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
    """On one rank the head's weight is whole even if nobody gathers it."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(Path(__file__).parent / "ranks_torchtitan.py")
    done = subprocess.run([*launch, script], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [float(number) for line in done.stdout.splitlines() for number in line.split()]
    assert len(found) == 4
    assert max(found) < 5e-6


def test_logits_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    root = configuration("debugmodel")
    overridden(root, "linear_loss")
    model, loss = built(root)

    def refuse(self: Any, x: Tensor) -> Tensor:
        raise AssertionError("the head makes logits")

    monkeypatch.setattr(type(model.lm_head), "forward", refuse)
    model.layers.clear()
    step(model, loss)
    assert "forward" not in vars(model.lm_head)


# ---- torchtitan's trainer -------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "band"), [(None, 1e-3), ("fp8_block", 1e-2)])
def test_torchtitans_trainer_trains_with_overrides_as_without(recipe: str | None, band: float) -> None:
    """The example runs both, in a process of its own: torchtitan looks for its device when it is imported."""
    pytest.importorskip("datasets", reason="torchtitan's trainer needs it")
    options = ["--steps", "3", *(["--recipe", recipe] if recipe else [])]
    example = Path(__file__).parents[2] / "examples/torchtitan_moe.py"
    done = subprocess.run([sys.executable, str(example), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = re.findall(r"(\d) +│ ([\d.]+) +│ ([\d.]+)", done.stdout)
    assert [row[0] for row in rows] == ["1", "2", "3"]
    for _, without, found in rows:
        assert abs(float(found) - float(without)) < band * float(without)
    assert recipe is None or any(without != found for _, without, found in rows)
    assert float(rows[-1][1]) < float(rows[0][1]) - 0.5

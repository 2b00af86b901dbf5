"""Recognition of modules by `apply`: it must not be wrong, leave traces, or report what is never reached."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

pytest.importorskip("transformers", reason="needs transformers: pip install 'weft[transformers]'")

import weft.integrations
from tests.integrations import zoo
from tests.integrations.tiny import batch, build, distance, step
from weft.integrations.recognize import (
    UnitOptions,
    recognize_experts,
    recognize_mlp,
    recognize_norm,
    recognize_router,
)
from weft.integrations.rotations import RotaryOptions, recognize_rotary
from weft.integrations.trials import LeftAlone

# ---- dropout and other randomness -----------------------------------------------------------------------


class MLP(nn.Module):
    """Gated feed-forward layer, with something after its activation."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.act_fn, self.between = nn.SiLU(), nn.Identity() if between is None else between

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.between(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class Shift(nn.Module):
    """Operation that is only done in training."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1.0 if self.training else x


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x) * 1e-3


@pytest.mark.parametrize("between", [nn.Dropout(0.1), Shift(), Noise()], ids=["dropout", "mode", "noise"])
@pytest.mark.parametrize("training", [True, False])
def test_dropout_in_a_gated_layer_is_not_lost(between: nn.Module, training: bool) -> None:
    """Dropout is detected whichever mode the model is in at `apply`."""
    assert recognize_mlp(MLP()).unit.act == "silu"
    module = MLP(between).train(training)
    with pytest.raises(LeftAlone, match="something else in training"):
        recognize_mlp(module)


class Adapted(nn.Linear):
    """Projection with an adapter that drops inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.dropout(x, 0.3, self.training))


class UpFirst(MLP):
    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


@pytest.mark.parametrize("kind", [MLP, UpFirst])
def test_adapters_draw_the_same_random_numbers(kind: type[MLP]) -> None:
    """Projections are called in the module's own order."""
    model = nn.Sequential(kind()).train()
    for name in ("gate_proj", "up_proj"):
        setattr(model[0], name, Adapted(8, 16))
    x = torch.randn(4, 8)

    def run() -> Tensor:
        torch.manual_seed(0)
        return model(x)

    wanted = run()
    assert weft.integrations.apply(model, loss=False).changed == ["0"]
    torch.testing.assert_close(run(), wanted)


class Twice(MLP):
    """Layer that calls its gate projection twice, which the trial cannot distinguish from once by results."""

    def forward(self, x: Tensor) -> Tensor:
        self.gate_proj(x)
        return super().forward(x)


def test_a_layer_that_calls_a_projection_twice_is_left_alone() -> None:
    with pytest.raises(LeftAlone, match="once"):
        recognize_mlp(Twice())


def test_dropout_in_experts_and_noise_in_routers_are_not_lost() -> None:
    modules = {type(module).__name__: module for module in build("qwen3_moe").modules()}
    experts, router = modules["Qwen3MoeExperts"], modules["Qwen3MoeTopKRouter"]
    assert recognize_experts(experts).act == "silu"
    experts.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.1))
    with pytest.raises(LeftAlone, match="something else in training"):
        recognize_experts(experts)
    recognize_router(router)

    class Jitter(type(router)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Any:
            noise = torch.empty_like(hidden_states).uniform_(0.9, 1.1) if self.training else 1.0
            return super().forward(hidden_states * noise)

    router.__class__ = Jitter
    with pytest.raises(LeftAlone, match="something else in training"):
        recognize_router(router)


# ---- state ----------------------------------------------------------------------------------------------


class CountingNorm(nn.Module):
    """Norm that counts calls in a buffer, in an attribute and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6
        self.register_buffer("calls", torch.zeros(()))
        self.number, self.seen = 0, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.number += 1
        self.seen.append(1)
        return functional.rms_norm(x, (8,), self.weight, self.eps)


def test_trying_leaves_no_traces() -> None:
    """Running statistics, buffers, attributes, modes, random states and hooks are untouched."""
    mlp = MLP(nn.Sequential(nn.BatchNorm1d(16), CountingNorm()))
    model = nn.Sequential(nn.BatchNorm1d(8).bfloat16(), CountingNorm(), mlp, MLP(nn.Dropout(0.5)))
    model[0].eval()
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    torch.manual_seed(3)
    random.seed(3)
    states = torch.get_rng_state(), random.getstate()
    weft.integrations.apply(model, loss=False)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model[1].number, model[1].seen) == (0, [0])
    assert not calls


# ---- norms ----------------------------------------------------------------------------------------------


def test_norms_of_other_dimensions_are_left_alone() -> None:
    """GroupNorm(1, C) is a layer norm for rows, but not for images."""
    for module in (nn.GroupNorm(1, 16), nn.InstanceNorm1d(16, affine=True), nn.BatchNorm1d(16)):
        with pytest.raises(LeftAlone):
            recognize_norm(module)
    assert recognize_norm(nn.LayerNorm(16)).kind == "layer"


class ScaledNorm(nn.Module):
    """RMSNorm times a factor that is stored somewhere."""

    def __init__(self, factor: float, where: str) -> None:
        super().__init__()
        self.weight, self.eps, self.where = nn.Parameter(torch.ones(8)), 1e-6, where
        if where == "buffer":
            self.register_buffer("buffer", torch.tensor(factor))
        elif where == "private":
            self._private = factor
        elif where == "function":
            self.function: Callable[[Tensor], Tensor] = lambda x: x * factor
        else:
            self.box = {"factor": factor}

    def forward(self, x: Tensor) -> Tensor:
        y = functional.rms_norm(x, (8,), self.weight, self.eps)
        if self.where == "buffer":
            return y * self.buffer
        if self.where == "function":
            return self.function(y)
        return y * (self._private if self.where == "private" else self.box["factor"])


@pytest.mark.parametrize("where", ["buffer", "private", "function", "dictionary"])
def test_norms_that_differ_have_separate_verdicts(where: str) -> None:
    model = nn.Sequential(ScaledNorm(1.0, where), ScaledNorm(2.0, where))
    x = torch.randn(4, 8)
    wanted = [module(x) for module in model]
    report = weft.integrations.apply(model, loss=False)
    assert report.changed == ["0"]
    for module, expected in zip(model, wanted, strict=True):
        torch.testing.assert_close(module(x), expected)


def test_equal_norms_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.integrations import recognize

    tried = []
    attempt = recognize._try_norm
    monkeypatch.setattr(
        recognize, "_try_norm", lambda module, shapes: (tried.append(module), attempt(module, shapes))[1]
    )
    weft.integrations.apply(
        nn.Sequential(*(nn.LayerNorm(8) for _ in range(9)), nn.LayerNorm(8, eps=1e-3)), loss=False
    )
    assert len(tried) == 2


class NoWeight(nn.Module):
    """OLMo's norm: no parameters, but a size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.normalized_shape, self.eps = (size,), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.normalized_shape, None, None, self.eps)


def test_a_norm_without_parameters_is_tried_at_its_size() -> None:
    assert recognize_norm(NoWeight(96)).kind == "layer"


class UnusedNorm(nn.Module):
    """FalconMamba's norm: it has a weight but does not multiply by it."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6
        self.register_buffer("weight", torch.full((8,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def test_a_weight_that_a_norm_does_not_use_is_not_used() -> None:
    model = nn.Sequential(UnusedNorm())
    for x in (torch.randn(4, 8), torch.randn(4, 5)):
        weft.integrations.unapply(model)
        wanted = model(x)
        assert weft.integrations.apply(model, loss=False).changed == ["0"]
        torch.testing.assert_close(model(x), wanted)


class GatedNorm(nn.Module):
    """Norm with a gate after it, like Qwen3-Next's, or before it, like Mamba 2's."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        self.weight, self.eps, self.after = nn.Parameter(torch.rand(16) + 0.5), 1e-6, after

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        x = hidden_states.float()
        if gate is not None and not self.after:
            x = x * functional.silu(gate.float())
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        x = self.weight * x.to(hidden_states.dtype)
        if gate is not None and self.after:
            x = x * functional.silu(gate.float())
        return x.to(hidden_states.dtype)


def test_a_gated_norm_is_computed_with_its_gate_or_left_alone() -> None:
    x, gate = torch.randn(2, 5, 16, requires_grad=True), torch.randn(2, 5, 16, requires_grad=True)
    model = nn.Sequential(GatedNorm(after=True), GatedNorm(after=False))
    wanted = model[0](x, gate), model[0](x), *torch.autograd.grad(model[0](x, gate).sum(), (x, gate))
    report = weft.integrations.apply(model, loss=False)
    assert report.changed == ["0"]
    assert "gated_norm eps=1e-06 casting='llama' act='silu'" in str(report)
    assert "none of the options of gated_norm" in report.left["1"]
    with pytest.raises(ValueError, match="gated_norm"):
        weft.integrations.apply(model, loss=False, strict=True)
    calls: Counter[bool] = Counter()
    own = GatedNorm.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GatedNorm, "forward", lambda *args: (calls.update([len(args) == 3]), own(*args))[1])
        actual_results = (
            model[0](x, gate),
            model[0](x),
            *torch.autograd.grad(model[0](x, gate).sum(), (x, gate)),
        )
    assert calls == {False: 1}, "without a gate, the module's own forward runs"
    for actual, expected in zip(actual_results, wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


class ResidualNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return functional.rms_norm(x if residual is None else x + residual, (8,), self.weight, self.eps)


class Layered(MLP):
    def forward(self, x: Tensor, layer: int = 0) -> Tensor:
        return super().forward(x) * layer


def test_forwards_with_more_arguments_are_left_alone() -> None:
    """A model that uses these arguments would never reach Weft, whatever the report says."""
    report = weft.integrations.apply(nn.ModuleDict({"norm": ResidualNorm(), "mlp": Layered()}), loss=False)
    assert report.left == {
        "norm": "its forward takes more than one argument: residual",
        "mlp": "its forward takes more than one argument: layer",
    }


# ---- rotations ------------------------------------------------------------------------------------------


def apply_rotary_first(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first elements of a head, as many as the tables have."""
    cos, sin, dim = cos[:, None], sin[:, None], cos.shape[-1]

    def rotate(x: Tensor) -> Tensor:
        rotated, rest = x[..., :dim], x[..., dim:]
        half = torch.cat([-rotated[..., dim // 2 :], rotated[..., : dim // 2]], -1)
        return torch.cat([rotated * cos + half * sin, rest], -1)

    return rotate(q), rotate(k)


def apply_rotary_last(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the last elements of a head, which Weft's option does not do."""
    flipped = apply_rotary_first(q.flip(-1), k.flip(-1), cos, sin)
    return flipped[0].flip(-1), flipped[1].flip(-1)


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return apply_rotary_first(q, k, cos, sin)


class Last(nn.Module):
    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return apply_rotary_last(q, k, cos, sin)


class Named(nn.Module):
    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return apply_rotary_first(q, k, cos=cos, sin=sin)


def test_partial_rotations_reach_weft(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Attention())
    q, k = torch.randn(2, 4, 5, 32), torch.randn(2, 1, 5, 32)
    angles = torch.randn(2, 5, 8)
    tables = torch.cat([angles, angles], -1)
    inputs = (q, k, tables.cos(), tables.sin())
    wanted = model[0](*inputs)
    report = weft.integrations.apply(model, rope=True, loss=False)
    assert report.count("rope") == 1
    calls = []
    own = RotaryOptions.__call__
    monkeypatch.setattr(RotaryOptions, "__call__", lambda *args: (calls.append(args), own(*args))[1])
    for actual, expected in zip(model[0](*inputs), wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert len(calls) == 1


def test_rotations_that_weft_would_not_reach_are_left_alone() -> None:
    (options,) = recognize_rotary(Attention())
    assert options.partial
    assert not options.fits(torch.zeros(2, 4, 5, 32), torch.zeros(2, 5, 8, requires_grad=True))
    with pytest.raises(
        LeftAlone, match=r"apply_rotary_first\(q, k, cos=cos, sin=sin\), with other arguments"
    ):
        recognize_rotary(Named())
    with pytest.raises(LeftAlone, match="none of the options of rope"):
        recognize_rotary(Last())


def test_rotations_of_a_model_that_does_not_rotate_are_not_reported() -> None:
    """Attention layers could rotate, but the configuration has no rotary embedding."""
    one = next(one for one in zoo.entries() if one.name == "GraniteMoeHybridForCausalLM")
    model = zoo.build(one)
    assert weft.integrations.apply(model, rope=True).count("rope") == 0
    with pytest.raises(ValueError, match="no attention rotates by a function"):
        weft.integrations.apply(model, rope=True, strict=True)


# ---- hooks ----------------------------------------------------------------------------------------------


def hooked(model: nn.Module, calls: Counter[str]) -> nn.Module:
    """Register hooks on every module that change inputs and outputs, and count calls."""

    def hook(name: str, module: nn.Module) -> None:
        def before(_: nn.Module, inputs: Any) -> Any:
            calls[f"before {name}"] += 1
            return tuple(x * 1.02 if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)

        def after(_: nn.Module, inputs: Any, output: Any) -> Any:
            calls[f"after {name}"] += 1
            return output * 1.01 if isinstance(output, Tensor) and output.is_floating_point() else output

        def backward(_: nn.Module, grads: Any, above: Any) -> None:
            calls[f"backward {name}"] += 1

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        module.register_full_backward_hook(backward)

    for name, module in model.named_modules():
        if "norm" in name or "mlp" in name or name == "lm_head":
            hook(name, module)
    return model


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_hooks_run_once_and_affect_results(name: str) -> None:
    """Hooks are on norms, feed-forward layers, their projections and activations, experts and the head."""
    model_calls: Counter[str] = Counter()
    weft_calls: Counter[str] = Counter()
    loss, gradients = step(hooked(build(name), model_calls))
    model = build(name)
    weft.integrations.apply(model, strict=True)
    weft_loss, grads = step(hooked(model, weft_calls))
    assert weft_calls == model_calls
    assert model_calls["after lm_head"] == model_calls["backward lm_head"] == 1
    assert any("act_fn" in key for key in model_calls)
    torch.testing.assert_close(weft_loss, loss, rtol=1e-6, atol=1e-6)
    assert distance(grads, gradients) < 5e-6
    assert abs(loss - step(build(name), batch())[0]) > 1e-4, "hooks change something"


# ---- activations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mish", "quick_gelu", "tanh", "relu2", "gelu_new", "leaky_relu"])
def test_activations_of_transformers(name: str) -> None:
    """An MLP with an activation of transformers gets the `act` that computes the same, or is left alone."""
    from transformers.activations import ACT2FN

    module = MLP()
    module.act_fn = ACT2FN[name]
    if name == "leaky_relu":
        with pytest.raises(LeftAlone, match="none of the options of glu"):
            recognize_mlp(module)
    else:
        assert recognize_mlp(module).unit == UnitOptions("gelu_tanh" if name == "gelu_new" else name)  # type: ignore[arg-type]


def test_alpha_of_elu() -> None:
    module = MLP()
    module.alpha = 0.5
    module.act_fn = nn.ELU(alpha=0.5)
    assert recognize_mlp(module).unit == UnitOptions("elu", alpha=0.5)

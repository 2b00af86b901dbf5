"""Deferred logits as users of `outputs.logits` see them, compared with the same model without Weft."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import weft.integrations
from tests.integrations.tiny import batch, build
from weft.integrations.logits import DeferredLogits, scale_and_softcap


class Own(nn.Module):
    """Model that returns its logits after applying `after` to them."""

    def __init__(self, after: Callable[[Any], Any] = lambda logits: logits) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.lm_head, self.after = nn.Linear(32, 32), nn.Linear(32, 50), after

    def forward(self, x: Tensor) -> Any:
        return self.after(self.lm_head(torch.tanh(self.body(x))))


X, TARGET = (
    torch.randn(6, 32, generator=torch.Generator().manual_seed(1)),
    torch.tensor([3, 1, -100, 49, 0, 7]),
)


def both(after: Callable[[Any], Any] = lambda logits: logits) -> Iterator[Own]:
    """Yield the model unchanged, and with Weft."""
    yield Own(after)
    model = Own(after)
    weft.integrations.apply(model, strict=True)
    yield model


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


# ---- arithmetic -----------------------------------------------------------------------------------------

INF = float("inf")
SCALES: dict[str, Callable[[Any], Any]] = {
    "zero": lambda y: y * 0.0,
    "negative": lambda y: -2.0 * y,
    "divided by a negative": lambda y: y / -3.0,
    "divided by zero": lambda y: y / 0.0,
    "infinite": lambda y: y * INF,
    "not a number": lambda y: y * float("nan"),
    "tiny": lambda y: y * 1e-42,
    "huge": lambda y: y * 1e38 * 1e38,
    "softcap of zero": lambda y: 0.0 * torch.tanh(y / 2.0),
    "negative softcap": lambda y: -2.0 * torch.tanh(y / -2.0),
    "scale after the softcap": lambda y: (torch.tanh(y / 5.0) * 5.0) * 0.5,
    "scale before the softcap": lambda y: 5.0 * torch.tanh(y * 0.5 / 5.0),
    "softcap alone": torch.tanh,
    "two softcaps": lambda y: torch.tanh(torch.tanh(y * 2.0) * 3.0),
    "negative before the softcap": lambda y: 5.0 * torch.tanh(y * -0.5),
}


@pytest.mark.parametrize("name", SCALES)
def test_every_scale_and_softcap_has_the_loss_of_the_unchanged_model(name: str) -> None:
    losses, grads = [], []
    for model in both(SCALES[name]):
        loss = functional.cross_entropy(model(X), TARGET)
        losses.append(loss.detach())
        grads.append(gradients(loss, model))
    torch.testing.assert_close(losses[1], losses[0], equal_nan=True, rtol=1e-5, atol=1e-6)
    for actual, expected in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_steps_are_parsed_into_scale_and_softcap() -> None:
    assert scale_and_softcap([]) == (1.0, None)
    assert scale_and_softcap([("times", 4.0), ("times", 0.5)]) == (2.0, None)
    assert scale_and_softcap([("times", 0.25), ("tanh", 0.0), ("times", 8.0)]) == (2.0, 8.0)
    for factor in (0.0, -1.0, INF, float("nan"), 1e-40, 1e39):
        assert scale_and_softcap([("times", factor)]) is None
        assert scale_and_softcap([("times", 1.0), ("tanh", 0.0), ("times", factor)]) is None


# ---- hooks ----------------------------------------------------------------------------------------------


def halve(module: nn.Module, inputs: Any, output: Any) -> Any:
    return output * 0.5


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda head: head.register_forward_hook(halve),
    "forward with options": lambda head: head.register_forward_hook(
        lambda module, inputs, options, output: output + 1.0 * torch.arange(50), with_kwargs=True
    ),
    "before forward": lambda head: head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 3.0,)),
    "backward": lambda head: head.register_full_backward_hook(
        lambda module, grads, above: tuple(None if grad is None else grad * 2.0 for grad in grads)
    ),
    "before backward": lambda head: head.register_full_backward_pre_hook(
        lambda module, grads: (grads[0] * 5.0,)
    ),
    "of the weight": lambda head: head.weight.register_hook(lambda grad: grad * 7.0),
    "of all modules": lambda head: nn.modules.module.register_module_forward_hook(halve),
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("when", ["before apply", "after apply"])
def test_hooks_of_the_head_run_once(name: str, when: str) -> None:
    calls: list[bool] = []
    losses, grads = [], []

    def count(changed: bool, *_: Any) -> None:
        calls.append(changed)

    for changed in (False, True):
        model = Own()

        if changed and when == "after apply":
            weft.integrations.apply(model, strict=True)
        handles = [HOOKS[name](model.lm_head)]
        handles += [model.lm_head.register_forward_pre_hook(functools.partial(count, changed))]
        if changed and when == "before apply":
            weft.integrations.apply(model, strict=True)
        try:
            loss = functional.cross_entropy(model(X), TARGET)
            losses.append(loss.detach())
            grads.append(gradients(loss, model))
        finally:
            for handle in handles:
                handle.remove()
    assert calls == [False, True], "one call each"
    torch.testing.assert_close(losses[1], losses[0])
    for actual, expected in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(actual, expected)


# ---- when logits may be read ----------------------------------------------------------------------------


def manual(parameters: list[nn.Parameter]) -> Any:
    """Return a user's own optimizer, which changes weights behind autograd's back."""

    class Manual:
        def step(self) -> None:
            for parameter in parameters:
                parameter.data -= parameter.grad

    return Manual()


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda parameters: torch.optim.SGD(parameters, 1.0, foreach=False),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, 0.1, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, 0.1, fused=True),
    "manual": manual,
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_logits_are_refused_after_an_optimizer_step(name: str, compiled: bool) -> None:
    """Neither fused optimizers nor writes to `.data` count changes."""
    model, inputs = build("llama"), batch()
    weft.integrations.apply(model)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    call = torch.compile(model, backend="aot_eager") if compiled else model
    output = call(**inputs, use_cache=False)
    output.loss.backward()
    optimizer.step()
    with pytest.raises(
        RuntimeError, match=r"run backward.*before loss\.backward\(\).*apply\(model, loss=False\)"
    ):
        output.logits.argmax(-1)
    with pytest.raises(RuntimeError, match="run backward"):
        functional.cross_entropy(output.logits.view(-1, 203), inputs["labels"].view(-1))


def test_logits_read_before_backward_stay_available() -> None:
    """Logits read before backward keep the values of the weights at that time, even after the step."""
    model, inputs = build("llama"), batch()
    with torch.no_grad():
        wanted = model(**inputs).logits
    weft.integrations.apply(model)
    output = model(**inputs)
    output.logits.argmax(-1)
    output.loss.backward()
    torch.optim.SGD(model.parameters(), 1.0).step()
    torch.testing.assert_close(output.logits.tensor(), wanted)


def test_logits_are_refused_after_their_inputs_changed() -> None:
    """Without a backward, the weight changes from outside, or the model changes the hidden states in place."""
    model = Own()
    weft.integrations.apply(model)
    logits = model(X)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="have changed since"):
        logits.sum()
    logits = model(X)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight * 2)
    with pytest.raises(RuntimeError, match="have changed since"):
        functional.cross_entropy(logits, TARGET)
    hidden = torch.randn(6, 32, requires_grad=True) * 1.0
    logits = model.lm_head(hidden)
    hidden.add_(1.0)
    with pytest.raises(RuntimeError, match="have changed since"):
        logits.sum()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_reading_without_gradients_keeps_them_for_later(mode: Any) -> None:
    """Logits first read for a metric still have gradients for a loss."""
    grads = []
    for model in both():
        logits = model(X)
        with mode():
            logits.argmax(-1)
            assert not (logits.float() + 0).requires_grad
        assert logits.requires_grad
        grads.append(gradients((logits * logits).sum(), model))
    for actual, expected in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_frozen_model_defers_nothing_and_frozen_parts_get_no_gradient() -> None:
    model = Own()
    weft.integrations.apply(model)
    model.requires_grad_(False)
    assert type(model(X)) is Tensor
    for frozen, learning in ((model.body, model.lm_head), (model.lm_head, model.body)):
        model.requires_grad_(True)
        frozen.requires_grad_(False)
        model.zero_grad()
        logits = model(X)
        assert type(logits) is DeferredLogits
        assert logits.requires_grad
        functional.cross_entropy(logits, TARGET).backward()
        assert all(parameter.grad is None for parameter in frozen.parameters())
        assert all(parameter.grad is not None for parameter in learning.parameters())


def test_float64_is_not_deferred() -> None:
    model = Own().double()
    weft.integrations.apply(model)
    assert type(model(X.double())) is Tensor


# ---- other libraries and outputs ------------------------------------------------------------------------


def test_outputs_can_be_saved_and_copied() -> None:
    """They pickle and torch.save as tensors like those of the unchanged model; deepcopy refuses results of a graph."""
    wanted, logits = (model(X) for model in both())
    assert isinstance(logits, DeferredLogits)
    buffer = io.BytesIO()
    torch.save({"logits": logits}, buffer)
    buffer.seek(0)
    for restored in (
        torch.load(buffer, weights_only=False)["logits"],
        pickle.loads(pickle.dumps(logits)),
        copy.copy(logits),
    ):
        assert type(restored) is Tensor
        torch.testing.assert_close(restored, wanted)
    for value in (wanted, logits):
        with pytest.raises(RuntimeError, match="deepcopy protocol"):
            copy.deepcopy(value)


def test_reading_attributes_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Own()
    weft.integrations.apply(model)
    monkeypatch.setattr(DeferredLogits, "tensor", lambda self: pytest.fail("logits were computed"))
    logits = model(X)
    for name in ("_fields", "to_dict", "device_mesh", "__len_hint__"):
        assert not hasattr(logits, name)
    assert hasattr(logits, "to")
    assert hasattr(logits, "dtype")
    assert logits.to(logits.device) is logits
    assert logits.to("cpu", non_blocking=True) is logits
    assert logits.to(torch.bfloat16).dtype == torch.bfloat16
    assert not torch.is_tensor(logits)
    assert len(logits) == 6


def test_accelerate_converts_moves_and_gathers_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate converts a model's outputs to fp32, moves them, and gathers them for metrics."""
    operations = pytest.importorskip("accelerate.utils.operations", reason="accelerate is not installed")
    model, inputs = build("llama", torch.bfloat16), batch()
    wanted = model(**inputs, use_cache=False)
    weft.integrations.apply(model)
    run = operations.convert_outputs_to_fp32(
        lambda **inputs_of_call: model(**inputs_of_call, use_cache=False)
    )
    output = run(**inputs)
    assert output.logits.dtype == torch.float32
    assert output.loss.dtype == torch.float32
    torch.testing.assert_close(output.loss, wanted.loss.float(), rtol=1e-2, atol=1e-2)
    assert operations.send_to_device(output, "cpu").logits.shape == wanted.logits.shape
    with pytest.raises(TypeError, match="DeferredLogits"):
        operations.recursively_apply(lambda tensor: tensor, output.logits, error_on_other_type=True)
    torch.testing.assert_close(
        operations.recursively_apply(lambda tensor: tensor, output.logits.tensor(), error_on_other_type=True),
        wanted.logits.float(),
        rtol=0.03,  # bf16 through two layers
        atol=0.03,
    )

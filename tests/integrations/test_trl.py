"""TRL's trainers with Weft's log-probabilities, compared with the same trainers without: what they log and learn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.examples import example
from weft.integrations import trl as integration

ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class Unused:
    """Stand-in for TRL's function."""

    @staticmethod
    def apply(*arguments: Any) -> str:
        return "TRL's own"


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_results_and_gradients_match_float64(softcap: float | None) -> None:
    """This covers all results, and the gradients of log-probabilities and entropy."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, generator=generator) for shape in ((20, 16), (50, 16), (50,)))
    targets = torch.randint(0, 50, (20,), generator=generator)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    actual = integration.LogProbs(Unused).apply(*leaves, targets, 0.9, 32768, softcap, 0.5, ALL)
    exact = [t.double().requires_grad_() for t in (hidden, weight, bias)]
    z = 0.5 * (exact[0] @ exact[1].T + exact[2])
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / 0.9
    log_p = torch.log_softmax(z, 1)
    p = log_p.exp()
    expected = (
        log_p.gather(1, targets[:, None])[:, 0],
        -(p * log_p).sum(1),
        p.square().sum(1).log(),
        z.mean(1),
        z.argmax(1) == targets,
    )
    for one, other in zip(actual, expected, strict=True):
        assert one is not None
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)
    assert [t is not None and t.requires_grad for t in actual] == [True, True, False, False, False]
    assert actual[1] is not None
    gradients = torch.autograd.grad((actual[0] + 0.1 * actual[1]).sum(), leaves)
    for one, other in zip(
        gradients, torch.autograd.grad((expected[0] + 0.1 * expected[1]).sum(), exact), strict=True
    ):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
    few = integration.LogProbs(Unused).apply(*leaves, targets, 0.9, 32768, softcap, 0.5, ("log_probs",))
    assert torch.equal(few[0], actual[0])
    assert few[1:] == (None,) * 4


def test_sharded_heads_and_other_scales_are_left_to_trl() -> None:
    """ZeRO-3 partitions the head after forward, and Weft does not support a scale of zero."""
    hidden, weight, targets = torch.randn(4, 8), torch.randn(9, 8), torch.zeros(4, dtype=torch.long)
    call = integration.LogProbs(Unused).apply
    assert call(hidden, weight, None, targets, 1.0, 1, None, 0.0, ALL) == "TRL's own"  # type: ignore[comparison-overlap]
    weight.ds_id = 1  # type: ignore[attr-defined]
    assert call(hidden, weight, None, targets, 1.0, 1, None, 1.0, ALL) == "TRL's own"  # type: ignore[comparison-overlap]


# ---- trainers -------------------------------------------------------------------------------------------


@pytest.fixture
def trl() -> Iterator[Any]:
    """Return TRL; Weft is not enabled before and after the test."""
    yield pytest.importorskip("trl", reason="trl is not installed: pip install weft[trl]")
    integration.disable()


@pytest.mark.slow
def test_enable_and_disable_are_inverse(trl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.trainer import utils

    own = utils._ChunkedLogProbFunction
    integration.disable()
    assert utils._ChunkedLogProbFunction is own
    integration.enable()
    integration.enable()
    assert isinstance(utils._ChunkedLogProbFunction, integration.LogProbs)
    integration.disable()
    assert utils._ChunkedLogProbFunction is own

    class Other:
        @staticmethod
        def forward(ctx: Any, hidden: Tensor) -> None: ...

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Other)
    with pytest.raises(RuntimeError, match=r"differently from the supported 1\.16"):
        integration.enable()
    monkeypatch.delattr(utils, "_ChunkedLogProbFunction")
    with pytest.raises(RuntimeError, match="does not exist"):
        integration.enable()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
def test_trainers_log_and_learn_the_same(trl: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps in fp32, as in the example: all logged values including gradient norms, and the trained parameters,
    match."""
    finetune = example("finetune_trl")
    compute, calls = integration.linear_logprobs, 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return compute(*arguments, **options)

    monkeypatch.setattr(integration, "linear_logprobs", counted)
    own = finetune.train(method, 2, with_weft=False)
    assert not calls
    ours = finetune.train(method, 2, with_weft=True)
    assert calls >= 2
    for theirs, wefts in zip(own.logs, ours.logs, strict=True):
        assert theirs.keys() == wefts.keys()
        assert theirs["grad_norm"] > 0
        for name in theirs.keys() - {"step_time"}:
            assert wefts[name] == pytest.approx(theirs[name], rel=2e-5, abs=5e-6), name
    # Adam divides gradients by their size: gradients near zero, and their errors, move parameters as much as others.
    assert (own.parameters - ours.parameters).norm() < 1e-5 * own.parameters.norm()

"""TRL: its trainers' log-probabilities, computed by `weft.linear_logprobs`.

    import weft.integrations.trl
    weft.integrations.trl.enable()
    trainer = trl.GRPOTrainer(...)  # as before

Since 1.16, TRL's trainers (SFT, DPO, GRPO, KTO, RLOO) take log-probabilities, entropies and logged statistics from one
function of hidden states and the model's head. `enable` replaces it by Weft's, for all trainers of the process from
their next step on; `disable` restores TRL's.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any

from torch import Tensor

from ..ops import linear_logprobs
from ..runtime import serves

_NAME = "_ChunkedLogProbFunction"  # in trl.trainer.utils
_PARAMETERS = (
    "ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping",
    "logit_scale", "outputs",
)  # fmt: skip

# In TRL's order, after the log-probabilities.
_Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def enable() -> None:
    """Let TRL's trainers compute log-probabilities with Weft."""
    from trl.trainer import utils

    own = getattr(utils, _NAME, None)
    if isinstance(own, LogProbs):
        return
    parameters = () if own is None else tuple(inspect.signature(own.forward).parameters)
    if parameters != _PARAMETERS:
        raise RuntimeError(
            f"TRL {version('trl')} computes log-probabilities differently from the supported 1.16: trl.trainer.utils."
            f"{_NAME} takes {', '.join(parameters[1:]) or 'nothing: it does not exist'}. Install trl 1.16, or remove "
            "enable()"
        )
    setattr(utils, _NAME, LogProbs(own))


def disable() -> None:
    """Let TRL's trainers compute with TRL's own function again."""
    from trl.trainer import utils

    current = getattr(utils, _NAME, None)
    if isinstance(current, LogProbs):
        setattr(utils, _NAME, current.own)


class LogProbs:
    """Replacement for TRL's `ChunkedLogProbFunction`."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    ) -> _Results:
        """Return (logprobs, entropy, log_sum_sq_probs, mean_logits, is_top1) of hidden states [N, H] and targets [N];
        None for what is not in `outputs`. There are no chunks, so `chunk_size` does not matter."""
        # DeepSpeed's ZeRO-3 partitions the head after forward, and TRL's function gathers it again in its backward.
        if hasattr(weight, "ds_id") or not serves(hidden.device) or logit_scale <= 0.0:
            results: _Results = self.own.apply(
                hidden,
                weight,
                bias,
                targets,
                temperature,
                chunk_size,
                final_logit_softcapping,
                logit_scale,
                outputs,
            )
            return results
        result = linear_logprobs(
            hidden,
            weight,
            targets,
            bias=bias,
            logit_scale=logit_scale,
            softcap=final_logit_softcapping,
            temperature=temperature,
            return_lse=True,
            return_entropy="entropy" in outputs,
            return_accuracy="is_top1" in outputs,
            return_mean_logits="mean_logits" in outputs,
            return_log_sum_squares="log_sum_sq_probs" in outputs,
        )
        return (
            result.logprobs,
            result.entropy,
            result.log_sum_squares,
            None if result.mean_logits is None else result.mean_logits.detach(),
            None if result.accuracy is None else result.accuracy.bool(),
        )

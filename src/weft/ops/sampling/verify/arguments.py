"""Arguments and outputs of the verification of drafts.

Row 0 of a request follows its context, and row i + 1 follows draft i: a request with K drafts has N = K + 1 rows.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..parameters import Integer, Number

PART = 4096  # tokens whose statistics are computed by themselves, so that a row's bits do not depend on the batch


class Verified(NamedTuple):
    """Accepted drafts of each request, the token after them, and where they are."""

    tokens: Tensor  # int64 [B, N]: the accepted drafts and one more token, then -1
    accepted: Tensor  # int64 [B]: how many drafts are accepted
    path: Tensor  # int64 [B, N]: rows of the target model to keep: row 0 and those of the accepted drafts, then -1


class Relaxed(NamedTuple):
    """When a draft is accepted although the target model would have chosen another token: if it is among the `top_k`
    largest logits and at most `margin` below the largest. From the token `close` on, verification is strict."""

    top_k: int
    margin: float
    close: int


class AcceptArgs(NamedTuple):
    chosen: Tensor  # int64 [B, N]: the token that the target model chose in each row
    drafts: Tensor  # int32 or int64 [B, N - 1]
    parents: (
        Tensor | None
    )  # int32 or int64 [N - 1] or [B, N - 1]: the row that each draft follows; None for a chain


class VerifyArgs(NamedTuple):
    logits: Tensor  # [B, N, V]
    drafts: Tensor  # int32 or int64 [B, N - 1]
    draft_probs: Tensor  # [B, N - 1, V]: the distributions from which the drafts were drawn
    temperature: Number
    seed: Integer
    step: Integer  # of row 0
    joint: bool  # drafts are verified as a block

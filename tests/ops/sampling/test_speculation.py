"""Speculative decoding of a small model gives the tokens of decoding one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import weft

VOCAB, HIDDEN = 64, 128


class Model:
    """The next token depends on the two before it, by products whose rows do not depend on the number of rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.embedding = torch.randn(VOCAB, HIDDEN).to(dtype)
        self.mix, self.up = (torch.randn(HIDDEN, HIDDEN).to(dtype) / 8 for _ in range(2))
        self.head = torch.randn(HIDDEN, VOCAB).to(dtype)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits after each token but the first, [B, T - 1, V]."""
        x = weft.embedding(tokens, self.embedding)
        x = x[:, 1:] + weft.matmul(x[:, :-1], self.mix, batch_invariant=True)
        x = weft.rms_norm(x + weft.matmul(x, self.up, activation="silu", batch_invariant=True))
        logits: Tensor = weft.matmul(x, self.head, batch_invariant=True)
        return logits


def decode(model: Model, prompts: Tensor, count: int, drafts: int, **options: float) -> tuple[Tensor, int]:
    """Return the tokens after the prompts, and how many drafts were accepted. Drafts repeat what a request wrote two,
    three, ... tokens ago, or are the model's likeliest, so that some are right."""
    seed, accepted = torch.arange(len(prompts)), 0
    contexts = prompts.tolist()
    first = prompts.shape[1]
    while min(map(len, contexts)) < first + count:
        rows = []
        for context in contexts:
            guess = list(context)
            for i in range(drafts):
                likely = model.logits(torch.tensor([guess[-2:]]))[0, -1].argmax().item()
                guess.append(int(likely) if i % 3 != 2 else guess[-2])
            rows.append(guess[-2 - drafts :])
        tokens = torch.tensor(rows)
        step = torch.tensor([len(context) - first for context in contexts])
        verified = weft.verify(model.logits(tokens), tokens[:, 2:], seed=seed, step=step, **options)
        for context, new, n in zip(
            contexts, verified.tokens.tolist(), verified.accepted.tolist(), strict=True
        ):
            context += new[: n + 1]
            accepted += n
    return torch.tensor([context[first : first + count] for context in contexts]), accepted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}], ids=["greedy", "drawn"]
)
def test_drafts_change_no_token(dtype: torch.dtype, options: dict[str, float]) -> None:
    model, prompts = Model(dtype), torch.randint(0, VOCAB, (3, 2))
    wanted, none = decode(model, prompts, 24, 0, **options)
    assert none == 0
    for drafts in (1, 6):
        got, accepted = decode(model, prompts, 24, drafts, **options)
        assert torch.equal(got, wanted)
        assert accepted > 3

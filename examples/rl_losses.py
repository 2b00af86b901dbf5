"""Post-training losses, ten plain lines each, on one primitive: the log-probability of each chosen token.

`weft.linear_logprobs` computes log-probabilities, entropies and their gradients without materializing the logits. The
losses on top of it are plain PyTorch and up to the trainer. Each one here is checked against its textbook form, which
builds the logits: values, and gradients of the hidden states and the head.

    python examples/rl_losses.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import weft

# ---- the losses ----------------------------------------------------------------------------------------


def dpo(hidden: Tensor, head: Tensor, tokens: Tensor, reference: Tensor, beta: float = 0.1) -> Tensor:
    """Direct preference optimization. hidden [2B, S, H]: B chosen answers, then B rejected ones; tokens [2B, S] with
    -100 outside the answers; reference [2B]: log-probabilities of complete answers under the reference model."""
    answers = weft.linear_logprobs(hidden, head, tokens).sum(-1)
    chosen, rejected = (answers - reference).chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


def grpo(
    hidden: Tensor, head: Tensor, tokens: Tensor, old: Tensor, reference: Tensor, rewards: Tensor,
    clip: float = 0.2, kl: float = 0.04, temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    """Group-relative policy optimization of one group of answers. hidden [G, S, H], tokens [G, S]; old and reference
    [G, S]: log-probabilities at the time of sampling, and of the reference model; rewards [G]."""
    logprobs = weft.linear_logprobs(hidden, head, tokens, temperature=temperature)
    advantage = ((rewards - rewards.mean()) / (rewards.std() + 1e-4))[:, None]
    ratio = (logprobs - old).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    divergence = (reference - logprobs).exp() - (reference - logprobs) - 1
    mask = tokens != -100
    return ((kl * divergence - surrogate) * mask).sum() / mask.sum()


def distill(hidden: Tensor, head: Tensor, teacher: Tensor, teacher_head: Tensor, tokens: Tensor) -> Tensor:
    """Distillation on the student's own answers. hidden, teacher [B, S, H]. The KL divergence of student and teacher is
    estimated at the tokens that the student drew; its expected gradient is that of the full divergence."""
    student = weft.linear_logprobs(hidden, head, tokens)
    with torch.no_grad():
        teacher_logprobs = weft.linear_logprobs(teacher, teacher_head, tokens)
    mask = tokens != -100
    reward = (student - teacher_logprobs).detach()  # of choosing a token that the teacher would not have
    return (reward * student * mask).sum() / mask.sum()


# ---- textbook forms ------------------------------------------------------------------------------------


def _chosen_logprobs(hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    logprobs = torch.log_softmax(hidden @ head.t() / temperature, -1)
    return logprobs.gather(-1, tokens.clamp(min=0)[..., None])[..., 0] * (tokens != -100)


def textbook_dpo(
    hidden: Tensor, head: Tensor, tokens: Tensor, reference: Tensor, beta: float = 0.1
) -> Tensor:
    answers = _chosen_logprobs(hidden, head, tokens).sum(-1)
    half = len(answers) // 2
    margins = beta * (answers[:half] - reference[:half]) - beta * (answers[half:] - reference[half:])
    return -torch.log(torch.sigmoid(margins)).mean()


def textbook_grpo(
    hidden: Tensor, head: Tensor, tokens: Tensor, old: Tensor, reference: Tensor, rewards: Tensor,
    clip: float = 0.2, kl: float = 0.04, temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    logprobs = _chosen_logprobs(hidden, head, tokens, temperature)
    mask = (tokens != -100).double()
    total = torch.zeros((), dtype=logprobs.dtype)
    for i in range(len(tokens)):
        advantage = (rewards[i] - rewards.mean()) / (rewards.std() + 1e-4)
        for t in range(tokens.shape[1]):
            ratio = torch.exp(logprobs[i, t]) / torch.exp(old[i, t])
            surrogate = min(ratio * advantage, torch.clamp(ratio, 1 - clip, 1 + clip) * advantage)
            pi = torch.exp(reference[i, t]) / torch.exp(logprobs[i, t])
            total = total - mask[i, t] * (surrogate - kl * (pi - torch.log(pi) - 1))
    return total / mask.sum()


def textbook_distill(
    hidden: Tensor, head: Tensor, teacher: Tensor, teacher_head: Tensor, tokens: Tensor
) -> Tensor:
    student, teacher_logprobs = (
        _chosen_logprobs(hidden, head, tokens),
        _chosen_logprobs(teacher, teacher_head, tokens).detach(),
    )
    mask = tokens != -100
    return ((student - teacher_logprobs).detach() * student * mask).sum() / mask.sum()


# ---- comparison ----------------------------------------------------------------------------------------


def compare(name: str, ours: Callable[..., Tensor], textbook: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Compare the loss and its gradients of hidden states and head with the textbook's in float64."""
    hidden, head = (t.clone().requires_grad_() for t in inputs[:2])
    loss = ours(hidden, head, *inputs[2:])
    loss.backward()
    exact = [t.double() if t.is_floating_point() else t for t in inputs]
    hidden64, head64 = (t.requires_grad_() for t in exact[:2])
    wanted = textbook(hidden64, head64, *exact[2:])
    wanted.backward()
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-6)
    for got, expected in ((hidden.grad, hidden64.grad), (head.grad, head64.grad)):
        assert got is not None
        assert expected is not None
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-6)
    print(f"{name:8} loss {loss.item():+.6f} and gradients agree with the textbook form")


def main() -> None:
    torch.manual_seed(0)
    answers, length, size, vocab = 4, 12, 32, 500
    hidden, head = torch.randn(answers, length, size), torch.randn(vocab, size) / size**0.5
    tokens = torch.randint(0, vocab, (answers, length))
    tokens[:, 9:] = -100  # padding after the end of an answer
    old = _chosen_logprobs(hidden, head, tokens) + 0.3 * torch.randn(answers, length)
    reference = old + 0.2 * torch.randn(answers, length)
    compare("DPO", dpo, textbook_dpo, hidden, head, tokens, reference.sum(-1))
    compare("GRPO", grpo, textbook_grpo, hidden, head, tokens, old, reference, torch.randn(answers))
    teacher, teacher_head = torch.randn(answers, length, 48), torch.randn(vocab, 48) / 7
    compare("distill", distill, textbook_distill, hidden, head, teacher, teacher_head, tokens)


if __name__ == "__main__":
    main()

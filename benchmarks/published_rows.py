"""The rows of `weft published` on this CPU, beside torch.compile and eager PyTorch of the same maths.

    python benchmarks/published_rows.py [--quick] [--only NAME] [--json FILE]

Shapes are the published ones, with fewer rows where a contender would need more than a second; experts' sizes are
multiples of 128 here, which spares PyTorch a loop over the experts. How they are timed is said in `contests.py`.
"""

from __future__ import annotations

from typing import Any

import cross_entropy
import torch
import torch.nn.functional as F
from contests import Contest, contest, main
from norm_and_quantize import norm_both, parts, quantize_both

import weft
from weft.ops.moe.router_linear import RouterLinearBackwardArgs, RouterLinearNeeds
from weft.workloads import Workload
from weft.workloads.published import PUBLISHED

Tensor = torch.Tensor
TARGET = 0.8  # of every row; their geometric mean is to reach 1.5


def workload(number: int) -> Workload:
    return next(row.find() for row in PUBLISHED if row.number == number)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


# ---- the router -----------------------------------------------------------------------------------------


def router(name: str) -> Contest:
    x, weight = draw(8192, 2048), draw(256, 2048)

    def theirs(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.float(), weight.float())

    def ours() -> Any:
        return weft.router_linear(x, weight)

    return contest(name, ours, theirs, (x, weight), workload(4).least_bytes(), TARGET)


def router_backward(name: str) -> Contest:
    x, weight, dy = draw(8192, 2048), draw(256, 2048), draw(8192, 256, dtype=torch.float32)
    op = weft.catalogue["router_linear_backward"]
    arguments = RouterLinearBackwardArgs(x, weight, None, dy, RouterLinearNeeds(True, False, False))

    def theirs(dy: Tensor, weight: Tensor) -> Tensor:
        return (dy @ weight.float()).to(torch.bfloat16)

    def ours() -> Any:
        return op(arguments).x

    return contest(name, ours, theirs, (dy, weight), workload(5).least_bytes(), TARGET)


# ---- to the experts and back ----------------------------------------------------------------------------


def permute(name: str) -> Contest:
    call = workload(6).make()
    x, probs, rows = call["x"], call["probs"], call["rows"]
    slots = rows.row_of_slot.shape[-1]

    def theirs(x: Tensor, probs: Tensor, slot_of_row: Tensor) -> tuple[Tensor, ...]:
        real = slot_of_row >= 0
        slot = slot_of_row.clamp(min=0)
        taken = torch.where(real[:, None], x[slot // slots], 0.0)
        return taken, torch.where(real, probs.flatten()[slot], 0.0)

    return contest(name, call, theirs, (x, probs, rows.slot_of_row), workload(6).least_bytes(), TARGET)


def unpermute(name: str) -> Contest:
    call = workload(7).make()

    def theirs(y: Tensor, carried: Tensor, row_of_slot: Tensor) -> tuple[Tensor, ...]:
        return y[row_of_slot].float().sum(1).to(y.dtype), carried[row_of_slot]

    inputs = (call["y"], call["carried"], call["rows"].row_of_slot)
    return contest(name, call, theirs, inputs, workload(7).least_bytes(), TARGET)


# ---- gated linear units ---------------------------------------------------------------------------------


def silu(x: Tensor, prob: Tensor | None = None) -> tuple[Tensor, ...]:
    gate, up = x.float().chunk(2, -1)
    y = F.silu(gate) * up
    return quantize_both(y if prob is None else y * prob[:, None])


def silu_gradient(x: Tensor, dy: Tensor, prob: Tensor | None = None) -> tuple[Tensor, ...]:
    (gate, up), d = x.float().chunk(2, -1), dy.float()
    share = torch.sigmoid(gate)
    f = gate * share
    weighted = d if prob is None else d * prob[:, None]
    dgate = weighted * up * share * (1 + gate * (1 - share))
    copies = quantize_both(torch.cat([dgate, weighted * f], -1))
    return copies if prob is None else (*copies, (d * f * up).sum(-1))


def silu_experts(name: str) -> Contest:
    x, prob = draw(32768, 2048), draw(32768, dtype=torch.float32)
    ends = torch.arange(1, 33, dtype=torch.int32) * 1024

    def ours() -> Any:
        return parts(weft.glu(x, probs=prob, ends=ends, align=128, quantize="1x128", columnwise=True))

    return contest(name, ours, silu, (x, prob), workload(8).least_bytes(32768), TARGET)


def silu_experts_backward(name: str) -> Contest:
    x, prob, dy = draw(32768, 2048), draw(32768, dtype=torch.float32), draw(32768, 1024)
    ends = torch.arange(1, 33, dtype=torch.int32) * 1024

    def ours() -> Any:
        dx, _, dprob = weft.glu_backward(
            dy, x, probs=prob, ends=ends, align=128, quantize="1x128", columnwise=True
        )
        return *parts(dx), dprob

    return contest(name, ours, silu_gradient, (x, dy, prob), workload(9).least_bytes(32768), TARGET)


def silu_dense(name: str) -> Contest:
    x = draw(16384, 1024)

    def ours() -> Any:
        return parts(weft.glu(x, quantize="1x128", columnwise=True))

    return contest(name, ours, silu, (x,), workload(10).least_bytes(), TARGET)


def silu_dense_backward(name: str) -> Contest:
    x, dy = draw(16384, 1024), draw(16384, 512)

    def ours() -> Any:
        return parts(weft.glu_backward(dy, x, quantize="1x128", columnwise=True).x)

    return contest(name, ours, silu_gradient, (x, dy), workload(11).least_bytes(), TARGET)


# ---- attention ------------------------------------------------------------------------------------------


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first 2 * cos.shape[-1] numbers of heads [S, B, heads, d] turned, by angles of S."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cos[:, None, None], sin[:, None, None]
    return torch.cat([a * c - b * s, b * c + a * s, rest], -1)


def heads_of(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [S, B, 16, 128] and k, v [S, B, 4, 128] of groups [q q q q k v]."""
    groups = qkv.unflatten(-1, (4, 6, 128))
    return groups[..., :4, :].flatten(-3, -2), groups[..., 4, :], groups[..., 5, :]


def qkv(name: str) -> Contest:
    call = workload(2).make()

    def theirs(x: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        q, k, v = heads_of(x)
        done = []
        for part, weight in ((q, q_weight), (k, k_weight)):
            h = part.float()
            normed = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
            done.append(rotated(normed, cos, sin).to(x.dtype))
        return tuple(part.transpose(0, 1).contiguous() for part in (*done, v))

    inputs = tuple(call[name] for name in ("qkv", "q_weight", "k_weight", "cos", "sin"))
    return contest(name, lambda: tuple(call())[:3], theirs, inputs, workload(2).least_bytes(), TARGET)


def qkv_backward(name: str) -> Contest:
    call = workload(3).make()

    def theirs(
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        x: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, ...]:
        q, k, _ = heads_of(x)
        parts_, sums = [], []
        for gradient, part, weight in ((dq, q, q_weight), (dk, k, k_weight)):
            h, d = part.float(), rotated(gradient.transpose(0, 1).float(), cos, -sin)
            rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
            z, t = h * rstd, d * weight.float()
            parts_.append((rstd * (t - z * (t * z).mean(-1, keepdim=True))).to(x.dtype))
            sums.append((d * z).flatten(0, -2).sum(0).to(weight.dtype))
        parts_.append(dv.transpose(0, 1))
        groups = [part.unflatten(-2, (4, -1)) for part in parts_]
        return torch.cat(groups, -2).flatten(-3), *sums

    inputs = tuple(call[name] for name in ("dq", "dk", "dv", "x", "q_weight", "k_weight", "cos", "sin"))
    return contest(name, lambda: tuple(call()), theirs, inputs, workload(3).least_bytes(), TARGET)


def gate(name: str) -> Contest:
    call = workload(12).make()

    def theirs(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """In the order of x: Inductor fails on the other one."""
        h = x.float().unflatten(-1, (4, -1))
        y = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).flatten(-2) * weight.float()
        return (y * torch.sigmoid(gate.transpose(0, 1).float())).to(x.dtype).transpose(0, 1).contiguous()

    inputs = tuple(call[name] for name in ("x", "gate", "weight"))
    return contest(name, call, theirs, inputs, workload(12).least_bytes(), TARGET)


def gate_backward(name: str) -> Contest:
    call = workload(13).make()

    def theirs(x: Tensor, gate: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, ...]:
        """In the order of x, a group at a time: Inductor fails on other ways to write it."""
        batch, length, _ = x.shape
        statistics = rstd.view(length, batch, 4).transpose(0, 1)
        parts_, gates, sums = [], [], []
        for i, (h, g, d, w) in enumerate(
            zip(*(tensor.float().chunk(4, -1) for tensor in (x, gate, dy, weight)), strict=True)
        ):
            r, d, share = statistics[..., i : i + 1], d.transpose(0, 1), torch.sigmoid(g.transpose(0, 1))
            z, t = h * r, d * share * w
            parts_.append((r * (t - z * (t * z).mean(-1, keepdim=True))).to(x.dtype))
            gates.append((d * z * w * share * (1 - share)).to(x.dtype))
            sums.append((d * share * z).sum((0, 1)).to(weight.dtype))
        return torch.cat(parts_, -1), torch.cat(gates, -1).transpose(0, 1).contiguous(), torch.cat(sums)

    inputs = tuple(call[name] for name in ("x", "gate", "dy", "weight", "rstd"))
    return contest(name, lambda: tuple(call()), theirs, inputs, workload(13).least_bytes(), TARGET)


# ---- losses and gradients -------------------------------------------------------------------------------


def losses(name: str) -> Contest:
    return cross_entropy.forward(name, 1024, 157184)


def losses_backward(name: str) -> Contest:
    return cross_entropy.backward(name, 1024, 157184)


def gradients() -> list[Tensor]:
    """An eighth of the published ones."""
    return [draw(512, 8192, dtype=torch.float32) for _ in range(32)]


def grad_norm(name: str) -> Contest:
    tensors = gradients()

    def theirs(*tensors: Tensor) -> Tensor:
        return torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt()

    def ours() -> Any:
        return weft.grad_norm(tensors)

    return contest(name, ours, theirs, tuple(tensors), 4 * sum(t.numel() for t in tensors), TARGET)


def zeros(name: str) -> Contest:
    tensors = gradients()
    for tensor in tensors:
        tensor[tensor.abs() < 0.1] = 0.0

    def theirs(*tensors: Tensor) -> Tensor:
        return torch.stack([(tensor == 0).sum() for tensor in tensors]).sum()

    def ours() -> Any:
        return weft.count_zeros(tensors)

    return contest(name, ours, theirs, tuple(tensors), 4 * sum(t.numel() for t in tensors), TARGET)


CONTESTS = {
    1: lambda name: norm_both(name, 8192, 2048),
    2: qkv,
    3: qkv_backward,
    4: router,
    5: router_backward,
    6: permute,
    7: unpermute,
    8: silu_experts,
    9: silu_experts_backward,
    10: silu_dense,
    11: silu_dense_backward,
    12: gate,
    13: gate_backward,
    14: losses,
    15: losses_backward,
    16: grad_norm,
    17: zeros,
}

if __name__ == "__main__":
    main(__doc__, [(f"{row.number} {row.title}", CONTESTS[row.number]) for row in PUBLISHED])

"""The rows of `weft published` on this CPU, beside torch.compile and eager PyTorch of the same maths.

    python benchmarks/published_rows.py [--quick] [--only NAME] [--json FILE]

Shapes are the published ones, with fewer rows where a contender would need more than a second; experts' sizes are
multiples of 128 here, which spares PyTorch a loop over the experts. How they are timed is said in `contests.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from contests import Contest, contest, main
from norm_and_quantize import norm_both, parts, quantize_both

import weft
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

    def theirs(dy: Tensor, weight: Tensor) -> Tensor:
        return (dy @ weight.float()).to(torch.bfloat16)

    def ours() -> Any:
        return op(x, weight, None, dy, [True, False, False])[0]

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
        return parts(weft.glu(x, prob=prob, offsets=ends, align=128, quantize="1x128", columnwise=True))

    return contest(name, ours, silu, (x, prob), workload(8).least_bytes(32768), TARGET)


def silu_experts_backward(name: str) -> Contest:
    x, prob, dy = draw(32768, 2048), draw(32768, dtype=torch.float32), draw(32768, 1024)
    ends = torch.arange(1, 33, dtype=torch.int32) * 1024

    def ours() -> Any:
        dx, _, dprob = weft.glu_backward(
            dy, x, prob=prob, offsets=ends, align=128, quantize="1x128", columnwise=True
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


CONTESTS = {
    1: lambda name: norm_both(name, 8192, 2048),
    4: router,
    5: router_backward,
    6: permute,
    7: unpermute,
    8: silu_experts,
    9: silu_experts_backward,
    10: silu_dense,
    11: silu_dense_backward,
}

if __name__ == "__main__":
    main(__doc__, [(f"{row.number} {row.title}", CONTESTS[row.number]) for row in PUBLISHED])

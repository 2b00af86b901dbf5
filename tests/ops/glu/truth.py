"""What the gated linear units must compute, in float64 and by autograd, written from PyTorch's own activations.

`glu` gives for y and every gradient the truth and the arithmetic error that fp32 may add to it before the last
rounding; `assert_copies` says that the bytes of a quantised result are the oracle's, expert by expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from accuracy import EPS32
from torch import Tensor

from tests.ops.norm.truth import ROUNDINGS, Near, arguments
from tests.quant import oracle
from weft import QTensor
from weft.workloads import Call

FEW = ROUNDINGS * EPS32
EPS64 = torch.finfo(torch.float64).eps
TINY = 2.0**-125  # where exp of fp32 ends


def _activation(act: str, alpha: float) -> Callable[[Tensor], Tensor]:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": lambda a: a * torch.sigmoid(alpha * a),
        "sigmoid": lambda a: torch.sigmoid(alpha * a),
        "gelu": lambda a: (
            0.5 * a * torch.special.erfc(-math.sqrt(0.5) * a)
        ),  # F.gelu's 1 + erf forgets digits
        "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
        "relu": F.relu,
        "relu2": lambda a: F.relu(a).square(),
    }
    return functions[act]


def _noise(a: Tensor, act: str, alpha: float) -> tuple[Tensor, Tensor]:
    """What fp32 may add to f(a) and to f'(a). A rounding of an exponent z is one of |z| in the power, and what is
    subtracted from 1 has the precision of 1."""
    if act in ("silu", "sigmoid"):
        z = alpha * a
        s = torch.sigmoid(z)
        steps = FEW * (1 + z.abs())
        if act == "silu":
            return steps * (a * s).abs() + TINY * a.abs(), steps * s * (1 + z.abs()) + TINY
        return steps * s + TINY, steps * alpha * s + TINY
    if act == "gelu":
        cdf = 0.5 * torch.special.erfc(-math.sqrt(0.5) * a)
        bend = a.abs() * torch.exp(-a.square() / 2) / math.sqrt(2 * math.pi)
        return FEW * (a * cdf).abs() + TINY, FEW * (cdf + bend) + TINY
    if act == "gelu_tanh":
        z = 2 * math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)
        s = torch.sigmoid(z)
        steps = FEW * (1 + z.abs())
        bend = 1 + 2 * a.abs() * (1 + 0.134145 * a**2)
        # PyTorch's 1 + tanh(u) of float64 forgets what s still knows.
        return steps * (a * s).abs() + EPS64 * a.abs(), (steps * s + EPS64) * bend
    return FEW * F.relu(a).maximum(F.relu(a).square()), FEW * F.relu(a)


def regions(rows: int, ends: Tensor | None, align: int) -> list[tuple[int, int, int]]:
    """(first row, end of the rows, end of the padding) of every expert, and of what follows the last."""
    if ends is None:
        return [(0, rows, rows)]
    found, start = [], 0
    for end in ends.tolist():
        following = min(-(-end // align) * align, rows)
        found.append((start, max(end, start), max(following, start)))
        start = max(following, start)
    return [*found, (start, start, rows)]


def glu(call: Call, dy: Tensor | None = None) -> dict[str, Near]:
    """y, and with an upstream gradient those of x, up and prob."""
    a: dict[str, Any] = arguments(call)
    leaves = {
        name: a[name].detach().double().requires_grad_()
        for name in ("x", "up", "prob")
        if a[name] is not None
    }
    x = leaves["x"]
    if a["layout"] == "none":
        gate, up = x, None
    elif "up" in leaves:
        gate, up = x, leaves["up"]
    elif a["layout"] == "concat":
        gate, up = x.chunk(2, -1)
    else:
        gate, up = x[..., 0::2], x[..., 1::2]
    lead, hidden = gate.shape[:-1], gate.shape[-1]
    rows = gate.numel() // max(hidden, 1)
    real = torch.zeros(rows, dtype=torch.bool)
    for start, end, _ in regions(rows, a["ends"], a["align"]):
        real[start:end] = True
    real = real.view(*lead, 1)
    gate = torch.where(real, gate, 0.0)  # nobody reads the padding
    up = up if up is None else torch.where(real, up, 0.0)
    inside, value = gate, up
    if a["limit"] is not None:
        inside = gate.clamp(max=a["limit"])
        value = None if up is None else up.clamp(-a["limit"], a["limit"])
    alpha = float(a["alpha"])
    factor = torch.ones_like(inside) if value is None else value + a["up_offset"]
    prob = torch.ones(*lead, 1, dtype=torch.float64)
    if "prob" in leaves:
        prob = torch.where(real, leaves["prob"].view(*lead, 1), 0.0)
    active = _activation(a["act"], alpha)(inside)
    y = torch.where(real, active * factor * prob, 0.0)
    with torch.no_grad():
        f_noise, slope_noise = _noise(inside.detach(), a["act"], alpha)
        noise = torch.where(real, f_noise * (factor * prob).abs() + FEW * y.abs(), 0.0)
    found = {"y": Near(y.detach(), noise)}
    if dy is None:
        return found
    d = torch.where(real, dy.detach().double(), 0.0)
    y.backward(d)
    with torch.no_grad():
        # f' itself: what one would get from a gradient of ones through f alone
        twin = inside.detach().clone().requires_grad_()
        with torch.enable_grad():
            _activation(a["act"], alpha)(twin).sum().backward()
        assert twin.grad is not None
        dgate = (d * prob * factor).abs() * (slope_noise + FEW * twin.grad.abs())
        dup = (d * prob).abs() * (f_noise + FEW * active.abs())
        noises = {"x": dgate, "up": dup}
        if up is not None and "up" not in leaves:
            noises["x"] = (
                torch.cat([dgate, dup], -1)
                if a["layout"] == "concat"
                else torch.stack([dgate, dup], -1).flatten(-2)
            )
        if "prob" in leaves:
            terms = (d * factor).abs() * (f_noise + FEW * active.abs())
            noises["prob"] = terms.sum(-1).view(leaves["prob"].shape)
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        found[f"d{name}"] = Near(leaf.grad, noises[name])
    return found


def assert_copies(
    q: QTensor, value: Tensor, ends: Tensor | None = None, align: int = 1, scale: Tensor | None = None
) -> None:
    """The copies of q are the oracle's of the fp32 numbers `value`, and no column-wise block has two experts."""
    f = q.format
    value = value.reshape(-1, value.shape[-1])
    options: dict[str, Any] = {
        "block": f.block,
        "element": f.element,
        "convention": f.convention,
        "power_of_two": bool(f.power_of_two),
        "scale": scale,
    }
    if q.rowwise is not None:
        wanted = oracle.quantize(value, **options)
        _same(q.rowwise.data, wanted.data, "row-wise codes")
        _same(q.rowwise.scale, wanted.scale.reshape(q.rowwise.scale.shape), "row-wise scales")
        if wanted.global_scale is not None:
            assert q.rowwise.global_scale is not None
            assert torch.equal(q.rowwise.global_scale, wanted.global_scale), "global scale"
    if q.columnwise is None:
        return
    if ends is None or align % 128 == 0 or not f.group:
        wanted = oracle.quantize(value, transpose=True, **options)
        _same(q.columnwise.data, wanted.data, "column-wise codes")
        _same(q.columnwise.scale, wanted.scale.reshape(q.columnwise.scale.shape), "column-wise scales")
        return
    if f.block == "nvfp4":
        options["amax"] = value.abs().max()
    used = torch.zeros(q.columnwise.scale.shape[1], dtype=torch.bool)
    for expert, (start, _, end) in enumerate(regions(len(value), ends, align)):
        if start == end:
            continue
        wanted = oracle.quantize(value[start:end], transpose=True, **options)
        codes = slice(start // f.packed, -(-end // f.packed))
        _same(q.columnwise.data[:, codes], wanted.data, f"column-wise codes of expert {expert}")
        first = (start // 128 + expert) * (128 // f.group)
        blocks = slice(first, first + wanted.scale.shape[1])
        assert not used[blocks].any(), "two experts share a block"
        used[blocks] = True
        _same(q.columnwise.scale[:, blocks], wanted.scale, f"column-wise scales of expert {expert}")
    assert (~used).any() or len(value) % 128, "nothing was left unused"
    rest = (
        q.columnwise.scale.float()
        if q.columnwise.scale.element_size() > 1
        else q.columnwise.scale.view(torch.uint8)
    )
    assert not rest[:, ~used].count_nonzero(), "scales of blocks without rows"


def _same(got: Tensor, wanted: Tensor, what: str) -> None:
    kind = torch.uint8 if got.element_size() == 1 else torch.int32
    different = got.contiguous().view(kind) != wanted.contiguous().view(kind)
    assert not different.any(), f"{int(different.sum())} of {different.numel()} {what} differ"

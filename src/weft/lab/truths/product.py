"""What a product must be: that of the decoded operands in float64, and what follows it, from the documented formula."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from triton_loom.testing import EPS32

import weft

from ... import QTensor
from .. import oracle
from ..problem import Call
from ..symbolic.loaded import Loaded
from ..truth import Near, arguments
from ..families.glu import activation


def numbers(x: Tensor, *, of_b: bool = False) -> Tensor:
    """An operand in float64, from the copy whose scales lie along K."""
    if not isinstance(x, QTensor):
        return x.detach().double()
    f, copy = x.format, x.columnwise if of_b else x.rowwise
    rows, k = (x.shape[1], x.shape[0]) if of_b else (x.numel() // x.shape[-1], x.shape[-1])
    turned = copy is None
    if turned:
        copy = x.rowwise if of_b else x.columnwise
        rows, k = k, rows
    assert copy is not None
    held = oracle.Quantized(copy.data.view(torch.uint8), copy.scale, copy.global_scale)
    assert f.element is not None
    k = (f.transposed if of_b else f).length(k)  # rotated numbers stay so: their products need no undoing
    values = oracle.dequantize(held, block=f.stored.block, element=f.element, shape=(rows, k)).double()
    return values.t() if of_b != turned else values


def product(a: Tensor, b: Tensor) -> Near:
    """a @ b with the error that fp32 may make in a sum of K terms: units add 16 products or fewer at a time, each with
    a rounding of the sum so far; scales of blocks and of rows are a few roundings more."""
    terms = a.shape[-1]
    return Near(a @ b, (terms / 16 + 4) * EPS32 * (a.abs() @ b.abs()))


# The largest |f''| of the activations is that of relu2.
BEND = 2.0


def _gated(near: Near, act: str) -> Near:
    """f of a number that has an error itself. The slope changes over that interval by its bend, and f rounds."""
    x = near.truth.detach().requires_grad_()
    value = activation(act)(x)
    (slope,) = torch.autograd.grad(value.sum(), x)
    value, slope = value.detach(), slope.abs()
    noise = (slope + BEND * near.noise) * near.noise + 8 * EPS32 * (value.abs() + near.truth.abs() * slope)
    return Near(value, noise)


def _rounded(near: Near, dtype: torch.dtype) -> Near:
    """After a rounding to dtype."""
    return Near(near.truth, near.noise + torch.finfo(dtype).eps / 2 * (near.truth.abs() + near.noise))


def _times(near: Near, factor: float) -> Near:
    return Near(near.truth * factor, (near.noise + EPS32 * near.truth.abs()) * abs(factor))


def _plus(near: Near, other: Tensor | None) -> Near:
    if other is None:
        return near
    total = near.truth + other.detach().double()
    return Near(total, near.noise + EPS32 * total.abs())


def _through(a: Near, b: Tensor) -> Near:
    """The product of an operand that has an error itself."""
    exact = product(a.truth, b)
    return Near(exact.truth, exact.noise + a.noise @ b.abs())


def matmul(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    given = arguments(call)
    a, b = numbers(given["a"]), numbers(given["b"], of_b=True)
    alpha = 1.0 if given["alpha"] is None else float(given["alpha"])
    act, gated = given["activation"] or given["glu"], given["glu"] is not None
    z, size = product(a, b), a.abs() @ b.abs()
    # tf32 keeps 10 bits of each operand; sums of up to 128 products in fp16 round eight times or more.
    extra = {"tf32": 2.0**-10, "fp16": 8 * 2.0**-11}.get(given["precision"], 0.0)
    z = _plus(_times(Near(z.truth, z.noise + extra * size), alpha), given["bias"])
    y = z
    if act is not None:
        n = z.truth.shape[-1] // (2 if gated else 1)
        gate = _gated(Near(z.truth[..., :n], z.noise[..., :n]), act)
        up, up_noise = (z.truth[..., n:], z.noise[..., n:]) if gated else (torch.ones_like(gate.truth), 0.0)
        noise = gate.noise * (up.abs() + up_noise) + gate.truth.abs() * up_noise
        y = Near(gate.truth * up, noise + EPS32 * (gate.truth * up).abs())
    found: dict[str, Near | Tensor] = {"y": _plus(y, given["residual"])}
    if "y" not in gradients:
        return found
    dy = gradients["y"].detach().double()
    dz = Near(dy, torch.zeros_like(dy))
    if act is not None:
        inner = z.truth.detach().requires_grad_()
        f = activation(act)(inner[..., :n])
        (slope,) = torch.autograd.grad((f * (inner[..., n:] if gated else 1.0) * dy).sum(), inner)
        sizes = torch.cat([dy * up, dy * gate.truth], -1) if gated else dy
        near = Near(
            slope, (BEND * z.noise + 16 * EPS32 * (1 + z.truth.abs())) * sizes.abs().amax(-1, keepdim=True)
        )
        dz = _rounded(near, gradients["y"].dtype)
    found["da"] = _times(_through(dz, b.mT), alpha)
    turned = _through(Near(dz.truth.mT, dz.noise.mT), a)
    found["db"] = _times(Near(turned.truth.mT, turned.noise.mT), alpha)
    ones = torch.ones(len(dy), 1, dtype=torch.float64)
    dbias = _through(Near(dz.truth.mT, dz.noise.mT), ones)
    found["dbias"] = Near(dbias.truth[:, 0], dbias.noise[:, 0])
    found["dresidual"] = Near(dy, torch.zeros_like(dy))
    return found


def matrices(w: Tensor, transpose: bool = False) -> Tensor:
    """The matrices [groups, N, K] of groups in float64, from the copy whose scales lie along the dimension that is
    summed; with `transpose` they are [groups, K, N]."""
    groups, n, k = w.shape
    if not isinstance(w, QTensor):
        values = w.detach().double()
    else:
        flat = QTensor((groups * n, k), w.dtype, w.spec, w.rowwise, w.columnwise)
        values = numbers(flat, of_b=transpose).view(groups, n, k)
    return values.mT if transpose else values


def spans(call: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(group, first row, row after the last) of every group, from the rule that `ends` and `align` follow."""
    found, begin = [], 0
    for group, end in enumerate(call["ends"].tolist()):
        found.append((group, begin, max(end, begin)))
        begin = math.ceil(end / call["align"]) * call["align"]
    return found


def _nothing(*shape: int) -> Near:
    return Near(torch.zeros(*shape, dtype=torch.float64), torch.zeros(*shape, dtype=torch.float64))


def grouped_matmul(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """A product for each group; rows of none are zero."""
    given = arguments(call)
    w, x = matrices(given["w"], given["transpose"]), numbers(given["x"])
    if given["gather"] is not None:
        slot = given["gather"].slot_of_row.long()
        x = x[slot.clamp(min=0) // given["gather"].row_of_slot.shape[-1]]
    found = {
        "y": _nothing(len(x), w.shape[1] // (1 if given["glu"] is None else 2)),
        "dx": _nothing(*x.shape),
        "dw": _nothing(*w.shape),
        "dbias": _nothing(*w.shape[:2]),
    }
    for group, begin, end in spans(given):
        options = {name: given[name] for name in ("activation", "glu", "precision")}
        options["bias"] = None if given["bias"] is None else given["bias"][group]
        part = Call(weft.matmul, {"a": x[begin:end], "b": w[group].T, **options})
        made = matmul(part, {"y": gradients["y"][begin:end]} if "y" in gradients else {})
        rows = slice(begin, end)
        for name, mine, place in (
            ("y", "y", rows),
            ("da", "dx", rows),
            ("db", "dw", group),
            ("dbias", "dbias", group),
        ):
            if name in made:
                near = made[name]
                assert isinstance(near, Near)
                turned = name == "db"
                found[mine].truth[place] = near.truth.T if turned else near.truth
                found[mine].noise[place] = near.noise.T if turned else near.noise
    if given["transpose"]:
        found["dw"] = Near(found["dw"].truth.mT, found["dw"].noise.mT)
    return {name: near for name, near in found.items() if name == "y" or "y" in gradients}


def grouped_wgrad(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    given = arguments(call)
    dy, x = along_rows(given["dy"]), along_rows(given["x"])
    found = _nothing(len(given["ends"]), dy.shape[1], x.shape[1])
    for group, begin, end in spans(given):
        part = product(dy[begin:end].T, x[begin:end])
        found.truth[group], found.noise[group] = part.truth, part.noise
    if given["accumulate"]:
        found = _plus(found, given["out"])
    return {"y": found}


def along_rows(x: Tensor) -> Tensor:
    """An operand in float64, from the copy whose scales lie along the rows."""
    return numbers(x, of_b=True) if isinstance(x, QTensor) else x.detach().double()


TRUTHS = {"matmul": matmul, "grouped_matmul": grouped_matmul, "grouped_wgrad": grouped_wgrad}

# Tiles are operands of dots, whose layouts decide how they are loaded: `test_compiled` looks at these kernels.
MOVED: dict[str, tuple[set[str], set[str]]] = {
    "matmul_kernel": (set(), set()),
    "finish_kernel": (set(), set()),
}

LOADED = {("matmul_kernel", "groups.ends"): Loaded(least=0, ascending=True)}

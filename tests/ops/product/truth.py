"""What a product must be: that of the decoded operands in float64, and what follows it, from the documented formula."""

from __future__ import annotations

import torch
from torch import Tensor
from triton_loom.testing import EPS32

from tests.ops.glu.truth import activation
from tests.quant import oracle
from tests.support.truth import Near, arguments
from weft import QTensor
from weft.workloads import Call


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
    values = oracle.dequantize(held, block=f.block, element=f.element, shape=(rows, k)).double()
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


TRUTHS = {"matmul": matmul}

# Tiles are operands of dots, whose layouts decide how they are loaded: `test_compiled` looks at these kernels.
MOVED: dict[str, tuple[set[str], set[str]]] = {
    "matmul_kernel": (set(), set()),
    "finish_kernel": (set(), set()),
}

"""Norms and quantisers on this CPU, beside torch.compile, eager PyTorch and a plain copy.

    python benchmarks/norm_and_quantize.py [--quick] [--json FILE]

How they are timed is said in `contests.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from contests import Contest, contest, main

import weft

EPS = 1e-6
SHAPES = ((8192, 2048), (4096, 7168))


# ---- the same results in plain PyTorch -------------------------------------------------------------------


def quantize_rows(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """1x128 e4m3 with TransformerEngine's power-of-two scales."""
    groups = y.float().unflatten(-1, (-1, 128))
    amax = groups.abs().amax(-1)
    factor = torch.where(amax > 0, 448.0 / amax, 1.0)
    factor = (factor.view(torch.int32) & 0x7F800000).view(torch.float32)
    codes = (groups * factor[..., None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).flatten(-2)
    return codes, (1.0 / factor).t().contiguous().t()


def quantize_both(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return *quantize_rows(y), *quantize_rows(y.t())


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    h = x.float()
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * weight.float()


def rms_norm_rows(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return quantize_rows(rms_norm(x, weight))


def rms_norm_both(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return quantize_both(rms_norm(x, weight))


def residual_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    h = x + residual
    return rms_norm(h, weight).to(x.dtype), h


def rms_norm_backward(
    x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    h, d = x.float(), dy.float()
    z = h * rstd[:, None]
    t = d * weight.float()
    dx = rstd[:, None] * (t - z * (t * z).mean(-1, keepdim=True))
    return dx.to(x.dtype), (d * z).sum(0).to(weight.dtype)


# ---- contests --------------------------------------------------------------------------------------------


def parts(q: weft.QTensor) -> tuple[torch.Tensor, ...]:
    return tuple(part for copy in (q.rowwise, q.columnwise) if copy is not None for part in copy[:2])


def tensors(rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, another one like it, and a weight."""
    torch.manual_seed(0)
    return tuple(torch.randn(shape).bfloat16() for shape in ((rows, cols), (rows, cols), (cols,)))  # type: ignore


def norm_rows(name: str, rows: int, cols: int) -> Contest:
    x, _, weight = tensors(rows, cols)

    def ours() -> Any:
        return parts(weft.rms_norm(x, weight, eps=EPS, quantize="1x128"))

    return contest(name, ours, rms_norm_rows, (x, weight), 3 * x.numel() + x.numel() // 32, 1.5)


def norm_both(name: str, rows: int, cols: int) -> Contest:
    x, _, weight = tensors(rows, cols)

    def ours() -> Any:
        return parts(weft.rms_norm(x, weight, eps=EPS, quantize="1x128", columnwise=True))

    return contest(name, ours, rms_norm_both, (x, weight), 4 * x.numel() + x.numel() // 16, 1.5)


def norm_backward(name: str, rows: int, cols: int) -> Contest:
    x, dy, weight = tensors(rows, cols)
    rstd = torch.rsqrt(x.float().square().mean(-1) + EPS)
    op, needs = weft.catalogue["norm_backward"], [True, True, False, False, False]

    def ours() -> Any:
        return tuple(op(x, dy, None, weight, None, None, rstd, None, 0.0, "fp32", needs))

    return contest(name, ours, rms_norm_backward, (x, weight, rstd, dy), 6 * x.numel(), 1.5)


def residual_norm(name: str, rows: int, cols: int) -> Contest:
    x, residual, weight = tensors(rows, cols)

    def ours() -> Any:
        return weft.rms_norm(x, weight, eps=EPS, residual=residual)

    return contest(name, ours, residual_rms_norm, (x, residual, weight), 8 * x.numel(), 1.2)


def rows_only(name: str, rows: int, cols: int) -> Contest:
    x, _, _ = tensors(rows, cols)

    def ours() -> Any:
        return parts(weft.quantize(x, "1x128"))

    return contest(name, ours, quantize_rows, (x,), 3 * x.numel() + x.numel() // 32, 1.5)


def rows_and_columns(name: str, rows: int, cols: int) -> Contest:
    x, _, _ = tensors(rows, cols)

    def ours() -> Any:
        return parts(weft.quantize(x, "1x128", columnwise=True))

    return contest(name, ours, quantize_both, (x,), 4 * x.numel() + x.numel() // 16, 1.5)


CONTESTS = {
    "rms_norm + 1x128, rows": norm_rows,
    "rms_norm + 1x128, rows and columns": norm_both,
    "rms_norm backward": norm_backward,
    "residual + rms_norm": residual_norm,
    "quantize 1x128, rows": rows_only,
    "quantize 1x128, rows and columns": rows_and_columns,
}


if __name__ == "__main__":
    main(
        __doc__,
        [
            (f"{name} · {rows}x{cols}", functools.partial(make, rows=rows, cols=cols))
            for rows, cols in SHAPES
            for name, make in CONTESTS.items()
        ],
    )

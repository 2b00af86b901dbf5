"""A mixture of experts with the roundings of `fp8_block` and no others, in float64 arithmetic. Rounding to e4m3 is
computed here, without Weft's quantizers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Relative error of normally distributed elements rounded to e4m3 (three mantissa bits) in blocks of 128.
E4M3 = 0.0265


def e4m3(x: Tensor) -> Tensor:
    """Round to the nearest e4m3fn value, ties to even; saturate beyond the largest one."""
    size = x.abs()
    exponent = torch.floor(torch.log2(size.clamp(min=2.0**-30))).clamp(min=-6)
    unit = torch.exp2(exponent - 3)
    return torch.sign(x) * (torch.round(size / unit) * unit).clamp(max=448.0)


def blocks(x: Tensor, rows: int, cols: int) -> Tensor:
    """Round a matrix to e4m3 in blocks, each scaled by the largest power of two that keeps it within 448."""
    height, width = x.shape
    padded = F.pad(x, (0, -width % cols, 0, -height % rows))
    cut = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // cols, cols)
    largest = cut.abs().amax((1, 3), keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(448.0 / largest.clamp(min=1e-300))))
    scale = torch.where(largest > 0, scale, 1.0)
    return (e4m3(cut * scale) / scale).view(padded.shape)[:height, :width]


def along_rows(x: Tensor) -> Tensor:
    return blocks(x, 1, 128)


def along_columns(x: Tensor) -> Tensor:
    return blocks(x.t(), 1, 128).t()


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def results(inputs: list[Tensor], upstream: Tensor, top_k: int) -> list[Tensor]:
    """Return y and the gradients of x, router, up and down, with x and upstream in bf16. Each expert has at most 128
    rows, so they are one block."""
    x, router, up, down = (tensor.double() for tensor in inputs)
    dy = bf16(upstream.double())
    logits = x @ router.t()
    best = logits.topk(top_k)
    weights, chosen = best.values.softmax(-1), best.indices
    y, dx = torch.zeros_like(x), torch.zeros_like(x)
    dup, ddown, dweights = torch.zeros_like(up), torch.zeros_like(down), torch.zeros_like(weights)
    for expert in range(len(up)):
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        assert len(token) <= 128
        rows, share, drows = x[token], weights[token, slot][:, None], dy[token]
        up_codes, down_codes = blocks(up[expert], 128, 128), blocks(down[expert], 128, 128)
        z = bf16(along_rows(rows) @ up_codes.t())
        gate, value = z.chunk(2, -1)
        h = F.silu(gate) * value * share
        y.index_add_(0, token, bf16(along_rows(h) @ down_codes.t()))
        ddown[expert] = along_columns(drows).t() @ along_columns(h)
        dh = bf16(along_rows(drows) @ down_codes)
        gate, value = bf16(along_rows(z)).chunk(2, -1)  # z is saved for backward in FP8
        sigmoid = torch.sigmoid(gate)
        dweights[token, slot] = (dh * gate * sigmoid * value).sum(-1)
        dgate = dh * share * value * sigmoid * (1 + gate * (1 - sigmoid))
        dz = bf16(torch.cat([dgate, dh * share * gate * sigmoid], -1))
        dup[expert] = along_columns(dz).t() @ along_columns(rows)
        dx.index_add_(0, token, bf16(along_rows(dz) @ up_codes))
    dchosen = weights * (dweights - (dweights * weights).sum(-1, keepdim=True))
    dlogits = torch.zeros_like(logits).scatter(1, chosen, dchosen)
    return [bf16(y), bf16(bf16(dx) + bf16(dlogits @ router)), dlogits.t() @ x, dup, ddown]

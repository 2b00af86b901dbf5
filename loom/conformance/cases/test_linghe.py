"""Kernels of linghe whose own tests compare them with references in bf16; here with float64."""

from __future__ import annotations

import torch
from linghe.tools.util import torch_make_indices
from linghe.utils.emb import triton_embedding_backward, triton_embedding_forward
from linghe.utils.gather import triton_smooth_weighted_permute_with_indices
from triton_loom.testing import EPS32, assert_rounded_once, check

from conformance.cases.support import allow


def test_embedding() -> None:
    tokens, rows, width = 512, 40, 256
    ids = torch.randint(0, rows, (1, tokens), dtype=torch.int32)
    weight = torch.randn(rows, width).bfloat16()
    total = torch.zeros(rows, width)
    allow(weight, total)
    got = triton_embedding_forward(ids, weight.data_ptr(), width, torch.bfloat16)
    assert torch.equal(got, weight[ids.long()])

    gradient = torch.randn(1, tokens, width).bfloat16()
    triton_embedding_backward(gradient, ids, total.data_ptr(), torch.float32)
    truth = torch.zeros(rows, width, dtype=torch.float64).index_add_(0, ids[0].long(), gradient[0].double())
    # About thirteen float32 additions for each row, of numbers around one.
    check(total, truth, 16 * EPS32 * truth.abs().max())


def test_weighted_permute() -> None:
    tokens, width, experts = 64, 512, 16
    x = torch.randn(tokens, width).bfloat16()
    scales = 1 + 10 * torch.rand(experts, width)
    _, _, counts, indices, _ = torch_make_indices(torch.randn(tokens, experts), topk=4, bias=0.0)
    weights = torch.randn(len(indices), width).bfloat16()
    quantized, steps, sums = triton_smooth_weighted_permute_with_indices(
        x, weights, scales, counts, indices, reverse=True, round_scale=True
    )
    terms = weights.double() * x[indices].double()
    # A sum of 512 terms in float32, rounded once to bf16.
    assert_rounded_once(sums, terms.sum(1), 512 * EPS32 * terms.abs().amax(1))

    smooth = x[indices].float() * scales.repeat_interleave(counts, 0)
    expected = torch.exp2(torch.ceil(torch.log2(smooth.abs().amax(1) / 448)))
    assert torch.equal(steps.view(-1), expected)
    assert torch.equal(
        quantized.view(torch.uint8), (smooth / expected[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    )

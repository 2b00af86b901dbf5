"""Types of results as type checkers see them. mypy checks this file with the packages; pytest runs the calls."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import assert_type

import weft
from weft import QTensor

x = torch.randn(4, 256)


def test_norms() -> None:
    for norm in (weft.rms_norm, weft.layer_norm):
        y = assert_type(norm(x, x[0], eps=1e-3, modulation=(x, None)), Tensor)
        assert not isinstance(y, QTensor)
        assert len(assert_type(norm(x, residual=x), tuple[Tensor, Tensor])) == 2
        assert_type(norm(x, pre_bias=x[0]), Tensor)
        assert len(assert_type(norm(x, residual=x, residual_gate=x), tuple[Tensor, Tensor])) == 2
        assert isinstance(assert_type(norm(x, quantize="1x128", columnwise=True), QTensor), QTensor)
        q, h = assert_type(norm(x, residual=x, quantize="1x128"), tuple[QTensor, Tensor])
        assert (type(q), type(h)) == (QTensor, Tensor)
        q, amax = assert_type(norm(x, quantize="1x128", return_amax=True), tuple[QTensor, Tensor])
        assert (type(q), amax.shape) == (QTensor, ())
        three = norm(x, residual=x, quantize="1x128", return_amax=True)
        assert len(assert_type(three, tuple[QTensor, Tensor, Tensor])) == 3
        three = norm(x, residual=x, quantize="1x128", return_plain=True)
        assert [type(t) for t in assert_type(three, tuple[QTensor, Tensor, Tensor])] == [
            QTensor,
            Tensor,
            Tensor,
        ]
        assert_type(norm(x, quantize="1x128", return_plain=True), tuple[QTensor, Tensor])
        packed = norm(x, modulation=torch.cat([x, x, x], 1))
        assert len(assert_type(packed, Tensor | tuple[Tensor, ...])) == 2


def test_gated_norm() -> None:
    assert_type(weft.gated_norm(x, x, groups=2), Tensor)
    q = assert_type(weft.gated_norm(x, x, quantize="1x128"), QTensor)
    assert isinstance(q, QTensor)
    both = weft.gated_norm(x, x, quantize="1x128", return_amax=True)
    assert len(assert_type(both, tuple[QTensor, Tensor])) == 2


def test_quantize() -> None:
    assert isinstance(assert_type(weft.quantize(x), QTensor), QTensor)
    assert len(assert_type(weft.quantize(x, "row", return_amax=True), tuple[QTensor, Tensor])) == 2

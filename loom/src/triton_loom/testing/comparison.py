"""Bitwise comparison of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as contiguous integers of the same size."""
    return tensor.detach().contiguous().view(WORDS[tensor.element_size()])


def assert_same(got: Any, want: Any, what: str = "") -> None:
    """Assert that two tensors or NumPy arrays are equal bit for bit (so -0.0 is not 0.0); any NaN equals any other."""
    got, want = _tensor(got), _tensor(want)
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    differ = (words(got) != words(want)) & ~(_is_nan(got) & _is_nan(want))
    if differ.any():
        indices = differ.nonzero()[:4].tolist()
        pairs = [f"{index}: {got[tuple(index)]} != {want[tuple(index)]}" for index in indices]
        raise AssertionError(f"{what}: {int(differ.sum())} of {differ.numel()} differ; {'; '.join(pairs)}")


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    import numpy as np

    return torch.from_numpy(np.array(value))


def _is_nan(tensor: Tensor) -> Tensor:
    if not tensor.dtype.is_floating_point:
        return torch.zeros(tensor.shape, dtype=torch.bool)
    return tensor.to(torch.float64).isnan()

"""Inputs and gradients of any strides, in every case that the families declare."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from tests.catalogue.families import cases
from tests.catalogue.layouts import LAYOUTS, odd_strides_of_one, permuted
from weft.lab.calls import assert_same, results, run, upstreams
from weft.lab.families import Call


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("make", cases().values(), ids=cases())
def test_layout_of_inputs(make: Callable[[], Call], layout: Callable[[Tensor], Tensor]) -> None:
    """Any strides give the bits of the contiguous tensor, forward and backward."""
    call = make()
    different = 0
    for name, tensor in call.tensors().items():
        laid_out = layout(tensor)
        different += (
            laid_out.stride() != tensor.stride() or laid_out.storage_offset() != 0 or laid_out.is_neg()
        )
        wanted = run(call.with_(**{name: laid_out.contiguous().clone()}))
        assert_same(run(call.with_(**{name: laid_out})), wanted, f"{layout.__name__} {name}")
    assert different or layout in (permuted, odd_strides_of_one)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("make", cases().values(), ids=cases())
def test_layout_of_gradients(make: Callable[[], Call], layout: Callable[[Tensor], Tensor]) -> None:
    call = make()
    gradients = upstreams(results(call.requiring_grad()))
    for name, gradient in gradients.items():
        laid_out = layout(gradient)
        wanted = run(call, {**gradients, name: laid_out.contiguous().clone()})
        assert_same(run(call, {**gradients, name: laid_out}), wanted, f"{layout.__name__} gradient of {name}")

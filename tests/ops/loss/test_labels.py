"""Labels that are no classes raise an IndexError on the CPU, as in PyTorch, however the op is called."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import weft
from weft.ops.loss.statistics import check_labels, softmax_of
from weft.runtime import choosing_for, is_readable, recording

CLASSES = 50


def operands(dtype: torch.dtype = torch.bfloat16) -> dict[str, tuple[Tensor, ...]]:
    """Return the arguments of the three losses that precede the target."""
    hidden, weight = torch.randn(4, 16, dtype=dtype), torch.randn(CLASSES, 16, dtype=dtype)
    return {
        "cross_entropy": (torch.randn(4, CLASSES, dtype=dtype),),
        "linear_cross_entropy": (hidden, weight),
        "linear_logprobs": (hidden, weight),
    }


LOSSES = tuple(operands())


def called(name: str, target: Tensor, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    leaves = [t.requires_grad_() for t in operands(dtype)[name]]
    return getattr(weft, name)(*leaves, target, **options)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("wrong", [-1, CLASSES, CLASSES + 7, 2**31 - 1, 2**40, -(2**40)])
@pytest.mark.parametrize("how", ["kernels", "reference", "float64"])
def test_invalid_labels_raise_on_the_cpu(name: str, wrong: int, how: str) -> None:
    """A NaN loss with finite gradients would let training continue on faulty data."""
    target = torch.tensor([3, 0, wrong, CLASSES - 1])
    error = rf"target\[2\] is {wrong}; there are {CLASSES} classes, 0 to {CLASSES - 1}\. .* ignore_index, which is -100"
    with (
        weft.backend("reference") if how == "reference" else nullcontext(),
        pytest.raises(IndexError, match=error),
    ):
        called(name, target, torch.float64 if how == "float64" else torch.bfloat16)
    with pytest.raises(IndexError):  # as here
        torch.nn.functional.cross_entropy(torch.randn(4, CLASSES), target)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ignore_index_is_a_valid_label(name: str, dtype: torch.dtype) -> None:
    for ignored in (-100, -1, CLASSES + 3):
        target = torch.tensor([3, ignored, 0, ignored], dtype=dtype)
        assert called(name, target, ignore_index=ignored).isfinite().all()
        assert called(name, torch.full_like(target, ignored), ignore_index=ignored).isfinite().all()
        with pytest.raises(IndexError, match=rf"target\[1\] is {ignored}"):
            called(name, target, ignore_index=-7)


@pytest.mark.parametrize("name", LOSSES)
def test_error_gives_the_index_of_the_label(name: str) -> None:
    tensors = [t.view(2, 2, -1) if len(t) == 4 else t for t in operands()[name]]
    with pytest.raises(IndexError, match=r"target\[1, 0\] is 99"):
        getattr(weft, name)(*tensors, torch.tensor([[0, 1], [99, -100]]))


@pytest.mark.parametrize("name", LOSSES)
def test_compiled_graphs_check_labels(name: str) -> None:
    function: Callable[..., Tensor] = getattr(weft, name)
    compiled = torch.compile(lambda *tensors: function(*tensors), fullgraph=True, backend="aot_eager")
    tensors = operands()[name]
    assert compiled(*tensors, torch.tensor([0, 1, -100, 3])).isfinite().all()
    with pytest.raises(IndexError, match=r"target\[0\] is 50"):
        compiled(*tensors, torch.tensor([CLASSES, 1, -100, 3]))


@pytest.mark.parametrize("name", LOSSES)
def test_unreadable_labels_are_not_read(name: str) -> None:
    """Fake and meta tensors, transforms, and captures, which could not replay the check, do not read labels."""
    tensors, target = operands()[name], torch.tensor([0, 1, -100, CLASSES])
    function = getattr(weft, name)
    meta = [t.to("meta") for t in (*tensors, target)]
    with recording("sm_90"):
        function(*meta)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        function(*(fake.from_tensor(t) for t in (*tensors, target)))
    first, *rest = (t.float() for t in tensors)
    torch.func.grad(lambda x: function(x, *rest, torch.tensor([0, 1, -100, 3])).sum())(first)
    captured = weft.capture(
        lambda x, y: function(x, *tensors[1:], y), tensors[0], torch.tensor([0, 1, -100, 3])
    )
    assert captured(tensors[0], torch.tensor([0, 1, -100, 3])).isfinite().all()
    assert captured(tensors[0], target).isnan().any()


@pytest.mark.parametrize("name", LOSSES)
def test_emulated_gpus_do_not_check_labels(name: str) -> None:
    with choosing_for("sm_90"):
        assert called(name, torch.tensor([0, 1, -100, CLASSES])).isnan().any()


def test_labels_on_other_devices_are_not_read() -> None:
    """Labels on a device other than the CPU are never read."""

    class Elsewhere:
        """Stand-in for a CUDA tensor, whose every other attribute is an error."""

        device = torch.device("cuda", 0)

    check_labels(Elsewhere(), softmax_of(0, CLASSES, -100, 1.0, None, 1.0))  # type: ignore[arg-type]
    assert not is_readable(Elsewhere())  # type: ignore[arg-type]


def test_no_classes_and_no_tokens() -> None:
    softmax = softmax_of(0, 0, -100, 1.0, None, 1.0)
    check_labels(torch.tensor([-100, -100]), softmax)
    check_labels(torch.tensor([], dtype=torch.int64), softmax)
    with pytest.raises(IndexError, match="there are 0 classes"):
        check_labels(torch.tensor([-100, 0]), softmax)
    assert weft.cross_entropy(torch.randn(0, CLASSES), torch.tensor([], dtype=torch.int64)) == 0.0

"""Quantized tensors where plain ones are expected: as every tensor argument of every op, and as every gradient.

An op reads the codes, decodes them, or refuses them with an explanation, but must not misread them: so each result is
compared with that of the decoded elements.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

import weft
from weft import QTensor
from weft.lab.calls import backward, few_rows, results, small, upstreams
from weft.lab.families import WORKLOADS, Call, Workload
from weft.runtime import recording

# One format for each storage of codes and scales, and the copies that a tensor may have.
FORMATS = (
    *("tensor", "e5m2:tensor", "int8:tensor", "row", "int8:row", "1x128", "e5m2:1x128:te", "int8:1x128:te"),
    *("int4:1x128", "128x128", "int8:128x128:te", "mx", "e5m2:mx", "e2m1:mx", "nvfp4", "nvfp4_16x16"),
    "e2m1:nvfp4:te:hadamard-columnwise",
)
COPIES = {
    "rowwise": {"rowwise": True, "columnwise": False},
    "columnwise": {"rowwise": False, "columnwise": True},
    "both": {"rowwise": True, "columnwise": True},
}
# Cases of the day: each set of copies, in turn, so that each op meets one and each case a third of the ops.
USUAL = (("1x128", "both"), ("nvfp4", "rowwise"), ("int8:row", "columnwise"))


def each_with_every_case(ops: Iterable[str]) -> list[Any]:
    """Return parameters for ops, formats and copies; all but one case of each op are slow tests."""
    return [
        pytest.param(op, *case, marks=[] if case == USUAL[turn % len(USUAL)] else [pytest.mark.slow])
        for turn, op in enumerate(ops)
        for case in itertools.product(FORMATS, COPIES)
    ]


@cache
def smallest(op: str) -> Workload | None:
    """Return an op's workload with plain tensors, rows divisible by blocks, and few elements, as far as possible."""

    def cost(workload: Workload) -> tuple[bool, bool, bool, int]:
        call = workload.make("meta", rows=few_rows(workload))
        tensors = [t for t in call.tensors().values() if t.is_floating_point()]
        elements = sum(t.numel() for t in tensors)
        return (
            any(isinstance(value, QTensor) for value in call.kwargs.values()),
            call["precision"] is not None or call["quantize"] is not None,
            any(t.dim() > 1 and t.shape[-1] % 128 for t in tensors) or elements > 2**20,
            elements,
        )

    with recording("sm_90"):
        return min((w for w in WORKLOADS if w.op == op), key=cost, default=None)


def arguments(call: Call) -> Iterator[str]:
    """Return the names of a call's floating-point tensors."""
    return (n for n, t in call.tensors().items() if t.is_floating_point() and t.dim() and t.numel())


def quantized(x: Tensor, spec: str, copies: str) -> QTensor | None:
    """Return x in a format, or None if it cannot be quantized so."""
    try:
        return weft.quantize(x.contiguous(), spec, **COPIES[copies])
    except ValueError:
        return None


def decoded(q: QTensor, side: str) -> Tensor:
    """Return the values of q, decoded from the copy of one side if it has that."""
    copies = (q.rowwise, None) if side == "rowwise" else (None, q.columnwise)
    return QTensor(q.shape, q.dtype, q.format, *copies).dequantize() if any(copies) else q.dequantize()


def plain(values: dict[str, Tensor]) -> dict[str, Tensor]:
    dense = {n: v.dequantize() if isinstance(v, QTensor) else v for n, v in values.items()}
    return {n: v.detach().double() for n, v in dense.items() if v.is_floating_point()}


def distance(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest relative distance of all results; infinite if their NaNs or infinities differ."""
    largest = 0.0
    for name, expected in wanted.items():
        finite = expected.isfinite()
        if got[name].shape != expected.shape or not torch.equal(got[name].isfinite(), finite):
            return torch.inf
        difference = (got[name][finite] - expected[finite]).norm()
        largest = max(largest, float(difference / expected[finite].norm().clamp(min=1e-30)))
    return largest


def assert_read_or_refused(
    compute: Callable[[Any], dict[str, Tensor]], q: QTensor, where: str, limit: float = 2e-5
) -> bool:
    """Compare a result of codes with that of either copy's values; return whether it was refused."""
    try:
        got = compute(q)
    except (ValueError, TypeError, NotImplementedError, TorchDynamoException) as error:
        # A compiler wraps exceptions that an op or a function raises while it is traced.
        if not isinstance(error, TorchDynamoException) or re.search(
            r"(Value|Type|NotImplemented)Error", str(error)
        ):
            return True
        raise
    distances = [distance(got, compute(decoded(q, side))) for side in ("rowwise", "columnwise")]
    assert min(distances) <= limit, f"{where}: {q!r} was misread: {distances}"
    return False


@pytest.mark.parametrize("backend", ["auto", pytest.param("reference", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("op", "spec", "copies"), each_with_every_case(weft.catalogue))
def test_codes_as_an_argument_are_read_or_refused(op: str, spec: str, copies: str, backend: Any) -> None:
    workload = smallest(op)
    assert workload is not None
    call = small(workload, dtype=torch.float32)
    with weft.backend(backend):
        for name in arguments(call):
            q = quantized(call[name], spec, copies)
            if q is not None:
                assert_read_or_refused(
                    lambda x, n=name: plain(results(call.with_(**{n: x}))), q, f"{op} {name}"
                )


@pytest.mark.parametrize("backend", ["auto", pytest.param("reference", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("op", "spec", "copies"),
    each_with_every_case(name for name, op in weft.catalogue.items() if op.differentiable),
)
def test_codes_as_a_gradient_are_read(op: str, spec: str, copies: str, backend: Any) -> None:
    """Every gradient is decoded: refusing it would be an error in the middle of a backward pass."""
    workload = smallest(op)
    assert workload is not None
    call = small(workload, dtype=torch.float32).requiring_grad()
    with weft.backend(backend):
        outputs = results(call)
        for name, dy in upstreams(outputs).items():
            q = quantized(dy, spec, copies) if dy.dim() and dy.numel() else None
            if q is not None:
                assert not assert_read_or_refused(
                    lambda dy, n=name: plain(backward(call, outputs, {n: dy}, retain_graph=True)),
                    q,
                    f"{op} d{name}",
                )


def test_misread_codes_are_noticed() -> None:
    """The comparison above fails for misread codes, here with scales of half their size."""
    x, weight = torch.randn(8, 128), torch.randn(16, 128)
    q = weft.quantize(x, "1x128")
    assert q.rowwise is not None

    def halved(x: Tensor) -> dict[str, Tensor]:
        if isinstance(x, QTensor):
            x = QTensor(x.shape, x.dtype, x.format, q.rowwise._replace(scale=q.rowwise.scale / 2))
        return plain({"y": weft.matmul(x, weight.T)})

    with pytest.raises(AssertionError, match="was misread"):
        assert_read_or_refused(halved, q, "matmul")

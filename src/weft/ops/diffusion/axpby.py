"""Weighted sums of up to four tensors: residuals, steps of a flow, and the updates of multi-step schedulers.

    y = round(sum_i c_i t_i)           c_i = a_i, or coefficients[step, i] * a_i

Products and sums are fp32, and y is rounded once. Gradients:

    dt_i = round(c_i dy)               da_i = round(sum(dy t_i)), over the elements that share a_i, in a fixed order

The step is read on the device, so that a captured step can be replayed with another row of `coefficients` every time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..common.checks import FLOATS, INTEGERS, check_tensor, is_tensor, no_tensor, real
from ..common.rows import compute_dtype
from ..generated.pointwise import pointwise

TERMS = 4

Term = Tensor | tuple[float | Tensor, Tensor]


@pointwise
def _axpby(t0, a0=None, t1=None, a1=None, t2=None, a2=None, t3=None, a3=None, table=None, step=None):
    total = None
    for i, (t, a) in enumerate(((t0, a0), (t1, a1), (t2, a2), (t3, a3))):
        if t is None:
            continue
        if table is not None:
            a = table[step, i] if a is None else table[step, i] * a
        term = t if a is None else a * t
        total = term if total is None else total + term
    return total


def axpby(
    x: Term,
    *terms: Term,
    coefficients: Tensor | None = None,
    step: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Add up to four tensors, each times a coefficient, in fp32 with one rounding.

    - `x`, `terms`: each a tensor, or a pair (coefficient, tensor). Tensors may have different dtypes and any strides,
      and are broadcast. A coefficient is a number or a tensor on the device, whose dimensions are the first of the
      result's: no dimension for one coefficient, [B] for one per sample, [B, T] for one per row. Sizes of 1 are
      broadcast: [B, 1, D].
    - `coefficients`: one more factor of each term. A vector [terms], or a table [steps, terms] of which the kernel
      reads the row `step`; if the table needs a gradient, PyTorch reads it.
    - `step`: one integer on the device. Outside of the table the result is NaN, and nothing is read. The call does not
      advance it: write `step += 1` when nothing of the step reads it any more.
    - `out_dtype`: dtype of the result; by default the promoted dtype of the tensors, without the coefficients.
    - `out`: a tensor for the result, without gradients. It may be one of the tensors, whose elements are read before
      they are written; memory shared in another way is refused.

    >>> import torch, weft
    >>> x, v = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bfloat16)
    >>> weft.axpby(x, (torch.tensor([1.0, 2.0]), v))
    tensor([[1., 1., 1.],
            [2., 2., 2.]])
    >>> table, step = torch.tensor([[1.0, 0.5], [1.0, 0.25]]), torch.tensor(1)
    >>> weft.axpby(x, v, coefficients=table, step=step, out=x)
    tensor([[0.2500, 0.2500, 0.2500],
            [0.2500, 0.2500, 0.2500]])
    """
    tensors, factors = _parted((x, *terms))
    device, shape = tensors[0].device, _broadcast(tensors)
    if out is not None and not is_tensor(out):
        raise no_tensor("out", out)
    _check_coefficients(coefficients, step, len(tensors), device)
    if (
        coefficients is not None
        and step is not None
        and coefficients.requires_grad
        and torch.is_grad_enabled()
    ):
        coefficients, step = _row(coefficients, step), None
    if coefficients is not None and step is None:
        elements = coefficients.to(compute_dtype(coefficients)).unbind()
        factors = [e if a is None else e * _wide(a) for e, a in zip(elements, factors, strict=True)]
        coefficients = None
    arguments: list[float | Tensor | None] = []
    for i, (t, a) in enumerate(zip(tensors, factors, strict=True)):
        arguments += [t, _aligned(_name(i), a, shape, device) if is_tensor(a) else a]
    arguments += [None] * (2 * (TERMS - len(tensors)))
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    index = None if step is None else step.reshape(())
    result: Tensor = _axpby(*arguments, coefficients, index, out=out, out_dtype=out_dtype or dtype)
    return result


def _name(i: int) -> str:
    """Return how errors name a term."""
    return f"terms[{i - 1}]" if i else "x"


def _parted(terms: tuple[Term, ...]) -> tuple[list[Tensor], list[float | Tensor | None]]:
    """Return the tensors of terms and their coefficients, which are None where a term has none."""
    if len(terms) > TERMS:
        raise ValueError(f"axpby adds up to {TERMS} terms; got {len(terms)}. Add the result of another call")
    tensors: list[Tensor] = []
    factors: list[float | Tensor | None] = []
    for i, term in enumerate(terms):
        factor, t = term if type(term) is tuple and len(term) == 2 else (None, term)
        if not is_tensor(t):
            note = "A term is a tensor or a pair (coefficient, tensor), each an argument: axpby(x, (a, y), z)"
            raise no_tensor(_name(i), t, note)
        check_tensor(_name(i), t, FLOATS, tensors[0].device if tensors else t.device)
        tensors.append(t)
        factors.append(factor if factor is None or isinstance(factor, Tensor) else real(_name(i), factor))
    return tensors, factors


def _broadcast(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*(t.shape for t in tensors)))
    except RuntimeError:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise ValueError(f"the terms cannot be broadcast together: {shapes}") from None


def _aligned(name: str, factor: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a coefficient with a dimension of size 1 for each one that it lacks at the end."""
    name = f"the coefficient of {name}"
    check_tensor(name, factor, FLOATS, device)
    own = factor.shape
    if len(own) > len(shape) or any(a not in (1, b) for a, b in zip(own, shape, strict=False)):
        raise ValueError(
            f"{name} must have the first dimensions of the result {shape}, or 1 in their place; got {tuple(own)}"
        )
    return factor[(..., *(None,) * (len(shape) - len(own)))]


def _check_coefficients(
    coefficients: Tensor | None, step: Tensor | None, terms: int, device: torch.device
) -> None:
    if step is not None:
        check_tensor("step", step, INTEGERS, device, (), (1,))
    if coefficients is None:
        if step is not None:
            raise ValueError("step is the row of a table: pass coefficients= [steps, terms] with it")
        return
    check_tensor("coefficients", coefficients, FLOATS, device)
    if coefficients.dim() not in (1, 2) or coefficients.shape[-1] != terms:
        raise ValueError(
            f"coefficients must be [{terms}] or [steps, {terms}], a number for each term; got "
            f"{tuple(coefficients.shape)}"
        )
    if (coefficients.dim() == 2) != (step is not None):
        advice = "pass step=, an integer on the device" if step is None else "leave step= out"
        raise ValueError(f"coefficients have the shape {tuple(coefficients.shape)}: {advice}")


def _row(table: Tensor, step: Tensor) -> Tensor:
    """Return a row of a table in PyTorch; NaN for a step outside of it."""
    steps = table.shape[0]
    if not steps:
        return table.new_full(table.shape[1:], math.nan)
    inside = (step >= 0) & (step < steps)
    row = table.index_select(0, step.reshape(1).clamp(0, steps - 1))[0]
    return torch.where(inside, row, math.nan)


def _wide(factor: float | Tensor) -> float | Tensor:
    """Return a factor in the dtype of a product of factors, at least fp32."""
    return factor.to(compute_dtype(factor)) if isinstance(factor, Tensor) else factor

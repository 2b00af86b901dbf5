"""Error budgets, and the proof that each of them can fail.

The truth is always computed in float64. A budget says how far a result may be from it; `check` then damages
the result in five ways (zeroed, doubled, one row zeroed, one column negated, rows rotated by one) and demands
that the same budget rejects each: a tolerance that lets damage pass is no test.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

EPS32 = torch.finfo(torch.float32).eps


def ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the distance between neighboring values of `dtype` at the magnitude of `value`, in float64."""
    info = torch.finfo(dtype)
    size = value.double().abs().clamp(min=info.smallest_normal)
    return torch.exp2(torch.floor(torch.log2(size))) * info.eps


def assert_rounded_once(got: torch.Tensor, truth: torch.Tensor, noise: torch.Tensor | float) -> None:
    """Assert that `got` is `truth` with an arithmetic error of at most `noise`, rounded once to its own dtype."""
    check(got, truth, noise + ulp(truth, got.dtype) / 2)


def assert_not_worse(got: torch.Tensor, truth: torch.Tensor, eager: torch.Tensor, factor: float = 2) -> None:
    """Assert that in every row the error is at most `factor` times eager PyTorch's in the same dtype, plus rounding.

    The allowance for rounding is that of the result and eight eps of float32, which is what another summation order
    of a thousand terms amounts to (a random walk of sqrt(1000) steps of a quarter). Eager's error in a row counts
    as no smaller than its overall error relative to the largest values: a row where it was lucky sets no standard.
    """
    rows, eager_rows = _rows(truth.double()), _rows(eager.double())
    largest = rows.abs().amax(1, keepdim=True)
    error = (eager_rows - rows).abs().amax(1, keepdim=True)
    error = torch.maximum(error, largest * (error.max() / largest.max()))
    limit = factor * error + 8 * EPS32 * largest + ulp(largest, got.dtype)
    check(got, truth, limit.expand_as(rows).reshape(truth.shape))


def check(got: torch.Tensor, truth: torch.Tensor, limit: torch.Tensor | float) -> None:
    """Assert |got - truth| <= limit everywhere, and that damaged copies of `got` exceed the limit."""
    assert got.shape == truth.shape, f"shape {tuple(got.shape)}, expected {tuple(truth.shape)}"
    got, truth = got.detach().double(), truth.detach().double()
    limit = torch.as_tensor(limit, dtype=torch.float64).expand_as(truth)
    bad = ~((got - truth).abs() <= limit)
    if bad.any():
        excess = torch.where(bad, (got - truth).abs() / limit, 0.0).nan_to_num(torch.inf, torch.inf)
        worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        raise AssertionError(
            f"{int(bad.sum())} of {bad.numel()} elements out of budget; worst at {worst}: "
            f"got {got[worst]:.9g}, truth {truth[worst]:.9g}, limit {limit[worst]:.3g}"
        )
    for damage, damaged in _mutants(got):
        assert not ((damaged - truth).abs() <= limit).all(), (
            f"the budget would accept a result that is {damage}"
        )


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x.reshape(1, -1)


def _mutants(got: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield damaged copies of `got` that differ from it; reject an all-zero result, which has none worth the name."""
    assert got.count_nonzero() > 0, "an all-zero result proves nothing"
    rows = _rows(got)
    busiest_row = rows.abs().amax(1).argmax()
    busiest_column = rows.abs().amax(0).argmax()

    yield "all zero", torch.zeros_like(got)
    yield "doubled", got * 2
    if rows.shape[0] > 1:
        zeroed_row = rows.clone()
        zeroed_row[busiest_row] = 0
        yield "zero in one row", zeroed_row.reshape(got.shape)
        rotated = rows.roll(1, 0)
        if not torch.equal(rotated, rows):
            yield "one row off", rotated.reshape(got.shape)
    negated = rows.clone()
    negated[:, busiest_column] *= -1
    yield "negated in one column", negated.reshape(got.shape)

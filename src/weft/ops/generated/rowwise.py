"""Functions of rows as ops: with reductions and scans over the last dimension.

    @weft.rowwise
    def softmax(x):
        e = tl.exp(x - tl.max(x))
        return e / tl.sum(e)

Everything else is as in a `@weft.pointwise` op: arguments are broadcast, floats are computed in fp32 and rounded once,
and the gradient is derived. A row's result depends on that row alone, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

from .lowering import Scalar
from .pointwise import Pointwise


class Rowwise(Pointwise):
    """Op of a function of rows. Calling it computes the function of each row."""

    def __init__(
        self, function: Callable[..., Any], backward: Callable[..., Any] | None = None, dims: int = 1
    ) -> None:
        if dims < 1:
            raise ValueError(f"a row has at least one dimension; got dims={dims}")
        self.dims = dims
        super().__init__(function, backward)

    def check(self, scalar: Scalar) -> None:
        """Any function will do."""


@overload
def rowwise(function: Callable[..., Any], /) -> Rowwise: ...


@overload
def rowwise(
    *, backward: Callable[..., Any] | None = ..., dims: int = ...
) -> Callable[[Callable[..., Any]], Rowwise]: ...


def rowwise(
    function: Callable[..., Any] | None = None,
    /,
    *,
    backward: Callable[..., Any] | None = None,
    dims: int = 1,
) -> Any:
    """Turn a function of rows in Triton's language into an op.

    The function may use `tl.sum`, `tl.max`, `tl.min`, `tl.cumsum` and `x.numel`, which apply to a whole row of any
    length. A result with one value for each row loses the dimensions of the row.

    - `function`: has a parameter for each tensor or number, and returns a value or a tuple of values.
    - `backward`: a function of the parameters and of the gradient of each result, which returns the gradient of each
      parameter. Without it, the gradient is derived from the function.
    - `dims`: how many of the last dimensions make a row.

    >>> import torch, triton.language as tl, weft
    >>> @weft.rowwise
    ... def l1_normalize(x):
    ...     return x / tl.sum(tl.abs(x))
    >>> l1_normalize(torch.tensor([[1.0, 3.0], [2.0, 2.0]]))
    tensor([[0.2500, 0.7500],
            [0.5000, 0.5000]])
    """
    if function is None:
        return functools.partial(Rowwise, backward=backward, dims=dims)
    return Rowwise(function, backward, dims)

"""Arguments and outputs of gated linear units and their backward."""

from __future__ import annotations

from typing import Generic

from torch import Tensor
from typing_extensions import NamedTuple, TypeVar

from ...quant import Format
from ...runtime import G
from ..common.groups import Groups
from ..common.results import Result, ResultOptions

R = TypeVar("R", default=Result)


class GatedUnit(NamedTuple):
    """Definition of a gated linear unit."""

    act: str
    layout: str  # of gate and up: "concat" or "interleaved" in x, "pair" in x and up, "none" without a gate
    limit: float | None
    alpha: float
    up_offset: float


class GluArgs(NamedTuple):
    x: Tensor  # [..., 2H], or [..., H] for the layouts "pair" and "none"
    up: Tensor | None  # [..., H]; its dtype may differ from x's
    probs: Tensor | None  # [M]
    bias: Tensor | None  # [width of x], with groups one per group
    groups: Groups
    unit: GatedUnit
    result: ResultOptions
    gradient: ResultOptions  # of x and up


class GluOutputs(NamedTuple):
    result: Result


class GluBackwardArgs(NamedTuple):
    x: Tensor
    up: Tensor | None
    probs: Tensor | None
    bias: Tensor | None
    dy: Tensor  # [..., H]
    groups: Groups
    unit: GatedUnit
    gradient: ResultOptions
    needs: GluBackwardOutputs[bool, bool]

    @property
    def up_gradient(self) -> ResultOptions:
        """Storage of the gradient of up: like that of x, but in up's own dtype."""
        if self.up is None or self.up.dtype is self.gradient.dtype:
            return self.gradient
        return self.gradient._replace(dtype=self.up.dtype)


class GluBackwardOutputs(NamedTuple, Generic[R, G]):
    x: R
    up: R
    probs: G
    bias: G


NO_RESULT = Result(None)  # type: ignore[arg-type]


def hidden_of(x: Tensor, layout: str) -> int:
    """Return the number of columns of y."""
    cols = x.shape[-1]
    return cols // 2 if layout in ("concat", "interleaved") else cols


def in_one_pass(format: Format, layout: str, hidden: int) -> tuple[bool, bool]:
    """Return whether the row-wise and the column-wise copy of a gradient can be encoded from tiles of dgate and dup:
    each scale depends on a single tile, and no block spans the end of dgate and the start of dup."""
    if format.block not in ("1x128", "128x128", "mx"):
        return False, False
    crossing = layout == "concat" and hidden % format.group != 0
    return not crossing, not (crossing and format.block == "128x128")

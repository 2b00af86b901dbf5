"""What gated linear units and their backward take and give."""

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
    """What is computed."""

    act: str
    layout: (
        str  # of gate and up: "concat" or "interleaved" in x, "pair" in x and up, "none" if nothing is gated
    )
    limit: float | None
    alpha: float
    up_offset: float


class GluArgs(NamedTuple):
    x: Tensor  # [..., 2H], or [..., H] for the layouts "pair" and "none"
    up: Tensor | None  # [..., H]; its dtype may be another one than x's
    probs: Tensor | None  # [M]
    bias: Tensor | None  # [width of x], with groups one for each of them
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
        """How the gradient of up is stored: like that of x, but in up's own dtype."""
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
    """Columns of y."""
    cols = x.shape[-1]
    return cols // 2 if layout in ("concat", "interleaved") else cols


def in_one_pass(format: Format, layout: str, hidden: int) -> tuple[bool, bool]:
    """Whether the row-wise and the column-wise copies of a gradient come from the tiles of dgate and dup: their scales
    are known within a tile, and none belongs to the end of dgate and the beginning of dup."""
    if format.block not in ("1x128", "128x128", "mx"):
        return False, False
    crossing = layout == "concat" and hidden % format.group != 0
    return not crossing, not (crossing and format.block == "128x128")

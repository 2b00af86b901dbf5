"""Recipes: in what numbers the three products of a linear layer are computed.

    y = x w^T           dx = dy w           dw = dy^T x

Each product sums along another dimension, and an operand is quantised along the one that is summed: x and w along K for
y, dy and w along N for dx, dy and x along the rows for dw. So x and dy are each quantised twice, from one read, and w
as well unless its blocks are squares.

| recipe       | x           | weight       | dy          |                                                    |
|--------------|-------------|--------------|-------------|----------------------------------------------------|
| `bf16`       | bf16        | bf16         | bf16        |                                                    |
| `fp8_block`  | e4m3 1x128  | e4m3 128x128 | e4m3 1x128  | DeepSeek-V3, TransformerEngine's block scaling     |
| `fp8_row`    | e4m3 row    | e4m3 row     | e4m3 row    | torchao's "rowwise"                                |
| `fp8_tensor` | e4m3 tensor | e4m3 tensor  | e5m2 tensor | scales of its own largest number; or see `delayed` |
| `mxfp8`      | e4m3 mx     | e4m3 mx      | e4m3 mx     |                                                    |
| `nvfp4`      | nvfp4       | nvfp4_16x16  | nvfp4       | dy rounded stochastically; x and dy rotated for dw |
| `int8_row`   | int8 row    | int8 row     | int8 row    | sums in int32                                      |

An Inf or NaN in dy stays non-finite in dx and dw, so that `torch.amp.GradScaler` and checks of gradients see it: dy is
quantized by torchao's convention, which makes the scale of such a block NaN, where TransformerEngine's would saturate.
On finite numbers both give the same bytes, but for blocks whose largest number is below 1e-12.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...quant import Format
from .checks import check_formats


@dataclass(frozen=True)
class Recipe:
    """The numbers of a linear layer's products. A name of the table above, such as "fp8_block", stands for one.

    - `x`, `weight`, `grad`: the formats of x, of the weight and of dy; None for plain numbers.
    - `dtype`: of plain numbers; None for that of x.
    - `stochastic`: dy is rounded stochastically, by a seed that PyTorch's default generator draws.

    >>> import weft
    >>> weft.Recipe.of("fp8_block").weight
    'e4m3:128x128:te:pow2'
    """

    x: str | None = None
    weight: str | None = None
    grad: str | None = None
    dtype: torch.dtype | None = None
    stochastic: bool = False

    def __post_init__(self) -> None:
        formats = (self.x, self.weight, self.grad)
        if None in formats and any(formats):
            raise ValueError(
                f"a recipe has formats for x, weight and grad, or for none of them; got {formats}"
            )
        for name in ("x", "weight", "grad"):
            spec = getattr(self, name)
            if spec is not None:
                object.__setattr__(self, name, Format.of(spec).spec)
        self._check_products()
        if self.stochastic and (self.grad is None or Format.of(self.grad).number.integer):
            raise ValueError("stochastic=True rounds dy to a float format")

    def _check_products(self) -> None:
        """Raise an error unless the formats of all three products multiply each other."""
        if self.x is None or self.weight is None or self.grad is None:
            return
        # Each operand as the copy that lies along the dimension that is summed over.
        turned = {name: Format.of(getattr(self, name)).transposed.spec for name in ("x", "weight", "grad")}
        for product, left, right in (
            ("y = x w^T", self.x, self.weight),
            ("dx = dy w", self.grad, turned["weight"]),
            ("dw = dy^T x", turned["grad"], turned["x"]),
        ):
            try:
                check_formats(torch.bfloat16, left, torch.bfloat16, right, None)
            except ValueError as error:
                raise ValueError(
                    f"the formats of x, weight and grad cannot compute {product}, {left} times {right}: {error}"
                ) from error

    @staticmethod
    def of(recipe: Recipe | str | None) -> Recipe:
        """The recipe of this name; None is that of plain numbers in x's own dtype."""
        if recipe is None:
            return _PLAIN
        if isinstance(recipe, Recipe):
            return recipe
        found = RECIPES.get(recipe) if isinstance(recipe, str) else None
        if found is None:
            raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, or a weft.Recipe; got {recipe!r}")
        return found

    @property
    def is_quantised(self) -> bool:
        return self.x is not None

    @property
    def written(self) -> str | None:
        """The format in which the op that makes x writes it, with both copies from one pass; None if x is made plain
        and quantised by the layer."""
        return self.x if self.x is not None and Format.of(self.x).block in _WRITTEN else None


_PLAIN = Recipe()

# Blocks along rows, in which norms, gated units, attention and `permute` make both copies of their results.
_WRITTEN = ("1x128", "mx")

_ROTATED = "e2m1:nvfp4:te:hadamard-columnwise"  # along rows, for the weight's gradient alone


def _of_gradients(short: str) -> str:
    """Return a format in which blocks with an Inf or NaN become NaN."""
    f = Format.of(short)
    return Format(f.block, f.element, "torchao", f.power_of_two).spec


RECIPES: dict[str, Recipe] = {
    "bf16": Recipe(dtype=torch.bfloat16),
    "fp8_block": Recipe("1x128", "128x128", _of_gradients("1x128")),
    "fp8_row": Recipe("row", "row", _of_gradients("row")),
    "fp8_tensor": Recipe("tensor", "tensor", _of_gradients("e5m2:tensor")),
    "mxfp8": Recipe("mx", "mx", _of_gradients("mx")),
    "nvfp4": Recipe(_ROTATED, "nvfp4_16x16", _ROTATED, stochastic=True),
    "int8_row": Recipe("int8:row", "int8:row", _of_gradients("int8:row")),
}

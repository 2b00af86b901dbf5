"""Recipes: the formats of the three products of a linear layer.

    y = x w^T           dx = dy w           dw = dy^T x

Each product sums over a different dimension, and operands are quantized along the dimension that is summed: x and w
along K for y, dy and w along N for dx, dy and x along the rows for dw. So x and dy are each quantized twice, from one
read, and so is w unless its blocks are squares.

| recipe       | x           | weight       | dy          |                                                    |
|--------------|-------------|--------------|-------------|----------------------------------------------------|
| `bf16`       | bf16        | bf16         | bf16        |                                                    |
| `fp8_block`  | e4m3 1x128  | e4m3 128x128 | e4m3 1x128  | DeepSeek-V3, TransformerEngine's block scaling     |
| `fp8_row`    | e4m3 row    | e4m3 row     | e4m3 row    | torchao's "rowwise"                                |
| `fp8_tensor` | e4m3 tensor | e4m3 tensor  | e5m2 tensor | scales from its own amax; or see `delayed`         |
| `mxfp8`      | e4m3 mx     | e4m3 mx      | e4m3 mx     |                                                    |
| `nvfp4`      | nvfp4       | nvfp4_16x16  | nvfp4       | dy rounded stochastically; x and dy rotated for dw |
| `int8_row`   | int8 row    | int8 row     | int8 row    | sums in int32                                      |

An Inf or NaN in dy stays non-finite in dx and dw, so that `torch.amp.GradScaler` and gradient checks see it: dy is
quantized in torchao's convention, which makes the scale of such a block NaN, where TransformerEngine's would saturate.
On finite values both give the same bytes, except for blocks whose amax is below 1e-12.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from ...quant import Format
from .checks import check_formats


@dataclass(frozen=True)
class Recipe:
    """Formats of a linear layer's products. Names such as "fp8_block" select one from the table above.

    - `x`, `weight`, `grad`: the formats of x, weight and dy; None leaves them unquantized.
    - `dtype`: dtype of unquantized operands; None uses x's.
    - `stochastic`: round dy stochastically, with a seed from PyTorch's default generator.

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
                f"a recipe needs formats for x, weight and grad, or for none of them; got {formats}"
            )
        for name in ("x", "weight", "grad"):
            spec = getattr(self, name)
            if spec is not None:
                object.__setattr__(self, name, Format.of(spec).spec)
        self._check_products()
        if self.stochastic and (self.grad is None or Format.of(self.grad).number.integer):
            raise ValueError(f"stochastic=True needs a float format for grad; got {self.grad}")

    def _check_products(self) -> None:
        """Raise ValueError unless a product supports the formats of each of the three products."""
        if self.x is None or self.weight is None or self.grad is None:
            return
        # The transposed formats describe the copies quantized along the other dimension.
        transposed = {
            name: Format.of(getattr(self, name)).transposed.spec for name in ("x", "weight", "grad")
        }
        for product, left, right in (
            ("y = x w^T", self.x, self.weight),
            ("dx = dy w", self.grad, transposed["weight"]),
            ("dw = dy^T x", transposed["grad"], transposed["x"]),
        ):
            try:
                check_formats(torch.bfloat16, left, torch.bfloat16, right, None)
            except ValueError as error:
                raise ValueError(
                    f"the formats of x, weight and grad cannot compute {product}, {left} times {right}: {error}"
                ) from error

    @staticmethod
    def of(recipe: Recipe | str | None) -> Recipe:
        """Return the recipe with this name; None computes in x's own dtype."""
        if recipe is None:
            return _PLAIN
        if isinstance(recipe, Recipe):
            return recipe
        result = RECIPES.get(recipe) if isinstance(recipe, str) else None
        if result is None:
            hint = ", which needs a calibration: see weft.nn.convert" if recipe == "fp8_static" else ""
            raise ValueError(
                f"recipe must be one of {', '.join(RECIPES)}, or a weft.Recipe; got {recipe!r}{hint}"
            )
        return result

    @property
    def is_quantized(self) -> bool:
        return self.x is not None

    @property
    def is_quantised(self) -> bool:
        """Return `is_quantized`, under the name that it had before."""
        warnings.warn("Recipe.is_quantised is now Recipe.is_quantized", DeprecationWarning, stacklevel=2)
        return self.is_quantized

    @property
    def written(self) -> str | None:
        """Format in which the op that computes x stores both copies in one pass; None if the layer quantizes a plain
        x."""
        return self.x if self.x is not None and Format.of(self.x).block in _WRITTEN else None


_PLAIN = Recipe()

# Blocks in which norms, gated units, attention and `permute` store both copies of their results.
_WRITTEN = ("1x128", "mx")

_ROTATED = "e2m1:nvfp4:te:hadamard-columnwise"  # rotated along the rows, for the weight gradient only


def _gradient_format(short: str) -> str:
    """Return the format in torchao's convention, in which blocks with an Inf or NaN become NaN."""
    f = Format.of(short)
    return Format(f.block, f.element, "torchao", f.power_of_two).spec


RECIPES: dict[str, Recipe] = {
    "bf16": Recipe(dtype=torch.bfloat16),
    "fp8_block": Recipe("1x128", "128x128", _gradient_format("1x128")),
    "fp8_row": Recipe("row", "row", _gradient_format("row")),
    "fp8_tensor": Recipe("tensor", "tensor", _gradient_format("e5m2:tensor")),
    "mxfp8": Recipe("mx", "mx", _gradient_format("mx")),
    "nvfp4": Recipe(_ROTATED, "nvfp4_16x16", _ROTATED, stochastic=True),
    "int8_row": Recipe("int8:row", "int8:row", _gradient_format("int8:row")),
}

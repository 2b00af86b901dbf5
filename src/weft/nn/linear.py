"""Linear layers by recipe, and in what numbers they take their input."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops import Recipe, linear, quantize
from ..ops.common.groups import Groups
from ..ops.product.linear import apply_linear
from ..quant import QTensor

Device = torch.device | str | None


class Linear(nn.Linear):
    """`torch.nn.Linear` whose products, forward and backward, are computed in the numbers of a recipe by `weft.linear`.

    - `recipe`: "fp8_block", "bf16" and so on, a `weft.Recipe`, or None for the dtype of the input. It is an attribute
      that may be changed at any time.

    >>> import torch, weft.nn
    >>> layer = weft.nn.Linear(256, 128, bias=False, recipe="fp8_block")
    >>> layer
    Linear(in_features=256, out_features=128, bias=False, recipe='fp8_block')
    >>> layer(torch.randn(4, 256)).shape
    torch.Size([4, 128])
    """

    recipe: Recipe | str | None
    quantized_parameters = ("weight",)  # what the recipe rounds

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe | str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        Recipe.of(recipe)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = recipe

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, recipe=self.recipe)

    def extra_repr(self) -> str:
        return super().extra_repr() + recipe_repr(self.recipe)


class GroupedLinear(nn.Module):
    """A linear layer for each group of rows, such as the rows of each expert: `weight` [groups, out_features,
    in_features], and with a bias `bias` [groups, out_features].

    `forward(x, ends, align)` takes rows [rows, in_features] that are sorted by group. `ends` [groups] on the device and
    `align` say where groups end and begin, as those of a `weft.row_map` do. With a quantised recipe `align` must be a
    multiple of 128. Rows of no group give zeros.

    >>> import torch, weft.nn
    >>> layer = weft.nn.GroupedLinear(3, 64, 32, bias=False)
    >>> layer(torch.randn(6, 64), torch.tensor([2, 2, 5])).shape
    torch.Size([6, 32])
    """

    recipe: Recipe | str | None
    bias: nn.Parameter | None
    quantized_parameters = ("weight",)

    def __init__(
        self,
        groups: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe | str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        Recipe.of(recipe)
        self.groups, self.in_features, self.out_features = groups, in_features, out_features
        self.recipe = recipe
        self.weight = nn.Parameter(torch.empty(groups, out_features, in_features, device=device, dtype=dtype))
        made = torch.empty(groups, out_features, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if made is None else nn.Parameter(made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `torch.nn.Linear` does, group by group."""
        reset_matrices(self.weight)
        if self.bias is not None:
            bound = self.in_features**-0.5 if self.in_features else 0.0
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, ends: Tensor, align: int = 1) -> Tensor:
        recipe = Recipe.of(self.recipe)
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(f"x must be [rows, {self.in_features}]; got {tuple(x.shape)}")
        if recipe.is_quantised and align % 128:
            raise ValueError(
                f"the recipe {self.recipe!r} rounds 128 rows together, which must not be of two groups: make the row "
                f"map with align=128; got align={align}"
            )
        return apply_linear(x, self.weight, self.bias, recipe, Groups(ends, align))

    def extra_repr(self) -> str:
        return (
            f"groups={self.groups}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}{recipe_repr(self.recipe)}"
        )


def reset_matrices(weight: Tensor) -> None:
    """The numbers that `torch.nn.Linear` begins with, for matrices [..., out_features, in_features]."""
    bound = 1.0 / math.sqrt(weight.shape[-1]) if weight.shape[-1] else 0.0
    nn.init.uniform_(weight, -bound, bound)


def recipe_repr(recipe: Recipe | str | None) -> str:
    return "" if recipe is None else f", recipe={recipe!r}"


# ---- in what numbers a layer takes its input ------------------------------------------------------------


class Numbers(NamedTuple):
    """In what numbers layers take their input: a format and whether its column-wise copy is needed, or plain ones."""

    format: str | None = None
    columnwise: bool = False


PLAIN = Numbers()


def numbers_for(*layers: nn.Module) -> Numbers:
    """In what numbers the op before these layers should write their common input. These are plain unless all of them
    are Weft's, and take one format that norms, gated units and attention can write.

    >>> import torch, weft.nn
    >>> gate, up = (weft.nn.Linear(256, 512, recipe="fp8_block") for _ in range(2))
    >>> weft.nn.numbers_for(gate, up)
    Numbers(format='e4m3:1x128:te:pow2', columnwise=True)
    """
    formats = {Recipe.of(layer.recipe).written if isinstance(layer, Linear) else None for layer in layers}
    if len(formats) != 1 or None in formats:
        return PLAIN
    trained = any(isinstance(layer, Linear) and layer.weight.requires_grad for layer in layers)
    return Numbers(formats.pop(), torch.is_grad_enabled() and trained)


def in_numbers(x: Tensor, numbers: Numbers) -> Tensor:
    """x in these numbers: quantised once for all layers that take it, unless it is already."""
    if numbers.format is None or isinstance(x, QTensor):
        return x
    return quantize(x, numbers.format, columnwise=numbers.columnwise)

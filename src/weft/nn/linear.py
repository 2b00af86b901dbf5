"""Linear layers with a recipe, and the formats of their inputs."""

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
    """`torch.nn.Linear` whose products, forward and backward, `weft.linear` computes in the format of a recipe.

    - `recipe`: "fp8_block", "bf16" and so on, a `weft.Recipe`, or None for the dtype of the input. The attribute may be
      changed at any time.

    >>> import torch, weft.nn
    >>> layer = weft.nn.Linear(256, 128, bias=False, recipe="fp8_block")
    >>> layer
    Linear(in_features=256, out_features=128, bias=False, recipe='fp8_block')
    >>> layer(torch.randn(4, 256)).shape
    torch.Size([4, 128])
    """

    recipe: Recipe | str | None
    quantized_parameters: tuple[str, ...] = ("weight",)  # the parameters that the recipe rounds

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

    def input_key(self) -> tuple[str | None, float | None]:
        """Return the format in which the op before this layer can write its input, None for plain, and the value of its
        scale if that is frozen."""
        return Recipe.of(self.recipe).written, None

    def input_scale(self) -> Tensor | None:
        """Return the frozen scale of the input on the device, or None if the input determines its scales."""
        return None

    def extra_repr(self) -> str:
        return super().extra_repr() + recipe_repr(self.recipe)


class GroupedLinear(nn.Module):
    """Linear layer with one weight per group of rows, such as the rows of each expert: `weight` [groups, out_features,
    in_features], and optionally `bias` [groups, out_features].

    `forward(x, ends, align)` takes rows [rows, in_features] sorted by group. `ends` [groups] on the device and `align`
    delimit the groups, as in a `weft.row_map`. A quantized recipe needs an `align` that is a multiple of 128. Rows of
    no group give zeros.

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
        bias_values = torch.empty(groups, out_features, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if bias_values is None else nn.Parameter(bias_values))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize each group like `torch.nn.Linear`."""
        reset_matrices(self.weight)
        if self.bias is not None:
            bound = self.in_features**-0.5 if self.in_features else 0.0
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, ends: Tensor, align: int = 1) -> Tensor:
        recipe = Recipe.of(self.recipe)
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(f"x must be [rows, {self.in_features}]; got {tuple(x.shape)}")
        if recipe.is_quantized and align % 128:
            raise ValueError(
                f"the recipe {self.recipe!r} rounds blocks of 128 rows, which must not span two groups: make the row "
                f"map with align=128; got align={align}"
            )
        return apply_linear(x, self.weight, self.bias, recipe, Groups(ends, align))

    def extra_repr(self) -> str:
        return (
            f"groups={self.groups}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}{recipe_repr(self.recipe)}"
        )


def reset_matrices(weight: Tensor) -> None:
    """Initialize matrices [..., out_features, in_features] like `torch.nn.Linear`."""
    bound = 1.0 / math.sqrt(weight.shape[-1]) if weight.shape[-1] else 0.0
    nn.init.uniform_(weight, -bound, bound)


def recipe_repr(recipe: Recipe | str | None) -> str:
    return "" if recipe is None else f", recipe={recipe!r}"


# ---- input formats of layers ----------------------------------------------------------------------------


class Numbers(NamedTuple):
    """Input format of layers: a quantized format, whether its columnwise copy is needed, and its scale if that is
    frozen; or plain."""

    format: str | None = None
    columnwise: bool = False
    scale: Tensor | None = None


PLAIN = Numbers()


def numbers_for(*layers: nn.Module) -> Numbers:
    """Return the format in which the op before these layers should write their common input. It is plain unless all of
    them are Weft's and take one format that norms, gated units and attention can write.

    >>> import torch, weft.nn
    >>> gate, up = (weft.nn.Linear(256, 512, recipe="fp8_block") for _ in range(2))
    >>> weft.nn.numbers_for(gate, up)
    Numbers(format='e4m3:1x128:te:pow2', columnwise=True, scale=None)
    """
    known = [layer for layer in layers if isinstance(layer, Linear)]
    if not known or len(known) < len(layers) or len({layer.input_key() for layer in known}) > 1:
        return PLAIN
    (format, _), scale = known[0].input_key(), known[0].input_scale()
    if format is None:
        return PLAIN
    trained = any(layer.weight.requires_grad for layer in known)
    return Numbers(format, scale is None and torch.is_grad_enabled() and trained, scale)


def in_numbers(x: Tensor, numbers: Numbers) -> Tensor:
    """Return x in this format, quantized once for all layers that take it unless it already is."""
    if numbers.format is None or isinstance(x, QTensor):
        return x
    return quantize(x, numbers.format, columnwise=numbers.columnwise, scale=numbers.scale)

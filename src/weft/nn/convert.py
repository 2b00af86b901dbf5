"""Conversion of any model to a recipe, and back: its linear layers act as Weft's, in place.

A `torch.nn.Linear` becomes a `ConvertedLinear` by a change of class. Its parameters, buffers, hooks and position in
the model remain the same objects: optimizers, tied weights, state dicts and wrappers see no difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from ..ops import Recipe
from ..quant import Format
from ..report import Entry, Report
from .gather import Filter, is_gathered_quantized
from .linear import GroupedLinear, Linear
from .moe import Experts

LeftOut = Callable[[str, nn.Module], str | None]  # the reason a module is left alone, or None
_OWN = (Linear, GroupedLinear, Experts)
_BEFORE = "recipe_before_convert"  # attribute of Weft's own modules: their original recipe

# Heads and routers are the layers most harmed by rounding. They are recognized by the last part of a module's name.
KEPT = ("lm_head", "head", "output", "score", "gate", "router")


class ConvertedLinear(Linear):
    """A `torch.nn.Linear` that acts as `weft.nn.Linear` until it is converted back."""


# ---- conversion -----------------------------------------------------------------------------------------


def convert(model: nn.Module, recipe: Recipe | str | None, *, filter: Filter | None = None) -> Report:
    """Compute the linear layers of a model in the format of a recipe, in place; `recipe=None` undoes it.

    - Every module whose class is exactly `torch.nn.Linear` acts as `weft.nn.Linear` from then on, if its sizes are
      multiples of the recipe's blocks. Subclasses, which may compute something else, are left alone, and so are the
      layers of `torch.nn.TransformerEncoderLayer`, which bypasses them in eval mode.
    - Weft's own modules (`weft.nn.Linear`, `GroupedLinear`, `Experts`) switch to the recipe. Undoing restores their
      original one; modules that `convert` never changed stay as they are.
    - Heads and routers are left alone: a layer that `model.get_output_embeddings()` returns, one that shares its weight
      with an embedding, and one named lm_head, head, output, score, gate or router. `filter(name, module)`
      replaces this rule.

    Parameters stay the same objects, and the state dict keeps its keys. Convert before `gather_quantized`,
    `fully_shard`, DDP and `torch.compile`; a model compiled earlier is recompiled.

    Returns a `Report` with a line for each layer, and for each other module with matrices of its own.

    >>> import torch, weft.nn
    >>> model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    >>> print(weft.nn.convert(model, "fp8_block"))
    kind    modules  class              weft
    linear  0        Linear [512, 256]  recipe 'fp8_block'
    linear  2        Linear [10, 512]   left alone: 10 outputs are not multiples of 128, the recipe's block
    >>> report = weft.nn.convert(model, None)
    >>> type(model[0])
    <class 'torch.nn.modules.linear.Linear'>
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got a {type(model).__name__}")
    parsed_recipe = Recipe.of(recipe)
    left_out = _HeadRule(model) if filter is None else _FilterRule(filter)
    bypassed = {
        id(linear)
        for layer in model.modules()
        if isinstance(layer, nn.TransformerEncoderLayer)
        for linear in (layer.linear1, layer.linear2)
    }
    report = Report()
    for name, module in model.named_modules():
        kind = type(module).__name__
        if any(map(is_lazy, module.parameters(recurse=False))):
            why = "its sizes are still unknown: call the model once, then convert it"
            report.entries.append(Entry("matrices", name, kind, changed=False, what=why))
            continue
        shapes = _matrices(module)
        if not shapes:
            continue
        if recipe is None:
            reason = _reason_not_undone(module)
        elif id(module) in bypassed:
            reason = "torch.nn.TransformerEncoderLayer bypasses it in eval mode"
        else:
            reason = _reason(name, module, shapes, parsed_recipe, left_out)
        if reason is None and any(map(is_gathered_quantized, module.parameters(recurse=False))):
            raise ValueError(
                f"{name or kind} has a weight that FSDP gathers in the format of its current recipe: convert a model "
                "before weft.nn.gather_quantized(model), or rebuild it"
            )
        report.entries.append(
            Entry(
                "linear" if isinstance(module, nn.Linear) else "matrices",
                name,
                f"{kind} {list(shapes[0])}",
                changed=reason is None,
                what=reason or _changed(module, recipe),
            )
        )
    return report


def _matrices(module: nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes of a module's own matrices; none for embeddings, which multiply nothing."""
    if isinstance(module, nn.Embedding):
        return []
    return [tuple(p.shape) for p in module.parameters(recurse=False) if p.dim() >= 2]


def _reason_not_undone(module: nn.Module) -> str | None:
    """Return the reason there is nothing to undo, or None."""
    return None if isinstance(module, ConvertedLinear) or hasattr(module, _BEFORE) else "as it was"


def _reason(
    name: str, module: nn.Module, shapes: list[tuple[int, ...]], recipe: Recipe, left_out: LeftOut
) -> str | None:
    """Return the reason a module is left alone, or None."""
    if type(module) is not nn.Linear and not isinstance(module, _OWN):
        if isinstance(module, nn.Linear):
            return "a subclass of torch.nn.Linear may compute something else"
        return "not a torch.nn.Linear"
    return left_out(name, module) or _misfit(shapes, recipe)


def _misfit(shapes: list[tuple[int, ...]], recipe: Recipe) -> str | None:
    """Return the reason matrices of these shapes do not fit the blocks of a recipe, or None."""
    if recipe.x is None or recipe.weight is None:
        return None
    # Even with row or tensor scales, rows of codes must be a multiple of 16 bytes.
    block = max(Format.of(recipe.x).group, Format.of(recipe.weight).group) or 16
    for shape in shapes:
        for size, side in zip(shape[-2:], ("outputs", "inputs"), strict=True):
            if size % block:
                return f"{size} {side} are not multiples of {block}, the recipe's block"
    return None


def _changed(module: nn.Module, recipe: Recipe | str | None) -> str:
    """Change a module and return a description of the result."""
    if isinstance(module, ConvertedLinear) and recipe is None:
        del module.recipe
        module.__class__ = nn.Linear  # type: ignore[assignment]
        return "torch.nn.Linear again"
    if type(module) is nn.Linear:
        module.__class__ = ConvertedLinear
    elif recipe is None:
        recipe = getattr(module, _BEFORE)
        delattr(module, _BEFORE)
    elif not isinstance(module, ConvertedLinear) and not hasattr(module, _BEFORE):
        setattr(module, _BEFORE, module.recipe)
    module.recipe = recipe  # type: ignore[assignment]
    return f"recipe {recipe!r}"


class _HeadRule:
    """Rule that leaves heads and routers alone."""

    def __init__(self, model: nn.Module) -> None:
        self.embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        heads = (getattr(m, "get_output_embeddings", None) for m in model.modules())
        self.heads = {id(head()) for head in heads if callable(head)}

    def __call__(self, name: str, module: nn.Module) -> str | None:
        last = name.rpartition(".")[2]
        if id(module) in self.heads:
            return "the model's head"
        if any(id(parameter) in self.embeddings for parameter in module.parameters(recurse=False)):
            return "it shares its weight with an embedding"
        return f"named {last}, like a head or router" if last in KEPT else None


@dataclass(frozen=True)
class _FilterRule:
    """Rule given by the caller's filter."""

    filter: Filter

    def __call__(self, name: str, module: nn.Module) -> str | None:
        return None if self.filter(name, module) else "left out by the filter"

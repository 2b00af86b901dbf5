"""Any model in the numbers of a recipe, and back: its linear layers act as Weft's, in place.

A `torch.nn.Linear` becomes a `ConvertedLinear` by changing its class. Its parameters, buffers, hooks and place in the
model stay the objects that they are: optimizers, tied weights, state dicts and wrappers know no difference.
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

LeftOut = Callable[[str, nn.Module], str | None]  # why a module is left alone, if it is
_OWN = (Linear, GroupedLinear, Experts)
_BEFORE = "recipe_before_convert"  # where one of Weft's own modules keeps the recipe that it was made with

# Layers of these names are heads and routers, which a rounding harms most: the last part of the module's name.
KEPT = ("lm_head", "head", "output", "score", "gate", "router")


class ConvertedLinear(Linear):
    """A `torch.nn.Linear` that acts as `weft.nn.Linear` until it is converted back."""


# ---- conversion -----------------------------------------------------------------------------------------


def convert(model: nn.Module, recipe: Recipe | str | None, *, filter: Filter | None = None) -> Report:
    """Let the linear layers of a model compute in the numbers of a recipe, in place; with `recipe=None`, undo it.

    - Every module whose class is `torch.nn.Linear` itself acts as `weft.nn.Linear` from then on, if its sizes are
      multiples of the recipe's blocks. Subclasses may compute something else and are left alone, and so are the layers
      of `torch.nn.TransformerEncoderLayer`, which computes past them in eval mode.
    - Weft's own modules (`weft.nn.Linear`, `GroupedLinear`, `Experts`) get the recipe as theirs. Undone, they have the
      one that they were made with; those that no call of `convert` has changed stay as they are.
    - Heads and routers are left alone: a layer that `model.get_output_embeddings()` returns, one whose weight is also
      that of an embedding, and one that is called lm_head, head, output, score, gate or router. `filter(name, module)`
      decides in place of this rule.

    Parameters stay the same objects, and keys of the state dict the same. Convert before `gather_quantized`,
    `fully_shard`, DDP and `torch.compile`; a model that was compiled before is compiled anew.

    Returns a `Report` with a line for each layer, and for each other module that has matrices of its own.

    >>> import torch, weft.nn
    >>> model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    >>> print(weft.nn.convert(model, "fp8_block"))
    kind    modules  class              weft
    linear  0        Linear [512, 256]  recipe 'fp8_block'
    linear  2        Linear [10, 512]   left alone: 10 outputs are no multiple of 128, the recipe's block
    >>> report = weft.nn.convert(model, None)
    >>> type(model[0])
    <class 'torch.nn.modules.linear.Linear'>
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got a {type(model).__name__}")
    found = Recipe.of(recipe)
    left_out = _Kept(model) if filter is None else _Filtered(filter)
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
            why = "its sizes are not known yet: call the model once, then convert it"
            report.entries.append(Entry("matrices", name, kind, changed=False, what=why))
            continue
        shapes = _matrices(module)
        if not shapes:
            continue
        if recipe is None:
            reason = _as_it_was(module)
        elif id(module) in bypassed:
            reason = "torch.nn.TransformerEncoderLayer computes past it in eval mode"
        else:
            reason = _reason(name, module, shapes, found, left_out)
        if reason is None and any(map(is_gathered_quantized, module.parameters(recurse=False))):
            raise ValueError(
                f"{name or kind} has a weight that FSDP gathers in the numbers of its present recipe: convert a model "
                "before weft.nn.gather_quantized(model), or make it anew"
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
    """The shapes of the matrices among a module's own parameters; none for embeddings, which multiply nothing."""
    if isinstance(module, nn.Embedding):
        return []
    return [tuple(p.shape) for p in module.parameters(recurse=False) if p.dim() >= 2]


def _as_it_was(module: nn.Module) -> str | None:
    """Return why there is nothing to undo, or None."""
    return None if isinstance(module, ConvertedLinear) or hasattr(module, _BEFORE) else "as it was"


def _reason(
    name: str, module: nn.Module, shapes: list[tuple[int, ...]], recipe: Recipe, left_out: LeftOut
) -> str | None:
    """Why a module is left alone; None if it is not."""
    if type(module) is not nn.Linear and not isinstance(module, _OWN):
        if isinstance(module, nn.Linear):
            return "a subclass of torch.nn.Linear may compute something else"
        return "no torch.nn.Linear"
    return left_out(name, module) or _misfit(shapes, recipe)


def _misfit(shapes: list[tuple[int, ...]], recipe: Recipe) -> str | None:
    """Why matrices of these shapes do not fit the blocks of a recipe."""
    if recipe.x is None or recipe.weight is None:
        return None
    # Codes with scales of rows or tensors still come in 16 bytes.
    block = max(Format.of(recipe.x).group, Format.of(recipe.weight).group) or 16
    for shape in shapes:
        for number, what in zip(shape[-2:], ("outputs", "inputs"), strict=True):
            if number % block:
                return f"{number} {what} are no multiple of {block}, the recipe's block"
    return None


def _changed(module: nn.Module, recipe: Recipe | str | None) -> str:
    """Change a module, and say what it is now."""
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


class _Kept:
    """The rule for heads and routers."""

    def __init__(self, model: nn.Module) -> None:
        self.embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        heads = (getattr(m, "get_output_embeddings", None) for m in model.modules())
        self.heads = {id(head()) for head in heads if callable(head)}

    def __call__(self, name: str, module: nn.Module) -> str | None:
        last = name.rpartition(".")[2]
        if id(module) in self.heads:
            return "the model's head"
        if any(id(parameter) in self.embeddings for parameter in module.parameters(recurse=False)):
            return "its weight is that of an embedding"
        return f"called {last}, as heads and routers are" if last in KEPT else None


@dataclass(frozen=True)
class _Filtered:
    """The rule of a filter."""

    filter: Filter

    def __call__(self, name: str, module: nn.Module) -> str | None:
        return None if self.filter(name, module) else "left out by the filter"

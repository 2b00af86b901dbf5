"""Conversion of any model to a recipe, and back: its linear layers act as Weft's, in place.

A `torch.nn.Linear` becomes a `ConvertedLinear` by a change of class. Its parameters, buffers, hooks and position in
the model remain the same objects: optimizers, tied weights, state dicts and wrappers see no difference.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from ..ops import Recipe
from ..ops.common.checks import FLOATS
from ..quant import Format, QTensor
from ..report import Entry, Report
from .gather import Filter, is_gathered_quantized
from .linear import GroupedLinear, Linear
from .moe import Experts
from .scales import Calibration, LayerScale, hash_of, title
from .static import FORMAT, STATIC, StaticLinear, check_unwrapped, freeze, unfreeze, weight_codes

LeftOut = Callable[[str, nn.Module], str | None]  # the reason a module is left alone, or None
_OWN = (Linear, GroupedLinear, Experts)
Shapes = list[tuple[int, ...]]
_BEFORE = "recipe_before_convert"  # attribute of Weft's own modules: their original recipe

# Heads and routers are the layers most harmed by rounding. They are recognized by the last part of a module's name.
KEPT = ("lm_head", "head", "output", "score", "gate", "router")


class ConvertedLinear(Linear):
    """A `torch.nn.Linear` that acts as `weft.nn.Linear` until it is converted back."""


# ---- conversion -----------------------------------------------------------------------------------------


def convert(
    model: nn.Module,
    recipe: Recipe | str | None,
    *,
    filter: Filter | None = None,
    scales: Calibration | str | os.PathLike[str] | None = None,
) -> Report:
    """Compute the linear layers of a model in the format of a recipe, in place; `recipe=None` undoes it.

    - Every module whose class is exactly `torch.nn.Linear` acts as `weft.nn.Linear` from then on, if its sizes are
      multiples of the recipe's blocks. Subclasses, which may compute something else, are left alone, and so are the
      layers of `torch.nn.TransformerEncoderLayer`, which bypasses them in eval mode.
    - Weft's own modules (`weft.nn.Linear`, `GroupedLinear`, `Experts`) switch to the recipe. Undoing restores their
      original one; modules that `convert` never changed stay as they are.
    - Heads and routers are left alone: a layer that `model.get_output_embeddings()` returns, one that shares its weight
      with an embedding, and one named lm_head, head, output, score, gate or router. `filter(name, module)`
      replaces this rule.
    - The recipe "fp8_static" is for inference: linear layers multiply codes of their weight, which `convert` quantizes
      once, by codes of their input, whose scale `weft.calibrate` chose. `scales` is its file or its result. Layers that
      no batch of the calibration called, or only with zeros, are left alone; a weight that has changed since is an
      error, and nothing is converted.

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
    is_static = recipe == STATIC
    if is_static != (scales is not None):
        raise ValueError(
            f"recipe {STATIC!r} needs scales=, the file or the result of weft.calibrate(model, batches)"
            if is_static
            else f"scales= is for the recipe {STATIC!r}; got the recipe {recipe!r}: leave it out"
        )
    if recipe is None:
        matrices = _undone(model)
    else:
        parsed = None if is_static else Recipe.of(recipe)
        formats = (FORMAT, FORMAT) if parsed is None else (parsed.x, parsed.weight)
        matrices = _judged(model, formats, filter, is_static)
    frozen: dict[str, LayerScale] = {}
    if scales is not None:
        check_unwrapped(model)
        calibration = scales if isinstance(scales, Calibration) else Calibration.load(scales)
        matrices, frozen = _calibrated(matrices, calibration)
    for m in matrices:
        if m.reason is None and any(map(is_gathered_quantized, m.module.parameters(recurse=False))):
            raise ValueError(
                f"{title(m.name)} has a weight that FSDP gathers in the format of its current recipe: convert a model "
                "before weft.nn.gather_quantized(model), or rebuild it"
            )
    codes: dict[int, QTensor] = {}
    report = Report()
    for m in matrices:
        change = m.reason
        if change is None:
            change = _frozen(m, frozen[m.name], codes) if is_static else _changed(m.module, recipe)
        report.entries.append(Entry(m.kind, m.name, m.title, changed=m.reason is None, what=change))
    return report


class _Matrices(NamedTuple):
    """A module with matrices of its own, and the reason it is left alone, or None."""

    kind: str
    name: str
    module: nn.Module
    title: str
    reason: str | None


def _all_matrices(
    model: nn.Module, reason_of: Callable[[str, nn.Module, Shapes], str | None]
) -> list[_Matrices]:
    result = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if any(map(is_lazy, module.parameters(recurse=False))):
            why = "its sizes are still unknown: call the model once, then convert it"
            result.append(_Matrices("matrices", name, module, kind, why))
        elif shapes := _matrices(module):
            group = "linear" if isinstance(module, nn.Linear) else "matrices"
            text, reason = f"{kind} {list(shapes[0])}", reason_of(name, module, shapes)
            result.append(_Matrices(group, name, module, text, reason))
    return result


def _undone(model: nn.Module) -> list[_Matrices]:
    """Return the modules to restore, and the reasons to leave the others."""
    return _all_matrices(model, lambda name, module, shapes: _reason_not_undone(module))


def _judged(
    model: nn.Module, formats: tuple[str | None, str | None], filter: Filter | None, is_static: bool
) -> list[_Matrices]:
    """Return the modules to convert to formats of x and weight, and the reasons to leave the others."""
    left_out = _HeadRule(model) if filter is None else _FilterRule(filter)
    bypassed = {
        id(linear)
        for layer in model.modules()
        if isinstance(layer, nn.TransformerEncoderLayer)
        for linear in (layer.linear1, layer.linear2)
    }

    def reason_of(name: str, module: nn.Module, shapes: Shapes) -> str | None:
        if id(module) in bypassed:
            return "torch.nn.TransformerEncoderLayer bypasses it in eval mode"
        reason = _reason(name, module, shapes, formats, left_out)
        return _reason_not_static(module) if reason is None and is_static else reason

    return _all_matrices(model, reason_of)


def _matrices(module: nn.Module) -> Shapes:
    """Return the shapes of a module's own matrices; none for embeddings, which multiply nothing."""
    if isinstance(module, nn.Embedding):
        return []
    return [tuple(p.shape) for p in module.parameters(recurse=False) if p.dim() >= 2]


def _reason_not_undone(module: nn.Module) -> str | None:
    """Return the reason there is nothing to undo, or None."""
    changed = isinstance(module, (ConvertedLinear, StaticLinear)) or hasattr(module, _BEFORE)
    return None if changed else "as it was"


def _reason(
    name: str, module: nn.Module, shapes: Shapes, formats: tuple[str | None, str | None], left_out: LeftOut
) -> str | None:
    """Return the reason a module is left alone, or None."""
    if type(module) is not nn.Linear and not isinstance(module, _OWN):
        if isinstance(module, nn.Linear):
            return "a subclass of torch.nn.Linear may compute something else"
        return "not a torch.nn.Linear"
    return left_out(name, module) or _misfit(shapes, *formats)


def _misfit(shapes: Shapes, x: str | None, weight: str | None) -> str | None:
    """Return the reason matrices of these shapes do not fit the blocks of a recipe's formats, or None."""
    if x is None or weight is None:
        return None
    # Even with row or tensor scales, rows of codes must be a multiple of 16 bytes.
    block = max(Format.of(x).group, Format.of(weight).group) or 16
    for shape in shapes:
        for size, side in zip(shape[-2:], ("outputs", "inputs"), strict=True):
            if size % block:
                return f"{size} {side} are not multiples of {block}, the recipe's block"
    return None


def _changed(module: nn.Module, recipe: Recipe | str | None) -> str:
    """Change a module and return a description of the result."""
    if isinstance(module, StaticLinear):
        unfreeze(module)
        if recipe is None and not isinstance(module, ConvertedLinear) and not hasattr(module, _BEFORE):
            return _described(module)
    if isinstance(module, ConvertedLinear) and recipe is None:
        del module.recipe
        module.__class__ = nn.Linear  # type: ignore[assignment]
        return _described(module)
    if type(module) is nn.Linear:
        module.__class__ = ConvertedLinear
    elif recipe is None:
        recipe = getattr(module, _BEFORE)
        delattr(module, _BEFORE)
    elif not isinstance(module, ConvertedLinear) and not hasattr(module, _BEFORE):
        setattr(module, _BEFORE, module.recipe)
    module.recipe = recipe  # type: ignore[assignment]
    return _described(module)


def _described(module: nn.Module) -> str:
    return "torch.nn.Linear again" if type(module) is nn.Linear else f"recipe {module.recipe!r}"


# ---- frozen scales --------------------------------------------------------------------------------------


def static_layers(model: nn.Module, filter: Filter | None) -> dict[str, nn.Linear]:
    """Return the layers that "fp8_static" converts, by name."""
    matrices = _judged(model, (FORMAT, FORMAT), filter, is_static=True)
    return {m.name: m.module for m in matrices if m.reason is None and isinstance(m.module, nn.Linear)}


def _reason_not_static(module: nn.Module) -> str | None:
    """Return the reason a module that other recipes convert does not take frozen scales, or None."""
    if not isinstance(module, nn.Linear):
        return f"{STATIC!r} is for linear layers"
    if type(module) not in (nn.Linear, Linear, ConvertedLinear, StaticLinear):
        return "a subclass of weft.nn.Linear may compute something else"
    if "weight" not in module._parameters:
        return "its weight is computed anew in every call"
    return None if module.weight.dtype in FLOATS[:3] else f"its weight is in {module.weight.dtype}"


def _calibrated(
    matrices: list[_Matrices], calibration: Calibration
) -> tuple[list[_Matrices], dict[str, LayerScale]]:
    """Return the modules with further reasons to leave some, and the calibration of each layer to convert. Raise
    ValueError if the calibration is for another format or for other weights."""
    if calibration.format != FORMAT:
        raise ValueError(
            f"the calibration is for {calibration.format}, and {STATIC!r} takes {FORMAT}: calibrate again"
        )
    result, frozen = [], {}
    for m in matrices:
        reason = m.reason
        if reason is None:
            layer = calibration.layers.get(m.name)
            assert isinstance(m.module, nn.Linear)
            weight_hash = hash_of(m.name, m.module.weight)
            if layer is None:
                raise ValueError(_missing(m.name, weight_hash, calibration))
            if layer.weight != weight_hash:
                raise ValueError(
                    f"the weight of {title(m.name)} is not the one that was calibrated: calibrate this model, or load "
                    "the weights it had then"
                )
            if layer.amax:
                frozen[m.name] = layer
            else:
                what = "it was never called" if layer.amax is None else "its inputs were all zero"
                reason = f"{what} during calibration"
        result.append(m._replace(reason=reason))
    return result, frozen


def _missing(name: str, weight_hash: str, calibration: Calibration) -> str:
    others = [other for other, layer in calibration.layers.items() if layer.weight == weight_hash]
    known = f"; its weight is there under the name {title(others[0])}" if others else ""
    return (
        f"the calibration has no layer {title(name)}{known}: calibrate the same model with the same filter=, or leave "
        "the layer out with filter="
    )


def _frozen(m: _Matrices, layer: LayerScale, codes: dict[int, QTensor]) -> str:
    """Freeze the scale of a layer and return a description of the result. `codes`: those of the weights converted so
    far, by id, so that tied layers share them."""
    assert isinstance(m.module, nn.Linear)
    if isinstance(m.module, StaticLinear):
        unfreeze(m.module)
    weight = m.module.weight
    if id(weight) not in codes:
        codes[id(weight)] = weight_codes(weight)
    freeze(m.module, m.name, layer, codes[id(weight)])
    return _described(m.module)


# ---- heads and routers ----------------------------------------------------------------------------------


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

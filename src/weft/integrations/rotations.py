"""Recognition of how an attention rotates q and k, by trying the function it calls."""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import textwrap
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops import Rotation, rope
from ..runtime import backend
from .trials import LeftAlone, could_not_be_tried, normal, trial


class RotaryOptions(NamedTuple):
    """Options with which `weft.rope` reproduces a function (q, k, cos, sin) of a model for q and k [batch, heads,
    sequence, dim]."""

    name: str  # the function's name among the globals of the attention's forward
    tables: str  # each angle is in the tables "once", in both "halves", or in adjacent "pairs"
    style: Any
    out_style: Any
    partial: bool  # tables for a part of a head rotate its first elements

    def fits(self, q: Tensor, cos: Tensor) -> bool:
        """Return whether a call is of the kind that was tried: heads of four dimensions, and per-sequence tables
        without gradient."""
        if q.dim() != 4 or cos.dim() != 3 or cos.shape[1] != q.shape[2] or cos.requires_grad:
            return False
        dim = self.rotated(cos)
        return dim == q.shape[-1] or (self.partial and dim < q.shape[-1])

    def rotated(self, cos: Tensor) -> int:
        """Return how many elements of a head the tables rotate."""
        return int(cos.shape[-1]) * (2 if self.tables == "once" else 1)

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        dim, batch = self.rotated(cos), len(q)
        columns = slice(0, None, 2) if self.tables == "pairs" else slice(0, dim // 2)
        cos, sin = (table[..., columns].expand(batch, -1, -1) for table in (cos, sin))
        rotation = Rotation(cos=cos, sin=sin, dim=dim, style=self.style, out_style=self.out_style)
        return rope(q, rotation, layout="bhsd"), rope(k, rotation, layout="bhsd")

    def __str__(self) -> str:
        return f"rope style={self.style!r}" + (f" out_style={self.out_style!r}" if self.out_style else "")


def rotating_functions(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """Return the functions that a module's forward calls by name to rotate q and k."""
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, types.FunctionType):
        return {}
    names = [name for name in forward.__code__.co_names if name.startswith("apply_rotary")]
    return {name: f for name in names if callable(f := forward.__globals__.get(name))}


def recognize_rotary(module: nn.Module) -> tuple[RotaryOptions, ...]:
    """Return the options that reproduce an attention's rotation functions; raise `LeftAlone` if some have none, or if
    the attention calls one with arguments other than (q, k, cos, sin)."""
    functions = rotating_functions(module)
    _check_calls(module, set(functions))
    return tuple(_try_rotary(name, function) for name, function in functions.items())


def _check_calls(module: nn.Module, names: set[str]) -> None:
    try:
        text = textwrap.dedent(inspect.getsource(inspect.unwrap(type(module).forward)))
    except (OSError, TypeError) as error:
        raise LeftAlone("the source of its forward cannot be read") from error
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            starred = any(isinstance(argument, ast.Starred) for argument in node.args)
            if len(node.args) != 4 or node.keywords or starred:
                raise LeftAlone(f"it calls {ast.unparse(node)}, with other arguments than (q, k, cos, sin)")


def _try_rotary(name: str, function: Callable[..., Any]) -> RotaryOptions:
    q, k = normal(2, 3, 5, 16), normal(2, 1, 5, 16, seed=1)
    angles = normal(2, 5, 8, seed=2) * 3
    reason = LeftAlone(f"none of the options of rope reproduces {name}")

    def widened(tables: str, angles: Tensor) -> tuple[Tensor, Tensor]:
        wide = {
            "halves": torch.cat([angles, angles], -1),
            "once": angles,
            "pairs": angles.repeat_interleave(2, -1),
        }[tables]
        return wide.cos(), wide.sin()

    def same(options: RotaryOptions, angles: Tensor) -> bool:
        cos, sin = widened(options.tables, angles)
        expected = function(q, k, cos, sin)
        if not isinstance(expected, tuple) or [t.shape for t in expected] != [q.shape, k.shape]:
            return False
        with backend("reference"):
            result = options(q, k, cos, sin)
        return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(result, expected, strict=True))

    for tables, (style, out_style) in itertools.product(
        ("halves", "once", "pairs"), (("neox", None), ("interleaved", None), ("interleaved", "neox"))
    ):
        options = RotaryOptions(name, tables, style, out_style, partial=False)
        try:
            with trial():
                if not same(options, angles):
                    continue
        except Exception as error:  # foreign code may raise anything on a small input
            reason = could_not_be_tried(error)
            continue
        with trial(), contextlib.suppress(Exception):  # as above
            options = options._replace(partial=same(options, angles[..., :4]))
        return options
    raise reason

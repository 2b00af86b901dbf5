"""Names of ops and public functions that a user types. Unknown ones are refused with the nearest known name.

An op is named by its name in `weft.catalogue`, or by a public function, which stands for all ops it may call:
`--op rms_norm` is `--op norm --op norm_backward`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import weft

from ..ops.generated.pointwise import Pointwise
from ..runtime import Op, catalogue
from .screen import Refused


def unknown(kind: str, name: str, known: Sequence[str], others: Iterable[str] = ()) -> Refused:
    """Return the refusal of a name, with the nearest of the known names and of the others; if none is near, with all
    known names."""
    separator = "; " if any("," in each for each in known) else ", "
    rest = nearest(name, [*known, *others]) or f"; there are {separator.join(known)}"
    return Refused(wrapped(f"there is no {kind} {name!r}{rest}"))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a refusal that suggests known names near this one, or nothing if none is near."""
    by_letters = {_letters(each): each for each in known}
    near = difflib.get_close_matches(_letters(name), by_letters, n=3, cutoff=0.6)
    if not near:
        return ""
    *others, last = (repr(by_letters[each]) for each in near)
    return f". Did you mean {', '.join(others)} or {last}?" if others else f". Did you mean {last}?"


def _letters(name: str) -> str:
    """Return the letters that are compared, so that RMSNorm matches rms_norm exactly."""
    return name.lower().replace("_", "").replace("-", "")


def wrapped(text: str) -> str:
    """Wrap the text of a refusal to lines of a terminal."""
    return textwrap.fill(text, 80, break_on_hyphens=False, break_long_words=False)


def check_names(kind: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Refuse the first unknown name."""
    for name in names:
        if name not in known:
            raise unknown(kind, name, known)


# ---- ops ------------------------------------------------------------------------------------------------------


@functools.cache
def public_ops() -> dict[str, Callable[..., Any]]:
    """Return the public functions that compute, by name: those of `weft.ops` that are not context managers."""
    functions = {}
    for name in weft.__all__:
        function = getattr(weft, name)
        computes = inspect.isfunction(function) and function.__module__.startswith("weft.ops")
        if computes and not inspect.isgeneratorfunction(inspect.unwrap(function)):
            functions[name] = function
    return functions


def ops_named(name: str) -> list[str]:
    """Return the ops of the catalogue that a name stands for."""
    if name in catalogue:
        return [name]
    if name not in public_ops():
        raise unknown("op", name, list(public_ops()), others=catalogue)
    ops = made_of(name)
    if not ops:
        raise Refused(f"weft.{name} has no kernels: it runs in plain PyTorch")
    return list(ops)


@functools.cache
def made_of(name: str) -> tuple[str, ...]:
    """Return the ops of the catalogue that a public function may call, forward or backward."""
    seen: dict[Any, None] = {}
    _visit(public_ops()[name], seen)
    ops = [op for op in catalogue if op in seen]
    return tuple(ops or [op for op in catalogue if op == name])


def _visit(thing: Any, seen: dict[Any, None]) -> None:
    """Collect the ops that a function uses, through functions and classes of `weft.ops` and the backward of ops."""
    if isinstance(thing, Op):
        if thing.name not in seen:
            seen[thing.name] = None
            _visit(type(thing).backward, seen)
            _visit(getattr(thing, "backward_op", None), seen)
        return
    if isinstance(thing, Pointwise):
        _visit(thing.op, seen)
        return
    if isinstance(thing, type):
        if thing.__module__.startswith("weft.ops") and thing not in seen:
            seen[thing] = None
            for member in vars(thing).values():
                _visit(getattr(member, "__func__", member), seen)
        return
    if not isinstance(thing, types.FunctionType):
        return
    function = inspect.unwrap(thing)
    if function in seen or not function.__module__.startswith("weft.ops"):
        return
    seen[function] = None
    for code in _codes(function.__code__):
        for name in code.co_names:
            _visit(function.__globals__.get(name), seen)
    for cell in function.__closure__ or ():
        _visit(cell.cell_contents, seen)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)

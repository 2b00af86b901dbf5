"""Argument checks. A valid argument costs a few comparisons; only an invalid one pays for working out what is wrong and
what to do.

Tensor arguments are never converted from something else (a list, a number, a NumPy array, a module): that would copy to
the device in every call, and wait for it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ...runtime import PLAIN, is_transformed, overlap, overlaps_itself, remembered
from .rows import compute_dtype

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)


F = TypeVar("F", bound=Callable[..., Any])


def checked_once(function: F) -> F:
    """Cache a function that checks plain values and builds an object from them, so that it runs once per set of values.
    torch.compile cannot trace a cache, so it traces the function itself."""
    cached = remembered(function, typed=True)

    @functools.wraps(function)
    def call(*options: Any) -> Any:
        return function(*options) if torch.compiler.is_compiling() else cached(*options)

    return call  # type: ignore[return-value]


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Return `isinstance(value, Tensor)`, with a fast path for parameters."""
    kind = type(value)
    return kind is Tensor or kind is Parameter or isinstance(value, Tensor)


def check_tensors(names: str, *values: object) -> None:
    """Raise an error unless all values are tensors. `names` are their names, in the same order."""
    for index, value in enumerate(values):
        if not is_tensor(value):
            raise no_tensor(names.split()[index], value)


def check_input(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Check the dtype and rank of the input that sets shape and device for the other tensors."""
    if not is_tensor(x) or x.layout is not torch.strided:
        raise no_tensor(name, x)
    if x.dtype not in dtypes:
        raise ValueError(f"{name} must be {_words(dtypes)}; got {x.dtype}")
    if x.dim() == 0:
        raise ValueError(f"{name} must have at least one dimension; got a scalar")


def check_tensor(
    name: str, value: Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device, *shapes: tuple[int, ...],
    note: str = "",
) -> None:  # fmt: skip
    """Raise an error unless `value` is a tensor of one of `dtypes`, on `device`, and of one of `shapes` if there are
    any. `note` says what to do about a value that is not a tensor."""
    if not is_tensor(value) or value.layout is not torch.strided:
        raise no_tensor(name, value, note)
    if value.dtype not in dtypes:
        wanted = _words(dtypes) if len(dtypes) > 1 else f"{_words(dtypes)} like the other tensors"
        raise ValueError(f"{name} must be {wanted}; got {value.dtype}")
    if value.device != device:
        raise ValueError(f"{name} must be on {device} like the other tensors; it is on {value.device}")
    if shapes and value.shape not in shapes and not _has_one_of(value, shapes):
        wanted = " or ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"{name} must have the shape {wanted}; got {tuple(value.shape)}")


def _has_one_of(x: Tensor, shapes: tuple[tuple[int, ...], ...]) -> bool:
    """Return whether x has one of these shapes. Compares size by size, since under torch.compile `in` finds no dynamic
    size equal to a number."""
    return any(
        x.dim() == len(shape) and all(actual == size for actual, size in zip(x.shape, shape, strict=True))
        for shape in shapes
    )


def dtypes_beside(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the dtypes that an op can combine with this one. bf16, fp16 and fp32 mix freely; float64 is for
    references, which take all of their inputs in it."""
    return FLOATS[3:] if dtype is torch.float64 else FLOATS[:3]


def no_tensor(name: str, value: Any, note: str = "") -> TypeError:
    """Return the error for an argument that is not a dense tensor."""
    kind = type(value).__name__
    if is_tensor(value):
        advice = "Pass a tensor with pads" if value.is_nested else "Pass its .to_dense()"
        return TypeError(f"{name} must be a dense tensor; got one in {value.layout}. {advice}")
    if isinstance(value, Module):
        member = "its .weight" if isinstance(getattr(value, "weight", None), Tensor) else "one of its tensors"
        actual, note = f"the module {kind}", f"Pass {member}"
    elif value is None:
        actual = "None"
    elif isinstance(value, (bool, int, float, str)):
        actual = f"the {kind} {value!r}"
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        actual, note = f"a {kind}", f"Pass one of its tensors: .{', .'.join(value._fields)}"
    elif isinstance(value, (list, tuple)):
        actual = f"a {kind}"
        note = note or "Convert it to a tensor once: torch.tensor(..., device=...)"
    elif kind == "ndarray":
        actual, note = "a NumPy array", "Convert it to a tensor: torch.from_numpy(...)"
    else:
        actual = f"a {kind}"
    return TypeError(f"{name} must be a tensor; got {actual}{note and f'. {note}'}")


def check_disjoint(
    written: list[tuple[str, Tensor]], read: list[tuple[str, Tensor]], in_place: tuple[str, ...] = ()
) -> None:
    """Raise an error if a call writes memory that it also reads, or writes twice. An argument named in `in_place` may
    be the same tensor as an output."""
    for i, (name, out) in enumerate(written):
        for other, tensor in [*read, *written[i + 1 :]]:
            if not _share_memory(out, tensor):
                continue
            if not (other in in_place and same_elements(out, tensor)):
                raise ValueError(
                    f"{name} shares memory with {other}, which the call uses while it writes {name}: give {name} "
                    "its own memory"
                )


def check_distinct(name: str, out: Tensor) -> None:
    """Raise an error if elements of an output share memory."""
    if overlaps_itself(out):
        raise ValueError(f"elements of {name} share memory: pass a tensor that is not expanded")


def same_elements(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are the same memory, read in the same way."""
    if x is y:
        return True
    if torch.compiler.is_compiling() or (x.data_ptr(), x.dtype, x.numel()) != (
        y.data_ptr(),
        y.dtype,
        y.numel(),
    ):
        return False
    return (x.shape, x.stride()) == (y.shape, y.stride()) or (x.is_contiguous() and y.is_contiguous())


def _share_memory(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors overlap in memory; tensors without storage never do. A compiled call computes before
    it writes, so only identical tensors count."""
    if torch.compiler.is_compiling() or is_transformed():
        return x is y
    plain = PLAIN.issuperset((type(x), type(y))) and x.device.type != "meta"
    return plain and overlap(x, y)


def unexpected(function: Callable[..., Any], keywords: Iterable[str], name: str = "") -> TypeError:
    """Return the error for the first keyword that a function does not take. It names the function (or `name`), and the
    closest keyword, if one is near."""
    accepted = [
        p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD
    ]
    wrong = next(keyword for keyword in keywords if keyword not in accepted)
    near = difflib.get_close_matches(wrong, accepted, n=1)
    hint = f". Did you mean {near[0]!r}?" if near else f"; it takes {', '.join(accepted)}"
    return TypeError(f"{name or function.__name__}() got an unexpected keyword argument {wrong!r}{hint}")


def main_grad_of(weight: Tensor, given: Tensor | None = None) -> Tensor | None:
    """Return the tensor to which the gradient of a weight is added: `given`, or its attribute `main_grad`; or None."""
    main = getattr(weight, "main_grad", None) if given is None else given
    if main is not None:
        check_tensor("main_grad", main, dtypes_beside(weight.dtype), weight.device, tuple(weight.shape))
        if not main.is_contiguous():
            raise ValueError(f"main_grad must be contiguous; got strides {main.stride()}")
    return main


def check_out_dtype(out_dtype: torch.dtype | None) -> None:
    """Raise an error unless `out_dtype` is None or a dtype that a plain result can have."""
    if out_dtype is not None and out_dtype not in FLOATS:
        raise ValueError(
            f"out_dtype must be {_words(FLOATS)}, or None; got {out_dtype!r}. For codes use quantize=, or weft.quantize"
        )


def epsilon(eps: float | None, x: Tensor) -> float:
    """Return the eps of an RMSNorm of x; None means the machine epsilon of the dtype, as in `torch.nn.RMSNorm`."""
    return torch.finfo(compute_dtype(x)).eps if eps is None else nonnegative("eps", eps)


def nonnegative(name: str, value: float) -> float:
    """Return `value` as a float, checked to be finite and at least 0."""
    value = real(name, value)
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{name} must be at least 0 and finite; got {value}")
    return value


def real(name: str, value: float) -> float:
    """Return `value` as a float. Tensors are rejected, since reading one would wait for the device."""
    if type(value) is not float:
        if not isinstance(value, Real):
            raise TypeError(f"{name} must be a number; got {_kind(value)}")
        value = float(value)
    if value != value:
        raise ValueError(f"{name} must be a number; got {value}")
    return value


def whole(name: str, value: int, minimum: int | None = None) -> int:
    """Return `value`, checked to be an integer and at least `minimum`."""
    if type(value) is not int and not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an integer; got {_kind(value)}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} must be at least {minimum}; got {value}")
    return value


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return "a tensor. Pass a Python number, such as its .item()"
    if value is None:
        return "None"
    return f"the {type(value).__name__} {value!r}"


def _words(dtypes: tuple[torch.dtype, ...]) -> str:
    *some, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(some)} or {last}" if some else last

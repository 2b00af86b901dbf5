"""Packing of a launch's arguments into the kernel's C struct."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# Triton's name of a type -> its format in the `struct` module, its name in C++.
SCALARS = {
    "i1": ("?", "bool"),
    "u1": ("?", "bool"),
    "i8": ("b", "int8_t"),
    "u8": ("B", "uint8_t"),
    "i16": ("h", "int16_t"),
    "u16": ("H", "uint16_t"),
    "i32": ("i", "int32_t"),
    "u32": ("I", "uint32_t"),
    "i64": ("q", "int64_t"),
    "u64": ("Q", "uint64_t"),
    "fp16": ("e", "uint16_t"),
    "bf16": ("H", "uint16_t"),
    "fp32": ("f", "float"),
    "f32": ("f", "float"),
    "fp64": ("d", "double"),
    "f64": ("d", "double"),
}


def argument_packer(signature: dict[str, Any]) -> Callable[[tuple[Any, ...]], bytes]:
    """Return a function from a launch's arguments to the bytes of the kernel's `struct Args`.

    It is one expression compiled for the signature: `pack(address(args[0], 'x_ptr'), args[1])`.
    """
    members = list(fields(signature))
    layout = struct.Struct("@" + "".join(field.code for field in members))
    text = f"lambda args: pack({', '.join(field.expression for field in members)})"
    functions = {"address": address, "single": single, "brain": brain, "is_nan": is_nan}
    packer: Callable[[tuple[Any, ...]], bytes] = eval(text, {"pack": layout.pack, **functions})
    return packer


class Field(NamedTuple):
    """A member of `struct Args`: one argument of the kernel in TTIR."""

    name: str  # of the Python argument that it comes from
    code: str  # format in the `struct` module
    path: tuple[int | str, ...]  # path to its value in the launch's arguments
    convert: str = ""  # name of a function applied to the value

    @property
    def expression(self) -> str:
        value = "args" + "".join(f".{step}" if isinstance(step, str) else f"[{step}]" for step in self.path)
        if self.code == "P":
            return f"address({value}, {self.name!r})"
        return f"{self.convert}({value})" if self.convert else value


def fields(signature: dict[str, Any]) -> Iterator[Field]:
    """Yield the members of `struct Args` for a Triton signature: one or more per argument that is not constexpr."""
    for position, (name, kind) in enumerate(signature.items()):
        yield from _fields(kind, (position,), str(name))


def _fields(kind: Any, path: tuple[int | str, ...], name: str) -> Iterator[Field]:
    if isinstance(kind, tuple):
        labels = getattr(kind, "_fields", None)  # of a NamedTuple
        for position, inner in enumerate(kind):
            label = f".{labels[position]}" if labels else f"[{position}]"
            yield from _fields(inner, (*path, position), name + label)
    elif kind.startswith("*"):
        yield Field(name, "P", path)
    elif kind.startswith("tensordesc"):
        # The compiler turns a descriptor into base, shape, strides and two flags, and keeps the shape and
        # strides that the front end had added.
        shape, strides = (
            [(*path, attribute, d) for d in range(_descriptor_rank(kind))]
            for attribute in ("shape", "strides")
        )
        yield Field(name, "P", (*path, "base"))
        yield from (Field(name, "q", extent_path) for extent_path in shape + strides)
        yield Field(name, "?", (*path, "padding"), "is_nan")
        yield Field(name, "?", (*path, "round_f32_to_tf32"))
        yield from (Field(name, "i", extent) for extent in shape)
        yield from (Field(name, "q", stride) for stride in strides)
    elif kind != "constexpr":
        convert = {"fp32": "single", "f32": "single", "bf16": "brain"}.get(kind, "")
        yield Field(name, SCALARS[kind][0], path, convert)


def value_at(args: Any, path: tuple[int | str, ...]) -> Any:
    """Return the value at a path into nested arguments."""
    for step in path:
        args = getattr(args, step) if isinstance(step, str) else args[step]
    return args


def problem(signature: dict[str, Any], args: tuple[Any, ...]) -> str:
    """Return what is wrong with the arguments of a launch, or "" if nothing is known. Constants may be left out."""
    names = [str(name) for name in signature]
    missing = [name for name in names[len(args) :] if signature[name] != "constexpr"]
    if missing:
        needs = f"takes {len(names)} arguments ({', '.join(names)}), constants included, and {len(args)} were given"
        return f"the kernel {needs}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
    for name, argument in zip(names, args, strict=False):
        try:
            argument_packer({name: signature[name]})((argument,))
        except (TypeError, AttributeError, IndexError, struct.error) as error:
            value = argument if isinstance(argument, int | float | str) else type(argument).__name__
            return f"the kernel was compiled for {name}: {signature[name]}, which {value!r} is not ({error})"
    return ""


def _descriptor_rank(kind: str) -> int:
    if explicit := re.search(r"input_rank=(\d+)", kind):
        return int(explicit[1])
    block = re.search(r"\[([^]]*)\]", kind)
    assert block is not None, kind
    return block[1].count(",") + 1


def address(argument: Any, name: str) -> int:
    """Return the address of a pointer argument; raise `ValueError` for memory that the CPU can't reach."""
    try:
        if argument.is_cpu:
            return argument.data_ptr()  # type: ignore[no-any-return]
    except AttributeError:  # a plain address, or a tensor of `triton.reinterpret` or of another library
        if argument is None or isinstance(argument, int):
            return argument or 0
        if getattr(getattr(argument, "device", None), "type", "cpu") == "cpu":
            return argument.data_ptr()  # type: ignore[no-any-return]
    raise ValueError(
        f"argument {name!r} is a tensor on {argument.device}, but the kernel is launched on the CPU: pass a "
        "CPU tensor, or launch on that device (not in triton_loom.active() or TRITON_DEFAULT_BACKEND=cpu)"
    )


def single(value: float) -> float:
    """Round to float32; too large a value becomes infinite (`struct` would refuse it)."""
    return ctypes.c_float(value).value


def is_nan(padding: str) -> bool:
    """Return whether a descriptor pads with NaN."""
    return padding == "nan"


def brain(value: float) -> int:
    """Return the bits of a bfloat16, truncated rather than rounded, as the GPU drivers do."""
    return int.from_bytes(struct.pack("<f", single(value)), "little") >> 16

"""Variants of kernels: everything that determines a kernel's code apart from the target, and how to compile one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

# GPUs that every change is compiled for. The others of `capabilities.GPUS` are compiled on demand.
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")


@dataclass(frozen=True)
class Variant:
    """Everything that determines a kernel's code, apart from the target.

    `signature` has the type of every parameter by name, in order ("*bf16", "i32", "fp32", "constexpr"); the type of a
    struct is an instance of its NamedTuple that holds the types of its members. `constants` holds the value of each
    "constexpr" one, None for an absent pointer; a member of a struct is named like "x.ptr". The rest is what Triton
    would determine at launch: `aligned` means that every pointer is divisible by 16, `divisible` names integers that
    are, and `small` means that every tensor has less than 2 GiB, which lets the AMD compiler use buffer instructions
    where it could not prove that offsets fit (other compilers ignore it). `options` are further compiler options, such
    as ("enable_fp_fusion", False).
    """

    module: str
    kernel: str
    signature: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[str, object], ...]
    aligned: bool
    num_warps: int
    num_stages: int
    divisible: tuple[str, ...] = ()
    small: bool = False
    options: tuple[tuple[str, object], ...] = ()

    def leaves(self) -> Iterator[Leaf]:
        """Yield the pointers, numbers and constants of the signature, members of structs one by one."""
        for index, (name, kind) in enumerate(self.signature):
            yield from _leaves(name, kind, (index,))

    def types(self) -> dict[str, str]:
        """Return the type of each leaf by name."""
        return {leaf.name: leaf.kind for leaf in self.leaves()}

    def constants_by_path(self) -> dict[tuple[int, ...], object]:
        """Return the constants in the form that Triton's compiler takes."""
        paths = {leaf.name: leaf.path for leaf in self.leaves()}
        return {paths[name]: value for name, value in self.constants}


class Leaf(NamedTuple):
    """Pointer, number or constant in the signature of a variant, possibly inside structs."""

    name: str
    kind: str
    path: tuple[int, ...]  # position of its parameter, then its position in each enclosing struct


def _leaves(name: str, kind: Any, path: tuple[int, ...]) -> Iterator[Leaf]:
    if isinstance(kind, str):
        yield Leaf(name, kind, path)
        return
    for index, (member, inner) in enumerate(zip(kind._fields, kind, strict=True)):
        yield from _leaves(f"{name}.{member}", inner, (*path, index))


def build(kernel: Any, variant: Variant, target: Any, building: Callable[[], object] | None = None) -> Any:
    """Compile a variant of a JITFunction for Triton's target, for launches and inspections alike. `building` is called
    first if Triton's cache does not have the result."""
    import triton

    source = source_of(kernel, variant, target)
    if building is not None:
        make_ir = source.make_ir

        def announced_make_ir(*args: Any, **kwargs: Any) -> Any:
            building()
            return make_ir(*args, **kwargs)

        source.make_ir = announced_make_ir
    try:
        return triton.compile(source, target=target, options=options_of(variant))
    except OSError as error:
        cache, file = (Path(str(path)).absolute() for path in (triton.knobs.cache.dir, error.filename))
        if file not in (cache, *cache.parents) and cache not in file.parents:
            raise
        raise RuntimeError(
            f"Triton cannot write to its cache {cache}: {error.strerror}. Set TRITON_CACHE_DIR to a writable directory"
            f"; `weft doctor` checks it"
        ) from error


def build_variant(variant: Variant, target: Any) -> Any:
    """Compile a variant for Triton's target in this process, looking up its kernel by name."""
    return build(kernel_of(variant), variant, target)


def source_of(kernel: Any, variant: Variant, target: Any) -> Any:
    """Return the source that Triton's compiler and launchers take: the JITFunction and facts about its arguments."""
    from triton.compiler import ASTSource

    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for name, kind, path in variant.leaves():
        pointer = kind.startswith("*")
        facts = (
            [["tt.divisibility", 16]] if (pointer and variant.aligned) or name in variant.divisible else []
        )
        if pointer and variant.small and target.backend == "hip":
            facts.append(["tt.pointer_range", 32])
        if facts:
            attributes[path] = facts
    return ASTSource(
        fn=kernel, signature=dict(variant.signature), constexprs=variant.constants_by_path(), attrs=attributes
    )


def options_of(variant: Variant) -> dict[str, Any]:
    """Return the compiler options of a variant."""
    return {"num_warps": variant.num_warps, "num_stages": variant.num_stages, **dict(variant.options)}


def triton_target(target: str) -> Any:
    """Return Triton's own object for a target."""
    from triton.backends.compiler import GPUTarget

    if target == "cpu":
        import triton_loom

        with triton_loom.active():
            from triton.runtime import driver

            return driver.active.get_current_target()
    return (
        GPUTarget("cuda", int(target[3:]), 32) if target.startswith("sm_") else GPUTarget("hip", target, 64)
    )


def kernel_of(variant: Variant) -> Any:
    """Return the JITFunction of a variant."""
    from triton.runtime import JITFunction

    kernel = getattr(importlib.import_module(variant.module), variant.kernel)
    while not isinstance(kernel, JITFunction):  # autotuners and heuristics wrap it
        kernel = kernel.fn
    return kernel

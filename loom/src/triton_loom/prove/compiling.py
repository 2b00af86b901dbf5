"""TTIR of a kernel under a contract, as Triton would compile it for such a launch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter
from typing import Any, NamedTuple

from .contract import Bool, Buffer, Contract, ContractError, Symbol
from .solver import ask, z3

_POINTEES = {
    "f16": "fp16",
    "f32": "fp32",
    "f64": "fp64",
    "bf16": "bf16",
    "i1": "i1",
    **{f"{sign}{bits}": f"{sign}{bits}" for sign in "iu" for bits in (8, 16, 32, 64)},
    "f8E4M3FN": "fp8e4nv",
    "f8E5M2": "fp8e5",
    "f8E4M3FNUZ": "fp8e4b8",
    "f8E5M2FNUZ": "fp8e5b16",
}


def configured(
    kernel: Any, grid: Sequence[Any] | Callable[..., Sequence[Any]], args: Mapping[str, Any], **more: Any
) -> Iterator[tuple[Any, Contract]]:
    """Yield the contracts of a launch with their `@triton.jit` functions: one per configuration of an autotuner."""
    from triton.runtime import Autotuner, Heuristics

    if isinstance(kernel, Autotuner):
        choices = [config.kwargs for config in kernel.configs]
        allowed = [c for c in choices if all(args.get(name, value) == value for name, value in c.items())]
        if not allowed:
            raise ContractError(f"no configuration of {kernel.base_fn.__name__} has the given constants")
        for number, choice in enumerate(allowed):
            if choice not in allowed[:number]:  # configurations may differ only in launch options
                yield from configured(kernel.fn, grid, {**args, **choice}, **more)
        return
    if isinstance(kernel, Heuristics):
        yield from configured(kernel.fn, grid, {**args, **_evaluate_heuristics(kernel.values, args)}, **more)
        return
    constants = {p.name: args[p.name] for p in kernel.params if p.is_constexpr and p.name in args}
    for name, value in constants.items():
        if z3.is_expr(value):
            raise ContractError(
                f"{name} is a tl.constexpr of {kernel.fn.__name__}: give a number, not {value}"
            )
    arguments = {name: value for name, value in args.items() if name not in constants}
    axes = grid(dict(args)) if callable(grid) else grid
    yield kernel, Contract.of(grid=axes, arguments=arguments, constants=constants, **more)


def _evaluate_heuristics(
    heuristics: Mapping[str, Callable[..., Any]], args: Mapping[str, Any]
) -> dict[str, Any]:
    """Evaluate the heuristics of constants that `args` does not contain."""
    values: dict[str, Any] = {}
    for name, rule in heuristics.items():
        if name in args:
            continue
        try:
            value = rule({**args, **values})
        except Exception as error:
            raise ContractError(
                f"the heuristic of {name} fails for symbols ({error}): give {name} in args"
            ) from error
        if z3.is_expr(value):
            raise ContractError(f"the heuristic of {name} depends on sizes: give {name} in args")
        values[name] = value
    return values


class Compiled(NamedTuple):
    """Kernel variant that Triton compiles for the launches of a contract."""

    ttir: str
    contract: Contract
    with_descriptors: str = ""  # the TTIR before descriptors become pointers; empty if the kernel makes none
    launch: tuple[Any, Contract] | None = (
        None  # the `@triton.jit` function, and its arguments as a caller passes them
    )


def variants(kernel: Any, contract: Contract) -> Iterator[Compiled]:
    """Yield every kernel that Triton compiles for the launches of a contract.

    Integers that fit 32 bits select another specialization than those that do not.
    """
    annotated = {p.name: p.annotation_type for p in kernel.params if p.annotation_type}
    for name, value in contract.arguments.items():
        if name not in {p.name for p in kernel.params}:
            raise ContractError(f"{kernel.fn.__name__} has no parameter {name}, which the contract mentions")
        if name in annotated and z3.is_expr(value) and z3.is_int(value):
            _check_annotation(contract, name, value, annotated[name])
        elif z3.is_expr(value) and z3.is_int(value) and isinstance(value, z3.ArithRef):
            narrow = z3.And(value >= -(2**31), value < 2**31)
            if not _is_within(contract, value, -(2**31), 2**31 - 1) and not _implied(
                contract, z3.Not(narrow)
            ):
                for case in (narrow, z3.Not(narrow)):
                    yield from variants(kernel, replace(contract, assumptions=(*contract.assumptions, case)))
                return
        elif value is not None and not isinstance(value, Buffer | int | float | z3.BoolRef):
            raise ContractError(
                f"the argument {name} is a {type(value).__name__}: give a Buffer, a number or None"
            )
    yield _compiled(kernel, contract)


def _check_annotation(contract: Contract, name: str, value: Any, kind: str) -> None:
    """Raise ContractError if the annotated type of a parameter cannot hold all values."""
    if kind[0] not in "iu" or kind == "u1":
        return
    bits = int(kind[1:])
    low, high = (0, 2**bits - 1) if kind[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    if not _is_within(contract, value, low, high):
        raise ContractError(
            f"{name} is annotated as {kind}, which holds {low} to {high}; the contract allows other values"
        )


def _compiled(kernel: Any, contract: Contract) -> Compiled:
    """Compile one kernel. Arguments annotated as unsigned become TTIR's signed integers with the same bits."""
    ttir, with_descriptors = _texts(kernel, contract)
    arguments = dict(contract.arguments)
    for parameter in kernel.params:
        kind, value = parameter.annotation_type, arguments.get(parameter.name)
        if kind[:1] == "u" and kind != "u1" and z3.is_expr(value):
            top = 2 ** (int(kind[1:]) - 1)
            if not _implied(contract, value < top):
                arguments[parameter.name] = z3.If(value >= top, value - 2 * top, value)
    return Compiled(ttir, replace(contract, arguments=arguments), with_descriptors, (kernel, contract))


def _is_within(contract: Contract, value: Any, low: int, high: int) -> bool:
    """Return whether the contract keeps an integer between two numbers, inclusive."""
    if isinstance(value, Symbol) and low <= value.low and value.high <= high:
        return True
    return _implied(contract, z3.And(value >= low, value <= high))


def _implied(contract: Contract, goal: Bool) -> bool:
    return ask(contract.facts, goal).verdict == "proven"


def ttir_of(kernel: Any, contract: Contract) -> str:
    """Compile a `@triton.jit` function to TTIR by Triton's own passes. Arguments keep the names of its parameters."""
    return _texts(kernel, contract)[0]


def _texts(kernel: Any, contract: Contract) -> tuple[str, str]:
    """Return the TTIR of a kernel, and the TTIR before its descriptors become pointers (empty if it makes none)."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ..compiler import LoomBackend, make_ttir

    signature, constants, attrs = _signature(kernel, contract)
    names = [name for name, kind in signature.items() if kind != "constexpr"]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    target = GPUTarget("cpu", "native", 1)
    backend = LoomBackend(target)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    implementation = backend.get_codegen_implementation(options)

    def module() -> Any:
        return source.make_ir(target, options, implementation, backend.get_module_map(), context)

    def text(module: Any, *without: str) -> str:
        return renamed(str(make_ttir(module, {}, without=without).str()), names)

    ir_module = module()
    makes_descriptors = "tt.make_tensor_descriptor" in str(ir_module)
    ttir = text(ir_module)
    return ttir, text(module(), "rewrite_tensor_descriptor_to_pointer") if makes_descriptors else ""


def renamed(ttir: str, names: Sequence[str]) -> str:
    """Give the arguments of a kernel these names, in order.

    TTIR prints an argument under the Python variable that last held it: after `n, m = m, n` two names are swapped.
    """
    header = re.search(r"tt\.func public @[\w$.-]+\((.*)\) (?:attributes )?\{", ttir)
    printed = re.findall(r"(%[\w$.-]+): ", header[1]) if header is not None else []
    if len(printed) != len(names):
        raise ContractError(f"the kernel has {len(printed)} arguments in TTIR, and {len(names)} names")
    new_names = {old: f"%{name}" for old, name in zip(printed, names, strict=True)}
    others = set(re.findall(r"%[\w$.-]+", ttir)) - set(printed)
    new_names |= {other: f"{other}$other" for other in others & set(new_names.values())}
    return re.sub(r"%[\w$.-]+", lambda match: new_names.get(match[0], match[0]), ttir)


def _signature(
    kernel: Any, contract: Contract
) -> tuple[dict[str, str], dict[tuple[int, ...], Any], dict[Any, Any]]:
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attrs: dict[Any, Any] = {}
    for number, parameter in enumerate(kernel.params):
        name = parameter.name
        value = contract.constants.get(name, contract.arguments.get(name, parameter.default))
        if value is Parameter.empty:
            raise ContractError(
                f"{kernel.fn.__name__} has a parameter {name}, which the contract does not mention"
            )
        kind, divisible = _type_of(contract, name, value)
        if parameter.is_constexpr or name in contract.constants or value is None:
            kind, divisible = "constexpr", False
        elif parameter.annotation_type:
            kind = parameter.annotation_type
        elif type(value) is int and value == 1 and not parameter.do_not_specialize:
            kind = "constexpr"
        if kind == "constexpr":
            constants[(number,)] = value
        elif divisible:
            attrs[(number,)] = [["tt.divisibility", 16]]
        signature[name] = kind
    return signature, constants, attrs


def _type_of(contract: Contract, name: str, value: Any) -> tuple[str, bool]:
    """Return Triton's name for the type of an argument, and whether Triton specializes it as divisible by 16."""
    if isinstance(value, Buffer):
        return f"*{_POINTEES[value.element]}", value.align % 16 == 0
    if isinstance(value, bool | z3.BoolRef):
        return "u1", False
    if isinstance(value, float):
        return "fp32", False
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64", value % 16 == 0
    if isinstance(value, Symbol | z3.ArithRef):
        return "i32" if _is_within(contract, value, -(2**31), 2**31 - 1) else "i64", False
    return "constexpr", False

"""The TTIR of a kernel under a contract, as Triton would compile it for such a launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .contract import Bool, Buffer, Contract, ContractError, Symbol
from .scope import integer
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


def variants(kernel: Any, contract: Contract) -> Iterator[tuple[str, Contract]]:
    """(TTIR, contract) of every kernel that Triton compiles for the launches of a contract: for integers that fit 32
    bits it makes another one than for those that do not."""
    for name, value in contract.arguments.items():
        if z3.is_expr(value) and z3.is_int(value) and isinstance(value, z3.ArithRef):
            narrow = z3.And(value >= -(2**31), value < 2**31)
            if not _implied(contract, narrow) and not _implied(contract, z3.Not(narrow)):
                for case in (narrow, z3.Not(narrow)):
                    yield from variants(kernel, replace(contract, assumptions=(*contract.assumptions, case)))
                return
        elif value is not None and not isinstance(value, Buffer | int | float | z3.BoolRef):
            raise ContractError(
                f"the argument {name} is a {type(value).__name__}: give a Buffer, a number or None"
            )
    yield ttir_of(kernel, contract), contract


def _implied(contract: Contract, goal: Bool) -> bool:
    return ask(contract.facts, goal).verdict == "proven"


def ttir_of(kernel: Any, contract: Contract) -> str:
    """The text of a `@triton.jit` function after Triton's own passes."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ..compiler import LoomBackend, make_ttir

    signature, constants, attrs = _signature(kernel, contract)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    target = GPUTarget("cpu", "native", 1)
    backend = LoomBackend(target)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    implementation = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, implementation, backend.get_module_map(), context)
    return str(make_ttir(module, {}).str())


def _signature(
    kernel: Any, contract: Contract
) -> tuple[dict[str, str], dict[tuple[int, ...], Any], dict[Any, Any]]:
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attrs: dict[Any, Any] = {}
    for number, parameter in enumerate(kernel.params):
        name = parameter.name
        value = contract.constants.get(name, contract.arguments.get(name, parameter.default))
        if value is parameter.empty if hasattr(parameter, "empty") else False:
            raise ContractError(
                f"{kernel.fn.__name__} has a parameter {name}, which the contract does not mention"
            )
        kind, divisible = _type_of(contract, name, value)
        if parameter.is_constexpr or name in contract.constants or value is None:
            kind, divisible = "constexpr", False
        elif (
            isinstance(value, int)
            and not isinstance(value, bool)
            and value == 1
            and not parameter.do_not_specialize
        ):
            kind = "constexpr"
        if kind == "constexpr":
            constants[(number,)] = value
        elif divisible:
            attrs[(number,)] = [["tt.divisibility", 16]]
        signature[name] = kind
    return signature, constants, attrs


def _type_of(contract: Contract, name: str, value: Any) -> tuple[str, bool]:
    """How Triton names the type of an argument, and whether it takes it for divisible by 16."""
    if isinstance(value, Buffer):
        if value.element not in _POINTEES:
            raise ContractError(f"{name} has elements of {value.element}; known are {', '.join(_POINTEES)}")
        return f"*{_POINTEES[value.element]}", value.align % 16 == 0
    if isinstance(value, bool | z3.BoolRef):
        return "u1", False
    if isinstance(value, float):
        return "fp32", False
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64", value % 16 == 0
    if isinstance(value, Symbol | z3.ArithRef):
        narrow = z3.And(integer(value) >= -(2**31), integer(value) < 2**31)
        return "i32" if _implied(contract, narrow) else "i64", False
    return "constexpr", False

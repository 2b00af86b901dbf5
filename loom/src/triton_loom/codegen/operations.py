"""Table of the supported TTIR operations: elementwise ones as C++ expressions, the others by how they are scheduled.

This table is the single list of what Loom supports; the support table of docs/reference.md is printed from it
(`python -m triton_loom.codegen.operations`). An elementwise entry works on scalars and on vectors of W lanes
alike, because the functions of include/*.h do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..ir.ttir import Op, Pointer, Scalar, element_of
from .cpp import FORMATS, Lanes, c_type, literal, narrow, vector_of, widen


class Unsupported(NotImplementedError):
    """Error for an operation that Loom can't run: the message names it and the line of Python that it came from."""

    def __init__(self, op: Op, why: str = "") -> None:
        where = f" at {op.location}" if op.location else ""
        super().__init__(f"triton-loom can't run {op.name}{where}" + (f": {why}" if why else ""))


# ---- elementwise operations --------------------------------------------------------------------------


@dataclass(frozen=True)
class Elementwise:
    """An elementwise operation: `cost` in units of one vector add; `write` returns the C++ expression."""

    cost: float
    write: Callable[[Op, list[str], Lanes], str]


def _scalar(op: Op) -> Scalar:
    element = element_of(op.operands[0].type)
    if not isinstance(element, Scalar):
        raise Unsupported(op, f"on {element}")
    return element


def _float(template: str, cost: float = 1) -> Elementwise:
    """Return float arithmetic: f32 and f64 natively, 16-bit types through f32 with one rounding at the end."""

    def write(op: Op, args: list[str], lanes: Lanes) -> str:
        name = _scalar(op).name
        return narrow(name, template.format(*(widen(name, a) for a in args)))

    return Elementwise(cost, write)


def _fma(op: Op, args: list[str], lanes: Lanes) -> str:
    name = _scalar(op).name
    if name not in FORMATS:
        return f"loom_math::fma({', '.join(args)})"
    wide = [f"convert<{vector_of('f64', lanes)}>({widen(name, a)})" for a in args]
    return narrow(name, f"f32_odd_from_f64(loom_math::fma_to_odd({', '.join(wide)}))")


def _integer(template: str, cost: float = 1, mask: str | None = None) -> Elementwise:
    """Return integer arithmetic; `mask` is the operation's meaning on i1, where that differs."""

    def write(op: Op, args: list[str], lanes: Lanes) -> str:
        if _scalar(op).name == "i1":
            if mask is None:
                raise Unsupported(op, "on i1")
            text = mask.format(*args)
            return f"bool({text})" if lanes == 1 else text
        text = template.format(*args)
        # C++ promotes narrow scalars to int: convert back to the type
        return f"{c_type(_scalar(op))}({text})" if lanes == 1 and _scalar(op).bits < 32 else text

    return Elementwise(cost, write)


def _unsigned(template: str, cost: float = 1, mask: str | None = None) -> Elementwise:
    def write(op: Op, args: list[str], lanes: Lanes) -> str:
        if _scalar(op).name == "i1":
            if mask is None:
                raise Unsupported(op, "on i1")
            return mask.format(*args)
        signed, unsigned = c_type(_scalar(op), lanes), vector_of(f"u{_scalar(op).bits}", lanes)
        return f"({signed})({template.format(*(f'({unsigned}){a}' for a in args))})"

    return Elementwise(cost, write)


_CMPI = {"eq": "==", "ne": "!=", "slt": "<", "sle": "<=", "sgt": ">", "sge": ">="}
_CMPI_UNSIGNED = {"ult": "<", "ule": "<=", "ugt": ">", "uge": ">="}
_CMPF = {
    "oeq": "mask({0} == {1})",
    "ogt": "mask({0} > {1})",
    "oge": "mask({0} >= {1})",
    "olt": "mask({0} < {1})",
    "ole": "mask({0} <= {1})",
    "one": "mask(({0} < {1}) | ({0} > {1}))",
    "ord": "mask(({0} == {0}) & ({1} == {1}))",
    "ueq": "invert(mask(({0} < {1}) | ({0} > {1})))",
    "ugt": "invert(mask({0} <= {1}))",
    "uge": "invert(mask({0} < {1}))",
    "ult": "invert(mask({0} >= {1}))",
    "ule": "invert(mask({0} > {1}))",
    "une": "mask({0} != {1})",
    "uno": "mask(({0} != {0}) | ({1} != {1}))",
}


def predicate(op: Op) -> str:
    """Return the predicate of a comparison: `slt`, `oeq`, ..."""
    return str(op.attrs["flags"][0])


def _cmpi(op: Op, args: list[str], lanes: Lanes) -> str:
    element = element_of(op.operands[0].type)
    if predicate(op) in _CMPI_UNSIGNED or (isinstance(element, Pointer) and lanes == 1):
        unsigned = "u64" if isinstance(element, Pointer) else f"u{max(element.bits, 8)}"
        if isinstance(element, Scalar) and element.name == "i1":
            unsigned = "u8" if lanes == 1 else "u32"
        args = [f"({vector_of(unsigned, lanes)}){a}" for a in args]
        sign = _CMPI_UNSIGNED.get(predicate(op)) or _CMPI[predicate(op)]
    else:
        sign = _CMPI[predicate(op)]
        if isinstance(element, Scalar) and element.name == "i1" and lanes == 1 and sign not in ("==", "!="):
            args = [f"-(i32){a}" for a in args]
    return _compare(f"mask({{0}} {sign} {{1}})", element.bits, args, lanes)


def _cmpf(op: Op, args: list[str], lanes: Lanes) -> str:
    element = _scalar(op)
    return _compare(_CMPF[predicate(op)], element.bits, [widen(element.name, a) for a in args], lanes)


def _compare(template: str, bits: int, args: list[str], lanes: Lanes) -> str:
    """Return the comparison, of 64-bit lanes one register at a time: GCC 12 splits wider ones lane by lane."""
    if bits < 64 or lanes == 1:
        return template.format(*args)
    lambda_ = f"[](auto a, auto b) LOOM_LAMBDA {{ return {template.format('a', 'b')}; }}"
    return f"by_registers<i64>({lambda_}, {', '.join(args)})"


def _select(op: Op, args: list[str], lanes: Lanes) -> str:
    return f"select({args[0]}, {args[1]}, {args[2]})"


def _resize(op: Op, args: list[str], lanes: Lanes) -> str:
    """Return sign extension, zero extension or truncation of integers, masks included."""
    source, target = _scalar(op), element_of(op.result.type)
    assert isinstance(target, Scalar)
    to = c_type(target, lanes)
    if target.name == "i1":
        return f"mask(({args[0]} & {literal(source, 1) if lanes == 1 else '1'}) != 0)"
    if source.name == "i1":
        if lanes == 1:
            return f"{to}({'-' if op.name == 'arith.extsi' else ''}(i32){args[0]})"
        return f"convert<{to}>({args[0]})" if op.name == "arith.extsi" else f"convert<{to}>({args[0]} & 1)"
    if op.name == "arith.extui":
        unsigned = vector_of(f"u{source.bits}", lanes)
        return f"convert<{to}>(({unsigned}){args[0]})"
    return f"convert<{to}>({args[0]})"


def _float_cast(op: Op, args: list[str], lanes: Lanes) -> str:
    """Return extf, truncf or tt.fp_to_fp between any two float types: one correct rounding."""
    source, target = _scalar(op), element_of(op.result.type)
    assert isinstance(target, Scalar)
    toward_zero = op.attrs.get("rounding") == "rtz"
    if source.name == target.name:
        return args[0]
    if target.name == "f64":
        return f"convert<{vector_of('f64', lanes)}>({widen(source.name, args[0])})"
    if source.name == "f64":
        if target.name == "f32":
            to = vector_of("f32", lanes)
            return f"f32_from_f64_rtz({args[0]})" if toward_zero else f"convert<{to}>({args[0]})"
        args = [f"f32_odd_from_f64({args[0]})"]
    wide = widen(source.name, args[0])
    if target.name == "f32":
        return wide
    return f"{FORMATS[target.name]}_from_f32{'_rtz' if toward_zero else ''}({wide})"


def _int_to_float(signed: bool) -> Callable[[Op, list[str], Lanes], str]:
    def write(op: Op, args: list[str], lanes: Lanes) -> str:
        source, target = _scalar(op), element_of(op.result.type)
        assert isinstance(target, Scalar)
        text = args[0]
        if source.name == "i1":
            text = (
                f"{'-' if signed else ''}(i32){text}" if lanes == 1 else text if signed else f"({text} & 1)"
            )
        elif not signed:
            text = f"({vector_of(f'u{source.bits}', lanes)}){text}"
        if target.name in FORMATS:  # through f64 and f32 rounded to odd: one rounding overall
            exact = f"convert<{vector_of('f64', lanes)}>({text})"
            wide = f"f64_odd_from_i64({text})" if source.bits == 64 else exact
            return narrow(target.name, f"f32_odd_from_f64({wide})")
        return f"convert<{c_type(target, lanes)}>({text})"

    return write


def _float_to_int(signed: bool) -> Callable[[Op, list[str], Lanes], str]:
    """Truncate toward zero like PTX's cvt: saturate to 16, 32 or 64 bits, then keep the low 8 if the target has 8."""

    def write(op: Op, args: list[str], lanes: Lanes) -> str:
        source, target = _scalar(op), element_of(op.result.type)
        assert isinstance(target, Scalar)
        kind = "f64" if source.name == "f64" else "f32"
        wide = f"{'i' if signed else 'u'}{max(target.bits, 16)}"
        text = f"{wide}_from_{kind}({widen(source.name, args[0])})"
        if target.name == "i1":
            return f"mask({text} != 0)"
        return f"convert<{c_type(target, lanes)}>({text})"

    return write


def _bitcast(op: Op, args: list[str], lanes: Lanes) -> str:
    source, target = element_of(op.operands[0].type), element_of(op.result.type)
    to = c_type(target, lanes)
    if isinstance(source, Pointer) or isinstance(target, Pointer):
        return f"({to}){args[0]}"
    if source.name == "i1" or target.name == "i1":
        if lanes == 1:
            return f"{to}({args[0]})"
        return (
            args[0]
            if source == target
            else (f"convert<{to}>({args[0]} & 1)" if source.name == "i1" else f"mask(({args[0]} & 1) != 0)")
        )
    return f"bits<{to}>({args[0]})"


def _clampf(op: Op, args: list[str], lanes: Lanes) -> str:
    name = _scalar(op).name
    x, low, high = (widen(name, a) for a in args)
    kind = ("minimum", "maximum") if op.attrs.get("propagateNan") == "all" else ("minnum", "maxnum")
    return narrow(name, f"loom_math::{kind[0]}(loom_math::{kind[1]}({x}, {low}), {high})")


def _mulhi(op: Op, args: list[str], lanes: Lanes) -> str:
    bits = _scalar(op).bits
    unsigned = vector_of(f"u{bits}", lanes)
    return f"({c_type(_scalar(op), lanes)})mulhi_u{bits}(({unsigned}){args[0]}, ({unsigned}){args[1]})"


def _extern(op: Op, args: list[str], lanes: Lanes) -> str:
    symbol = str(op.attrs.get("symbol", ""))
    if not symbol.startswith("loom_math::"):
        raise Unsupported(op, f"function {symbol!r} of {op.attrs.get('libname') or 'an unnamed library'}")
    text = f"{symbol}({', '.join(args)})"
    target = element_of(op.result.type)
    return f"mask({text} != 0)" if isinstance(target, Scalar) and target.name == "i1" else text


def _pointer_cast(op: Op, args: list[str], lanes: Lanes) -> str:
    return f"({c_type(element_of(op.result.type), lanes)}){args[0]}"


ELEMENTWISE: dict[str, Elementwise] = {
    "arith.addf": _float("{0} + {1}"),
    "arith.subf": _float("{0} - {1}"),
    "arith.mulf": _float("{0} * {1}"),
    "arith.divf": _float("{0} / {1}", 8),
    "arith.remf": _float("loom_math::fmod({0}, {1})", 40),
    "arith.negf": _float("-{0}"),
    "arith.maxnumf": _float("loom_math::maxnum({0}, {1})"),
    "arith.minnumf": _float("loom_math::minnum({0}, {1})"),
    "arith.maximumf": _float("loom_math::maximum({0}, {1})", 2),
    "arith.minimumf": _float("loom_math::minimum({0}, {1})", 2),
    "arith.addi": _integer("{0} + {1}", mask="{0} ^ {1}"),
    "arith.subi": _integer("{0} - {1}", mask="{0} ^ {1}"),
    "arith.muli": _integer("{0} * {1}", 2, mask="{0} & {1}"),
    "arith.andi": _integer("{0} & {1}", mask="{0} & {1}"),
    "arith.ori": _integer("{0} | {1}", mask="{0} | {1}"),
    "arith.xori": _integer("{0} ^ {1}", mask="{0} ^ {1}"),
    "arith.divsi": _integer("divs({0}, {1})", 20),
    "arith.remsi": _integer("rems({0}, {1})", 20),
    "arith.divui": _unsigned("divu({0}, {1})", 20),
    "arith.remui": _unsigned("remu({0}, {1})", 20),
    "arith.shli": _integer("shl({0}, {1})"),
    "arith.shrsi": _integer("sar({0}, {1})"),
    "arith.shrui": _unsigned("shr({0}, {1})"),
    "arith.maxsi": _integer("greater({0}, {1})", mask="{0} & {1}"),
    "arith.minsi": _integer("lesser({0}, {1})", mask="{0} | {1}"),
    "arith.maxui": _unsigned("greater({0}, {1})", mask="{0} | {1}"),
    "arith.minui": _unsigned("lesser({0}, {1})", mask="{0} & {1}"),
    "arith.cmpi": Elementwise(1, _cmpi),
    "arith.cmpf": Elementwise(1, _cmpf),
    "arith.select": Elementwise(1, _select),
    "arith.extsi": Elementwise(1, _resize),
    "arith.extui": Elementwise(1, _resize),
    "arith.trunci": Elementwise(1, _resize),
    "arith.index_cast": Elementwise(1, _resize),
    "arith.extf": Elementwise(1, _float_cast),
    "arith.truncf": Elementwise(4, _float_cast),
    "tt.fp_to_fp": Elementwise(12, _float_cast),
    "arith.sitofp": Elementwise(1, _int_to_float(True)),
    "arith.uitofp": Elementwise(1, _int_to_float(False)),
    "arith.fptosi": Elementwise(2, _float_to_int(True)),
    "arith.fptoui": Elementwise(2, _float_to_int(False)),
    "arith.bitcast": Elementwise(0, _bitcast),
    "tt.bitcast": Elementwise(0, _bitcast),
    "tt.int_to_ptr": Elementwise(0, _pointer_cast),
    "tt.ptr_to_int": Elementwise(0, _pointer_cast),
    "tt.clampf": Elementwise(2, _clampf),
    "tt.mulhiui": Elementwise(4, _mulhi),
    "tt.precise_divf": _float("{0} / {1}", 8),
    "tt.precise_sqrt": _float("loom_math::sqrt({0})", 10),
    "tt.extern_elementwise": Elementwise(40, _extern),
    "math.fma": Elementwise(1, _fma),
    "math.absf": _float("loom_math::abs({0})"),
    "math.absi": _integer("loom_math::abs({0})"),
    "math.sqrt": _float("loom_math::sqrt({0})", 10),
    "math.rsqrt": _float("loom_math::rsqrt({0})", 18),
    "math.floor": _float("loom_math::floor({0})"),
    "math.ceil": _float("loom_math::ceil({0})"),
    "math.copysign": _float("loom_math::copysign({0}, {1})"),
    "math.powf": _float("loom_math::pow({0}, {1})", 60),
} | {
    f"math.{name}": _float(f"loom_math::{name}({{0}})", 20)
    for name in [
        "exp",
        "exp2",
        "log",
        "log2",
        "log10",
        "log1p",
        "expm1",
        "sin",
        "cos",
        "tan",
        "tanh",
        "erf",
        "sinh",
        "cosh",
        "asin",
        "acos",
        "atan",
        "cbrt",
    ]
}

# ---- the rest, by how the scheduler treats them -------------------------------------------------------

# Values that are index calculations: evaluated where they are needed, never stored.
SHAPES = {
    "tt.splat": "one scalar for all lanes",
    "tt.unsplat": "the one element, as a scalar",
    "tt.make_range": "a loop counter",
    "tt.expand_dims": "another index into the operand",
    "tt.broadcast": "another index into the operand",
    "tt.reshape": "another index into the operand",
    "tt.trans": "another index into the operand",
    "tt.split": "another index into the operand",
    "tt.gather": "indexed read of a stored tile",
    "tt.addptr": "address arithmetic, never stored",
    "arith.constant": "literal",
    "ub.poison": "literal",
}
# Each runs its own loop nest in place, and its result is stored.
ROOTS = {
    "tt.reduce": "lane-wise accumulators, then a fixed tree",
    "tt.scan": "sequential along the axis",
    "tt.dot": "a register-blocked micro-kernel, each sum in the order of K",
    "tt.dot_scaled": "operands dequantized to fp32, then as tt.dot",
    "loom.bitonic": "what `tl.sort` and `tl.topk` are made of, recognized: compare-and-swaps in place",
    "tt.histogram": "a counting loop",
    "tt.join": "stored interleaved",
    "tt.cat": "stored one after the other",
    "tt.atomic_rmw": "an atomic instruction per element",
    "tt.atomic_cas": "an atomic instruction per element",
    "tt.map_elementwise": "a C++ function per element",
    "tt.elementwise_inline_asm": "the PTX of a [table](assembly.md), by element",
}
EFFECTS = {
    "tt.load": "contiguous, strided, gathered or scalar; mask and other",
    "tt.store": "contiguous, strided, scattered or scalar; mask",
    "tt.print": "a line per element on stdout",
    "tt.assert": "raises `DeviceAssertion` after the launch",
}
CONTROL = {
    "scf.for": "C++ control flow",
    "scf.while": "C++ control flow",
    "scf.if": "C++ control flow",
    "scf.yield": "C++ control flow",
    "scf.condition": "C++ control flow",
    "cf.br": "C++ control flow",
    "cf.cond_br": "C++ control flow",
    "tt.call": "C++ control flow",
    "tt.return": "C++ control flow",
    "tt.get_program_id": "given by the launcher",
    "tt.get_num_programs": "given by the launcher",
}
# Hints, and synchronization inside one program, which on a CPU is one thread.
IGNORED = {
    "llvm.intr.assume",
    "gpu.barrier",
    "ttg.barrier",
    "ttg.local_barrier",
    "tt.grid_dependency_wait",
    "tt.grid_dependency_launch_dependents",
}


def support_table() -> str:
    """Return the Markdown table of supported operations by how they run."""
    groups: dict[str, list[str]] = {"elementwise, fused into whatever consumes it": sorted(ELEMENTWISE)}
    for table in (SHAPES, EFFECTS, ROOTS, CONTROL):
        for name, how in table.items():
            groups.setdefault(how, []).append(name)
    groups["nothing to do on a CPU"] = sorted(IGNORED)
    rows = [("how it runs", "operations"), ("---", "---")]
    rows += [(how, " ".join(f"`{name}`" for name in names)) for how, names in groups.items()]
    return "\n".join(f"| {how} | {names} |" for how, names in rows)


if __name__ == "__main__":
    print(support_table())

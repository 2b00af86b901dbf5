"""libdevice on the CPU: CUDA's functions with CUDA's types, each of them there in C++ and the right one."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
import triton_loom
from triton.language import core
from triton.language.extra import libdevice as interface
from triton.language.extra.cuda import libdevice as cuda
from triton_loom import libdevice, toolchain

pytestmark = pytest.mark.compat

NAMES = [name for name, value in vars(interface).items() if callable(value)]
DIRECTED = ("rz", "rd", "ru")
ARITHMETIC = ("add", "sub", "mul", "div", "fma", "rcp", "sqrt")
ROUNDING = ("double2float", "int2float", "uint2float", "ll2float", "ull2float", "ll2double", "ull2double")
MISSING = {"rcp64h", *(f"{name}_{mode}" for name in ARITHMETIC + ROUNDING for mode in DIRECTED)}


def test_what_is_missing() -> None:
    assert {name for name in NAMES if name not in libdevice.SYMBOLS} == MISSING


class Result:
    """Stands for what `extern_elementwise` returns: remembers the table, and a conversion that follows."""

    def __init__(self, table: dict[tuple[Any, ...], tuple[str, Any]]) -> None:
        self.types = {types: result for types, (_, result) in table.items()}

    def to(self, dtype: Any, _semantic: Any) -> Result:
        self.types = dict.fromkeys(self.types, dtype)
        return self


@pytest.mark.parametrize("name", sorted(set(NAMES) & set(vars(cuda)) - MISSING))
def test_types_are_cudas(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "extern_elementwise", lambda _, __, args, table, **options: Result(table))
    arity = getattr(interface, name).__code__.co_argcount
    theirs = getattr(cuda, name)(*[None] * arity, _semantic=object())
    assert Result(libdevice.SYMBOLS[name]).types == theirs.types


# ---- values ----------------------------------------------------------------------------------------------

# A dtype of the table: the C++ type that generated code carries it in, torch's type.
CARRIED = {
    "int1": ("i32", torch.int32),
    "int32": ("i32", torch.int32),
    "int64": ("i64", torch.int64),
    "uint32": ("i32", torch.int32),
    "uint64": ("i64", torch.int64),
    "fp32": ("f32", torch.float32),
    "fp64": ("f64", torch.float64),
}
LANES = 8


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    """All functions, each over one vector of 8 lanes and then over 8 scalars."""
    lines = ['#include "math.h"']
    for name, table in libdevice.SYMBOLS.items():
        for types, (symbol, result) in table.items():
            kinds, out = [CARRIED[kind.name][0] for kind in types], CARRIED[result.name][0]
            parameters = "".join(f"const {kind} *a{i}, " for i, kind in enumerate(kinds))
            vectors = ", ".join(f"load<vec<{kind}, {LANES}>>(a{i})" for i, kind in enumerate(kinds))
            scalars = ", ".join(f"a{i}[lane]" for i in range(len(kinds)))
            lines.append(f"""
                extern "C" __attribute__((visibility("default")))
                void {"_".join(map(str, (name, *types)))}({parameters}{out} *out) {{
                  store<vec<{out}, {LANES}>>(out, {symbol}({vectors}));
                  for (int lane = {LANES}; lane < {2 * LANES}; ++lane) out[lane] = {symbol}({scalars});
                }}""")
    return toolchain.load(toolchain.build("\n".join(lines)), "libdevice")


def evaluate(library: ctypes.CDLL, name: str, types: tuple[Any, ...], *args: torch.Tensor) -> torch.Tensor:
    """The function on 8 values, computed both ways."""
    out = torch.empty(2 * LANES, dtype=CARRIED[libdevice.SYMBOLS[name][types][1].name][1])
    twice = [arg.to(CARRIED[kind.name][1]).repeat(2) for arg, kind in zip(args, types, strict=True)]
    function = getattr(library, "_".join(map(str, (name, *types))))
    function(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in [*twice, out]))
    assert torch.equal(out[:LANES].nan_to_num(), out[LANES:].nan_to_num()), "vector and scalar disagree"
    return out[:LANES]


def anything() -> torch.Tensor:
    return torch.randn(LANES, dtype=torch.float64) * 1.5


def positive() -> torch.Tensor:
    return anything().abs() + 0.5


def within_one() -> torch.Tensor:
    return anything().tanh() * 0.9


def integers() -> torch.Tensor:
    return torch.tensor([0, 1, -1, 5, -7, 2**31 - 1, -(2**31), 0x12345678])


def of(inputs: Callable[[], torch.Tensor], *names: str) -> dict[str, tuple[Any, ...]]:
    """Functions that torch has by the same name."""
    return {name: (getattr(torch, name), inputs) for name in names}


special = torch.special
FLOATS: dict[str, tuple[Any, ...]] = {
    **of(anything, "abs", "floor", "ceil", "trunc", "exp", "exp2", "expm1", "erf", "erfc", "lgamma"),
    **of(anything, "sin", "cos", "tan", "atan", "sinh", "cosh", "tanh", "asinh"),
    **of(positive, "sqrt", "rsqrt", "log", "log2", "log10", "log1p"),
    **of(within_one, "asin", "acos", "atanh", "erfinv"),
    "acosh": (torch.acosh, lambda: positive() + 1),
    "rint": (torch.round, anything),
    "nearbyint": (torch.round, anything),
    "round": (lambda x: (x.abs() + 0.5).floor() * x.sign(), anything),
    "cbrt": (lambda x: x.sign() * x.abs() ** (1 / 3), anything),
    "rcbrt": (lambda x: x.sign() / x.abs() ** (1 / 3), anything),
    "rcp_rn": (torch.reciprocal, anything),
    "sqrt_rn": (torch.sqrt, positive),
    "rsqrt_rn": (torch.rsqrt, positive),
    "saturatef": (lambda x: x.clamp(0, 1), anything),
    "exp10": (lambda x: 10**x, anything),
    "sinpi": (lambda x: (x * math.pi).sin(), anything),
    "cospi": (lambda x: (x * math.pi).cos(), anything),
    "erfcx": (special.erfcx, anything),
    "erfcinv": (lambda x: special.erfinv(1 - x), lambda: within_one() + 1),
    "normcdf": (special.ndtr, anything),
    "normcdfinv": (special.ndtri, lambda: anything().sigmoid()),
    "tgamma": (lambda x: x.lgamma().exp(), positive),
    "j0": (special.bessel_j0, anything),
    "j1": (special.bessel_j1, anything),
    "y0": (special.bessel_y0, positive),
    "y1": (special.bessel_y1, positive),
    "cyl_bessel_i0": (special.i0, anything),
    "cyl_bessel_i1": (special.i1, anything),
    "logb": (lambda x: x.frexp()[1] - 1.0, anything),
    "ilogb": (lambda x: x.frexp()[1] - 1, anything),
    "signbit": (torch.signbit, anything),
    "llrint": (torch.round, anything),
    "llround": (lambda x: (x.abs() + 0.5).floor() * x.sign(), anything),
    "fast_sinf": (torch.sin, anything),
    "fast_cosf": (torch.cos, anything),
    "fast_tanf": (torch.tan, anything),
    "fast_tanhf": (torch.tanh, anything),
    "fast_expf": (torch.exp, anything),
    "fast_exp10f": (lambda x: 10**x, anything),
    "fast_logf": (torch.log, positive),
    "fast_log2f": (torch.log2, positive),
    "fast_log10f": (torch.log10, positive),
    "fast_dividef": (torch.div, anything, anything),
    "fast_powf": (torch.pow, positive, anything),
    "add_rn": (torch.add, anything, anything),
    "sub_rn": (torch.sub, anything, anything),
    "mul_rn": (torch.mul, anything, anything),
    "div_rn": (torch.div, anything, anything),
    "pow": (torch.pow, positive, anything),
    "atan2": (torch.atan2, anything, anything),
    "hypot": (torch.hypot, anything, anything),
    "rhypot": (lambda x, y: 1 / torch.hypot(x, y), anything, anything),
    "fmod": (torch.fmod, anything, positive),
    "remainder": (lambda x, y: x - y * (x / y).round(), anything, positive),
    "fdim": (lambda x, y: (x - y).clamp(min=0), anything, anything),
    "copysign": (torch.copysign, anything, anything),
    "fma": (lambda x, y, z: x * y + z, anything, anything, anything),
    "fma_rn": (lambda x, y, z: x * y + z, anything, anything, anything),
    "norm3d": (lambda *xs: torch.stack(xs).norm(dim=0), *[anything] * 3),
    "rnorm3d": (lambda *xs: 1 / torch.stack(xs).norm(dim=0), *[anything] * 3),
    "norm4d": (lambda *xs: torch.stack(xs).norm(dim=0), *[anything] * 4),
    "rnorm4d": (lambda *xs: 1 / torch.stack(xs).norm(dim=0), *[anything] * 4),
    "double2float_rn": (lambda x: x, anything),
    **{
        f"{source}2{target}_{mode}": (rounded, inputs)
        for source in ("float", "double")
        for target, inputs in {"int": anything, "ll": anything, "uint": positive, "ull": positive}.items()
        for mode, rounded in {
            "rn": torch.round,
            "rz": torch.trunc,
            "rd": torch.floor,
            "ru": torch.ceil,
        }.items()
    },
}


@pytest.mark.parametrize("name", FLOATS)
def test_functions_of_floats(name: str, library: ctypes.CDLL) -> None:
    reference, *inputs = FLOATS[name]
    for types in libdevice.SYMBOLS[name]:
        if not all(kind.is_floating() for kind in types):
            continue
        args = [make().to(CARRIED[kind.name][1]) for make, kind in zip(inputs, types, strict=True)]
        got = evaluate(library, name, types, *args)
        expected = reference(*(arg.double() for arg in args)).to(got.dtype)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def bits(kind: Any) -> int:
    return int(kind.primitive_bitwidth)


def wrap(value: int, width: int, signed: bool) -> int:
    value &= (1 << width) - 1
    return value - (1 << width) if signed and value >> (width - 1) else value


# On Python's integers: the type, and the arguments as that type reads them.
INTEGERS: dict[str, Callable[..., int]] = {
    "abs": lambda kind, x: abs(x),
    "clz": lambda kind, x: bits(kind) - wrap(x, bits(kind), False).bit_length(),
    "ffs": lambda kind, x: (x & -x).bit_length(),
    "popc": lambda kind, x: wrap(x, bits(kind), False).bit_count(),
    "brev": lambda kind, x: int(f"{wrap(x, bits(kind), False):0{bits(kind)}b}"[::-1], 2),
    "mulhi": lambda kind, x, y: x * y >> bits(kind),
    "mul24": lambda kind, x, y: wrap(x, 24, kind.is_int_signed()) * wrap(y, 24, kind.is_int_signed()),
    "hadd": lambda kind, x, y: (x + y) >> 1,
    "rhadd": lambda kind, x, y: (x + y + 1) >> 1,
    "sad": lambda kind, x, y, z: abs(x - y) + z,
    "byte_perm": lambda kind, x, y, selectors: sum(
        (wrap(y if selectors >> 4 * i & 4 else x, 32, False) >> 8 * (selectors >> 4 * i & 3) & 255) << 8 * i
        for i in range(4)
    ),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_functions_of_integers(name: str, library: ctypes.CDLL) -> None:
    for types in libdevice.SYMBOLS[name]:
        if any(kind.is_floating() for kind in types):
            continue
        args = [integers().roll(i) << (bits(kind) - 32) for i, kind in enumerate(types)]
        got = evaluate(library, name, types, *args)
        for at, values in enumerate(zip(*(arg.tolist() for arg in args), strict=True)):
            read = [wrap(v, bits(kind), kind.is_int_signed()) for v, kind in zip(values, types, strict=True)]
            expected = INTEGERS[name](types[0], *read)
            assert got[at] == wrap(expected, got.element_size() * 8, True), (types, read)


def test_integers_to_floats(library: ctypes.CDLL) -> None:
    for name, kind in {"int": tl.int32, "uint": tl.uint32, "ll": tl.int64, "ull": tl.uint64}.items():
        x = integers()
        read = [float(wrap(v, bits(kind), kind.is_int_signed())) for v in x.tolist()]
        assert evaluate(library, f"{name}2double_rn", (kind,), x).tolist() == read
        assert torch.equal(evaluate(library, f"{name}2float_rn", (kind,), x), torch.tensor(read))


def test_bits(library: ctypes.CDLL) -> None:
    f, d, i = tl.float32, tl.float64, tl.int32
    x = torch.tensor([1.5, -0.0, 0.0, math.inf, -math.inf, math.nan, -2.25, 1e-40])
    assert torch.equal(evaluate(library, "float_as_int", (f,), x), x.view(torch.int32))
    assert torch.equal(evaluate(library, "int_as_float", (i,), x.view(torch.int32)).isnan(), x.isnan())
    wide = x.double().view(torch.int64)
    assert torch.equal(evaluate(library, "double_as_longlong", (d,), x.double()), wide)
    assert torch.equal(evaluate(library, "longlong_as_double", (tl.int64,), wide).view(torch.int64), wide)
    high, low = evaluate(library, "double2hiint", (d,), x), evaluate(library, "double2loint", (d,), x)
    assert torch.equal(torch.stack([low, high], 1).view(torch.int64).flatten(), wide)
    assert torch.equal(evaluate(library, "hiloint2double", (i, i), high, low).view(torch.int64), wide)
    for kind, finite in ((f, "finitef"), (d, "isfinited")):
        for name, reference in {"isnan": torch.isnan, "isinf": torch.isinf, finite: torch.isfinite}.items():
            assert torch.equal(evaluate(library, name, (kind,), x) != 0, reference(x)), name
    up = evaluate(library, "nextafter", (f, f), x, torch.full((LANES,), math.inf))
    assert torch.equal(up.nan_to_num(), torch.nextafter(x, torch.tensor(math.inf)).nan_to_num())


def test_an_integer_beside_a_float(library: ctypes.CDLL) -> None:
    n = torch.arange(-4, 4)
    for kind in (tl.float32, tl.float64):
        for name in ("ldexp", "scalbn"):
            x = anything().to(CARRIED[kind.name][1])
            assert torch.equal(evaluate(library, name, (kind, tl.int32), x, n), torch.ldexp(x, n))
        assert torch.equal(evaluate(library, "pow", (kind, tl.int32), torch.full((LANES,), 2.0), n), 2.0**n)
        x = positive().to(CARRIED[kind.name][1])
        one = torch.ones(LANES)
        for of_order, of_one in (("jn", "j1"), ("yn", "y1")):
            got = evaluate(library, of_order, (tl.int32, kind), one, x)
            torch.testing.assert_close(got, evaluate(library, of_one, (kind,), x))


def test_every_function_has_a_test_here() -> None:
    elsewhere = """
        float_as_int float_as_uint int_as_float uint_as_float double_as_longlong longlong_as_double
        hiloint2double double2hiint double2loint isnan isinf finitef isfinited nextafter ldexp scalbn jn yn
        int2float_rn uint2float_rn ll2float_rn ull2float_rn
        int2double_rn uint2double_rn ll2double_rn ull2double_rn
    """
    assert set(libdevice.SYMBOLS) == {*FLOATS, *INTEGERS, *elsewhere.split()}


# ---- in kernels ------------------------------------------------------------------------------------------


@triton.jit
def where_finite_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, tl.where(interface.isnan(x) | cuda.isinf(x), 0.0, interface.pow(x, 2)))


def test_vendors_names_work_too() -> None:
    """Through the common module and through CUDA's own, with a truth value and an integer on the way."""
    x = torch.tensor([1.0, math.nan, -3.0, math.inf] * 8)
    out = torch.empty_like(x)
    with triton_loom.active():
        where_finite_kernel[(1,)](x, out, BLOCK=32)
    assert out.tolist() == [1.0, 0.0, 9.0, 0.0] * 8

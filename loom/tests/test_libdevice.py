"""libdevice on the CPU: it has CUDA's functions with CUDA's types, each is there in C++, and each is the right one."""

from __future__ import annotations

import itertools
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

C_TYPES = {"int32": "i32", "int64": "i64", "uint32": "i32", "uint64": "i64", "fp32": "f32", "fp64": "f64"}
ROUNDED = [
    f"{op}_{mode}" for op in ("add", "sub", "mul", "div", "fma", "rcp", "sqrt") for mode in ("rz", "rd", "ru")
]
INEXACT = ["double2float", "int2float", "uint2float", "ll2float", "ull2float", "ll2double", "ull2double"]
MISSING = {"rcp64h", *ROUNDED, *(f"{cast}_{mode}" for cast in INEXACT for mode in ("rz", "rd", "ru"))}

Symbols = dict[tuple[Any, ...], tuple[str, Any]]


def names() -> list[str]:
    return [name for name, value in vars(interface).items() if callable(value)]


def symbols_of(module: Any, name: str, patch: pytest.MonkeyPatch) -> Symbols:
    """The table that a function hands to `extern_elementwise`."""
    tables: list[Symbols] = []
    patch.setattr(
        core, "extern_elementwise", lambda lib, path, args, table, is_pure, _semantic: tables.append(table)
    )
    arity = len(getattr(interface, name).__code__.co_varnames)
    getattr(module, name)(*[None] * arity, _semantic=object())
    return tables[0]


def test_what_is_missing() -> None:
    assert {name for name in names() if name not in vars(libdevice)} == MISSING


@pytest.mark.parametrize("name", [name for name in names() if name in vars(cuda) and name not in MISSING])
def test_types_are_cudas(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {types: result for types, (_, result) in libdevice.SYMBOLS[name].items()}
    assert ours == {types: result for types, (_, result) in symbols_of(cuda, name, monkeypatch).items()}


@pytest.mark.parametrize("width", [1, 2, 8, 16])
def test_every_symbol_exists(width: int) -> None:
    """For a scalar and for vectors, and with a result of the type that Triton was told."""
    lines = ['#include "math.h"']
    for number, (types, (symbol, result)) in enumerate(
        itertools.chain.from_iterable(table.items() for table in libdevice.SYMBOLS.values())
    ):
        parameters = [f"vec<{C_TYPES[kind.name]}, {width}> a{i}" for i, kind in enumerate(types)]
        arguments = ", ".join(f"a{i}" for i in range(len(types)))
        returned = f"vec<{C_TYPES[result.name]}, {width}>"
        lines.append(f"{returned} f{number}({', '.join(parameters)}) {{ auto y = {symbol}({arguments});")
        lines.append(f"  static_assert(sizeof y == sizeof({returned})); return y; }}")
    toolchain.build("\n".join(lines))


@triton.jit
def apply_kernel(
    FUNCTION: tl.constexpr, x_ptr, y_ptr, z_ptr, out_ptr, ARITY: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    if ARITY == 1:
        out = FUNCTION(x)
    elif ARITY == 2:
        out = FUNCTION(x, tl.load(y_ptr + i))
    else:
        out = FUNCTION(x, tl.load(y_ptr + i), tl.load(z_ptr + i))
    tl.store(out_ptr + i, out)


def evaluate(name: str, *args: torch.Tensor, result: torch.dtype) -> torch.Tensor:
    out = torch.empty(args[0].shape, dtype=result)
    x, y, z = (*args, args[0], args[0])[:3]
    with triton_loom.active():
        apply_kernel[(1,)](getattr(libdevice, name), x, y, z, out, ARITY=len(args), BLOCK=out.numel())
    return out


def positive(x: torch.Tensor) -> torch.Tensor:
    return x.abs() + 0.5


def inside(x: torch.Tensor) -> torch.Tensor:
    return x.tanh() * 0.9


def as_they_are(x: torch.Tensor) -> torch.Tensor:
    return x


special = torch.special
Unary = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]
UNARY: dict[str, Unary] = {
    **{
        name: (as_they_are, getattr(torch, name))
        for name in ["abs", "floor", "ceil", "trunc", "exp", "exp2", "expm1"]
    },
    **{
        name: (as_they_are, getattr(torch, name))
        for name in ["sin", "cos", "tan", "atan", "sinh", "cosh", "tanh", "asinh"]
    },
    **{name: (as_they_are, getattr(torch, name)) for name in ["erf", "erfc", "lgamma"]},
    **{name: (positive, getattr(torch, name)) for name in ["sqrt", "rsqrt", "log", "log2", "log10", "log1p"]},
    **{name: (inside, getattr(torch, name)) for name in ["asin", "acos", "atanh", "erfinv"]},
    "acosh": (lambda x: positive(x) + 1, torch.acosh),
    "rint": (as_they_are, torch.round),
    "nearbyint": (as_they_are, torch.round),
    "round": (as_they_are, lambda x: (x.abs() + 0.5).floor() * x.sign()),
    "cbrt": (as_they_are, lambda x: x.sign() * x.abs() ** (1 / 3)),
    "rcbrt": (as_they_are, lambda x: x.sign() / x.abs() ** (1 / 3)),
    "exp10": (as_they_are, lambda x: 10**x),
    "sinpi": (as_they_are, lambda x: (x * math.pi).sin()),
    "cospi": (as_they_are, lambda x: (x * math.pi).cos()),
    "erfcx": (as_they_are, special.erfcx),
    "erfcinv": (positive, lambda x: special.erfinv(1 - x)),
    "normcdf": (as_they_are, special.ndtr),
    "normcdfinv": (lambda x: x.sigmoid(), special.ndtri),
    "tgamma": (positive, lambda x: x.lgamma().exp()),
    "j0": (as_they_are, special.bessel_j0),
    "j1": (as_they_are, special.bessel_j1),
    "y0": (positive, special.bessel_y0),
    "y1": (positive, special.bessel_y1),
    "cyl_bessel_i0": (as_they_are, special.i0),
    "cyl_bessel_i1": (as_they_are, special.i1),
    "logb": (as_they_are, lambda x: x.frexp()[1].double() - 1),
    "rcp_rn": (as_they_are, torch.reciprocal),
}
BINARY = {
    "add_rn": torch.add,
    "sub_rn": torch.sub,
    "mul_rn": torch.mul,
    "div_rn": torch.div,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "rhypot": lambda x, y: 1 / torch.hypot(x, y),
    "fmod": torch.fmod,
    "remainder": lambda x, y: x - y * (x / y).round(),
    "fdim": lambda x, y: (x - y).clamp(min=0),
    "copysign": torch.copysign,
    "pow": lambda x, y: x**y,
}


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_float(name: str) -> None:
    domain, reference = UNARY[name]
    for dtype in (torch.float32, torch.float64):
        x = domain(torch.randn(64, dtype=torch.float64) * 1.5).to(dtype)
        got = evaluate(name, x, result=dtype)
        torch.testing.assert_close(got, reference(x.double()).to(dtype), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_floats(name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        x, y = torch.randn(2, 64, dtype=dtype)
        if name == "pow":
            x = positive(x)
        got = evaluate(name, x, y, result=dtype)
        torch.testing.assert_close(got, BINARY[name](x.double(), y.double()).to(dtype), rtol=1e-5, atol=1e-6)


EDGES = torch.tensor([0, 1, -1, 5, -7, 2**31 - 1, -(2**31), 0x12345678], dtype=torch.int32)


def unsigned(x: int, bits: int) -> int:
    return x & ((1 << bits) - 1)


def signed(x: int, bits: int) -> int:
    return (x + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_functions_of_one_integer(dtype: torch.dtype) -> None:
    bits = 64 if dtype == torch.int64 else 32
    x = EDGES.to(dtype) << (bits - 32)
    values = [unsigned(v, bits) for v in x.tolist()]
    count = torch.int32
    assert evaluate("popc", x, result=count).tolist() == [v.bit_count() for v in values]
    assert evaluate("clz", x, result=count).tolist() == [bits - v.bit_length() for v in values]
    assert evaluate("ffs", x, result=count).tolist() == [(v & -v).bit_length() for v in values]
    assert evaluate("brev", x, result=dtype).tolist() == [
        signed(int(f"{v:0{bits}b}"[::-1], 2), bits) for v in values
    ]
    assert evaluate("abs", x, result=dtype).tolist() == x.abs().tolist()


def test_unsigned_integers_stay_unsigned() -> None:
    """The same bits, as int32 and as uint32."""
    x, y = EDGES, EDGES.flip(0)
    for name, exact in {
        "mulhi": lambda a, b: a * b >> 32,
        "hadd": lambda a, b: (a + b) >> 1,
        "rhadd": lambda a, b: (a + b + 1) >> 1,
    }.items():
        pairs = list(zip(x.tolist(), y.tolist(), strict=True))
        got = evaluate(name, x, y, result=torch.int32)
        assert got.tolist() == [exact(a, b) for a, b in pairs], name
        got = evaluate(name, x.view(torch.uint32), y.view(torch.uint32), result=torch.uint32)
        assert got.tolist() == [exact(unsigned(a, 32), unsigned(b, 32)) for a, b in pairs], name
    assert evaluate("uint2float_rn", x.view(torch.uint32), result=torch.float32).min() >= 0
    assert evaluate("int2float_rn", x, result=torch.float32).min() == -(2.0**31)


@pytest.mark.parametrize(
    ("mode", "rounded"), [("rn", round), ("rz", int), ("rd", math.floor), ("ru", math.ceil)]
)
def test_floats_to_integers(mode: str, rounded: Callable[[float], int]) -> None:
    values = [0.5, -0.5, 1.5, 2.5, -2.5, 1e6 + 0.75, -3.0, 0.0]
    for source, kind in (("float", torch.float32), ("double", torch.float64)):
        x = torch.tensor(values, dtype=kind)
        for target, result in (("int", torch.int32), ("ll", torch.int64)):
            got = evaluate(f"{source}2{target}_{mode}", x, result=result)
            assert got.tolist() == [rounded(v) for v in values]


def test_bits() -> None:
    x = torch.tensor([1.5, -0.0, math.inf, math.nan], dtype=torch.float32)
    assert torch.equal(evaluate("float_as_int", x, result=torch.int32), x.view(torch.int32))
    assert torch.equal(evaluate("int_as_float", x.view(torch.int32), result=torch.float32).isnan(), x.isnan())
    assert torch.equal(
        evaluate("double_as_longlong", x.double(), result=torch.int64), x.double().view(torch.int64)
    )
    for name, reference in {"isnan": torch.isnan, "isinf": torch.isinf, "signbit": torch.signbit}.items():
        assert torch.equal(evaluate(name, x, result=torch.int32) != 0, reference(x)), name
    assert torch.equal(evaluate("finitef", x, result=torch.int32) != 0, x.isfinite())


def test_scaling() -> None:
    x, n = torch.randn(8), torch.arange(-4, 4, dtype=torch.int32)
    for name in ("ldexp", "scalbn"):
        assert torch.equal(evaluate(name, x, n, result=torch.float32), torch.ldexp(x, n))
    assert torch.equal(evaluate("pow", torch.full((8,), 2.0), n, result=torch.float32), torch.exp2(n.float()))

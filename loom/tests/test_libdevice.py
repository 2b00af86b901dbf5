"""`triton.language.extra.libdevice`: each function against mpmath or plain Python, over its whole domain.

Kernels are generated here from lists of names, one per signature: each function is called as users call it.
A last test makes sure that every function of the CPU's library has a reference.
"""

from __future__ import annotations

import importlib.util
import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import mpmath
import numpy as np
import pytest
import torch
import triton
from formats import exact
from mpmath import mpf
from support import compat
from triton_loom import libdevice as cpu
from triton_loom.testing import assert_same

F32, F64, I32, I64 = torch.float32, torch.float64, torch.int32, torch.int64
U32, U64 = torch.uint32, torch.uint64


def kernel(names: list[str], arity: int, directory: Path) -> triton.JITFunction:
    """Return a kernel that stores the results of these functions of `arity` arguments, one row each."""
    pointers = [f"{letter}_ptr" for letter in "xyzw"[:arity]]
    loads = "".join(f"    {p[0]} = tl.load({p} + at, at < n)\n" for p in pointers)
    arguments = ", ".join(p[0] for p in pointers)
    calls = "".join(
        f"    tl.store(out_ptr + {row} * n + at, libdevice.{name}({arguments}), at < n)\n"
        for row, name in enumerate(names)
    )
    text = (
        "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n\n\n"
        f"@triton.jit\ndef call_all({', '.join(pointers)}, out_ptr, n, BLOCK: tl.constexpr):\n"
        f"    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n{loads}{calls}"
    )
    path = directory / f"libdevice_{arity}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.call_all


def results(
    names: list[str], inputs: list[torch.Tensor], dtype: torch.dtype, directory: Path
) -> torch.Tensor:
    n = len(inputs[0])
    out = torch.zeros(len(names), n, dtype=dtype)
    kernel(names, len(inputs), directory)[(triton.cdiv(n, 64),)](*inputs, out, n, BLOCK=64)
    return out


def ulps(got: float, truth: mpf, dtype: torch.dtype) -> float:
    """Return the distance in ulps of the truth. NaN and infinities must be equal."""
    info = torch.finfo(dtype)
    size = abs(truth)
    if mpmath.isnan(truth):
        return 0.0 if math.isnan(got) else math.inf
    if size > mpf(info.max) * (1 + mpf(info.eps) / 4):
        return 0.0 if got == math.copysign(math.inf, float(mpmath.sign(truth))) else math.inf
    if not math.isfinite(got):
        return math.inf
    exponent = mpmath.frexp(size)[1] - 1 if size else -10_000
    unit = mpmath.ldexp(info.eps, int(max(exponent, math.frexp(info.smallest_normal)[1] - 1)))
    return float(abs(mpf(got) - truth) / unit)


def check(
    name: str, reference: Callable, inputs: list[np.ndarray], got: np.ndarray, dtype, limit: float
) -> None:
    with mpmath.workdps(50):
        for *arguments, result in zip(*inputs, got, strict=True):
            try:
                truth = mpf(reference(*(mpf(float(a)) for a in arguments)))
            except (ZeroDivisionError, ValueError, TypeError):  # a pole, or a complex answer
                continue
            error = ulps(float(result), truth, dtype)
            called = f"{name}({', '.join(str(a) for a in arguments)})"
            assert error <= limit, f"{called} = {result}, {error:.3g} ulp from {mpmath.nstr(truth, 20)}"


# ---- one float -------------------------------------------------------------------------------------------


def erfcinv(x: mpf) -> mpf:
    return mpmath.erfinv(1 - x)


def round_half_away(x: mpf) -> mpf:
    return mpmath.sign(x) * mpmath.floor(abs(x) + mpf(1) / 2)


def round_half_even(x: mpf) -> mpf:
    return mpmath.nint(x)


def truncate(x: mpf) -> mpf:
    return mpmath.sign(x) * mpmath.floor(abs(x))


REAL, POSITIVE, UNIT, TURN = (-30.0, 30.0), (1e-30, 1e30), (-1.0, 1.0), (-1e4, 1e4)

# name: reference, domain (logarithmic where it spans many powers of ten)
UNARY: dict[str, tuple[Callable, tuple[float, float]]] = {
    "abs": (abs, REAL),
    "floor": (mpmath.floor, REAL),
    "ceil": (mpmath.ceil, REAL),
    "trunc": (truncate, REAL),
    "round": (round_half_away, REAL),
    "rint": (round_half_even, REAL),
    "nearbyint": (round_half_even, REAL),
    "sqrt": (mpmath.sqrt, POSITIVE),
    "sqrt_rn": (mpmath.sqrt, POSITIVE),
    "rsqrt": (lambda x: 1 / mpmath.sqrt(x), POSITIVE),
    "cbrt": (lambda x: mpmath.sign(x) * mpmath.cbrt(abs(x)), REAL),
    "rcbrt": (lambda x: mpmath.sign(x) / mpmath.cbrt(abs(x)), REAL),
    "rcp_rn": (lambda x: 1 / x, REAL),
    "exp": (mpmath.exp, (-110.0, 95.0)),
    "exp2": (lambda x: mpf(2) ** x, (-155.0, 130.0)),
    "exp10": (lambda x: mpf(10) ** x, (-47.0, 40.0)),
    "expm1": (mpmath.expm1, (-20.0, 90.0)),
    "log": (mpmath.log, POSITIVE),
    "log2": (lambda x: mpmath.log(x, 2), POSITIVE),
    "log10": (mpmath.log10, POSITIVE),
    "log1p": (mpmath.log1p, (-0.999, 50.0)),
    "logb": (lambda x: mpmath.frexp(x)[1] - 1, POSITIVE),
    "sin": (mpmath.sin, TURN),
    "cos": (mpmath.cos, TURN),
    "tan": (mpmath.tan, TURN),
    "sinpi": (mpmath.sinpi, REAL),
    "cospi": (mpmath.cospi, REAL),
    "asin": (mpmath.asin, UNIT),
    "acos": (mpmath.acos, UNIT),
    "atan": (mpmath.atan, REAL),
    "sinh": (mpmath.sinh, REAL),
    "cosh": (mpmath.cosh, REAL),
    "tanh": (mpmath.tanh, (-12.0, 12.0)),
    "asinh": (mpmath.asinh, REAL),
    "acosh": (mpmath.acosh, (1.0, 1e20)),
    "atanh": (mpmath.atanh, UNIT),
    "erf": (mpmath.erf, (-5.0, 5.0)),
    "erfc": (mpmath.erfc, (-5.0, 10.5)),
    "erfcx": (lambda x: mpmath.exp(x * x) * mpmath.erfc(x), (-5.0, 50.0)),
    "erfinv": (mpmath.erfinv, UNIT),
    "erfcinv": (erfcinv, (1e-20, 1.9)),
    "normcdf": (mpmath.ncdf, (-12.0, 6.0)),
    "normcdfinv": (lambda x: -mpmath.sqrt(2) * erfcinv(2 * x), (1e-20, 0.95)),
    "lgamma": (lambda x: mpmath.log(abs(mpmath.gamma(x))), (1e-20, 1e20)),
    "tgamma": (mpmath.gamma, (0.01, 34.0)),
    "j0": (lambda x: mpmath.besselj(0, x), (0.0, 30.0)),
    "j1": (lambda x: mpmath.besselj(1, x), (0.0, 30.0)),
    "y0": (lambda x: mpmath.bessely(0, x), (0.01, 30.0)),
    "y1": (lambda x: mpmath.bessely(1, x), (0.01, 30.0)),
    "cyl_bessel_i0": (lambda x: mpmath.besseli(0, x), REAL),
    "cyl_bessel_i1": (lambda x: mpmath.besseli(1, x), REAL),
}
FLOAT_ONLY = {
    "saturatef": (lambda x: min(max(x, mpf(0)), mpf(1)), (-2.0, 2.0)),
    "rsqrt_rn": UNARY["rsqrt"],
    "fast_sinf": UNARY["sin"],
    "fast_cosf": UNARY["cos"],
    "fast_tanf": UNARY["tan"],
    "fast_tanhf": UNARY["tanh"],
    "fast_expf": UNARY["exp"],
    "fast_exp10f": UNARY["exp10"],
    "fast_logf": UNARY["log"],
    "fast_log2f": UNARY["log2"],
    "fast_log10f": UNARY["log10"],
}
EXACT = {
    "abs",
    "floor",
    "ceil",
    "trunc",
    "round",
    "rint",
    "nearbyint",
    "sqrt",
    "sqrt_rn",
    "rcp_rn",
    "logb",
    "saturatef",
}
# Near a zero of these functions no small relative error is attainable: it is relative to 1 instead.
WAVES = {"j0", "j1", "y0", "y1", "lgamma"}


def samples(domain: tuple[float, float], count: int, dtype: torch.dtype) -> torch.Tensor:
    low, high = domain
    spread = torch.linspace(0, 1, count, dtype=F64)
    if low > 0 and high / low > 1e3:
        return torch.exp(math.log(low) + spread * math.log(high / low)).to(dtype)
    halves = torch.round(torch.linspace(low, high, 9, dtype=F64)) + 0.5
    inside = halves[(halves >= low) & (halves <= high)]
    return torch.cat([low + spread * (high - low), inside, torch.round(inside)]).to(dtype)


@pytest.mark.parametrize("dtype", compat([F32, F64], F32), ids=["f32", "f64"])
def test_functions_of_one_number(dtype: torch.dtype, tmp_path: Path) -> None:
    table = UNARY | (FLOAT_ONLY if dtype == F32 else {})
    inputs = {name: samples(domain, 40, dtype) for name, (_, domain) in table.items()}
    x = torch.cat(list(inputs.values()))
    out = results(list(table), [x], dtype, tmp_path)
    start = 0
    for row, (name, (reference, _)) in enumerate(table.items()):
        end = start + len(inputs[name])
        arguments, got = exact(inputs[name]), exact(out[row, start:end])
        start = end
        if name in WAVES:
            with mpmath.workdps(30):
                truth = np.array([float(reference(mpf(v))) for v in arguments])
            scale = np.maximum(1, np.abs(truth))
            np.testing.assert_array_less(np.abs(got - truth), 4 * torch.finfo(dtype).eps * scale, name)
            continue
        # float32 is computed in float64 or better; float64 by libm, and by series where that has no function
        limit = 0.5 if name in EXACT else 1 if dtype == F32 else 16 if "bessel" in name else 8
        check(name, reference, [arguments], got, dtype, limit)


# ---- two, three, four floats -----------------------------------------------------------------------------


def remainder(x: mpf, y: mpf) -> mpf:
    return x - y * mpmath.nint(x / y)


def fmod(x: mpf, y: mpf) -> mpf:
    return x - y * truncate(x / y)


BINARY: dict[str, Callable] = {
    "add_rn": lambda x, y: x + y,
    "sub_rn": lambda x, y: x - y,
    "mul_rn": lambda x, y: x * y,
    "div_rn": lambda x, y: x / y,
    "pow": lambda x, y: x**y,
    "atan2": mpmath.atan2,
    "hypot": mpmath.hypot,
    "rhypot": lambda x, y: 1 / mpmath.hypot(x, y),
    "fmod": fmod,
    "remainder": remainder,
    "fdim": lambda x, y: max(x - y, mpf(0)),
    "copysign": lambda x, y: abs(x) * (1 if y > 0 else -1),
}
MANY: dict[int, dict[str, Callable]] = {
    3: {
        "fma": lambda x, y, z: x * y + z,
        "fma_rn": lambda x, y, z: x * y + z,
        "norm3d": lambda x, y, z: mpmath.sqrt(x * x + y * y + z * z),
        "rnorm3d": lambda x, y, z: 1 / mpmath.sqrt(x * x + y * y + z * z),
    },
    4: {
        "norm4d": lambda x, y, z, w: mpmath.sqrt(x * x + y * y + z * z + w * w),
        "rnorm4d": lambda x, y, z, w: 1 / mpmath.sqrt(x * x + y * y + z * z + w * w),
    },
}
EXACT_BINARY = {
    "add_rn",
    "sub_rn",
    "mul_rn",
    "div_rn",
    "fmod",
    "remainder",
    "fdim",
    "copysign",
    "fma",
    "fma_rn",
}
EXACT_BINARY |= {"fast_dividef"}


@pytest.mark.parametrize("dtype", [F32, F64], ids=["f32", "f64"])
def test_functions_of_several_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    inputs = [(torch.randn(120, dtype=F64) * 5).to(dtype) for _ in range(4)]
    numbers = [exact(t) for t in inputs]
    binary = BINARY | ({"fast_dividef": BINARY["div_rn"], "fast_powf": BINARY["pow"]} if dtype == F32 else {})
    for arity, table in [(2, binary), *MANY.items()]:
        out = results(list(table), inputs[:arity], dtype, tmp_path)
        for (name, reference), got in zip(table.items(), out, strict=True):
            limit = 0.5 if name in EXACT_BINARY else 2  # CUDA promises 2 of hypot and its relatives
            check(name, reference, numbers[:arity], exact(got), dtype, limit)
    x, y = inputs[:2]
    assert_same(results(["nextafter"], [x, y], dtype, tmp_path)[0], torch.nextafter(x, y))


@pytest.mark.parametrize("dtype", [F32, F64], ids=["f32", "f64"])
def test_functions_of_a_number_and_an_integer(dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.randn(100, dtype=F64).to(dtype)
    n = torch.randint(-12, 13, (100,), dtype=I32)
    out = results(["pow", "ldexp", "scalbn"], [x, n], dtype, tmp_path)
    for name, reference, got in [
        ("pow", lambda a, b: a ** int(b), out[0]),
        ("ldexp", lambda a, b: mpmath.ldexp(a, int(b)), out[1]),
        ("scalbn", lambda a, b: mpmath.ldexp(a, int(b)), out[2]),
    ]:
        check(name, reference, [exact(x), n.numpy()], exact(got), dtype, 0.5 if name != "pow" else 1)
    order, x = torch.randint(0, 6, (60,), dtype=I32), (torch.rand(60, dtype=F64) * 20 + 0.5).to(dtype)
    out = exact(results(["jn", "yn"], [order, x], dtype, tmp_path))
    for reference, got in zip((mpmath.besselj, mpmath.bessely), out, strict=True):
        truth = np.array([float(reference(int(k), mpf(v))) for k, v in zip(order, exact(x), strict=True)])
        np.testing.assert_array_less(
            np.abs(got - truth), 16 * torch.finfo(dtype).eps * np.maximum(1, np.abs(truth))
        )


# ---- classification, conversion, bits --------------------------------------------------------------------

SPECIALS = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    2.5,
    3.5,
    -2.5,
    1e-40,
    -1e38,
    12345.678,
    2.0**31,
    -(2.0**31),
    math.inf,
    -math.inf,
]
ROUNDINGS: dict[str, Callable[[float], int]] = {
    "rn": round,
    "rz": math.trunc,
    "rd": math.floor,
    "ru": math.ceil,
}


def test_classification(tmp_path: Path) -> None:
    for dtype, finite in [(F32, "finitef"), (F64, "isfinited")]:
        x = torch.tensor([*SPECIALS, math.nan], dtype=dtype)
        out = results(["isnan", "isinf", "signbit", finite], [x], I32, tmp_path) != 0
        assert_same(out, torch.stack([x.isnan(), x.isinf(), torch.signbit(x), x.isfinite()]))
        x = x[x.isfinite() & (x != 0)]
        out = results(["ilogb"], [x], I32, tmp_path)
        assert out[0].tolist() == [math.frexp(v)[1] - 1 for v in x.tolist()]


@pytest.mark.parametrize("dtype", [F32, F64], ids=["f32", "f64"])
def test_floats_to_integers(dtype: torch.dtype, tmp_path: Path) -> None:
    prefix = "float" if dtype == F32 else "double"
    noise = torch.randn(200, dtype=F64) * 2.0 ** torch.randint(-2, 66, (200,))
    x = torch.cat([torch.tensor([*SPECIALS, math.nan], dtype=F64), noise]).to(dtype)
    for target, kind, signed in [
        ("int", I32, True),
        ("uint", I32, False),
        ("ll", I64, True),
        ("ull", I64, False),
    ]:
        names = [f"{prefix}2{target}_{mode}" for mode in ROUNDINGS]
        bits = kind.itemsize * 8
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
        highest_bit = low if signed else 2 ** (bits - 1)
        of_nan = highest_bit if 64 in (bits, dtype.itemsize * 8) else 0  # as PTX's cvt
        out = results(names, [x], kind, tmp_path)
        for name, (mode, to_integer), got in zip(names, ROUNDINGS.items(), out, strict=True):
            unsigned = [v if signed else v % 2**bits for v in got.tolist()]
            want = [
                of_nan
                if math.isnan(v)
                else min(max(to_integer(v), low), high)
                if math.isfinite(v)
                else high
                if v > 0
                else low
                for v in x.tolist()
            ]
            assert unsigned == want, f"{name} rounds {mode}"
    inside = x[x.isfinite() & (x.abs() < 2.0**62)]
    out = results(["llrint", "llround"], [inside], I64, tmp_path)
    assert out[0].tolist() == [round(v) for v in inside.tolist()]
    assert out[1].tolist() == [
        int(math.copysign(math.floor(abs(v) + 0.5), v)) if abs(v) < 2**52 else int(v) for v in inside.tolist()
    ]


def test_integers_to_floats(tmp_path: Path) -> None:
    for source, name, targets in [
        (I32, "int", (F32, F64)),
        (U32, "uint", (F32, F64)),
        (I64, "ll", (F32, F64)),
        (U64, "ull", (F32, F64)),
    ]:
        bits = np.frombuffer(np.random.bytes(200 * source.itemsize), str(source).removeprefix("torch."))
        x = torch.from_numpy(bits.copy())
        for target, suffix in zip(targets, ("float", "double"), strict=True):
            out = results([f"{name}2{suffix}_rn"], [x], target, tmp_path)
            assert_same(out[0], bits.astype(str(target).removeprefix("torch.")), f"{name}2{suffix}_rn")
    x = torch.randn(100, dtype=F64)
    assert_same(results(["double2float_rn"], [x], F32, tmp_path)[0], x.float())


def test_bits_of_floats(tmp_path: Path) -> None:
    single, double = torch.randn(64), torch.randn(64, dtype=F64)
    words, longs = single.view(I32), double.view(I64)
    for row in results(["float_as_int", "float_as_uint"], [single], I32, tmp_path):
        assert_same(row, words)
    assert_same(results(["int_as_float"], [words], F32, tmp_path)[0], single)
    assert_same(results(["uint_as_float"], [words.view(U32)], F32, tmp_path)[0], single)
    assert_same(results(["double_as_longlong"], [double], I64, tmp_path)[0], longs)
    assert_same(results(["longlong_as_double"], [longs], F64, tmp_path)[0], double)
    high, low = results(["double2hiint", "double2loint"], [double], I32, tmp_path)
    assert_same(torch.stack([low, high], 1).contiguous().view(I64)[:, 0], longs)
    assert_same(results(["hiloint2double"], [high, low], F64, tmp_path)[0], double)


# ---- integers --------------------------------------------------------------------------------------------


def signed(value: int, bits: int) -> int:
    return (value + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


def reversed_bits(value: int, bits: int) -> int:
    return int(f"{value % (1 << bits):0{bits}b}"[::-1], 2)


def permuted_bytes(x: int, y: int, selector: int) -> int:
    source = struct.pack("<II", x % 2**32, y % 2**32)
    return int.from_bytes(bytes(source[selector >> 4 * i & 7] for i in range(4)), "little")


def test_integer_functions(tmp_path: Path) -> None:
    for dtype in (I32, I64):
        bits = dtype.itemsize * 8
        x = torch.from_numpy(
            np.frombuffer(np.random.bytes(100 * dtype.itemsize), f"i{dtype.itemsize}").copy()
        )
        x[:4] = torch.tensor([0, 1, -1, 1 << (bits - 2)])
        y = x.roll(7)
        values, others = x.tolist(), y.tolist()
        out = results(["abs", "brev"], [x], dtype, tmp_path)
        assert out[0].tolist() == [signed(abs(v), bits) for v in values]
        assert out[1].tolist() == [signed(reversed_bits(v, bits), bits) for v in values]
        out = results(["clz", "ffs", "popc"], [x], I32, tmp_path)
        assert out[0].tolist() == [bits - (v % 2**bits).bit_length() for v in values]
        assert out[1].tolist() == [(v & -v).bit_length() for v in values]
        assert out[2].tolist() == [(v % 2**bits).bit_count() for v in values]
        out = results(["mulhi"], [x, y], dtype, tmp_path)
        assert out[0].tolist() == [a * b >> bits for a, b in zip(values, others, strict=True)]
        unsigned = U32 if dtype == I32 else U64
        out = results(["mulhi"], [x.view(unsigned), y.view(unsigned)], unsigned, tmp_path)
        assert out[0].tolist() == [
            (a % 2**bits) * (b % 2**bits) >> bits for a, b in zip(values, others, strict=True)
        ]


def test_functions_of_32_bit_integers(tmp_path: Path) -> None:
    x = torch.from_numpy(np.frombuffer(np.random.bytes(400), np.int32).copy())
    y, z = x.roll(3), x.roll(11)
    triples = list(zip(x.tolist(), y.tolist(), z.tolist(), strict=True))
    unsigned = [tuple(v % 2**32 for v in triple) for triple in triples]

    def low24(v: int) -> int:
        return signed(v % 2**24, 24)

    out = results(["mul24", "hadd", "rhadd"], [x, y], I32, tmp_path)
    assert out[0].tolist() == [signed(low24(a) * low24(b), 32) for a, b, _ in triples]
    assert out[1].tolist() == [(a + b) >> 1 for a, b, _ in triples]
    assert out[2].tolist() == [(a + b + 1) >> 1 for a, b, _ in triples]
    out = results(["mul24", "hadd", "rhadd"], [x.view(U32), y.view(U32)], U32, tmp_path)
    assert out[0].tolist() == [(a % 2**24) * (b % 2**24) % 2**32 for a, b, _ in unsigned]
    assert out[1].tolist() == [(a + b) >> 1 for a, b, _ in unsigned]
    assert out[2].tolist() == [(a + b + 1) >> 1 for a, b, _ in unsigned]
    out = results(["byte_perm"], [x, y, z], I32, tmp_path)
    assert out[0].tolist() == [signed(permuted_bytes(*triple), 32) for triple in triples]
    out = results(["sad"], [x, y, z.view(U32)], I32, tmp_path)
    assert out[0].tolist() == [signed(abs(a - b) + c, 32) for a, b, c in triples]
    out = results(["sad"], [x.view(U32), y.view(U32), z.view(U32)], U32, tmp_path)
    assert out[0].tolist() == [(abs(a - b) + c) % 2**32 for a, b, c in unsigned]


# ---- the whole library -----------------------------------------------------------------------------------


def test_no_function_is_left_out() -> None:
    text = " ".join(cpu.FUNCTIONS.values())
    expanded = re.sub(r"(\w+)_\*", r"\1_rn \1_rz \1_rd \1_ru", text)
    names = {entry.partition("=")[0] for entry in expanded.split()}
    here = Path(__file__).read_text()
    tested = set(re.findall(r"\w+", here)) | {
        f"{source}2{target}_{mode}"
        for source, targets in {
            "float": ("int", "uint", "ll", "ull"),
            "double": ("int", "uint", "ll", "ull"),
            "int": ("float", "double"),
            "uint": ("float", "double"),
            "ll": ("float", "double"),
            "ull": ("float", "double"),
        }.items()
        for target in targets
        for mode in ROUNDINGS
    }
    assert names <= tested, f"without a reference: {sorted(names - tested)}"


def test_a_missing_function_is_named(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="add_rz does not exist on the CPU"):
        results(["add_rz"], [torch.ones(4), torch.ones(4)], F32, tmp_path)


def test_a_wrong_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"libdevice\.exp takes"):
        results(["exp"], [torch.ones(4, dtype=I32)], F32, tmp_path)

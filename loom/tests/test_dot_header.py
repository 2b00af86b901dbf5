"""include/dot.h against the arithmetic it promises, bit for bit, per compiler and instruction set."""

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from triton_loom.device.toolchain import processor

HEADER = Path(__file__).parents[1] / "src" / "triton_loom" / "include" / "dot.h"
FLAGS = [
    "-std=c++17", "-O2", "-fPIC", "-shared", "-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off",
    "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Werror",
]  # fmt: skip
COMPILERS = [name for name in ("g++", "clang++-16") if shutil.which(name)]
TARGETS = ["native", "x86-64-v3", "x86-64"]

Array = NDArray[Any]
Library = ctypes.CDLL
Loader = Callable[[str, list[str]], Library]
Shape = tuple[int, int, int]

# M, N, K: every register block, every way of converting operands, and sides larger than one part.
SHAPES: list[Shape] = [
    (1, 1, 1), (1, 64, 64), (64, 1, 64), (64, 64, 1), (2, 2, 2), (32, 2, 16), (4, 4, 128), (64, 8, 32),
    (2, 128, 16), (4, 128, 32), (8, 16, 4), (16, 16, 32), (32, 32, 32), (16, 256, 64), (64, 64, 128),
    (256, 32, 2), (128, 128, 64), (32, 32, 1024), (16, 16, 256),
]  # fmt: skip
TILED_SHAPES = [(m, n, k) for m, n, k in SHAPES if m >= 16 and n >= 16 and k >= 32]
TURNED_SHAPES = {
    "bf16_turned": [(m, n, k) for m, n, k in SHAPES if n >= 16 and k >= 16],
    "i8_turned": [(m, n, k) for m, n, k in SHAPES if n >= 16 and k >= 64],
}

# The arguments of each function: elements of A and B, elements of C, the call.
KINDS = {
    "f32": ("f32", "f32", "dot<f32, {}>("),
    "f64": ("f64", "f64", "dot<f64, {}>("),
    "i32": ("i32", "i32", "dot<i32, {}>("),
    "i8": ("i8", "i32", "dot_i8<{}>(tiles, "),
    "i8_turned": ("i8", "i32", "dot_i8<{}, true>(tiles, "),  # B is [N, K]
    "bf16": ("u16", "f32", "dot_bf16<{}>(tiles, "),
    "bf16_turned": ("u16", "f32", "dot_bf16<{}, true>(tiles, "),  # B is [N, K]
}

SCALAR = """
static float widened(unsigned short x) {
  unsigned bits = (unsigned)x << 16;
  float y;
  __builtin_memcpy(&y, &bits, 4);
  return y;
}
template <class T, class Step> static void each(T *C, int M, int N, int K, Step step) {
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++)
      for (int k = 0; k < K; k++) C[m * N + n] = step(m * K + k, k * N + n, C[m * N + n]);
}
extern "C" {
int runs_v3() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
void f32(const float *A, const float *B, float *C, int M, int N, int K) {
  each(C, M, N, K, [=](int a, int b, float c) { return __builtin_fmaf(A[a], B[b], c); });
}
void f64(const double *A, const double *B, double *C, int M, int N, int K) {
  each(C, M, N, K, [=](int a, int b, double c) { return __builtin_fma(A[a], B[b], c); });
}
void bf16(const unsigned short *A, const unsigned short *B, float *C, int M, int N, int K) {
  each(C, M, N, K, [=](int a, int b, float c) { return __builtin_fmaf(widened(A[a]), widened(B[b]), c); });
}
// tdpbf16ps on numbers that are not denormal: 32 steps at a time, the even and the odd ones apart.
void bf16_tiles(const unsigned short *A, const unsigned short *B, float *C, int M, int N, int K) {
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++)
      for (int part = 0; part < K; part += 32) {
        float sum[2] = {0, 0};
        for (int k = part; k < part + 32; k++)
          sum[k % 2] = __builtin_fmaf(widened(A[m * K + k]), widened(B[k * N + n]), sum[k % 2]);
        C[m * N + n] += sum[0] + sum[1];
      }
}
}
"""

TILES = """
int has_tiles() {
#if defined(LOOM_DOT_BF16_HARDWARE) && defined(__AMX_BF16__)
  return Tiles::granted();
#else
  return 0;
#endif
}
int leaves_tiles_as_found() {
#if defined(__AMX_TILE__)
  alignas(64) unsigned char shaped[64] = {1}, released[64] = {}, found[64];
  shaped[16] = 32, shaped[48] = 4;  // the first tile: 4 rows of 32 bytes
  int same = 1;
  for (unsigned char *before : (unsigned char *[2]){shaped, released}) {
    if (before[0]) asm volatile("ldtilecfg %0" ::"m"(*(unsigned char(*)[64])before));
    { Tiles tiles; tiles.shape(64); tiles.shape(32); }
    asm volatile("sttilecfg %0" : "=m"(found));
    same &= !__builtin_memcmp(found, before, 64);
    asm volatile("tilerelease");
  }
  return same;
#else
  return 0;
#endif
}
"""


def name(kind: str, shape: Shape) -> str:
    return "_".join(map(str, (kind, *shape)))


def harness(kinds: list[str], shapes: list[Shape]) -> str:
    functions = [
        f"void {name(kind, shape)}(const {element} *A, const {element} *B, {total} *C, i64 lda, i64 ldb) {{\n"
        f"  {'Tiles tiles; ' * ('tiles' in call)}{call.format(', '.join(map(str, shape)))}A, B, C, lda, ldb);\n}}"
        for kind, (element, total, call) in KINDS.items()
        for shape in shapes
        if kind in kinds and shape in TURNED_SHAPES.get(kind, shapes)
    ]
    return "\n".join([f'#include "{HEADER}"', 'extern "C" {', *functions, TILES, "}"])


@pytest.fixture(scope="session")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    folder = tmp_path_factory.mktemp("dot")
    built: dict[tuple[str, ...], Library] = {}

    def load(source: str, compiler: list[str]) -> Library:
        key = (source, *compiler)
        if key not in built:
            text, library = folder / f"{len(built)}.cpp", folder / f"{len(built)}.so"
            text.write_text(source)
            subprocess.run([*compiler, *FLAGS, str(text), "-o", str(library), "-lm"], check=True)
            built[key] = ctypes.CDLL(str(library))
        return built[key]

    return load


@pytest.fixture(scope="session")
def scalar(loader: Loader) -> Library:
    return loader(SCALAR, [COMPILERS[0]])


@pytest.fixture(scope="session", params=[f"{c} {t}" for c in COMPILERS for t in TARGETS])
def compiled(request: pytest.FixtureRequest, loader: Loader, scalar: Library) -> Library:
    compiler, target = request.param.split()
    if target == "x86-64-v3" and not scalar.runs_v3():
        pytest.skip("this machine has no AVX2")
    return loader(harness(list(KINDS), SHAPES), [compiler, f"-march={target}"])


def pointer(values: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.ctypes.data)


def aligned(values: Array) -> Array:
    """Return a copy aligned to 64 bytes, like every tile."""
    room = np.empty(values.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy: Array = room[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def run(library: Library, kind: str, a: Array, b: Array, c: Array, pad: int = 0) -> Array:
    """Return C + A B by the header; with `pad`, the strides of A's and B's rows are larger by that many elements."""
    (m, k), n = a.shape, b.shape[1]
    b = b.T if kind in TURNED_SHAPES else b
    spaced_a, spaced_b = (aligned(np.pad(x, ((0, 0), (0, pad)), constant_values=1)) for x in (a, b))
    total = aligned(c)
    strides = ctypes.c_int64(k + pad), ctypes.c_int64(b.shape[1] + pad)
    library[name(kind, (m, n, k))](pointer(spaced_a), pointer(spaced_b), pointer(total), *strides)
    return total


def expected(scalar: Library, kind: str, a: Array, b: Array, c: Array) -> Array:
    total = c.copy()
    scalar[kind](pointer(a), pointer(b), pointer(total), a.shape[0], b.shape[1], a.shape[1])
    return total


def same_bits(x: Array, y: Array) -> bool:
    """Return whether the bits agree; all NaNs count as equal, because their payload is the hardware's choice."""
    numbers = ~(np.isnan(x) & np.isnan(y))
    return bool(x[numbers].tobytes() == y[numbers].tobytes())


def floats(rng: np.random.Generator, rows: int, cols: int, dtype: type = np.float32) -> Array:
    """Return magnitudes over many binades, so that every other order of summation rounds differently."""
    return (rng.standard_normal((rows, cols)) * 2.0 ** rng.integers(-12, 12, (rows, cols))).astype(dtype)


def bf16(values: Array) -> Array:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("pad", [0, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_floats_take_every_product_in_order(
    compiled: Library, scalar: Library, shape: Shape, pad: int
) -> None:
    m, n, k = shape
    rng = np.random.default_rng(m * n * k)
    for kind, dtype in (("f32", np.float32), ("f64", np.float64), ("bf16", np.float32)):
        a, b, c = floats(rng, m, k, dtype), floats(rng, k, n, dtype), floats(rng, m, n, dtype)
        if kind == "bf16":
            a, b = bf16(a), bf16(b)
        want = expected(scalar, kind, a, b, c)
        assert same_bits(run(compiled, kind, a, b, c, pad), want), kind
    if shape in TURNED_SHAPES["bf16_turned"]:
        assert same_bits(run(compiled, "bf16_turned", a, b, c, pad), want)


def check_integers(library: Library, kind: str, shape: Shape, pad: int) -> None:
    """Test numbers of the whole range, with rows and columns of only its ends, and sums that wrap around."""
    m, n, k = shape
    rng = np.random.default_rng(m * n * k)
    dtype = np.int32 if kind == "i32" else np.int8
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    a, b = (rng.integers(low, high, s, dtype, endpoint=True) for s in ((m, k), (k, n)))
    a[0], a[m // 2 :: 7], b[:, 0], b[:, n // 2 :: 5] = low, high, low, high
    c = rng.integers(-(2**31), 2**31, (m, n)).astype(np.int32)
    c[::2] = -(2**31)
    c[1::2, ::3] = 2**31 - 1
    exact = c.astype(np.int64) + a.astype(np.int64) @ b.astype(np.int64)
    assert np.array_equal(run(library, kind, a, b, c, pad), exact.astype(np.int32)), kind


@pytest.mark.parametrize("pad", [0, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers_are_exact_and_wrap(compiled: Library, shape: Shape, pad: int) -> None:
    for kind in ("i32", "i8", "i8_turned"):
        if shape in TURNED_SHAPES.get(kind, SHAPES):
            check_integers(compiled, kind, shape, pad)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 instruction sets")
@pytest.mark.parametrize("instructions", ["avx512vnni", "avx512bw", "avxvnni"])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_bytes_agree_for_every_instruction(loader: Loader, compiler: str, instructions: str) -> None:
    """This includes instructions that the processor replaces by better ones."""
    flags, needed = {
        "avx512vnni": ("-march=skylake-avx512 -mavx512vnni", "avx512_vnni"),
        "avx512bw": ("-march=skylake-avx512", "avx512bw"),
        "avxvnni": ("-march=x86-64-v3 -mavxvnni", "avx_vnni"),
    }[instructions]
    if needed not in processor().split():
        pytest.skip(f"this machine has no {instructions}")
    library = loader(harness(["i8", "i8_turned"], SHAPES), [compiler, *flags.split()])
    for shape in SHAPES:
        check_integers(library, "i8", shape, pad=16)
        if shape in TURNED_SHAPES["i8_turned"]:
            check_integers(library, "i8_turned", shape, pad=16)


@pytest.mark.parametrize(
    "specials", [[1e-40, -1e-45, 1e-38, -0.0], [np.inf, -np.inf, np.nan, 3e38, -0.0]], ids=str
)
@pytest.mark.parametrize("shape", [(4, 128, 32), (64, 1, 64), (32, 32, 32), (128, 128, 64)], ids=str)
def test_denormals_infinities_and_nan(
    compiled: Library, scalar: Library, shape: Shape, specials: list[float]
) -> None:
    m, n, k = shape
    rng = np.random.default_rng(k)

    def sprinkled(rows: int, cols: int) -> Array:
        ordinary = np.float32(1e-20) * floats(rng, rows, cols)
        special = rng.choice(np.array(specials, np.float32), (rows, cols))
        return np.where(rng.random((rows, cols)) < 0.02, special, ordinary)

    a, b, c = sprinkled(m, k), sprinkled(k, n), sprinkled(m, n) * np.float32(1e-20)
    assert same_bits(run(compiled, "f32", a, b, c), expected(scalar, "f32", a, b, c))
    a, b = bf16(a), bf16(b)
    assert same_bits(run(compiled, "bf16", a, b, c), expected(scalar, "bf16", a, b, c))
    if shape in TURNED_SHAPES["bf16_turned"]:
        assert same_bits(run(compiled, "bf16_turned", a, b, c), expected(scalar, "bf16", a, b, c))


@pytest.mark.parametrize("compiler", COMPILERS)
def test_bf16_on_tiles_has_the_documented_order(loader: Loader, scalar: Library, compiler: str) -> None:
    kinds = ["bf16", "bf16_turned"]
    library = loader(harness(kinds, TILED_SHAPES), [compiler, "-march=native", "-DLOOM_DOT_BF16_HARDWARE"])
    if not library.has_tiles():
        pytest.skip("this machine has no AMX tiles")
    for m, n, k in TILED_SHAPES:
        rng = np.random.default_rng(k)
        a, b, c = bf16(floats(rng, m, k)), bf16(floats(rng, k, n)), floats(rng, m, n)
        for kind in kinds:
            assert same_bits(run(library, kind, a, b, c, pad=15), expected(scalar, "bf16_tiles", a, b, c))

        denormals, large = np.full((m, k), 1e-39, np.float32), np.full((k, n), 1e30, np.float32)
        nothing = np.zeros((m, n), np.float32)
        assert not run(library, "bf16", bf16(denormals), bf16(large), nothing).any()


@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_tile_configuration_is_restored(loader: Loader, compiler: str) -> None:
    library = loader(harness([], []), [compiler, "-march=native", "-DLOOM_DOT_BF16_HARDWARE"])
    if not library.has_tiles():
        pytest.skip("this machine has no AMX tiles")
    assert library.leaves_tiles_as_found()

"""Inline assembly: registers and packs, types and constraints, scopes and guards, masks, scalars; error messages; and
small kernels like those that use it.

The results of each instruction are tested in test_ptx_integers.py, test_ptx_floats.py and test_ptx_conversions.py."""

from __future__ import annotations

import re

import numpy as np
import pytest
import test_ptx_conversions
import test_ptx_floats
import test_ptx_integers
import torch
import triton
import triton.language as tl
import triton_loom
from formats import BF16, E4M3, F16, small_code
from support import random_values
from triton.language.extra.cuda import utils as cuda
from triton_loom.codegen import ptx
from triton_loom.codegen.assembly import Brace, Declaration, Instruction, Operand, Refused, parse
from triton_loom.testing import assert_same, check

# ---- the text --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("mov.f32 $0, $1;", [Instruction("mov.f32", (Operand("one", ("$0",)), Operand("one", ("$1",))))]),
        ("mov.b32 ${0}, -1", [Instruction("mov.b32", (Operand("one", ("$0",)), Operand("one", ("-1",))))]),
        (
            "{ .reg.b32 a<2>, b; .reg .pred %p; } // nothing",
            [Brace("{"), Declaration("b32", ("a0", "a1", "b")), Declaration("pred", ("%p",)), Brace("}")],
        ),
        (
            "@!p setp.lt.f16x2 p|q, a, 0x3F00; /* two */",
            [
                Instruction(
                    "setp.lt.f16x2",
                    (Operand("pair", ("p", "q")), Operand("one", ("a",)), Operand("one", ("0x3F00",))),
                    "!p",
                )
            ],
        ),
        (
            "mov.b64 {lo, _}, {$1,$2};",
            [Instruction("mov.b64", (Operand("vector", ("lo", "_")), Operand("vector", ("$1", "$2"))))],
        ),
        ("griddepcontrol.wait; // dummy $0", [Instruction("griddepcontrol.wait", ())]),
    ],
    ids=["one", "braced", "registers", "guard", "vectors", "comment"],
)
def test_text(text: str, steps: list[object]) -> None:
    assert parse(text) == steps


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{ mov.f32 $0, $1;", "braces"),
        ("mov.f32 $0, $1; }{", "braces"),
        ("mov.f32 $0 $1;", "`;` expected, not `\\$1`"),
        (".shared .b32 x;", r"\.shared"),
        ("again: mov.f32 $0, $1;", "label `again`"),
        ("mov.f32 $0, \N{SECTION SIGN};", "\N{SECTION SIGN}"),
    ],
)
def test_text_that_is_not_ptx_is_refused(text: str, why: str) -> None:
    with pytest.raises(Refused, match=why):
        parse(text)


# ---- registers and types -----------------------------------------------------------------------------------


@triton.jit
def move_each(
    x_ptr, out_ptr, TEXT: tl.constexpr, KINDS: tl.constexpr, PACK: tl.constexpr, BLOCK: tl.constexpr
):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    y = tl.inline_asm_elementwise(TEXT, KINDS, [x], dtype=out_ptr.dtype.element_ty, is_pure=True, pack=PACK)
    tl.store(out_ptr + offs, y)


def moved(x: torch.Tensor, dtype: torch.dtype, text: str, constraints: str, pack: int = 1) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=dtype)
    move_each[(1,)](x, out, TEXT=text, KINDS=constraints, PACK=pack, BLOCK=len(x))
    return out


@pytest.mark.parametrize(
    ("dtype", "letter", "move", "pack"),
    [
        (torch.float32, "f", "mov.f32", 1),
        (torch.float32, "r", "mov.b32", 1),
        (torch.int32, "r", "mov.u32", 1),
        (torch.uint32, "r", "mov.b32", 1),
        (torch.float64, "d", "mov.f64", 1),
        (torch.float64, "l", "mov.b64", 1),
        (torch.int64, "l", "mov.s64", 1),
        (torch.float16, "h", "mov.b16", 1),
        (torch.bfloat16, "h", "mov.b16", 1),
        (torch.int16, "h", "mov.u16", 1),
        (torch.uint8, "r", "mov.b32", 1),
        (torch.int8, "h", "mov.b16", 1),
        (torch.float8_e4m3fn, "c", "mov.b16", 1),
        (torch.float16, "r", "mov.b32", 2),
        (torch.bfloat16, "r", "mov.b32", 2),
        (torch.int16, "r", "mov.b32", 2),
        (torch.uint8, "r", "mov.b32", 4),
        (torch.int8, "h", "mov.b16", 2),
        (torch.float8_e5m2, "r", "mov.b32", 4),
    ],
    ids=str,
)
def test_each_type_goes_through_its_register(dtype: torch.dtype, letter: str, move: str, pack: int) -> None:
    x = random_values(64, dtype)
    assert_same(moved(x, dtype, f"{move} $0, $1;", f"={letter},{letter}", pack), x)


@pytest.mark.compat
def test_packs_of_several_registers() -> None:
    """Four halves take two registers, and so do eight bytes; each register has its first element in the low bits."""
    halves = random_values(32, torch.float16)
    swapped = "mov.b32 $0, $3; mov.b32 $1, $2;"
    expected = halves.view(-1, 2, 2).flip(1).reshape(-1)
    assert_same(moved(halves, torch.float16, swapped, "=r,=r,r,r", 4), expected)
    data = random_values(32, torch.uint8)
    reversed_bytes = "prmt.b32 $0, $2, 0, 0x0123; prmt.b32 $1, $3, 0, 0x0123;"
    assert_same(
        moved(data, torch.uint8, reversed_bytes, "=r,=r,r,r", 8), data.view(-1, 4).flip(1).reshape(-1)
    )
    words = random_values(32, torch.int32)
    assert_same(
        moved(words, torch.int32, "mov.b32 $0, $3; mov.b32 $1, $2;", "=r,=r,r,r", 2),
        words.view(-1, 2).flip(1).reshape(-1),
    )


def test_types_that_differ() -> None:
    """Convert a register of bytes to four of floats, and use a register wider than its element."""
    x = torch.arange(-64, 64, dtype=torch.int8)
    widened = "{ .reg .b8 a, b, c, d; mov.b32 {a, b, c, d}, $4; "
    widened += " ".join(f"cvt.rn.f32.s8 ${i}, {name};" for i, name in enumerate("abcd")) + " }"
    assert_same(moved(x, torch.float32, widened, "=f,=f,=f,=f,r", 4), x.float())
    half = moved(x, torch.float16, "cvt.rn.f16.s8 $0, $1;", "=h,r")
    assert_same(half, x.half())
    # a byte is alone in its register: the bits above it are zero
    assert_same(moved(x, torch.int32, "mov.b32 $0, $1;", "=r,r"), x.view(torch.uint8).int())
    # only the low bits of a result wider than its element are used
    assert_same(moved(x.int() * 1000, torch.int8, "mov.b32 $0, $1;", "=r,r"), (x.int() * 1000).to(torch.int8))


def test_an_input_that_is_tied_to_an_output() -> None:
    x = torch.arange(16, dtype=torch.int32)
    assert_same(moved(x, torch.int32, "add.s32 $0, $0, 5;", "=r,0"), x + 5)
    assert_same(moved(x, torch.int32, "add.s32 $0, $1, 5;", "=&r,r,~{memory}"), x + 5)


@triton.jit
def divide_both(x_ptr, y_ptr, quotient_ptr, rest_ptr, n, PURE: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, offs < n, 0)
    y = tl.load(y_ptr + offs, offs < n, 1)
    q, r, big = tl.inline_asm_elementwise(
        """{
            .reg .u32 product;
            .reg .pred %large;
            div.u32 $0, $3, $4;
            mul.lo.u32 product, $0, $4;
            sub.u32 product, $3, product;
            cvt.u16.u32 $1, product;       // the rest fits
            setp.gt.u32 %large, $0, 100;
            selp.f32 $2, 1.0, 0.0, %large;
        }""",
        "=r,=h,=f,r,r",
        [x, y],
        dtype=(tl.uint32, tl.uint16, tl.float32),
        is_pure=PURE,
        pack=1,
    )
    tl.store(quotient_ptr + offs, tl.where(big > 0.5, 100, q.to(tl.int32)), offs < n)
    tl.store(rest_ptr + offs, r, offs < n)


@pytest.mark.compat
@pytest.mark.parametrize("pure", [True, False])
def test_several_results_under_a_mask(pure: bool) -> None:
    x = torch.randint(0, 5000, (100,), dtype=torch.int32)
    y = torch.randint(1, 300, (100,), dtype=torch.int32)
    quotient, rest = torch.full((128,), -7, dtype=torch.int32), torch.full((128,), 7, dtype=torch.uint16)
    divide_both[(2,)](x, y, quotient, rest, 100, PURE=pure, BLOCK=64)
    assert_same(quotient[:100], (x // y).clamp(max=100))
    assert_same(rest[:100], (x % y).to(torch.uint16))
    assert (quotient[100:] == -7).all()
    assert (rest[100:] == 7).all()


@triton.jit
def scalars_and_tiles(x_ptr, out_ptr, sum_ptr, M: tl.constexpr, N: tl.constexpr):
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    offs = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + offs)
    scale = tl.load(x_ptr)
    twice = tl.inline_asm_elementwise(
        "add.f32 $0, $1, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1
    )
    total = 0.0
    for _ in range(2):
        x = tl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, 0f3F000000;", "=f,f,f", [x, twice], dtype=tl.float32, is_pure=True, pack=1
        )
        total += tl.sum(x)
    y = tl.inline_asm_elementwise(
        "neg.f32 $0, $1;", "=f,f", [tl.trans(x)], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(out_ptr + tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :], y)
    tl.store(sum_ptr, total)


def test_scalars_loops_and_two_dimensions() -> None:
    x = torch.randint(-8, 8, (8, 32)).float() / 4
    x[0, 0] = 0.75
    out, total = torch.zeros(32, 8), torch.zeros(1)
    scalars_and_tiles[(1,)](x, out, total, M=8, N=32)
    one = x * 1.5 + 0.5
    two = one * 1.5 + 0.5
    assert_same(out, -two.T)
    assert_same(total, (one.sum() + two.sum()).reshape(1))


@triton.jit
def double(x):
    return tl.inline_asm_elementwise(
        "add.f32 $0, $1, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def keep_going(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """Use the same assembly in several places, with computed operands and results used twice."""
    offs = tl.arange(0, BLOCK)
    x = double(tl.load(x_ptr + offs) + 1)
    y = double(x * x)
    tl.store(out_ptr + offs, tl.where(offs % 2 == 0, x, y) + double(x - y))


def test_assembly_amid_other_operations() -> None:
    x = torch.randint(-20, 20, (256,)).float()
    out = torch.zeros(256)
    keep_going[(1,)](x, out, BLOCK=256)
    a = 2 * (x + 1)
    b = 2 * a * a
    assert_same(out, torch.where(torch.arange(256) % 2 == 0, a, b) + 2 * (a - b))


@triton.jit
def add_outside(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Read whole packs and store the elements inside; the last load has no mask."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    y = tl.inline_asm_elementwise("add.f32 $0, $1, 1.0;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(out_ptr + offs, y, offs < n)


def test_assembly_under_a_witness() -> None:
    """The bytes of loads and stores around assembly are counted, a stray load is found, and results are the same."""
    x, y = torch.randint(0, 5000, (100,), dtype=torch.int32), torch.full((100,), 7, dtype=torch.int32)
    quotient, rest = torch.empty(100, dtype=torch.int32), torch.empty(100, dtype=torch.uint16)
    with triton_loom.count() as counted, triton_loom.sanitize() as report:
        divide_both[(2,)](x, y, quotient, rest, 100, PURE=True, BLOCK=64)
    assert not report.findings
    assert_same(quotient, (x // y).clamp(max=100))
    assert_same(rest, (x % y).to(torch.uint16))
    assert (counted.loads.distinct, counted.stores.distinct) == (2 * 400, 400 + 200)
    out = torch.zeros(100)
    with pytest.raises(triton_loom.SanitizerError, match="out-of-bounds load"), triton_loom.sanitize():
        add_outside[(2,)](torch.ones(100), out, 100, BLOCK=64)


# ---- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "constraints", "why"),
    [
        ("bar.sync 0;", "=f,f", r"`bar\.sync`: it deals with the threads"),
        ("shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;", "=r,r", "threads"),
        (
            "multimem.red.add.f32 [$1], $0;",
            "=f,f",
            r"`multimem\.red\.add\.f32`: it touches memory; use tl\.load",
        ),
        ("ld.global.f32 $0, [$1];", "=f,f", "touches memory"),
        ("atom.add.f32 $0, [$1], 1.0;", "=f,f", "touches memory"),
        ("@p bra done;", "=f,f", "branches"),
        (
            "ex3.approx.f32 $0, $1;",
            "=f,f",
            r"`ex3\.approx\.f32` is not in the table of src/triton_loom/codegen/ptx\.py",
        ),
        ("add.rz.f32 $0, $1, $1;", "=f,f", r"`add\.rz\.f32` is not in the table"),
        ("mov.b32 $0, %laneid;", "=r,r", "`%laneid` is a register of the GPU"),
        ("mov.b32 $0, t;", "=r,r", "`t` is not a register that the text declares"),
        ("v_mov_b32 $0, $1", "=v,v", "AMD"),
        ("add.f32 $0, $1;", "=f,f", r"`add\.f32` has 1 results at most and reads 2 operands"),
        ("add.f32 $0, $1, 1;", "=f,f", "`1` is no number of `f32`"),
        ("cvt.rn.satfinite.e2m1x2.f32 $0, $1, $1;", "=r,f", "`\\$0` has 32 bits, but 8 are read or written"),
        ("mov.b64 $0, $1;", "=r,r", "has 32 bits, but 64"),
        ("{ .reg .b16 h; mov.b32 $0, {h, h, h}; }", "=r,r", "3 registers do not make 32 bits"),
        ("lop3.b32 $0, $1, $1, $1, $1;", "=r,r", "`\\$1` is not an integer"),
        ("mov.f32 $0, $1;", "=f,f,f", "name 2 inputs, but 1 registers"),
        ("mov.f32 $0, $1;", "=f,m", "the constraint `m`"),
        ("mov.f32 $0, $1;", "=h,f", "1 x f32 does not fit the 16 bits"),
        ("@$1 mov.f32 $0, $1;", "=f,f", "is no predicate"),
    ],
)
def test_refusals_say_why(text: str, constraints: str, why: str) -> None:
    with pytest.raises(Exception, match=why) as caught:
        moved(torch.zeros(16), torch.float32, text, constraints)
    assert "test_assembly.py" in str(caught.value)
    assert " ".join(text.split()) in str(caught.value)


def test_types_without_a_register_are_refused() -> None:
    with pytest.raises(Exception, match="i1 cannot be passed to assembly"):
        moved(torch.zeros(16) > 0, torch.bool, "mov.b32 $0, $1;", "=r,r")


# ---- kernels that use it ----------------------------------------------------------------------------------------


@triton.jit
def tanh_fast(x):
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def cos_fast(x):
    return tl.inline_asm_elementwise(
        "cos.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def sin_fast(x):
    return tl.inline_asm_elementwise(
        "sin.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def rotating_step(state_ptr, angle_ptr, dt_ptr, x_ptr, gate_ptr, y_ptr, D: tl.constexpr, N: tl.constexpr):
    """Compute a step of a state-space model whose state rotates: pairs of channels by tanh(angle) dt, then decay,
    input, and a gate z sigmoid(z) through tanh."""
    row = tl.program_id(0)
    d, n = tl.arange(0, D), tl.arange(0, N)
    dt = tl.load(dt_ptr + row)
    angle = tanh_fast(tl.load(angle_ptr + row * N + n)) * 3.141592653589793 * dt  # [N]
    c, s = cos_fast(angle), sin_fast(angle)
    even = state_ptr + (row * D + d[:, None]) * 2 * N + 2 * n[None, :]
    a, b = tl.load(even), tl.load(even + 1)
    x = tl.load(x_ptr + row * D + d)[:, None]
    turned_a = (a * c - b * s) * tl.exp(-dt) + dt * x
    turned_b = (a * s + b * c) * tl.exp(-dt)
    tl.store(even, turned_a)
    tl.store(even + 1, turned_b)
    z = tl.load(gate_ptr + row * D + d)
    gate = 0.5 * z * (tanh_fast(0.5 * z) + 1)
    tl.store(y_ptr + row * D + d, tl.sum(turned_a + turned_b, 1) * gate)


@pytest.mark.compat
def test_a_step_of_a_state_space_model() -> None:
    rows, d, n = 3, 16, 32
    state = torch.randn(rows, d, n, 2)
    angle, dt, x, z = torch.randn(rows, n), torch.rand(rows), torch.randn(rows, d), torch.randn(rows, d)
    got_state, y = state.clone(), torch.zeros(rows, d)
    rotating_step[(rows,)](got_state, angle, dt, x, z, y, D=d, N=n)
    state, angle, dt, x, z = (t.double() for t in (state, angle, dt, x, z))
    turn = (angle.tanh() * torch.pi * dt[:, None])[:, None]
    a, b = state[..., 0], state[..., 1]
    decay = torch.exp(-dt)[:, None, None]
    new_a = (a * turn.cos() - b * turn.sin()) * decay + (dt[:, None] * x)[..., None]
    new_b = (a * turn.sin() + b * turn.cos()) * decay
    # A dozen roundings on numbers of at most 5, and an angle of at most pi that is four roundings off.
    check(got_state, torch.stack([new_a, new_b], -1), 16 * 5 * 2.0**-23)
    gate = z * torch.sigmoid(z)
    # 64 terms of that error, times a gate of at most 4
    check(y, (new_a + new_b).sum(-1) * gate, 64 * 16 * 5 * 2.0**-23)


SOFTPLUS = tl.constexpr(
    """{
    .reg .pred p;
    setp.gt.f32  p, $1, 20.;
    @p  mov.f32  $0, $1;
    @!p mul.f32            $0, $1, 1.4426950408889634;
    @!p ex2.approx.ftz.f32 $0, $0;
    @!p add.f32            $0, $0, 1.0;
    @!p lg2.approx.ftz.f32 $0, $0;
    @!p mul.f32            $0, $0, 0.6931471805599453;
    }"""
)


def test_softplus_with_guards() -> None:
    x = torch.linspace(-30, 40, 2048)
    y = moved(x, torch.float32, SOFTPLUS.value, "=r,r")
    truth = torch.logaddexp(x.double(), torch.zeros(1, dtype=torch.float64))
    # exp(x) rounds next to 1 (2^-24), its argument is off by |x| 2^-23, then a logarithm and a product
    check(y, truth, 2.0**-23 * (2 + x.double().abs().clamp(max=20) + 2 * truth))


FP4 = tl.constexpr(
    """{
    .reg .b8 byte0, byte1, byte2, byte3;
    cvt.rn.satfinite.e2m1x2.f32 byte0, $5, $1;
    cvt.rn.satfinite.e2m1x2.f32 byte1, $6, $2;
    cvt.rn.satfinite.e2m1x2.f32 byte2, $7, $3;
    cvt.rn.satfinite.e2m1x2.f32 byte3, $8, $4;
    mov.b32 $0, {byte0, byte1, byte2, byte3};
    }"""
)


@triton.jit
def quantize_fp4(x_ptr, code_ptr, scale_ptr, exponent_ptr, COLS: tl.constexpr, MX: tl.constexpr):
    """Quantize a row in blocks of 16 with an e4m3 scale each, or (MX) of 32 with a power of two; two codes per byte."""
    GROUP: tl.constexpr = 32 if MX else 16
    row, cols = tl.program_id(0), tl.arange(0, COLS)
    x = tl.reshape(tl.load(x_ptr + row * COLS + cols).to(tl.float32), [COLS // GROUP, GROUP])
    largest = tl.max(tl.abs(x), 1)
    groups = row * (COLS // GROUP) + tl.arange(0, COLS // GROUP)
    if MX:
        exponent = tl.inline_asm_elementwise(
            "cvt.rp.satfinite.ue8m0x2.f32 $0, 0.0, $1;",
            "=h,r",
            [largest / 6],
            dtype=tl.uint16,
            is_pure=True,
            pack=1,
        ).to(tl.uint8)
        tl.store(exponent_ptr + groups, exponent)
        inverse = ((254 - exponent.to(tl.int32)) << 23).to(tl.float32, bitcast=True)
    else:
        code = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, 0.0, $1;",
            "=h,r",
            [largest / 6],
            dtype=tl.uint16,
            is_pure=True,
            pack=1,
        ).to(tl.uint8)
        tl.store(scale_ptr + groups, code)
        inverse = tl.inline_asm_elementwise(
            "{ .reg .b16 h, unused; .reg .b32 two; cvt.rn.f16x2.e4m3x2 two, $1; mov.b32 {h, unused}, two; "
            "cvt.f32.f16 $0, h; rcp.approx.ftz.f32 $0, $0; }",
            "=f,h",
            [code.to(tl.uint16)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    low, high = tl.split(tl.reshape(x * inverse[:, None], [COLS // 2, 2]))
    packed = tl.inline_asm_elementwise(
        FP4, "=r,r,r,r,r,r,r,r,r", [low, high], dtype=tl.uint8, is_pure=True, pack=4
    )
    tl.store(code_ptr + row * (COLS // 2) + tl.arange(0, COLS // 2), packed)


@pytest.mark.compat
@pytest.mark.parametrize("mx", [False, True])
def test_fp4_with_scales_of_blocks(mx: bool) -> None:
    rows, cols, group = 4, 256, 32 if mx else 16
    x = torch.randn(rows, cols).bfloat16()
    codes = torch.zeros(rows, cols // 2, dtype=torch.uint8)
    scales = torch.zeros(rows, cols // group, dtype=torch.uint8)
    quantize_fp4[(rows,)](x, codes, scales, scales, COLS=cols, MX=mx)
    blocks = x.float().numpy().reshape(rows, -1, group)
    exact_scales = np.abs(blocks).max(-1) / np.float32(6)
    if mx:
        exponent = np.ceil(np.log2(exact_scales.astype(np.float64)))
        expected_codes, inverse = (exponent + 127).astype(np.uint8), np.exp2(-exponent).astype(np.float32)
    else:
        expected_codes = E4M3.encode(exact_scales.astype(np.float64))
        inverse = np.float32(1) / E4M3.values[expected_codes].astype(np.float32)
    assert_same(scales, torch.from_numpy(expected_codes))
    code = small_code("e2m1", (blocks * inverse[..., None]).reshape(rows, cols).astype(np.float64))
    assert_same(codes, torch.from_numpy((code[:, 1::2] << 4 | code[:, ::2]).astype(np.uint8)))


@triton.jit
def round_randomly(x_ptr, random_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, random = tl.load(x_ptr + offs), tl.load(random_ptr + offs)
    y = tl.inline_asm_elementwise(
        "cvt.rs.f16x2.f32 $0, $2, $1, $3;", "=r,r,r,r,r", [x, random], dtype=tl.float16, is_pure=True, pack=2
    )
    tl.store(out_ptr + offs, y)


def test_stochastic_rounding_is_right_on_average() -> None:
    """Round a number between two f16 neighbors with 4096 random words: the share of the upper one is its position."""
    n = 8192
    for fraction in (0.125, 0.5, 0.8125):
        x = torch.full((n,), 1 + fraction * 2.0**-10)
        random = torch.randint(-(2**31), 2**31, (n,), dtype=torch.int64).to(torch.int32)
        out = torch.zeros(n, dtype=torch.float16)
        round_randomly[(n // 1024,)](x, random, out, BLOCK=1024)
        assert set(out.tolist()) == {1.0, 1 + 2.0**-10}
        # five standard deviations of a mean of 8192, of which neighbors share no bits
        assert (
            abs((out.double().mean().item() - 1) * 2**10 - fraction)
            < 5 * (fraction * (1 - fraction) / n) ** 0.5
        )


@triton.jit
def from_fp8e4b15(code_ptr, half_ptr):
    offs = tl.arange(0, 256)
    tl.store(half_ptr + offs, cuda.convert_fp8e4b15_to_float16(tl.load(code_ptr + offs)))


@pytest.mark.compat
def test_every_code_of_fp8e4b15_decodes() -> None:
    """Decode every code of fp8e4b15, which the language itself decodes by prmt and lop3."""
    codes, half = torch.arange(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.float16)
    from_fp8e4b15[(1,)](codes, half)
    sign, exponent, mantissa = codes.int() >> 7, codes.int() >> 3 & 15, codes.int() & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 15)
    assert_same(half, (torch.where(exponent > 0, normal, mantissa / 8 * 2.0**-14) * (1 - 2 * sign)).half())


# ---- the table and its document ---------------------------------------------------------------------------


def names_of(pattern: str) -> list[str]:
    """Return every instruction that a family's pattern stands for."""
    group = re.search(r"\(([^()]*)\)|\{([^(){}]*)\}", pattern)  # the first one that has none inside
    if group is None:
        return [pattern]
    choices = ["", group[2]] if group[1] is None else group[1].split("|")
    return [
        name
        for choice in choices
        for name in names_of(pattern[: group.start()] + choice + pattern[group.end() :])
    ]


def test_every_instruction_is_tested() -> None:
    """Each instruction of the table is in a text whose results are compared with a reference, except comparisons that
    both flush and join: these are tested separately."""
    modules = (test_ptx_integers, test_ptx_floats, test_ptx_conversions)
    batches = [batch for module in modules for make in module.GROUPS.values() for batch in make()]
    batches += [test_ptx_floats.f32_approximations(), *test_ptx_floats.half_approximations()]
    steps = [step for batch in batches for case in batch.cases for step in parse(case.assembly)]
    tested = {step.name for step in steps if isinstance(step, Instruction)}
    required = [
        name for family in ptx.FAMILIES if family.error != "does nothing" for name in names_of(family.pattern)
    ]
    assert len(required) > 1700
    missing = [name for name in required if name not in tested]
    assert not [n for n in missing if not re.fullmatch(r"setp\.\w+\.(and|or|xor)\.ftz\.\w+", n)]


def test_the_document_has_the_table() -> None:
    from pathlib import Path

    document = Path(__file__).parents[1].joinpath("docs", "assembly.md").read_text()
    assert ptx.support_table() in document


def test_bf16_and_f16_of_one_register() -> None:
    """Use two formats in one text, packs of two, several instructions: bf16 in, f16 out, times two."""
    x = random_values(64, torch.bfloat16)
    text = """{
        .reg .b16 low, high;
        .reg .f32 a, b;
        mov.b32 {low, high}, $1;
        cvt.f32.bf16 a, low;
        cvt.f32.bf16 b, high;
        cvt.rn.f16x2.f32 $0, b, a;
        fma.rn.f16x2 $0, $0, $0, $0;
    }"""
    half = F16.values[F16.encode(BF16.numbers(x))]
    expected = F16.tensor(F16.encode(half * half + half))
    assert_same(moved(x, torch.float16, text, "=r,r", 2), expected)

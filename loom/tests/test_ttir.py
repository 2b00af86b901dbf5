"""The TTIR reader: every printed form of every operation, then whole kernels from Triton's front end."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton_loom import compiler
from triton_loom.codegen import operations
from triton_loom.ir import ttir
from triton_loom.ir.reader import parse
from triton_loom.ir.scanner import ParseError
from triton_loom.ir.ttir import Bits, Function, Module, Op, Opaque, Pointer, Scalar, Tensor

F32, I32 = Scalar("f32"), Scalar("i32")
VALUE = re.compile(r"%([\w\-]+)(?:#\d+)?")


def function(body: str, arguments: str = "", tail: str = "", before: str = "", after: str = "") -> Function:
    """Parse a module with these texts in their places; return its only function."""
    text = f"{before}\nmodule {{\n tt.func public @k({arguments}){tail} {{\n{body}\n }}\n}}\n{after}"
    return parse(text).entry


def operation(line: str) -> Op:
    """Parse one operation; its operands become arguments of the enclosing function."""
    left, equals, right = line.partition(" = ")
    used = dict.fromkeys(VALUE.findall(right if equals and left.startswith("%") else line))
    body = function(line, ", ".join(f"%{name}: i32" for name in used)).body
    (op,) = body.block.ops
    return op


# One line per printed form: the line, its results' types, its attributes. Operands are the `%` names in printed
# order.
SAMPLES: list[tuple[str, str, dict[str, Any]]] = [
    ("%2 = arith.addf %0, %1 : f32", "f32", {}),
    ("%9 = arith.addf %arg2, %arg3 : bf16", "bf16", {}),
    ("%10 = arith.addf %8, %9 : tensor<128xf32>", "tensor<128xf32>", {}),
    ("%40 = arith.addi %8, %c-626627285_i32 : i32", "i32", {}),
    ("%297 = arith.subi %295, %296 : tensor<2x2x2xi64>", "tensor<2x2x2xi64>", {}),
    ("%7 = arith.cmpf ogt, %arg2, %cst : f32", "i1", {"flags": ["ogt"]}),
    ("%9 = arith.cmpf une, %3, %6 : tensor<128xbf16>", "tensor<128xi1>", {"flags": ["une"]}),
    ("%8 = arith.cmpi ne, %7, %c0_i32 : i32", "i1", {"flags": ["ne"]}),
    ("%24 = arith.cmpi sge, %9, %cst : tensor<1x64xi64>", "tensor<1x64xi1>", {"flags": ["sge"]}),
    ("%19 = arith.select %18, %arg2, %arg4 : f32", "f32", {}),
    ("%3 = arith.select %arg5, %cst_2, %cst_1 : tensor<64x64xf16>", "tensor<64x64xf16>", {}),
    ("%12 = arith.select %9, %10, %11 : tensor<8xi1>, tensor<8xbf16>", "tensor<8xbf16>", {}),
    ("%8 = arith.extf %7 : bf16 to f32", "f32", {}),
    ("%6 = arith.truncf %5 : tensor<1024xf32> to tensor<1024xbf16>", "tensor<1024xbf16>", {}),
    ("%7 = arith.fptosi %6 : tensor<256xf32> to tensor<256xi32>", "tensor<256xi32>", {}),
    ("%5 = arith.index_cast %4 : i32 to index", "index", {}),
    ("%15 = math.fma %3, %4, %5 : tensor<128xf32>", "tensor<128xf32>", {}),
    ("%4 = math.absf %3 : f64", "f64", {}),
    ("llvm.intr.assume %true : i1", "", {}),
    ("ttg.barrier all", "", {"flags": ["all"]}),
    ("gpu.barrier", "", {}),
    ("tt.grid_dependency_wait", "", {}),
    ("%20 = tt.addptr %arg2, %1 : !tt.ptr<f32>, i64", "!tt.ptr<f32>", {}),
    (
        "%3 = tt.addptr %2, %1 : tensor<8x!tt.ptr<f8E4M3FN>>, tensor<8xi32>",
        "tensor<8x!tt.ptr<f8E4M3FN>>",
        {},
    ),
    (
        "%4 = tt.atomic_cas acquire, gpu, %arg0, %c0_i32, %c1_i32 : (!tt.ptr<i32>, i32, i32) -> i32",
        "i32",
        {"flags": ["acquire", "gpu"]},
    ),
    (
        "%7 = tt.atomic_rmw fadd, relaxed, gpu, %3, %6, %cst : "
        "(tensor<8x!tt.ptr<f32>>, tensor<8xf32>, tensor<8xi1>) -> tensor<8xf32>",
        "tensor<8xf32>",
        {"flags": ["fadd", "relaxed", "gpu"]},
    ),
    ("%5 = tt.bitcast %4 : f32 -> i32", "i32", {}),
    ("%6 = tt.bitcast %arg1 : !tt.ptr<f32> -> !tt.ptr<i32>", "!tt.ptr<i32>", {}),
    ("%8 = tt.broadcast %6 : tensor<1x4xi32> -> tensor<128x4xi32>", "tensor<128x4xi32>", {}),
    (
        "%6 = tt.clampf %5, %cst_2, %cst_1, propagateNan = none : tensor<256xf32>",
        "tensor<256xf32>",
        {"propagateNan": "none"},
    ),
    (
        "%17 = tt.dot %9, %16, %cst : tensor<4x8xi8> * tensor<8x4xi8> -> tensor<4x4xi32>",
        "tensor<4x4xi32>",
        {},
    ),
    (
        "%32 = tt.dot %21, %31, %arg5, inputPrecision = tf32 {maxNumImpreciseAcc = 128 : i32} : "
        "tensor<4x8xf8E4M3FN> * tensor<8x4xf8E4M3FN> -> tensor<4x4xf32>",
        "tensor<4x4xf32>",
        {"inputPrecision": "tf32", "maxNumImpreciseAcc": 128},
    ),
    (
        "%17 = tt.dot_scaled %9, %16, %cst lhs = e4m3 rhs = e5m2 {fastMath = false} : "
        "tensor<4x8xf8E4M3FN> * tensor<8x4xf8E5M2> -> tensor<4x4xf32>",
        "tensor<4x4xf32>",
        {"lhs": "e4m3", "rhs": "e5m2", "lhs_scale": None, "rhs_scale": None, "fastMath": False},
    ),
    (
        '%6 = tt.elementwise_inline_asm "tanh.approx.f32 $0, $1;" '
        '{constraints = "=f,f", packed_element = 1 : i32, pure = true} %5 : tensor<8xf32> -> tensor<8xf32>',
        "tensor<8xf32>",
        {"text": "tanh.approx.f32 $0, $1;", "constraints": "=f,f", "packed_element": 1, "pure": True},
    ),
    (
        r'%1 = tt.elementwise_inline_asm "{\0A .reg; \22x\22 \\ }" {constraints = "=r", pure = false} -> i32',
        "i32",
        {"text": '{\n .reg; "x" \\ }', "constraints": "=r", "pure": False},
    ),
    (
        "%1 = tt.expand_dims %0 {axis = 1 : i32} : tensor<2xi32> -> tensor<2x1xi32>",
        "tensor<2x1xi32>",
        {"axis": 1},
    ),
    (
        '%3 = tt.extern_elementwise %1, %2 {libname = "", libpath = "", pure = true, symbol = "loom::pow"} '
        ": (tensor<8xf32>, tensor<8xf32>) -> tensor<8xf32>",
        "tensor<8xf32>",
        {"libname": "", "libpath": "", "pure": True, "symbol": "loom::pow"},
    ),
    ("%6 = tt.fp_to_fp %5 : tensor<8xf8E5M2> -> tensor<8xbf16>", "tensor<8xbf16>", {}),
    ("%6 = tt.fp_to_fp %5, rounding = rtz : f32 -> f16", "f16", {"rounding": "rtz"}),
    (
        "%9 = tt.gather %5[%8] {axis = 0 : i32} : (tensor<8xf32>, tensor<4xi32>) -> tensor<4xf32>",
        "tensor<4xf32>",
        {"axis": 0},
    ),
    ("%4 = tt.get_program_id y : i32", "i32", {"flags": ["y"]}),
    ("%4 = tt.get_num_programs z : i32", "i32", {"flags": ["z"]}),
    ("%6 = tt.histogram %5, %2 : tensor<512xi32> -> tensor<64xi32>", "tensor<64xi32>", {}),
    ("%7 = tt.int_to_ptr %4 : i64 -> !tt.ptr<f32>", "!tt.ptr<f32>", {}),
    ("%7 = tt.join %4, %6 : tensor<256xi8> -> tensor<256x2xi8>", "tensor<256x2xi8>", {}),
    ("%42 = tt.load %41 : !tt.ptr<f32>", "f32", {}),
    ("%3 = tt.load %2 : tensor<256x!tt.ptr<i8>>", "tensor<256xi8>", {}),
    ("%3 = tt.load %2 : tensor<4x!tt.ptr<!tt.ptr<f32>>>", "tensor<4x!tt.ptr<f32>>", {}),
    ("%5 = tt.load %4, %2, %cst : tensor<512x!tt.ptr<i32>>", "tensor<512xi32>", {}),
    ("%5 = tt.load %4 {isVolatile = true} : !tt.ptr<bf16>", "bf16", {"isVolatile": True}),
    (
        "%5 = tt.load %4, %2 cacheModifier = cg evictionPolicy = evict_first : tensor<8x!tt.ptr<f32>>",
        "tensor<8xf32>",
        {"cacheModifier": "cg", "evictionPolicy": "evict_first"},
    ),
    (
        "%5 = tt.load %4 {cachePolicy = #tt.cache_policy<cache_modifier = cg, eviction_policy = evict_first>}"
        " : tensor<8x!tt.ptr<f32>>",
        "tensor<8xf32>",
        {"cachePolicy": {"tt.cache_policy": "cache_modifier = cg, eviction_policy = evict_first"}},
    ),
    (
        "%0 = tt.make_range {end = 2 : i32, start = 0 : i32} : tensor<2xi32>",
        "tensor<2xi32>",
        {"end": 2, "start": 0},
    ),
    ("%18 = tt.mulhiui %c-766435501_i32, %8 : i32", "i32", {}),
    ("%17 = tt.precise_divf %3, %5 : tensor<128xf32>", "tensor<128xf32>", {}),
    ("%7 = tt.ptr_to_int %4 : tensor<4x!tt.ptr<f32>> -> tensor<4xi64>", "tensor<4xi64>", {}),
    ("%8 = tt.reshape %7 : tensor<4x2xi8> -> tensor<8xi8>", "tensor<8xi8>", {}),
    (
        "%8 = tt.reshape %7 allow_reorder : tensor<4x2xi8> -> tensor<8xi8>",
        "tensor<8xi8>",
        {"flags": ["allow_reorder"]},
    ),
    ("tt.return", "", {}),
    ("tt.return %1, %2 : i32, tensor<4xf32>", "", {}),
    ("tt.reduce.return %11, %16, %8 : f32, f32, f32", "", {}),
    ("tt.scan.return %17, %19 : f32, i32", "", {}),
    ("tt.map_elementwise.return %8 : f32", "", {}),
    ("scf.yield", "", {}),
    ("scf.yield %43, %55 : tensor<64xf32>, f32", "", {}),
    ("scf.condition(%5)", "", {}),
    ("scf.condition(%5) %6, %7 : i32, f32", "", {}),
    ("%5 = tt.splat %4 : !tt.ptr<bf16> -> tensor<64x1x!tt.ptr<bf16>>", "tensor<64x1x!tt.ptr<bf16>>", {}),
    (
        "%outLHS, %outRHS = tt.split %9 : tensor<128x2xi32> -> tensor<128xi32>",
        "tensor<128xi32>, tensor<128xi32>",
        {},
    ),
    ("tt.store %6, %8 : !tt.ptr<f32>", "", {}),
    ("tt.store %32, %30, %28 : tensor<64x64x!tt.ptr<f16>>", "", {}),
    (
        "tt.store %2, %6 cacheModifier = cs evictionPolicy = evict_last : tensor<128x!tt.ptr<f32>>",
        "",
        {"cacheModifier": "cs", "evictionPolicy": "evict_last"},
    ),
    (
        "tt.store %2, %6 {cachePolicy = #tt.cache_policy<cache_modifier = cs, eviction_policy = normal>} "
        ": !tt.ptr<f32>",
        "",
        {"cachePolicy": {"tt.cache_policy": "cache_modifier = cs, eviction_policy = normal"}},
    ),
    (
        "%12 = tt.trans %11 {order = array<i32: 1, 0, 2>} : tensor<4x32x4xi8> -> tensor<32x4x4xi8>",
        "tensor<32x4x4xi8>",
        {"order": [1, 0, 2]},
    ),
    ("%1 = tt.unsplat %0 : tensor<1xf32> -> f32", "f32", {}),
    (
        'tt.print " x: " {hex = false, isSigned = array<i32: 1, 0>} : %1, %2 : i32, tensor<4xi32>',
        "",
        {"text": " x: ", "hex": False, "isSigned": [1, 0]},
    ),
    ('tt.print "at" {hex = false, isSigned = array<i32>}', "", {"text": "at", "hex": False, "isSigned": []}),
    ('tt.assert %1, "x must be > 0: \\"x\\"" : tensor<4xi1>', "", {"text": 'x must be > 0: "x"'}),
    ("%0 = ub.poison : tensor<4xf32>", "tensor<4xf32>", {}),
    (
        "%2 = tt.call @callee__i32(%0, %1) : (i32, i32) -> i32",
        "i32",
        {"callee": "callee__i32"},
    ),
    (
        '%2:3 = tt.call @"a.b$c"(%0) {x} : (i32) -> (i32, tensor<4xf32>, !tt.ptr<f32>)',
        "i32, tensor<4xf32>, !tt.ptr<f32>",
        {"callee": "a.b$c", "x": True},
    ),
    ("tt.call @callee() : () -> ()", "", {"callee": "callee"}),
]  # fmt: skip


@pytest.mark.parametrize("location", ["", ' loc("k.py":7:3)', " loc(#loc1)", " // a comment"])
@pytest.mark.parametrize(("line", "types", "attrs"), SAMPLES, ids=[line[:60] for line, _, _ in SAMPLES])
def test_operation(line: str, types: str, attrs: dict[str, Any], location: str) -> None:
    op = operation(line + location)
    left, equals, right = line.partition(" = ")
    text = right if equals and left.startswith("%") else line
    assert op.name == re.split(r"[\s(]", text, maxsplit=1)[0]
    assert [v.name for v in op.operands] == VALUE.findall(text)
    assert ", ".join(str(r.type) for r in op.results) == types
    assert all(r.producer is op for r in op.results)
    assert op.attrs == attrs
    assert op.location == ("k.py:7" if '"k.py"' in location else "")


def test_scales_follow_the_operands_of_dot_scaled() -> None:
    op = operation(
        "%34 = tt.dot_scaled %a scale %sa, %b scale %sb, %c lhs = e2m1 rhs = e2m1 {fastMath = true} : "
        "tensor<4x4xi8>, tensor<4x1xi8> * tensor<4x4xi8>, tensor<4x1xi8> -> tensor<4x4xf32>"
    )
    assert [v.name for v in op.operands] == ["a", "b", "c", "sa", "sb"]
    assert (op.attrs["lhs_scale"], op.attrs["rhs_scale"]) == (3, 4)
    op = operation(
        "%28 = tt.dot_scaled %a, %b scale %sb, %c lhs = bf16 rhs = e2m1 {fastMath = false} : "
        "tensor<4x8xbf16> * tensor<4x4xi8>, tensor<4x1xi8> -> tensor<4x4xf32>"
    )
    assert [v.name for v in op.operands] == ["a", "b", "c", "sb"]
    assert (op.attrs["lhs_scale"], op.attrs["rhs_scale"]) == (None, 3)
    assert str(op.result.type) == "tensor<4x4xf32>"


# ---- constants -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "type_", "value"),
    [
        ("true", "i1", True),
        ("false", "i1", False),
        ("0 : i32", "i32", 0),
        ("-2147483648 : i32", "i32", -(2**31)),
        ("9223372036854775807 : i64", "i64", 2**63 - 1),
        ("-1 : i8", "i8", -1),
        ("0.000000e+00 : f32", "f32", 0.0),
        ("4.480000e+02 : f8E4M3FN", "f8E4M3FN", 448.0),
        ("-1.500000e-03 : f64", "f64", -1.5e-3),
        ("0x7F800000 : f32", "f32", Bits(0x7F800000)),
        ("0xFFC0 : bf16", "bf16", Bits(0xFFC0)),
        ("0x7FF0000000000000 : f64", "f64", Bits(0x7FF0000000000000)),
        ("dense<4> : tensor<512xi32>", "tensor<512xi32>", 4),
        ("dense<-4> : tensor<512xi32>", "tensor<512xi32>", -4),
        ("dense<true> : tensor<128xi1>", "tensor<128xi1>", True),
        ("dense<0.000000e+00> : tensor<64x64xf32>", "tensor<64x64xf32>", 0.0),
        ("dense<0x7E00> : tensor<64x64xf16>", "tensor<64x64xf16>", Bits(0x7E00)),
        ("dense<[0, 1, -2, 3]> : tensor<4xi32>", "tensor<4xi32>", [0, 1, -2, 3]),
        ("dense<[[0, 1], [2, 3]]> : tensor<2x2xi32>", "tensor<2x2xi32>", [0, 1, 2, 3]),
        ("dense<[true, false]> : tensor<2xi1>", "tensor<2xi1>", [True, False]),
        (
            "dense<[1.000000e+00, -2.5e-01, 0x7F800000]> : tensor<3xf32>",
            "tensor<3xf32>",
            [1.0, -0.25, Bits(0x7F800000)],
        ),
        ('dense<"0x00010203"> : tensor<4xi8>', "tensor<4xi8>", b"\0\1\2\3"),
    ],
)
@pytest.mark.parametrize("location", ["", " loc(#loc1)"])
def test_constant(text: str, type_: str, value: Any, location: str) -> None:
    op = operation(f"%cst = arith.constant {text}{location}")
    assert str(op.result.type) == type_
    assert op.attrs == {"value": value}
    assert type(op.attrs["value"]) is type(value)


def test_the_sign_of_zero_survives() -> None:
    assert str(operation("%z = arith.constant -0.000000e+00 : f32").attrs["value"]) == "-0.0"


# ---- types and attributes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("i1", Scalar("i1")),
        ("index", Scalar("index")),
        ("bf16", Scalar("bf16")),
        ("f8E5M2FNUZ", Scalar("f8E5M2FNUZ")),
        ("!tt.ptr<f32>", Pointer(F32)),
        ("!tt.ptr<f32, 3>", Pointer(F32)),
        ("!tt.ptr<!tt.ptr<i32>>", Pointer(Pointer(I32))),
        ("tensor<i32>", Tensor((), I32)),
        ("tensor<16x1x4xf32>", Tensor((16, 1, 4), F32)),
        ("tensor<8x!tt.ptr<bf16>>", Tensor((8,), Pointer(Scalar("bf16")))),
        ("tensor<8xf32, #ttg.blocked<{a = [1, 2]}>>", Tensor((8,), F32)),
        ("!tt.tensordesc<tensor<4x8xf16>>", Opaque("!tt.tensordesc<tensor<4x8xf16>>")),
        ("!ttg.async.token", Opaque("!ttg.async.token")),
    ],
)
def test_type(text: str, expected: ttir.Type) -> None:
    (argument,) = function("tt.return", f"%x: {text}").args
    assert argument.type == expected


@pytest.mark.parametrize(
    ("name", "bits", "is_float"),
    [("i1", 1, False), ("i8", 8, False), ("index", 64, False), ("bf16", 16, True), ("f16", 16, True),
     ("f64", 64, True), ("f8E4M3FN", 8, True), ("f8E5M2FNUZ", 8, True)],
)  # fmt: skip
def test_scalar(name: str, bits: int, is_float: bool) -> None:
    assert (Scalar(name).bits, Scalar(name).is_float) == (bits, is_float)


def test_element_and_shape_of_types() -> None:
    assert ttir.element_of(Tensor((4, 8), F32)) == F32
    assert ttir.element_of(Pointer(F32)) == Pointer(F32)
    assert ttir.shape_of(Tensor((4, 8), F32)) == (4, 8)
    assert ttir.shape_of(F32) == ()
    assert Tensor((4, 8), F32).size == 32
    with pytest.raises(TypeError, match=r"!tt\.token"):
        ttir.element_of(Opaque("!tt.token"))


def test_attributes_of_every_kind() -> None:
    op = operation(
        'some.op {flag, a = 1 : i32, b = -2.5 : f32, c = "x\\0Ay", d = [1, 2], e = array<i64: 3, -4>, '
        'f = #tt.thing<a = 1, b = <2>>, g = #alias, h = @symbol, i = {j = true}, k = unit, "l.m" = false}'
    )
    assert op.attrs == {
        "flag": True, "a": 1, "b": -2.5, "c": "x\ny", "d": ["1", "2"], "e": [3, -4], "g": "alias",
        "f": {"tt.thing": "a = 1, b = <2>"}, "h": "symbol", "i": {"j": True}, "k": "unit", "l.m": False,
    }  # fmt: skip


def test_arguments_of_a_function() -> None:
    kernel = function(
        "tt.return",
        '%x: !tt.ptr<f32> {tt.divisibility = 16 : i32, tt.pointer_range = 32 : i32} loc("x"(#loc)), '
        "%n: i32 loc(#loc), %s: f32",
        " attributes {noinline = false}",
    )
    assert [(a.name, str(a.type)) for a in kernel.args] == [("x", "!tt.ptr<f32>"), ("n", "i32"), ("s", "f32")]
    assert kernel.arg_attrs == [{"tt.divisibility": 16, "tt.pointer_range": 32}, {}, {}]


# ---- structure -------------------------------------------------------------------------------------------


def test_module_with_several_functions() -> None:
    module = parse("""
module attributes {"ttg.num-warps" = 4 : i32, ttg.target = "cpu"} {
  tt.func private @helper(%a: i32, %b: i32) -> (i32, i32) attributes {noinline = true} {
    tt.return %b, %a : i32, i32
  }
  tt.func public @main(%x: i32) attributes {noinline = false} {
    %0:2 = tt.call @helper(%x, %x) : (i32, i32) -> (i32, i32)
    %1 = arith.addi %0#1, %0#0 : i32
    tt.return
  }
}
""")
    assert list(module.functions) == ["helper", "main"]
    assert module.entry.name == "main"
    helper = module.functions["helper"]
    assert (helper.public, helper.results) == (False, [I32, I32])
    call, add, _ = module.entry.body.block.ops
    assert add.operands == [call.results[1], call.results[0]]
    assert [r.name for r in call.results] == ["0_0", "0_1"]


def test_names_are_local_to_their_function_and_region() -> None:
    module = parse("""
module {
  tt.func private @f(%0: f32) {
    tt.return
  }
  tt.func public @g(%c: i1, %0: i32) {
    scf.if %c {
      %1 = arith.addi %0, %0 : i32
    } else {
      %1 = arith.muli %0, %0 : i32
      %2 = arith.addi %1, %1 : i32
    }
    tt.return
  }
}
""")
    (conditional, _) = module.functions["g"].body.block.ops
    product, total, _ = conditional.regions[1].block.ops
    assert total.operands == [product.result, product.result]
    assert conditional.regions[1].parent is conditional
    assert product.block is conditional.regions[1].block
    assert [op.name for op in conditional.walk()] == [
        "scf.if", "arith.addi", "scf.yield", "arith.muli", "arith.addi", "scf.yield"
    ]  # fmt: skip
    with pytest.raises(ParseError, match="%1"):
        function("scf.if %c {\n %1 = arith.addi %a, %a : i32\n}\n tt.return %1 : i32", "%c: i1, %a: i32")


def test_for_loop() -> None:
    kernel = function(
        """
  %r:2 = scf.for %i = %lo to %hi step %s iter_args(%a = %x, %b = %lo) -> (tensor<8xf32>, i32)  : i32 {
    %0 = arith.addf %a, %a : tensor<8xf32>
    %1 = arith.addi %b, %i : i32
    scf.yield %0, %1 : tensor<8xf32>, i32
  } {tt.loop_unroll_factor = 2 : i32}
  scf.for %i = %lo to %hi step %s  : i32 {
  }
  scf.for unsigned %i = %wide to %wide step %wide  : i64 {
    scf.yield
  } loc("k.py":3:1)
  tt.return %r#1 : i32""",
        "%x: tensor<8xf32>, %lo: i32, %hi: i32, %s: i32, %wide: i64",
    )
    carrying, bare, unsigned, end = kernel.body.block.ops
    body = carrying.regions[0].block
    assert [v.name for v in carrying.operands] == ["lo", "hi", "s", "x", "lo"]
    assert [(a.name, str(a.type)) for a in body.args] == [("i", "i32"), ("a", "tensor<8xf32>"), ("b", "i32")]
    assert all(a.owner is body and a.producer is None for a in body.args)
    assert [str(r.type) for r in carrying.results] == ["tensor<8xf32>", "i32"]
    assert carrying.attrs == {"unsigned": False, "tt.loop_unroll_factor": 2}
    assert [op.name for op in body.ops] == ["arith.addf", "arith.addi", "scf.yield"]
    assert (bare.results, [op.name for op in bare.regions[0].block.ops]) == ([], ["scf.yield"])
    assert (unsigned.attrs["unsigned"], unsigned.location) == (True, "k.py:3")
    assert str(unsigned.regions[0].block.args[0].type) == "i64"
    assert end.operands == [carrying.results[1]]


def test_conditional() -> None:
    kernel = function(
        """
  %0:2 = scf.if %c -> (f32, i32) {
    scf.yield %x, %n : f32, i32
  } else {
    scf.yield %x, %n : f32, i32
  } loc("k.py":3:1)
  scf.if %c {
    tt.store %p, %x : !tt.ptr<f32>
  }
  tt.return %0#0 : f32""",
        "%c: i1, %x: f32, %n: i32, %p: !tt.ptr<f32>",
    )
    both, one, end = kernel.body.block.ops
    assert [str(r.type) for r in both.results] == ["f32", "i32"]
    assert (len(both.regions), len(one.regions), both.location) == (2, 1, "k.py:3")
    assert end.operands == [both.results[0]]


def test_while_loop() -> None:
    kernel = function(
        """
  %w:2 = scf.while (%a = %n, %b = %x) : (i32, f32) -> (f32, i32) {
    %0 = arith.cmpi sgt, %a, %n : i32
    scf.condition(%0) %b, %a : f32, i32
  } do {
  ^bb0(%c: f32 loc("k.py":1:1), %d: i32):
    scf.yield %d, %c : i32, f32
  } attributes {x = 1 : i32}
  scf.while : () -> () {
    scf.condition(%go)
  } do {
    scf.yield
  }
  tt.return %w#1 : i32""",
        "%n: i32, %x: f32, %go: i1",
    )
    carrying, bare, _ = kernel.body.block.ops
    before, after = (region.block for region in carrying.regions)
    assert [str(r.type) for r in carrying.results] == ["f32", "i32"]
    assert [v.name for v in carrying.operands] == ["n", "x"]
    assert [(a.name, str(a.type)) for a in before.args] == [("a", "i32"), ("b", "f32")]
    assert [(a.name, str(a.type)) for a in after.args] == [("c", "f32"), ("d", "i32")]
    assert after.ops[0].operands == after.args[::-1]
    assert carrying.attrs == {"x": 1}
    assert [len(region.block.ops) for region in bare.regions] == [1, 1]


def test_blocks_and_branches() -> None:
    kernel = function(
        """
    cf.cond_br %c, ^bb1, ^bb2(%n, %x : i32, f32) {a}
  ^bb1:  // pred: ^bb0
    cf.br ^bb2(%n, %x : i32, f32) loc("k.py":5:1)
  ^bb2(%a: i32, %b: f32):  // 2 preds: ^bb0, ^bb1
    cf.cond_br %c, ^bb3, ^bb4
  ^bb3:  // pred: ^bb2
    cf.br ^bb4
  ^bb4:  // 2 preds: ^bb2, ^bb3
    tt.return""",
        "%c: i1, %n: i32, %x: f32",
    )
    first, second, third, fourth, last = kernel.body.blocks
    (conditional,) = first.ops
    (straight,) = second.ops
    assert [[b for b, _ in block.ops[0].successors] for block in (third, fourth)] == [[fourth, last], [last]]
    assert [v.name for v in conditional.operands] == ["c"]
    assert conditional.successors == [(second, []), (third, kernel.args[1:])]
    assert straight.successors == [(third, kernel.args[1:])]
    assert [block.name for block in kernel.body.blocks] == ["", "bb1", "bb2", "bb3", "bb4"]
    assert (conditional.attrs, straight.location) == ({"a": True}, "k.py:5")
    assert [(a.name, str(a.type), a.owner) for a in third.args] == [("a", "i32", third), ("b", "f32", third)]
    assert all(b.region is kernel.body for b in kernel.body.blocks)
    with pytest.raises(ValueError, match="one block"):
        _ = kernel.body.block


def test_generic_operation_with_regions() -> None:
    kernel = function(
        """
  %r:2 = "tt.reduce"(%x, %i) <{axis = 1 : i32}> ({
  ^bb0(%a: f32, %b: i32, %c: f32, %d: i32):
    tt.reduce.return %a, %d : f32, i32
  }) {noted} : (tensor<4x8xf32>, tensor<4x8xi32>) -> (tensor<4xf32>, tensor<4xi32>) loc("k.py":4:2)
  %s = "tt.scan"(%i) <{axis = 0 : i32, reverse = true}> ({
  ^bb0(%a: i32, %b: i32):
    tt.scan.return %a : i32
  }) : (tensor<4x8xi32>) -> tensor<4x8xi32>
  "some.sink"(%s) : (tensor<4x8xi32>) -> ()""",
        "%x: tensor<4x8xf32>, %i: tensor<4x8xi32>",
    )
    reduce, scan, sink = kernel.body.block.ops
    assert reduce.attrs == {"axis": 1, "noted": True}
    assert [str(r.type) for r in reduce.results] == ["tensor<4xf32>", "tensor<4xi32>"]
    assert [a.name for a in reduce.regions[0].block.args] == ["a", "b", "c", "d"]
    assert reduce.location == "k.py:4"
    assert scan.attrs == {"axis": 0, "reverse": True}
    assert sink.operands == [scan.result]
    assert sink.results == []


# ---- locations -------------------------------------------------------------------------------------------

ALIASES = """\
#loc = loc("/a b/k.py":3:0)
#loc1 = loc(unknown)
#loc2 = loc("/a b/k.py":11:16)
#loc3 = loc("/lib/standard.py":290:36)
#loc4 = loc("acc"(#loc2))
#loc5 = loc(callsite(#loc3 at #loc2))
#loc6 = loc(callsite(#loc3 at #loc5))
#loc7 = loc("sum"(#loc6))
#loc8 = loc(callsite("y"(#loc3) at #loc4))
#loc9 = loc(#loc9)"""


@pytest.mark.parametrize(
    ("printed", "resolved"),
    [
        ('"k.py":12:7', "k.py:12"),
        ('"x"("k.py":12:7)', "k.py:12"),
        ("unknown", ""),
        ("#loc", "/a b/k.py:3"),
        ("#loc1", ""),
        ("#loc4", "/a b/k.py:11"),
        ("#loc5", "/a b/k.py:11"),
        ("#loc6", "/a b/k.py:11"),
        ("#loc7", "/a b/k.py:11"),
        ("#loc8", "/a b/k.py:11"),
        ("#loc9", ""),
        ("#loc99", ""),
        ("callsite(#loc3 at callsite(#loc3 at #loc2))", "/a b/k.py:11"),
        ('callsite(#loc3 at "x"(#loc2))', "/a b/k.py:11"),
    ],
)
def test_location_is_the_line_of_the_outermost_caller(printed: str, resolved: str) -> None:
    first, _, rest = ALIASES.partition("\n")
    line = f"%0 = arith.addi %x, %x : i32 loc({printed})"
    kernel = function(line, "%x: i32", before=first, after=rest)
    assert kernel.body.block.ops[0].location == resolved


# ---- malformed TTIR --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("%0 = arith.addi %x, %nowhere : i32", "line 4: .*%nowhere"),
        ("%0 = arith.addi %x, %x : i32\n %1 = = 3", "line 5: "),
        ("%0:2 = arith.addi %x, %x : i32", "line 4: .*2 results of arith.addi"),
        ("%0 = tt.call (%x) : (i32) -> i32", "line 4: expected a function name"),
        ("%0 = scf.for = %x to %x step %x : i32 {\n }", "line 4: expected an induction variable"),
        ("scf.while (= %x) : (i32) -> i32 {\n }", "line 4: expected a loop value"),
        ("scf.if %x\n", "expected '{'"),
        ("%0 = arith.addi %x, %x : tensor<4x!ttg.memdesc<4xi32>>", "line 4: .*scalars or pointers"),
        ("%0 = arith.addi %x, %x i32 :", "line 4: "),
        ("%0 = arith.constant dense<[1, 2", "line 4: "),
        ('%0 = "tt.reduce"(%x) <{axis = 0 : i32', "line [45]: "),
        ("%0:x = arith.addi %x, %x : i32", "line 4: "),
        ("tt.return loc(", "line 4: "),
    ],
)
def test_error_names_the_line(body: str, message: str) -> None:
    with pytest.raises(ParseError, match=f"TTIR.*{message}"):
        function(body, "%x: i32")


@pytest.mark.parametrize("text", ["", "tt.func public @f() {\n}", "modules {}"])
def test_text_without_a_module(text: str) -> None:
    with pytest.raises(ParseError, match="no module"):
        parse(text)


@pytest.mark.parametrize(
    "head", ["tt.func public () {", "tt.func @f(i32) {", "func.func @f() {", "tt.func @f(%x i32) {"]
)
def test_head_of_a_function(head: str) -> None:
    with pytest.raises(ParseError, match="line 2: "):
        parse(f"module {{\n {head}\n tt.return\n }}\n}}")


# ---- whole kernels, from Triton's own front end ------------------------------------------------------------


@triton.jit
def softmax(x, y, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * n + i, mask=i < n, other=-float("inf"), eviction_policy="evict_first")
    e = tl.exp(v - tl.max(v, 0))
    tl.store(y + row * n + i, e / tl.sum(e, 0), mask=i < n, cache_modifier=".cs")


@triton.jit
def matmul(a, b, c, n, B: tl.constexpr):
    i = tl.arange(0, B)
    acc = tl.zeros((B, B), tl.float32)
    left, right = a + i[:, None] * n + i[None, :], b + i[:, None] * n + i[None, :]
    for k in range(tl.cdiv(n, B)):
        inside = i + k * B < n
        acc = tl.dot(tl.load(left, mask=inside[None, :]), tl.load(right, mask=inside[:, None]), acc)
        left += B
        right += B * n
    tl.store(c + i[:, None] * B + i[None, :], acc.to(tl.float16))


@triton.jit
def online(x, y, n, B: tl.constexpr):
    i = tl.arange(0, B)
    top, total = tl.full((B,), -float("inf"), tl.float32), tl.zeros((B,), tl.float32)
    for k in tl.range(0, n, B):
        v = tl.load(x + k + i, mask=k + i < n, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, v)
        total = total * tl.exp2(top - new) + tl.exp2(v - new)
        top = new
    tl.store(y, tl.sum(total * tl.exp2(top - tl.max(top, 0)), 0).to(y.dtype.element_ty))


@triton.jit
def rearranging(x, y, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    low, high = tl.split(tl.reshape(v, (B // 2, 2)))
    both = tl.trans(tl.join(high, low), (1, 0)).reshape((B,))
    picked = tl.gather(both, (i * 3) % B, 0)
    counts = tl.histogram((i & 7), 8)
    tl.store(x + i, tl.sort(picked) + tl.flip(v, 0) + tl.interleave(low, high))
    tl.store(y + tl.arange(0, 8), counts)


@triton.jit
def _combine(a, i, b, j):
    first = a > b
    return tl.where(first, a, b), tl.where(first, i, j)


@triton.jit
def folding(x, y, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i[:, None] * B + i[None, :])
    tl.store(y + i, tl.argmin(v, 1) + tl.argmax(v, 0) + tl.xor_sum(v.to(tl.int32), 0))
    most, where = tl.reduce((v, tl.broadcast_to(i[:, None], (B, B))), 0, _combine)
    tl.store(y + i, tl.cumsum(where, 0, reverse=True) + most.to(tl.int32))
    tl.store(y + i, tl.associative_scan((most, where), 0, _combine)[1])


@triton.jit
def casting(x, y, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i).to(tl.float32)
    quantized = v.to(tl.float8e4nv).to(tl.float32)
    quantized += v.to(tl.float8e5, fp_downcast_rounding="rtz").to(tl.float32)
    narrow = v.to(tl.bfloat16).to(tl.float64) + v.to(tl.int8).to(tl.float64) + v.to(tl.uint16).to(tl.float64)
    bits = v.to(tl.int32, bitcast=True) >> 3
    tl.store(y + i, (quantized + narrow.to(tl.float32) + bits).to(tl.int1).to(tl.int32))


@triton.jit
def mathematics(x, y, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i).to(tl.float32)
    v = tl.exp(v) + tl.exp2(v) + tl.log(v) + tl.log2(v) + tl.sin(v) + tl.cos(v) + tl.erf(v) + tl.rsqrt(v)
    v = tl.fma(v, v, tl.floor(v)) + tl.ceil(v) + tl.abs(v) + tl.clamp(v, -1.0, 1.0) - tl.sqrt(v)
    v = tl.div_rn(v, tl.sqrt_rn(v)) % 3.0 + tl.minimum(v, 1.0, propagate_nan=tl.PropagateNan.ALL)
    u = i.to(tl.uint32)
    u = tl.umulhi(u, u) // (u + 1) % (u | 3) >> 1 << 2 ^ u & 7
    tl.store(y + i, v.to(tl.int32) + u.to(tl.int32) // -3)


@triton.jit
def atomics(x, y, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.atomic_add(x + i, 1.0, mask=i < 3)
    old = tl.atomic_max(y + i, i) + tl.atomic_xchg(y + i, i, sem="release")
    tl.store(y + i, old ^ tl.atomic_xor(y + i, 5))
    while tl.atomic_cas(y, 0, 1) == 1:
        pass
    tl.device_assert(old > -1, "never")
    tl.device_print("old", old, hex=True)


@triton.jit(noinline=True)
def _halves(n, p):
    return n // 2, tl.load(p) + n


@triton.jit
def controlling(x, y, n, B: tl.constexpr):
    i = tl.arange(0, B)
    if n == 7:
        return
    count, v = n, tl.load(x + i)
    while count > 1:
        half, extra = _halves(count, y)
        if half % 2 == 0:
            v, count = v * 2.0, half
        else:
            v, count = v + extra, half - 1
    for k in tl.static_range(2):
        v += k
    tl.store(x + i + tl.num_programs(1), v)


@triton.jit
def dropping(x, y, seed, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(x + i, tl.where(tl.rand(seed, i) > 0.5, tl.load(x + i), 0.0))
    tl.store(y + i, tl.randint(seed, i))


@triton.jit
def describing(x, y, n, B: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [n, n], [n, 1], [B, B])
    tile = source.load([n // 2, 1])
    scales = tl.full((B, B // 32), 127, tl.uint8)
    tile = tl.dot_scaled(tile.to(tl.float8e4nv), scales, "e4m3", tile.to(tl.float8e5), scales, "e5m2")
    source.store([0, 0], tile)


KERNELS = [
    softmax, matmul, online, rearranging, folding, casting, mathematics, atomics, controlling, dropping,
    describing,
]  # fmt: skip


class _Read(Exception):
    """Exception that carries the text out of a compilation."""


def front_end(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the kernel's TTIR as the backend receives it, with and without locations."""

    def stop(module: Any, *_: Any) -> str:
        raise _Read(module.str(), module.str_nodebug())

    monkeypatch.setattr(compiler, "make_c", stop)
    floats, ints = torch.zeros(4096), torch.zeros(4096, dtype=torch.int32)
    names = set(kernel.arg_names)
    scalars = {"n": 40, "seed": 3, "B": 32, "BLOCK": 32}
    tensors = (floats, floats, floats) if "a" in names else (floats, ints)
    with pytest.raises(_Read) as read:
        kernel.warmup(*tensors, **{k: v for k, v in scalars.items() if k in names}, grid=(1,))
    return list(read.value.args)


def is_known(op: Op) -> bool:
    terminators = {"tt.reduce.return", "tt.scan.return"}
    table = {
        **operations.ELEMENTWISE,
        **operations.SHAPES,
        **operations.ROOTS,
        **operations.EFFECTS,
        **operations.CONTROL,
    }
    return op.name in table or op.name in operations.IGNORED or op.name in terminators


def described(module: Module) -> list[object]:
    """Return the contents of a module except names and locations."""
    contents: list[object] = []
    for name, kernel in module.functions.items():
        contents += [name, kernel.results, kernel.public, kernel.arg_attrs]
        numbers = {value: number for number, value in enumerate(kernel.args)}
        regions = [kernel.body, *(r for op in kernel.body.walk() for r in op.regions)]
        for value in [a for r in regions for b in r.blocks for a in b.args]:
            numbers[value] = len(numbers)
        for op in kernel.body.walk():
            for result in op.results:
                numbers[result] = len(numbers)
            contents.append(
                (op.name, [numbers[v] for v in op.operands], [r.type for r in op.results], op.attrs)
            )
            contents += [(b.name, [numbers[v] for v in passed]) for b, passed in op.successors]
    return contents


@pytest.mark.compat
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: str(kernel.__name__))
def test_kernel(kernel: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with_locations, without_locations = (parse(text) for text in front_end(kernel, monkeypatch))
    operations = [op for f in with_locations.functions.values() for op in f.body.walk()]
    assert [op.name for op in operations if not is_known(op)] == []
    assert described(with_locations) == described(without_locations)
    # MLIR hoists constants without their location; everything else comes from a line of this file
    elsewhere = [op for op in operations if not op.location.startswith(f"{__file__}:")]
    assert {op.name for op in elsewhere} <= {"arith.constant"}

"""The table of opcodes and the machine's handlers: each row leads to a handler, and each handler has a row."""

from __future__ import annotations

import random
import re

import pytest
from gpu.emulated import ptx
from triton_loom.emulator.machine import libraries
from triton_loom.ptx import opcodes, text
from triton_loom.ptx.program import flatten


def names_of(pattern: str) -> set[str]:
    """Return many random instructions of a pattern."""
    draw = random.Random(0)
    return {_drawn(pattern, draw) for _ in range(40 * min(20, 1 + len(re.findall(r"[|{]", pattern))))}


def _drawn(pattern: str, draw: random.Random) -> str:
    while group := re.search(r"\(([^()]*)\)|\{([^(){}]*)\}", pattern):  # the first one that has none inside
        choices = ["", group[2]] if group[1] is None else group[1].split("|")
        pattern = pattern[: group.start()] + draw.choice(choices) + pattern[group.end() :]
    return pattern


def register(type_: str, number: int = 1) -> str:
    width = int(re.search(r"\d+", type_)[0]) * (2 if type_.endswith("x2") else 1)  # type: ignore[index]
    return f"{'%rs' if width <= 16 else '%r' if width <= 32 else '%rd'}{number}"


def vector(first: str, count: int) -> str:
    return "{" + ", ".join(f"{first}{k}" for k in range(1, count + 1)) + "}"


def operands_of(name: str) -> list[str]:
    """Return valid operands of an instruction."""
    words = name.split(".")
    value, at = (
        register(words[-1]) if re.search(r"\d", words[-1]) else "",
        "[%rd0]" if "global" in words else "[%r1]",
    )
    count = next((int(word[1:]) for word in words if re.fullmatch(r"v[248]", word)), 1)
    values = vector(value[:-1], count) if count > 1 else value
    policy = ["%rd9"] if "L2::cache_hint" in words else []
    match words[0]:
        case "ld":
            return [values, "[p0]" if "param" in words else at, *policy]
        case "st":
            return [at, values, *policy]
        case "atom":
            return [values, at, values, *([value] if "cas" in words else []), *policy]
        case "red":
            return [at, values, *([value] if "cas" in words else []), *policy]
        case "mma":
            a, b, c = matrix_registers(words)
            kind = "%rd" if words[-1] == "f64" else "%r"
            scales = ["%r8", "{0, 0}", "%r9", "{0, 0}"] if "block_scale" in words else []
            return [vector(kind, c), vector(kind, a), vector(kind, b), vector(kind, c), *scales]
        case "ldmatrix" | "stmatrix":
            several = vector("%r", int(words[4][1:]))
            return [several, "[%r1]"] if words[0] == "ldmatrix" else ["[%r1]", several]
    fixed = {
        "mov.pred": "%p1 %p2", "not.pred": "%p1 %p2", "cvta": "%rd1 %rd2", "createpolicy": "%rd1 1.0",
        "bra": "end", "brx": "%r1 table", "nanosleep": "%r1", "prefetch": "[%rd0]", "elect": "%r1|%p1 -1",
        "shfl": "%r1|%p1 %r2 1 31 -1", "redux": "%r1 %r2 -1", "activemask": "%r1", "bar.warp": "-1", "bar": "1 32",
        "barrier": "1 32", "cp.async.wait_group": "0", "cp.async.c": "[%r1] [%rd1] 16 16",
        "vote.sync.ballot": "%r1 %p1 -1",
        "vote": "%p1 %p2 -1", "mov": f"{value} {value}", "cp.async.commit": "", "cp.async.wait_all": "",
        "and.pred": "%p1 %p2 %p3", "or.pred": "%p1 %p2 %p3", "xor.pred": "%p1 %p2 %p3",
    }  # fmt: skip
    fixed_operands = next((text for prefix, text in fixed.items() if name.startswith(prefix)), "")
    return fixed_operands.split() + (policy if name.startswith("cp.async.c") else [])


def matrix_registers(words: list[str]) -> tuple[int, int, int]:
    """Return the numbers of registers of A, B and C, from the shape and the types."""
    depth = int(words[3].split("k")[1])
    if words[-1] == "f64":
        parts = 2 if words[3].startswith("m16") else 1
        return parts * depth // 4, depth // 4, 2 * parts
    types = words[words.index("f32") if "f32" in words else 6 :]
    bits = {"bf16": 16, "f16": 16, "tf32": 32, "e2m1": 4}.get(types[1], 8)
    return depth * bits // 64, depth * bits // 128, 2 if types[0] == "f16" else 4


def reached() -> set[str]:
    """Return the handlers of everything in the table."""
    statements = []
    for row in opcodes.ROWS:
        for name in sorted(names_of(row.pattern)):
            assert row.names.fullmatch(name), (row.pattern, name)
            statements.append(f"{name} {', '.join(operands_of(name))};")
    body = "\n".join(["table: .branchtargets end, end;", *statements, "end:"])
    return {instruction.handler for instruction in flatten(text.read(ptx(body))).instructions}


# Handlers that the operands select, not the name.
FURTHER = """
  mov.b32 %r1, {%rs1, %rs2}; mov.b64 %rd1, {%r1, %r2}; mov.b64 %rd1, {%rs1, %rs2, %rs3, %rs4}; mov.b16 %rs1, {a, b};
  mov.b32 {%rs1, %rs2}, %r1; mov.b64 {%r1, %r2}, %rd1; mov.b64 {%rs1, %rs2, %rs3, %rs4}, %rd1; mov.b16 {a, b}, %rs1;
  mov.b32 %r1, {a, b, a, b}; mov.b32 {a, b, c, d}, %r1;
  cp.async.ca.shared.global [%r1], [%rd1], 4; cp.async.ca.shared.global [%r1], [%rd1], 8;
"""


def test_rows_and_handlers_agree() -> None:
    others = ("scalars", "hopper", "blackwell")  # have tests of their own
    libraries_of_handlers = [library for name, library in libraries().items() if name not in others]
    handlers = set()
    for library in libraries_of_handlers:
        number = 0
        while name := library.gpu_handler_name(number):
            handlers.add(name.decode())
            number += 1
    reached_handlers = reached()
    packs = flatten(text.read(ptx("{ .reg .b8 a, b, c, d;" + FURTHER + "}")))
    reached_handlers |= {instruction.handler for instruction in packs.instructions}
    wide = [f"{op} %rd1, [{at}];" for op, at in widening()] + [f"st.{s} [{a}], %rd1;" for s, a in narrowing()]
    reached_handlers |= {i.handler for i in flatten(text.read(ptx("\n".join(wide)))).instructions}
    named = {name for name in reached_handlers if "|" not in name}  # others are arithmetic
    assert named - handlers == set(), "named by a row, and the machine has none"
    assert handlers - named == set(), "in the machine, and no row leads to it"


def widening() -> list[tuple[str, str]]:
    types = ("u8", "s8", "u16", "s16", "u32", "s32")
    return [
        (f"ld.{space}.{t}", at)
        for space, at in (("global", "%rd0"), ("shared", "%r1"), ("local", "%r1"), ("param", "p0"))
        for t in types
    ]


def narrowing() -> list[tuple[str, str]]:
    return [
        (f"{space}.{t}", at)
        for space, at in (("global", "%rd0"), ("shared", "%r1"), ("local", "%r1"))
        for t in ("u8", "u16", "u32")
    ]


@pytest.mark.parametrize("modifier", [".sat", ".wide", ".sc", ".f16", ".L4::hint"])
def test_no_modifier_is_ignored(modifier: str) -> None:
    """A known instruction with an invalid modifier is refused."""
    for name in (
        "ld.global.b32",
        "st.shared.b32",
        "bar.sync",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    ):
        words = name.split(".")
        changed = ".".join([*words[:2], modifier[1:], *words[2:]])
        with pytest.raises(opcodes.UnknownInstruction, match=re.escape(changed)):
            opcodes.decode(text.Statement(changed, tuple(operands_of(name))))

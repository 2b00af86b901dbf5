"""Generation of C++ from a TTIR module.

    generated = generate(ttir_text)
    generated.source      the C++ text: one function that runs one program, readable from top to bottom

The other modules, top down: `tiles` (operations on tiles), `control` (loops, branches, calls), `frame` (names, scalars,
buffers), `nest` (one loop nest), `accesses` (to memory), `dimensions` and `forms` (a value within a nest), `schedule`
(which values are buffered, which recomputed), `operations` (what each one computes), `cpp` (types and numbers), and the
modules of `ir`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..features import SANITIZE
from ..ir.choices import number_choices
from ..ir.reader import parse
from ..ir.rewrite import rewrite
from ..ir.ttir import I1, Module, Region, Tensor, Type, Value
from ..ir.undefined import mark_undefined
from .accesses import Accesses, Witnessed
from .cpp import c_type, declare_const, memory_type
from .explanation import Explanation
from .nest import Buffer
from .tiles import FunctionEmitter

# Each header, with a pattern that shows that the text needs it; headers that every kernel needs have none.
_HEADERS = {
    "simd.h": "",
    "tile.h": "",
    "scattered.h": r"\b(gather|gather_masked|scatter|load_at|store_at)<",
    "casts.h": "_from_",
    "math.h": r"loom_math::|\b(shl|shr|sar|div[su]|rem[su]|mulhi_\w+)\(",
    "ptx.h": "ptx::",
    "dot.h": r"\bdot(_i8|_bf16)?<",
    "scaled.h": "loom_scaled::",
    "sort.h": "sort_network<",
    "launch.h": "",
    "spin.h": r"\bSpin ",
    "print.h": "print_",
    "witness.h": "LOOM_WITNESS",
    "explain.h": "LOOM_EXPLAIN",
}


@dataclass(frozen=True)
class Generated:
    """A kernel's C++ text, and what its launcher must know."""

    source: str
    name: str
    scratch_bytes: int
    serial: bool  # programs must run one after another for the result not to depend on threads
    spins: bool  # it has a loop that may never end
    witness: dict[str, Any] | None  # what the launcher of an instrumented kernel must know
    explained: dict[str, Any] | None  # its nests and buffers, if requested


def generate(
    text: str, witness: frozenset[str] = frozenset(), *, hardware_dot: bool = False, explain: bool = False
) -> Generated:
    """Generate the C++ of a TTIR module.

    `witness` is what an instrumented kernel does at each access: "sanitize", "count", or both. With `explain`, the
    kernel times its nests."""
    module = rewrite(parse(text))
    if SANITIZE in witness:
        mark_undefined(module)
        number_choices(module)
    accesses = Witnessed(module, witness) if witness else Accesses()
    return _Unit(module, accesses, hardware_dot, Explanation() if explain else None).generate()


class _Unit:
    """A C++ file: the program, and everything above it."""

    def __init__(
        self, module: Module, accesses: Accesses, hardware_dot: bool, explanation: Explanation | None
    ) -> None:
        self.module = module
        self.accesses = accesses
        self.hardware_dot = hardware_dot
        self.explanation = explanation
        self.top: list[str] = []  # tables, combiners, called functions
        self.scratch = 0
        self.counter = 0
        self.defined: dict[str, str] = {}

    def unique(self, stem: str) -> str:
        self.counter += 1
        return f"{stem}_{self.counter}"

    def allocate(self, size: int) -> int:
        offset = self.scratch
        self.scratch += -(-size // 64) * 64
        return offset

    def generate(self) -> Generated:
        entry = self.module.entry
        emitter = FunctionEmitter(self, entry.body)
        names = [(arg, emitter.bind(arg, arg.name)) for arg in entry.args]
        body = emitter.run()
        lines = [
            *self.top,
            "struct Args {",
            *(f"{memory_type(arg.type)} {name};".replace("* ", "*") for arg, name in names),
            "};",
            "",
            f"static void program(const Args &args, const Program &p) {{  // {entry.location}",
            *(
                declare_const(c_type(arg.type), name, f"args.{name}{' != 0' if arg.type == I1 else ''}")
                for arg, name in names
            ),
            *(["const loom::Explained explained;"] if self.explanation else []),
            *body,
            "}",
            "",
            f"LOOM_KERNEL({re.sub(r'[^A-Za-z0-9_]', '_', entry.name)}, Args, program, {self.scratch})",
        ]
        text = _indent(lines)
        witnessed = self.accesses if isinstance(self.accesses, Witnessed) else None
        define = witnessed.define if witnessed else ""
        if self.hardware_dot:
            define += "#define LOOM_DOT_BF16_HARDWARE\n"
        if self.explanation:
            define += f"#define LOOM_EXPLAIN {len(self.explanation.nests)}\n"
        includes = [
            f'#include "{name}"\n' for name, sign in _HEADERS.items() if re.search(sign, define + text)
        ]
        return Generated(
            define + "".join(includes) + "\n" + text,
            entry.name,
            self.scratch,
            _depends_on_order(self.module),
            any("spin.h" in line for line in includes),
            witnessed.metadata(self.module) if witnessed else None,
            self.explanation.about(entry.location) if self.explanation else None,
        )

    def called(self, name: str) -> str:
        """Return the C++ name of a function of the module; the first call defines it."""
        if name not in self.defined:
            callee = self.module.functions[name]
            self.defined[name] = re.sub(r"\W", "_", name)
            self.define(self.defined[name], callee.args, callee.results, callee.body)
        return self.defined[name]

    def define(self, name: str, args: list[Value], results: list[Type], body: Region) -> None:
        """Define a C++ function; it returns scalars through references and tiles through pointers."""
        emitter = FunctionEmitter(self, body)
        parameters = [
            "const Program &p",
            *(f"{c_type(arg.type)} {emitter.bind(arg, arg.name)}" for arg in args),
        ]
        for i, type_ in enumerate(results):
            if isinstance(type_, Tensor):
                parameters.append(f"{memory_type(type_.element)} *result{i}")
                emitter.result_buffers[i] = Buffer(f"result{i}", type_.element, type_.shape)
            else:
                parameters.append(f"{c_type(type_)} &result{i}")
        lines = emitter.run()
        self.top += [f"static void {name}({', '.join(parameters)}) {{", *lines, "}", ""]


def _depends_on_order(module: Module) -> bool:
    """Return whether some atomic's outcome depends on which program comes first.

    Integer sums, maxima and bit operations have the same result in any order as long as the old value is unused;
    float sums, exchanges, locks and tickets do not.
    """
    for function in module.functions.values():
        used = {v for op in function.body.walk() for v in op.operands}
        for op in function.body.walk():
            if op.name == "tt.atomic_cas":
                return True
            if op.name == "tt.atomic_rmw" and (op.attrs["flags"][0] in ("fadd", "exch") or op.result in used):
                return True
    return False


def _indent(lines: list[str]) -> str:
    out, depth = [], 0
    for line in lines:
        code = line.split("//")[0]
        out.append("  " * (depth - code.startswith("}")) + line if line else "")
        depth += code.count("{") - code.count("}")
    return "\n".join(out) + "\n"

"""C++ for loads, stores and atomics: plain, or through a witness that checks and counts them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..features import COUNT, SANITIZE
from ..ir.provenance import ARITHMETIC, Integer, offset_arithmetic, root_of
from ..ir.ttir import I1, I32, Dense, Module, Op, Pointer, Value, element_of, shape_of
from .cpp import literal, memory_type, size_of, stored_type, vector_of
from .forms import Form


@dataclass(frozen=True)
class Chunk:
    """The lanes of a nest that access memory together."""

    pointer: Form
    lanes: int
    count: str | None = None  # the first so many lanes are on,
    masked: Form | None = None  # or the lanes of this mask

    @property
    def mask(self) -> str | None:
        """The mask of the active lanes; None if all are active."""
        if self.count is not None:
            return f"first_mask<{self.lanes}>({self.count})"
        return self.masked.vec(self.lanes) if self.masked else None

    @property
    def every(self) -> str:
        """A mask with all lanes active."""
        return f"splat<i32x{self.lanes}>(-1)"

    def location(self, stored: str) -> str:
        """Return the location of the lanes: base and step, or one address per lane."""
        if self.pointer.kind in ("vector", "offsets"):
            return self.pointer.vec(self.lanes)
        return f"({stored} *){self.pointer.expr}, {self.pointer.step}"


class Accesses:
    """Memory accesses without instruments."""

    prefetches = True  # memory may be prefetched

    def load_one(self, op: Op, pointer: str, mask: str | None, other: str | None) -> str:
        element = element_of(op.result.type)
        text = f"*{pointer}{' != 0' if element == I1 else ''}"
        return text if mask is None else f"{mask} ? {text} : {other or literal(element, 0)}"

    def load_chunk(self, op: Op, chunk: Chunk, rest: str) -> str:
        """Return the load of a chunk; inactive lanes get `rest`."""
        stored = stored_type(element_of(op.result.type))
        type_ = vector_of(stored, chunk.lanes)
        pointer, masked, mask = chunk.pointer, chunk.masked, chunk.mask
        if pointer.kind == "vector":
            return f"load_at<{type_}>({pointer.expr}, {mask or chunk.every}, {rest})"
        base = f"(const {stored} *){pointer.expr}"
        masking = f", {mask}, {rest}" if mask else ""
        if pointer.offset:
            offsets = pointer.offset.vec(chunk.lanes)
            return f"gather{'_masked' if mask else ''}<{type_}>({base}, {offsets}{masking})"
        if pointer.step != 1:
            return f"load_strided<{type_}>({base}, {pointer.step}{masking})"
        if chunk.count is not None:
            return f"load_first<{type_}>({base}, {chunk.count}, {rest})"
        if masked is None:
            return f"load<{type_}>({base})"
        if masked.kind == "uniform":
            return f"({masked.expr} ? load<{type_}>({base}) : {rest})"
        return f"load_masked<{type_}>({base}, {mask}, {rest})"

    def store_one(self, op: Op, pointer: str, mask: str | None, text: str) -> str:
        return f"{f'if ({mask}) ' if mask else ''}*{pointer} = {text};"

    def store_chunk(self, op: Op, chunk: Chunk, text: str) -> str:
        stored = stored_type(element_of(op.operands[1].type))
        type_ = vector_of(stored, chunk.lanes)
        pointer, masked, mask = chunk.pointer, chunk.masked, chunk.mask
        on = mask or chunk.every
        base = f"({stored} *){pointer.expr}"
        if pointer.kind == "vector":
            return f"store_at<{type_}>({pointer.expr}, {on}, {text});"
        if pointer.offset:
            return f"scatter<{type_}>({base}, {pointer.offset.vec(chunk.lanes)}, {on}, {text});"
        if pointer.step != 1:
            masking = f"{mask}, " if mask else ""
            return f"store_strided<{type_}>({base}, {pointer.step}, {masking}{text});"
        if chunk.count is not None:
            return f"store_first<{type_}>({base}, {chunk.count}, {text});"
        if masked is None:
            return f"store<{type_}>({base}, {text});"
        if masked.kind == "uniform":
            return f"if ({masked.expr}) store<{type_}>({base}, {text});"
        return f"store_masked<{type_}>({base}, {mask}, {text});"

    def atomic(self, op: Op, pointer: str, mask: str | None, text: str) -> str:
        return f"{mask} ? {text} : {literal(element_of(op.result.type), 0)}" if mask else text

    # -- written by a witness only --

    def bare(self, pointer: Value, text: str) -> str:
        """Return an address without the number of its argument (`ir.choices`)."""
        return text

    def begin_atomic(self) -> list[str]:
        return []

    def multiply_adds(self, number: int) -> list[str]:
        """Return statements that count a dot of so many multiply-adds."""
        return []

    def overflow(self, op: Op, exact: str, lanes: str = "1") -> str:
        """Return the report of the lanes whose exact result, a function of the lane `l`, does not fit its type."""
        raise NotImplementedError

    def watched(self, op: Op) -> Integer | None:
        """Return the type that must hold the result of an offset's arithmetic; None if it is not checked."""
        return None

    def counts_lanes(self) -> bool:
        """Return whether a mask of the first lanes of a chunk is written as their count."""
        return True

    def loop_step(self, op: Op, counter: str, step: str) -> list[str]:
        """Return statements for the end of a loop's body, before its counter steps."""
        return []

    def hints(self, op: Op) -> dict[str, list[int]]:
        """Return the kernel author's promises about the result of an operation."""
        return {}

    def promise(self, op: Op, condition: str, value: str) -> list[str]:
        return []

    def undefined(self, op: Op, lanes: str) -> list[str]:
        """Return statements that report a use of lanes that a load left undefined."""
        return []


# ---- under a witness -------------------------------------------------------------------------------------

What = Literal["load", "store", "atomic", "offset", "loop", "promise", "undefined"]


@dataclass(frozen=True)
class Site:
    """A source location that can be reported: an access, 32-bit offset arithmetic, a loop, or a promise."""

    what: What
    location: str  # its own "file:line"
    called: str  # "file:line" of the kernel's line that it comes from
    argument: int = -1  # position of the pointer argument that it goes through; -1: known at run time only
    size: int = 0  # bytes of an element
    integer: str = ""  # the type of an offset's arithmetic
    scope: str = ""  # of an atomic: "cta", "gpu" or "sys"
    use: str = ""  # how undefined lanes are used,
    loads: tuple[str, ...] = ()  # and "file:line" of the loads that may have left them undefined


class Witnessed(Accesses):
    """Memory accesses that report to a witness, according to its `modes`."""

    prefetches = False

    def __init__(self, module: Module, modes: frozenset[str]) -> None:
        self.modes = modes
        self.sites: list[Site] = []
        pointers = [arg for arg in module.entry.args if isinstance(arg.type, Pointer)]
        self.arguments = {arg: position for position, arg in enumerate(pointers)}
        self.offsets: dict[Op, Integer] = {}
        for function in module.functions.values():
            self.offsets |= offset_arithmetic(function)

    @property
    def define(self) -> str:
        return f"#define LOOM_WITNESS {(SANITIZE in self.modes) + 2 * (COUNT in self.modes)}\n"

    def site(self, op: Op, what: What) -> str:
        """Return the arguments of a runtime call that identify its site in the kernel."""
        is_access = what in ("load", "store", "atomic")
        if not is_access:
            integer = str(self.offsets[op]) if what == "offset" else ""
            use, loads = op.attrs.get("use", ""), tuple(op.attrs.get("loads", ()))
            site = Site(what, op.origin or op.location, op.location, integer=integer, use=use, loads=loads)
        else:
            pointer = op.operands[0]
            pointee: Any = element_of(pointer.type).pointee  # type: ignore[union-attr]
            argument = self.argument(pointer)
            scope = next((flag for flag in op.attrs.get("flags", ()) if flag in ("cta", "gpu", "sys")), "")
            site = Site(what, op.origin or op.location, op.location, argument, size_of(pointee), scope=scope)
        if site not in self.sites:
            self.sites.append(site)
        number = self.sites.index(site)
        return f"p, {number}, {site.argument}" if is_access else f"p, {number}"

    def argument(self, pointer: Value) -> int:
        """Return the position of the argument that a pointer came from; -1 if only the launch knows it."""
        root = root_of(pointer)
        return self.arguments.get(root, -1) if root else -1

    def bare(self, pointer: Value, text: str) -> str:
        return f"bare(p, {self.argument(pointer)}, {text})"

    def load_one(self, op: Op, pointer: str, mask: str | None, other: str | None) -> str:
        element = element_of(op.result.type)
        type_ = memory_type(element)
        rest = f"({type_}){other or literal(element, 0)}"
        text = f"seen_load_one<{type_}>({self.site(op, 'load')}, {pointer}, {mask or 'true'}, {rest})"
        return f"{text} != 0" if element == I1 else text

    def load_chunk(self, op: Op, chunk: Chunk, rest: str) -> str:
        stored = stored_type(element_of(op.result.type))
        location = chunk.location(f"const {stored}")
        function = "load_each" if chunk.pointer.kind in ("vector", "offsets") else "seen_load"
        mask = chunk.mask or chunk.every
        return f"{function}<{vector_of(stored, chunk.lanes)}>({self.site(op, 'load')}, {location}, {mask}, {rest})"

    def store_one(self, op: Op, pointer: str, mask: str | None, text: str) -> str:
        type_ = memory_type(element_of(op.operands[1].type))
        return f"seen_store_one<{type_}>({self.site(op, 'store')}, {pointer}, {mask or 'true'}, {text});"

    def store_chunk(self, op: Op, chunk: Chunk, text: str) -> str:
        stored = stored_type(element_of(op.operands[1].type))
        location = chunk.location(stored)
        function = "store_each" if chunk.pointer.kind in ("vector", "offsets") else "seen_store"
        mask = chunk.mask or chunk.every
        return f"{function}<{vector_of(stored, chunk.lanes)}>({self.site(op, 'store')}, {location}, {mask}, {text});"

    def atomic(self, op: Op, pointer: str, mask: str | None, text: str) -> str:
        flags = op.attrs["flags"]
        order = {"relaxed": "RELAXED", "acquire": "ACQUIRE", "release": "RELEASE"}
        ordering = next((order[f] for f in flags if f in order), "ACQUIRE | RELEASE")
        ordering = "OF_ONE_PROGRAM" if "cta" in flags else ordering
        update = f"[&] {{ return {text}; }}"
        return f"seen_atomic({self.site(op, 'atomic')}, {pointer}, {mask or 'true'}, {ordering}, {update})"

    def begin_atomic(self) -> list[str]:
        return ["begin_atomic(p);"]

    def multiply_adds(self, number: int) -> list[str]:
        return [f"p.worker->dot_flops += {2 * number}ll;"]

    def watched(self, op: Op) -> Integer | None:
        return self.offsets.get(op) if SANITIZE in self.modes else None

    def counts_lanes(self) -> bool:
        return (
            SANITIZE not in self.modes
        )  # evaluated lane by lane, a mask is what a GPU computes even if it wraps around

    def overflow(self, op: Op, exact: str, lanes: str = "1") -> str:
        return f"overflows({self.site(op, 'offset')}, {lanes}, [&](i32 l) {{ return (i64){exact}; }});"

    def loop_step(self, op: Op, counter: str, step: str) -> list[str]:
        """Report a counter that wraps around, whatever it is used for, and leave the loop.

        It would be below the loop's end again, so the loop would go on, perhaps forever."""
        if SANITIZE not in self.modes or op.operands[0].type != I32 or op.attrs.get("unsigned"):
            return []
        return [f"if (!fits({self.site(op, 'loop')}, (i64){counter} + (i64){step})) break;"]

    def hints(self, op: Op) -> dict[str, list[int]]:
        if SANITIZE not in self.modes:
            return {}
        hints = {}
        for name in ("divisibility", "contiguity", "constancy"):
            hint = op.attrs.get(f"tt.{name}")
            if isinstance(hint, Dense):
                is_single = isinstance(hint.values, int)
                hints[name] = (
                    [hint.values] * max(1, len(shape_of(op.result.type))) if is_single else hint.values
                )
        return hints

    def promise(self, op: Op, condition: str, value: str) -> list[str]:
        return [f"keeps_promise({self.site(op, 'promise')}, {condition}, {value});"]

    def undefined(self, op: Op, lanes: str) -> list[str]:
        return [f"uses_undefined({self.site(op, 'undefined')}, {lanes});"]

    def metadata(self, module: Module) -> dict[str, Any]:
        """Return the launcher's information about the witness, as JSON."""
        entry = module.entry
        operations = (op for function in module.functions.values() for op in function.body.walk())
        return {
            "sites": [asdict(site) for site in self.sites],
            "ordered": any(op.name.startswith("tt.atomic") for op in operations),
            "divisible": [attrs.get("tt.divisibility", 1) for attrs in entry.arg_attrs],
            "location": entry.location,
        }


def exact_result(op: Op, left: str, right: str) -> str:
    """Return the exact 64-bit result of narrow arithmetic, from operands widened to 64 bits."""
    return f"({left} {ARITHMETIC[op.name]} {right})"

"""Random kernels and contracts, small enough to launch with every size: most are wrong at some sizes, a few at none."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

EXTENTS = ("n", "n * m", "n + m", "4 * n", "n * m + 1", "2 * n + m")
GRIDS = ("n", "m", "n + 1", "n * m", "3")
VALUES = (("0", "n"), ("-1", "m"), ("0", "n + m"), None)
LARGEST = 4  # largest size
TYPES = ("", "", "", ": tl.uint32", ": tl.int64", ": tl.int16")


@dataclass
class Case:
    """Kernel as text, and the contract that it is launched with."""

    source: str
    extent: str
    grid: str
    least: int  # smallest size
    values: tuple[str, str] | None  # bounds of the integers in memory: at least, and below
    unsigned: bool  # whether these integers are unsigned
    outputs: bool


@dataclass
class Writer:
    """Writer of one random kernel."""

    draw: random.Random
    lines: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    count: int = 0

    def case(self) -> Case:
        pick = self.draw.choice
        for _ in range(self.draw.randint(1, 3)):
            self.statement(1, 0)
        self.access(1)
        extent = pick(EXTENTS)
        body = "\n".join(line.replace("EXTENT", f"({extent})") for line in self.lines)
        source = (
            "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
            f"def kernel(x_ptr, i_ptr, n{pick(TYPES)}, m{pick(TYPES)}):\n"
            f"    pid = tl.program_id(0)\n    lane = tl.arange(0, 4)\n{body}\n"
        )
        values, unsigned = pick(VALUES), self.draw.random() < 0.2
        least = pick((1, 1, 0))
        return Case(source, extent, pick(GRIDS), least, values, unsigned, self.draw.random() < 0.3)

    # -- expressions --

    def atom(self) -> str:
        if self.draw.random() < 0.3:
            return str(self.draw.choice((0, 1, 1, 2, 3, 4)))
        return self.draw.choice(["n", "m", "pid", "n", "pid", *self.names * 2])

    def expression(self, depth: int = 2) -> str:
        if depth == 0 or self.draw.random() < 0.3:
            return self.atom()
        operator = self.draw.choice(("+", "+", "-", "*", "//", "%", "minimum", "maximum", "where", "&", "|"))
        a, b = self.expression(depth - 1), self.expression(depth - 1)
        if operator in ("+", "-", "*", "&", "|"):
            return f"({a} {operator} {b})"
        if operator in ("//", "%"):
            b = self.draw.choice(("2", "3", "n", "m", "4", f"tl.maximum({b}, 1)"))
            a = f"tl.maximum({a}, 0)" if self.draw.random() < 0.7 else a
            return f"({a} {operator} {b})"
        if operator == "where":
            return f"tl.where({self.condition()}, {a}, {b})"
        return f"tl.{operator}({a}, {b})"

    def condition(self) -> str:
        return f"({self.atom()} {self.draw.choice(('<', '<=', '>', '>=', '==', '!='))} {self.expression(1)})"

    # -- statements --

    def emit(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    def name(self) -> str:
        self.count += 1
        return f"{self.draw.choice(('v', 'v', 'product', 'quotient', 'lane_0'))}{self.count}"

    def statement(self, depth: int, nested: int) -> None:
        kind = self.draw.choice(
            ("assign", "assign", "swap", "branch", "for", "while", "access", "access", "access")
        )
        if kind == "assign":
            name = self.draw.choice([*self.names, self.name()])
            self.emit(depth, f"{name} = {self.expression()} + 0 * pid")
            self.names = [*self.names, name] if name not in self.names and depth == 1 else self.names
        elif kind == "swap" and depth == 1:
            self.emit(depth, "t = n\n    n = m\n    m = t")
        elif kind == "branch":
            self.emit(depth, f"if {self.condition()}:")
            for name in (self.names or ["n"])[:2]:
                self.emit(depth + 1, f"{name} = {self.expression(1)} + 0 * {name}")
            if nested < 1:
                saved_names = list(self.names)
                self.statement(depth + 1, nested + 1)
                self.names = saved_names
        elif kind in ("for", "while") and nested < 2:
            self.loop(depth, nested, kind)
        else:
            self.access(depth)

    def loop(self, depth: int, nested: int, kind: str) -> None:
        carried, i = self.name(), f"i{self.count}"
        self.emit(depth, f"{carried} = {self.expression(1)} + 0 * pid")
        saved_names = [*self.names, carried] if depth == 1 else list(self.names)
        self.names = [*self.names, carried]
        if kind == "for":
            step = self.draw.choice(("1", "1", "2", "3", "n", "m"))
            self.emit(
                depth,
                f"for {i} in range({self.draw.choice(('0', self.atom()))}, {self.expression(1)}, {step}):",
            )
        else:
            self.emit(depth, f"{i} = 0 * pid")
            self.emit(depth, f"while {i} < {self.atom()}:")
        self.names = [*self.names, i]
        self.statement(depth + 1, nested + 1)
        operator = self.draw.choice(
            (f"{carried} + {self.atom()}", f"{carried} + 1", f"{carried} - 1", self.expression(1))
        )
        self.emit(depth + 1, f"{carried} = {operator} + 0 * {carried}")
        if kind == "while":
            self.emit(depth + 1, f"{i} += 1")
        self.names = saved_names

    def access(self, depth: int) -> None:
        tile = self.draw.random() < 0.35
        at = self.expression()
        if tile:
            at = self.draw.choice((f"({at} * 4 + lane)", f"({at} + lane)", f"(lane * {self.atom()} + {at})"))
        mask = self.draw.choice(
            (
                f"({at} >= 0) & ({at} < EXTENT)",
                f"({at} >= 0) & ({at} < EXTENT)",
                f"({at} >= 0) & ({at} < EXTENT)",
                f"({at} < EXTENT)",
                f"({at} >= 0) & ({at} <= EXTENT)",
                f"(lane < {self.expression(1)})" if tile else self.condition(),
            )
        )
        kind = self.draw.choice(("store", "store", "own", "atomic", "cta", "load", "load"))
        if kind in ("store", "own"):
            value = f"({at}) * 0 + {self.atom()}" if kind == "own" else "1"
            self.emit(depth, f"tl.store({'i' if kind == 'own' else 'x'}_ptr + {at}, {value}, mask={mask})")
        elif kind in ("atomic", "cta"):
            scope = '"gpu"' if kind == "atomic" else '"cta"'
            self.emit(depth, f"tl.atomic_add(x_ptr + {at}, 1, mask={mask}, scope={scope})")
        else:
            name = self.name()
            loaded = f"tl.load(i_ptr + {at}, mask={mask}, other={self.draw.choice((0, 1, 2))}).to(tl.int32)"
            if tile:
                loaded = f"tl.{self.draw.choice(('max', 'min', 'sum'))}({loaded}, 0)"
            self.emit(depth, f"{name} = {loaded}")
            self.names = [*self.names, name] if depth == 1 else self.names


def random_case(seed: int) -> Case:
    """Return the kernel of a seed."""
    return Writer(random.Random(seed)).case()

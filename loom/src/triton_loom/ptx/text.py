"""Parser of PTX text into statements.

A Triton module holds one kernel. The parser reads its parameters and their offsets, the threads of a block, the
registers, and the statements with their guards, labels and lines. Names that inline assembly declares in a scope of its
own (`{ .reg .pred done; wait: ... bra wait; }`) become unique here, so that no later step deals with scopes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

# Bytes per lane of a register of each type; a predicate is one bit per lane.
REGISTER_BYTES = {"pred": 0, "b8": 4, "b16": 4, "b32": 4, "b64": 8, "b128": 16} | {
    f"{kind}{bits}": max(bits // 8, 4) for kind in "usf" for bits in (8, 16, 32, 64)
}
PARAMETER_BYTES = {f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (8, 16, 32, 64)}


class PtxError(ValueError):
    """Error: the text is not PTX of the kind that Triton makes."""


@dataclass(frozen=True)
class Place:
    """Source of a statement: a line of Python, and the kernel's line that called it, if that is another."""

    file: str = ""
    line: int = 0
    outermost: str = ""  # "file.py:12", in the kernel itself

    def __str__(self) -> str:
        inner = f"{self.file}:{self.line}" if self.line else "an unknown line"
        return f"{self.outermost} (in {inner})" if self.outermost else inner


@dataclass(frozen=True)
class Statement:
    """An instruction as written: `@!%p1 ld.global.b32 %r1, [%rd1+4];`."""

    opcode: str  # with its modifiers
    operands: tuple[str, ...]  # split at the commas outside brackets
    guard: str = ""  # a predicate register; the instruction does nothing where it is false
    negated: bool = False  # of the guard
    line: int = 0  # in the PTX
    place: Place = Place()

    def __str__(self) -> str:
        guard = f"@{'!' if self.negated else ''}{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}".strip()


@dataclass(frozen=True)
class Parameter:
    """A kernel's parameter in the .param space."""

    name: str
    offset: int
    size: int


@dataclass
class Kernel:
    """A parsed kernel."""

    name: str
    parameters: dict[str, Parameter]
    threads: int  # of a block
    registers: dict[str, int] = field(default_factory=dict)  # name -> bytes per lane, 0 for a predicate
    statements: list[Statement] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # name -> number of the statement that follows
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of brx.idx: labels by index
    constants: dict[str, bytes] = field(default_factory=dict)  # initialized .global memory
    shared: dict[str, int] = field(default_factory=dict)  # symbol of shared memory -> offset
    shared_bytes: int = 0  # of symbols that have a size; dynamic memory begins after them
    local: dict[str, int] = field(default_factory=dict)  # symbol of a thread's own memory -> offset
    local_bytes: int = 0

    @property
    def parameter_bytes(self) -> int:
        return max((p.offset + p.size for p in self.parameters.values()), default=0)


def split(text: str) -> tuple[str, ...]:
    """Split a text at the commas outside all brackets."""
    parts, depth, begin = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and depth == 0:
            parts.append(text[begin:at].strip())
            begin = at + 1
    parts.append(text[begin:].strip())
    return tuple(part for part in parts if part)


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{]*)\{", re.S)
_INLINED = re.compile(r"^\s*\.loc[^\n]*?//.*@\[ ([^@\[\]]*):\d+ \]", re.M)
_INLINE = re.compile(r"// begin inline asm\n.*?// end inline asm", re.S)
_LOCATION = re.compile(r"^[ \t]*\.loc\b[^\n]*", re.M)


_CALL = re.compile(r"\bcall(?:\.uni)?\b[^;]*")
_CALLERS = "noinline functions, tl.device_print, tl.device_assert, and sines and powers in fp64 make them"


def _at_one_line(assembly: re.Match[str]) -> str:
    """Return inline assembly with only its first .loc. From Triton 3.8 on, LLVM advances the Python line with each line
    of the assembly, although all of it comes from one line."""
    first = _LOCATION.search(assembly[0])
    end = first.end() if first else 0
    return assembly[0][:end] + _LOCATION.sub("", assembly[0][end:])


@functools.lru_cache(maxsize=16)  # a module is read when it is loaded, and when its kernel is launched first
def read(ptx: str) -> Kernel:
    """Parse a module; return its kernel."""
    ptx = _INLINE.sub(_at_one_line, ptx)
    outermost = {ptx.count("\n", 0, m.start()) + 1: m[1].strip() for m in _INLINED.finditer(ptx)}
    text = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), ptx)
    entry = _ENTRY.search(text)
    if entry is None:
        raise PtxError("there is no .entry in this PTX: nothing to execute")
    if _ENTRY.search(text, entry.end()):
        raise PtxError("there are several kernels in this PTX: Triton makes one per module")
    if call := _CALL.search(text, entry.end()):
        line = text.count("\n", 0, call.start()) + 1
        raise PtxError(
            f"`{' '.join(call[0].split())}` (PTX line {line}): the emulated GPU cannot call functions ({_CALLERS})"
        )
    threads = re.search(r"\.reqntid\s+(\d+)", entry[3])
    if threads is None:
        raise PtxError("the kernel has no .reqntid: the number of threads of a block is unknown")
    kernel = Kernel(name=entry[1], parameters=_parameters(entry[2]), threads=int(threads[1]))
    for name, size in re.findall(r"\.shared\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[(\d*)\]", text):
        kernel.shared[name] = kernel.shared_bytes
        kernel.shared_bytes += int(size or 0)
    for name, count, values in re.findall(
        r"\.global\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[(\d+)\](?:\s*=\s*\{([^}]*)\})?", text[: entry.start()]
    ):
        initial = [int(value, 0) & 255 for value in split(values or "")]
        kernel.constants[name] = bytes(initial + [0] * (int(count) - len(initial)))
    files = {int(number): path for number, path in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text)}
    _Body(kernel, files, outermost).read(text, entry.end())
    return kernel


def _parameters(text: str) -> dict[str, Parameter]:
    result, offset = {}, 0
    for declaration in split(text.replace("\n", " ")):
        words = re.sub(r"\[\d+\]", "", declaration).split()
        kind = next((word[1:] for word in words if word[1:] in PARAMETER_BYTES), None)
        if kind is None:
            raise PtxError(f"the parameter `{declaration}` has no known type")
        count = re.search(r"\[(\d+)\]", declaration)
        size = PARAMETER_BYTES[kind] * (int(count[1]) if count else 1)
        # `.ptr .align` is about the memory pointed to; the .align before the type is the parameter's own.
        alignment = re.match(r"\.param\s+\.align\s+(\d+)", declaration)
        multiple = int(alignment[1]) if alignment else PARAMETER_BYTES[kind]
        offset = -(-offset // multiple) * multiple
        result[words[-1]] = Parameter(words[-1], offset, size)
        offset += size
    return result


# ---- the body --------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"\s*(?:(?P<loc>\.loc\b[^\n]*)|(?P<label>[\w$]+)\s*:(?!:)|(?P<brace>[{}])|(?P<text>[^;]*);)", re.S
)
_GUARD = re.compile(r"@(!?)\s*([%\w$]+)\s+")
_CARRY = re.compile(
    r"(?P<name>add|sub|mad)(?P<takes>c?)(?P<half>\.lo|\.hi)?(?P<leaves>\.cc)?\.(?P<type>[us](?:32|64))"
)
_NAME = re.compile(r"[%$A-Za-z_][\w$]*")


@dataclass
class _Scope:
    """Names declared in a pair of braces, and their unique names in the kernel."""

    names: dict[str, str]
    outer: _Scope | None

    def find(self, name: str) -> str:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        return name


class _Body:
    """Parser of a kernel's statements."""

    def __init__(self, kernel: Kernel, files: Mapping[int, str], outermost: Mapping[int, str]) -> None:
        self.kernel, self.files, self.outermost = kernel, files, outermost
        self.scopes = 0
        self.place = Place()
        self.table_of = ""  # the label that a .branchtargets would belong to

    def read(self, text: str, begin: int) -> None:
        tokens = list(self._tokens(text, begin))
        scope = _Scope({}, None)
        open_scopes = [scope]
        for number, (kind, content, line) in enumerate(tokens):
            if kind == "loc":
                self._locate(content, line)
            elif kind == "label":
                name = open_scopes[-1].find(content)
                self.kernel.labels[name] = len(self.kernel.statements)
                self.table_of = name
            elif content == "{":
                open_scopes.append(self._declared(tokens, number, open_scopes[-1]))
            elif content == "}":
                open_scopes.pop()
            else:
                self._statement(content, line, open_scopes[-1])

    def _tokens(self, text: str, begin: int) -> Iterator[tuple[str, str, int]]:
        depth, at = 1, begin
        line, counted = 1, 0
        while True:
            match = _TOKEN.match(text, at)
            if match is None or match.lastgroup is None:
                raise PtxError(f"after line {line}: the kernel's text ends unexpectedly")
            kind = match.lastgroup
            content = match[kind].strip()
            at = match.end()
            depth += (content == "{") - (content == "}")
            if depth == 0:
                return
            line, counted = line + text.count("\n", counted, match.start(kind)), match.start(kind)
            yield kind, content, line

    def _locate(self, text: str, line: int) -> None:
        numbers = text.replace(",", " ").split()
        file = self.files.get(int(numbers[1]), "")
        outermost = self.outermost.get(line, "")
        self.place = Place(file=file, line=int(numbers[2]), outermost=outermost)

    def _declared(self, tokens: list[tuple[str, str, int]], number: int, outer: _Scope) -> _Scope:
        """Return the scope that opens at a token: its labels and registers, up to its closing brace."""
        names, depth = {}, 0
        self.scopes += 1
        for kind, content, _ in tokens[number:]:
            depth += (content == "{") - (content == "}")
            if depth == 0:
                break
            if depth == 1 and kind == "label":
                names[content] = f"{content}@{self.scopes}"
            if depth == 1 and content.startswith(".reg"):
                for name in _register_names(content.split(None, 2)[2]):
                    names[name] = f"{name}@{self.scopes}"
        return _Scope(names, outer)

    def _statement(self, text: str, line: int, scope: _Scope) -> None:
        if text.startswith(".reg"):
            return self._registers(text, scope)
        if text.startswith(".branchtargets"):
            targets = split(text.removeprefix(".branchtargets"))
            self.kernel.tables[self.table_of] = tuple(scope.find(target) for target in targets)
            return None
        if text.startswith(".pragma"):
            return None
        if text.startswith(".local"):
            return self._local(text)
        if text.startswith("."):
            raise PtxError(f"line {line}: the directive `{text.split()[0]}` is not supported")
        guard, negated = "", False
        if match := _GUARD.match(text):
            guard, negated, text = scope.find(match[2]), match[1] == "!", text[match.end() :]
        opcode, *rest = text.split(None, 1)
        arguments = " ".join(rest[0].split()) if rest else ""
        if scope.outer is not None:
            arguments = _NAME.sub(lambda m: scope.find(m[0]), arguments)
        operands = tuple(self._plain(operand, line) for operand in split(arguments))
        for step, used in self._with_carry(opcode, operands):
            statement = Statement(step, used, guard, negated, line, self.place)
            self.kernel.statements.append(statement)
        return None

    def _with_carry(self, opcode: str, operands: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]]:
        """Split an instruction that takes or leaves a carry into steps: the carry, a predicate here, and the value."""
        match = _CARRY.fullmatch(opcode)
        if match is None or not (match["takes"] or match["leaves"]):
            return [(opcode, operands)]
        carry, new = "the carry", "the next carry"
        self.kernel.registers |= {carry: 0, new: 0}
        name, type_ = f"{match['name']}{match['half'] or ''}", match["type"]
        reads = (*operands[1:], carry if match["takes"] else "0")
        steps: list[tuple[str, tuple[str, ...]]] = [(f"{name}.value.{type_}", (operands[0], *reads))]
        if match["leaves"]:  # the value comes second to last, since its register may also be read
            steps = [(f"{name}.carry.{type_}", (new, *reads)), *steps, ("mov.pred", (carry, new))]
        return steps

    def _plain(self, operand: str, line: int) -> str:
        """Return an operand; a negated predicate, `!%p1`, gets a register and an instruction of its own."""
        if not operand.startswith("!"):
            return operand
        name = f"not {operand[1:]}"
        self.kernel.registers[name] = 0
        self.kernel.statements.append(Statement("not.pred", (name, operand[1:]), line=line, place=self.place))
        return name

    def _registers(self, text: str, scope: _Scope) -> None:
        _, kind, names = text.split(None, 2)
        size = REGISTER_BYTES.get(kind[1:])
        if size is None:
            raise PtxError(f"registers of type {kind} are not supported")
        for name in _register_names(names):
            self.kernel.registers[scope.find(name)] = size

    def _local(self, text: str) -> None:
        """Declare per-thread memory, as sines use for the digits of pi that a large argument needs."""
        match = re.fullmatch(r"\.local\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]", text)
        if match is None:
            raise PtxError(f"`{text}` is not a supported declaration of local memory")
        alignment, size = int(match[1]), int(match[3])
        offset = -(-self.kernel.local_bytes // alignment) * alignment
        self.kernel.local[match[2]] = offset
        self.kernel.local_bytes = offset + size


def _register_names(text: str) -> Iterator[str]:
    """Yield the names of a declaration: `%r<3>, t` are %r0, %r1, %r2 and t."""
    for name in split(text):
        if many := re.fullmatch(r"(%?[\w$]+)<(\d+)>", name):
            yield from (f"{many[1]}{number}" for number in range(int(many[2])))
        else:
            yield name

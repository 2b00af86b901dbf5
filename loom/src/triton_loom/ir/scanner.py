"""MLIR's text by tokens: characters, locations, types and attributes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .ttir import Bits, Dense, Opaque, Pointer, Scalar, Tensor, Type


class ParseError(ValueError):
    """The text is not TTIR that this reader supports."""


_SPACE = re.compile(r"\s*(?://[^\n]*\s*)*")
_BEFORE_TOKEN = " \n\t\r/"
VALUE = re.compile(r"%([\w$.\-]+)(?:#(\d+))?")
_WORD = re.compile(r"[A-Za-z_][\w.$]*")
NUMBER = re.compile(r"-?(?:0x[0-9A-Fa-f]+|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)")
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
SYMBOL = re.compile(r'@(?:"([^"]*)"|([\w.$\-]+))')
BLOCK = re.compile(r"\^(\w+)")
_TENSOR = re.compile(r"tensor<((?:\d+x)*)")
_PLAIN_TYPE = re.compile(r"tensor<\w*(?:!tt\.ptr<\w+>)?>|!tt\.ptr<\w+>|[A-Za-z_][\w.$]*(?![\w.$<])")
_LOC_REFERENCE = re.compile(r"loc\((#loc\d*)\)")
_LOC_ALIAS = re.compile(r"^#(loc\d*) = loc\((.*)\)$", re.MULTILINE)
_LOC_NAMED = re.compile(r'"[^"]*"\((.*)\)')
_LOC_FILE = re.compile(r'"([^"]+)":(\d+):(\d+)')
_OPEN_CLOSE = {"(": ")", "[": "]", "{": "}", "<": ">"}


class _Locations:
    """Resolver of `#loc12` to "file:line".

    An inlined operation has two: the kernel line of the outermost call, and the operation's own line.
    """

    def __init__(self, text: str) -> None:
        self.aliases = dict(_LOC_ALIAS.findall(text))
        self.resolved: dict[str, tuple[str, str]] = {}

    def resolve(self, loc: str, depth: int = 0) -> tuple[str, str]:
        """Return the kernel line and the operation's own line."""
        lines = self.resolved.get(loc)
        if lines is None:
            lines = self.resolved[loc] = self.follow(loc.strip(), depth + 1)
        return lines

    def follow(self, loc: str, depth: int) -> tuple[str, str]:
        if depth > 64:
            return "", ""
        if loc.startswith("#"):
            return self.resolve(self.aliases.get(loc[1:], ""), depth)
        if loc.startswith("callsite("):
            locations = loc[len("callsite(") : -1]
            split = next(
                (
                    i
                    for i in _occurrences(locations, " at ")
                    if locations.count("(", 0, i) == locations.count(")", 0, i)
                ),
                0,
            )
            callee, caller = locations[:split], locations[split + len(" at ") :]
            return self.resolve(caller, depth)[0], self.resolve(callee, depth)[1]
        if match := _LOC_FILE.match(loc):
            line = f"{match[1]}:{match[2]}"
            return line, line
        if name_match := _LOC_NAMED.fullmatch(loc):
            return self.resolve(name_match[1], depth)
        return "", ""


def _occurrences(text: str, part: str) -> Iterator[int]:
    return (match.start() for match in re.finditer(re.escape(part), text))


class Scanner:
    """Position in the text, and the tokens that can be consumed from there.

    The position is always at a token: consuming a token also consumes the space and comments after it.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.move(0)
        self.known_types: dict[str, Type] = {}
        self.locations = _Locations(text)
        self.in_operation = False

    # -- characters --

    def move(self, end: int) -> None:
        """Move to the first token at or after `end`, where the last token ended."""
        self.end = self.pos = end
        if self.text[end : end + 1] in _BEFORE_TOKEN:
            space = _SPACE.match(self.text, end)
            assert space
            self.pos = space.end()

    def fail(self, expected: str) -> ParseError:
        # an operation ends with its line: report missing tokens there, not on the next line
        start = self.end if self.in_operation and self.at_line_end() else self.pos
        line = self.text.count("\n", 0, start) + 1
        rest = self.text[start : start + 60].split("\n")[0].strip()
        return ParseError(f"TTIR line {line}: expected {expected}, found {rest!r}")

    def peek(self, token: str) -> bool:
        return self.text.startswith(token, self.pos)

    def take(self, token: str) -> bool:
        if self.text.startswith(token, self.pos):
            self.move(self.pos + len(token))
            return True
        return False

    def need(self, token: str) -> None:
        if not self.take(token):
            raise self.fail(repr(token))

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self.text, self.pos)
        if match:
            self.move(match.end())
        return match

    def word(self) -> str:
        match = self.match(_WORD)
        if not match:
            raise self.fail("a word")
        return match[0]

    def at_line_end(self) -> bool:
        return self.pos == len(self.text) or self.text.find("\n", self.end, self.pos) >= 0

    def balanced(self, opening: str) -> str:
        """Consume the text up to the closing partner of the bracket just consumed; return it without the bracket."""
        start = end = self.end
        depth = 1
        while depth:
            char = self.text[end : end + 1]
            if not char:
                raise self.fail(f"a closing {_OPEN_CLOSE[opening]!r}")
            if char == '"' and (match := STRING.match(self.text, end)):
                end = match.end()
                continue
            if char == opening:
                depth += 1
            elif char == _OPEN_CLOSE[opening] and not self.text.startswith("->", end - 1):
                depth -= 1
            end += 1
        self.move(end)
        return self.text[start : end - 1]

    # -- locations, types, attributes --

    def location(self) -> str:
        return self.both_locations()[0]

    def both_locations(self) -> tuple[str, str]:
        """Return the kernel line and the operation's own line."""
        if reference := self.match(_LOC_REFERENCE):
            return self.locations.resolve(reference[1])
        return self.locations.resolve(self.balanced("(")) if self.take("loc(") else ("", "")

    def type(self) -> Type:
        plain = _PLAIN_TYPE.match(self.text, self.pos)
        if plain is None:
            return self.structured_type()
        if cached := self.known_types.get(plain[0]):
            self.move(plain.end())
            return cached
        self.known_types[plain[0]] = parsed = self.structured_type()
        return parsed

    def structured_type(self) -> Type:
        if match := self.match(_TENSOR):
            shape = tuple(int(d) for d in match[1].split("x")[:-1])
            element = self.type()
            while self.take(","):  # an encoding, ignored
                self.attribute()
            self.need(">")
            if not isinstance(element, Scalar | Pointer):
                raise self.fail("a tensor of scalars or pointers")
            return Tensor(shape, element)
        if self.take("!tt.ptr<"):
            pointee = self.type()
            while self.take(","):
                self.match(NUMBER)
            self.need(">")
            return Pointer(pointee)
        if self.take("!"):
            text = "!" + self.word()
            if self.take("<"):
                text += f"<{self.balanced('<')}>"
            return Opaque(text)
        return Scalar(self.word())

    def types(self) -> list[Type]:
        """Parse `t`, `t, t` or `(t, t)`."""
        if self.take("("):
            result: list[Type] = []
            while not self.take(")"):
                result.append(self.type())
                self.take(",")
            return result
        result = [self.type()]
        while self.take(","):
            result.append(self.type())
        return result

    def attribute(self) -> Any:
        if match := self.match(STRING):
            return unescape(match[1])
        if self.take("dense<"):
            return _dense(self.balanced("<"))
        if self.take("["):
            return [part.strip() for part in self.balanced("[").split(",") if part.strip()]
        if self.take("array<"):
            _, _, numbers = self.balanced("<").partition(":")
            return [_number(part.strip()) for part in numbers.split(",") if part.strip()]
        if match := self.match(NUMBER):
            value = _number(match[0])
            if self.take(":"):
                self.type()
            return value
        if self.take("#"):
            name = self.word()
            return {name: self.balanced("<")} if self.take("<") else name
        if match := self.match(SYMBOL):
            return match[1] or match[2]
        if self.take("{"):
            return self.attributes("}")
        word = self.word()
        return {"true": True, "false": False}.get(word, word)

    def attributes(self, closing: str) -> dict[str, Any]:
        attrs: dict[str, Any] = {}
        while not self.take(closing):
            match = self.match(STRING)
            name = match[1] if match else self.word()
            attrs[name] = self.attribute() if self.take("=") else True
            if self.take(":"):
                self.type()
            self.take(",")
        return attrs


def _number(text: str) -> int | float | Bits:
    if text.startswith(("0x", "-0x")):
        return Bits(int(text, 16))
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return float(text)


def _dense(text: str) -> Dense:
    text = text.strip()

    def literal(part: str) -> Any:
        return {"true": True, "false": False}.get(part) if part in ("true", "false") else _number(part)

    if text.startswith('"'):
        raw = bytes.fromhex(text.strip('"').removeprefix("0x"))
        return Dense(raw)
    if text.startswith("["):
        return Dense([literal(part) for part in re.findall(r"[\w.+\-]+", text)])
    return Dense(literal(text))


def unescape(text: str) -> str:
    """Undo MLIR's escapes: bytes as two hex digits (`\\0A`), and the usual `\\n`, `\\"`."""

    def replace(match: re.Match[str]) -> str:
        code = match[1]
        escapes = {"n": "\n", "t": "\t", '"': '"', "\\": "\\"}
        return escapes[code] if code in escapes else chr(int(code, 16))

    return re.sub(r'\\([nt"\\]|[0-9A-Fa-f]{2})', replace, text)

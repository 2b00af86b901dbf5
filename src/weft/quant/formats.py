"""What a quantised tensor's bytes mean: the element, the block that shares a scale, and how the scale is made.

    x ≈ q * d            q: element, d: stored (decode) scale, one per block
    x ≈ q * d * g        NVFP4: d is an e4m3 number and g one fp32 number for the tensor

Six projects compute "1x128 FP8" in six ways. A `Convention` writes each of them as data, with amax the largest
|x| of a block (NaN if one is among them) and MAX the largest number of the element type:

| convention           | amax is at least | stored d         | q rounds         |
|----------------------|------------------|------------------|------------------|
| `te`                 | 0                | 1 / (MAX / amax) | x * (MAX / amax) |
| `torchao`            | 1e-12            | 1 / (MAX / amax) | x * (MAX / amax) |
| `deepgemm`           | 1e-4             | amax / MAX       | x * (1 / d)      |
| `sglang`             | 1e-10            | amax / MAX       | x * (1 / d)      |
| `sglang_col_major`   | 1e-10            | amax / MAX       | x / d            |
| `deepep`             | 1e-4             | amax / MAX       | x * (MAX / amax) |
| `vllm`               | 1e-10            | amax * (1 / MAX) | x / d            |

`te` alone has special cases: an amax of 0, inf or NaN makes the scale 1, and MAX / amax = inf becomes the largest
number of the input's dtype. Every operation is one IEEE fp32 operation. With power-of-two scales, d (deepep's made
as amax * (1 / MAX)) is rounded up to a power of two from its exponent bits; `te` and `torchao` clear the mantissa
of MAX / amax, which is the same. q then rounds x * (1 / d). For the float elements all conventions then agree on
ordinary data; int8's 1 / 127 rounds down, so `vllm` and `deepep` are a step smaller 1 ulp above 127 * 2^k.

NaN and infinities follow the formulas. This is what a block that has one dequantises to; rows that name no block are
about tensor, row, 1x128 and 128x128:

| convention                 | Inf becomes         | NaN becomes                  | the others of the block become    |
|----------------------------|---------------------|------------------------------|-----------------------------------|
| `te`                       | ±MAX: d is 1        | NaN, 0 in int8               | x rounded with d = 1              |
| `torchao`, also of mx      | NaN                 | NaN                          | NaN                               |
| the others without pow2    | NaN: d is infinite  | NaN: d is NaN                | NaN                               |
| the others with pow2       | ±inf: d is 2^127    | NaN, 0 in int8: d is 2^127   | 0                                 |
| mx of `deepgemm`           | ±inf: d is 2^127    | NaN, inf in e2m1             | 0                                 |
| mx of `te`                 | ±inf: d is 2^127    | NaN: d is NaN                | 0 beside an Inf, NaN beside a NaN |
| nvfp4 of `te`              | ±2688: d is 448     | NaN                          | 0; NaN all over the tensor        |
| nvfp4 of `torchao`         | NaN                 | NaN                          | NaN all over the tensor           |

int4 is like int8, with MAX = 7. With a given scale an Inf becomes ±MAX * d, and NaN is NaN (0 in int8). So by the usual
convention, `te`, an Inf leaves no trace in codes and scales: call `weft.any_nonfinite` before, or ask for the amax,
which is then infinite or NaN.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, get_args

import torch

Block = Literal["tensor", "row", "1x128", "128x128", "mx", "nvfp4", "nvfp4_16x16"]
Element = Literal["e4m3", "e5m2", "int8", "e2m1", "int4"]
Side = Literal["rowwise", "columnwise"]
ConventionName = Literal["te", "torchao", "deepgemm", "sglang", "sglang_col_major", "deepep", "vllm"]


@dataclass(frozen=True)
class ElementType:
    """An 8- or 4-bit number type, and the constants that encoders need.

    The names that end in `bits` are fp32 bit patterns. `shift` is how many mantissa bits an fp32 number loses;
    `magic` is an fp32 number whose ulp is the smallest subnormal.
    """

    name: str
    dtype: torch.dtype
    max: float
    bits: int
    reciprocal: float  # fp32(1 / max)
    shift: int = 0
    max_bits: int = 0
    min_normal_bits: int = 0
    magic: float = 0.0
    magic_bits: int = 0
    max_code: int = 0
    nan: int = 0
    integer: bool = False  # two's complement, from -max to max

    @property
    def rebias(self) -> int:
        """The difference of the exponents' biases, shifted to where the code has its exponent."""
        return ((self.min_normal_bits >> 23) - 1) << (23 - self.shift)

    @property
    def unbias(self) -> float:
        """2 to the difference of the exponents' biases."""
        return 2.0 ** ((self.min_normal_bits >> 23) - 1)

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def sign_shift(self) -> int:
        """By how many bits the sign of an fp32 number is shifted to become that of the code."""
        return 32 - self.bits


ELEMENTS: dict[str, ElementType] = {
    number.name: number
    for number in (
        ElementType(
            "e4m3",
            torch.float8_e4m3fn,
            max=448.0,
            bits=8,
            reciprocal=float.fromhex("0x1.24924ap-9"),
            shift=20,
            max_bits=0x43E00000,
            min_normal_bits=0x3C800000,
            magic=2.0**14,
            magic_bits=0x46800000,
            max_code=0x7E,
            nan=0x7F,
        ),
        ElementType(
            "e5m2",
            torch.float8_e5m2,
            max=57344.0,
            bits=8,
            reciprocal=float.fromhex("0x1.24924ap-16"),
            shift=21,
            max_bits=0x47600000,
            min_normal_bits=0x38800000,
            magic=2.0**7,
            magic_bits=0x43000000,
            max_code=0x7B,
            nan=0x7F,
        ),
        ElementType(
            "e2m1",
            torch.uint8,
            max=6.0,
            bits=4,
            reciprocal=float.fromhex("0x1.555556p-3"),
            shift=22,
            max_bits=0x40C00000,
            min_normal_bits=0x3F800000,
            magic=2.0**22,
            magic_bits=0x4A800000,
            max_code=0x7,
            nan=0x7,
        ),
        ElementType(
            "int8",
            torch.int8,
            max=127.0,
            bits=8,
            reciprocal=float.fromhex("0x1.020408p-7"),
            integer=True,
        ),
        ElementType(
            "int4", torch.uint8, max=7.0, bits=4, reciprocal=float.fromhex("0x1.24924ap-3"), integer=True
        ),
    )
}


@dataclass(frozen=True)
class Convention:
    """How one project makes a scale; see the table above."""

    name: str
    amax_floor: float
    scale: Literal["amax / max", "amax * (1 / max)", "1 / (max / amax)"]
    data: Literal["x * (1 / d)", "x * (max / amax)", "x / d"]


CONVENTIONS: dict[str, Convention] = {
    c.name: c
    for c in (
        Convention("te", 0.0, "1 / (max / amax)", "x * (max / amax)"),
        Convention("torchao", 1e-12, "1 / (max / amax)", "x * (max / amax)"),
        Convention("deepgemm", 1e-4, "amax / max", "x * (1 / d)"),
        Convention("sglang", 1e-10, "amax / max", "x * (1 / d)"),
        Convention("sglang_col_major", 1e-10, "amax / max", "x / d"),
        Convention("deepep", 1e-4, "amax / max", "x * (max / amax)"),
        Convention("vllm", 1e-10, "amax * (1 / max)", "x / d"),
    )
}

# Block -> (rows, columns) that share a stored scale; 0 stands for the whole length.
_SHAPES: dict[str, tuple[int, int]] = {
    "tensor": (0, 0),
    "row": (1, 0),
    "1x128": (1, 128),
    "128x128": (128, 128),
    "mx": (1, 32),
    "nvfp4": (1, 16),
    "nvfp4_16x16": (1, 16),
}
# Block -> side of the squares that share a scale. Those of nvfp4_16x16 store it once for each of their rows.
_SQUARES = {"128x128": 128, "nvfp4_16x16": 16}
_NVFP4 = ("nvfp4", "nvfp4_16x16")
_ELEMENTS: dict[str, tuple[str, ...]] = {
    "tensor": ("e4m3", "e5m2", "int8"),
    "row": ("e4m3", "e5m2", "int8"),
    "1x128": ("e4m3", "e5m2", "int8", "int4"),
    "128x128": ("e4m3", "e5m2", "int8"),
    "mx": ("e4m3", "e5m2", "e2m1"),
    "nvfp4": ("e2m1",),
    "nvfp4_16x16": ("e2m1",),
}
# Block -> conventions, where it has not all of them.
_CONVENTIONS: dict[str, tuple[str, ...]] = {
    "mx": ("te", "torchao", "deepgemm"),
    "nvfp4": ("te", "torchao"),
    "nvfp4_16x16": ("te", "torchao"),
}


def _conventions(block: str, element: str) -> tuple[str, ...]:
    """Those that a block of this element has. No other project has an int4 of which the bytes could be matched."""
    return ("te",) if element == "int4" else _CONVENTIONS.get(block, tuple(CONVENTIONS))


@dataclass(frozen=True)
class Format:
    """A quantised format. `Format("1x128")` is TransformerEngine's default: e4m3 with power-of-two scales.

    - `block`: which elements share a scale. `mx` is 1x32 with e8m0 scales, `nvfp4` 1x16 with e4m3 scales and one
      fp32 scale for the tensor. `nvfp4_16x16` is for weights: its row-wise and its column-wise copy stand for the same
      numbers. It stores the scale of a square in each of its rows, so that whatever reads `nvfp4` reads it too.
    - `element`: `e4m3`, `e5m2`, `int8`; `e2m1` for `mx` (MXFP4) and both kinds of `nvfp4`. `int4` for `1x128`: weights
      beside plain numbers, from -7 to 7, two to a byte, the even one in the low half.
    - `convention`: whose arithmetic; see the table of this module.
    - `power_of_two`: None takes the usual choice (yes for 1x128 but with int4, 128x128 and mx, no for the others).
    - `hadamard`: the copy of an `nvfp4` tensor that is rotated before it is quantised. With "columnwise", every 16
      neighbours of a column are multiplied by diag(signs) H / 4 in fp32, H the Hadamard matrix of 16 and the signs
      TransformerEngine's, and rounded to the tensor's dtype; after the last row come zeros up to a multiple of 16. This
      copy has a scale of the whole tensor of its own. A product of two copies that are both rotated along the dimension
      that it sums over is that of the numbers themselves: outliers spread over 16 codes, and nothing is undone.
      `dequantize` rotates back. The transpose of such a tensor has a rotated row-wise copy: "rowwise".

    >>> Format("1x128").spec
    'e4m3:1x128:te:pow2'
    >>> Format.of("e5m2:1x128:deepgemm") == Format("1x128", "e5m2", "deepgemm", power_of_two=False)
    True
    """

    block: Block
    element: Element | None = None
    convention: ConventionName = "te"
    power_of_two: bool | None = None
    hadamard: Side | None = None

    def __post_init__(self) -> None:
        _choose("block", self.block, get_args(Block))
        if self.element is None:
            object.__setattr__(self, "element", _ELEMENTS[self.block][0])
        if self.power_of_two is None:
            usual = self.block in ("1x128", "128x128", "mx") and self.element != "int4"
            object.__setattr__(self, "power_of_two", usual)
        _choose(f"element of block {self.block!r}", self.element, _ELEMENTS[self.block])
        known = _conventions(self.block, self.number.name)
        _choose(f"convention of {self.element} in block {self.block!r}", self.convention, known)
        if self.block == "mx" and not self.power_of_two:
            raise ValueError("mx scales are e8m0, hence powers of two: power_of_two=False has no meaning")
        if self.block in _NVFP4 and self.power_of_two:
            raise ValueError(f"{self.block} scales are e4m3 numbers: power_of_two=True has no meaning")
        if self.hadamard is not None:
            _choose("hadamard", self.hadamard, get_args(Side))
            if self.block != "nvfp4":
                raise ValueError(f"hadamard= rotates copies in blocks 'nvfp4'; got {self.block!r}")

    # Plain properties: torch.compile traces them, and rebuilds a format from its fields.

    @property
    def spec(self) -> str:
        """The format in one string, which `of` reads back."""
        pow2 = ":pow2" if self.power_of_two and self.block != "mx" else ""
        rotated = "" if self.hadamard is None else f":hadamard-{self.hadamard}"
        return f"{self.element}:{self.block}:{self.convention}{pow2}{rotated}"

    @property
    def number(self) -> ElementType:
        return ELEMENTS[self.element or ""]

    @property
    def rule(self) -> Convention:
        return CONVENTIONS[self.convention]

    @property
    def group(self) -> int:
        """Neighbours in a row that share a stored scale; 0 for all of them."""
        return _SHAPES[self.block][1]

    @property
    def block_rows(self) -> int:
        """Rows that share a stored scale; 0 for all of them."""
        return _SHAPES[self.block][0]

    @property
    def square(self) -> int:
        """The side of the squares that share a scale, whose codes are the same in both copies; 0 for other blocks."""
        return _SQUARES.get(self.block, 0)

    @property
    def stored(self) -> Format:
        """The format as which others read the bytes: plain `nvfp4` for `nvfp4_16x16` and for rotated copies, and itself
        for all others."""
        if self.block == "nvfp4_16x16" or self.hadamard is not None:
            return Format("nvfp4", self.element, self.convention)
        return self

    @property
    def transposed(self) -> Format:
        """That of the transpose of a tensor, whose row-wise copy is the column-wise one of the tensor."""
        if self.hadamard is None:
            return self
        side: Side = "rowwise" if self.hadamard == "columnwise" else "columnwise"
        return Format(self.block, self.element, self.convention, self.power_of_two, side)

    def length(self, numbers: int, side: Side = "rowwise") -> int:
        """How many numbers are stored of a row, or of a column, of a copy that quantises `numbers` of them."""
        return -(-numbers // 16) * 16 if side == self.hadamard else numbers

    @property
    def packed(self) -> int:
        """Elements in a byte."""
        return 8 // self.number.bits

    @property
    def scale_dtype(self) -> torch.dtype:
        if self.block in _NVFP4:
            return torch.float8_e4m3fn
        return torch.float8_e8m0fnu if self.block == "mx" else torch.float32

    @staticmethod
    def of(value: Format | str) -> Format:
        """Return a format given as itself, by a block's name, as `element:block`, or as a whole spec, such as
        `e4m3:1x128:te:pow2`. What a short name leaves out is the usual choice: "1x128" and "e4m3:1x128" are one format.
        A spec that names its convention says everything: without `:pow2` its scales are no powers of two."""
        if isinstance(value, Format):
            return value
        if not isinstance(value, str):
            raise TypeError(
                f"a format is a weft.Format or its name, such as '1x128' or 'e4m3:1x128:te'; got {value!r}"
            )
        return _parse(value) if torch.compiler.is_compiling() else _parsed(value)  # it cannot trace a cache

    @staticmethod
    def all() -> tuple[Format, ...]:
        """Every format there is; those of block `nvfp4` can be rotated beside."""
        return _all()

    @property
    def needs_tensor_amax(self) -> bool:
        """Whether the largest |x| of the whole tensor must be known before its first element is encoded."""
        return self.block in ("tensor", *_NVFP4)

    def data_shape(self, rows: int, cols: int) -> tuple[int, int]:
        return rows, -(-cols // self.packed)

    def scale_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Shape of the scales of a [rows, cols] tensor."""
        return (
            -(-rows // self.block_rows) if self.block_rows else 1,
            -(-cols // self.group) if self.group else 1,
        )

    def __str__(self) -> str:
        return self.spec


def transposed_spec(spec: str) -> str:
    """Return the spec of `Format.transposed`, in little time: most formats are their own."""
    return Format.of(spec).transposed.spec if ":hadamard-" in spec else spec


def read_alike(spec: str, other: str) -> bool:
    """Return whether codes of two formats are read alike: they differ at most in how their scales were made."""
    a, b = Format.of(spec), Format.of(other)
    return (a.element, a.block, a.hadamard) == (b.element, b.block, b.hadamard)


@functools.cache
def _parsed(spec: str) -> Format:
    return _parse(spec)


def _parse(spec: str) -> Format:
    if spec in _SHAPES:
        return Format(spec)  # type: ignore[arg-type]
    element, block, convention, *rest = [*spec.split(":"), "", ""][: max(3, spec.count(":") + 1)]
    rotated = _ROTATED.get(rest[0]) if len(rest) == 1 else None
    if block not in _SHAPES or not (rotated or rest in ([], ["pow2"])):
        raise ValueError(
            f"unknown format {spec!r}: give a Format, one of {', '.join(_SHAPES)}, or "
            "element:block:convention[:pow2], for instance e4m3:1x128:te:pow2, or e2m1:nvfp4:te:hadamard-columnwise"
        )
    if not convention and not rest:
        return Format(block, element)  # type: ignore[arg-type]
    power_of_two = rest == ["pow2"] or block == "mx"
    return Format(block, element, convention or "te", power_of_two, rotated)  # type: ignore[arg-type]


# How a spec ends -> the side that is rotated.
_ROTATED: dict[str, Side] = {"hadamard-rowwise": "rowwise", "hadamard-columnwise": "columnwise"}


@functools.cache
def _all() -> tuple[Format, ...]:
    return tuple(
        Format(block, element, convention, power_of_two)  # type: ignore[arg-type]
        for block in _SHAPES
        for element in _ELEMENTS[block]
        for convention in _conventions(block, element)
        for power_of_two in ((True,) if block == "mx" else (False,) if block in _NVFP4 else (False, True))
    )


def _choose(what: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{what} must be one of {', '.join(allowed)}; got {value!r}")


# The formats as `Format.spec` spells them.
SPECS = frozenset(
    spec
    for format in _all()
    for spec in (format.spec, *(f"{format.spec}:{end}" for end in _ROTATED if format.block == "nvfp4"))
)

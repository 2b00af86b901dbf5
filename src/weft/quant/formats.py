"""Quantized formats: the element type, the block that shares a scale, and the arithmetic that makes the scale.

    x ≈ q * d            q: element, d: stored (decode) scale, one per block
    x ≈ q * d * g        NVFP4: d is e4m3, and g is one fp32 scale for the tensor

Six projects compute "1x128 FP8" in six ways. A `Convention` describes each way as data. amax is the largest |x| of a
block (NaN if the block has one), and MAX is the largest value of the element type:

| convention           | amax is at least | stored d         | q rounds         |
|----------------------|------------------|------------------|------------------|
| `te`                 | 0                | 1 / (MAX / amax) | x * (MAX / amax) |
| `torchao`            | 1e-12            | 1 / (MAX / amax) | x * (MAX / amax) |
| `deepgemm`           | 1e-4             | amax / MAX       | x * (1 / d)      |
| `sglang`             | 1e-10            | amax / MAX       | x * (1 / d)      |
| `sglang_col_major`   | 1e-10            | amax / MAX       | x / d            |
| `deepep`             | 1e-4             | amax / MAX       | x * (MAX / amax) |
| `vllm`               | 1e-10            | amax * (1 / MAX) | x / d            |

Only `te` has special cases: an amax of 0, inf or NaN makes the scale 1, and MAX / amax = inf becomes the largest
value of the input's dtype. Every operation is one IEEE fp32 operation. Power-of-two scales round d up to a power of two
from its exponent bits (deepep computes this d as amax * (1 / MAX)); `te` and `torchao` clear the mantissa of
MAX / amax, which has the same effect. q then rounds x * (1 / d). For float elements all conventions then agree on
ordinary data; int8's 1 / 127 rounds down, so `vllm` and `deepep` are one step smaller 1 ulp above 127 * 2^k.

NaN and infinities follow the formulas. A block that contains one dequantizes as follows; rows that name no block cover
tensor, row, 1x128 and 128x128:

| convention                 | Inf becomes         | NaN becomes                  | the rest of the block becomes     |
|----------------------------|---------------------|------------------------------|-----------------------------------|
| `te`                       | ±MAX: d is 1        | NaN, 0 in int8               | x rounded with d = 1              |
| `torchao`, also of mx      | NaN                 | NaN                          | NaN                               |
| the others without pow2    | NaN: d is infinite  | NaN: d is NaN                | NaN                               |
| the others with pow2       | ±inf: d is 2^127    | NaN, 0 in int8: d is 2^127   | 0                                 |
| mx of `deepgemm`           | ±inf: d is 2^127    | NaN, inf in e2m1             | 0                                 |
| mx of `te`                 | ±inf: d is 2^127    | NaN: d is NaN                | 0 with an Inf, NaN with a NaN     |
| nvfp4 of `te`              | ±2688: d is 448     | NaN                          | 0; NaN all over the tensor        |
| nvfp4 of `torchao`         | NaN                 | NaN                          | NaN all over the tensor           |

int4 behaves like int8 with MAX = 7. With a caller-supplied scale, Inf becomes ±MAX * d and NaN stays NaN (0 in int8).
The default convention, `te`, therefore hides an Inf: neither codes nor scales show it. Call `weft.any_nonfinite` before
quantizing, or request the amax, which is then infinite or NaN.
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
    """8- or 4-bit element type, with the constants that encoders need.

    Names that end in `bits` are fp32 bit patterns. `shift` is the number of mantissa bits that an fp32 value loses;
    `magic` is the fp32 value whose ulp is the smallest subnormal.
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
        """Difference of the exponent biases, shifted to the code's exponent field."""
        return ((self.min_normal_bits >> 23) - 1) << (23 - self.shift)

    @property
    def unbias(self) -> float:
        """2 to the power of the difference of the exponent biases."""
        return 2.0 ** ((self.min_normal_bits >> 23) - 1)

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def sign_shift(self) -> int:
        """Right shift that moves an fp32 sign bit to the code's sign bit."""
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
    """Arithmetic of one project for scales and codes; see the table above."""

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

# Block -> (rows, columns) that share a stored scale; 0 is the whole length.
_SHAPES: dict[str, tuple[int, int]] = {
    "tensor": (0, 0),
    "row": (1, 0),
    "1x128": (1, 128),
    "128x128": (128, 128),
    "mx": (1, 32),
    "nvfp4": (1, 16),
    "nvfp4_16x16": (1, 16),
}
# Block -> side of the squares that share a scale. nvfp4_16x16 stores it once per row of the square.
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
# Block -> its conventions, for blocks that do not have all of them.
_CONVENTIONS: dict[str, tuple[str, ...]] = {
    "mx": ("te", "torchao", "deepgemm"),
    "nvfp4": ("te", "torchao"),
    "nvfp4_16x16": ("te", "torchao"),
}


def _conventions(block: str, element: str) -> tuple[str, ...]:
    """Return the conventions of a block with this element. No other project has an int4 to match."""
    return ("te",) if element == "int4" else _CONVENTIONS.get(block, tuple(CONVENTIONS))


@dataclass(frozen=True)
class Format:
    """Quantized format. `Format("1x128")` is TransformerEngine's default: e4m3 with power-of-two scales.

    - `block`: the elements that share a scale. `mx` is 1x32 with e8m0 scales; `nvfp4` is 1x16 with e4m3 scales and one
      fp32 scale for the tensor. `nvfp4_16x16` is for weights: its row-wise and column-wise copies hold the same values.
      It stores the scale of a square once per row, so any reader of `nvfp4` can read it.
    - `element`: `e4m3`, `e5m2`, `int8`; `e2m1` for `mx` (MXFP4) and both kinds of `nvfp4`. `int4` for `1x128`: weights
      that multiply unquantized activations, from -7 to 7, two per byte, even index in the low half.
    - `convention`: the project whose arithmetic is used; see the table of this module.
    - `power_of_two`: None selects the default (True for 1x128 except with int4, for 128x128 and for mx, else False).
    - `hadamard`: the copy of an `nvfp4` tensor that is rotated before it is quantized. "columnwise" multiplies every 16
      consecutive elements of a column by diag(signs) H / 4 in fp32 (H the Hadamard matrix of size 16, the signs
      TransformerEngine's) and rounds to the tensor's dtype; rows are zero-padded to a multiple of 16. The rotated copy
      has its own global scale. If both operands are rotated along K, the rotations cancel in the product: outliers
      spread over 16 codes, and nothing has to be undone. `dequantize` rotates back. The transpose of such a tensor has
      a rotated row-wise copy: "rowwise".

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
            default = self.block in ("1x128", "128x128", "mx") and self.element != "int4"
            object.__setattr__(self, "power_of_two", default)
        _choose(f"element of block {self.block!r}", self.element, _ELEMENTS[self.block])
        conventions = _conventions(self.block, self.number.name)
        _choose(f"convention of {self.element} in block {self.block!r}", self.convention, conventions)
        if self.block == "mx" and not self.power_of_two:
            raise ValueError("mx scales are e8m0, always powers of two: drop power_of_two=False")
        if self.block in _NVFP4 and self.power_of_two:
            raise ValueError(f"{self.block} scales are e4m3, not powers of two: drop power_of_two=True")
        if self.hadamard is not None:
            _choose("hadamard", self.hadamard, get_args(Side))
            if self.block != "nvfp4":
                raise ValueError(f"hadamard= is supported only for block 'nvfp4'; got {self.block!r}")

    # Plain, uncached properties: torch.compile traces them and rebuilds a format from its fields.

    @property
    def spec(self) -> str:
        """Name of the format, which `of` parses."""
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
        """Number of consecutive elements of a row that share a stored scale; 0 means the whole row."""
        return _SHAPES[self.block][1]

    @property
    def block_rows(self) -> int:
        """Number of rows that share a stored scale; 0 means all rows."""
        return _SHAPES[self.block][0]

    @property
    def square(self) -> int:
        """Side of the squares that share a scale, so that both copies hold the same codes; 0 for other blocks."""
        return _SQUARES.get(self.block, 0)

    @property
    def stored(self) -> Format:
        """Format in which readers see the bytes: plain `nvfp4` for `nvfp4_16x16` and rotated copies, else the format
        itself."""
        if self.block == "nvfp4_16x16" or self.hadamard is not None:
            return Format("nvfp4", self.element, self.convention)
        return self

    @property
    def transposed(self) -> Format:
        """Format of the transposed tensor, whose row-wise copy is this tensor's column-wise copy."""
        if self.hadamard is None:
            return self
        side: Side = "rowwise" if self.hadamard == "columnwise" else "columnwise"
        return Format(self.block, self.element, self.convention, self.power_of_two, side)

    def length(self, numbers: int, side: Side = "rowwise") -> int:
        """Return how many elements a copy stores of a row or column of `numbers` elements."""
        return -(-numbers // 16) * 16 if side == self.hadamard else numbers

    @property
    def packed(self) -> int:
        """Number of elements per byte."""
        return 8 // self.number.bits

    @property
    def scale_dtype(self) -> torch.dtype:
        if self.block in _NVFP4:
            return torch.float8_e4m3fn
        return torch.float8_e8m0fnu if self.block == "mx" else torch.float32

    @staticmethod
    def of(value: Format | str) -> Format:
        """Return the format named by a `Format`, a block name, `element:block`, or a full spec such as
        `e4m3:1x128:te:pow2`. Short names take defaults for the rest: "1x128" and "e4m3:1x128" are the same format. A
        spec that names its convention takes no defaults: without `:pow2` its scales are not powers of two."""
        if isinstance(value, Format):
            return value
        if not isinstance(value, str):
            raise TypeError(
                f"a format is a weft.Format or its name, such as '1x128' or 'e4m3:1x128:te'; got {value!r}"
            )
        return (
            _parse(value) if torch.compiler.is_compiling() else _parsed(value)
        )  # torch.compile cannot trace a cache

    @staticmethod
    def all() -> tuple[Format, ...]:
        """Return every format without a rotation; those of block `nvfp4` can also be rotated."""
        return _all()

    @property
    def needs_tensor_amax(self) -> bool:
        """True if the amax of the whole tensor must be known before its first element is encoded."""
        return self.block in ("tensor", *_NVFP4)

    def data_shape(self, rows: int, cols: int) -> tuple[int, int]:
        return rows, -(-cols // self.packed)

    def scale_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Return the shape of the scales of a [rows, cols] tensor."""
        return (
            -(-rows // self.block_rows) if self.block_rows else 1,
            -(-cols // self.group) if self.group else 1,
        )

    def __str__(self) -> str:
        return self.spec


def transposed_spec(spec: str) -> str:
    """Return the spec of `Format.transposed`, quickly: most formats are their own transpose."""
    return Format.of(spec).transposed.spec if ":hadamard-" in spec else spec


def read_alike(spec: str, other: str) -> bool:
    """Return whether codes of both formats are read the same way, that is, differ at most in how scales were made."""
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


# Suffix of a spec -> the side that is rotated.
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


# Spelling of every format in `Format.spec`.
SPECS = frozenset(
    spec
    for format in _all()
    for spec in (format.spec, *(f"{format.spec}:{end}" for end in _ROTATED if format.block == "nvfp4"))
)

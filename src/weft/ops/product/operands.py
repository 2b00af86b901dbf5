"""Operands of products: their element types and memory layouts, and how a pair is multiplied.

A product sums over K. Kernels read both operands as [rows, K]: a unchanged, b transposed. Of a quantized operand they
read the copy whose scales lie along K: the row-wise copy of a, the column-wise copy of b. A row-wise quantized weight
[N, K] is passed as its transpose `w.T`, whose column-wise copy is the weight's row-wise copy.

The kernel's loop over K has three bodies, and `Product.of` chooses one per pair:

| body     | a step of K                                       | for                                          |
|----------|---------------------------------------------------|----------------------------------------------|
| `sum`    | total = dot(a, b, total)                          | unquantized operands, row and tensor scales  |
| `blocks` | total += dot(a, b) * scale_a * scale_b            | scales of 128 along K; sums in fp16          |
| `scaled` | total = dot_scaled(a, scale_a, b, scale_b, total) | mx and nvfp4, if the target has scaled dots  |

Codes that a target cannot multiply are decoded in registers to bf16 (fp16, fp32), which represents every code exactly;
so are the codes of one quantized operand next to a plain one. The decoded values include mx and nvfp4 scales, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...quant import Format
from ...quant.formats import ELEMENTS, ElementType
from ...runtime import Capabilities, autocasted, remembered

Precision = Literal["ieee", "tf32", "bf16x3", "fp16"]

# fp64 products run in PyTorch, as the reference of tests.
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
_FP8 = ("e4m3", "e5m2")

# Number of int8 products, each at most 128 * 128, whose sum fits in int32.
INT32_DEPTH = (2**31 - 1) // 128**2 // 128 * 128


@dataclass(frozen=True)
class Form:
    """Element type and memory layout of an operand, as a kernel reads it."""

    element: str  # bf16, fp16, fp32, fp64, int8, int4, e4m3, e5m2 or e2m1
    block: str | None  # the elements that share a scale; None if unquantized
    along_k: bool = True  # K is contiguous; otherwise the rows are
    align: int = 1  # divides the contiguous dimension's length and the other dimension's stride
    bulk: bool = False  # tiles are copied by tensor descriptors

    @staticmethod
    @remembered
    def of(dtype: torch.dtype, spec: str | None) -> Form:
        """Return the form of a tensor of this dtype, or of a quantized tensor in the format `spec`."""
        if spec is None:
            return Form(_NAMES[dtype], None)
        f = Format.of(spec).stored
        return Form(f.number.name, f.block)

    @property
    def number(self) -> ElementType:
        """Element type of a quantized operand, for `tiles.decode`."""
        return ELEMENTS[self.element]

    @property
    def packed(self) -> int:
        """Elements per stored element: 2 for 4-bit codes, else 1."""
        return 1 if self.block is None else 8 // self.number.bits

    @property
    def group(self) -> int:
        """Consecutive elements along K that share a scale; 0 means all."""
        return 0 if self.block is None else Format.of(self.block).group

    @property
    def in_blocks(self) -> bool:
        """True if its scales multiply sums of 128 products along K."""
        return self.group == 128

    @property
    def in_groups(self) -> bool:
        """True if its scales belong to groups of 16 or 32 and multiply the elements."""
        return self.group in (16, 32)

    @property
    def in_epilogue(self) -> bool:
        """True if its scales multiply the final sums."""
        return self.block in ("tensor", "row")

    def __str__(self) -> str:
        return self.element if self.block is None else f"{self.element}:{self.block}"


@dataclass(frozen=True)
class Product:
    """Method by which a pair of operands is multiplied on a target; a constant of the kernel."""

    a: Form
    b: Form
    body: str  # sum, blocks or scaled
    # Type in which both operands are multiplied: as stored ("stored"), e4m3fnuz/e5m2fnuz ("fnuz"), or converted to
    # bf16, fp16 or fp32.
    multiplied: str
    sums: str  # fp32, fp16 or int32
    precision: str  # for fp32 operands: ieee, tf32 or bf16x3
    deep: bool = False  # int32 sums of spans of K are added in fp32

    @property
    def kind(self) -> str:
        """Key of the tile choice: the width of the multiplied elements and the work done on them."""
        if self.multiplied == "fp32":
            return "fp32"
        if self.body == "scaled":
            return "mx4" if self.a.element == self.b.element == "e2m1" else "mx8"
        if self.multiplied in ("bf16", "fp16") and not (self.a.block is None and self.b.block is None):
            # A step of K then loads one scale per row, which takes registers.
            blocks = {self.a.block, self.b.block}
            return "decoded_1x128" if blocks == {None, "1x128"} else "decoded"
        eight = self.multiplied == "fnuz" or self.a.element in ("int8", *_FP8)
        kind = ("int8" if self.a.element == "int8" else "fp8") if eight else "half"
        if self.body != "blocks":
            return kind
        # Two scales per element of a tile take more registers than one.
        return f"{kind}_outer" if self.a.block == self.b.block == "1x128" else f"{kind}_blocks"

    @staticmethod
    @remembered
    def of(a: Form, b: Form, precision: str | None, few: bool, target: Capabilities) -> Product:
        """Choose how a and b, validated by `checks`, are multiplied on a target; `few`: tiles have few rows."""
        plain = a.block is None and b.block is None
        scaled = a.in_groups and b.in_groups
        body = "blocks" if a.in_blocks or b.in_blocks or precision == "fp16" else "sum"
        sums, multiplied = "fp32", "stored"
        if plain:
            multiplied = "fp32" if a.element == "fp32" else "stored"
            sums = "fp16" if precision == "fp16" else "fp32"
        elif a.block is None or b.block is None:
            multiplied = a.element if a.block is None else b.element
        elif scaled:
            native = target.nvfp4_dot if a.block == "nvfp4" else target.mx_dot
            # sm_100's unit needs at least 128 rows; Triton's code for 16 spills or does not compile.
            native = native and not (few and target.family == "sm_100")
            body, multiplied = ("scaled", "stored") if native else ("sum", "bf16")
        elif a.element == "int8":
            sums = "int32"
        elif not target.fp8_dot:
            multiplied = "fnuz" if target.target == "gfx942" else "bf16"
        if precision == "tf32" and target.backend == "hip":
            precision = "bf16x3"  # AMD has no tf32
        return Product(a, b, body, multiplied, sums, precision if precision in ("tf32", "bf16x3") else "ieee")


def autocasted_pair(
    a: Tensor, b: Tensor, precision: Precision | None, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Convert a and b as autocast converts the operands of `torch.matmul`. An fp32 precision or `out=` leaves them
    unchanged, because the call itself then sets the precision."""
    if out is not None or precision in ("ieee", "tf32", "bf16x3"):
        return a, b
    return autocasted(a), autocasted(b)

"""The operands of a product: how their numbers lie in memory, and how a pair of them is multiplied.

A product sums over K. Kernels read both operands as [rows, K]: a as it is, b transposed. A quantised operand is read
from the copy whose scales lie along K: the row-wise copy of a, the column-wise copy of b. A weight [N, K] that was
quantised row by row goes in as its transpose, `w.T`, whose column-wise copy is the weight's row-wise one.

The kernel's loop over K has three bodies, and `Product.of` chooses one for a pair:

| body     | a step of K                                       | for                                          |
|----------|---------------------------------------------------|----------------------------------------------|
| `sum`    | total = dot(a, b, total)                          | plain numbers, scales of rows and tensors    |
| `blocks` | total += dot(a, b) * scale_a * scale_b            | scales of 128 along K; sums in fp16          |
| `scaled` | total = dot_scaled(a, scale_a, b, scale_b, total) | mx and nvfp4, where the target has such dots |

What a target cannot multiply is decoded in registers to bf16 (fp16, fp32), which holds every code exactly, and so does
a quantised operand beside a plain one. Scales of mx and nvfp4 are then part of the decoded numbers, also exactly.
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

# Products of fp64 are those of PyTorch, by which tests judge the others.
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
_FP8 = ("e4m3", "e5m2")

# So many products of int8 codes, each up to 128 * 128, add up without exceeding int32.
INT32_DEPTH = (2**31 - 1) // 128**2 // 128 * 128


@dataclass(frozen=True)
class Form:
    """One operand as a kernel reads it."""

    element: str  # bf16, fp16, fp32, fp64, int8, int4, e4m3, e5m2 or e2m1
    block: str | None  # which elements share a scale; None for plain numbers
    along_k: bool = True  # K is contiguous, else the rows are
    align: int = 1  # the length of what is contiguous and the stride of the other are multiples of it
    bulk: bool = False  # tiles are copied as a whole, by tensor descriptors

    @staticmethod
    @remembered
    def of(dtype: torch.dtype, spec: str | None) -> Form:
        """That of a tensor of this dtype, or of a quantised one in the format `spec`."""
        if spec is None:
            return Form(_NAMES[dtype], None)
        f = Format.of(spec).stored
        return Form(f.number.name, f.block)

    @property
    def number(self) -> ElementType:
        """The element of a quantised operand, as `tiles.decode` wants it."""
        return ELEMENTS[self.element]

    @property
    def packed(self) -> int:
        """Elements in a byte, or in a wider number."""
        return 1 if self.block is None else 8 // self.number.bits

    @property
    def group(self) -> int:
        """How many neighbours along K share a scale; 0 for all."""
        return 0 if self.block is None else Format.of(self.block).group

    @property
    def in_blocks(self) -> bool:
        """Whether its scales multiply the products of 128 elements along K."""
        return self.group == 128

    @property
    def in_groups(self) -> bool:
        """Whether its scales belong to groups so short that they multiply the elements."""
        return self.group in (16, 32)

    @property
    def at_last(self) -> bool:
        """Whether its scales multiply the sums."""
        return self.block in ("tensor", "row")

    def __str__(self) -> str:
        return self.element if self.block is None else f"{self.element}:{self.block}"


@dataclass(frozen=True)
class Product:
    """How a pair of operands is multiplied on a target. It is a constant of the kernel."""

    a: Form
    b: Form
    body: str  # sum, blocks or scaled
    # What both operands are when they are multiplied: their stored type ("stored"), e4m3fnuz/e5m2fnuz ("fnuz"), or
    # bf16, fp16, fp32 that they are converted to.
    multiplied: str
    sums: str  # fp32, fp16 or int32
    precision: str  # of fp32 products: ieee, tf32 or bf16x3
    deep: bool = False  # int32 sums of spans of K are added up in fp32

    @property
    def kind(self) -> str:
        """What decides the shape of the tiles: the width of what is multiplied, and what is done to it."""
        if self.multiplied == "fp32":
            return "fp32"
        if self.body == "scaled":
            return "mx4" if self.a.element == self.b.element == "e2m1" else "mx8"
        if self.multiplied in ("bf16", "fp16") and not (self.a.block is None and self.b.block is None):
            # A step of K then loads a scale for each row, which takes registers.
            blocks = {self.a.block, self.b.block}
            return "decoded_1x128" if blocks == {None, "1x128"} else "decoded"
        eight = self.multiplied == "fnuz" or self.a.element in ("int8", *_FP8)
        kind = ("int8" if self.a.element == "int8" else "fp8") if eight else "half"
        if self.body != "blocks":
            return kind
        # Two scales for each element of a tile take more registers than one.
        return f"{kind}_outer" if self.a.block == self.b.block == "1x128" else f"{kind}_blocks"

    @staticmethod
    @remembered
    def of(a: Form, b: Form, precision: str | None, few: bool, target: Capabilities) -> Product:
        """How a and b, which `checks` let pass, are multiplied on a target; `few`: in tiles of few rows."""
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
            # The unit of sm_100 takes at least 128 rows; what Triton makes of 16 spills, or does not compile.
            native = native and not (few and target.target in ("sm_100", "sm_103"))
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
    """a and b as autocast converts the operands of `torch.matmul`. Those of a product with a precision of fp32, or with
    `out=`, stay as they are: in what numbers to multiply is said by the call itself."""
    if out is not None or precision in ("ieee", "tf32", "bf16x3"):
        return a, b
    return autocasted(a), autocasted(b)

"""Validation of the operands of products, inside the ops, where every caller passes.

`matmul`, `linear`, `experts`, backward passes and compiled graphs all end in the three ops of this family. The checks
raise ValueError unless codes have the shapes of their format and a product supports the pair of formats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...quant import PLAIN, Codes, Format
from ...quant.copies import check_codes
from ...runtime import remembered
from ..common.groups import count_slots
from .arguments import GroupedArgs, MatmulArgs, WgradArgs
from .operands import Form

# ---- pairs of operands ----------------------------------------------------------------------------------


@remembered
def check_pair(a: Form, b: Form, precision: str | None) -> None:
    """Raise ValueError unless a and b can be multiplied."""
    if precision not in (None, "ieee", "tf32", "bf16x3", "fp16"):
        raise ValueError(f"precision must be 'ieee', 'tf32', 'bf16x3', 'fp16' or None; got {precision!r}")
    wide = {"fp32", "fp64"}.intersection((a.element, b.element))
    if precision in ("ieee", "tf32", "bf16x3") and not wide:
        raise ValueError(f"precision={precision!r} requires fp32 operands; got {a} and {b}")
    if precision == "fp16" and not (a.element == b.element == "fp16" or wide == {"fp64"}):
        raise ValueError(f"precision='fp16' requires fp16 operands; got {a} and {b}")
    if a.block is None and b.block is None:
        if a.element != b.element:
            raise ValueError(f"a and b must have one dtype; got {a} and {b}: convert one with .to(...)")
        return
    if a.block is None or b.block is None:
        plain, quantized = (a, b) if a.block is None else (b, a)
        if plain.element == "fp16" and quantized.block == "mx":
            raise ValueError(
                f"fp16 cannot hold all values of {quantized}, which reach 2^127: convert the other operand to bf16"
            )
        return
    if "int4" in (a.element, b.element):
        raise ValueError(
            f"int4 codes need an unquantized other operand; got {a} and {b}: dequantize one of them"
        )
    if a.in_groups or b.in_groups:
        if a.block != b.block:
            raise ValueError(
                f"block scales of {a.group or b.group} elements need both operands in such blocks; got {a} and {b}: "
                "quantize both to one format, or dequantize one of them"
            )
        return
    if a.block == b.block == "128x128":
        raise ValueError(
            f"{a} x {b}: only one operand can have 128x128 scales, as in every library: quantize the activations with "
            "'1x128'"
        )
    if (a.element == "int8") != (b.element == "int8"):
        raise ValueError(
            f"int8 codes multiply only int8 codes; got {a} and {b}: quantize both to int8 or both to fp8"
        )


def check_rotations(a: str | None, b: str | None) -> None:
    """Raise ValueError unless both copies are rotated along K or neither is."""
    rotated = [spec is not None and Format.of(spec).hadamard == "rowwise" for spec in (a, b)]
    if rotated[0] != rotated[1]:
        name, other = ("a", "b") if rotated[0] else ("b", "a")
        raise ValueError(
            f"{name} is rotated along K (Format.hadamard) and {other} is not: rotate both, or neither"
        )


@remembered
def check_formats(
    a: torch.dtype, a_spec: str | None, b: torch.dtype, b_spec: str | None, precision: str | None
) -> None:
    """Raise ValueError unless operands of these dtypes and formats, with K as last dimension, can be multiplied."""
    check_pair(Form.of(a, a_spec), Form.of(b, b_spec), precision)
    check_rotations(a_spec, b_spec)


def formats_multiply(a: torch.dtype, a_spec: str | None, b: torch.dtype, b_spec: str | None) -> bool:
    """Return whether operands of these dtypes and formats can be multiplied."""
    try:
        check_formats(a, a_spec, b, b_spec, None)
    except ValueError:
        return False
    return True


# ---- the ops --------------------------------------------------------------------------------------------


def validate_matmul(a: MatmulArgs) -> None:
    """Raise ValueError for operands that the kernels of `matmul` would misread."""
    left, right = a.a, a.b
    (*batch, m, k), (*others, depth, n) = left.shape, right.shape
    if k != depth or batch != others or len(batch) > 1:
        raise ValueError(f"a {tuple(left.shape)} and b {tuple(right.shape)} are not [M, K] and [K, N]")
    if a.a_codes is not PLAIN or a.b_codes is not PLAIN:
        _check_operand("a", left, a.a_codes, m, k)
        _check_operand("b", right, a.b_codes, n, k)
        if batch and (a.a_codes.data is not None or a.b_codes.data is not None):
            raise ValueError(
                "a batched product cannot take quantized operands: multiply the matrices one by one"
            )
    check_formats(left.dtype, a.a_codes.format, right.dtype, a.b_codes.format, a.precision)


def validate_grouped(a: GroupedArgs) -> None:
    """Raise ValueError for operands that the kernels of `grouped_matmul` would misread."""
    (rows, k), (groups, n, depth) = a.x.shape, a.w.shape
    if k != depth or a.ends.shape[0] != groups:
        raise ValueError(
            f"x {tuple(a.x.shape)}, w {tuple(a.w.shape)} and {a.ends.shape[0]} ends are not [rows, K], "
            "[groups, N, K] and [groups]"
        )
    if a.x_codes is not PLAIN or a.w_codes is not PLAIN:
        _check_operand("x", a.x, a.x_codes, rows, k)
        _check_operand("w", a.w, a.w_codes, n, k)
    check_formats(a.x.dtype, a.x_codes.format, a.w.dtype, a.w_codes.format, a.precision)


def validate_wgrad(a: WgradArgs) -> None:
    """Raise ValueError for operands that the kernels of `grouped_wgrad` would misread."""
    (rows, n), (count, k), groups = a.dy.shape, a.x.shape, a.ends.shape[0]
    if rows != count:
        raise ValueError(f"dy {tuple(a.dy.shape)} and x {tuple(a.x.shape)} must have equally many rows")
    if a.dy_codes is not PLAIN or a.x_codes is not PLAIN:
        slots = set()
        for name, x, codes, width in (("dy", a.dy, a.dy_codes, n), ("x", a.x, a.x_codes, k)):
            in_slots = has_slots(codes, rows, groups)
            _check_operand(name, x, codes, width, rows, count_slots(rows, groups) if in_slots else None)
            if codes.format is not None:
                _check_rows_of_blocks(name, Format.of(codes.format), in_slots, a.align)
                slots |= {in_slots} if Format.of(codes.format).group else set()
        if len(slots) > 1:
            raise ValueError(
                "blocks of only one operand restart at groups: quantize dy and x in the same way"
            )
    check_formats(a.dy.dtype, a.dy_codes.format, a.x.dtype, a.x_codes.format, a.precision)


def _check_operand(name: str, x: Tensor, codes: Codes, rows: int, k: int, slots: int | None = None) -> None:
    blocks = None if slots is None else slots * 128 // Format.of(codes.format).group
    check_codes(name, codes, rows, k, blocks=blocks)
    if codes.data is not None and codes.data.device != x.device:
        raise ValueError(f"the codes of {name} are on {codes.data.device}, but {name} is on {x.device}")


def has_slots(codes: Codes, rows: int, groups: int) -> bool:
    """Return whether the scales of codes [.., rows] belong to blocks that restart at groups."""
    if codes.scale is None or codes.format is None:
        return False
    group = Format.of(codes.format).group
    return group != 0 and codes.scale.shape[-1] == count_slots(rows, groups) * 128 // group


def _check_rows_of_blocks(name: str, f: Format, in_slots: bool, align: int) -> None:
    """Raise ValueError if a block along the rows of an operand may span two groups."""
    if f.group and align % f.group and not in_slots:
        raise ValueError(
            f"{name} is quantized in blocks of {f.group} rows, which may span two groups with align={align}: lay out "
            f"the rows with align={f.group}"
        )
    if align % f.packed:
        raise ValueError(f"two rows of {name} share a byte: lay out the rows with an even align; got {align}")

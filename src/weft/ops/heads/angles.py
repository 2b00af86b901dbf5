"""Rotations: the angles by which pairs of elements of a head are rotated, and how kernels and references find them.

Angles come from tables of cosines and sines, or pair i of n / 2 at position p is rotated by p * f(i), where
f(i) = base^(-2i/n) unless scaled. Kernels store 2^64 times the turns per position as an integer, rounded once; its
product with p wraps around, which drops only whole turns, and the remainder is rounded once to fp32. So the angle is
correct to fp32 at any position.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...runtime import is_readable
from ..common.checks import FLOATS, INTEGERS, check_tensor, is_tensor, real, whole

Style = Literal["neox", "interleaved"]


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotation of the heads of q and k. A model creates one and shares it between all layers.

    **Angles**: `base` gives `position * base^(-2i / dim)`, correct to fp32 at any position; or pass tables `cos` and
    `sin`, [rows, dim / 2] indexed by position or [batch, sequence, dim / 2]. Tables get no gradient. If pairs are
    written in style "neox", tables with dim columns are taken as Hugging Face's `cat([angles, angles])`, and their
    first half is used. On a CPU, tables whose halves differ are rejected; on a GPU that check would have to wait for
    the device. With "interleaved", tables with dim columns are rejected, since two conventions for them are in use.
    For complex tables, call `Rotation.from_complex`.

    - `dim`: number of elements of a head that are rotated: by default all; else the first ones, or with `first=False`
      the last. Pass it with tables for a part of a head: it says whether they have each angle once or twice.
    - `style`: pairs (i, i + dim / 2) for "neox", (2i, 2i + 1) for "interleaved".
    - `out_style`: style in which pairs are written, by default `style`. Hugging Face's DeepSeek models read
      "interleaved" pairs and write them "neox". Backward and `inverse` go the opposite way.
    - `sections`: three numbers of pairs. Positions are then [3, …]; the first section of pairs uses the first of them,
      and so on (Qwen2-VL).

    `.linear()`, `.ntk()`, `.yarn()` and `.llama3()` return a rotation whose base is scaled to longer contexts, as
    Hugging Face's `rope_scaling` does.

    >>> import weft
    >>> weft.Rotation(500000.0).llama3(factor=8.0, original=8192)
    Rotation(base=500000.0, cos=None, sin=None, dim=None, style='neox', out_style=None, first=True, sections=None, \
scaling='llama3 8.0 8192.0 1.0 4.0')
    """

    base: float | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    dim: int | None = None
    style: Style = "neox"
    out_style: Style | None = None
    first: bool = True
    sections: tuple[int, int, int] | None = None
    scaling: str = ""  # set by the methods below: the kind of scaling and its parameters
    # This rotation as ops take it, without positions; its dim is 0 if dim is None.
    argument: Turning = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if (self.cos is None) != (self.sin is None) or (self.cos is None) == (self.base is None):
            raise ValueError("pass cos and sin together, or base")
        out_style = self.style if self.out_style is None else self.out_style
        for name, style in (("style", self.style), ("out_style", out_style)):
            if style not in ("neox", "interleaved"):
                raise ValueError(f"{name} must be 'neox' or 'interleaved'; got {style!r}")
        if self.base is not None and not 0.0 < real("base", self.base) < math.inf:
            raise ValueError(f"base must be positive and finite; got {self.base}")
        if self.dim is not None and (whole("dim", self.dim, 1) % 2):
            raise ValueError(f"dim of a Rotation must be even; got {self.dim}")
        sections = self.sections
        if sections is not None and (
            not isinstance(sections, (tuple, list))
            or len(sections) != 3
            or min(whole("sections", part) for part in sections) < 0
        ):
            raise ValueError(f"sections must be three numbers of pairs; got {sections!r}")
        if self.cos is not None and self.sin is not None:
            if is_tensor(self.cos) and self.cos.is_complex():
                raise ValueError(
                    f"cos must be a table of real numbers; got {self.cos.dtype}. For a complex table cos + i sin, call "
                    "weft.Rotation.from_complex(table)"
                )
            check_tensor("cos", self.cos, FLOATS, getattr(self.cos, "device", None))  # type: ignore[arg-type]
            check_tensor("sin", self.sin, (self.cos.dtype,), self.cos.device)
        turning = Turning(
            cos=self.cos,
            sin=self.sin,
            positions=None,
            base=float(self.base or 0.0),
            scaling=self.scaling,
            dim=self.dim or 0,
            style=self.style,
            out_style=out_style,
            first=self.first,
            sections="" if sections is None else " ".join(map(str, sections)),
        )
        object.__setattr__(self, "argument", turning)

    @classmethod
    def from_complex(
        cls,
        table: Tensor,
        *,
        dim: int | None = None,
        style: Style = "interleaved",
        out_style: Style | None = None,
        first: bool = True,
    ) -> Rotation:
        """Create a rotation from a complex table cos + i sin of the same shapes as real tables, such as `freqs_cis` of
        torchtitan and Llama 4. They multiply adjacent elements by it, so the style is "interleaved" by default. Cosines
        and sines are copied, so create it once."""
        if not is_tensor(table) or not table.is_complex():
            kind = table.dtype if is_tensor(table) else type(table).__name__
            raise TypeError(f"table must be a tensor of complex numbers, cos + i sin; got {kind}")
        cos, sin = table.real.contiguous(), table.imag.contiguous()
        return cls(cos=cos, sin=sin, dim=dim, style=style, out_style=out_style, first=first)

    def linear(self, factor: float) -> Rotation:
        """Divide all positions by `factor` (position interpolation)."""
        return self._scaled("linear", factor)

    def ntk(self, factor: float) -> Rotation:
        """Increase the base to `base * factor^(dim / (dim - 2))`: the slowest pair is slowed down by `factor`, the
        fastest not at all."""
        return self._scaled("ntk", factor)

    def yarn(
        self,
        factor: float,
        original: int,
        *,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        magnitude: float | None = None,
    ) -> Rotation:
        """Scale as YaRN does: pairs that turn less than `beta_slow` times over the `original` context are slowed down
        by `factor`, pairs that turn more than `beta_fast` times are not, with a linear ramp between. Rotated heads are
        multiplied by `magnitude`, `0.1 * log(factor) + 1` by default."""
        if magnitude is None:
            magnitude = 0.1 * math.log(real("factor", factor)) + 1.0 if factor > 1.0 else 1.0
        return self._scaled("yarn", factor, original, beta_fast, beta_slow, magnitude)

    def llama3(self, factor: float, original: int, *, low: float = 1.0, high: float = 4.0) -> Rotation:
        """Scale as Llama 3.1 does: pairs that turn less than `low` times over the `original` context are slowed down
        by `factor`, pairs that turn more than `high` times are not, pairs between in part."""
        return self._scaled("llama3", factor, original, low, high)

    def _scaled(self, kind: str, *parameters: float) -> Rotation:
        if self.base is None:
            raise ValueError(
                "a rotation by tables cannot be scaled: scale the angles from which you make the tables"
            )
        if self.scaling:
            raise ValueError(f"the rotation is scaled already: {self.scaling}. Scale the unscaled one")
        values = [real(f"each parameter of {kind}", parameter) for parameter in parameters]
        if not all(0.0 < value < math.inf for value in values):
            raise ValueError(f"the parameters of {kind} must be positive and finite; got {parameters}")
        return replace(self, scaling=" ".join([kind, *map(str, values)]))


class Turning(NamedTuple):
    """Arguments of a `Rotation` at some positions, as ops take them."""

    cos: Tensor | None
    sin: Tensor | None
    positions: Tensor | None
    base: float
    scaling: str
    dim: int  # 0: no rotation
    style: str
    out_style: str
    first: bool
    sections: str  # a string, because PyTorch requires the gradient of a list to be a list


NO_TURNING = Turning(None, None, None, 0.0, "", 0, "neox", "neox", True, "")


# ---- checks ---------------------------------------------------------------------------------------------


def check_rotation(
    rotation: Rotation | None, positions: Tensor | None, x: Tensor, dim: int, batch: int, tokens: int
) -> Turning:
    """Check a rotation for heads of x with `dim` elements; return it as ops take it."""
    if rotation is None:
        if positions is not None:
            raise ValueError("positions go with a rotation=: pass one, or no positions")
        return NO_TURNING
    if not isinstance(rotation, Rotation):
        raise TypeError(
            f"rotation must be a weft.Rotation, such as weft.Rotation(10000.0); got {type(rotation).__name__}"
        )
    turning = rotation.argument
    rotated_dim = turning.dim or dim
    if rotated_dim > dim or rotated_dim % 2:
        raise ValueError(
            f"the number of rotated elements must be even and at most the head dim, {dim}; got {rotated_dim}"
        )
    cos, sin = turning.cos, turning.sin
    if cos is not None:
        cos, sin = _check_tables(
            rotation, positions is not None, x.device, (rotated_dim, dim), (batch, tokens)
        )
    sections = rotation.sections
    if sections is not None and sum(sections) != rotated_dim // 2:
        raise ValueError(f"sections must be three parts of {rotated_dim // 2} pairs; got {sections!r}")
    if sections is not None and positions is None:
        raise ValueError("a rotation with sections needs positions [3, ...]")
    if positions is not None:
        lead = (3,) if sections is not None else ()
        shapes = ((*lead, tokens), (*lead, batch, tokens), (*lead, 1, tokens))
        check_tensor("positions", positions, INTEGERS, x.device, *shapes)
    elif cos is turning.cos and rotated_dim == turning.dim:
        return turning
    return Turning(
        cos, sin, positions, turning.base, turning.scaling, rotated_dim, turning.style, turning.out_style,
        turning.first, turning.sections,
    )  # fmt: skip


def _check_tables(
    rotation: Rotation, by_position: bool, device: torch.device, dims: tuple[int, int], lead: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Check the tables and return them with each angle once. `dims`: (rotated elements, elements of a head)."""
    cos, sin = rotation.cos, rotation.sin
    assert cos is not None
    assert sin is not None
    if cos.device != device or sin.device != device:
        raise ValueError(f"cos and sin must be on {device} like the other tensors; cos is on {cos.device}")
    (rotated_dim, dim), (batch, tokens) = dims, lead
    half, width = rotated_dim // 2, cos.shape[-1] if cos.dim() else 0
    shape_fits = (cos.dim() == 2 and (by_position or cos.shape[0] >= tokens)) or (
        cos.dim() == 3 and not by_position and cos.shape[0] in (1, batch) and cos.shape[1] == tokens
    )
    if shape_fits and width in (half, rotated_dim) and sin.shape == cos.shape:
        return (cos, sin) if width == half else _first_halves(cos, sin, rotation.argument.out_style)
    note = ""
    if width == dim and cos.dim() > 2 and not shape_fits:
        note = ". If this is k: rope rotates one tensor; call it for each, or pass both to weft.qkv_prepare"
    elif width not in (half, rotated_dim) and width < dim:
        note = (
            f". If only a part of each head is rotated, pass dim={2 * width}, or dim={width} for tables that have "
            "each angle twice"
        )
    raise ValueError(
        f"cos and sin must be tables [{tokens} or more, {half}], or without positions {(batch, tokens, half)}; got "
        f"{tuple(cos.shape)} and {tuple(sin.shape)}{note}"
    )


def _first_halves(cos: Tensor, sin: Tensor, out_style: str) -> tuple[Tensor, Tensor]:
    """Return the first halves of Hugging Face's tables `cat([angles, angles])`."""
    half = cos.shape[-1] // 2
    if out_style == "interleaved":
        raise ValueError(
            f"cos and sin have {2 * half} columns for {half} angles. With style='interleaved' pass each angle once: "
            "cos[..., ::2] if equal columns are adjacent, cos[..., : cos.shape[-1] // 2] if the halves are equal; "
            "for Hugging Face's DeepSeek models, which write halves, add out_style='neox'"
        )
    halves = [(table[..., :half], table[..., half:]) for table in (cos, sin)]
    if is_readable(cos) and is_readable(sin) and not all(torch.equal(*pair) for pair in halves):
        raise ValueError(
            f"cos and sin have {2 * half} columns for {half} angles, but their halves are not equal. If adjacent "
            "columns are, use style='interleaved' with tables cos[..., ::2] and sin[..., ::2]"
        )
    return halves[0][0], halves[1][0]


# ---- frequencies ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def frequencies(base: float, dim: int, scaling: str) -> tuple[tuple[float, ...], float]:
    """Return (angle per position of each pair, factor of rotated heads), in fp64."""
    kind, *parameters = scaling.split() or ["none"]
    values = list(map(float, parameters))
    if kind == "ntk":
        base = base * values[0] ** (dim / (dim - 2)) if dim > 2 else base
    unscaled = [base ** (-2 * i / dim) for i in range(dim // 2)]
    if kind == "linear":
        return tuple(f / values[0] for f in unscaled), 1.0
    if kind == "llama3":
        factor, original, low, high = values
        weights = [(original * f / (2 * math.pi) - low) / (high - low) for f in unscaled]
        return _blend(unscaled, factor, weights), 1.0
    if kind == "yarn":
        factor, original, fast, slow, magnitude = values
        first, last = (
            dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow)
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), dim - 1)
        width = last - first or 0.001
        return _blend(unscaled, factor, [1.0 - (i - first) / width for i in range(dim // 2)]), magnitude
    return tuple(unscaled), 1.0


def _blend(unscaled: list[float], factor: float, weights: list[float]) -> tuple[float, ...]:
    """Blend each frequency with itself divided by `factor`; `weights`, clamped to 0 … 1, weigh the unscaled one."""
    shares = [min(max(share, 0.0), 1.0) for share in weights]
    return tuple(f * share + f / factor * (1.0 - share) for f, share in zip(unscaled, shares, strict=True))


@functools.lru_cache(maxsize=64)
def turns(base: float, dim: int, scaling: str, device: torch.device) -> Tensor:
    """Return 2^64 times the turns per position of each pair, int64: multiplying by a position wraps away whole
    turns."""
    whole_turn = 1 << 64
    values = [int(f / (2 * math.pi) * whole_turn) % whole_turn for f in frequencies(base, dim, scaling)[0]]
    signed = [v - whole_turn if v >= whole_turn // 2 else v for v in values]
    return torch.tensor(signed, dtype=torch.int64, device=device)


def section_sizes(sections: str) -> tuple[int, ...]:
    return tuple(map(int, sections.split()))


# ---- for kernels and references -------------------------------------------------------------------------


class AngleStrides(NamedTuple):
    """Strides at which a kernel finds the angles of a token."""

    rows: int
    table_batch: int  # strides of the tables
    table_row: int
    axis: int  # strides of positions
    batch: int
    token: int
    second: int  # first pair of the second section, then of the third
    third: int

    @staticmethod
    def of(table: Form | None, positions: Form | None, sections: str) -> AngleStrides:
        rows = table_batch = table_row = axis = batch = token = second = third = 0
        if table is not None:
            rows, table_row = table.shape[-2], table.strides[-2]
            table_batch = table.strides[0] if len(table.shape) == 3 and table.shape[0] > 1 else 0
        if positions is not None:
            if sections:
                first, middle, _ = section_sizes(sections)
                axis, second, third = positions.strides[0], first, first + middle
            if len(positions.shape) - bool(sections) == 2 and positions.shape[-2] > 1:
                batch = positions.strides[-2]
            token = positions.strides[-1]
        return AngleStrides(rows, table_batch, table_row, axis, batch, token, second, third)


class Form(NamedTuple):
    """Shape and strides of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(x: Tensor | None) -> Form | None:
        return None if x is None else Form(x.shape, x.stride())


class Angles(NamedTuple):
    """Angles of a kernel: tables, or turns per position."""

    cos: Tensor | None  # [rows, pairs], or [batch, rows, pairs]
    sin: Tensor | None
    turns: Tensor | None  # int64 [pairs]
    positions: Tensor | None  # [batch, sequence], or [3, batch, sequence] with sections
    at: AngleStrides
    magnitude: float  # factor of rotated elements if angles are computed; tables include theirs


def matching_tables(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return both tables with equal strides and contiguous rows, copied if necessary."""
    if cos is None or sin is None or (cos.stride() == sin.stride() and cos.stride(-1) == 1):
        return cos, sin
    return cos.contiguous(), sin.contiguous()


def reference_angles(
    turning: Turning, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Return cos and sin [batch or 1, sequence, 1, pairs]; None without a rotation."""
    if not turning.dim:
        return None
    positions, half = turning.positions, turning.dim // 2
    sections = section_sizes(turning.sections)
    if positions is None:
        position = torch.arange(tokens, device=device)[None, :, None]
    elif sections:
        axis = torch.repeat_interleave(
            torch.arange(3, device=device), torch.tensor(sections, device=device), output_size=sum(sections)
        )
        shared = positions[:, None] if positions.dim() == 2 else positions
        position = shared[axis].permute(1, 2, 0)  # [batch, sequence, pairs]
    else:
        position = (positions[None] if positions.dim() == 1 else positions)[..., None]
    if turning.cos is None:
        per_position, magnitude = frequencies(turning.base, turning.dim, turning.scaling)
        angle = position * torch.tensor(per_position, dtype=torch.float64, device=device)
        angle = angle[:, :, None, :]
        return (magnitude * torch.cos(angle)).to(dtype), (magnitude * torch.sin(angle)).to(dtype)
    tables = []
    for table in (turning.cos, turning.sin):
        assert table is not None
        if table.dim() == 3 or positions is None:
            value = (table if table.dim() == 3 else table[None])[:, :tokens]
        else:
            in_table = (position >= 0) & (position < table.shape[0])
            rows = position.clamp(0, max(table.shape[0] - 1, 0)).expand(*position.shape[:2], half)
            value = torch.where(in_table, table[rows, torch.arange(half, device=device)], torch.nan)
        tables.append(value[:, :, None, :].to(dtype))
    return tables[0], tables[1]

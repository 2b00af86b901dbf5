"""Number formats from their definition: the value of each code, and the code nearest to a number.

Every format is a table of all its values, and rounding is a search in that table. Numbers may be float64 or
NumPy's long double, which represents every 64-bit integer; both represent each value and each midpoint exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import triton.language as tl


@dataclass(frozen=True)
class Format:
    """A float format: a sign, `exponent` bits with a bias, `mantissa` bits.

    kind    "ieee": infinities and NaN at the largest exponent; too large values become infinite
            "finite": the largest exponent has numbers too, all ones is NaN; saturates
            "fnuz": like "finite", but the code of minus zero is the only NaN; saturates
    """

    dtype: torch.dtype
    triton: tl.dtype
    exponent: int
    mantissa: int
    bias: int
    kind: str
    saturates: bool

    @property
    def sign(self) -> int:
        return 1 << (self.exponent + self.mantissa)

    @cached_property
    def magnitudes(self) -> np.ndarray:
        """Return the non-negative finite values, by code; an infinity is replaced by the value that would follow."""
        codes = np.arange(self.sign)
        exponent, fraction = codes >> self.mantissa, codes & ((1 << self.mantissa) - 1)
        normal = exponent > 0
        significand = fraction + np.where(normal, 1 << self.mantissa, 0)
        values = np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - self.bias - self.mantissa)
        last = {
            "ieee": ((1 << self.exponent) - 1) << self.mantissa,  # the code of infinity
            "finite": self.sign - 2,
            "fnuz": self.sign - 1,
        }[self.kind]
        return values[: last + 1]

    @cached_property
    def values(self) -> np.ndarray:
        """Return the value of every code, NaN and infinities included."""
        half = np.full(self.sign, np.nan)
        half[: len(self.magnitudes)] = self.magnitudes
        if self.kind == "ieee":
            half[len(self.magnitudes) - 1] = np.inf
        other = -half
        if self.kind == "fnuz":
            other[0] = np.nan
        return np.concatenate([half, other])

    @property
    def largest(self) -> float:
        return float(np.nanmax(self.values[np.isfinite(self.values)]))

    def encode(self, numbers: np.ndarray, toward_zero: bool = False) -> np.ndarray:
        """Return the code of each number: nearest, ties to the even code; or the next one toward zero."""
        magnitude = np.abs(numbers)
        finite = np.isfinite(numbers)
        if self.saturates:
            magnitude = np.minimum(magnitude, self.largest)
        grid = self.magnitudes.astype(magnitude.dtype)
        magnitude = np.where(np.isnan(magnitude), 0, np.minimum(magnitude, grid[-1]))
        low = np.searchsorted(grid, magnitude, side="right") - 1
        high = np.minimum(low + 1, len(grid) - 1)
        middle = (grid[low] + grid[high]) / 2
        up = (magnitude > middle) | ((magnitude == middle) & (low % 2 == 1))
        code = np.where(up & (low != high), high, low)
        if toward_zero:
            code = low
            if not self.saturates:
                code = np.where(finite, np.minimum(low, len(grid) - 2), low)
        negative = np.signbit(numbers) & ~((self.kind == "fnuz") & (code == 0))
        code = code + np.where(negative, self.sign, 0)
        not_a_number = self.sign if self.kind == "fnuz" else self.sign - 1
        return np.where(np.isnan(numbers), not_a_number, code).astype(f"u{self.dtype.itemsize}")

    def tensor(self, codes: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(codes.astype(f"u{self.dtype.itemsize}")).view(self.dtype)

    def numbers(self, tensor: torch.Tensor) -> np.ndarray:
        """Return the float64 values of a tensor of this format."""
        return self.values[tensor.contiguous().view(CODES[self.dtype.itemsize]).numpy()]

    def boundaries(self) -> np.ndarray:
        """Return every float32 around which rounding changes: each value and each midpoint, and two neighbors each
        way, of either sign; with the extremes of float32 itself."""
        grid = np.append(self.magnitudes, 2 * self.magnitudes[-1])
        with np.errstate(over="ignore"):
            points = np.unique(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]).astype(np.float32))
        bits = points.view(np.int32)[:, None] + np.arange(-2, 3)
        positive = np.unique(bits.clip(0, 0x7F800000)).astype(np.int32).view(np.float32)
        extremes = np.array([1e-45, 1.17549435e-38, 3.4028235e38, np.inf, np.nan], np.float32)
        positive = np.concatenate([positive, extremes])
        return np.concatenate([positive, -positive])


CODES = {1: torch.uint8, 2: torch.uint16, 4: torch.int32, 8: torch.int64}

F16 = Format(torch.float16, tl.float16, 5, 10, 15, "ieee", saturates=False)
BF16 = Format(torch.bfloat16, tl.bfloat16, 8, 7, 127, "ieee", saturates=False)
E4M3 = Format(torch.float8_e4m3fn, tl.float8e4nv, 4, 3, 7, "finite", saturates=True)
E5M2 = Format(torch.float8_e5m2, tl.float8e5, 5, 2, 15, "ieee", saturates=True)
E4M3FNUZ = Format(torch.float8_e4m3fnuz, tl.float8e4b8, 4, 3, 8, "fnuz", saturates=True)
E5M2FNUZ = Format(torch.float8_e5m2fnuz, tl.float8e5b16, 5, 2, 16, "fnuz", saturates=True)

FORMATS = {f.dtype: f for f in (F16, BF16, E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)}


def rounded(numbers: np.ndarray, dtype: torch.dtype, toward_zero: bool = False) -> torch.Tensor:
    """Return a tensor of `dtype` with these numbers, each rounded once."""
    if dtype in FORMATS:
        return FORMATS[dtype].tensor(FORMATS[dtype].encode(numbers, toward_zero))
    with np.errstate(over="ignore"):
        nearest = numbers.astype(np.dtype(str(dtype).removeprefix("torch.")))
    if toward_zero:
        finite = np.isfinite(numbers)
        beyond = finite & (np.abs(nearest.astype(numbers.dtype)) > np.abs(numbers))
        nearest = np.where(beyond, np.nextafter(nearest, nearest.dtype.type(0)), nearest)
    return torch.from_numpy(nearest)


def exact(tensor: torch.Tensor) -> np.ndarray:
    """Return the values of a tensor of any float type, as float64."""
    if tensor.dtype in FORMATS:
        return FORMATS[tensor.dtype].numbers(tensor)
    return tensor.double().numpy()


# ---- formats that no tensor has --------------------------------------------------------------------------------

# Without infinities and NaN, and with a minus zero.
E2M1 = Format(torch.uint8, tl.uint8, 2, 1, 1, "fnuz", saturates=True)
E2M3 = Format(torch.uint8, tl.uint8, 2, 3, 1, "fnuz", saturates=True)
E3M2 = Format(torch.uint8, tl.uint8, 3, 2, 3, "fnuz", saturates=True)
SMALL = {"e4m3": E4M3, "e5m2": E5M2, "e2m3": E2M3, "e3m2": E3M2, "e2m1": E2M1}


def small_code(name: str, x: np.ndarray) -> np.ndarray:
    """Return the nearest codes of a small format, from `magnitudes`, because these formats have a minus zero."""
    format_ = SMALL[name]
    if name in ("e4m3", "e5m2"):
        return format_.encode(x).astype(np.uint32)
    magnitude = np.abs(np.where(np.isnan(x), format_.largest, x))
    code = format_.encode(magnitude).astype(np.uint32)
    return code | np.where(np.signbit(x) & ~np.isnan(x), format_.sign, 0).astype(np.uint32)


def small_values(name: str) -> np.ndarray:
    half = (
        SMALL[name].values
        if name in ("e4m3", "e5m2")
        else np.concatenate([SMALL[name].magnitudes, -SMALL[name].magnitudes])
    )
    return np.resize(half, 256) if name != "e2m1" else np.resize(half, 16)

"""The structures of include/witness_data.h as ctypes."""

from __future__ import annotations

import ctypes
from typing import get_args

from ..errors import FindingKind

KINDS: tuple[FindingKind, ...] = get_args(FindingKind)  # in the order of `Kind` in witness_data.h
_u64, _i64, _i32, _pointer = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p


class Finding(ctypes.Structure):
    """Mirror of `Finding` in witness_data.h."""

    _fields_ = [
        ("count", _i64),
        ("program", _i32 * 3),
        ("argument", _i32),
        ("address", _u64),
        ("value", _i64),
        ("other", _i64),
    ]


class Traffic(ctypes.Structure):
    """Mirror of `Traffic` in witness_data.h."""

    _fields_ = [(name, _i64) for name in ("requested", "distinct", "program_sectors", "launch_sectors")]


class Direction(ctypes.Structure):
    """Mirror of `Direction` in witness_data.h."""

    _fields_ = [("total", Traffic), ("touched", _pointer)]


_DIMENSIONS = 64  # PyTorch's maximum


class Argument(ctypes.Structure):
    """Mirror of `Argument` in witness_data.h."""

    _fields_ = [
        *[("low", _u64), ("high", _u64), ("run", _i64)],
        *[(name, _i32) for name in ("rank", "region", "shadow", "loaded", "stored")],
        *[
            ("extent", _i64 * _DIMENSIONS),
            ("stride", _i64 * _DIMENSIONS),
            ("reach", _i64 * (_DIMENSIONS + 1)),
        ],
        ("direction", Direction * 2),
    ]


class Region(ctypes.Structure):
    """Mirror of `Region` in witness_data.h."""

    _fields_ = [
        *[("low", _u64), ("high", _u64), ("shift", _i32), ("loaded", _i32), ("updated", _i32)],
        *[("writer", _pointer), ("reader", _pointer), ("updater", _pointer)],
    ]


class Shadow(ctypes.Structure):
    """Mirror of `Shadow` in witness_data.h."""

    _fields_ = [("low", _u64), ("high", _u64), ("written", _pointer), ("loaded", _i32), ("grain", _i32)]


class Witness(ctypes.Structure):
    """Mirror of `Witness` in witness_data.h."""

    _fields_ = [
        *[(name, _pointer) for name in ("arguments", "regions", "shadows", "findings")],
        *[
            (name, _i32)
            for name in ("argument_count", "region_count", "shadow_count", "dry", "ordered", "lock")
        ],
        ("dot_flops", _i64),
        ("locks", _pointer),
        *[("base", ctypes.c_uint32), ("number", ctypes.c_uint32)],
        *[(name, _pointer) for name in ("cells", "bits")],
        *[(name, _pointer) for name in ("workers", "workers_memory", "actors", "clocks", "releases")],
        *[(name, _u64) for name in ("actor_capacity", "release_count", "release_capacity")],
    ]

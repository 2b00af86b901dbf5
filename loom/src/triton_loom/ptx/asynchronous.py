"""Opcodes of sm_90's asynchronous units: mbarriers, bulk copies, tensor maps, products of warp groups.

The table is part of the one in opcodes.py, which explains rows.
"""

from __future__ import annotations

import re

from .operations import Operation, Row, Use, address, elements, words
from .text import Statement, split

# In the order of `Field` in include/gpu/maps.h.
MAP_FIELDS = (
    "global_address", "rank", "box_dim", "global_dim", "global_stride", "element_stride", "elemtype",
    "interleave_layout", "swizzle_mode", "swizzle_atomicity", "fill_mode",
)  # fmt: skip
_BY_DIMENSION = ("box_dim", "global_dim", "global_stride", "element_stride")
# In the order of `Reduction` in include/gpu/bulk.h, which begins with "none".
REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")

# ---- mbarriers -------------------------------------------------------------------------------------------


def _make(s: Statement) -> Operation:
    base, offset = address(s.operands[0])
    count = (Use(s.operands[1], "u32"),) if words(s)[1] == "init" else ()
    return Operation(f"mbarrier.{words(s)[1]}", (Use(base, "u32"), *count), offset)


def _arrive(s: Statement) -> Operation:
    """Decode an arrival: the result, the state before it, and the number of arrivals are optional."""
    name = words(s)
    operands = list(s.operands)
    state = "_" if operands[0].startswith("[") else operands.pop(0)
    base, offset = address(operands[0])
    expects = "expect_tx" in name and "arrive" in name
    amount = operands[1] if len(operands) > 1 else "1"
    if len(operands) > 2 or (len(operands) < 2 and (expects or name[1] in ("expect_tx", "complete_tx"))):
        raise ValueError(s)
    handler = f"mbarrier.{name[1]}{'.expect_tx' if expects else ''}"
    return Operation(handler, (Use(state, "b64"), Use(base, "u32"), Use(amount, "u32")), offset)


def _wait(s: Statement) -> Operation:
    """Decode a wait: an optional hint of how long to wait follows, which affects no value."""
    name = words(s)
    by_parity = "parity" in name
    done, location, phase = s.operands[:3]
    base, offset = address(location)
    if len(s.operands) > (4 if name[1] == "try_wait" else 3):
        raise ValueError(s)
    handler = f"mbarrier.{name[1]}{'.parity' if by_parity else ''}"
    uses = (Use(done, "pred"), Use(base, "u32"), Use(phase, "u32" if by_parity else "b64"))
    return Operation(handler, uses, offset)


def _cluster(s: Statement) -> Operation:
    """Decode a barrier of a cluster of one block: larger clusters are refused at the launch."""
    return Operation(f"barrier.cluster.{words(s)[2]}", immediate=int("relaxed" not in words(s)))


# ---- fences ----------------------------------------------------------------------------------------------


def _nothing(s: Statement) -> Operation:
    """Decode an instruction without effect on values or on the order of anything that is emulated."""
    return Operation("nothing")


def _mbarrier_fence(s: Statement) -> Operation:
    return Operation("fence.mbarrier_init")


def _proxy_fence(s: Statement) -> Operation:
    return Operation("fence.proxy.async")


def _acquire_map(s: Statement) -> Operation:
    base, offset = address(s.operands[0])
    if int(s.operands[1], 0) != 128:
        raise ValueError(s)
    return Operation("fence.proxy.tensormap", (Use(base, "u64"),), offset)


# ---- tensor maps -----------------------------------------------------------------------------------------


def _replace(s: Statement) -> Operation:
    """Decode tensormap.replace: per-dimension fields have the number of the dimension before the value."""
    name = words(s)
    field, type_ = name[3], name[-1]
    base, offset = address(s.operands[0])
    *ordinal, value = s.operands[1:]
    if len(ordinal) != (field in _BY_DIMENSION):
        raise ValueError(s)
    dimension = int(ordinal[0], 0) if ordinal else 0
    if dimension >= (4 if field == "global_stride" else 5):
        raise ValueError(s)
    immediate = (offset & 0xFFFFFFFF) | MAP_FIELDS.index(field) << 32 | dimension << 40
    return Operation(f"tensormap.replace.{type_}", (Use(base, "u64"), Use(value, type_)), immediate)


def _publish(s: Statement) -> Operation:
    (to, to_offset), (source, offset) = address(s.operands[0]), address(s.operands[1])
    if int(s.operands[2], 0) != 128:
        raise ValueError(s)
    return Operation(
        "tensormap.cp_fenceproxy",
        (Use(to, "u64"), Use(source, "u64")),
        (to_offset & 0xFFFFFFFF) | offset << 32,
    )


# ---- bulk copies -----------------------------------------------------------------------------------------


def _tile(text: str) -> tuple[str, list[str]]:
    """Parse `[map, {x, y}]` into the map's address and the coordinates."""
    match = re.fullmatch(r"\[\s*(.*?)\s*\]", text, re.S)
    if match is None:
        raise ValueError(text)
    base, coordinates = split(match[1])
    return base, elements(coordinates)


def _copy_tile(s: Statement) -> Operation:
    """Decode a tensor copy: a load has a shared memory address, a tile and an mbarrier; a store the tile, then the
    address. A cache policy may follow."""
    name = words(s)
    rank = next(int(word[0]) for word in name if re.fullmatch("[1-5]d", word))
    scattered = any(word in ("tile::gather4", "tile::scatter4") for word in name)
    loads = "mbarrier::complete_tx::bytes" in name
    operands = s.operands[:-1] if "L2::cache_hint" in name else s.operands
    if loads:
        shared, tile, barrier = operands
    else:
        (tile, shared), barrier = operands, ""
    (base, offset), (map_, coordinates) = address(shared), _tile(tile)
    if len(coordinates) != (5 if scattered else rank):
        raise ValueError(s)
    coordinate_uses = [Use(text, "b32") for text in coordinates]
    immediate = (offset & 0xFFFFFFFF) | rank << 32 | scattered << 40
    if loads:
        barrier_base, barrier_offset = address(barrier)
        if barrier_offset:
            raise ValueError(s)
        uses = (Use(base, "u32"), Use(map_, "u64"), Use(barrier_base, "u32"), *coordinate_uses)
        return Operation("cp.async.bulk.tensor.load", uses, immediate)
    reduces = name[1] == "reduce"
    if reduces:
        immediate |= (1 + REDUCTIONS.index(next(word for word in name if word in REDUCTIONS))) << 48
    return Operation(
        "cp.async.bulk.tensor.store",
        (Use(map_, "u64"), Use(base, "u32"), *coordinate_uses),
        immediate,
        serial=reduces,
    )


def _bulk_group(s: Statement) -> Operation:
    if s.operands:
        return Operation("cp.async.bulk.wait_group", immediate=int(s.operands[0], 0))
    return Operation("cp.async.bulk.commit_group")


# ---- products of warp groups -----------------------------------------------------------------------------


def _product(s: Statement) -> Operation:
    """Decode {D}, A (registers or a descriptor), B's descriptor, whether to add D, signs and majorness of A and B."""
    name = words(s)
    shape = next(word for word in name if word.startswith("m64"))
    columns = int(shape[4 : shape.index("k")])
    types = name[name.index(shape) + 1 :]
    saturates = types[-1] == "satfinite"
    result, a, b = types[:3]
    d, left, right, adds, *rest = s.operands
    floats = a in ("f16", "bf16", "tf32", "e4m3", "e5m2")
    signs = [int(rest.pop(0)) if floats else 1 for _ in range(2)]
    in_registers = left.startswith("{")
    majors = [0, 0]
    if a in ("f16", "bf16"):
        majors = [0 if in_registers else int(rest.pop(0)), int(rest.pop(0))]
    registers = elements(d)
    if (
        rest
        or any(sign not in (1, -1) for sign in signs)
        or len(registers) != columns // (4 if result == "f16" else 2)
    ):
        raise ValueError(s)
    uses = [Use(text, "b32") for text in registers]
    uses += [Use(text, "b32") for text in elements(left)] if in_registers else [Use(left, "b64")]
    uses += [Use(right, "b64"), Use(adds, "pred")]
    immediate = columns | in_registers << 10 | majors[0] << 11 | majors[1] << 12
    immediate |= (signs[0] < 0) << 13 | (signs[1] < 0) << 14
    return Operation(f"wgmma.{'satfinite.' if saturates else ''}{result}.{a}.{b}", tuple(uses), immediate)


def _product_group(s: Statement) -> Operation:
    handler = f"wgmma.{words(s)[1]}"
    return Operation(handler, immediate=int(s.operands[0], 0)) if s.operands else Operation(handler)


# ---- the table -------------------------------------------------------------------------------------------

_SHARED = ".(shared|shared::cta|shared::cluster)"
_SCOPE = "{.(cta|cluster)}"
_COLUMNS = f"({'|'.join(str(n) for n in range(8, 257, 8))})"
_FP8 = "(e4m3|e5m2)"

ROWS: tuple[Row, ...] = (
    Row(f"mbarrier.(init|inval){_SHARED}.b64", _make),
    Row(f"mbarrier.(arrive|arrive_drop){{.release}}{_SCOPE}{_SHARED}.b64", _arrive),
    Row(f"mbarrier.arrive.expect_tx{{.release}}{_SCOPE}{_SHARED}.b64", _arrive),
    Row(f"mbarrier.(expect_tx|complete_tx){{.relaxed}}{_SCOPE}{_SHARED}.b64", _arrive),
    Row(f"mbarrier.(try_wait|test_wait){{.parity}}{{.acquire}}{_SCOPE}{_SHARED}.b64", _wait),
    Row("barrier.cluster.arrive{.(release|relaxed)}{.aligned}", _cluster),
    Row("barrier.cluster.wait{.acquire}{.aligned}", _cluster),
    Row("fence.mbarrier_init.release.cluster", _mbarrier_fence),
    Row("fence.proxy.async{.(global|shared::cta|shared::cluster)}", _proxy_fence),
    Row("fence.proxy.tensormap::generic.acquire.(cta|cluster|gpu|sys)", _acquire_map),
    Row("fence.proxy.tensormap::generic.release.(cta|cluster|gpu|sys)", _nothing),
    Row("prefetch{.param}.tensormap", _nothing),
    Row(f"tensormap.replace.tile.({'|'.join(MAP_FIELDS)}).shared::cta.b1024.(b32|b64)", _replace),
    Row(
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.(cta|cluster|gpu|sys).sync.aligned",
        _publish,
    ),
    Row(
        "cp.async.bulk.tensor.(1|2|3|4|5)d.(shared::cta|shared::cluster).global{.tile}.mbarrier::complete_tx::bytes"
        "{.L2::cache_hint}",
        _copy_tile,
    ),
    Row(
        "cp.async.bulk.tensor.(1|2|3|4|5)d.global.shared::cta{.tile}.bulk_group{.L2::cache_hint}", _copy_tile
    ),
    Row(
        f"cp.reduce.async.bulk.tensor.(1|2|3|4|5)d.global.shared::cta.({'|'.join(REDUCTIONS)}){{.tile}}.bulk_group"
        "{.L2::cache_hint}",
        _copy_tile,
    ),
    Row(
        "cp.async.bulk.tensor.2d.tile::gather4.(shared::cta|shared::cluster).global.mbarrier::complete_tx::bytes",
        _copy_tile,
    ),
    Row("cp.async.bulk.tensor.2d.tile::scatter4.global.shared::cta.bulk_group", _copy_tile),
    Row("cp.async.bulk.commit_group", _bulk_group),
    Row("cp.async.bulk.wait_group{.read}", _bulk_group),
    Row(f"wgmma.mma_async.sync.aligned.m64n{_COLUMNS}k16.f32.(bf16.bf16|f16.f16)", _product),
    Row(f"wgmma.mma_async.sync.aligned.m64n{_COLUMNS}k16.f16.f16.f16", _product),
    Row(f"wgmma.mma_async.sync.aligned.m64n{_COLUMNS}k8.f32.tf32.tf32", _product),
    Row(f"wgmma.mma_async.sync.aligned.m64n{_COLUMNS}k32.(f32|f16).{_FP8}.{_FP8}", _product),
    Row(f"wgmma.mma_async.sync.aligned.m64n{_COLUMNS}k32.s32.(s8|u8).(s8|u8){{.satfinite}}", _product),
    Row("wgmma.(fence|commit_group|wait_group).sync.aligned", _product_group),
    Row("setmaxnreg.(inc|dec).sync.aligned.u32", _nothing),
)

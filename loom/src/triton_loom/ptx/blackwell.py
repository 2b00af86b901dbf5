"""Opcodes of sm_100's tensor memory, and of the products and copies that write it.

The table is part of the one in opcodes.py, which explains rows. Pairs of blocks (`cta_group::2`), sparse matrices,
shifts and convolutions have no rows.
"""

from __future__ import annotations

from .operations import Operation, Row, Use, address, elements, words
from .text import Statement

# Registers of a thread for `.x1`.
_REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}

# ---- tensor memory ---------------------------------------------------------------------------------------


def _allocate(s: Statement) -> Operation:
    base, offset = address(s.operands[0])
    return Operation("tcgen05.alloc", (Use(base, "u32"), Use(s.operands[1], "u32")), offset)


def _free(s: Statement) -> Operation:
    base, columns = s.operands
    return Operation("tcgen05.dealloc", (Use(base, "u32"), Use(columns, "u32")))


def _plain(s: Statement) -> Operation:
    """Decode an instruction without operands: its first two words identify it."""
    if s.operands:
        raise ValueError(s)
    return Operation(".".join(words(s)[:2]))


def _move(s: Statement) -> Operation:
    """Decode a load (registers, then the address) or a store (the other way round).

    In `16x32bx2` the second sixteen threads have an offset of their own, after the address."""
    name = words(s)
    shape = next(word for word in name if word in _REGISTERS)
    count = int(next(word for word in name if word.startswith("x") and word[1:].isdecimal())[1:])
    loads = name[1] == "ld"
    operands = list(s.operands)
    registers = elements(operands.pop(0 if loads else -1))
    pointer, *split = operands
    base, offset = address(pointer)
    if len(registers) != count * _REGISTERS[shape] or len(split) != (shape == "16x32bx2"):
        raise ValueError(s)
    immediate = (offset & 0xFFFFFFFF) | (int(split[0], 0) if split else 0) << 32
    packed = next((f".{word.split(':')[0]}" for word in name if "pack::" in word), "")
    values, address_use = tuple(Use(text, "b32") for text in registers), Use(base, "u32")
    uses = (*values, address_use) if loads else (address_use, *values)
    return Operation(f"tcgen05.{name[1]}.{shape}{packed}", uses, immediate)


# ---- products and copies ---------------------------------------------------------------------------------

_VECTORS = {
    "scale_vec::1X": "1X",
    "scale_vec::2X": "2X",
    "scale_vec::4X": "4X",
    "block32": "",
    "block16": "4X",
}


def _product(s: Statement) -> Operation:
    """Decode D, A (a descriptor or an address in tensor memory), descriptor of B, instruction descriptor, addresses
    of scales, whether to add D."""
    name = words(s)
    kind = next(word for word in name if word.startswith("kind::"))[6:]
    scaled = "block_scale" in name
    d, a, b, descriptor, *scales, adds = s.operands
    if len(scales) != 2 * scaled:
        raise ValueError(s)
    vector = ""
    if scaled:
        vector = next((_VECTORS[word] for word in name if word in _VECTORS), "")
        vector = f".{vector or ('1X' if kind == 'mxf8f6f4' else '2X')}"
    (d_base, d_offset), in_tensor = address(d), a.startswith("[")
    a_base, a_offset = address(a) if in_tensor else (a, 0)
    scale_addresses = [address(scale) for scale in scales]
    if any(offset for _, offset in scale_addresses):
        raise ValueError(s)
    uses = [
        Use(d_base, "u32"),
        Use(a_base, "u32" if in_tensor else "b64"),
        Use(b, "b64"),
        Use(descriptor, "b32"),
        *(Use(base, "u32") for base, _ in scale_addresses),
        Use(adds, "pred"),
    ]
    memory = "tensor" if in_tensor else "shared"
    immediate = (d_offset & 0xFFFFFFFF) | a_offset << 32
    return Operation(f"tcgen05.mma.{kind}{vector}.{memory}", tuple(uses), immediate)


def _copy(s: Statement) -> Operation:
    to, source = s.operands
    base, offset = address(to)
    shape = ".".join(sorted(words(s)[3:]))  # Triton writes the multicast before the shape, PTX after it
    return Operation(f"tcgen05.cp.{shape}", (Use(base, "u32"), Use(source, "b64")), offset)


def _commit(s: Statement) -> Operation:
    (pointer,) = s.operands
    base, offset = address(pointer)
    return Operation("tcgen05.commit", (Use(base, "u32"),), offset)


# ---- the table -------------------------------------------------------------------------------------------

_ONE = "cta_group::1"
_COUNT = f"({'|'.join(f'x{1 << n}' for n in range(8))})"
_SHAPE = "(32x32b|16x64b|16x32bx2)"

ROWS: tuple[Row, ...] = (
    Row(f"tcgen05.alloc.{_ONE}.sync.aligned{{.shared::cta}}.b32", _allocate),
    Row(f"tcgen05.dealloc.{_ONE}.sync.aligned.b32", _free),
    Row(f"tcgen05.relinquish_alloc_permit.{_ONE}.sync.aligned", _plain),
    Row("tcgen05.(wait::ld|wait::st).sync.aligned", _plain),
    Row("tcgen05.(fence::before_thread_sync|fence::after_thread_sync)", _plain),
    Row(f"tcgen05.ld.sync.aligned.{_SHAPE}.{_COUNT}{{.pack::16b}}.b32", _move),
    Row(f"tcgen05.st.sync.aligned.{_SHAPE}.{_COUNT}{{.unpack::16b}}.b32", _move),
    Row("tcgen05.ld.sync.aligned.16x128b.(x1|x2|x4|x8|x16|x32|x64){.pack::16b}.b32", _move),
    Row("tcgen05.st.sync.aligned.16x128b.(x1|x2|x4|x8|x16|x32|x64){.unpack::16b}.b32", _move),
    Row("tcgen05.ld.sync.aligned.16x256b.(x1|x2|x4|x8|x16|x32){.pack::16b}.b32", _move),
    Row("tcgen05.st.sync.aligned.16x256b.(x1|x2|x4|x8|x16|x32){.unpack::16b}.b32", _move),
    Row(f"tcgen05.mma.{_ONE}.(kind::f16|kind::tf32|kind::f8f6f4|kind::i8)", _product),
    Row(f"tcgen05.mma.{_ONE}.kind::mxf8f6f4.block_scale{{.(scale_vec::1X|block32)}}", _product),
    Row(f"tcgen05.mma.{_ONE}.kind::mxf4.block_scale{{.(scale_vec::2X|block32)}}", _product),
    Row(f"tcgen05.mma.{_ONE}.kind::mxf4nvf4.block_scale.(scale_vec::2X|scale_vec::4X|block32|block16)", _product),
    Row(f"tcgen05.cp.{_ONE}.(128x256b|128x128b)", _copy),
    Row(f"tcgen05.cp.{_ONE}.(64x128b.warpx2::02_13|warpx2::02_13.64x128b)", _copy),
    Row(f"tcgen05.cp.{_ONE}.(64x128b.warpx2::01_23|warpx2::01_23.64x128b)", _copy),
    Row(f"tcgen05.cp.{_ONE}.(32x128b.warpx4|warpx4.32x128b)", _copy),
    Row(f"tcgen05.commit.{_ONE}.mbarrier::arrive::one{{.(shared::cluster|shared::cta)}}.b64", _commit),
)  # fmt: skip

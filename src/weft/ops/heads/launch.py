"""How calls are cut into programs, and launched."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import Capabilities, Launch, capabilities_of
from ..common.copies import cast_mode
from ..common.rows import align_of, contiguous
from ..common.sums import sum_partials
from .angles import Angles, Turning
from .arguments import QKV, Prepare, PrepareBackward, PrepareGradients
from .cache import NO_CACHE, Cache
from .kernels import Affine, Grouped, Plan, Sizes, Sums, qkv_backward_kernel, qkv_kernel
from .layout import NOWHERE, Cut, Place, Places, sizes, tokens_of, with_neighbours
from .norm import Norm


class Choice(NamedTuple):
    """What a plan is made of."""

    cut: Cut
    v_dim: int  # 0: no value heads are handled
    norm: str
    after: bool
    turned: int  # numbers of a head; 0: no rotation
    style: str
    first: bool
    sections: bool
    inverse: bool
    scaled: str

    @staticmethod
    def of(
        cut: Cut, has_v: bool, norm: Norm, turning: Turning, inverse: bool = False, scaled: str = "none"
    ) -> Choice:
        return Choice(
            cut=cut,
            v_dim=cut.v_dim if has_v else 0,
            norm=norm.kind,
            after=norm.after,
            turned=turning.dim,
            style=turning.style,
            first=turning.first,
            sections=turning.sections != "",
            inverse=inverse,
            scaled=scaled,
        )

    @property
    def halves(self) -> tuple[int, int]:
        """(half, rest): without a rotation, the halves of the head and what is odd of it."""
        if self.turned:
            return self.turned // 2, self.cut.dim - self.turned
        return self.cut.dim // 2, self.cut.dim % 2

    def sizes(self, batch: int, tokens: int) -> Sizes:
        cut, (half, rest) = self.cut, self.halves
        grouped = Grouped(cut.q, cut.group, cut.group_stride)
        return Sizes(batch, tokens, grouped, max(cut.kv, 1), half, rest, self.v_dim)


@functools.lru_cache(maxsize=1024)
def chosen(kernel: Any, choice: Choice, align: int, target: Capabilities) -> Launch:
    cut, (_, rest) = choice.cut, choice.halves
    heads, interleaved = cut.kv or cut.q, choice.style == "interleaved"
    pairs, v_tile, gates = (
        _tile(cut.dim - cut.dim // 2),
        _tile(choice.v_dim),
        _tile(cut.dim) if cut.gate else 0,
    )
    tokens, at_once, num_warps = 1, 1, 4
    if not target.is_cpu:
        # 128 threads with 16 bytes of bf16 each in the narrowest tile: every access can have 128 bits.
        narrowest = min(pairs * (1 + interleaved), v_tile or pairs)
        rows = max(1, min(1024 // narrowest, 8192 // (2 * pairs)))
        at_once = min(4, _tile(heads), rows)
        tokens = max(1, rows // at_once)
        num_warps = 2 if target.target.startswith("gfx") else 4
    plan = Plan(
        tokens=tokens,
        heads=at_once,
        pairs=pairs,
        v_dim=v_tile,
        dim=gates,
        masked=2 * pairs != cut.dim or v_tile != choice.v_dim,
        partial=rest > 0,
        norm=choice.norm,
        after=choice.after,
        rotate=choice.turned > 0,
        inverse=choice.inverse,
        interleaved=interleaved,
        first=choice.first,
        sections=choice.sections,
        scaled=choice.scaled,
        cast=0 if choice.scaled == "none" else cast_mode(target),
    )
    return Launch(kernel, num_warps=num_warps, PLAN=plan, ALIGN=align)


def _tile(size: int) -> int:
    """The power of two that holds so many; 0 holds none."""
    return 1 << (size - 1).bit_length() if size else 0


def _affine(norm: Norm, x: Tensor) -> tuple[Affine, Affine]:
    """The norms of q and of k."""
    eps = norm.eps_for(x)
    return (
        Affine(contiguous(norm.q_weight), contiguous(norm.q_bias), eps, norm.weight_offset),
        Affine(contiguous(norm.k_weight), contiguous(norm.k_bias), eps, norm.weight_offset),
    )


def _strides(places: tuple[Place, ...]) -> int:
    """Starts and strides with their bits joined: a multiple of what all of them are multiples of."""
    joined = 0
    for _, start, batch, token, head in places:
        joined |= start | batch | token | head
    return joined


def launch_forward(
    outputs: QKV, a: Prepare, *, cache: Cache = NO_CACHE, scaled: str = "none", inverse: bool = False
) -> None:
    """q, k, v and gate of `a`, those that are in `outputs`."""
    cut = a.cut
    batch, tokens = sizes(a.x, cut.layout)
    x, k, v = with_neighbours(a.x), with_neighbours(a.k), with_neighbours(a.v)
    assert x is not None
    source = Places.of(x, k, v, cut)
    to = [Place.of(output, cut.out_layout, tokens) for output in outputs]
    choice = Choice.of(cut, outputs.v is not None, a.norm, a.turning, inverse, scaled)
    angles = Angles.of(a.turning, x.device)
    half, rest = choice.halves
    joined = _strides((*source, *to)) | angles.table_batch | angles.table_row
    for kept in (cache.k, cache.v):
        joined |= kept.page | kept.place | kept.head
    align = align_of(joined, half, rest, rest // 2, choice.v_dim, cut.group_stride)
    launch = chosen(qkv_kernel, choice, align, capabilities_of(x.device))
    q_norm, k_norm = _affine(a.norm, x)
    launch(
        (-(-tokens // launch.constants["PLAN"].tokens) * batch, 1, 1),
        *qkv_kernel.arguments(
            q=source.q,
            k=source.k,
            v=source.v,
            q_out=to[0],
            k_out=to[1],
            v_out=to[2],
            gate_out=to[3],
            q_norm=q_norm,
            k_norm=k_norm,
            angles=angles,
            slots=cache.slots,
            k_cache=cache.k,
            v_cache=cache.v,
            sizes=choice.sizes(batch, tokens),
        ),
    )


def launch_backward(outputs: PrepareGradients, a: PrepareBackward) -> None:
    cut, norm = a.cut, a.norm
    tokens = tokens_of(a.dq, cut.out_layout, a.batch)
    device = a.dq.device
    upstream = [Place.of(with_neighbours(d), cut.out_layout, tokens) for d in (a.dq, a.dk, a.dv, a.dgate)]
    x, k = with_neighbours(a.x), with_neighbours(a.k)
    nowhere = Places(NOWHERE, NOWHERE, NOWHERE)
    source = nowhere if x is None else Places.of(x, k, None, cut)
    into = nowhere if outputs.x is None else Places.of(outputs.x, outputs.k, outputs.v, cut)
    choice = Choice.of(cut, into.v.ptr is not None, norm, a.turning)
    angles = Angles.of(a.turning, device)
    half, rest = choice.halves
    joined = _strides((*upstream, source.q, source.k, *into)) | angles.table_batch | angles.table_row
    group_stride = cut.group_stride if x is not None or outputs.x is not None else 0
    align = align_of(joined, half, rest, rest // 2, choice.v_dim, group_stride)
    target = capabilities_of(device)
    launch = chosen(qkv_backward_kernel, choice, align, target)
    tiles = -(-tokens // launch.constants["PLAN"].tokens) * a.batch
    program_tiles = 1
    vectors = (outputs.q_weight, outputs.k_weight, outputs.q_bias, outputs.k_bias)
    if any(vector is not None for vector in vectors):
        # Sums over rows: as many programs as run at the same time, each with a row of partial sums.
        program_tiles = -(-tiles // min(tiles, target.multiprocessors * 4))
    programs = -(-tiles // program_tiles)
    partial = [
        None if vector is None else torch.empty((programs, cut.dim), dtype=torch.float32, device=device)
        for vector in vectors
    ]
    q_weight, k_weight, q_bias, k_bias = partial
    q_norm, k_norm = _affine(norm._replace(q_bias=None, k_bias=None), a.dq)
    launch(
        (programs, 1, 1),
        *qkv_backward_kernel.arguments(
            dq=upstream[0],
            dk=upstream[1],
            dv=upstream[2],
            dgate=upstream[3],
            q=source.q,
            k=source.k,
            q_grad=into.q,
            k_grad=into.k,
            v_grad=into.v,
            q_norm=q_norm,
            k_norm=k_norm,
            q_sums=Sums(q_weight, q_bias),
            k_sums=Sums(k_weight, k_bias),
            angles=angles,
            sizes=choice.sizes(a.batch, tokens),
            tiles=tiles,
            program_tiles=program_tiles,
        ),
    )
    for vector, sums in zip(vectors, partial, strict=True):
        if vector is not None and sums is not None:
            sum_partials(sums, vector)

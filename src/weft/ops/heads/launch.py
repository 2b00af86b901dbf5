"""Launches of the kernels on heads, and their division into programs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import (
    BoundLaunch,
    Capabilities,
    Launch,
    Nothing,
    capabilities_of,
    choice,
    remembered,
    scratch,
)
from ..common.copies import cast_mode
from ..common.heads import (
    LAYOUTS,
    Cut,
    PartStrides,
    Place,
    Strides,
    contiguous_heads,
    sizes,
    stride_of,
    tokens_of,
)
from ..common.kv_cache import NO_CACHE, NOT_KEPT, Cache, CacheForms, CacheStrides, coded_strides
from ..common.rows import align_of, contiguous
from ..common.sums import sum_partials, sum_rows
from .angles import Angles, AngleStrides, Form, Turning, frequencies, matching_tables, turns
from .arguments import (
    QKV,
    Prepare,
    PrepareBackward,
    PrepareCached,
    PrepareGradients,
    PrepareQuantized,
    Quantized,
    Rope,
    Rotated,
)
from .kernels import Affine, Grouped, Plan, Sizes, Sums, qkv_backward_kernel, qkv_kernel
from .norm import NO_NORM, Norm


class Code(NamedTuple):
    """Options of a call that determine the kernel's variant, besides strides."""

    cut: Cut
    v_dim: int  # 0 if the call has no value heads
    norm: str
    after: bool
    rotated: int  # number of rotated elements of a head; 0 without a rotation
    interleaved: bool  # input pairs
    out_interleaved: bool  # output pairs
    first: bool
    sections: str
    inverse: bool
    scaled: str  # granularity of the cache scales; next, the element of its codes
    element: str

    @property
    def halves(self) -> tuple[int, int]:
        """Return (half, rest): the number of rotated pairs, and of other elements. Without a rotation, half of the
        head, and 1 if its dim is odd."""
        if self.rotated:
            return self.rotated // 2, self.cut.dim - self.rotated
        return self.cut.dim // 2, self.cut.dim % 2

    def sizes(self, batch: int, tokens: int) -> Sizes:
        cut, (half, rest) = self.cut, self.halves
        grouped = Grouped(cut.q, cut.group, cut.group_stride)
        return Sizes(batch, tokens, grouped, max(cut.kv, 1), half, rest, self.v_dim)


def _code(
    cut: Cut,
    v_dim: int,
    norm: Norm,
    turning: Turning,
    inverse: bool = False,
    scaled: str = "none",
    element: str = "e4m3",
) -> Code:
    styles = turning.style == "interleaved", turning.out_style == "interleaved"
    read, written = reversed(styles) if inverse else styles
    return Code(
        cut, v_dim, norm.kind, norm.after, turning.dim, read, written, turning.first, turning.sections, inverse, scaled,
        element,
    )  # fmt: skip


class HeadConfig(NamedTuple):
    """Division of heads: `tokens` tokens per program, `heads` of each per step."""

    tokens: int
    heads: int
    num_warps: int


@choice("qkv_prepare", tokens=(1, 256), heads=(1, 16), num_warps=(1, 16))
def head_config(
    kernel: str, heads: int, pairs: int, narrowest: int, apart: bool, target: Capabilities
) -> HeadConfig:
    """Return the tile for tokens with `heads` heads of `pairs` pairs, both rounded up to powers of two. `narrowest` is
    the width of the narrowest tile; `apart`: every element has an address of its own."""
    if target.is_cpu:
        return HeadConfig(1, 1, 4)
    # In the narrowest tile each of 128 threads gets 16 bytes of bf16, so that every access can be 128 bits wide.
    rows = max(1, min(1024 // narrowest, 8192 // (2 * pairs)))
    if apart:
        # Larger tiles make the backward with a norm spill (compiled: 32 bytes in full tiles on sm_90, 80 in half tiles
        # on sm_120).
        rows = max(1, rows // 4)
    at_once = min(4, heads, rows)
    return HeadConfig(max(1, rows // at_once), at_once, 128 // target.warp_size)


@remembered
def _launch_for(kernel: Any, code: Code, align: int, target: Capabilities) -> Launch:
    cut, (_, rest) = code.cut, code.halves
    interleaved = code.interleaved and code.out_interleaved
    pairs, v_tile, gates = (
        _tile(cut.dim - cut.dim // 2),
        _tile(code.v_dim),
        _tile(cut.dim) if cut.gate else 0,
    )
    narrowest = min(pairs * (1 + interleaved), v_tile or pairs)
    apart = rest > 0 and code.interleaved != code.out_interleaved
    tokens, at_once, num_warps = head_config(
        kernel.name, _tile(cut.kv or cut.q), pairs, narrowest, apart, target
    )
    plan = Plan(
        tokens=tokens,
        heads=at_once,
        pairs=pairs,
        v_dim=v_tile,
        dim=gates,
        masked=2 * pairs != cut.dim or v_tile != code.v_dim,
        partial=rest > 0,
        norm=code.norm,
        after=code.after,
        rotate=code.rotated > 0,
        inverse=code.inverse,
        interleaved=code.interleaved,
        out_interleaved=code.out_interleaved,
        first=code.first,
        sections=code.sections != "",
        scaled=code.scaled,
        element=code.element,
        cast=0 if code.scaled == "none" else cast_mode(target),
    )
    return Launch(kernel, num_warps=num_warps, PLAN=plan, ALIGN=align)


def _tile(size: int) -> int:
    """Round `size` up to a power of two; 0 stays 0."""
    return 1 << (size - 1).bit_length() if size else 0


def _align(code: Code, angles: AngleStrides, *places: Strides, more: tuple[int, ...] = ()) -> int:
    """Return the alignment that divides all sizes, starts and strides."""
    half, rest = code.halves
    strides = (stride for place in places for stride in place)
    return align_of(half, rest, rest // 2, code.v_dim, angles.table_batch, angles.table_row, *strides, *more)


def _norms(norm: Norm, x: Tensor) -> tuple[Affine, Affine]:
    """Return the norms of q and k heads as kernels take them."""
    if norm.kind == "none":
        return NO_AFFINE, NO_AFFINE
    eps, offset = norm.eps_for(x), norm.weight_offset
    return (
        Affine(contiguous(norm.q_weight), contiguous(norm.q_bias), eps, offset),
        Affine(contiguous(norm.k_weight), contiguous(norm.k_bias), eps, offset),
    )


NO_AFFINE = Affine(None, None, 0.0, 0.0)


def _turns(turning: Turning, device: torch.device) -> tuple[Tensor | None, float]:
    """Return (turns per position, magnitude) if the kernel computes angles; (None, 1.0) with tables."""
    if not turning.dim or turning.cos is not None:
        return None, 1.0
    magnitude = frequencies(turning.base, turning.dim, turning.scaling)[1]
    return turns(turning.base, turning.dim, turning.scaling, device), magnitude


# ---- forward --------------------------------------------------------------------------------------------


class Forms(NamedTuple):
    """Shapes, strides and options that determine the integers of a launch."""

    code: Code
    batch: int
    tokens: int
    inputs: tuple[tuple[int, ...] | None, ...]  # strides of x, k and v
    outputs: tuple[tuple[int, ...] | None, ...]
    table: Form | None
    positions: Form | None
    cache: CacheForms | None
    scales: tuple[tuple[int, ...], ...]  # strides of the scales of q and k, if they are quantized
    target: Capabilities


@remembered
def _forward(forms: Forms) -> BoundLaunch:
    """Bind the launch for these forms, once for all calls that share them."""
    code, cut = forms.code, forms.code.cut
    source = PartStrides.of(forms.inputs, cut)
    outputs = tuple(Strides.of(strides, cut.out_layout, forms.tokens) for strides in forms.outputs)
    angles = AngleStrides.of(forms.table, forms.positions, code.sections)
    cache, q_codes = CacheStrides.of(forms.cache, cut.layout, forms.batch, forms.tokens), NOT_KEPT
    if forms.scales:
        q_codes, k_codes = (
            coded_strides(codes, scale, cut.out_layout, forms.tokens)
            for codes, scale in zip(forms.outputs[:2], forms.scales, strict=True)
            if codes is not None
        )
        cache = cache._replace(k=k_codes)
    align = _align(code, angles, *source, *outputs, more=(cut.group_stride, *cache.k[:3], *cache.v[:3]))
    launch = _launch_for(qkv_kernel, code, align, forms.target)
    programs = -(-forms.tokens // launch.constants["PLAN"].tokens) * forms.batch
    sizes = code.sizes(forms.batch, forms.tokens)
    to_q, to_k, to_v, to_gate = outputs
    return launch.bind(  # each call adds its tensors and floats
        (programs, 1, 1),
        q=source.q,
        k=source.k,
        v=source.v,
        q_out=to_q,
        k_out=to_k,
        v_out=to_v,
        gate_out=to_gate,
        angles=angles,
        slots=cache.slots,
        q_codes=q_codes,
        k_cache=cache.k,
        v_cache=cache.v,
        sizes=sizes,
    )


def launch_quantized(outputs: Quantized, a: PrepareQuantized) -> None:
    """Compute q, k, v and gate of `a`, with q and k as codes."""
    q, k, q_scale, k_scale, v, gate = outputs
    cache = Cache(None, k, None, k_scale, None)
    launch_forward(QKV(q, k, v, gate), a.prepare, cache=cache, scaled="token", q_scale=q_scale)


def launch_forward(
    outputs: QKV, a: Prepare, *, cache: Cache = NO_CACHE, scaled: str = "none", q_scale: Tensor | None = None,
    inverse: bool = False,
) -> None:  # fmt: skip
    """Compute q, k, v and gate of `a`, those that are not None in `outputs`. With `q_scale`, q and k in `outputs` are
    codes, and the cache, which then has no slots, holds the scales of k."""
    cut, turning, device = a.cut, a.turning, a.x.device
    x, k, v = contiguous_heads(a.x), a.k, a.v
    inputs: tuple[tuple[int, ...] | None, ...] = (x.stride(), None, None)
    if cut.packing != "apart":
        k = v = x
    elif k is not None:
        k, v = contiguous_heads(k), v if v is None else contiguous_heads(v)
        inputs = (x.stride(), k.stride(), stride_of(v))
    to_q, to_k, to_v, to_gate = outputs
    cos, sin = matching_tables(turning.cos, turning.sin)
    batch, tokens = sizes(x, cut.layout)
    target = capabilities_of(device)
    forms = Forms(
        _code(cut, 0 if to_v is None else cut.v_dim, a.norm, turning, inverse, scaled, cache.element),
        batch,
        tokens,
        inputs,
        (to_q.stride(), stride_of(to_k), stride_of(to_v), stride_of(to_gate)),
        Form.of(cos),
        Form.of(turning.positions),
        cache.forms(),
        () if q_scale is None or cache.k_scale is None else (q_scale.stride(), cache.k_scale.stride()),
        target,
    )
    q_codes = None
    if q_scale is not None:
        q_codes, to_q, to_k = to_q, None, None  # type: ignore[assignment]
    launch = _forward(forms)
    q_norm, k_norm = _norms(a.norm, x)
    per_position, magnitude = _turns(turning, device)
    launch(
        *qkv_kernel.tensors(
            q=x,
            k=k,
            v=v,
            bias_ptr=contiguous(a.bias),
            q_out=to_q,
            k_out=to_k,
            v_out=to_v,
            gate_out=to_gate,
            q_norm=q_norm,
            k_norm=k_norm,
            angles=(cos, sin, per_position, turning.positions, magnitude),
            slots=cache.slots,
            q_codes=(q_codes, q_scale),
            k_cache=(cache.k, cache.k_scale),
            v_cache=(cache.v, cache.v_scale),
        )
    )


# ---- backward -------------------------------------------------------------------------------------------


def launch_backward(outputs: PrepareGradients, a: PrepareBackward) -> None:
    cut, norm, turning = a.cut, a.norm, a.turning
    device, target = a.dq.device, capabilities_of(a.dq.device)
    tokens = tokens_of(a.dq, cut.out_layout, a.batch)
    separate = cut.packing == "apart"
    upstream = [None if d is None else contiguous_heads(d) for d in (a.dq, a.dk, a.dv, a.dgate)]
    upstream_strides = [Strides.of(stride_of(d), cut.out_layout, tokens) for d in upstream]
    dq, dk, dv, dgate = map(Place, upstream, upstream_strides)
    x, k = (None if t is None else contiguous_heads(t) for t in (a.x, a.k))
    v_grad = outputs.v if separate else outputs.x
    source = PartStrides.of((stride_of(x), stride_of(k), None), cut)
    into = PartStrides.of((stride_of(outputs.x), stride_of(outputs.k), stride_of(outputs.v)), cut)
    cos, sin = matching_tables(turning.cos, turning.sin)
    angles = AngleStrides.of(Form.of(cos), Form.of(turning.positions), turning.sections)
    code = _code(cut, cut.v_dim if v_grad is not None else 0, norm, turning)
    group_stride = cut.group_stride if x is not None or outputs.x is not None else 0
    align = _align(code, angles, *upstream_strides, source.q, source.k, *into, more=(group_stride,))
    launch = _launch_for(qkv_backward_kernel, code, align, target)
    tiles = -(-tokens // launch.constants["PLAN"].tokens) * a.batch
    program_tiles = 1
    vectors = (outputs.q_weight, outputs.k_weight, outputs.q_bias, outputs.k_bias)
    if any(vector is not None for vector in vectors):
        # Each program writes a row of partial sums: launch only as many programs as run concurrently.
        program_tiles = -(-tiles // min(tiles, target.multiprocessors * 4))
    programs = -(-tiles // program_tiles)
    partial = [
        None if vector is None else scratch((programs, cut.dim), torch.float32, device) for vector in vectors
    ]
    q_weight, k_weight, q_bias, k_bias = partial
    q_norm, k_norm = _norms(norm._replace(q_bias=None, k_bias=None), a.dq)
    per_position, magnitude = _turns(turning, device)
    launch(
        (programs, 1, 1),
        *qkv_backward_kernel.arguments(
            dq=dq,
            dk=dk,
            dv=dv,
            dgate=dgate,
            q=Place(x, source.q),
            k=Place(k if separate else x, source.k),
            bias_ptr=None if x is None else contiguous(a.bias),
            q_grad=Place(outputs.x, into.q),
            k_grad=Place(outputs.k if separate else outputs.x, into.k),
            v_grad=Place(v_grad, into.v),
            q_norm=q_norm,
            k_norm=k_norm,
            q_sums=Sums(q_weight, q_bias),
            k_sums=Sums(k_weight, k_bias),
            angles=Angles(cos, sin, per_position, turning.positions, angles, magnitude),
            sizes=code.sizes(a.batch, tokens),
            tiles=tiles,
            program_tiles=program_tiles,
        ),
    )
    for vector, sums in zip(vectors, partial, strict=True):
        if vector is not None and sums is not None:
            sum_partials(sums, vector)
    if outputs.bias is not None:
        assert outputs.x is not None
        sum_rows(outputs.x.view(-1, cut.width), outputs.bias)


def launch_rope(outputs: Rotated, a: Rope) -> None:
    """Launch the kernel of `qkv_prepare` with x as its queries and no keys or values."""
    heads, dim = a.x.shape[LAYOUTS[a.layout][2]], a.x.shape[-1]
    cut = Cut(heads, 0, dim, dim, "apart", False, a.layout, a.out_layout)
    prepare = Prepare(a.x, None, None, None, NO_NORM, a.turning, cut)
    launch_forward(QKV(outputs.y, None, None, None), prepare, inverse=a.inverse)  # type: ignore[arg-type]


def launch_cached(_: Nothing, a: PrepareCached) -> None:
    q, k, *more = a.outputs
    gate = more.pop() if a.cut.gate else None
    launch_forward(QKV(q, k, more[0] if more else None, gate), a.prepare, cache=a.cache, scaled=a.scaled)

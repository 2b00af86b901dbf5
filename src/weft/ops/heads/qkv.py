"""Preparation of heads for attention: split, norm, rotation and transposition of queries and keys in one pass.

    q, k, v[, gate] = split(qkv + bias)        "flat" [q.. | k.. | v..], or "groups" of [q q q q k v]
    q = norm(q) * (q_weight + weight_offset) + q_bias              rms or layer, over a head; likewise for k
    (a, b) = (a cos - b sin, b cos + a sin)    of each pair (a, b) of the rotated part of a head
    out = round(·)                             to the dtype of the input, in the layout of the output

Pairs are (i, i + n/2) of the n rotated elements ("neox") or (2i, 2i + 1) ("interleaved"); they may be read in one
style and written in the other. The norm comes before the rotation, or after it.

All arithmetic is fp32, with one rounding per stored tensor. Backward rotates the gradients back (by -sin), recomputes
the statistics of the norm from its input, and writes one packed gradient:

    z = the normalized head, r = 1 / its deviation, g = gradient of norm's result, t = g * (weight + weight_offset)
    dx = r * (t - z * mean(t * z))             rms; layer: r * (t - mean(t) - z * mean(t * z))
    dweight = sum g * z      dbias = sum g     fp32 partial sums of each program, added up in order

The gradient of the projection's bias is the sum over all tokens of the rounded packed gradient, in fp32 and in a fixed
order, as the projection itself would compute it. That reads the gradient once more. Summing in the kernel would avoid
the read, but a program handles a few tokens and all columns, whose sums do not fit in registers.

For decoding, the same pass also writes k and v to a cache, each token to its slot: as they are returned, or as e4m3 or
int8 codes computed from the unrounded fp32 values, with one scale per token and head or with fixed scales (127 in place
of 448 for int8):

    scale = 1 / (448 / amax)      code = e4m3(x * (448 / amax))         `weft.quantize(x, "e4m3:row:te")` of fp32 heads
    fixed scale                   code = e4m3(x / scale)

For attention in eight bits, q and k are returned as codes with one scale per token and head, computed in the same way,
and are stored in no other form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...quant import Codes, Format, QTensor
from ...runtime import LATER, Backward, Gradients, Nothing, Op, Present, Sharding, later
from ..common.checks import FLOATS, check_input, check_tensor
from ..common.heads import LAYOUTS, Cut, Heads, Layout, layout_of, shape_of, sizes, tokens_of
from ..common.into import check_into, results_in, run_into
from ..common.kv_cache import E4M3, INT8, KVCache, check_cache, check_slots
from .angles import Rotation, check_rotation
from .arguments import (
    QKV,
    Prepare,
    PrepareBackward,
    PrepareCached,
    PrepareGradients,
    PrepareQuantized,
    Quantized,
)
from .norm import HeadNorm, check_norm
from .reference import (
    qkv_prepare_backward_reference,
    qkv_prepare_cached_reference,
    qkv_prepare_quantized_reference,
    qkv_prepare_reference,
)
from .sharding import shard_prepare

# ---- ops ------------------------------------------------------------------------------------------------


def _present(a: Prepare) -> Present:
    return True, True, a.cut.packing != "apart" or a.v is not None, a.cut.gate


def _allocate(a: Prepare) -> QKV:
    cut, dtype, device = a.cut, a.x.dtype, a.x.device
    batch, tokens = sizes(a.x, cut.layout)
    q_shape = shape_of(cut.out_layout, batch, tokens, cut.q, cut.dim)
    k_shape = shape_of(cut.out_layout, batch, tokens, cut.kv, cut.dim)
    v = None
    if cut.packing != "apart" or a.v is not None:
        v_shape = shape_of(cut.out_layout, batch, tokens, cut.kv, cut.v_dim)
        v = torch.empty(*v_shape, dtype=dtype, device=device)
    return QKV(
        torch.empty(*q_shape, dtype=dtype, device=device),
        torch.empty(*k_shape, dtype=dtype, device=device),
        v,
        torch.empty(*q_shape, dtype=dtype, device=device) if cut.gate else None,
    )


class _Saved(NamedTuple):
    args: PrepareBackward  # gradients and needs are filled in later
    tokens: int
    has_v: bool


class QkvPrepareBackwardOp(Op[PrepareBackward, PrepareGradients], name="qkv_prepare_backward", variants=64):
    def allocate(self, a: PrepareBackward) -> PrepareGradients:
        cut, norm, needs, dq = a.cut, a.norm, a.needs, a.dq
        tokens = tokens_of(dq, cut.out_layout, a.batch)

        def heads(count: int, dim: int) -> Tensor:
            return torch.empty(
                shape_of(cut.layout, a.batch, tokens, count, dim), dtype=dq.dtype, device=dq.device
            )

        def like(vector: Tensor | None, needed: bool) -> Tensor | None:
            return (
                torch.empty(vector.shape, dtype=vector.dtype, device=dq.device)
                if needed and vector is not None
                else None
            )

        x = None
        if needs.x and cut.packing == "apart":
            x = heads(cut.q, cut.q_dim)
        elif needs.x:
            x = heads(1, cut.width).squeeze(-2)
        return PrepareGradients(
            x=x,
            k=heads(cut.kv, cut.dim) if needs.k else None,
            v=heads(cut.kv, cut.v_dim) if needs.v else None,
            q_weight=like(norm.q_weight, needs.q_weight),
            k_weight=like(norm.k_weight, needs.k_weight),
            q_bias=like(norm.q_bias, needs.q_bias),
            k_bias=like(norm.k_bias, needs.k_bias),
            bias=like(a.bias, needs.bias),
        )

    @cached_property
    def launch(self) -> Callable[[PrepareGradients, PrepareBackward], None]:
        from .launch import launch_backward

        return launch_backward

    def reference(self, a: PrepareBackward) -> PrepareGradients:
        return qkv_prepare_backward_reference(a)


qkv_prepare_backward_op = QkvPrepareBackwardOp()


class QkvPrepareOp(Op[Prepare, QKV], name="qkv_prepare", variants=64, differentiable=("q", "k", "v", "gate")):
    def allocate(self, a: Prepare) -> QKV:
        return _allocate(a)

    def present(self, a: Prepare) -> Present:
        return _present(a)

    @cached_property
    def launch(self) -> Callable[[QKV, Prepare], None]:
        from .launch import launch_forward

        return launch_forward

    def reference(self, a: Prepare) -> QKV:
        return qkv_prepare_reference(a)

    def keep(self, a: Prepare, outputs: QKV) -> _Saved:
        normed = a.norm.kind != "none"
        batch, tokens = sizes(a.x, a.cut.layout)
        # The backward of a rotation does not need its input.
        x, k = (a.x, a.k) if normed else (None, None)
        args = PrepareBackward(
            LATER, LATER, None, None, x, k, a.bias, a.norm, a.turning, a.cut, batch, later(PrepareGradients)
        )  # fmt: skip
        return _Saved(args, tokens, outputs.v is not None)

    def backward(self, b: Backward) -> Gradients:
        saved: _Saved = b.kept
        args, needs, grads = saved.args, b.needs, b.grads
        cut = args.cut
        any_grad: Tensor = next(g for g in grads if g is not None)

        def grad_or_zeros(grad: Tensor | None, heads: int, dim: int) -> Tensor:
            if grad is not None:
                return grad
            return any_grad.new_zeros(dim).expand(
                shape_of(cut.out_layout, args.batch, saved.tokens, heads, dim)
            )

        needs_x = needs.x or needs.k or needs.v or needs.bias
        separate = needs_x and cut.packing == "apart"
        grads_in = qkv_prepare_backward_op(
            args._replace(
                dq=grad_or_zeros(grads.q, cut.q, cut.dim),
                dk=grad_or_zeros(grads.k, cut.kv, cut.dim),
                dv=grad_or_zeros(grads.v, cut.kv, cut.v_dim) if saved.has_v else None,
                dgate=grad_or_zeros(grads.gate, cut.q, cut.dim) if cut.gate else None,
                needs=PrepareGradients(
                    x=needs_x,
                    k=separate,
                    v=separate and saved.has_v,
                    q_weight=needs.norm_q_weight,
                    k_weight=needs.norm_k_weight,
                    q_bias=needs.norm_q_bias,
                    k_bias=needs.norm_k_bias,
                    bias=needs.bias,
                ),
            )
        )
        return {
            "x": grads_in.x if needs.x else None,
            "k": grads_in.k if needs.k else None,
            "v": grads_in.v if needs.v else None,
            "norm_q_weight": grads_in.q_weight,
            "norm_k_weight": grads_in.k_weight,
            "norm_q_bias": grads_in.q_bias,
            "norm_k_bias": grads_in.k_bias,
            "bias": grads_in.bias,
        }

    def shard(self, a: Prepare) -> Sharding:
        return shard_prepare(a)


qkv_prepare_op = QkvPrepareOp()


class QkvPrepareCachedOp(Op[PrepareCached, Nothing], name="qkv_prepare_cached", variants=64):
    def allocate(self, a: PrepareCached) -> Nothing:
        return Nothing()

    @cached_property
    def launch(self) -> Callable[[Nothing, PrepareCached], None]:
        from .launch import launch_cached

        return launch_cached

    def reference(self, a: PrepareCached) -> Nothing:
        qkv_prepare_cached_reference(a)
        return Nothing()


qkv_prepare_cached_op = QkvPrepareCachedOp()


class QkvPrepareQuantizedOp(Op[PrepareQuantized, Quantized], name="qkv_prepare_quantized", variants=64):
    def allocate(self, a: PrepareQuantized) -> Quantized:
        dtype = Format.of(a.format).number.dtype
        q, k, v, gate = _allocate(a.prepare)

        def coded(x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.empty_like(x, dtype=dtype), torch.empty(
                x.shape[:-1], dtype=torch.float32, device=x.device
            )

        (q, q_scale), (k, k_scale) = coded(q), coded(k)
        return Quantized(q, k, q_scale, k_scale, v, gate)

    def present(self, a: PrepareQuantized) -> Present:
        return True, True, True, True, *_present(a.prepare)[2:]

    @cached_property
    def launch(self) -> Callable[[Quantized, PrepareQuantized], None]:
        from .launch import launch_quantized

        return launch_quantized

    def reference(self, a: PrepareQuantized) -> Quantized:
        return qkv_prepare_quantized_reference(a)


qkv_prepare_quantized_op = QkvPrepareQuantizedOp()


# ---- public function ------------------------------------------------------------------------------------


def qkv_prepare(
    qkv: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    heads: Heads | None = None,
    bias: Tensor | None = None,
    norm: HeadNorm | None = None,
    rotation: Rotation | None = None,
    positions: Tensor | None = None,
    cache: KVCache | None = None,
    slots: Tensor | None = None,
    quantize: Format | str | None = None,
    layout: Layout = "bshd",
    out_layout: Layout | None = None,
    out: Sequence[Tensor | None] | None = None,
) -> QKV:
    """Split, normalize, rotate and transpose q, k, v and an optional gate for attention in one pass.

    - `qkv`: one packed projection, [batch, sequence, width] with `layout="bshd"`, [sequence, batch, width] with
      "sbhd", or [tokens, width]. Or q alone, with separate `k` and `v`. bf16, fp16 or fp32, any strides.
    - `k`, `v`: with q in `qkv`, [batch, sequence, heads, dim] each or in `layout`, three-dimensional with "thd"; v may
      be None.
    - `heads`: a `weft.Heads`, which splits a packed projection. With separate k and v it is needed only if the query
      heads have gates.
    - `layout`: the order of the dimensions of the input, "bshd", "sbhd" or "thd". `out_layout`: that of the results, by
      default the input's; "thd" joins batch and sequence.
    - `bias`: bias of the packed projection, [width] (Qwen2); bf16, fp16 or fp32. It is added first, in fp32, also to v
      and the gates. It does not go with separate q, k and v, whose projections add their own.
    - `norm`: a `weft.HeadNorm` of each head of q and k.
    - `rotation`: a `weft.Rotation` of each head of q and k.
    - `positions`: int32 or int64 [sequence] or [batch, sequence], for packed or partial sequences; 0, 1, 2… by default.
      A position without a row in the table gives NaN. [3, …] for a rotation with sections.

    - `cache`: a `weft.KVCache`, for inference: the same launch also writes k and v to it; they are returned all the
      same. Such a call has no gradients: it raises if grad mode is on and an input requires a gradient.
    - `slots`: int32 or int64, one per token: [batch, sequence], [sequence, batch] with `layout="sbhd"`, or flattened in
      this order. In a paged cache a slot is page * page_size + place. -1 and any other number that is no slot of the
      cache write nothing. Two tokens must not share a slot, which would then hold some elements of each.
    - `quantize`: "e4m3:row" or "int8:row", for inference: q and k are `QTensor`s with one scale per token and head,
      computed from fp32, as `weft.attention` multiplies them. Keys are not smoothed: their mean over tokens is not
      known before the last one. v is not quantized, since its scales span a whole sequence.
    - `out`: (q, k, v) or (q, k, v, gate) to write the results to, or None for a new one; not with autograd. Plain ones
      may be slices of a longer sequence, or any other views whose heads are contiguous: streams of text and images that
      write to one sequence need no concatenation.

    Returns a `QKV` of q, k, v and gate in the dtype of the input. v is None if it was not passed, gate if there is
    none. Everything is fp32 until the one rounding of each result.

    >>> import torch, weft
    >>> heads, rotation = weft.Heads(q=4, kv=2, dim=64), weft.Rotation(10000.0)
    >>> norm = weft.HeadNorm("rms", torch.ones(64), torch.ones(64))
    >>> qkv = torch.randn(2, 16, heads.width).bfloat16()
    >>> q, k, v, _ = weft.qkv_prepare(qkv, heads=heads, norm=norm, rotation=rotation)
    >>> q.shape, k.shape
    (torch.Size([2, 16, 4, 64]), torch.Size([2, 16, 2, 64]))
    >>> weft.qkv_prepare(qkv, heads=heads, out_layout="bhsd").q.shape
    torch.Size([2, 4, 16, 64])
    >>> cache = weft.KVCache(*torch.zeros(2, 8, 16, 2, 64).bfloat16().unbind())  # 8 pages of 16 slots, for k and for v
    >>> token = torch.randn(3, heads.width).bfloat16()  # one of each of three sequences
    >>> slots = torch.tensor([5 * 16 + 3, 16, -1])
    >>> q, k, v, _ = weft.qkv_prepare(token, heads=heads, cache=cache, slots=slots)
    >>> torch.equal(cache.k[5, 3], k[0]), torch.equal(cache.v[1, 0], v[1])
    (True, True)
    """
    check_input("qkv", qkv)
    if heads is not None and not isinstance(heads, Heads):
        raise TypeError(f"heads must be a weft.Heads, such as weft.Heads(q=32, kv=8, dim=128); got {heads!r}")
    cut = (
        _cut_packed(qkv, heads, layout, out_layout)
        if k is None
        else _cut_separate(qkv, k, v, heads, layout, out_layout)
    )
    if k is None and v is not None:
        raise ValueError("v is given without k: pass both, or one packed tensor")
    if bias is not None:
        if k is not None:
            raise ValueError(
                "bias= is the bias of a packed projection; for separate q, k and v, add each bias in its own projection"
            )
        check_tensor("bias", bias, FLOATS, qkv.device, (cut.width,))
    if cut.out_layout not in LAYOUTS:
        raise ValueError(f"out_layout must be one of {', '.join(LAYOUTS)}; got {out_layout!r}")
    a = Prepare(
        qkv,
        k,
        v,
        bias,
        check_norm(norm, qkv, cut.dim),
        check_rotation(rotation, positions, qkv, cut.dim, *sizes(qkv, cut.layout)),
        cut,
    )
    results = None if out is None else _results(out)
    if quantize is not None:
        return _prepare_quantized(a, quantize, cache, results)
    if cache is not None:
        return _prepare_cached(a, cache, slots, results)
    if slots is not None:
        raise ValueError("slots go with a cache=: pass one, or no slots")
    if results is None:
        return qkv_prepare_op(a)
    return run_into(qkv_prepare_op, a, results._asdict(), strided=QKV._fields)


def _results(out: Sequence[Tensor | None]) -> QKV:
    """Return the tensors for the results by name; q and k may be None as well."""
    if isinstance(out, (tuple, list)) and len(out) == 3:
        out = (*out, None)
    return QKV(*results_in(out, *QKV._fields))  # type: ignore[arg-type]


def _prepare_cached(a: Prepare, cache: KVCache, slots: Tensor | None, out: QKV | None) -> QKV:
    check_cache(cache, a.x, a.cut, a.cut.packing != "apart" or a.v is not None)
    slots = check_slots(slots, a.x, a.cut.layout)
    written = cache.written
    _refuse_gradients(a, "a cache", *written)
    outputs = _allocate(a) if out is None else _cached_outputs(a, out, cache)
    scales = (None, None) if cache.scaled == "token" else (cache.k_scale, cache.v_scale)
    qkv_prepare_cached_op(
        PrepareCached(*a, slots, *scales, cache.scaled, [t for t in outputs if t is not None], list(written))
    )
    return outputs


def _cached_outputs(a: Prepare, out: QKV, cache: KVCache) -> QKV:
    """Return the caller's tensors for the results, and new ones where there is None."""
    caches = [("cache", t) for t in (*cache.written, cache.k_scale, cache.v_scale) if t is not None]
    check_into(qkv_prepare_op, a, out._asdict(), strided=QKV._fields, others=caches)
    missing = any(t is None and e for t, e in zip(out, _present(a), strict=True))
    if not missing:
        return out
    new = zip(QKV._fields, out, _allocate(a), strict=True)
    return QKV(**{name: n if t is None else t for name, t, n in new})  # type: ignore[arg-type]


def _prepare_quantized(a: Prepare, format: Format | str, cache: KVCache | None, out: QKV | None) -> QKV:
    f = Format.of(format)
    if f not in (E4M3, INT8):
        raise ValueError(
            f"queries and keys for attention are quantized as {E4M3.spec} or {INT8.spec}, with a scale per token and "
            f"head; got {f.spec}"
        )
    if cache is not None:
        raise ValueError("quantize= does not go with a cache: pass only one of them")
    _refuse_gradients(a, "quantize=")
    args = PrepareQuantized(*a, f.spec)
    if out is not None:
        return _quantized_into(args, f, out)
    outputs = qkv_prepare_quantized_op(args)

    return QKV(
        _qtensor(args, f, outputs.q, outputs.q_scale),
        _qtensor(args, f, outputs.k, outputs.k_scale),
        outputs.v,
        outputs.gate,
    )


def _qtensor(a: PrepareQuantized, format: Format, codes: Tensor, scale: Tensor) -> QTensor:
    return QTensor(codes.shape, a.prepare.x.dtype, format, Codes(codes.flatten(0, -2), scale.view(-1, 1)))


def _quantized_into(a: PrepareQuantized, format: Format, out: QKV) -> QKV:
    """Write codes and scales of q and k to the caller's QTensors."""
    targets: dict[str, Tensor | None] = {"v": out.v, "gate": out.gate}
    dtype = a.prepare.x.dtype
    for name, q in (("q", out.q), ("k", out.k)):
        if q is None:
            continue
        if not isinstance(q, QTensor) or (q.spec, q.dtype) != (format.spec, dtype) or q.rowwise is None:
            raise ValueError(f"{name} of out must be a QTensor in {format.spec}, of {dtype}; got {q!r:.120}")
        codes, scale, _, _ = q.rowwise
        if not (codes.is_contiguous() and scale.is_contiguous()):
            raise ValueError(f"codes and scales of {name} of out must be contiguous")
        targets[name], targets[f"{name}_scale"] = codes.view(q.shape), scale.view(q.shape[:-1])
    made = run_into(qkv_prepare_quantized_op, a, targets, strided=("v", "gate"))
    return QKV(
        _qtensor(a, format, made.q, made.q_scale) if out.q is None else out.q,
        _qtensor(a, format, made.k, made.k_scale) if out.k is None else out.k,
        made.v,
        made.gate,
    )


def _refuse_gradients(a: Prepare, option: str, *written: Tensor) -> None:
    if not torch.is_grad_enabled():
        return
    vectors = (a.bias, a.norm.q_weight, a.norm.k_weight, a.norm.q_bias, a.norm.k_bias)
    for t in (a.x, a.k, a.v, *vectors, *written):
        if t is not None and t.requires_grad:
            raise ValueError(
                f"qkv_prepare with {option} is for inference, but an input requires a gradient. Call it under "
                f"torch.no_grad(), or without {option}"
            )


def _cut_packed(qkv: Tensor, heads: Heads | None, layout: str, out_layout: str | None) -> Cut:
    if heads is None:
        raise ValueError("a packed qkv needs heads=weft.Heads(q=..., kv=..., dim=...)")
    in_layout = layout_of(qkv, layout, 3)
    if in_layout == "bhsd":
        raise ValueError(
            "a packed qkv must be [batch, sequence, width] ('bshd') or [sequence, batch, width] ('sbhd')"
        )
    cut = Cut(
        heads.q, heads.kv, heads.dim, heads.v_dim, heads.packing, heads.gate, in_layout, out_layout or in_layout
    )  # fmt: skip
    if qkv.shape[-1] != cut.width:
        raise ValueError(
            f"{cut.q} query heads and {cut.kv} of k and v take {cut.width} columns; qkv has {qkv.shape[-1]}"
        )
    return cut


def _cut_separate(
    q: Tensor, k: Tensor, v: Tensor | None, heads: Heads | None, layout: str, out_layout: str | None
) -> Cut:
    """Return the `Cut` of separate q, k and v, checked."""
    source = layout_of(q, layout, 4)
    axis = LAYOUTS[source][2]
    for name, part in (("k", k), ("v", v)):
        if part is not None:
            check_tensor(name, part, (q.dtype,), q.device)
            if part.dim() != q.dim():
                raise ValueError(
                    f"{name} must have as many dimensions as q {tuple(q.shape)}; got {tuple(part.shape)}"
                )
            if sizes(part, source) != sizes(q, source) or part.shape[axis] != k.shape[axis]:
                raise ValueError(
                    f"{name} {tuple(part.shape)} does not go with q {tuple(q.shape)} and k {tuple(k.shape)}"
                )
    gate = heads is not None and heads.gate
    v_dim = k.shape[-1] if v is None else v.shape[-1]
    cut = Cut(q.shape[axis], k.shape[axis], k.shape[-1], v_dim, "apart", gate, source, out_layout or source)
    if heads is not None:
        for name in ("q", "kv", "dim", "v_dim"):
            if getattr(heads, name) != getattr(cut, name) and not (name == "v_dim" and v is None):
                raise ValueError(
                    f"heads has {name}={getattr(heads, name)}, but the tensors have {getattr(cut, name)}"
                )
    if q.shape[-1] != cut.q_dim:
        raise ValueError(
            f"heads of q must have {cut.q_dim} elements for heads of k with {cut.dim}; got {q.shape[-1]}"
        )
    if cut.kv and cut.q % cut.kv:
        raise ValueError(
            f"the number of heads of q must be a multiple of that of k; got {cut.q} and {cut.kv}"
        )
    return cut

"""Attention kernels of other libraries: what they support, and how they are called.

Argument lists are those of PyTorch 2.13.0, of flash-attn 2.8.4, of FlashAttention-3 and -4 (the latter 4.0.0 beta 27)
at commit 0251105 of Dao-AILab/flash-attention, and of AITER at commit e404860 of ROCm/aiter. The limits come from the
same versions, except PyTorch's on GPUs, which were read in other versions of its sources. The CPU calls are tested;
this project has never run the GPU calls.

- A forward returns the result and lse; a backward takes what Weft's own takes, except dlse. So one engine may run the
  forward and another the backward: y, lse and the inputs are all that either needs.
- Everything here gives the same bits in every run. PyTorch's flash backward on GPUs does so only under
  `torch.use_deterministic_algorithms(True)`, and its cuDNN backward never does, so cuDNN serves forward only.
- No library gets a query without a visible key: libraries return lse = +inf or a finite value for it, or divide by
  zero (PyTorch's CPU kernel, which ends the process). `engines.obstacle` keeps such calls on Weft's own kernel.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.heads import canonical
from .arguments import (
    AttentionArgs,
    AttentionBackwardArgs,
    AttentionGradients,
    AttentionOutputs,
    Mask,
    starts_as_read,
)
from .reference import memory_layout

aten = torch.ops.aten


# ---- calls in the form that libraries take ----------------------------------------------------------------


class Problem(NamedTuple):
    """Operands of a call: heads [batch, tokens, heads, dim], or [tokens, heads, dim] for packed sequences."""

    q: Tensor
    k: Tensor
    v: Tensor
    starts: Tensor | None  # int32 [sequences + 1]: starts of packed sequences, the same for queries and keys
    unsound: Tensor | None  # bool: the given starts descend or leave the tokens, so `starts` differ from them
    mask: Mask
    scale: float
    softcap: float

    @staticmethod
    def of(a: AttentionArgs | AttentionBackwardArgs) -> Problem:
        raw, starts, unsound = a.packed.q_starts, None, None
        if raw is not None:
            # Libraries read and write wherever the starts point.
            clamped = starts_as_read(raw, a.query.shape[0])
            starts, unsound = clamped.to(torch.int32).contiguous(), (clamped != raw).any()
        q, k, v = (_heads(x, a.layout) for x in (a.query, a.key, a.value))
        return Problem(q, k, v, starts, unsound, a.mask, a.scale, a.softcap)

    @property
    def causal(self) -> bool:
        """True if the mask is exactly that of `is_causal`."""
        return self.mask.left is None and self.mask.right == 0

    def window(self, unbounded: int | None) -> dict[str, int | None]:
        """Return the mask as FlashAttention takes it."""
        left, right = (None, None) if self.causal else self.mask[:2]
        return {
            "window_size_left": unbounded if left is None else left,
            "window_size_right": unbounded if right is None else right,
        }

    def options(self, unbounded: int | None, causal: str = "causal") -> dict[str, Any]:
        """Return FlashAttention's arguments besides the heads; `causal` is the name of that argument. The longest
        packed sequence is unknown here; the total number of tokens bounds it."""
        kwargs: dict[str, Any] = {"softmax_scale": self.scale, causal: self.causal, "softcap": self.softcap}
        kwargs |= self.window(unbounded)
        if self.starts is not None:
            kwargs |= {"cu_seqlens_q": self.starts, "cu_seqlens_k": self.starts}
            kwargs |= {"max_seqlen_q": len(self.q), "max_seqlen_k": len(self.k)}
        return kwargs

    def by_heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value as PyTorch takes them, [batch, heads, tokens, dim]."""
        return self.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)


class Upstream(NamedTuple):
    """Further inputs of a backward, and its outputs dq, dk and dv; heads as in `Problem`."""

    out: Tensor
    dout: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def _view(x: Tensor, layout: str) -> Tensor:
    """Return a view of heads in the layout of `Problem`."""
    return x if layout == "thd" else canonical(x, layout)


def _heads(x: Tensor, layout: str) -> Tensor:
    """Return heads in the layout of `Problem`, copied if not aligned to 16 bytes or if expanded (stride 0)."""
    x, step = _view(x, layout), 16 // x.element_size()
    aligned = x.stride(-1) == 1 and not any(at % step for at in (x.storage_offset(), *x.stride()[:-1]))
    no_broadcast = all(stride or size == 1 for stride, size in zip(x.stride(), x.shape, strict=True))
    return x if aligned and no_broadcast else x.clone(memory_format=torch.contiguous_format)


HALVES = (torch.bfloat16, torch.float16)

Forward = Callable[[Problem, Tensor, Tensor], tuple[Tensor, Tensor]]
Backward = Callable[[Problem, Upstream], None]


class Library(NamedTuple):
    """Kernels of one library: which calls they support, and how to call them."""

    engine: str  # its name in `engine=`
    name: str
    targets: tuple[str, ...]
    options: tuple[str, ...]  # supported ones of "softcap", "window" and "packed"
    align: str  # its `causal_align` if the numbers of keys and queries differ; "" if unsupported
    widths: Callable[[int, int], bool]  # whether it supports heads of dim and v_dim
    missing: Callable[[], str | None]  # what is missing on this machine, or None
    forward: Forward  # takes a problem and buffers for the result and lse, which it may use
    backward: Backward | None
    # What else its backward lacks for heads of dim and v_dim, or None.
    backward_lacks: Callable[[int, int], str | None] = lambda dim, v_dim: None
    keys: int = 1  # minimum that it supports
    dtypes: tuple[torch.dtype, ...] = HALVES


def attend(library: Library, o: AttentionOutputs, a: AttentionArgs) -> None:
    """Compute the result and lse with the kernels of a library."""
    problem, y = Problem.of(a), _view(o.result.y, a.layout)
    out, lse = library.forward(problem, y, o.lse)
    if problem.starts is not None and problem.unsound is not None:
        # Libraries do not write tokens outside all sequences. With unsound starts the whole result is NaN.
        used = ~(_padding_mask(problem.starts, y) | problem.unsound)
        fill = torch.where(problem.unsound, math.nan, 0.0)
        torch.where(used[:, None, None], out, fill.to(out.dtype), out=y)
        torch.where(used, lse, (fill - math.inf).to(lse.dtype), out=o.lse)
        return
    if out is not y:
        y.copy_(out)
    if lse is not o.lse:
        o.lse.copy_(lse)


def attend_backward(library: Library, o: AttentionGradients, a: AttentionBackwardArgs) -> None:
    """Compute the gradients of query, key and value with a library, which always computes all three."""
    assert library.backward is not None
    problem, layout = Problem.of(a), memory_layout(a.layout)
    grads = [
        torch.empty_like(x) if into is None else _view(into, a.layout)
        for x, into in zip((problem.q, problem.k, problem.v), o[:3], strict=True)
    ]
    upstream = Upstream(_heads(a.y, layout), _heads(a.dy, layout), a.lse.contiguous(), *grads)
    library.backward(problem, upstream)
    if problem.starts is not None and problem.unsound is not None:
        for grad in grads:
            grad.masked_fill_(_padding_mask(problem.starts, grad)[:, None, None], 0)
            grad.masked_fill_(problem.unsound, math.nan)


def _padding_mask(starts: Tensor, x: Tensor) -> Tensor:
    """Return which tokens lie before the first sequence or after the last, bool [tokens]."""
    token = torch.arange(len(x), device=x.device)
    return (token < starts[0]) | (token >= starts[-1])


# ---- PyTorch ----------------------------------------------------------------------------------------------


def _cpu_forward(p: Problem, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        *p.by_heads(), 0.0, p.causal, scale=p.scale
    )
    return out.transpose(1, 2), logsumexp


def _cpu_backward(p: Problem, u: Upstream) -> None:
    out, dout = u.out.transpose(1, 2), u.dout.transpose(1, 2)
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, *p.by_heads(), out, u.lse, 0.0, p.causal, scale=p.scale
    )
    _store(grads, u)


def _flash_forward(p: Problem, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    out, logsumexp, *_ = aten._scaled_dot_product_flash_attention(*p.by_heads(), 0.0, p.causal, scale=p.scale)
    return out.transpose(1, 2), logsumexp[..., : lse.shape[-1]]  # some versions pad the number of queries


def _flash_backward(p: Problem, u: Upstream) -> None:
    seed, offset = (torch.empty(shape, dtype=torch.uint64, device=p.q.device) for shape in ((2,), ()))
    grads = aten._scaled_dot_product_flash_attention_backward(
        u.dout.transpose(1, 2), *p.by_heads(), u.out.transpose(1, 2), u.lse, None, None, p.q.shape[1],
        p.k.shape[1], 0.0, p.causal, seed, offset, scale=p.scale,
    )  # fmt: skip
    _store(grads, u)


def _store(grads: tuple[Tensor, ...], u: Upstream) -> None:
    """Copy gradients [batch, heads, tokens, dim] to the outputs."""
    for grad, into in zip(grads, (u.dq, u.dk, u.dv), strict=True):
        into.copy_(grad.transpose(1, 2))


def _cudnn_forward(p: Problem, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    out, logsumexp, *_ = aten._scaled_dot_product_cudnn_attention(
        *p.by_heads(), None, True, 0.0, p.causal, scale=p.scale
    )
    return out.transpose(1, 2), logsumexp.view(lse.shape)  # some versions add a dimension of size 1


def _no_flash() -> str | None:
    allowed = torch.backends.cuda.is_flash_attention_available() and torch.backends.cuda.flash_sdp_enabled()
    return None if allowed else "its flash kernel (torch.backends.cuda.enable_flash_sdp)"


def _no_cudnn() -> str | None:
    allowed = torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled()
    return None if allowed else "cuDNN (torch.backends.cuda.enable_cudnn_sdp)"


def _flash_backward_lacks(dim: int, v_dim: int) -> str | None:
    deterministic = (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    return None if deterministic else "a backward with the same bits in every run"


# ---- FlashAttention and AITER -------------------------------------------------------------------------------


class _Module(NamedTuple):
    """Module of a library, its functions, and arguments that identify a supported version."""

    path: str
    functions: tuple[tuple[str, tuple[str, ...]], ...]

    def missing(self) -> str | None:
        return _missing(self)

    def get(self, function: str) -> Any:
        return getattr(importlib.import_module(self.path), function)


@functools.cache
def _missing(module: _Module) -> str | None:
    """Return the reason why a module cannot be used, or None."""
    try:
        imported = importlib.import_module(module.path)
    except Exception as error:  # an extension built for another setup may raise anything
        absent = isinstance(error, ModuleNotFoundError)
        return f"the module {module.path}" + ("" if absent else f", which does not import ({error})")
    for name, arguments in module.functions:
        function = getattr(imported, name, None)
        if function is None or not set(arguments) <= _parameters(function, arguments):
            return f"a version of {module.path} whose {name} takes {', '.join(arguments)}"
    return None


def _parameters(function: Any, unless_known: tuple[str, ...]) -> set[str]:
    """Return the names of a function's parameters; `unless_known` if it takes **kwargs."""
    overload = getattr(function, "_opoverload", None)  # torch.library.custom_op
    if overload is not None:
        return {argument.name for argument in overload._schema.arguments}
    parameters = inspect.signature(function).parameters
    wrapped = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return set(unless_known) if wrapped else set(parameters)


_SIDES = ("window_size_left", "window_size_right")
_FA2 = _Module(
    "flash_attn.flash_attn_interface",
    (
        ("_flash_attn_forward", (*_SIDES, "softcap")),
        ("_flash_attn_varlen_forward", (*_SIDES, "softcap")),
        ("_flash_attn_backward", (*_SIDES, "deterministic")),
        ("_flash_attn_varlen_backward", (*_SIDES, "deterministic")),
    ),
)
_FA3 = _Module(
    "flash_attn_interface",
    (
        ("_flash_attn_forward", (*_SIDES, "cu_seqlens_q", "num_splits")),
        ("_flash_attn_backward", (*_SIDES, "is_causal", "deterministic")),
    ),
)
_FA4 = _Module(
    "flash_attn.cute.interface",
    (
        ("_flash_attn_fwd", (*_SIDES, "out", "lse", "return_lse")),
        ("_flash_attn_bwd", (*_SIDES, "deterministic", "dq", "dlse")),
    ),
)
_AITER = _Module(
    "aiter.ops.mha",
    (
        ("_flash_attn_forward", ("sink_size", "return_lse", "num_splits")),
        ("_flash_attn_backward", ("deterministic", "how_v3_bf16_cvt")),
    ),
)


def _fa2_forward(p: Problem, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    forward = _FA2.get("_flash_attn_forward" if p.starts is None else "_flash_attn_varlen_forward")
    fixed = {"dropout_p": 0.0, "alibi_slopes": None, "return_softmax": False}
    out, logsumexp, *_ = forward(p.q, p.k, p.v, **fixed, **p.options(-1))
    return out, logsumexp


def _fa2_backward(p: Problem, u: Upstream) -> None:
    backward = _FA2.get("_flash_attn_backward" if p.starts is None else "_flash_attn_varlen_backward")
    fixed = {"dropout_p": 0.0, "alibi_slopes": None, "deterministic": True}
    backward(u.dout, p.q, p.k, p.v, u.out, u.lse, u.dq, u.dk, u.dv, **fixed, **p.options(-1))


def _fa3_forward(p: Problem, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    # Do not pass out_=: PyTorch rejects a custom op whose result is one of its arguments.
    out, logsumexp, *_ = _FA3.get("_flash_attn_forward")(p.q, p.k, p.v, num_splits=1, **p.options(-1))
    return out, logsumexp


def _fa3_backward(p: Problem, u: Upstream) -> None:
    into = {"dq": u.dq, "dk": u.dk, "dv": u.dv}
    options = p.options(-1, causal="is_causal")
    backward = _FA3.get("_flash_attn_backward")
    backward(u.dout, p.q, p.k, p.v, u.out, u.lse, **into, deterministic=True, **options)


def _fa4_forward(p: Problem, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    into = {"out": y, "lse": lse} if p.starts is None else {}
    forward = _FA4.get("_flash_attn_fwd")
    out, logsumexp, *_ = forward(p.q, p.k, p.v, num_splits=1, return_lse=True, **into, **p.options(None))
    return out, logsumexp


def _fa4_backward(p: Problem, u: Upstream) -> None:
    into = {"dq": u.dq, "dk": u.dk, "dv": u.dv}
    backward = _FA4.get("_flash_attn_bwd")
    backward(p.q, p.k, p.v, u.out, u.dout, u.lse, **into, deterministic=True, **p.options(None))


_TO_NEAREST = 0  # rounding mode of AITER's assembly for bf16: to nearest even


def _aiter_forward(p: Problem, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    out, logsumexp, *_ = _AITER.get("_flash_attn_forward")(
        p.q, p.k, p.v, dropout_p=0.0, softmax_scale=p.scale, causal=p.causal, **p.window(-1), sink_size=0, bias=None,
        alibi_slopes=None, q_descale=None, k_descale=None, v_descale=None, return_lse=True, return_softmax=False,
        how_v3_bf16_cvt=_TO_NEAREST, num_splits=1,
    )  # fmt: skip
    return out, logsumexp


def _aiter_backward(p: Problem, u: Upstream) -> None:
    _AITER.get("_flash_attn_backward")(
        u.dout, p.q, p.k, p.v, u.out, u.lse, u.dq, u.dk, u.dv, dbias=None, dropout_p=0.0, softmax_scale=p.scale,
        causal=p.causal, **p.window(-1), bias=None, alibi_slopes=None, deterministic=True,
        how_v3_bf16_cvt=_TO_NEAREST,
    )  # fmt: skip


# ---- supported head widths --------------------------------------------------------------------------------


def _equal(dim: int, v_dim: int) -> bool:
    """Return whether dim and v_dim are equal, a multiple of 16 bytes, and at most 256 elements."""
    return dim == v_dim and dim % 8 == 0 and dim <= 256


def _fa2_widths(dim: int, v_dim: int) -> bool:
    # PyTorch cannot train heads wider than 192 and up to 224 on GeForce; widths between 224 and 256 are rare.
    return _equal(dim, v_dim) and (dim <= 192 or dim == 256)


def _fa3_widths(dim: int, v_dim: int) -> bool:
    latent = 128 < dim <= 192 and 96 < v_dim <= 128 and dim % 8 == v_dim % 8 == 0
    return _equal(dim, v_dim) or latent


def _fa4_widths(dim: int, v_dim: int) -> bool:
    return (max(dim, v_dim) <= 128 and dim % 8 == v_dim % 8 == 0) or (dim, v_dim) == (192, 128)


def _cudnn_widths(dim: int, v_dim: int) -> bool:
    return max(dim, v_dim) <= 128 and dim % 8 == v_dim % 8 == 0


NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
AMD = ("gfx942", "gfx950")

LIBRARIES: tuple[Library, ...] = (
    Library(
        "torch", "PyTorch on CPUs", ("cpu",), (), "upper_left",
        lambda dim, v_dim: dim == v_dim, lambda: None, _cpu_forward, _cpu_backward,
        dtypes=(*HALVES, torch.float32),
    ),
    Library(
        "torch", "cuDNN", ("sm_90", "sm_100", "sm_103"), (), "",
        _cudnn_widths, _no_cudnn, _cudnn_forward, None, keys=2,
    ),
    Library(
        "torch", "PyTorch flash", (*NVIDIA, *AMD), (), "",
        _fa2_widths, _no_flash, _flash_forward, _flash_backward, _flash_backward_lacks,
    ),
    Library(
        "fa2", "FlashAttention-2", NVIDIA, ("softcap", "window", "packed"), "lower_right",
        _fa2_widths, _FA2.missing, _fa2_forward, _fa2_backward,
    ),
    Library(
        "fa3", "FlashAttention-3", ("sm_90",), ("softcap", "window", "packed"), "lower_right",
        _fa3_widths, _FA3.missing, _fa3_forward, _fa3_backward,
        lambda dim, v_dim: None if dim <= 192 else "a backward with the same bits in every run for such wide heads",
    ),
    Library(
        "fa4", "FlashAttention-4", ("sm_90", "sm_100", "sm_103"), ("softcap", "window", "packed"), "lower_right",
        _fa4_widths, _FA4.missing, _fa4_forward, _fa4_backward,
    ),
    Library(
        "aiter", "AITER", AMD, (), "lower_right",
        _equal, _AITER.missing, _aiter_forward, _aiter_backward,
    ),
)  # fmt: skip

"""Kernels of other libraries that attend: what they have, and how they are called.

Argument lists are those of PyTorch 2.13.0, of flash-attn 2.8.4, FlashAttention-3 and -4 (the latter 4.0.0 beta 27) at
commit 0251105 of Dao-AILab/flash-attention, and of AITER at commit e404860 of ROCm/aiter. So are the limits, but for
PyTorch's on GPUs, which were read in other versions of its sources. What runs on a CPU is tested; what runs on a GPU
was never run by this project.

- A forward gives the result and lse; a backward takes what Weft's own takes, dlse apart. So a call may go forward with
  one and backward with another: y, lse and the inputs are all that either needs.
- Everything here gives the same bits in every run. PyTorch's flash kernel for GPUs does so in its backward only under
  `torch.use_deterministic_algorithms(True)`, and its call of cuDNN never: that one goes forward alone.
- None has to answer for a query without a key: libraries give it an lse of plus infinity, or a number, or divide by
  zero (PyTorch's for a CPU, which ends the process). `engines.obstacle` keeps such calls with Weft's own kernel.
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


# ---- a call as libraries take it --------------------------------------------------------------------------


class Problem(NamedTuple):
    """Heads [batch, tokens, heads, numbers], of packed sequences [tokens, heads, numbers]."""

    q: Tensor
    k: Tensor
    v: Tensor
    starts: Tensor | None  # int32 [sequences + 1]: where packed sequences begin, those of queries and of keys
    unsound: Tensor | None  # bool: `starts` are not as given, because these do not ascend or leave the tokens
    mask: Mask
    scale: float
    softcap: float

    @staticmethod
    def of(a: AttentionArgs | AttentionBackwardArgs) -> Problem:
        given, starts, unsound = a.packed.q_starts, None, None
        if given is not None:
            # Libraries read and write wherever starts lead to.
            read = starts_as_read(given, a.query.shape[0])
            starts, unsound = read.to(torch.int32).contiguous(), (read != given).any()
        q, k, v = (_heads(x, a.layout) for x in (a.query, a.key, a.value))
        return Problem(q, k, v, starts, unsound, a.mask, a.scale, a.softcap)

    @property
    def causal(self) -> bool:
        """The mask is that of `is_causal` alone."""
        return self.mask.left is None and self.mask.right == 0

    def window(self, unbounded: int | None) -> dict[str, int | None]:
        """The mask as FlashAttention takes it."""
        left, right = (None, None) if self.causal else self.mask[:2]
        return {
            "window_size_left": unbounded if left is None else left,
            "window_size_right": unbounded if right is None else right,
        }

    def options(self, unbounded: int | None, causal: str = "causal") -> dict[str, Any]:
        """What FlashAttention takes besides tensors of heads, where `causal` is the name of that argument. Of packed
        sequences the longest is not known here; it is no longer than all together."""
        found: dict[str, Any] = {"softmax_scale": self.scale, causal: self.causal, "softcap": self.softcap}
        found |= self.window(unbounded)
        if self.starts is not None:
            found |= {"cu_seqlens_q": self.starts, "cu_seqlens_k": self.starts}
            found |= {"max_seqlen_q": len(self.q), "max_seqlen_k": len(self.k)}
        return found

    def by_heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value as PyTorch takes them, [batch, heads, tokens, numbers]."""
        return self.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)


class Upstream(NamedTuple):
    """What a backward takes besides, and where the gradients of query, key and value go; heads as in `Problem`."""

    out: Tensor
    dout: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def _view(x: Tensor, layout: str) -> Tensor:
    """Heads as in `Problem`."""
    return x if layout == "thd" else canonical(x, layout)


def _heads(x: Tensor, layout: str) -> Tensor:
    """The same, for kernels that read 16 bytes at once; a copy if x does not allow that, or has one number for many."""
    x, step = _view(x, layout), 16 // x.element_size()
    neighbours = x.stride(-1) == 1 and not any(at % step for at in (x.storage_offset(), *x.stride()[:-1]))
    once = all(stride or size == 1 for stride, size in zip(x.stride(), x.shape, strict=True))
    return x if neighbours and once else x.clone(memory_format=torch.contiguous_format)


HALVES = (torch.bfloat16, torch.float16)

Forward = Callable[[Problem, Tensor, Tensor], tuple[Tensor, Tensor]]
Backward = Callable[[Problem, Upstream], None]


class Library(NamedTuple):
    """Some kernels: which calls they can take, and how to call them."""

    engine: str  # as `engine=` names it
    name: str
    targets: tuple[str, ...]
    options: tuple[str, ...]  # of "softcap", "window" and "packed"
    align: str  # the `causal_align` of masks over another number of keys than of queries; "" if it has none of them
    widths: Callable[[int, int], bool]  # whether it has heads of dim and v_dim
    missing: Callable[[], str | None]  # what of it this machine lacks
    forward: Forward  # of a problem, and of tensors for the result and lse, which it may use
    backward: Backward | None
    # What more its backward lacks, for heads of dim and v_dim.
    backward_lacks: Callable[[int, int], str | None] = lambda dim, v_dim: None
    keys: int = 1  # the fewest that it takes
    dtypes: tuple[torch.dtype, ...] = HALVES


def attend(library: Library, o: AttentionOutputs, a: AttentionArgs) -> None:
    """Fill the result and lse by the kernels of a library."""
    problem, y = Problem.of(a), _view(o.result.y, a.layout)
    out, lse = library.forward(problem, y, o.lse)
    if problem.starts is not None and problem.unsound is not None:
        # Nobody wrote to tokens of no sequence. Of starts that had to be changed nothing is kept.
        used = ~(_pads(problem.starts, y) | problem.unsound)
        lost = torch.where(problem.unsound, math.nan, 0.0)
        torch.where(used[:, None, None], out, lost.to(out.dtype), out=y)
        torch.where(used, lse, (lost - math.inf).to(lse.dtype), out=o.lse)
        return
    if out is not y:
        y.copy_(out)
    if lse is not o.lse:
        o.lse.copy_(lse)


def attend_backward(library: Library, o: AttentionGradients, a: AttentionBackwardArgs) -> None:
    """Fill the gradients of query, key and value by the kernels of a library, which knows only all of them."""
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
            grad.masked_fill_(_pads(problem.starts, grad)[:, None, None], 0)
            grad.masked_fill_(problem.unsound, math.nan)


def _pads(starts: Tensor, x: Tensor) -> Tensor:
    """bool [tokens]: those before the first sequence and after the last."""
    token = torch.arange(len(x), device=x.device)
    return (token < starts[0]) | (token >= starts[-1])


# ---- PyTorch ----------------------------------------------------------------------------------------------


def _cpu_forward(p: Problem, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    out, found = aten._scaled_dot_product_flash_attention_for_cpu(*p.by_heads(), 0.0, p.causal, scale=p.scale)
    return out.transpose(1, 2), found


def _cpu_backward(p: Problem, u: Upstream) -> None:
    out, dout = u.out.transpose(1, 2), u.dout.transpose(1, 2)
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, *p.by_heads(), out, u.lse, 0.0, p.causal, scale=p.scale
    )
    _store(found, u)


def _flash_forward(p: Problem, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    out, found, *_ = aten._scaled_dot_product_flash_attention(*p.by_heads(), 0.0, p.causal, scale=p.scale)
    return out.transpose(1, 2), found[..., : lse.shape[-1]]  # some versions round the number of queries up


def _flash_backward(p: Problem, u: Upstream) -> None:
    seed, offset = (torch.empty(shape, dtype=torch.uint64, device=p.q.device) for shape in ((2,), ()))
    found = aten._scaled_dot_product_flash_attention_backward(
        u.dout.transpose(1, 2), *p.by_heads(), u.out.transpose(1, 2), u.lse, None, None, p.q.shape[1],
        p.k.shape[1], 0.0, p.causal, seed, offset, scale=p.scale,
    )  # fmt: skip
    _store(found, u)


def _store(found: tuple[Tensor, ...], u: Upstream) -> None:
    """Keep gradients [batch, heads, tokens, numbers]."""
    for grad, into in zip(found, (u.dq, u.dk, u.dv), strict=True):
        into.copy_(grad.transpose(1, 2))


def _cudnn_forward(p: Problem, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    out, found, *_ = aten._scaled_dot_product_cudnn_attention(
        *p.by_heads(), None, True, 0.0, p.causal, scale=p.scale
    )
    return out.transpose(1, 2), found.view(lse.shape)  # in some versions with one more dimension, of one


def _no_flash() -> str | None:
    allowed = torch.backends.cuda.is_flash_attention_available() and torch.backends.cuda.flash_sdp_enabled()
    return None if allowed else "its flash kernel (torch.backends.cuda.enable_flash_sdp)"


def _no_cudnn() -> str | None:
    allowed = torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled()
    return None if allowed else "cuDNN (torch.backends.cuda.enable_cudnn_sdp)"


def _flash_varies(dim: int, v_dim: int) -> str | None:
    fixed = (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    return None if fixed else "a backward with the same bits in every run"


# ---- FlashAttention and AITER -------------------------------------------------------------------------------


class _Module(NamedTuple):
    """Where functions of a library are, and by which of their arguments the versions are known that are called here."""

    path: str
    functions: tuple[tuple[str, tuple[str, ...]], ...]

    def missing(self) -> str | None:
        return _missing(self)

    def get(self, function: str) -> Any:
        return getattr(importlib.import_module(self.path), function)


@functools.cache
def _missing(module: _Module) -> str | None:
    """What is wrong with a module, or None."""
    try:
        found = importlib.import_module(module.path)
    except Exception as error:  # whatever an extension that was built for something else raises
        absent = isinstance(error, ModuleNotFoundError)
        return f"the module {module.path}" + ("" if absent else f", which does not import ({error})")
    for name, arguments in module.functions:
        function = getattr(found, name, None)
        if function is None or not set(arguments) <= _parameters(function, arguments):
            return f"a version of {module.path} whose {name} takes {', '.join(arguments)}"
    return None


def _parameters(function: Any, unless_known: tuple[str, ...]) -> set[str]:
    """The names of a function's arguments."""
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
    more = {"dropout_p": 0.0, "alibi_slopes": None, "return_softmax": False}
    out, found, *_ = forward(p.q, p.k, p.v, **more, **p.options(-1))
    return out, found


def _fa2_backward(p: Problem, u: Upstream) -> None:
    backward = _FA2.get("_flash_attn_backward" if p.starts is None else "_flash_attn_varlen_backward")
    more = {"dropout_p": 0.0, "alibi_slopes": None, "deterministic": True}
    backward(u.dout, p.q, p.k, p.v, u.out, u.lse, u.dq, u.dk, u.dv, **more, **p.options(-1))


def _fa3_forward(p: Problem, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    # Its out_= is not for us: PyTorch refuses a custom op whose result is one of its arguments.
    out, found, *_ = _FA3.get("_flash_attn_forward")(p.q, p.k, p.v, num_splits=1, **p.options(-1))
    return out, found


def _fa3_backward(p: Problem, u: Upstream) -> None:
    into = {"dq": u.dq, "dk": u.dk, "dv": u.dv}
    options = p.options(-1, causal="is_causal")
    backward = _FA3.get("_flash_attn_backward")
    backward(u.dout, p.q, p.k, p.v, u.out, u.lse, **into, deterministic=True, **options)


def _fa4_forward(p: Problem, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    into = {"out": y, "lse": lse} if p.starts is None else {}
    forward = _FA4.get("_flash_attn_fwd")
    out, found, *_ = forward(p.q, p.k, p.v, num_splits=1, return_lse=True, **into, **p.options(None))
    return out, found


def _fa4_backward(p: Problem, u: Upstream) -> None:
    into = {"dq": u.dq, "dk": u.dk, "dv": u.dv}
    backward = _FA4.get("_flash_attn_bwd")
    backward(p.q, p.k, p.v, u.out, u.dout, u.lse, **into, deterministic=True, **p.options(None))


_TO_NEAREST = 0  # how AITER's assembly rounds to bf16: to nearest even


def _aiter_forward(p: Problem, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    out, found, *_ = _AITER.get("_flash_attn_forward")(
        p.q, p.k, p.v, dropout_p=0.0, softmax_scale=p.scale, causal=p.causal, **p.window(-1), sink_size=0, bias=None,
        alibi_slopes=None, q_descale=None, k_descale=None, v_descale=None, return_lse=True, return_softmax=False,
        how_v3_bf16_cvt=_TO_NEAREST, num_splits=1,
    )  # fmt: skip
    return out, found


def _aiter_backward(p: Problem, u: Upstream) -> None:
    _AITER.get("_flash_attn_backward")(
        u.dout, p.q, p.k, p.v, u.out, u.lse, u.dq, u.dk, u.dv, dbias=None, dropout_p=0.0, softmax_scale=p.scale,
        causal=p.causal, **p.window(-1), bias=None, alibi_slopes=None, deterministic=True,
        how_v3_bf16_cvt=_TO_NEAREST,
    )  # fmt: skip


# ---- what each has ----------------------------------------------------------------------------------------


def _equal(dim: int, v_dim: int) -> bool:
    """Heads of one width, in units of 16 bytes, up to 256 numbers."""
    return dim == v_dim and dim % 8 == 0 and dim <= 256


def _fa2_widths(dim: int, v_dim: int) -> bool:
    # PyTorch refuses to train with up to 224 on GeForce; those in between are rare.
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
        _fa2_widths, _no_flash, _flash_forward, _flash_backward, _flash_varies,
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

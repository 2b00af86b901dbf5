"""Workloads of gated linear units: feed-forward layers, shared experts, and grouped experts in one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops import glu, glu_backward
from ..chain import chain, codes_and_scales
from ..family import Family
from ..problem import Call, Inputs, Size, Workload
from ..symbolic.loaded import Loaded
from ..truth import EPS32, ROUNDINGS, Near, arguments
from .quantize import quantize_both, y_and_amax

# Shapes of y, named by the model they come from. "rows" are tokens, or pairs of a token and an expert.
SHAPES: dict[str, tuple[Size, ...]] = {
    "linghe/shared-expert": ("rows", 512),
    "linghe/experts": ("rows", 1024),
    "llama3-8b/ffn": ("rows", 14336),
    "qwen3-30b-a3b/experts": ("rows", 768),
    "deepseek-v3/experts": ("rows", 2048),
    "gpt-oss-20b/experts": ("rows", 2880),
    "gemma2-9b/ffn": ("rows", 14336),
    "nemotron-4-15b/ffn": ("rows", 24576),
    "odd/1": ("rows", 1),
    "odd/33": ("rows", 33),
    "odd/200": (2, "rows", 200),
}

# Sets of options: arguments of the function, and these settings of a workload:
#   tensors     which of up, probs and bias to create
#   experts     the number of experts; their row counts are random, and the last but one has no rows
OPTIONS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "geglu-tanh": {"act": "gelu_tanh", "tensors": ("up",)},
    "geglu": {"act": "gelu", "tensors": ("up", "probs")},
    "reglu": {"act": "relu"},
    "relu2": {"act": "relu2", "layout": "none"},
    "mish": {"act": "mish", "layout": "none"},
    "elu": {"act": "elu", "alpha": 0.5},
    "gpt-oss": {
        "layout": "interleaved", "limit": 7.0, "alpha": 1.702, "up_offset": 1.0, "experts": 32, "align": 1,
    },
    "gpt-oss-bias": {
        "tensors": ("bias",), "layout": "interleaved", "limit": 7.0, "alpha": 1.702, "up_offset": 1.0, "experts": 32,
        "align": 1,
    },
    "mlp-bias": {"act": "gelu_tanh", "layout": "none", "tensors": ("bias",)},
    "experts": {"tensors": ("probs",), "experts": 128, "align": 16},
    "1x128": {"quantize": "1x128"},
    "1x128-both": {"quantize": "1x128", "columnwise": True},
    "1x128-both-experts": {
        "tensors": ("probs",), "experts": 32, "align": 16, "quantize": "1x128", "columnwise": True,
    },
    "1x128-both-bias": {
        "tensors": ("probs", "bias"), "experts": 32, "align": 16, "quantize": "1x128", "columnwise": True,
    },
    "1x128-both-experts-128": {
        "tensors": ("probs",), "experts": 256, "align": 128, "quantize": "1x128", "columnwise": True,
    },
    "mx-both-interleaved": {"layout": "interleaved", "quantize": "mx", "columnwise": True},
    "nvfp4": {"quantize": "nvfp4"},
    "row-fp8": {"quantize": "row"},
    "static-fp8": {"quantize": "tensor", "quant_scale": 0.02},
}  # fmt: skip

_TRAINED: dict[str, tuple[tuple[str, int], ...]] = {
    "swiglu": (("llama3-8b/ffn", 8192), ("odd/33", 8192), ("odd/1", 8192)),
    "geglu-tanh": (("gemma2-9b/ffn", 8192),),
    "geglu": (("odd/200", 8192),),
    "reglu": (("odd/200", 8192),),
    "relu2": (("nemotron-4-15b/ffn", 8192),),
    "mish": (("odd/200", 8192),),
    "elu": (("odd/33", 8192),),
    "gpt-oss": (("gpt-oss-20b/experts", 32768),),
    "gpt-oss-bias": (("gpt-oss-20b/experts", 32768),),
    "mlp-bias": (("odd/200", 8192),),
    "experts": (("qwen3-30b-a3b/experts", 65536), ("odd/33", 8192)),
    "1x128-both": (("linghe/shared-expert", 16384), ("odd/200", 8192)),
    "1x128-both-experts": (("linghe/experts", 131072),),
    "1x128-both-bias": (("linghe/experts", 131072),),
    "1x128-both-experts-128": (("deepseek-v3/experts", 65536),),
    "mx-both-interleaved": (("llama3-8b/ffn", 8192), ("odd/33", 8192)),
}
_SERVED: dict[str, tuple[str, ...]] = {
    "swiglu": ("llama3-8b/ffn",),
    "1x128": ("qwen3-30b-a3b/experts",),
    "nvfp4": ("llama3-8b/ffn", "odd/33"),
    "row-fp8": ("llama3-8b/ffn",),
    "static-fp8": ("llama3-8b/ffn",),
}


def ends_of_experts(inputs: Inputs, rows: int, experts: int, align: int) -> Tensor:
    """Return the ends of experts that share `rows` rows, or nearly all of them: similar counts, and one expert without
    rows."""
    if inputs.device.type == "meta":
        return torch.empty(experts, dtype=torch.int32, device="meta")
    share = torch.rand(experts, generator=torch.Generator().manual_seed(experts)) + 0.5
    share[-2 if experts > 1 else 0] = 0
    filled = rows if align == 1 else max(rows - align * experts, -(-rows // 2))
    bounds = (share.cumsum(0) / share.sum() * filled).round().long().tolist()
    ends, start, before = [], 0, 0
    for bound in bounds:
        ends.append(min(start + bound - before, rows))
        start, before = -(-ends[-1] // align) * align, bound
    return torch.tensor(ends, dtype=torch.int32, device=inputs.device)


def _arguments(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> dict[str, Any]:
    settings = dict(workload.settings)
    tensors = settings.pop("tensors", ())
    single = "up" in tensors or settings.get("layout") == "none"
    kwargs: dict[str, Any] = {"x": inputs.normal(*shape[:-1], shape[-1] * (1 if single else 2), std=2.0)}
    if "up" in tensors:
        kwargs["up"] = inputs.normal(*shape)
    if "probs" in tensors:
        kwargs["probs"] = inputs.normal(*shape[:-1], mean=0.3, std=0.1, dtype=torch.float32)
    experts = settings.pop("experts", None)
    if "bias" in tensors:
        kwargs["bias"] = inputs.normal(*([] if experts is None else [experts]), kwargs["x"].shape[-1])
    if experts is not None:
        kwargs["ends"] = ends_of_experts(inputs, math.prod(shape[:-1]), experts, settings["align"])
    if "quant_scale" in settings:
        mean = settings.pop("quant_scale")
        kwargs["quant_scale"] = inputs.normal(1, mean=mean, std=0.0, dtype=torch.float32)
    return {**kwargs, **settings}


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    return Call(glu, _arguments(workload, inputs, shape))


def _build_backward(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    return Call(glu_backward, {"dy": inputs.normal(*shape), **_arguments(workload, inputs, shape)})


def _rereads(op: str, settings: dict[str, Any], hidden: Size) -> dict[str, Any]:
    """Return `moves` and `rereads` of a workload that moves more than the minimum of bytes."""
    assert isinstance(hidden, int)
    separate = settings.get("layout") or "up" in settings.get("tensors", ())
    moves, why = 1.02, ""
    if settings.get("quantize") == "nvfp4":
        moves, why = (
            1.89 if hidden % 16 == 0 else 2.75,
            "the amax of the whole tensor comes before its first code",
        )
    elif op == "glu_backward" and "quantize" in settings and not separate and hidden % 128:
        why = (
            "a block has the end of the gate's gradient and the beginning of up's: fp32 gradients lie between"
        )
        moves = 2.7
    elif op == "glu_backward" and "bias" in settings.get("tensors", ()):
        moves, why = 1.05, "the sums of stripes of rows, which the gradient of the bias is made of"
    elif hidden % 16 and not separate:
        moves, why = 1.85, "gate and up begin inside sectors, which count for both"
    return {"rereads": why, "moves": moves}


def _named() -> list[Workload]:
    workloads = []
    for options, shapes in _TRAINED.items():
        for name, rows in shapes:
            for op, build in (("glu", _build), ("glu_backward", _build_backward)):
                tags = frozenset({"training"} if op == "glu" else {"training", "backward"})
                settings = OPTIONS[options]
                workloads.append(
                    Workload(
                        op, name, options, SHAPES[name], rows, build, tags, settings=tuple(settings.items()),
                        **_rereads(op, settings, SHAPES[name][-1]),
                    )
                )  # fmt: skip
    for options, names in _SERVED.items():
        workloads += [
            Workload(
                "glu", name, options, SHAPES[name], rows, _build, frozenset({"inference"}),
                settings=tuple(OPTIONS[options].items()),
                **_rereads("glu", OPTIONS[options], SHAPES[name][-1]),
            )
            for name in names
            for rows in (1, 8, 64)
        ]  # fmt: skip
    return workloads


WORKLOADS: tuple[Workload, ...] = tuple(_named())


# ---- truth, from PyTorch's own activations --------------------------------------------------------------------

FEW = ROUNDINGS * EPS32
EPS64 = torch.finfo(torch.float64).eps
TINY = 2.0**-125  # where exp of fp32 ends


def activation(act: str, alpha: float = 1.0) -> Callable[[Tensor], Tensor]:
    """Return PyTorch's own activation, for float64."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": lambda a: a * torch.sigmoid(alpha * a),
        "sigmoid": lambda a: torch.sigmoid(alpha * a),
        "gelu": lambda a: 0.5 * a * torch.special.erfc(-math.sqrt(0.5) * a),  # F.gelu's 1 + erf loses digits
        "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
        "relu": F.relu,
        "relu2": lambda a: F.relu(a).square(),
        "quick_gelu": lambda a: a * torch.sigmoid(1.702 * a),
        "elu": lambda a: F.elu(a, alpha),
        "tanh": torch.tanh,
        "softplus": lambda a: F.softplus(a, threshold=700.0),
        "log_sigmoid": F.logsigmoid,
        "mish": F.mish,
    }
    return functions[act]


def _noise(a: Tensor, act: str, alpha: float) -> tuple[Tensor, Tensor]:
    """Return the possible fp32 errors of f(a) and f'(a).

    Rounding an exponent z changes the power by |z| roundings, and a difference from 1 has the precision of 1."""
    if act in ("silu", "sigmoid", "quick_gelu"):
        z = (1.702 if act == "quick_gelu" else alpha) * a
        s = torch.sigmoid(z)
        steps = FEW * (1 + z.abs())
        if act == "sigmoid":
            return steps * s + TINY, steps * alpha * s + TINY
        return steps * (a * s).abs() + TINY * a.abs(), steps * s * (1 + z.abs()) + TINY
    if act == "gelu":
        cdf = 0.5 * torch.special.erfc(-math.sqrt(0.5) * a)
        bend = a.abs() * torch.exp(-a.square() / 2) / math.sqrt(2 * math.pi)
        return FEW * (a * cdf).abs() + TINY, FEW * (cdf + bend) + TINY
    if act == "gelu_tanh":
        z = 2 * math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)
        s = torch.sigmoid(z)
        steps = FEW * (1 + z.abs())
        bend = 1 + 2 * a.abs() * (1 + 0.134145 * a**2)
        # PyTorch's 1 + tanh(u) in float64 loses digits that s keeps.
        return steps * (a * s).abs() + EPS64 * a.abs(), (steps * s + EPS64) * bend
    e = torch.exp(-a.abs())
    steps = FEW * (1 + a.abs()) * e + TINY  # the error of e
    if act == "elu":
        return FEW * F.elu(a, alpha).abs(), torch.where(a > 0, 0.0, abs(alpha) * steps)
    if act == "tanh":  # PyTorch's slope 1 - tanh^2 in float64 loses digits
        return FEW * torch.tanh(a).abs(), 8 * steps * e + EPS64
    if act in ("softplus", "log_sigmoid"):
        value = activation(act)(a).abs()
        return FEW * value + steps, FEW * torch.sigmoid(a if act == "softplus" else -a) + steps
    if act == "mish":
        gate = torch.tanh(F.softplus(a))
        return a.abs() * (FEW * gate + steps), FEW * gate + steps * (1 + 4 * a.abs())
    return FEW * F.relu(a).maximum(F.relu(a).square()), FEW * F.relu(a)


def glu_truth(call: Call, dy: Tensor | None = None) -> dict[str, Near]:
    """Return y, and with an upstream gradient the gradients of x, up, probs and bias."""
    from ..copies import regions

    a: dict[str, Any] = arguments(call)
    leaves = {
        name: a[name].detach().double().requires_grad_()
        for name in ("x", "up", "probs", "bias")
        if a[name] is not None
    }
    x = leaves["x"]
    # The expert of each row; without experts always the first.
    owner = torch.full((math.prod(x.shape[:-1]),), -1)
    for expert, (start, end, _) in enumerate(regions(len(owner), a["ends"], a["align"])):
        owner[start:end] = expert
    if "bias" in leaves:
        x = x + leaves["bias"].view(-1, x.shape[-1])[owner.clamp(min=0)].view(x.shape)
    if a["layout"] == "none":
        gate, up = x, None
    elif "up" in leaves:
        gate, up = x, leaves["up"]
    elif a["layout"] == "concat":
        gate, up = x.chunk(2, -1)
    else:
        gate, up = x[..., 0::2], x[..., 1::2]
    lead = gate.shape[:-1]
    real = (owner >= 0).view(*lead, 1)
    gate = torch.where(real, gate, 0.0)  # padding is never read
    up = up if up is None else torch.where(real, up, 0.0)
    inside, value = gate, up
    if a["limit"] is not None:
        inside = gate.clamp(max=a["limit"])
        value = None if up is None else up.clamp(-a["limit"], a["limit"])
    alpha = float(a["alpha"])
    factor = torch.ones_like(inside) if value is None else value + a["up_offset"]
    probs = torch.ones(*lead, 1, dtype=torch.float64)
    if "probs" in leaves:
        probs = torch.where(real, leaves["probs"].view(*lead, 1), 0.0)
    active = activation(a["act"], alpha)(inside)
    y = torch.where(real, active * factor * probs, 0.0)
    with torch.no_grad():
        f_noise, slope_noise = _noise(inside.detach(), a["act"], alpha)
        # f' itself, from a gradient of ones through f
        twin = inside.detach().clone().requires_grad_()
        with torch.enable_grad():
            activation(a["act"], alpha)(twin).sum().backward()
        assert twin.grad is not None
        slope = twin.grad.abs()
        if "bias" in leaves:  # gate and up are sums in fp32; no f'' is larger than 2, for alpha up to 2
            rounding = EPS32 * inside.detach().abs()
            f_noise, slope_noise = f_noise + slope * rounding, slope_noise + 2 * rounding
        noise = torch.where(real, f_noise * (factor * probs).abs() + FEW * y.abs(), 0.0)
    expected = {"y": Near(y.detach(), noise)}
    if dy is None:
        return expected
    d = torch.where(real, dy.detach().double(), 0.0)
    y.backward(d)
    with torch.no_grad():
        dgate = (d * probs * factor).abs() * (slope_noise + FEW * slope)
        dup = (d * probs).abs() * (f_noise + FEW * active.abs())
        noises = {"x": dgate, "up": dup}
        if up is not None and "up" not in leaves:
            noises["x"] = (
                torch.cat([dgate, dup], -1)
                if a["layout"] == "concat"
                else torch.stack([dgate, dup], -1).flatten(-2)
            )
        if "probs" in leaves:
            terms = (d * factor).abs() * (f_noise + FEW * active.abs())
            noises["probs"] = terms.sum(-1).view(leaves["probs"].shape)
        if "bias" in leaves:
            assert leaves["x"].grad is not None
            terms = (noises["x"] + FEW * leaves["x"].grad.abs()).view(len(owner), -1)
            sums = torch.zeros_like(leaves["bias"]).view(-1, terms.shape[1])
            noises["bias"] = sums.index_add(0, owner.clamp(min=0), terms).view_as(leaves["bias"])
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        expected[f"d{name}"] = Near(leaf.grad, noises[name])
    return expected


def _forward_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return y and its amax, and the gradients of the inputs."""
    expected: dict[str, Near | Tensor] = {**glu_truth(call, gradients.get("y"))}
    y = expected["y"]
    assert isinstance(y, Near)
    return {**expected, "amax": Near(y.truth.abs().amax(), y.noise.amax())}


def _backward_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the gradients of the formula for a call of the op the way autograd does."""
    forward = {k: v for k, v in call.kwargs.items() if k not in ("dy", "quantize", "columnwise")}
    return {**glu_truth(Call(glu, forward), call["dy"])}


# ---- in plain PyTorch -----------------------------------------------------------------------------------------


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _swiglu_gradients(x: Tensor, dy: Tensor, prob: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, in fp32, and of the probabilities."""
    (gate, up), d = x.float().chunk(2, -1), dy.float()
    share = torch.sigmoid(gate)
    f = gate * share
    weighted = d if prob is None else d * prob[:, None]
    dx = torch.cat([weighted * up * share * (1 + gate * (1 - share)), weighted * f], -1)
    return dx, (d * f * up).sum(-1)


def _swiglu_backward(x: Tensor, dy: Tensor) -> Tensor:
    return _swiglu_gradients(x, dy)[0].to(x.dtype)


def _swiglu_both(x: Tensor, prob: Tensor | None = None) -> tuple[Tensor, ...]:
    gate, up = x.float().chunk(2, -1)
    y = F.silu(gate) * up
    return quantize_both(y if prob is None else y * prob[:, None])


def _swiglu_backward_both(x: Tensor, dy: Tensor, prob: Tensor | None = None) -> tuple[Tensor, ...]:
    dx, dprob = _swiglu_gradients(x, dy, prob)
    copies = quantize_both(dx)
    return copies if prob is None else (*copies, dprob)


def _compared_gradients(result: Any) -> list[Any]:
    """Return codes and scales, and the gradient of the probabilities if there is one."""
    parts = codes_and_scales(result.x)
    return parts if result[2] is None else [*parts, result[2]]


# ---- kernels --------------------------------------------------------------------------------------------------

# Both copies of a gradient of gate and up at 1x128 take 255 registers of 256 threads. sm_80 and sm_89 encode by
# integer arithmetic, which takes more.
_SPILLS = {
    ("glu_backward_kernel", "sm_80"): 320,
    ("glu_backward_kernel", "sm_89"): 320,
    ("glu_backward_kernel", "sm_100"): 32,
    ("glu_backward_kernel", "sm_120"): 32,
}

# Ends of the rows of each group.
_ENDS = Loaded(least=0, most="rows", ascending=True)


FAMILY = Family(
    workloads=WORKLOADS,
    truths={"glu": _forward_truth, "glu_backward": _backward_truth},
    results={glu: y_and_amax},
    chains={
        ("glu", "swiglu"): chain(_swiglu, "x"),
        ("glu", "1x128-both"): chain(_swiglu_both, "x", view=codes_and_scales),
        ("glu", "1x128-both-experts"): chain(_swiglu_both, "x", "probs", view=codes_and_scales),
        ("glu_backward", "swiglu"): chain(_swiglu_backward, "x", "dy", view=lambda result: result.x),
        ("glu_backward", "1x128-both"): chain(_swiglu_backward_both, "x", "dy", view=_compared_gradients),
        ("glu_backward", "1x128-both-experts"): chain(
            _swiglu_backward_both, "x", "dy", "probs", view=_compared_gradients
        ),
    },
    spills=_SPILLS,
    loaded={
        (kernel, "groups.ends"): _ENDS for kernel in ("glu_kernel", "glu_backward_kernel", "_sum_runs_kernel")
    },
)

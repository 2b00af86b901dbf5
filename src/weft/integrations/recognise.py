"""What a module computes, found by trying it.

Libraries write the same few layers under many names, and the same name for different arithmetic: of the classes named
RMSNorm in transformers most round before they multiply with the weight, some after it, and some add 1 to the weight. So
no list of names is kept here. A module's own `forward` is run once on a small input, in place of its parameters with
random ones of the same names, and what Weft computes with each of a few options is compared with it. A module that none
of them reproduces is left alone, and the reason is told.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ..ops import Rotation, glu, layer_norm, rms_norm, rope, route, router_linear
from ..ops.common.activations import Act
from ..runtime import backend


class NormOptions(NamedTuple):
    """How `weft.rms_norm` or `weft.layer_norm` computes what a module does."""

    kind: str  # "rms" or "layer"
    eps: float | None
    weight_offset: float
    casting: str
    promotes: bool  # the result has the dtype that x and weight promote to, not x's

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        norm: Any = rms_norm if self.kind == "rms" else layer_norm
        found: Tensor = norm(
            x,
            weight,
            bias,
            eps=self.eps,
            weight_offset=self.weight_offset,
            casting=self.casting,
            out_dtype="promote" if self.promotes else None,
        )
        return found

    def __str__(self) -> str:
        words = [f"{self.kind}_norm", f"eps={self.eps:g}" if self.eps is not None else "eps=None"]
        if self.weight_offset:
            words.append(f"weight_offset={self.weight_offset:g}")
        if self.casting != "fp32":
            words.append(f"casting={self.casting!r}")
        return " ".join(words)


class UnitOptions(NamedTuple):
    """How `weft.glu` computes what a module does between its two products."""

    act: Act
    layout: str = "concat"
    limit: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0

    def __str__(self) -> str:
        words = [self.act] + [
            f"{n}={v}" for n, v in self._asdict().items() if v != self._field_defaults.get(n, v)
        ]
        return "glu " + " ".join(words)


class LeftAlone(Exception):
    """Why a module is not replaced."""


# ---- norms ----------------------------------------------------------------------------------------------


def recognise_norm(module: nn.Module) -> NormOptions:
    """The options that reproduce a norm. Raises `LeftAlone` if there are none."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    if any(True for _ in module.children()) or not set(shapes) <= {"weight", "bias"}:
        raise LeftAlone(f"it has more than a weight and a bias: {', '.join([*shapes, *module._modules])}")
    if any(len(shape) != 1 for shape in shapes.values()):
        raise LeftAlone(f"its parameters are no vectors: {shapes}")
    key = (type(module), tuple(shapes.items()), _numbers(module))
    found = _known_norms.get(key)
    if found is None:
        found = _known_norms[key] = _try_norm(module, shapes)
    if isinstance(found, str):
        raise LeftAlone(found)
    return found


# What was found for norms of one class, size and configuration: options, or why there are none.
_known_norms: dict[tuple[Any, ...], NormOptions | str] = {}


def _numbers(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The numbers, flags and names that a module was made with."""
    plain = (bool, int, float, str, type(None), tuple, torch.dtype)
    kept = {
        n: v
        for n, v in vars(module).items()
        if isinstance(v, plain) and n != "training" and not n.startswith("_")
    }
    return tuple(sorted((n, v) for n, v in kept.items() if not isinstance(v, tuple) or _hashable(v)))


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _try_norm(module: nn.Module, shapes: dict[str, tuple[int, ...]]) -> NormOptions | str:
    width = next(iter(shapes.values()), (64,))[0]
    draw = torch.Generator().manual_seed(0)
    # Rows of many sizes: where they are small, eps shows.
    sizes = torch.logspace(-4, 1, 32)[:, None]
    x = torch.randn(32, width, generator=draw) * sizes
    given = {name: torch.rand(width, generator=draw) + 0.5 for name in shapes}

    def run(x_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
        probe = _probe(module, {name: value.to(dtype) for name, value in given.items()})
        found = type(module).forward(probe, x.to(x_dtype))
        if not isinstance(found, Tensor) or found.shape != x.shape:
            raise TypeError("its result has another shape than its input")
        return found

    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            half, single, mixed = (run(*d) for d in ((_BF16, _BF16), (_FP32, _FP32), (_BF16, _FP32)))
    except Exception as error:  # whatever a forward of somebody else raises on a small input
        return _could_not_be_tried(error)
    if half.dtype != _BF16 or single.dtype != _FP32 or mixed.dtype not in (_BF16, _FP32):
        return f"its results have the dtypes {half.dtype}, {single.dtype} and {mixed.dtype}"
    promotes = bool(given) and mixed.dtype == _FP32

    def reproduces(options: NormOptions) -> bool:
        def mine(x_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
            cast = {name: value.to(dtype) for name, value in given.items()}
            return options(x.to(x_dtype), cast.get("weight"), cast.get("bias"))

        # An fp32 sum in another order flips few roundings, and moves each of them by one place. Another order of
        # roundings flips a tenth of them.
        found = mine(_BF16, _BF16)
        differ = (found != half).float().mean()
        places = (found.view(torch.int16).int() - half.view(torch.int16).int()).abs().max()
        exact = torch.allclose(mine(_FP32, _FP32), single, rtol=4e-6, atol=1e-6)
        return bool(differ <= 2e-3 and places <= 1 and exact)

    with torch.no_grad(), backend("reference"):
        for options in _norm_candidates(dict(_numbers(module)), promotes):
            if reproduces(options):
                return options
    return "none of the options of rms_norm and layer_norm reproduces it"


_BF16, _FP32 = torch.bfloat16, torch.float32


def _norm_candidates(numbers: dict[str, Any], promotes: bool) -> Iterator[NormOptions]:
    small = {v for v in numbers.values() if isinstance(v, float) and 0.0 <= v < 1e-2}
    epsilons: list[float | None] = [*sorted(small), *([None] if numbers.get("eps", 0) is None else [])]
    for kind, eps, casting, offset in itertools.product(
        ("rms", "layer"), epsilons, ("llama", "fp32"), (0.0, 1.0)
    ):
        if kind == "rms" or eps is not None:
            yield NormOptions(kind, eps, offset, casting, promotes)


def _probe(module: nn.Module, parameters: dict[str, Tensor]) -> nn.Module:
    """A module like this one on the CPU, with other parameters."""
    own = {
        name: None if old is None else nn.Parameter(parameters[name], requires_grad=False)
        for name, old in module._parameters.items()
    }
    buffers = {name: None if b is None else b.to("cpu") for name, b in module._buffers.items()}
    return _stand_in(module, _parameters=own, _buffers=buffers)


def _stand_in(module: nn.Module, **replaced: Any) -> nn.Module:
    """A module like this one, with the forward of its class and other attributes. The module itself stays as it is."""
    found = copy.copy(module)
    found.__dict__ = {n: v for n, v in module.__dict__.items() if n != "forward"} | replaced
    return found


# ---- gated units ----------------------------------------------------------------------------------------


def recognise_unit(
    function: Callable[[Tensor], Tensor], numbers: dict[str, Any], layouts: tuple[str, ...]
) -> UnitOptions:
    """The gated unit that reproduces a function of float64 numbers [rows, 32]. `numbers`: those that its module was
    made with; its limit may be among them. Raises `LeftAlone` if there is none."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-1, 3, 64, dtype=torch.float64)[:, None]
    x = torch.randn(64, 32, generator=draw, dtype=torch.float64) * sizes
    try:
        with torch.no_grad():
            wanted = function(x)
    except Exception as error:  # whatever a forward of somebody else raises on a small input
        raise LeftAlone(_could_not_be_tried(error)) from error
    real = {float(v) for v in numbers.values() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    limits: list[float | None] = [None, *sorted(v for v in real if 0.5 <= v <= 1000)]
    alphas = [1.0, *sorted(v for v in real if 0.1 <= v <= 10 and v != 1.0)]
    with torch.no_grad(), backend("reference"):
        for act, layout, limit, alpha, offset in itertools.product(
            get_args(Act), layouts, limits, alphas, (0.0, 1.0)
        ):
            if (alpha != 1.0 and act not in ("silu", "sigmoid")) or (layout == "none" and offset):
                continue
            options = UnitOptions(act, layout, limit, alpha, offset)
            found = glu(x, **options._asdict())
            # Some models compute their unit in fp32.
            if found.shape == wanted.shape and torch.allclose(found, wanted.double(), rtol=1e-5, atol=1e-5):
                return options
    raise LeftAlone("none of the options of glu reproduces it")


def _could_not_be_tried(error: Exception) -> str:
    return f"it could not be tried: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


# The projections of a feed-forward layer, as models name them: gate and up, apart or in one, and down.
PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("gate_up_proj", "down_proj"))


class MLPOptions(NamedTuple):
    """How a feed-forward layer is computed."""

    projections: tuple[str, ...]
    unit: UnitOptions

    def __str__(self) -> str:
        return str(self.unit)


def projections_of(module: nn.Module) -> tuple[str, ...] | None:
    """The names of the projections, if this looks like a feed-forward layer with a gate."""
    for names in PROJECTIONS:
        if all(hasattr(module._modules.get(name), "out_features") for name in names):
            return names
    return None


def recognise_mlp(module: nn.Module) -> MLPOptions:
    """The gated unit of a feed-forward layer. Raises `LeftAlone` if it computes something else.

    Its projections are replaced in the trial by ones that copy: gate and up are columns of the input then, and the
    result is what comes between them and down."""
    names = projections_of(module)
    assert names is not None
    one = len(names) == 2
    stand_ins = [_Columns(slice(None))] if one else [_Columns(slice(0, 16)), _Columns(slice(16, 32))]
    children = dict(zip(names, [*stand_ins, _Columns(slice(None))], strict=True))
    probe = _stand_in(module, _modules=module._modules | children, training=False)
    layouts = ("concat", "interleaved") if one else ("concat",)
    unit = recognise_unit(functools.partial(type(module).forward, probe), dict(_numbers(module)), layouts)
    return MLPOptions(names, unit)


class _Columns(nn.Module):
    """Some columns of the input, in place of a projection."""

    def __init__(self, columns: slice) -> None:
        super().__init__()
        self.columns = columns
        self.weight = nn.Parameter(torch.zeros(1, 1, dtype=torch.float64), requires_grad=False)
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.columns]


# ---- experts --------------------------------------------------------------------------------------------


def recognise_experts(module: nn.Module) -> UnitOptions:
    """The gated unit of experts in transformers' form. Raises `LeftAlone` if Weft cannot compute them.

    Such a module says by its attributes how its weights are stored; what it does between its products is `_apply_gate`,
    or `act_fn` if nothing is gated."""
    if getattr(module, "has_post_expert_norm", False):
        raise LeftAlone("it has a norm after each expert")
    if not module.has_gate:
        return recognise_unit(module.act_fn, {}, ("none",))  # type: ignore[arg-type]
    layout = "concat" if module.is_concatenated else "interleaved"
    return recognise_unit(module._apply_gate, dict(_numbers(module)), (layout,))  # type: ignore[arg-type]


# ---- routers --------------------------------------------------------------------------------------------


class RouterOptions(NamedTuple):
    """How `weft.router_linear` and `weft.route` compute what a router of transformers does."""

    k: int
    convention: str
    renormalize: bool | None
    scale: float
    groups: int
    group_topk: int | None
    own_logits: bool  # the logits that it returns have the dtype of its input, and not fp32
    own_weights: bool  # and so have the weights

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = router_linear(x.reshape(-1, x.shape[-1]), weight, bias)
        routing = route(
            logits,
            self.k,
            convention=self.convention,
            renormalize=self.renormalize,
            scale=self.scale,
            groups=self.groups,
            group_topk=self.group_topk,
            bias=correction,
            out_dtype=x.dtype if self.own_weights else None,
            index_dtype=torch.int64,
        )
        return logits.to(x.dtype) if self.own_logits else logits, routing.weights, routing.indices

    def __str__(self) -> str:
        words = [f"route k={self.k}", f"convention={self.convention!r}"]
        words += ["renormalize=False"] * (self.renormalize is False)
        words += [f"scale={self.scale:g}"] * (self.scale != 1.0)
        words += [f"groups={self.groups} group_topk={self.group_topk}"] * (self.groups > 1)
        return " ".join(words)


CORRECTION = "e_score_correction_bias"  # added to the scores that experts are chosen by


def is_router(module: nn.Module) -> bool:
    """Whether a module looks like a router in transformers' form: a weight [experts, K] of its own, and a top_k."""
    weight = module._parameters.get("weight")
    return isinstance(getattr(module, "top_k", None), int) and weight is not None and weight.dim() == 2


def recognise_router(module: Any) -> RouterOptions:
    """The options that reproduce a router, which returns logits [tokens, experts], weights and indices [tokens, k].
    Raises `LeftAlone` if there are none."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    vectors = {n for n, b in [*module.named_parameters(), *module.named_buffers()]} - {"weight"}
    if not vectors <= {"bias", CORRECTION}:
        raise LeftAlone(f"it has more than a weight and a bias: {', '.join(sorted(vectors))}")
    draw = torch.Generator().manual_seed(0)
    experts, width = shapes["weight"]
    x = torch.randn(64, width, generator=draw)
    given = {name: torch.randn(shape, generator=draw) * width**-0.5 for name, shape in shapes.items()}
    if CORRECTION in vectors:
        given[CORRECTION] = torch.rand(experts, generator=draw) * 0.1
    correction = given.get(CORRECTION)

    def run(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        probe = _probe(module, {name: value.to(dtype) for name, value in given.items()})
        if CORRECTION in probe._buffers:
            probe._buffers[CORRECTION] = correction
        found = type(module).forward(probe, x.to(dtype))
        if not isinstance(found, tuple) or [t.shape for t in found] != [
            (64, experts),
            (64, module.top_k),
            (64, module.top_k),
        ]:
            raise TypeError("it returns something else than logits, weights and indices")
        return found

    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            (_, weights, indices), half = run(_FP32), run(_BF16)
    except Exception as error:  # whatever a forward of somebody else raises on a small input
        raise LeftAlone(_could_not_be_tried(error)) from error
    order = indices.argsort(-1)  # some return the chosen experts unsorted
    wanted, chosen = weights.gather(-1, order), indices.gather(-1, order)
    own = (half[0].dtype == _BF16, half[1].dtype == _BF16)
    with torch.no_grad(), backend("reference"):
        for options in _router_candidates(module, experts, own):
            try:
                found = options(x, given["weight"], given.get("bias"), correction)
            except ValueError:
                continue  # a convention that does not know groups, or the bias of the choice
            order = found[2].argsort(-1)
            if torch.equal(found[2].gather(-1, order), chosen) and torch.allclose(
                found[1].gather(-1, order), wanted.float(), rtol=1e-5, atol=1e-6
            ):
                return options
    raise LeftAlone("none of the options of route reproduces it")


def _router_candidates(module: Any, experts: int, own: tuple[bool, bool]) -> Iterator[RouterOptions]:
    numbers = [v for v in dict(_numbers(module)).values() if isinstance(v, (int, float))]
    numbers = [v for v in numbers if not isinstance(v, bool)]
    scales = [1.0, *sorted({float(v) for v in numbers if isinstance(v, float) and v > 0} - {1.0})]
    whole = {v for v in numbers if isinstance(v, int)}
    groups = [
        (1, None),
        *((g, t) for g in whole for t in whole if 1 < g <= experts and experts % g == 0 and t < g),
    ]
    for (number, best), convention, renormalize, scale in itertools.product(
        groups, ("qwen3", "gpt_oss", "deepseek_v3", "vllm"), (True, False, None), scales
    ):
        yield RouterOptions(
            k=module.top_k,
            convention=convention,
            renormalize=renormalize,
            scale=scale,
            groups=number,
            group_topk=best,
            own_logits=own[0],
            own_weights=own[1],
        )


# ---- rotations ------------------------------------------------------------------------------------------


class RotaryOptions(NamedTuple):
    """How `weft.rope` computes what a function (q, k, cos, sin) of a model does for q and k [batch, heads, sequence,
    dim]."""

    name: str  # of the function, among the globals of the attention's forward
    tables: str  # an angle is in the tables "once", in both "halves", or in "pairs" of neighbours
    style: Any
    out_style: Any

    def fits(self, q: Tensor, cos: Tensor) -> bool:
        """Whether a call is one that was tried: whole heads of four dimensions, and tables for each sequence."""
        width = q.shape[-1] // 2 if self.tables == "once" else q.shape[-1]
        return q.dim() == 4 and cos.dim() == 3 and cos.shape[-1] == width and cos.shape[1] == q.shape[2]

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        dim, batch = q.shape[-1], len(q)
        columns = slice(0, None, 2) if self.tables == "pairs" else slice(0, dim // 2)
        cos, sin = (table[..., columns].expand(batch, -1, -1) for table in (cos, sin))
        rotation = Rotation(cos=cos, sin=sin, dim=dim, style=self.style, out_style=self.out_style)
        return rope(q, rotation, layout="bhsd"), rope(k, rotation, layout="bhsd")

    def __str__(self) -> str:
        return f"rope style={self.style!r}" + (f" out_style={self.out_style!r}" if self.out_style else "")


def rotating_functions(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """The functions that a module's forward calls by name to rotate q and k."""
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, types.FunctionType):
        return {}
    names = [name for name in forward.__code__.co_names if name.startswith("apply_rotary")]
    return {name: f for name in names if callable(f := forward.__globals__.get(name))}


def recognise_rotary(module: nn.Module) -> tuple[RotaryOptions, ...]:
    """The options that reproduce the functions by which an attention rotates. Raises `LeftAlone` if some have none."""
    return tuple(_try_rotary(name, function) for name, function in rotating_functions(module).items())


def _try_rotary(name: str, function: Callable[..., Any]) -> RotaryOptions:
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 3, 5, 16, generator=draw), torch.randn(2, 1, 5, 16, generator=draw)
    angles = torch.rand(2, 5, 8, generator=draw) * 6
    reason = f"none of the options of rope reproduces {name}"
    for tables, widened in {
        "halves": torch.cat([angles, angles], -1),
        "once": angles,
        "pairs": angles.repeat_interleave(2, -1),
    }.items():
        cos, sin = widened.cos(), widened.sin()
        try:
            with torch.no_grad():
                wanted = function(q, k, cos, sin)
        except Exception as error:  # whatever a function of somebody else raises on a small input
            reason = _could_not_be_tried(error)
            continue
        if not isinstance(wanted, tuple) or [t.shape for t in wanted] != [q.shape, k.shape]:
            continue
        for style, out_style in (("neox", None), ("interleaved", None), ("interleaved", "neox")):
            options = RotaryOptions(name, tables, style, out_style)
            with torch.no_grad(), backend("reference"):
                found = options(q, k, cos, sin)
            if all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, wanted, strict=True)):
                return options
    raise LeftAlone(reason)

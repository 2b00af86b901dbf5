"""Recognition of what a module computes, by trying it.

Libraries write the same few layers under many names, and use one name for different arithmetic: of the classes named
RMSNorm in transformers most round before they multiply by the weight, some after it, and some add 1 to the weight. So
there is no list of names. A copy of a module runs its own `forward` on small inputs, with random parameters of the
same names, in training and in evaluation mode, and the result is compared with what Weft computes for each of a few
options. A module that no option reproduces is left alone, and the report gives the reason. So is one whose results
differ between the modes or from call to call (dropout), and one whose `forward` takes more arguments than Weft's.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..ops import gated_norm, glu, layer_norm, rms_norm, route, router_linear
from ..ops.common.activations import ACTIVATIONS, WITH_ALPHA, Act
from ..runtime import backend
from .trials import (
    LeftAlone,
    arguments_of,
    check_arguments,
    could_not_be_tried,
    in_both_modes,
    normal,
    probe_of,
    trial,
)


class NormOptions(NamedTuple):
    """Options with which `weft.rms_norm`, `weft.layer_norm` or `weft.gated_norm` reproduces a module."""

    kind: str  # "rms" or "layer"
    eps: float | None
    weight_offset: float
    casting: str
    promotes: bool  # whether the result has the promoted dtype of x and weight, not x's
    gate: str | None = None  # the activation of a gate that follows the norm
    parameters: tuple[str, ...] = ("weight",)  # the weight and bias, as far as it uses them

    def of(self, module: nn.Module, *inputs: Tensor) -> Tensor:
        """Compute the result of a module."""
        weight, bias = (
            getattr(module, name) if name in self.parameters else None for name in ("weight", "bias")
        )
        return self(*inputs, weight=weight, bias=bias)

    def __call__(
        self, x: Tensor, gate: Tensor | None = None, *, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        options: dict[str, Any] = {
            "eps": self.eps,
            "weight_offset": self.weight_offset,
            "casting": self.casting,
        }
        if gate is not None:
            gated: Any = gated_norm
            product: Tensor = gated(x, gate, weight, act=self.gate, **options)
            return product
        norm: Any = rms_norm if self.kind == "rms" else layer_norm
        result: Tensor = norm(x, weight, bias, out_dtype="promote" if self.promotes else None, **options)
        return result

    def __str__(self) -> str:
        words = [f"{self.kind}_norm" if self.gate is None else "gated_norm"]
        words.append(f"eps={self.eps:g}" if self.eps is not None else "eps=None")
        if self.weight_offset:
            words.append(f"weight_offset={self.weight_offset:g}")
        if self.casting != "fp32":
            words.append(f"casting={self.casting!r}")
        if self.gate is not None:
            words.append(f"act={self.gate!r}")
        return " ".join(words)


class UnitOptions(NamedTuple):
    """Options with which `weft.glu` reproduces what a module does between its two products."""

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


# ---- norms ----------------------------------------------------------------------------------------------

Verdicts = dict[tuple[Any, ...], "NormOptions | LeftAlone"]


def recognize_norm(module: nn.Module, verdicts: Verdicts | None = None) -> NormOptions:
    """Return the options that reproduce a norm; raise `LeftAlone` if there are none. `verdicts` caches the outcome for
    norms of one class, size and configuration."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    if any(True for _ in module.children()) or not set(shapes) <= {"weight", "bias"}:
        raise LeftAlone(f"it has more than a weight and a bias: {', '.join([*shapes, *module._modules])}")
    if any(len(shape) != 1 for shape in shapes.values()):
        raise LeftAlone(f"its parameters are not vectors: {shapes}")
    key = _key(module, shapes)
    verdict = None if key is None or verdicts is None else verdicts.get(key)
    if verdict is None:
        try:
            verdict = _try_norm(module, shapes)
        except LeftAlone as reason:
            verdict = reason
        if key is not None and verdicts is not None:
            verdicts[key] = verdict
    if isinstance(verdict, LeftAlone):
        raise verdict
    return verdict


_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def _numbers(module: nn.Module) -> dict[str, Any]:
    """Return the numbers, flags and names that a module was configured with."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) and name != "training"
    }


def _key(module: nn.Module, shapes: dict[str, tuple[int, ...]]) -> tuple[Any, ...] | None:
    """Return a key shared by norms that compute the same, or None if there is no telling: a norm with a buffer, or with
    attributes other than numbers and names, is tried by itself."""
    own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    simple = all(
        isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value))
        for value in own.values()
    )
    if module._buffers or not simple:
        return None
    return (
        type(module),
        type(module).forward,
        *shapes.items(),
        *sorted(own.items(), key=lambda item: item[0]),
    )


_OF_EVERY_MODULE = {*vars(nn.Module()), "forward"}


def _try_norm(module: nn.Module, shapes: dict[str, tuple[int, ...]]) -> NormOptions:
    gated = arguments_of(module) == ["gate"]
    if not gated:
        check_arguments(module)
    reason = LeftAlone("its size is not known")
    for width in _widths(module, shapes):
        try:
            return _try_width(module, shapes, width, gated)
        except LeftAlone as error:
            reason = error
    raise reason


def _widths(module: nn.Module, shapes: dict[str, tuple[int, ...]]) -> list[int]:
    """Return the possible row lengths of a norm: that of its parameters, or else those its attributes suggest, and
    64."""
    if shapes:
        return [next(iter(shapes.values()))[0]]
    sizes = [vars(module).get("normalized_shape"), *_numbers(module).values()]
    lengths = [size[0] if isinstance(size, tuple) and len(size) == 1 else size for size in sizes]
    return [*{size for size in lengths if type(size) is int and 1 < size <= 1 << 16}, 64]


def _try_width(module: nn.Module, shapes: dict[str, tuple[int, ...]], width: int, gated: bool) -> NormOptions:
    # Rows of many magnitudes: small ones reveal eps.
    x, gate = normal(32, width) * torch.logspace(-4, 1, 32)[:, None], normal(32, width, seed=1)
    parameters = {name: normal(width, seed=2 + i).abs() + 0.5 for i, name in enumerate(shapes)}

    def run(rows: tuple[Tensor, ...], x_dtype: torch.dtype, dtype: torch.dtype, training: bool) -> Tensor:
        probe = probe_of(module, training, {name: p.to(dtype) for name, p in parameters.items()}, {})
        result = type(module).forward(probe, *(row.to(x_dtype) for row in rows))
        if not isinstance(result, Tensor) or result.shape != rows[0].shape:
            raise TypeError("its result has another shape than its input")
        return result

    rows = (x, gate) if gated else (x,)
    kinds = ((_BF16, _BF16), (_FP32, _FP32), (_BF16, _FP32))
    try:
        with trial():
            half, single, mixed = (in_both_modes(functools.partial(run, rows, *dtypes)) for dtypes in kinds)
    except Exception as error:  # foreign code may raise anything on a small input
        raise could_not_be_tried(error) from error
    if (
        half.dtype != _BF16
        or single.dtype != _FP32
        or mixed.dtype not in (_BF16, *([] if gated else [_FP32]))
    ):
        raise LeftAlone(f"its results have the dtypes {half.dtype}, {single.dtype} and {mixed.dtype}")
    promotes = bool(shapes) and mixed.dtype == _FP32

    def compute(options: NormOptions, rows: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        cast = {name: value.to(dtype) for name, value in parameters.items()}
        return options(*(row.to(dtype) for row in rows), weight=cast.get("weight"), bias=cast.get("bias"))

    def reproduces(options: NormOptions) -> bool:
        # An fp32 sum in another order flips few roundings, each by one unit in the last place. Another order of
        # roundings flips a tenth of them.
        result = compute(options, rows, _BF16)
        differ = (result != half).float().mean()
        places = (result.view(torch.int16).int() - half.view(torch.int16).int()).abs().max()
        exact = torch.allclose(compute(options, rows, _FP32), single, rtol=4e-6, atol=1e-6)
        return bool(differ <= 2e-3 and places <= 1 and exact)

    def reproduces_shape(options: NormOptions, *shape: int) -> bool:
        """Return whether a module computes the same for inputs of another shape, or refuses them."""
        inputs = (normal(*shape), normal(*shape, seed=1))[: len(rows)]
        try:
            expected = run(inputs, _FP32, _FP32, False)
        except Exception:  # as above: a module that refuses an input does not compute anything else
            return True
        try:
            return torch.allclose(compute(options, inputs, _FP32), expected, rtol=4e-6, atol=1e-6)
        except ValueError:
            return False

    shapes_of_models = ((2, 5, width), (2, 3, 4, width), (2, width, 3))
    with trial(), backend("reference"):
        for options in _norm_candidates(_numbers(module), promotes, gated, tuple(shapes)):
            if reproduces(options):
                if all(reproduces_shape(options, *shape) for shape in shapes_of_models):
                    return options
                raise LeftAlone("it normalizes dimensions other than the last")
    names = "gated_norm" if gated else "rms_norm and layer_norm"
    raise LeftAlone(f"none of the options of {names} reproduces it")


_BF16, _FP32 = torch.bfloat16, torch.float32


def _norm_candidates(
    numbers: dict[str, Any], promotes: bool, gated: bool, parameters: tuple[str, ...]
) -> Iterator[NormOptions]:
    small = {v for v in numbers.values() if isinstance(v, float) and 0.0 <= v < 1e-2}
    epsilons: list[float | None] = [*sorted(small), *([None] if numbers.get("eps", 0) is None else [])]
    for kind, eps, casting, offset, act in itertools.product(
        ("rms",) if gated else ("rms", "layer"),
        epsilons,
        ("llama", "fp32"),
        (0.0, 1.0),
        ("silu", "sigmoid") if gated else (None,),
    ):
        if kind == "rms" or eps is not None:
            yield NormOptions(kind, eps, offset, casting, promotes, act, parameters)


# ---- gated units ----------------------------------------------------------------------------------------


def recognize_unit(
    function: Callable[[bool, Tensor], Tensor], numbers: dict[str, Any], layouts: tuple[str, ...]
) -> UnitOptions:
    """Return the gated unit that reproduces `function(training, x)` for float64 x [rows, 32]; raise `LeftAlone` if
    there is none. `numbers` are those its module was configured with; its limit may be among them."""
    x = normal(64, 32, dtype=torch.float64) * torch.logspace(-1, 3, 64, dtype=torch.float64)[:, None]
    try:
        with trial():
            expected = in_both_modes(lambda training: function(training, x))
    except Exception as error:  # foreign code may raise anything on a small input
        raise could_not_be_tried(error) from error
    values = {float(v) for v in numbers.values() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    limits: list[float | None] = [None, *sorted(v for v in values if 0.5 <= v <= 1000)]
    alphas = [1.0, *sorted(v for v in values if 0.1 <= v <= 10 and v != 1.0)]
    with trial(), backend("reference"):
        for act, layout, limit, alpha, offset in itertools.product(
            ACTIVATIONS, layouts, limits, alphas, (0.0, 1.0)
        ):
            if (alpha != 1.0 and act not in WITH_ALPHA) or (layout == "none" and offset):
                continue
            options = UnitOptions(cast(Act, act), layout, limit, alpha, offset)
            result = glu(x, **options._asdict())
            # Some models compute their unit in fp32.
            if result.shape == expected.shape and torch.allclose(
                result, expected.double(), rtol=1e-5, atol=1e-5
            ):
                return options
    raise LeftAlone("none of the options of glu reproduces it")


# Projections of a feed-forward layer, as models name them: gate and up, separate or fused, and down.
PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("gate_up_proj", "down_proj"))


class MLPOptions(NamedTuple):
    """Recognized computation of a feed-forward layer."""

    projections: tuple[str, ...]
    unit: UnitOptions
    order: tuple[str, ...]  # of the calls of the first projections: adapters may draw random numbers

    def __str__(self) -> str:
        return str(self.unit)


def projections_of(module: nn.Module) -> tuple[str, ...] | None:
    """Return the names of the projections if this looks like a feed-forward layer with a gate, else None."""
    for names in PROJECTIONS:
        if all(hasattr(module._modules.get(name), "out_features") for name in names):
            return names
    return None


def recognize_mlp(module: nn.Module) -> MLPOptions:
    """Return the gated unit of a feed-forward layer; raise `LeftAlone` if it computes something else.

    The trial replaces its projections by ones that copy: gate and up are then columns of the input, and the result is
    what comes between them and down."""
    check_arguments(module)
    names = projections_of(module)
    assert names is not None
    is_fused = len(names) == 2
    columns = [slice(None)] if is_fused else [slice(0, 16), slice(16, 32)]
    calls: list[str] = []
    children: dict[str, nn.Module] = {
        name: _Columns(part, functools.partial(calls.append, name))
        for name, part in zip(names, [*columns, slice(None)], strict=True)
    }

    def unit(training: bool, x: Tensor) -> Tensor:
        probe = probe_of(module, training, dict(module.named_parameters(recurse=False)), children)
        result: Tensor = type(module).forward(probe, x)
        return result

    layouts = ("concat", "interleaved") if is_fused else ("concat",)
    unit_options = recognize_unit(unit, _numbers(module), layouts)
    if sorted(calls) != sorted([*names] * 3):
        raise LeftAlone(f"it does not call each of {', '.join(names)} once")
    return MLPOptions(names, unit_options, tuple(calls[: len(columns)]))


class _Columns(nn.Module):
    """Stand-in for a projection that returns some columns of the input."""

    def __init__(self, columns: slice, note: Callable[[], None]) -> None:
        super().__init__()
        self.columns, self.note = columns, note
        self.weight = nn.Parameter(torch.zeros(1, 1, dtype=torch.float64), requires_grad=False)
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        self.note()
        return x[..., self.columns]


# ---- experts --------------------------------------------------------------------------------------------


def recognize_experts(module: nn.Module) -> UnitOptions:
    """Return the gated unit of experts in transformers' form; raise `LeftAlone` if Weft cannot compute them.

    The attributes of such a module say how its weights are stored; between its products it computes `_apply_gate`, or
    `act_fn` if nothing is gated."""
    if getattr(module, "has_post_expert_norm", False):
        raise LeftAlone("it has a norm after each expert")
    weights = {name: p.detach() for name, p in module.named_parameters(recurse=False)}

    def unit(training: bool, x: Tensor) -> Tensor:
        probe: Any = probe_of(module, training, weights, {})
        result: Tensor = probe._apply_gate(x) if module.has_gate else probe.act_fn(x)
        return result

    if not module.has_gate:
        return recognize_unit(unit, {}, ("none",))
    layout = "concat" if module.is_concatenated else "interleaved"
    return recognize_unit(unit, _numbers(module), (layout,))


# ---- routers --------------------------------------------------------------------------------------------


class RouterOptions(NamedTuple):
    """Options with which `weft.router_linear` and `weft.route` reproduce a router of transformers."""

    k: int
    convention: str
    renormalize: bool | None
    scale: float
    groups: int
    group_topk: int | None
    own_logits: bool  # whether the returned logits have the dtype of its input, not fp32
    own_weights: bool  # whether the weights have it

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


CORRECTION = "e_score_correction_bias"  # added to the scores for the selection of experts


def is_router(module: nn.Module) -> bool:
    """Return whether a module looks like a router in transformers' form: a weight [experts, K] of its own, and a
    top_k."""
    weight = module._parameters.get("weight")
    return isinstance(getattr(module, "top_k", None), int) and weight is not None and weight.dim() == 2


def recognize_router(module: Any) -> RouterOptions:
    """Return the options that reproduce a router, which returns logits [tokens, experts], weights and indices [tokens,
    k]; raise `LeftAlone` if there are none."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    vectors = {n for n, b in [*module.named_parameters(), *module.named_buffers()]} - {"weight"}
    if not vectors <= {"bias", CORRECTION}:
        raise LeftAlone(f"it has more than a weight and a bias: {', '.join(sorted(vectors))}")
    check_arguments(module)
    experts, width = shapes["weight"]
    x = normal(64, width)
    parameters = {
        name: normal(*shape, seed=1 + i) * width**-0.5 for i, (name, shape) in enumerate(shapes.items())
    }
    if CORRECTION in vectors:
        parameters[CORRECTION] = normal(experts, seed=9).abs() * 0.1
    correction = parameters.get(CORRECTION)

    def run(dtype: torch.dtype, training: bool) -> tuple[Tensor, Tensor, Tensor]:
        probe = probe_of(module, training, {name: value.to(dtype) for name, value in parameters.items()}, {})
        if CORRECTION in probe._buffers:
            probe._buffers[CORRECTION] = correction
        result = type(module).forward(probe, x.to(dtype))
        if not isinstance(result, tuple) or [t.shape for t in result] != [
            (64, experts),
            (64, module.top_k),
            (64, module.top_k),
        ]:
            raise TypeError("it returns something else than logits, weights and indices")
        return result

    try:
        with trial():
            (_, weights, indices), half = (
                in_both_modes(functools.partial(run, dtype)) for dtype in (_FP32, _BF16)
            )
    except Exception as error:  # foreign code may raise anything on a small input
        raise could_not_be_tried(error) from error
    order = indices.argsort(-1)  # some return the chosen experts unsorted
    expected, chosen = weights.gather(-1, order), indices.gather(-1, order)
    own = (half[0].dtype == _BF16, half[1].dtype == _BF16)
    with trial(), backend("reference"):
        for options in _router_candidates(module, experts, own):
            try:
                candidate = options(x, parameters["weight"], parameters.get("bias"), correction)
            except ValueError:
                continue  # a convention without groups, or without the selection bias
            order = candidate[2].argsort(-1)
            if torch.equal(candidate[2].gather(-1, order), chosen) and torch.allclose(
                candidate[1].gather(-1, order), expected.float(), rtol=1e-5, atol=1e-6
            ):
                return options
    raise LeftAlone("none of the options of route reproduces it")


def _router_candidates(module: Any, experts: int, own: tuple[bool, bool]) -> Iterator[RouterOptions]:
    numbers = [v for v in _numbers(module).values() if isinstance(v, (int, float))]
    numbers = [v for v in numbers if not isinstance(v, bool)]
    scales = [1.0, *sorted({float(v) for v in numbers if isinstance(v, float) and v > 0} - {1.0})]
    integers = {v for v in numbers if isinstance(v, int)}
    groups = [
        (1, None),
        *((g, t) for g in integers for t in integers if 1 < g <= experts and experts % g == 0 and t < g),
    ]
    for (group_count, best), convention, renormalize, scale in itertools.product(
        groups, ("qwen3", "gpt_oss", "deepseek_v3", "vllm"), (True, False, None), scales
    ):
        yield RouterOptions(
            k=module.top_k,
            convention=convention,
            renormalize=renormalize,
            scale=scale,
            groups=group_count,
            group_topk=best,
            own_logits=own[0],
            own_weights=own[1],
        )

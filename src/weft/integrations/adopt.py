"""Replacement of a model's forwards by Weft's, and its undoing, for models that know nothing of Weft.

    import weft.integrations

    report = weft.integrations.apply(model)
    print(report)
    weft.integrations.unapply(model)

`apply` looks at every module of a model and replaces the `forward` of those it recognizes, in this instance only: no
class, no other model and no parameter is touched, and no model's code is copied. `unapply` removes the replacements.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..ops import experts, glu
from ..report import Entry, Report
from .logits import head_forward
from .recognize import (
    CORRECTION,
    MLPOptions,
    NormOptions,
    RouterOptions,
    UnitOptions,
    Verdicts,
    is_router,
    projections_of,
    recognize_experts,
    recognize_mlp,
    recognize_norm,
    recognize_router,
)
from .rotations import RotaryOptions, recognize_rotary, rotating_functions
from .trials import HOOKS, LeftAlone

# ---- replacements for forwards --------------------------------------------------------------------------


def norm_forward(module: nn.Module, options: NormOptions, *args: Any, **named: Any) -> Any:
    """Replace the forward of a norm. A gated one that is called without its gate falls back to its class."""
    inputs = [*args, *named.values()]
    if len(inputs) != (1 if options.gate is None else 2) or not all(isinstance(x, Tensor) for x in inputs):
        return type(module).forward(module, *args, **named)
    return options.of(module, *inputs)


def mlp_forward(module: nn.Module, options: MLPOptions, *args: Any, **named: Any) -> Any:
    """Replace the forward of a feed-forward layer: its own projections, and the gated unit between them. One with hooks
    on what lies between (its activation) falls back to its class, which calls that."""
    if len(args) + len(named) != 1 or is_hooked_within(module, options.projections):
        return type(module).forward(module, *args, **named)
    x: Tensor = args[0] if args else next(iter(named.values()))
    results = {name: getattr(module, name)(x) for name in options.order}
    *before, down = options.projections
    return getattr(module, down)(glu(*(results[name] for name in before), **options.unit._asdict()))


def is_hooked_within(module: nn.Module, excluded: tuple[str, ...] = ()) -> bool:
    """Return whether a child of a module, other than those excluded, has hooks."""
    children = [
        child for name, child in module._modules.items() if child is not None and name not in excluded
    ]
    return any(getattr(child, hooks) for child in children for hooks in HOOKS)


def experts_forward(
    module: Any, options: UnitOptions, hidden: Tensor, indices: Tensor, weights: Tensor
) -> Tensor:
    """Replace the forward of experts in transformers' form: tokens [T, K], the chosen experts and their weights
    [T, k]."""
    if is_hooked_within(module):
        result: Tensor = type(module).forward(module, hidden, indices, weights)
        return result
    up, down = (module.gate_up_proj if module.has_gate else module.up_proj), module.down_proj
    if module.is_transposed:
        up, down = up.mT, down.mT
    up_bias = down_bias = None
    if module.has_bias:
        up_bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        down_bias = module.down_proj_bias
    return experts(
        hidden, up, down, (weights, indices), up_bias=up_bias, down_bias=down_bias, **options._asdict()
    )


def router_forward(module: Any, options: RouterOptions, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Replace the forward of a router in transformers' form: logits [T, E], weights [T, k], indices [T, k]."""
    return options(x, module.weight, getattr(module, "bias", None), getattr(module, CORRECTION, None))


def rotary_forward(module: nn.Module, rotating: Rotating, *args: Any, **named: Any) -> Any:
    """Replace the forward of an attention by its own code, in which the rotating functions are Weft's."""
    return rotating.forward(module, *args, **named)


class Rotating:
    """Forward of a class of attention with Weft's rotation. Copying and unpickling rebuild it."""

    def __init__(self, kind: type[nn.Module], options: tuple[RotaryOptions, ...]) -> None:
        self.made_of = (kind, options)
        original: Any = kind.forward
        names = dict(original.__globals__)
        for option in options:
            names[option.name] = functools.partial(_rotate, option, names[option.name])
        # torch.compile would look names up in the module named here, where they have their original meaning.
        del names["__name__"]
        self.forward = types.FunctionType(
            original.__code__, names, original.__name__, original.__defaults__, original.__closure__
        )
        self.forward.__kwdefaults__ = original.__kwdefaults__
        self.forward.__module__ = original.__module__

    def __reduce__(self) -> tuple[Any, ...]:
        return Rotating, self.made_of


def _rotate(options: RotaryOptions, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Replace a model's function (q, k, cos, sin); a call of another form falls back to that function."""
    if len(args) != 4 or named or not options.fits(args[0], args[2]):
        return original(*args, **named)
    return options(*args)


_FORWARDS: tuple[Callable[..., Any], ...] = (
    norm_forward,
    mlp_forward,
    experts_forward,
    router_forward,
    rotary_forward,
    head_forward,
)


def _is_replaced(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    return isinstance(forward, functools.partial) and forward.func in _FORWARDS


def _replace(module: nn.Module, forward: Callable[..., Any], *options: Any) -> None:
    if "forward" in module.__dict__:
        raise LeftAlone("its forward was already replaced, by a library such as accelerate or kernels")
    # A partial rather than a closure, so that it can be copied and pickled with its module.
    module.forward = functools.partial(forward, module, *options)


# ---- kinds of modules -----------------------------------------------------------------------------------


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


def _replace_norm(module: nn.Module, verdicts: Verdicts) -> str:
    options = recognize_norm(module, verdicts)
    _replace(module, norm_forward, options)
    return str(options)


def _replace_mlp(module: nn.Module, _: Verdicts) -> str:
    options = recognize_mlp(module)
    _replace(module, mlp_forward, options)
    return str(options)


def is_experts(module: nn.Module) -> bool:
    """Return whether a module has experts in transformers' form, whose storage these attributes describe."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated"))


def _replace_experts(module: nn.Module, _: Verdicts) -> str:
    options = recognize_experts(module)
    _replace(module, experts_forward, options)
    return f"experts, {options}"


def _replace_router(module: nn.Module, _: Verdicts) -> str:
    options = recognize_router(module)
    _replace(module, router_forward, options)
    return str(options)


def _replace_rotary(module: nn.Module, _: Verdicts) -> str:
    if inspect.unwrap(type(module).forward) is not type(module).forward:
        raise LeftAlone("its forward is decorated, and what that does would be lost")
    options = recognize_rotary(module)
    _replace(module, rotary_forward, Rotating(type(module), options))
    return ", ".join(map(str, options))


def _replace_head(module: nn.Module, _: Verdicts) -> str:
    if type(module) is not nn.Linear:
        raise LeftAlone(
            f"a head that is a {type(module).__name__} and no torch.nn.Linear may compute something else"
        )
    _replace(module, head_forward)
    return "linear_cross_entropy"


def _heads(model: nn.Module) -> list[nn.Module]:
    """Return the heads of the models in this one, as transformers declares them, else the modules named lm_head."""
    heads: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        getter = getattr(module, "get_output_embeddings", None)
        head = getter() if callable(getter) else module if name.rpartition(".")[2] == "lm_head" else None
        if isinstance(head, nn.Module):
            heads[id(head)] = head
    return list(heads.values())


def _rotates(model: nn.Module) -> bool:
    """Return False for a model of transformers without a module that makes cos and sin: its configuration turns
    rotation off, although its attention layers could rotate."""
    modules = list(model.modules())
    if not any(hasattr(module, "get_input_embeddings") for module in modules):
        return True
    names = (type(module).__name__.lower() for module in modules)
    return any("rotary" in name or "rope" in name for name in names)


class _Kind(NamedTuple):
    is_one: Callable[[nn.Module], bool]
    replace: Callable[[nn.Module, Verdicts], str]


_KINDS = {
    "norm": _Kind(_is_norm, _replace_norm),
    "mlp": _Kind(lambda module: projections_of(module) is not None, _replace_mlp),
    "experts": _Kind(is_experts, _replace_experts),
    "rope": _Kind(lambda module: bool(rotating_functions(module)), _replace_rotary),
    "router": _Kind(is_router, _replace_router),
}

# ---- apply and unapply ----------------------------------------------------------------------------------


def apply(
    model: nn.Module,
    *,
    norm: bool = True,
    mlp: bool = True,
    experts: bool = True,
    rope: bool = False,
    router: bool = False,
    loss: bool | nn.Linear = True,
    strict: bool = False,
) -> Report:
    """Compute the recognized modules of a model with Weft's kernels, in place.

    - `norm`: RMSNorm and LayerNorm under any class name, each with its own order of rounding.
    - `mlp`: gated feed-forward layers: their projections stay, and the gated unit between them becomes one kernel.
    - `experts`: the experts of transformers' mixture-of-experts models.
    - `rope`, on request: the rotation of q and k in attention layers that call a function (q, k, cos, sin) for it, like
      those of transformers. It rounds once where most models round three times in bf16.
    - `router`, on request: the routers of transformers' models, in fp32 where some models multiply in bf16. Tokens with
      nearly tied experts may be routed differently.
    - `loss`: in training the head does not compute logits if the model takes a cross entropy of them and nothing reads
      them. True finds the head of transformers' models, or what is named lm_head; or pass the head itself.
    - `strict`: raise an error if a matching module was left alone, or if a requested head, rope or router does not
      exist.

    Results equal those of the unchanged model, bit for bit in norms and up to rounding elsewhere. Returns a `Report` of
    what was replaced, how it was recognized, and why the rest was left alone. Applying twice changes nothing.

    >>> import torch, weft.integrations
    >>> model = torch.nn.Sequential(torch.nn.RMSNorm(64, eps=1e-5), torch.nn.Linear(64, 8))
    >>> print(weft.integrations.apply(model))
    kind  modules  class    weft
    norm  0        RMSNorm  rms_norm eps=1e-05
    >>> weft.integrations.unapply(model)
    1
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got a {type(model).__name__}")
    requested = {
        "norm": norm,
        "mlp": mlp,
        "experts": experts,
        "rope": rope and _rotates(model),
        "router": router,
    }
    kinds = [kind for kind, on in requested.items() if on]
    heads = [loss] if isinstance(loss, nn.Module) else _heads(model) if loss else []
    names = {id(module): name for name, module in model.named_modules()}
    report, verdicts = Report(), Verdicts()
    for name, module in list(model.named_modules()):
        for kind in kinds:
            if _KINDS[kind].is_one(module):
                report.entries.append(_outcome(kind, name, module, _KINDS[kind].replace, verdicts))
                break
    for head in heads:
        if id(head) not in names:
            raise ValueError("loss= must be a module of the model")
        report.entries.append(_outcome("loss", names[id(head)], head, _replace_head, verdicts))
    if strict:
        _raise_if_incomplete(report, loss=bool(loss), rope=rope, router=router)
    return report


def _outcome(
    kind: str, name: str, module: nn.Module, replace: Callable[[nn.Module, Verdicts], str], verdicts: Verdicts
) -> Entry:
    title = type(module).__name__
    if _is_replaced(module):
        del module.forward  # from an earlier call: try again, since its options may have changed
    try:
        return Entry(kind, name, title, changed=True, what=replace(module, verdicts))
    except LeftAlone as reason:
        return Entry(kind, name, title, changed=False, what=str(reason))


def _raise_if_incomplete(report: Report, **requested: bool) -> None:
    problems = [f"{e.name} ({e.module}): {e.what}" for e in report.entries if not e.changed]
    for kind, on in requested.items():
        if on and not any(entry.kind == kind for entry in report.entries):
            problems.append(_NOT_FOUND[kind])
    if problems:
        raise ValueError("strict=True, but these could not be replaced:\n  " + "\n  ".join(problems))


_NOT_FOUND = {
    "loss": "no head was found for loss: pass loss=model.its_head, or loss=False",
    "rope": "rope=True, but no attention rotates by a function (q, k, cos, sin)",
    "router": "no router in transformers' form was found",
}


def unapply(model: nn.Module) -> int:
    """Undo `apply`: restore the class forwards of this model's modules. Return the number of modules restored."""
    modules = [module for module in model.modules() if _is_replaced(module)]
    for module in modules:
        del module.forward
    return len(modules)

"""Logits that are computed only if something reads them.

In training a model's head returns `DeferredLogits`: the hidden states, and the operations since then. Shapes, dtypes,
views, slices, a scale and a softcap are only recorded; `torch.nn.functional.cross_entropy` of them becomes
`weft.linear_cross_entropy` of the hidden states, which never materializes logits. Anything else computes the logits,
once, and continues with them: the result is that of the unchanged model.

Logits can be computed until the loss runs backward. After that an optimizer may have changed the head's weight, which
cannot be detected from here (fused optimizers do not even count a change), so reading them is an error. Reading is also
an error if the weight is sharded and gathered by hooks (FSDP2, ZeRO-3), once the model's forward has ended: gathering
takes all ranks, and a rank that reads alone would wait for the others forever.

`DeferredLogits` is not a subclass of Tensor, so that `torch.compile` traces through it and DDP and FSDP, which hook
into tensors that a model returns, do not see it. `isinstance(logits, torch.Tensor)` is False; `logits.tensor()` is the
tensor.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as nn_module

from ..ops import linear_cross_entropy
from ..ops.common.checks import FLOATS
from ..ops.loss.statistics import COLDEST, HOTTEST
from .trials import HOOKS

Consume = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]

# ---- the head -------------------------------------------------------------------------------------------


def head_forward(head: nn.Linear, input: Tensor, consume: Consume | None = None) -> Any:
    """Replace the `forward` of a model's head; in training, return `DeferredLogits`.

    A head with user hooks computes its logits, and the hooks run once, as always. A head whose weight is gathered by
    hooks is called once more for the loss, with `consume`, a function of the input, the weight and the bias."""
    if consume is not None:
        return consume(input, head.weight, head.bias)
    learns = input.requires_grad or head.weight.requires_grad
    if not (head.training and torch.is_grad_enabled() and learns and input.dtype in FLOATS[:3]) or _is_hooked(
        head
    ):
        return functional.linear(input, head.weight, head.bias)
    return DeferredLogits(input, head, Autocast.of(input), versions=_versions(input, head.weight))


def _hooks(head: nn.Module) -> list[Any]:
    """Return the hooks that run when a head is called: the module's own and the global ones."""
    own = [getattr(head, hooks) for hooks in HOOKS]
    global_hooks = [getattr(nn_module, f"_global{hooks}") for hooks in HOOKS]
    return [hook for hooks in (*own, *global_hooks) for hook in hooks.values()]


def _gathers(hook: Any) -> bool:
    """Return whether a hook belongs to a framework that shards parameters: it only gathers those of the head. FSDP2's
    hooks are methods, unless it shards several modules as one: each of these must be called exactly once."""
    home = str(getattr(hook, "__module__", ""))
    return home.startswith("deepspeed") or (
        home.startswith("torch.distributed.fsdp") and hasattr(hook, "__self__")
    )


def _is_hooked(head: nn.Module) -> bool:
    return any(not _gathers(hook) for hook in _hooks(head))


def _is_gathered(head: nn.Module) -> bool:
    return any(_gathers(hook) for hook in _hooks(head))


def _in_forward(head: nn.Module) -> bool:
    """Return whether FSDP2 is running the forward of this head's model: there all ranks act alike."""
    state_of = getattr(head, "_get_fsdp_state", None)
    context = getattr(state_of(), "_state_ctx", None) if callable(state_of) else None
    return getattr(context, "iter_forward_root", None) is not None


def _versions(hidden: Tensor, weight: Tensor) -> tuple[int, ...]:
    """Return a key that changes if the tensors do. A compiled graph has none."""
    return () if torch.compiler.is_compiling() else (hidden._version, weight._version, id(weight))


@dataclass(frozen=True)
class Autocast:
    """Autocast state of a device."""

    device: str
    dtype: torch.dtype
    enabled: bool

    @staticmethod
    def of(x: Tensor) -> Autocast:
        kind = x.device.type
        return Autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def restore(self) -> torch.autocast:
        return torch.autocast(self.device, self.dtype, enabled=self.enabled)

    def dtype_of(self, x: Tensor) -> torch.dtype:
        """Return the dtype of a product of x."""
        return self.dtype if self.enabled and x.dtype != torch.float64 else x.dtype


# ---- the logits -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class DeferredLogits:
    """Logits `head(hidden)`, not computed yet, after `steps` of elementwise arithmetic."""

    hidden: Tensor  # [..., H]; views and slices of the logits apply to the hidden states
    head: nn.Linear
    autocast: Autocast
    versions: tuple[int, ...]  # versions of hidden states and weight when the head was called
    steps: tuple[tuple[Literal["times", "tanh"], float], ...] = ()
    cast: torch.dtype | None = None
    origin: tuple[DeferredLogits, Callable[[Tensor], Tensor]] | None = (
        None  # the logits these derive from, and how
    )
    learns: bool = field(default_factory=torch.is_grad_enabled)  # whether the logits are part of a graph
    computed: Tensor | None = field(default=None, init=False)
    closed: bool = field(default=False, init=False)  # the loss has run backward; set on the first origin

    # ---- properties known without computing the logits

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.head.out_features))

    @property
    def dtype(self) -> torch.dtype:
        return self.autocast.dtype_of(self.hidden) if self.cast is None else self.cast

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def requires_grad(self) -> bool:
        return self.hidden.requires_grad or self.head.weight.requires_grad

    @property
    def ndim(self) -> int:
        return self.hidden.dim()

    def dim(self) -> int:
        return self.hidden.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return True

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        state = "not made yet" if self.computed is None else "made"
        return f"DeferredLogits({tuple(self.shape)}, {self.dtype}, {state})"

    # ---- operations that are only recorded

    def _derived(self, redo: Callable[[Tensor], Tensor], **changed: Any) -> DeferredLogits:
        values: dict[str, Any] = {"hidden": self.hidden, "steps": self.steps, "cast": self.cast}
        return DeferredLogits(
            head=self.head,
            autocast=self.autocast,
            versions=self.versions,
            origin=(self, redo),
            **values | changed,
        )

    def _stepped(self, step: tuple[Literal["times", "tanh"], float], redo: Any) -> DeferredLogits:
        return self._derived(redo, steps=(*self.steps, step))

    def to(self, *args: Any, **options: Any) -> Any:
        device, dtype, _, layout = torch._C._nn._parse_to(
            *args, **{name: value for name, value in options.items() if name != "copy"}
        )
        moves = layout is not None or options.get("copy") or device not in (None, self.device)
        if moves or not (dtype is None or dtype.is_floating_point):
            return self._read().to(*args, **options)
        return self if dtype is None else self._derived(lambda logits: logits.to(dtype), cast=dtype)

    def float(self) -> Any:
        return self.to(torch.float32)

    def contiguous(self) -> Any:
        return self._derived(lambda logits: logits.contiguous())

    def view(self, *shape: Any) -> Any:
        return self._shaped("view", shape)

    def reshape(self, *shape: Any) -> Any:
        return self._shaped("reshape", shape)

    def _shaped(self, name: str, shape: tuple[Any, ...]) -> Any:
        sizes: Sequence[Any] = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        redo: Callable[[Tensor], Tensor] = lambda logits: getattr(logits, name)(*shape)  # noqa: E731
        vocabulary = self.head.out_features
        if (
            not sizes
            or not all(isinstance(size, (int, torch.SymInt)) for size in sizes)
            or sizes[-1] != vocabulary
        ):
            # A last size of -1 is the vocabulary as well if nothing else is left; PyTorch works that out.
            return redo(self._read())
        return self._derived(redo, hidden=self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        redo: Callable[[Tensor], Tensor] = lambda logits: logits.flatten(start_dim, end_dim)  # noqa: E731
        if end_dim % self.dim() == self.dim() - 1:
            return redo(self._read())
        return self._derived(redo, hidden=self.hidden.flatten(start_dim, end_dim))

    def __getitem__(self, index: Any) -> Any:
        redo: Callable[[Tensor], Tensor] = lambda logits: logits[index]  # noqa: E731
        if not _leaves_the_last_dimension(index, self.dim()):
            return redo(self._read())
        return self._derived(redo, hidden=self.hidden[index])

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return self._read() * other
        return self._stepped(("times", float(other)), lambda logits: logits * other)

    __rmul__ = mul = __mul__

    def __truediv__(self, other: Any) -> Any:
        if not isinstance(other, (int, float)) or other == 0:
            return self._read() / other
        return self._stepped(("times", 1.0 / other), lambda logits: logits / other)

    div = true_divide = __truediv__

    def tanh(self) -> Any:
        return self._stepped(("tanh", 0.0), torch.tanh)

    # ---- operations that compute the logits

    def tensor(self) -> Tensor:
        """Return the logits themselves. If hooks gather the head's weight, all ranks must call it."""
        if self.computed is None:
            # The first reader may have gradients disabled while a later one needs them.
            with _inference_mode(False), torch.set_grad_enabled(self.learns):
                if self.origin is None:
                    self.computed = self._with_weight(functional.linear)
                else:
                    source, redo = self.origin
                    self.computed = redo(source.tensor())
        return self.computed

    def is_computed(self) -> bool:
        """Return whether they, or the logits they derive from, exist: they may have been changed in place."""
        return self.computed is not None or (self.origin is not None and self.origin[0].is_computed())

    def _first(self) -> DeferredLogits:
        return self if self.origin is None else self.origin[0]._first()

    def _with_weight(self, consume: Consume) -> Tensor:
        """Call a function with the hidden states, and the head's weight and bias at that time."""
        self._refuse_if_changed()
        with self.autocast.restore():
            if _is_gathered(self.head):
                result: Tensor = self.head(self.hidden, consume=consume)
                return result
            return consume(self.hidden, self.head.weight, self.head.bias)

    def _refuse_if_changed(self) -> None:
        if torch.compiler.is_compiling():
            return
        first, weight = self._first(), self.head.weight
        if first.closed or _is_freed(first.hidden):
            raise _too_late("the loss has run backward, and the weight of the head may have changed since")
        if self.versions and not _is_gathered(self.head):
            is_full = weight.shape == (self.head.out_features, self.head.in_features)
            if not is_full or _versions(first.hidden, weight) != self.versions:
                raise _too_late(
                    "the hidden states or the weight of the head have changed since, or were sharded"
                )

    def _refuse_to_wait(self) -> None:
        """Refuse operations that would make this rank wait for others that may not come."""
        if _is_gathered(self.head) and not _in_forward(self.head):
            raise _too_late(
                "the weight of the head is sharded, and all ranks would have to gather it together"
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"logits have no attribute {name!r}")
        return getattr(self._read(), name)

    def _read(self) -> Tensor:
        """Return the logits to code that does not know that they are deferred."""
        if not self.is_computed():
            self._refuse_if_changed()
            self._refuse_to_wait()
        return self.tensor()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._read().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(self._read(), memo)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func is functional.cross_entropy:
            if isinstance(args[0] if args else options["input"], DeferredLogits):
                return deferred_cross_entropy(*args, **options)
        elif func in _DEFERRED and isinstance(args[0], DeferredLogits) and not options:
            return _DEFERRED[func](*args)
        return func(*_materialized(args), **_materialized(options))


# ---- the loss -------------------------------------------------------------------------------------------


def deferred_cross_entropy(
    input: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute `torch.nn.functional.cross_entropy` of logits [N, V] without the logits. Cases beyond
    `weft.linear_cross_entropy` compute them: targets that are probabilities, other shapes, steps other than scale and
    softcap."""
    scaled = scale_and_softcap(input.steps)
    of_classes = (
        isinstance(target, Tensor) and not target.is_floating_point() and target.dim() == input.dim() - 1
    )
    is_legacy = size_average is not None or reduce is not None
    if input.is_computed() or scaled is None or not of_classes or input.dim() > 2 or is_legacy:
        return functional.cross_entropy(
            input._read(), target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    scale, softcap = scaled

    def consume(hidden: Tensor, head: Tensor, bias: Tensor | None) -> Tensor:
        loss = linear_cross_entropy(
            hidden,
            head,
            target,
            bias=bias,
            class_weight=weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            logit_scale=scale,
            softcap=softcap,
            reduction=reduction,
            all_ignored="nan",
        )
        # Not a view: if a model returns one and a user divides it in place (`loss /= steps`), FSDP2 loses its hooks.
        return loss.clone()

    if not torch.is_grad_enabled():
        input._refuse_to_wait()
    loss = input._with_weight(consume)
    if loss.requires_grad and not torch.compiler.is_compiling():
        loss.register_hook(functools.partial(_close, input._first()))
    return loss.to(input.dtype)


def _close(logits: DeferredLogits, _: Tensor) -> None:
    logits.closed = True


def scale_and_softcap(steps: Sequence[tuple[str, float]]) -> tuple[float, float | None] | None:
    """Return the scale before the softcap, and the softcap, if the steps are just that: times 1/c, tanh, times c.
    Return None for other steps, and for scales that are not positive or not representable in fp32."""
    names = [name for name, _ in steps]
    tanh_index = names.index("tanh") if "tanh" in names else len(names)
    if "tanh" in names[tanh_index + 1 :]:
        return None
    scale, outer_scale = _product(steps[:tanh_index]), _product(steps[tanh_index + 1 :])
    if tanh_index < len(names):
        scale *= outer_scale
    representable = all(COLDEST <= factor <= HOTTEST for factor in (scale, outer_scale))
    return (scale, outer_scale if tanh_index < len(names) else None) if representable else None


def _product(steps: Sequence[tuple[str, float]]) -> float:
    result = 1.0
    for _, factor in steps:
        result *= factor
    return result


def _inference_mode(enabled: bool) -> Any:
    return torch.inference_mode(enabled) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def _is_freed(x: Tensor) -> bool:
    """Return whether backward has freed the graph that produced a tensor, as far as the graph tells: Python nodes,
    including those of compiled graphs, do."""
    try:
        getattr(x.grad_fn, "_raw_saved_tensors", None)
    except RuntimeError:
        return True
    return False


def _too_late(reason: str) -> RuntimeError:
    return RuntimeError(
        f"these logits were deferred and can no longer be computed: {reason}. Read outputs.logits before "
        "loss.backward() (with FSDP2 on all ranks, by outputs.logits.tensor()), or leave the head alone: "
        "weft.integrations.apply(model, loss=False)"
    )


def _leaves_the_last_dimension(index: Any, dims: int) -> bool:
    """Return whether an index takes all of the last dimension, with slices, numbers and masks for the others."""
    parts = index if isinstance(index, tuple) else (index,)
    used = 0
    for part in parts:
        if part is None:
            continue
        if part is Ellipsis:
            used = dims - sum(1 for other in parts if other is not None and other is not Ellipsis)
            continue
        used += part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1
    last = parts[-1]
    return used < dims or (used == dims and isinstance(last, slice) and last == slice(None))


def _materialized(values: Any) -> Any:
    """Return arguments with computed logits in place of deferred ones."""
    if isinstance(values, DeferredLogits):
        return values._read()
    if isinstance(values, dict):
        return {name: _materialized(value) for name, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(_materialized(value) for value in values)
    return values


_DEFERRED: dict[Any, Callable[..., Any]] = {
    torch.tanh: DeferredLogits.tanh,
    torch.mul: DeferredLogits.__mul__,
    torch.div: DeferredLogits.__truediv__,
    torch.flatten: DeferredLogits.flatten,
    torch.reshape: DeferredLogits.reshape,
}


def _operator(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(Tensor, name))
    def method(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self._read(), name)(*_materialized(args))

    return method


# Python looks operators up in the class, not by __getattr__.
for _name in (
    *(
        "__add__",
        "__radd__",
        "__sub__",
        "__rsub__",
        "__rtruediv__",
        "__neg__",
        "__pow__",
        "__abs__",
        "__matmul__",
    ),
    *(
        "__eq__",
        "__ne__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__setitem__",
        "__iter__",
        "__bool__",
        "__float__",
    ),
    *(
        "__array__",
        "__contains__",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
        "__rpow__",
        "__rmatmul__",
    ),
):
    if hasattr(Tensor, _name):
        setattr(DeferredLogits, _name, _operator(_name))
DeferredLogits.__hash__ = object.__hash__  # type: ignore[method-assign]

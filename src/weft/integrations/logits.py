"""Logits that are made only if somebody looks at them.

A model's head returns `DeferredLogits` in training: the hidden states, and what the model does to its logits since.
Shapes, dtypes, views, slices, a scale and a softcap are kept in mind; `torch.nn.functional.cross_entropy` of them is
`weft.linear_cross_entropy` of the hidden states, which has no logits in memory. Anything else makes the logits, once,
and goes on with them: the result is that of the unchanged model.

It is an object of its own and no subclass of Tensor, so that `torch.compile` traces through it and DDP and FSDP, which
hook into tensors that a model returns, do not meet it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..ops import linear_cross_entropy

Consume = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


def head_forward(head: nn.Linear, input: Tensor, consume: Consume | None = None) -> Any:
    """What takes the place of the `forward` of a model's head. In training it returns `DeferredLogits`, which call the
    head again with `consume`, a function of the input, the weight and the bias. They do not keep the weight: where it
    is there only while the head is called, as with FSDP and ZeRO-3, that call gathers it again."""
    if consume is not None:
        return consume(input, head.weight, head.bias)
    if not head.training or not torch.is_grad_enabled():
        return functional.linear(input, head.weight, head.bias)
    return DeferredLogits(input, head, Autocast.of(input))


@dataclass(frozen=True)
class Autocast:
    """The state of autocast on a device."""

    device: str
    dtype: torch.dtype
    enabled: bool

    @staticmethod
    def of(x: Tensor) -> Autocast:
        kind = x.device.type
        return Autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def again(self) -> torch.autocast:
        return torch.autocast(self.device, self.dtype, enabled=self.enabled)

    def dtype_of(self, x: Tensor) -> torch.dtype:
        """That of a product of x."""
        return self.dtype if self.enabled and x.dtype != torch.float64 else x.dtype


@dataclass(eq=False)
class DeferredLogits:
    """The logits `head(hidden)`, not made yet, after `steps` of plain arithmetic on each of them."""

    hidden: Tensor  # [..., H]; views and slices of the logits are those of the hidden states
    head: nn.Linear
    autocast: Autocast
    steps: tuple[tuple[Literal["times", "tanh"], float], ...] = ()
    cast: torch.dtype | None = None
    origin: tuple[DeferredLogits, Callable[[Tensor], Tensor]] | None = (
        None  # what these were derived from, and how
    )
    made: Tensor | None = field(default=None, init=False)

    # ---- what is known without making them

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
        return True

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
        state = "not made yet" if self.made is None else "made"
        return f"DeferredLogits({tuple(self.shape)}, {self.dtype}, {state})"

    # ---- what is kept in mind

    def _derived(self, redo: Callable[[Tensor], Tensor], **changed: Any) -> DeferredLogits:
        values: dict[str, Any] = {"hidden": self.hidden, "steps": self.steps, "cast": self.cast}
        return DeferredLogits(head=self.head, autocast=self.autocast, origin=(self, redo), **values | changed)

    def _stepped(self, step: tuple[Literal["times", "tanh"], float], redo: Any) -> DeferredLogits:
        return self._derived(redo, steps=(*self.steps, step))

    def to(self, *args: Any, **options: Any) -> Any:
        wanted = options.get("dtype", args[0] if args else None)
        others = [*args[1:], *(value for name, value in options.items() if name != "dtype")]
        if others or not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
            return self.tensor().to(*args, **options)
        return self._derived(lambda logits: logits.to(wanted), cast=wanted)

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
            # A last size of -1 is the vocabulary as well if it is all that is left; that is for PyTorch to work out.
            return redo(self.tensor())
        return self._derived(redo, hidden=self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        redo: Callable[[Tensor], Tensor] = lambda logits: logits.flatten(start_dim, end_dim)  # noqa: E731
        if end_dim % self.dim() == self.dim() - 1:
            return redo(self.tensor())
        return self._derived(redo, hidden=self.hidden.flatten(start_dim, end_dim))

    def __getitem__(self, index: Any) -> Any:
        redo: Callable[[Tensor], Tensor] = lambda logits: logits[index]  # noqa: E731
        if not _leaves_the_last_dimension(index, self.dim()):
            return redo(self.tensor())
        return self._derived(redo, hidden=self.hidden[index])

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return self.tensor() * other
        return self._stepped(("times", float(other)), lambda logits: logits * other)

    __rmul__ = mul = __mul__

    def __truediv__(self, other: Any) -> Any:
        if not isinstance(other, (int, float)) or other == 0:
            return self.tensor() / other
        return self._stepped(("times", 1.0 / other), lambda logits: logits / other)

    div = true_divide = __truediv__

    def tanh(self) -> Any:
        return self._stepped(("tanh", 0.0), torch.tanh)

    # ---- what makes them

    def tensor(self) -> Tensor:
        """The logits themselves."""
        if self.made is None:
            if self.origin is None:
                with self.autocast.again():
                    self.made = self.head(self.hidden, consume=functional.linear)
            else:
                before, redo = self.origin
                self.made = redo(before.tensor())
        return self.made

    def is_made(self) -> bool:
        """Whether they, or those they were derived from, are there: somebody may have changed them in place."""
        return self.made is not None or (self.origin is not None and self.origin[0].is_made())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

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
        elif func in _KEPT_IN_MIND and isinstance(args[0], DeferredLogits) and not options:
            return _KEPT_IN_MIND[func](*args)
        return func(*_made(args), **_made(options))


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
    """`torch.nn.functional.cross_entropy` of logits [N, V] without making them. They are made where that takes more
    than `weft.linear_cross_entropy` has: targets that are probabilities, other shapes, what is no scale and softcap."""
    scaled = scale_and_softcap(input.steps)
    of_classes = (
        isinstance(target, Tensor) and not target.is_floating_point() and target.dim() == input.dim() - 1
    )
    old = size_average is not None or reduce is not None
    if input.is_made() or scaled is None or not of_classes or input.dim() > 2 or old:
        return functional.cross_entropy(
            input.tensor(), target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    scale, softcap = scaled

    def consume(hidden: Tensor, head: Tensor, bias: Tensor | None) -> Tensor:
        return linear_cross_entropy(
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

    with input.autocast.again():
        loss: Tensor = input.head(input.hidden, consume=consume)
    return loss.to(input.dtype)


def scale_and_softcap(steps: Sequence[tuple[str, float]]) -> tuple[float, float | None] | None:
    """The scale before the softcap, and the softcap, of steps that are nothing but that: times 1/c, tanh, times c."""
    names = [name for name, _ in steps]
    scale = 1.0
    if "tanh" not in names:
        for _, factor in steps:
            scale *= factor
        return scale, None
    at = names.index("tanh")
    before, after = steps[:at], steps[at + 1 :]
    if not before or not after or "tanh" in names[at + 1 :]:
        return None
    cap = 1.0
    for _, factor in after:
        cap *= factor
    for _, factor in before:
        scale *= factor
    return (scale * cap, cap) if cap > 0 else None


def _leaves_the_last_dimension(index: Any, dims: int) -> bool:
    """Whether an index takes all of the last dimension, by slices, numbers and masks of the others."""
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


def _made(values: Any) -> Any:
    """Arguments with logits in place of deferred ones."""
    if isinstance(values, DeferredLogits):
        return values.tensor()
    if isinstance(values, dict):
        return {name: _made(value) for name, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(_made(value) for value in values)
    return values


_KEPT_IN_MIND: dict[Any, Callable[..., Any]] = {
    torch.tanh: DeferredLogits.tanh,
    torch.mul: DeferredLogits.__mul__,
    torch.div: DeferredLogits.__truediv__,
    torch.flatten: DeferredLogits.flatten,
    torch.reshape: DeferredLogits.reshape,
}


def _operator(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(Tensor, name))
    def made(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*_made(args))

    return made


# Python looks operators up in the class and not by __getattr__.
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

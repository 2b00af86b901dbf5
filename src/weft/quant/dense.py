"""Tensor subclasses that hold a dense tensor: a gradient that is no longer quantized, and a read-only view.

Every operation on them runs on `dense` and returns plain tensors. Saving or copying them gives plain tensors too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


class _Dense(Tensor):
    """Tensor subclass that wraps the plain tensor `dense`."""

    dense: Tensor

    @staticmethod
    def __new__(cls, dense: Tensor) -> _Dense:
        self: _Dense = torch.Tensor._make_wrapper_subclass(
            cls, dense.shape, dense.stride(), dtype=dense.dtype, device=dense.device
        )
        self.dense = dense
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.dense!r})"

    def __format__(self, spec: str) -> str:
        return self.dense.__format__(spec)  # type: ignore[no-any-return]

    def tolist(self) -> Any:
        return self.dense.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.dense.numpy(force=force)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.dense.__deepcopy__(memo)  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["dense"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], meta: Any, outer_size: Any, outer_stride: Any
    ) -> _Dense:
        return cls(inner["dense"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))
        first = args[0] if args else None
        return first if isinstance(first, _Dense) and result is first.dense else result


class DenseGradient(_Dense):
    """Gradient that was a `QTensor` until autograd added another gradient to it.

    Autograd adds in place to the tensor in `.grad`. A wrapper subclass cannot turn into a `torch.Tensor`, so it turns
    into this class.
    """


class DecodedView(_Dense):
    """Read-only view of a `QTensor` without codes of its own: it holds decoded values.

    A write would change only this decoded copy and leave the QTensor as it was.
    """

    def numpy(self, *, force: bool = False) -> Any:
        array = super().numpy(force=force)
        array.flags.writeable = False
        return array

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if is_view_from_outside(func, args):
            with torch.inference_mode(False):
                return cls.__torch_dispatch__(func, types, args, kwargs)
        if any(isinstance(t, DecodedView) for t in written_tensors(func, args, kwargs or {})):
            raise RuntimeError(
                f"{func} would write to a view of a QTensor. The view is a decoded copy; the QTensor would stay as it "
                "is: dequantize the QTensor first, or clone the view"
            )
        result = super().__torch_dispatch__(func, types, args, kwargs)
        # A view of a view aliases the same decoded copy, so it is read-only too.
        return tree_map(lambda t: cls(t) if type(t) is Tensor else t, result) if is_view(func) else result


def _plain(value: Any) -> Any:
    return value.dense if isinstance(value, _Dense) else value


def become_dense(q: Tensor, dense: Tensor) -> Tensor:
    """Turn the object q itself into a `DenseGradient` that holds `dense`."""
    q.__dict__.clear()
    q.__class__ = DenseGradient
    q.dense = dense  # type: ignore[attr-defined]
    return q


def is_view(func: Any) -> bool:
    """Return whether an operation returns a view of its input."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def is_view_from_outside(func: Any, args: Any) -> bool:
    """Return whether an operation in inference mode views a tensor made outside of it. PyTorch requires such a view
    not to be an inference tensor either."""
    return torch.is_inference_mode_enabled() and is_view(func) and not args[0].is_inference()


def written_tensors(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the tensors that an operation writes to, including those inside lists."""
    if not func._schema.is_mutable:
        return []
    arguments = func._schema.arguments
    bound = [*zip(arguments, args, strict=False), *((a, kwargs.get(a.name)) for a in arguments[len(args) :])]
    return tree_leaves([value for a, value in bound if a.alias_info is not None and a.alias_info.is_write])

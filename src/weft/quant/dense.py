"""Plain numbers behind a tensor subclass: a gradient that stopped being quantized, and a view that must not be written.

Every operation on such a tensor takes place on `dense`, and its results are plain. Saved or copied, it is plain too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


class _Dense(Tensor):
    """A tensor whose numbers are those of `dense`."""

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
        return self.dense.__format__(spec)  # type: ignore[no-untyped-call, no-any-return]

    def tolist(self) -> Any:
        return self.dense.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.dense.numpy(force=force)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.dense.__deepcopy__(memo)  # type: ignore[no-any-return, no-untyped-call]

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
    """A gradient that was a `QTensor` until autograd added another to it.

    Autograd adds in place to the tensor that `.grad` holds, and an object that wraps others cannot become a
    `torch.Tensor`: it becomes this instead.
    """


class DecodedView(_Dense):
    """A view of a `QTensor` that has no codes of its own: decoded numbers, which can be read and not be written.

    A write would change this copy alone, and the QTensor would keep what it had.
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
                f"{func} would write to a view of a QTensor, which holds a decoded copy, and leave the QTensor as it "
                "is: dequantize the QTensor first, or clone the view"
            )
        result = super().__torch_dispatch__(func, types, args, kwargs)
        # A view of a view shows the same numbers: it must not be written either.
        return tree_map(lambda t: cls(t) if type(t) is Tensor else t, result) if is_view(func) else result


def _plain(value: Any) -> Any:
    return value.dense if isinstance(value, _Dense) else value


def become_dense(q: Tensor, dense: Tensor) -> Tensor:
    """Turn the object q itself into a `DenseGradient` of these numbers."""
    q.__dict__.clear()
    q.__class__ = DenseGradient
    q.dense = dense  # type: ignore[attr-defined]
    return q


def is_view(func: Any) -> bool:
    """Return whether an operation returns a view of its input."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def is_view_from_outside(func: Any, args: Any) -> bool:
    """Return whether an operation in inference mode views a tensor from outside of it: PyTorch wants such a view to be
    no inference tensor either."""
    return torch.is_inference_mode_enabled() and is_view(func) and not args[0].is_inference()


def written_tensors(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the tensors that an operation writes to, whether it takes them one by one or in lists."""
    if not func._schema.is_mutable:
        return []
    arguments = func._schema.arguments
    given = [*zip(arguments, args, strict=False), *((a, kwargs.get(a.name)) for a in arguments[len(args) :])]
    return tree_leaves([value for a, value in given if a.alias_info is not None and a.alias_info.is_write])

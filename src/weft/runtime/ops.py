"""An op: its schema, how it is run, traced and differentiated, and its place in the one catalogue.

`define_op` registers a `torch.library` op, so that `torch.compile`, fake tensors, `opcheck` and autograd know it.
Called in eager mode on plain tensors, an op skips the dispatcher: that alone would cost more than the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .backend import serves

Outputs = list[Tensor]

_PLAIN = frozenset({Tensor, Parameter})

# Every op of Weft by name. Tests, benchmarks, audits and the docs iterate over it.
catalogue: dict[str, Op] = {}

_library: Any = torch.library.Library("weft", "DEF")  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Op:
    """One op. Callable with the arguments of its schema; returns a list of tensors.

    - `allocate(*args)` makes the outputs, uninitialised: shapes, dtypes and strides are decided here alone.
    - `launch(outputs, *args)` fills them with Triton kernels.
    - `reference(*args)` computes the outputs with plain PyTorch, in any float dtype up to fp64.
    - `setup_context`, `backward`: as for `torch.library.register_autograd`, with gradients in a list.
    - `mutates`: positions of the lists of tensors that it writes to. Such an op returns nothing.
    - `variants`: how many compiled variants of its kernels one dtype of inputs and one set of options may need,
      whatever the sizes are.
    """

    name: str
    schema: str
    allocate: Callable[..., Outputs]
    launch: Callable[..., None]
    reference: Callable[..., Outputs]
    variants: int
    setup_context: Callable[..., None] | None = None
    backward: Callable[..., Any] | None = None
    tensors: tuple[int, ...] = ()  # positions of the tensors, and lists of them, among the arguments
    mutates: tuple[int, ...] = ()
    overload: Any = field(default=None, compare=False)
    function: Any = field(default=None, compare=False)

    @property
    def differentiable(self) -> bool:
        return self.backward is not None

    def is_traced(self, *args: Any) -> bool:
        """Whether a call with these arguments is seen by something besides autograd: a compiler, a mode, a subclass."""
        tensors = (args[i] for i in self.tensors if args[i] is not None)
        return (
            torch.compiler.is_compiling()
            or _in_a_mode()
            or any(type(t) is not Tensor and type(t) is not Parameter for t in tensors)
        )

    def __call__(self, *args: Any) -> Outputs:
        if torch.compiler.is_compiling() or _in_a_mode():
            return self.overload(*args)  # type: ignore[no-any-return]
        requires_grad = False
        for position in self.tensors:
            arg = args[position]
            if arg is not None:
                kind = type(arg)
                if kind is list:
                    if not _PLAIN.issuperset(map(type, arg)):
                        return self.overload(*args)  # type: ignore[no-any-return]
                    if torch.is_grad_enabled():
                        requires_grad = requires_grad or any(tensor.requires_grad for tensor in arg)
                    continue
                if kind is not Tensor and kind is not Parameter:
                    return self.overload(*args)  # type: ignore[no-any-return]
                requires_grad = requires_grad or arg.requires_grad
        if requires_grad and torch.is_grad_enabled():
            if self.backward is None:
                raise RuntimeError(
                    f"weft::{self.name} has no derivative: a gradient that Weft computed cannot be differentiated "
                    "twice (create_graph=True)"
                )
            return self.function.apply(*args)  # type: ignore[no-any-return]
        return self.run(*args)

    def serves(self, x: Tensor | list[Tensor]) -> bool:
        """Whether kernels compute for x; the reference does in float64, of nothing, and without a driver. The tensors
        of a list are on one device, and in float64 all or none."""
        if isinstance(x, list):
            return any(map(self.serves, x))
        return serves(x.device) and x.dtype is not torch.float64 and x.numel() != 0

    def run(self, *args: Any) -> Outputs:
        """Compute, without autograd or dispatch."""
        if self.serves(args[0]):
            outputs = self.allocate(*args)
            self.launch(outputs, *args)
        else:
            outputs = self.reference(*args)
        for position in self.mutates:
            torch.autograd.graph.increment_version(args[position])
        return outputs


def define_op(
    schema: str,
    *,
    allocate: Callable[..., Outputs],
    launch: Callable[..., None],
    reference: Callable[..., Outputs],
    variants: int,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Op:
    """Register an op under `torch.ops.weft` and in the catalogue. The schema ends in `-> Tensor[]`, or in `-> ()` for
    an op that writes to lists of tensors that it is given, `Tensor(a!)[]`. The first argument is a tensor or a list of
    tensors: its device decides who serves the call."""
    name = schema.partition("(")[0]
    if name in catalogue:
        raise ValueError(f"the op {name!r} is already defined")
    if not schema.endswith(("-> Tensor[]", "-> ()")):
        raise ValueError(
            f"the schema of an op ends in '-> Tensor[]', one list of its outputs, or in '-> ()' if it writes to its "
            f"arguments; got {schema!r}"
        )
    if (backward is None) != (setup_context is None):
        raise ValueError(f"{name}: setup_context and backward go together")
    _library.define(schema)
    parameters = getattr(torch.ops.weft, name).default._schema.arguments
    tensors = tuple(i for i, p in enumerate(parameters) if "Tensor" in str(p.type))
    mutates = tuple(i for i in tensors if parameters[i].alias_info is not None)
    if bool(mutates) != schema.endswith("-> ()"):
        raise ValueError(f"{name}: an op either writes to its arguments or returns tensors")
    op = Op(name, schema, allocate, launch, reference, variants, setup_context, backward, tensors, mutates)
    run, fake = (_without_result(op.run), _without_result(allocate)) if mutates else (op.run, allocate)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{name}", fake, lib=_library)
    object.__setattr__(op, "overload", getattr(torch.ops.weft, name).default)
    if backward is not None and setup_context is not None:
        torch.library.register_autograd(f"weft::{name}", backward, setup_context=setup_context, lib=_library)
        object.__setattr__(op, "function", _eager_function(op, setup_context, backward))
    catalogue[name] = op
    return op


def _without_result(function: Callable[..., Any]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        function(*args)

    return call


def _eager_function(
    op: Op, setup_context: Callable[..., None], backward: Callable[..., Any]
) -> type[torch.autograd.Function]:
    """The op as an autograd node for eager calls, made of the same two functions."""

    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        outputs = op.run(*args)
        setup_context(ctx, args, outputs)
        return tuple(outputs)

    def backwards(ctx: Any, *grads: Tensor | None) -> Any:
        return backward(ctx, grads)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backwards)}
    # autograd names the node when the class is made
    return type(f"weft_{op.name}", (torch.autograd.Function,), methods)


def _in_a_mode() -> bool:
    """Whether something watches or transforms calls: a dispatch mode (fake tensors among them) or functorch."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._functorch.maybe_current_level() is not None)


def is_readable(x: Tensor) -> bool:
    """Whether the numbers of x can be looked at: no device has to be waited for, and nothing traces the call."""
    traced = torch.compiler.is_compiling() or _in_a_mode() or type(x) not in _PLAIN
    return not traced and x.device.type == "cpu"

"""An op: its schema, how it is run, traced and differentiated, and its place in the one catalogue.

`define_op` registers a `torch.library` op, so that `torch.compile`, fake tensors, `opcheck` and autograd know it.
Called in eager mode on plain tensors, an op skips the dispatcher: that alone would cost more than the launch.

A traced graph outlives the `with weft.backend(...)` around the call that was traced. So every op has a second overload,
`reference`, which always computes in plain PyTorch: the choice is a property of the node in the graph.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.nn import Parameter

from .backend import backend, chosen, serves
from .ops import _PLAIN, _are_plain, _core_apply, _is_transformed, _is_watched, _library, apply, catalogue
from .sharding import Sharding, cut, is_distributed, refuse

Outputs = list[Tensor]


@dataclass(frozen=True)
class FlatOp:
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
    sharding: Callable[[Any], Sharding] | None = None
    arguments: Any = None  # a NamedTuple class of the arguments
    overload: Any = field(default=None, compare=False)
    reference_overload: Any = field(default=None, compare=False)
    function: type[Function] = field(default=Function, compare=False)
    node: Callable[..., tuple[Tensor, ...]] = field(default=Function.apply, compare=False)

    @property
    def differentiable(self) -> bool:
        return self.backward is not None

    def is_traced(self, *args: Any) -> bool:
        """Whether a call with these arguments is seen by something besides autograd: a compiler, a mode, a transform,
        a subclass."""
        tensors = (args[i] for i in self.tensors if args[i] is not None)
        return torch.compiler.is_compiling() or _is_watched() or _is_transformed() or not _are_plain(tensors)

    def __call__(self, *args: Any) -> Outputs:
        if torch.compiler.is_compiling():
            return self.dispatch(*args)
        if _is_transformed():
            return list(apply(self.function, *args))
        if _is_watched():
            return self.dispatch(*args)
        requires_grad = False
        for position in self.tensors:
            arg = args[position]
            if arg is not None:
                kind = type(arg)
                if kind is list:
                    if not _PLAIN.issuperset(map(type, arg)):
                        return self.dispatch(*args)
                    if torch.is_grad_enabled():
                        requires_grad = requires_grad or any(tensor.requires_grad for tensor in arg)
                    continue
                if kind is not Tensor and kind is not Parameter:
                    return self.dispatch(*args)
                requires_grad = requires_grad or arg.requires_grad
        if requires_grad and torch.is_grad_enabled():
            return self.node(*args)  # type: ignore[return-value]
        return self.run(*args)

    def dispatch(self, *args: Any) -> Outputs:
        """Call by way of PyTorch's dispatcher, which finds modes and subclasses, and which compilers trace."""
        if is_distributed(*(args[i] for i in self.tensors)):
            return self.over_mesh(*args)
        overload = self.reference_overload if chosen() == "reference" else self.overload
        return overload(*args)  # type: ignore[no-any-return]

    def over_mesh(self, *args: Any) -> Outputs:
        """Call with DTensors: each rank computes its shard."""
        if self.sharding is None:
            raise refuse(f"weft::{self.name}")
        a = self.arguments(*args)
        rule = self.sharding(a)
        shards = cut(self.name, rule, a._asdict())
        outputs = self(*(shards.local.get(name, value) for name, value in zip(a._fields, args, strict=True)))
        return [shards.place(t, dims) for t, dims in zip(outputs, rule.outputs.values(), strict=True)]

    def serves(self, x: Tensor | list[Tensor]) -> bool:
        """Whether kernels compute for x; the reference does in float64, of nothing, and without a driver. The tensors
        of a list are on one device, and in float64 all or none."""
        if isinstance(x, list):
            return any(map(self.serves, x))
        return serves(x.device) and x.dtype is not torch.float64 and x.numel() != 0

    def fake(self, *args: Any) -> Outputs:
        """The outputs of a traced call. A graph has no place for tangents, which would vanish without a word."""
        if forward_ad._current_level >= 0:
            self.function.jvp(None)
        return self.allocate(*args)

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


def define_flat_op(
    schema: str,
    *,
    allocate: Callable[..., Outputs],
    launch: Callable[..., None],
    reference: Callable[..., Outputs],
    variants: int,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    sharding: Callable[[Any], Sharding] | None = None,
) -> FlatOp:
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
    _library.define(schema.replace("(", ".reference(", 1))
    packet = getattr(torch.ops.weft, name)
    parameters = packet.default._schema.arguments
    tensors = tuple(i for i, p in enumerate(parameters) if "Tensor" in str(p.type))
    mutates = tuple(i for i in tensors if parameters[i].alias_info is not None)
    if bool(mutates) != schema.endswith("-> ()"):
        raise ValueError(f"{name}: an op either writes to its arguments or returns tensors")
    op = FlatOp(
        name, schema, allocate, launch, reference, variants, setup_context, backward, tensors, mutates, sharding,
        namedtuple(name, [p.name for p in parameters]),
    )  # fmt: skip
    function = _function_of(op)
    object.__setattr__(op, "overload", packet.default)
    object.__setattr__(op, "reference_overload", packet.reference)
    object.__setattr__(op, "function", function)
    object.__setattr__(op, "node", _core_apply(function))
    of_reference = backend("reference")
    for overload, run in (("", op.run), (".reference", of_reference(op.run))):
        computes, fake = (_without_result(run), _without_result(op.fake)) if mutates else (run, op.fake)
        _library.impl(name + overload, computes, "CompositeExplicitAutograd")
        torch.library.register_fake(f"weft::{name}{overload}", fake, lib=_library)
        if backward is not None:
            torch.library.register_autograd(
                f"weft::{name}{overload}",
                lambda ctx, grads: function.backward(ctx, *grads),
                setup_context=of_reference(function.setup_context) if overload else function.setup_context,
                lib=_library,
            )
        torch.library.register_vmap(f"weft::{name}{overload}", function.vmap, lib=_library)
    catalogue[name] = op
    return op


def _without_result(function: Callable[..., Any]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        function(*args)

    return call


def _function_of(op: FlatOp) -> type[Function]:
    """The op as an autograd node, for eager calls and for functorch's transforms."""

    def forward(*args: Any) -> tuple[Tensor, ...]:
        tensors = (args[i] for i in op.tensors if args[i] is not None)
        return tuple(op.dispatch(*args) if _is_watched() or not _are_plain(tensors) else op.run(*args))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # An op computes what its backward wants only if a gradient is; functorch asks again for every transform.
        if True in ctx.needs_input_grad:
            ctx.backend, ctx.transformed = chosen(), _is_transformed()
            if op.setup_context is not None:
                op.setup_context(ctx, inputs, output)

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if op.backward is None:
            raise RuntimeError(
                f"weft::{op.name} has no derivative: a gradient that Weft computed cannot be differentiated twice"
            )
        saved = _Saved(ctx) if ctx.transformed else ctx
        if ctx.backend == "auto":
            return op.backward(saved, grads)
        with backend(ctx.backend):
            return op.backward(saved, grads)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            f"weft::{op.name} has no forward-mode derivative (torch.func.jvp, jacfwd, hessian, dual tensors): use "
            "reverse mode (autograd, torch.func.grad, torch.func.vjp), or compute with plain PyTorch"
        )

    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise NotImplementedError(
            f"weft::{op.name} cannot be mapped by torch.func.vmap (nor by what is made of it, such as jacrev): Weft's "
            "ops take leading dimensions as they are, so call it once on the whole batch, or in a loop"
        )

    methods = {f.__name__: staticmethod(f) for f in (forward, setup_context, backward, jvp, vmap)}
    # autograd names the node when the class is made
    return type(f"weft_{op.name}", (Function,), methods)


class _Saved:
    """An autograd context of a call that functorch transformed. Its tensors are wrapped for a transform that may have
    ended when the backward runs, as it has for the function that `torch.func.vjp` returns."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        unwrap = torch._C._functorch.unwrap_if_dead
        return tuple(t if t is None else unwrap(t) for t in self._ctx.saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

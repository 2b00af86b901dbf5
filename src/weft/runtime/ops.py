"""Ops: their arguments, how they run, are traced and differentiated, and their place in the catalogue.

An `Op` registers a `torch.library` op, so that `torch.compile`, fake tensors, `opcheck` and autograd know it.
In eager mode on plain tensors an op skips the dispatcher, which alone would cost more than the launch.

Arguments and outputs are NamedTuples. Where a dispatcher or autograd needs flat lists, `fields` makes them; the list
that a dispatcher returns omits the outputs that are None.

A traced graph outlives the `with weft.backend(...)` around the traced call. So every op has a second overload,
`reference`, which always computes in plain PyTorch: the choice is a property of the node in the graph.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from operator import is_
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.nn import Parameter

from .autocast import any_autocast, without_autocast
from .backend import Backend, backend, chosen, serves
from .catalogue import catalogue
from .fields import Fields, Present
from .launch import skipping_launches
from .memory import PLAIN, WorkspaceFull, current_workspace, metadata, scratch_like, without_memory, workspace
from .remembered import remembered
from .sharding import Sharding, cut, is_distributed, refuse

A = TypeVar("A", bound=tuple[Any, ...])
O = TypeVar("O", bound=tuple[Any, ...])  # noqa: E741

Gradients = dict[str, Tensor | None]

# Placeholder for a gradient in the saved arguments of a backward op: it is known only when backward runs.
LATER: Any = None


@functools.cache
def later(gradients: Callable[..., Any]) -> Any:
    """Return a placeholder for the wanted gradients in the saved arguments of a backward op."""
    return gradients(*(False for _ in gradients._fields))  # type: ignore[attr-defined]


_count_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.maybe_current_level
_modes_seen_through = 0  # `seen_through`

_library: Any = torch.library.Library("weft", "DEF")


class Nothing(NamedTuple):
    """Outputs of an op that only writes to its arguments, or saved values of an op whose gradients need none."""


class Backward(NamedTuple):
    """Arguments of an op's backward."""

    kept: Any  # the return value of the op's `keep`
    grads: Any  # gradients of the outputs, by name; None for outputs that were not used
    needs: Any  # by name, whether each tensor argument needs a gradient
    node: Any  # autograd's own object


class _Call:
    """Call in transit through autograd, which passes objects of unknown types on unchanged."""

    __slots__ = ("arguments", "differentiable", "outputs")
    outputs: Any
    differentiable: list[Tensor]  # the outputs that have gradients

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments


class Op(Generic[A, O]):
    """Op that is called with its arguments, a NamedTuple, and returns its outputs, another one.

        class ScaleOp(Op[ScaleArgs, ScaleOutputs], name="scale", variants=4):
            def allocate(self, a: ScaleArgs) -> ScaleOutputs: ...
            def launch(self, outputs: ScaleOutputs, a: ScaleArgs) -> None: ...
            def reference(self, a: ScaleArgs) -> ScaleOutputs: ...

        scale_op = ScaleOp()

    The instance registers the op under `torch.ops.weft` and in the catalogue. Its schema is derived from the
    annotations of the arguments. The first argument is a tensor or a list of tensors: its device decides the dispatch.
    An op that writes to lists of tensors among its arguments (`Written`) has the outputs `Nothing`.

    - `variants`: how many compiled variants of its kernels one dtype of inputs and one set of options may need,
      whatever the sizes.
    - `differentiable`: the names of the outputs with a gradient; by default the first one.
    """

    name: ClassVar[str]
    variants: ClassVar[int]
    _with_gradients: ClassVar[tuple[str, ...]]

    def __init_subclass__(
        cls, *, name: str, variants: int, differentiable: tuple[str, ...] = (), **more: Any
    ) -> None:
        super().__init_subclass__(**more)
        cls.name, cls.variants, cls._with_gradients = name, variants, differentiable

    # ---- methods of an op ----

    def allocate(self, a: A) -> O:
        """Allocate the outputs, uninitialized: only this method decides shapes, dtypes and strides."""
        raise NotImplementedError

    @cached_property
    def launch(self) -> Callable[[O, A], None]:
        """Function of outputs and arguments that fills the outputs with Triton kernels. The first call looks it up, so
        that `import weft` imports no kernels. An op may also define it as a method."""
        raise NotImplementedError

    def reference(self, a: A) -> O:
        """Compute the outputs with plain PyTorch, in any float dtype up to fp64."""
        raise NotImplementedError

    # Optional methods.
    # (a): `Present`, which outputs are not None. Required if outputs are optional, unless they are gradients in the
    # order of `a.needs`.
    present: Any = None
    keep: Any = None  # (a, outputs): a NamedTuple of what backward needs
    backward: Any = None  # (b: Backward): gradients by the names of the arguments
    shard: Any = None  # (a): the op's `Sharding` for DTensors; without it they are refused
    # (a): raise an error for arguments that the kernels would misread. It runs on every call, from public functions,
    # backward passes and compiled graphs alike.
    validate: Any = None

    # ---- registration ----

    def __init__(self) -> None:
        name = self.name
        if name in catalogue:
            raise ValueError(f"the op {name!r} is already defined")
        if (self.backward is None) != (self.keep is None):
            raise ValueError(f"{name}: keep and backward go together")
        bases = vars(type(self)).get("__orig_bases__", ())
        types = [kind for base in bases for kind in get_args(base)]
        if len(types) != 2:
            raise TypeError(f"{name}: derive the class from Op[Arguments, Outputs], two NamedTuples")
        arguments, outputs = types
        self.arguments: Fields[A] = Fields(arguments)
        self.outputs: Fields[O] = Fields(outputs)
        self._check_outputs()
        self.written = tuple(leaf.name for leaf in self.arguments.leaves if leaf.written)
        if bool(self.written) == bool(self.outputs.leaves):
            raise ValueError(
                f"{name}: an op that writes to its arguments must have the outputs Nothing, and no other op may"
            )
        # Without a backward all outputs count as differentiable, so that a gradient for any of them raises an error.
        names = self.outputs.names
        differentiable = self._with_gradients or (names if self.backward is None else names[:1])
        if unknown := sorted(set(differentiable) - set(names)):
            raise ValueError(
                f"{name} has no outputs {', '.join(unknown)} to differentiate; its outputs are {', '.join(names)}"
            )
        self.differentiable_outputs = tuple(i for i, output in enumerate(names) if output in differentiable)
        self.other_outputs = tuple(i for i, output in enumerate(names) if output not in differentiable)
        self._register()
        catalogue[name] = self

    def _check_outputs(self) -> None:
        """Raise an error for outputs that are not tensors, and for optional ones without `present`."""
        wrong = [leaf.name for leaf in self.outputs.leaves if not leaf.is_tensor or leaf.schema == "Tensor[]"]
        if wrong:
            raise TypeError(
                f"{self.name}: an output must be annotated Tensor or Tensor | None; {', '.join(wrong)} is not"
            )
        optional = self.present is None and any(leaf.optional for leaf in self.outputs.leaves)
        needs = tuple(f"needs_{name}" for name in self.outputs.names)
        self._as_needed = (
            optional and tuple(n for n in self.arguments.names if n.startswith("needs_")) == needs
        )
        if optional and not self._as_needed:
            raise ValueError(
                f"{self.name} has optional outputs: define `present`, which returns which of them are not None"
            )

    def _register(self) -> None:
        """Register the op with `torch.library`, and its second overload, `reference`."""
        name = self.name
        signature = f"({self.arguments.schema}) -> {'()' if self.written else 'Tensor[]'}"
        _library.define(name + signature)
        _library.define(f"{name}.reference{signature}")
        packet = getattr(torch.ops.weft, name)
        self.overload, self.reference_overload = packet.default, packet.reference
        self.function, plain_function = _functions_of(self)
        self.node: Callable[..., tuple[Any, ...]] = _core_apply(plain_function)
        of_reference = backend("reference")
        for overload in ("", ".reference"):
            run = self.as_listed(self.run)
            _library.impl(
                name + overload, of_reference(run) if overload else run, "CompositeExplicitAutograd"
            )
            torch.library.register_fake(f"weft::{name}{overload}", self.as_listed(self.fake), lib=_library)
            if self.backward is not None:
                setup, gradients = _listed_autograd(self)
                torch.library.register_autograd(
                    f"weft::{name}{overload}",
                    gradients,
                    setup_context=of_reference(setup) if overload else setup,
                    lib=_library,
                )
            torch.library.register_vmap(f"weft::{name}{overload}", self.function.vmap, lib=_library)

    # ---- calls ----

    @property
    def differentiable(self) -> bool:
        """True if the op has a backward."""
        return self.backward is not None

    def __call__(self, a: A) -> O:
        if torch.compiler.is_compiling():
            return self.dispatch(a)
        tensors = self.arguments.tensors(a)
        # `is_transformed()` and `_is_watched()`, written out: this runs in every call.
        if _functorch_level() is not None or forward_ad._current_level >= 0:
            a = self.resolved(a)
            return self.outputs.build(*apply(self.function, a, *self.arguments.tensors(a)))
        if _count_dispatch_modes() > _modes_seen_through:
            return self.dispatch(a)
        requires_grad = False
        for tensor in tensors:
            if tensor is not None:
                kind = type(tensor)
                if kind is list:
                    if not PLAIN.issuperset(map(type, tensor)):
                        return self.dispatch(a)
                    if any(map(Tensor.is_neg, tensor)):
                        return self(self.resolved(a))
                elif kind is not Tensor and kind is not Parameter:
                    return self.dispatch(a)
                elif tensor.is_neg():
                    return self(self.resolved(a))
                elif tensor.requires_grad:
                    requires_grad = True
        if requires_grad and torch.is_grad_enabled():
            call = _Call(a)
            results = self.node(call, *tensors)
            # Autograd records its history in the tensors it receives, and makes new ones only if it must.
            return (
                call.outputs
                if all(map(is_, results, call.differentiable))
                else self.with_history(call, results)
            )
        return self.run(a)

    def resolved(self, a: A) -> A:
        """Return the arguments with negated views materialized: the memory of `z.conj().imag` holds the negative of its
        values, and kernels read memory."""

        def resolve(name: str, value: Any) -> Any:
            if isinstance(value, list):
                return [resolve(name, each) for each in value]
            if not (isinstance(value, Tensor) and value.is_neg()):
                return value
            if name in self.written:
                raise ValueError(
                    f"{name} is written, and is a view of the negative of its memory: pass a clone"
                )
            return value.resolve_neg()

        values = zip(self.arguments.names, self.arguments.flatten(a), strict=True)
        return self.arguments.build(*(resolve(name, value) for name, value in values))

    def with_history(self, call: _Call, results: Iterable[Tensor]) -> O:
        """Return the outputs of a call, with `results` in place of the differentiable ones."""
        flat, remaining = list(self.outputs.flatten(call.outputs)), iter(results)
        for i in self.differentiable_outputs:
            flat[i] = flat[i] if flat[i] is None else next(remaining)
        return self.outputs.build(*flat)

    def dispatch(self, a: A) -> O:
        """Call through PyTorch's dispatcher, which handles modes and subclasses, and which compilers trace."""
        if is_distributed(*self.arguments.tensors(a)):
            return self.over_mesh(a)
        overload = self.reference_overload if chosen() == "reference" else self.overload
        tensors = overload(*self.arguments.flatten(a))
        return self.outputs.from_present(self.present_in(a), tensors or ())

    def over_mesh(self, a: A) -> O:
        """Call with DTensors: each rank computes with its shards."""
        if self.shard is None:
            raise refuse(f"weft::{self.name}")
        rule: Sharding = self.shard(a)
        values = self.arguments.flatten(a)
        shards = cut(self.name, rule, dict(zip(self.arguments.names, values, strict=True)))
        local = (
            shards.local.get(name, value) for name, value in zip(self.arguments.names, values, strict=True)
        )
        outputs = self.outputs.flatten(self(self.arguments.build(*local)))
        return self.outputs.build(
            *(
                None if t is None else shards.place(t, rule.outputs.get(name))
                for name, t in zip(self.outputs.names, outputs, strict=True)
            )
        )

    def into(self, destinations: O, a: A, dropped: Collection[str] = ()) -> O:
        """Compute into the tensors of `destinations`, and into new ones where it has None. Not for autograd. The caller
        does not read the outputs named in `dropped`: their memory is scratch."""
        if is_distributed(*self.arguments.tensors(a), *self.outputs.flatten(destinations)):
            raise refuse(f"weft::{self.name} with out=")
        targets = self.outputs.flatten(destinations)
        if self.is_traced(a) or self.is_negated(a, targets) or not self.serves_call(a):
            pairs = zip(targets, self.outputs.flatten(self(a)), strict=True)
            return self.outputs.build(*(new if t is None else t.copy_(new) for t, new in pairs))
        if self.validate is not None:
            self.validate(a)
        expected, device = self.outputs.flatten(self.expected(a)), _device_of(a)
        results = [name not in dropped for name in self.outputs.names]
        filled = targets
        if any(t is None and e is not None and r for t, e, r in zip(targets, expected, results, strict=True)):
            new = self.outputs.flatten(self.allocate(a))
            filled = tuple(n if t is None and r else t for t, n, r in zip(targets, new, results, strict=True))

        def outputs() -> O:
            return self.outputs.build(
                *(
                    scratch_like(e, device) if t is None and e is not None else t
                    for t, e in zip(filled, expected, strict=True)
                )
            )

        written = self.launched(outputs, a)
        torch.autograd.graph.increment_version([target for target in targets if target is not None])
        return written

    def expected(self, a: A) -> O:
        """Return the outputs that `allocate` would return, as tensors without memory."""
        return (
            self.allocate(a)
            if is_observed()
            else _expected(self, tuple(map(metadata, self.arguments.flatten(a))))
        )

    def launched(self, outputs: Callable[[], O], a: A) -> O:
        """Launch the kernels that fill `outputs()`, and return these. Scratch memory comes from the caller's workspace
        if there is one."""

        def launch() -> O:
            filled = outputs()
            self.launch(filled, a)
            return filled

        space = current_workspace()
        if space is None:
            return launch()
        try:
            if space.is_idle:
                space.check_apart(self.arguments.names, self.arguments.flatten(a))
            return space.run(launch)
        except WorkspaceFull:
            if not space.is_idle:  # in the launch of another op, which is refused as a whole
                raise
        with workspace() as needed, skipping_launches():
            needed.run(lambda: (outputs(), self.launch(self.allocate(a), a)))
        raise space.too_small(f"weft::{self.name}", needed.nbytes)

    def is_negated(self, a: A, targets: Iterable[Tensor | None]) -> bool:
        """Return whether the memory of a tensor holds the negative of its values."""
        tensors = (*targets, *self.arguments.tensors(a))
        return any(tensor.is_neg() for tensor in tensors if isinstance(tensor, Tensor))

    def is_traced(self, a: A) -> bool:
        """Return whether anything besides autograd sees a call with these arguments: a compiler, a mode, a transform, a
        subclass."""
        if is_observed():
            return True
        return not _are_plain(tensor for tensor in self.arguments.tensors(a) if tensor is not None)

    def serves(self, x: Tensor | list[Tensor]) -> bool:
        """Return whether kernels serve a call on x. The reference serves float64, empty tensors, and devices without a
        driver. The tensors of a list are on one device, and either all or none in float64."""
        if isinstance(x, list):
            return any(map(self.serves, x))
        return serves(x.device) and x.dtype is not torch.float64 and x.numel() != 0

    def serves_call(self, a: A) -> bool:
        """Return whether kernels serve a call. The first argument decides, unless an op says otherwise."""
        return self.serves(a[0])

    def present_in(self, a: A) -> Present | None:
        """Return which outputs are not None, or None if no output is optional."""
        if self._as_needed:
            return a.needs  # type: ignore[attr-defined, no-any-return]
        return None if self.present is None else self.present(a)

    def run(self, a: A) -> O:
        """Compute, without autograd or dispatch."""
        if any_autocast():
            # A product in the reference, or in a library that a launch calls, is part of this op.
            with without_autocast():
                return self.run(a)
        if self.validate is not None:
            self.validate(a)
        if self.serves_call(a):
            outputs = self.allocate(a)
            if current_workspace() is None:
                self.launch(outputs, a)
            else:
                self.launched(lambda: outputs, a)
        else:
            outputs = self.reference(a)
        for name in self.written:
            torch.autograd.graph.increment_version(getattr(a, name))
        return outputs

    def fake(self, a: A) -> O:
        """Return the outputs of a traced call. Forward-mode tangents are refused: a graph cannot hold them, and they
        would be lost silently."""
        if forward_ad._current_level >= 0:
            self.function.jvp(None)
        if self.validate is not None:
            self.validate(a)
        return self.allocate(a)

    def as_listed(self, compute: Callable[[A], O]) -> Callable[..., list[Tensor] | None]:
        """Return a function for the dispatcher: from flat arguments to a list of the outputs present."""

        def call(*leaves: Any) -> list[Tensor] | None:
            outputs = compute(self.arguments.build(*leaves))
            return (
                None
                if self.written
                else [tensor for tensor in self.outputs.flatten(outputs) if tensor is not None]
            )

        return call


@remembered
def _expected(op: Op[A, O], leaves: tuple[Any, ...]) -> O:
    return op.allocate(op.arguments.build(*map(without_memory, leaves)))


def _device_of(a: tuple[Any, ...]) -> torch.device:
    first = a[0]
    device: torch.device = (first[0] if isinstance(first, list) else first).device
    return device


def apply(function: type[Function], *args: Any) -> Any:
    """Return `function.apply(*args)` for a function with a `setup_context`, without functorch's cost outside
    functorch."""
    if torch.compiler.is_compiling():
        if not any(isinstance(a, Tensor) and a.requires_grad for a in args) or not torch.is_grad_enabled():
            return function.forward(*args)  # Dynamo would pass an unsupported context
        return function.apply(*args)
    if is_transformed():
        return function.apply(*args)
    return _core_apply(function)(*args)


def _core_apply(function: type[Function]) -> Callable[..., Any]:
    """Return the core method that `Function.apply` ends in. It takes a quarter of the time; the rest is functorch's."""
    return super(Function, function).apply  # type: ignore[misc, no-any-return]


# ---- autograd -------------------------------------------------------------------------------------------

# Tensor subclasses that may arrive as gradients -> decoder to the plain tensor that such a gradient represents.
_gradient_decoders: dict[type, Callable[[Any], Tensor]] = {}


def register_gradient_decoder(kind: type, decode: Callable[[Any], Tensor]) -> None:
    """Let every backward pass receive gradients of a tensor subclass as plain tensors."""
    _gradient_decoders[kind] = decode


def plain_gradient(grad: Any) -> Any:
    """Return a gradient, a tensor or None, as a plain tensor: decoded if it is stored as codes."""
    decode = _gradient_decoders.get(type(grad))
    return grad if decode is None else decode(grad)


class _Saved(NamedTuple):
    """Return value of an op's `keep`, without its tensors. Autograd saves those, and notices if one was changed."""

    fields: Fields[Any]
    others: tuple[Any, ...]
    backend: Backend
    transformed: bool


def _save(op: Op[A, O], ctx: Any, a: A, outputs: O, *, transformed: bool) -> None:
    assert op.keep is not None
    values: tuple[Any, ...] = op.keep(a, outputs)
    fields = Fields.of(type(values))
    ctx.save_for_backward(*fields.tensors(values))
    ctx.kept = _Saved(fields, fields.others(values), chosen(), transformed)
    ctx.set_materialize_grads(False)


def _mark(op: Op[A, O], ctx: Any, output: Sequence[Tensor | None]) -> None:
    """Tell autograd which outputs have no gradient."""
    without = [output[i] for i in op.other_outputs if output[i] is not None]
    if without:
        ctx.mark_non_differentiable(*without)


def _gradients(
    op: Op[A, O], needs_type: Any, ctx: Any, grads: O, needs: Iterable[bool]
) -> Iterable[Tensor | None]:
    """Return the gradients of the tensors among the arguments, in order."""
    if op.backward is None:
        raise _no_derivative(op)
    flat = op.outputs.flatten(grads)
    if all(flat[i] is None for i in op.differentiable_outputs):
        return (None for _ in op.arguments.tensor_names)
    if any(type(grad) in _gradient_decoders for grad in flat):
        grads = op.outputs.build(*map(plain_gradient, flat))
    tensors = ctx.saved_tensors
    saved: _Saved = ctx.kept
    if saved.transformed:
        # The tensors are wrapped for a transform that may have ended by now, as in the function that `torch.func.vjp`
        # returns.
        unwrap = torch._C._functorch.unwrap_if_dead
        tensors = tuple(t if t is None else unwrap(t) for t in tensors)
    call = Backward(saved.fields.join(tensors, saved.others), grads, needs_type(*needs), ctx)
    if saved.backend == "auto":
        gradients = op.backward(call)
    else:
        with backend(saved.backend):
            gradients = op.backward(call)
    if not gradients.keys() <= op.arguments.tensor_name_set:
        wrong = sorted(gradients.keys() - op.arguments.tensor_name_set)
        raise TypeError(f"weft::{op.name} has no arguments {', '.join(wrong)} that could have gradients")
    return map(gradients.get, op.arguments.tensor_names)


def _no_derivative(op: Op[A, O]) -> RuntimeError:
    return RuntimeError(
        f"weft::{op.name} has no derivative: a gradient that Weft computed cannot be differentiated twice"
    )


def _needs_type(op: Op[A, O]) -> Any:
    """Return a NamedTuple class with a member for each tensor among the arguments."""
    return namedtuple(f"{op.name}_needs", op.arguments.tensor_names)


def _functions_of(op: Op[A, O]) -> tuple[type[Function], type[Function]]:
    """Return the op as autograd functions: one for functorch's transforms, and one for eager calls on plain tensors.
    Besides the NamedTuple of arguments they take its tensors one by one, since autograd finds tensors only there."""
    needs_type = _needs_type(op)
    build, flatten, places = op.outputs.build, op.outputs.flatten, op.differentiable_outputs

    def forward(a: A, *tensors: Any) -> tuple[Tensor | None, ...]:
        plain = not _is_watched() and _are_plain(t for t in tensors if t is not None)
        return flatten(op.run(a) if plain else op.dispatch(a))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        # An op computes what its backward needs only if a gradient is wanted, which functorch decides for every
        # transform.
        if op.keep is not None and True in ctx.needs_input_grad:
            _save(op, ctx, inputs[0], build(*output), transformed=is_transformed())
            _mark(op, ctx, output)

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, *_gradients(op, needs_type, ctx, build(*grads), ctx.needs_input_grad[1:])

    # In a plain call only the differentiable outputs go through autograd. Its forward takes the node: a separate
    # `setup_context`, which functorch wants, would cost another call.

    def forward_plain(ctx: Any, call: _Call, *tensors: Any) -> tuple[Tensor, ...]:
        call.outputs = outputs = op.run(call.arguments)
        flat = flatten(outputs)
        call.differentiable = [flat[i] for i in places if flat[i] is not None]
        if op.keep is not None:
            _save(op, ctx, call.arguments, outputs, transformed=False)
            if len(places) > 1:
                ctx.places = [i for i in places if flat[i] is not None]
        return tuple(call.differentiable)

    def backward_plain(ctx: Any, *grads: Tensor | None) -> Any:
        if op.backward is None:
            raise _no_derivative(op)
        flat: list[Tensor | None] = [None] * len(op.outputs.leaves)
        for i, grad in zip(getattr(ctx, "places", places), grads, strict=True):
            flat[i] = grad
        return None, *_gradients(op, needs_type, ctx, build(*flat), ctx.needs_input_grad[1:])

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            f"weft::{op.name} has no forward-mode derivative (torch.func.jvp, jacfwd, hessian, dual tensors): use "
            "reverse mode (autograd, torch.func.grad, torch.func.vjp), or compute with plain PyTorch"
        )

    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise NotImplementedError(
            f"weft::{op.name} cannot be mapped by torch.func.vmap (nor by transforms built on it, such as jacrev): "
            "Weft's ops take any leading dimensions, so call it once on the whole batch, or in a loop"
        )

    def node_class(**methods: Callable[..., Any]) -> type[Function]:
        # Autograd takes the name of the node from the class when the class is created.
        return type(f"weft_{op.name}", (Function,), {name: staticmethod(f) for name, f in methods.items()})

    return (
        node_class(forward=forward, setup_context=setup_context, backward=backward, jvp=jvp, vmap=vmap),
        node_class(forward=forward_plain, backward=backward_plain, jvp=jvp, vmap=vmap),
    )


def _listed_autograd(op: Op[A, O]) -> tuple[Callable[..., None], Callable[..., Any]]:
    """Return (setup_context, backward) of the op for calls through the dispatcher."""
    needs_type = _needs_type(op)
    leaves = op.arguments.leaves
    tensors = [i for i, leaf in enumerate(leaves) if leaf.is_tensor]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        if True in ctx.needs_input_grad:
            a = op.arguments.build(*inputs)
            ctx.present = op.present_in(a)
            outputs = op.outputs.from_present(ctx.present, output)
            _save(op, ctx, a, outputs, transformed=is_transformed())
            _mark(op, ctx, op.outputs.flatten(outputs))

    def backward(ctx: Any, grads: list[Tensor | None]) -> Any:
        named = op.outputs.from_present(ctx.present, grads)
        needs = ctx.needs_input_grad
        gradients = iter(_gradients(op, needs_type, ctx, named, [needs[i] for i in tensors]))
        return tuple(next(gradients) if leaf.is_tensor else None for leaf in leaves)

    return setup_context, backward


# ---- observers of a call other than autograd ------------------------------------------------------------


def _are_plain(tensors: Iterable[Tensor | list[Tensor]]) -> bool:
    """Return whether every tensor, alone or in a list, is a Tensor or a Parameter rather than another subclass."""
    return all(_are_plain(t) if isinstance(t, list) else type(t) in PLAIN for t in tensors)


@contextmanager
def seen_through() -> Iterator[None]:
    """Discount one dispatch mode in this block, which sees what ops do rather than the ops."""
    global _modes_seen_through
    _modes_seen_through += 1
    try:
        yield
    finally:
        _modes_seen_through -= 1


def _is_watched() -> bool:
    """Return whether a dispatch mode, such as that of fake tensors, sees every call of the dispatcher."""
    return bool(_count_dispatch_modes() > _modes_seen_through)


def is_observed() -> bool:
    """Return whether a compiler, a dispatch mode or a transform sees every call."""
    return (
        torch.compiler.is_compiling()
        or _functorch_level() is not None
        or forward_ad._current_level >= 0
        or _count_dispatch_modes() > _modes_seen_through
    )


def is_transformed() -> bool:
    """Return whether functorch (grad, vjp, jvp, vmap) or forward-mode differentiation is active."""
    return _functorch_level() is not None or forward_ad._current_level >= 0


def is_readable(x: Tensor) -> bool:
    """Return whether the values of x can be read without waiting for a device and without anything that traces or
    records the call. A recording of `weft.capture` cannot hold a value that was read, so every mode counts here."""
    if x.device.type != "cpu" or type(x) not in PLAIN:
        return False
    return not (torch.compiler.is_compiling() or _count_dispatch_modes() or is_transformed())

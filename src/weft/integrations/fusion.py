"""Weft's ops found in a traced model that knows nothing of Weft.

    torch.compile(model, options={"pre_grad_custom_pass": weft.compile_pass()})

The pass looks at the graph that `torch.compile` has traced, before autograd: what it puts there brings its own backward
along. A rule is a few lines of plain PyTorch and the op that computes the same. Rules are compared with the graph by
what is computed and not by how it is spelled: `x * x`, `x.pow(2)` and `torch.square(x)` are one thing, factors come in
either order, and a conversion to the dtype that a tensor has already is none. Where the input of a norm is the sum of a
residual connection, that goes into the op as well, which no replacement of modules can do.

Where a norm or a gated unit is quantised to FP8 afterwards, in inference, its op writes the codes. Projects write that
in so many ways that no rule would do: what the graph computes between the result and its codes is run on random
numbers, and the format of Weft is taken that gives the same codes and scales.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from ..ops import glu, quantize, rms_norm
from ..quant import QTensor
from ..quant.formats import CONVENTIONS
from ..runtime import backend

# ---- rules ----------------------------------------------------------------------------------------------


def _normed(x: Tensor, eps: float) -> Tensor:
    h = x.float()
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)


def _norm_rounded_first(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * _normed(x, eps).to(x.dtype)


def _norm_rounded_last(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (weight * _normed(x, eps)).to(x.dtype)


def _norm_of_weight_around_zero(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return ((1.0 + weight) * _normed(x, eps)).to(x.dtype)


def _norm_of_torch(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, shape, weight, eps)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _geglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.gelu(gate) * up


def _geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return functional.gelu(gate, approximate="tanh") * up


class Rule(NamedTuple):
    """What is looked for, and what takes its place."""

    name: str
    pattern: Callable[..., Tensor]
    op: Callable[..., Any]
    options: dict[str, Any]


# The first that fits is taken: a weight around zero and the 1 that is added to it would be a weight as well.
RULES = (
    Rule("norm", _norm_of_weight_around_zero, rms_norm, {"weight_offset": 1.0}),
    Rule("norm", _norm_rounded_first, rms_norm, {"casting": "llama"}),
    Rule("norm", _norm_rounded_last, rms_norm, {}),
    Rule("norm", _norm_of_torch, rms_norm, {}),
    Rule("glu", _swiglu, glu, {"act": "silu"}),
    Rule("glu", _geglu, glu, {"act": "gelu"}),
    Rule("glu", _geglu_tanh, glu, {"act": "gelu_tanh"}),
)

# ---- what a node computes -------------------------------------------------------------------------------

_SPELLINGS: dict[Any, str] = {
    **dict.fromkeys((operator.mul, operator.imul, torch.mul, torch.multiply, "mul"), "mul"),
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add"), "add"),
    **dict.fromkeys((operator.truediv, torch.div, torch.true_divide, "div"), "div"),
    **dict.fromkeys((operator.pow, torch.pow, "pow"), "pow"),
    **dict.fromkeys((torch.square, "square"), "square"),
    **dict.fromkeys((torch.mean, "mean"), "mean"),
    **dict.fromkeys((torch.rsqrt, "rsqrt"), "rsqrt"),
    **dict.fromkeys(("to", "float", "type", "type_as", "bfloat16", "half"), "cast"),
    **dict.fromkeys((functional.silu, torch._C._nn.silu), "silu"),
    **dict.fromkeys((functional.gelu, torch._C._nn.gelu), "gelu"),
    **dict.fromkeys((functional.rms_norm, torch.rms_norm), "rms_norm"),
}
_EITHER_ORDER = ("mul", "add")


class Meaning(NamedTuple):
    """What a node computes of what."""

    op: str
    inputs: tuple[Any, ...]


def meaning(node: fx.Node) -> Meaning | None:
    """What a node computes, or None if no rule has to do with it."""
    name = _SPELLINGS.get(node.target) if node.op in ("call_function", "call_method") else None
    arguments, options = list(node.args), dict(node.kwargs)
    if name == "cast":
        return Meaning(
            "cast", (arguments[0], options.get("dtype", arguments[1] if len(arguments) > 1 else None))
        )
    if name == "pow" and arguments[1:] == [2]:
        return Meaning("square", (arguments[0],))
    if name == "mul" and arguments[0] is arguments[1]:
        return Meaning("square", (arguments[0],))
    if name == "pow" and arguments[1:] == [-0.5]:
        return Meaning("rsqrt", (arguments[0],))
    if name == "mean":
        dims = options.pop("dim", arguments[1] if len(arguments) > 1 else None)
        keeps = options.pop("keepdim", arguments[2] if len(arguments) > 2 else False)
        return (
            Meaning("mean", (arguments[0],)) if dims in (-1, [-1], (-1,)) and keeps and not options else None
        )
    if name == "silu":
        return (
            Meaning("silu", (arguments[0],)) if not options.get("inplace") and len(arguments) == 1 else None
        )
    if name == "gelu":
        how = options.pop("approximate", arguments[1] if len(arguments) > 1 else "none")
        return Meaning("gelu_tanh" if how == "tanh" else "gelu", (arguments[0],))
    if name == "rms_norm":
        given = dict(zip(("input", "normalized_shape", "weight", "eps"), arguments, strict=False)) | options
        return Meaning(name, tuple(given.get(n) for n in ("input", "normalized_shape", "weight", "eps")))
    return None if name is None or options else Meaning(name, tuple(arguments))


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("example_value")
    return value.dtype if isinstance(value, Tensor) else None


# ---- comparing ------------------------------------------------------------------------------------------


class Match(NamedTuple):
    """Where a rule was found."""

    bound: dict[str, Any]  # what the arguments of the pattern are in the graph
    inside: frozenset[fx.Node]  # nodes that are not needed any more


class Pattern:
    """The traced graph of a rule."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.graph = fx.symbolic_trace(rule.pattern).graph
        (self.result,) = (node.args[0] for node in self.graph.nodes if node.op == "output")

    def match(self, node: fx.Node) -> Match | None:
        """The rule as what computes `node`."""
        for found in self._compare(self.result, node, Match({}, frozenset())):
            within = found.inside | {node}
            if all(user in within for inner in found.inside - {node} for user in inner.users):
                return found
        return None

    def _compare(self, pattern: Any, node: Any, so_far: Match) -> Iterator[Match]:
        """All ways in which a node of the graph computes what a node of the pattern does."""
        if not isinstance(pattern, fx.Node):
            if not isinstance(node, fx.Node) and pattern == node:
                yield so_far
        elif pattern.op == "placeholder":
            yield from self._bind(str(pattern.target), node, so_far)
        elif not isinstance(node, fx.Node):
            return
        else:
            meant = meaning(pattern)
            assert meant is not None, f"{pattern} in a pattern"
            if meant.op == "cast":
                yield from self._compare_cast(meant, node, so_far)
                return
            found = meaning(node)
            if found is None or found.op != meant.op or len(found.inputs) != len(meant.inputs):
                # A conversion to the dtype that a tensor has already.
                if found is not None and found.op == "cast" and _dtype(found.inputs[0]) == _dtype(node):
                    yield from self._compare(pattern, found.inputs[0], _with(so_far, node))
                return
            orders = [found.inputs, found.inputs[::-1]] if meant.op in _EITHER_ORDER else [found.inputs]
            for inputs in orders:
                yield from self._compare_all(meant.inputs, inputs, _with(so_far, node))

    def _compare_all(
        self, patterns: tuple[Any, ...], nodes: tuple[Any, ...], so_far: Match
    ) -> Iterator[Match]:
        if not patterns:
            yield so_far
            return
        for found in self._compare(patterns[0], nodes[0], so_far):
            yield from self._compare_all(patterns[1:], nodes[1:], found)

    def _compare_cast(self, meant: Meaning, node: fx.Node, so_far: Match) -> Iterator[Match]:
        """A conversion of the pattern: `.float()`, or to the dtype of x, which is bound by what is converted."""
        inner, to_x = meant.inputs[0], meant.inputs[1] is not None
        found = meaning(node)
        converted = found is not None and found.op == "cast"
        sources = [(found.inputs[0], _with(so_far, node))] if converted and found is not None else []
        for source, state in [*sources, (node, so_far)]:
            for match in self._compare(inner, source, state):
                wanted = _dtype(match.bound["x"]) if to_x else torch.float32
                if _dtype(node) == wanted:
                    yield match

    def _bind(self, name: str, node: Any, so_far: Match) -> Iterator[Match]:
        if name == "eps" and not (isinstance(node, float) or node is None):
            return
        if name in ("x", "weight", "gate", "up") and not (
            isinstance(node, fx.Node) and _dtype(node) in _FLOATS
        ):
            return
        inside = so_far.inside
        if name == "weight":
            # To widen a weight before the product changes no number.
            found = meaning(node)
            if found is not None and found.op == "cast" and _dtype(node) == torch.float32:
                node, inside = found.inputs[0], inside | {node}
            if node.meta["example_value"].dim() != 1:
                return
        if so_far.bound.get(name, node) is node:
            yield Match(so_far.bound | {name: node}, inside)


_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _with(match: Match, node: fx.Node) -> Match:
    return Match(match.bound, match.inside | {node})


# ---- replacing ------------------------------------------------------------------------------------------


def fuse(graph: fx.Graph, found: Counter[str]) -> None:
    """Put Weft's ops into a graph, and count them in `found`."""
    patterns = [Pattern(rule) for rule in RULES]
    gone: set[fx.Node] = set()
    # From the end: what a norm converts its result to is part of it, and without that it would be another norm.
    for node in reversed(list(graph.nodes)):
        for pattern in patterns if node not in gone else ():
            match = pattern.match(node)
            if match is not None:
                gone |= match.inside
                found[_replace(graph, node, pattern.rule, match.bound)] += 1
                break
    graph.eliminate_dead_code()
    _quantise(graph, found)
    graph.eliminate_dead_code()
    graph.lint()


def _replace(graph: fx.Graph, node: fx.Node, rule: Rule, bound: dict[str, Any]) -> str:
    options = dict(rule.options)
    if rule.op is glu:
        with graph.inserting_before(node):
            new = graph.call_function(glu, (bound["gate"], bound["up"]), options)
        _take_the_place(node, new)
        return rule.name
    x, weight = bound["x"], bound["weight"]
    options["eps"] = bound["eps"]
    if _dtype(node) != _dtype(x):
        options["out_dtype"] = _dtype(node)
    parts = _residual(x, weight)
    if parts is None:
        with graph.inserting_before(node):
            new = graph.call_function(rms_norm, (x, weight), options)
        _take_the_place(node, new)
        return rule.name
    with graph.inserting_after(x):
        new = graph.call_function(rms_norm, (parts[0], weight), {**options, "residual": parts[1]})
    with graph.inserting_after(new):
        total = graph.call_function(operator.getitem, (new, 1))
        normed = graph.call_function(operator.getitem, (new, 0))
    _take_the_place(x, total)
    _take_the_place(node, normed)
    return "residual + norm"


def _take_the_place(old: fx.Node, new: fx.Node) -> None:
    new.meta["example_value"] = old.meta.get("example_value")
    old.replace_all_uses_with(new)


def _residual(x: fx.Node, weight: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two tensors of which x is the sum, if they are alike and the weight is there before it."""
    found = meaning(x)
    if found is None or found.op != "add" or not all(isinstance(part, fx.Node) for part in found.inputs):
        return None
    values = [part.meta.get("example_value") for part in (x, *found.inputs)]
    if not all(isinstance(value, Tensor) for value in values):
        return None
    alike = all(value.shape == values[0].shape and value.dtype == values[0].dtype for value in values)
    return tuple(found.inputs) if alike and weight.op in ("placeholder", "get_attr") else None


# ---- results that are quantised -------------------------------------------------------------------------

_FORMATS = [
    f"e4m3:{block}:{convention}{scales}"
    for block in ("row", "1x128")
    for convention in CONVENTIONS
    for scales in ("", ":pow2")
]


class Quantised(NamedTuple):
    """A part of a graph that quantises y: nodes that depend on y alone, and the two of them that others read."""

    y: fx.Node
    codes: fx.Node
    scale: fx.Node
    inside: list[fx.Node]  # in the order of the graph

    @staticmethod
    def of(y: fx.Node) -> Quantised | None:
        inside: dict[fx.Node, None] = {y: None}
        node = y.next
        while node.op != "root":
            sources = node.all_input_nodes if node.op in ("call_function", "call_method") else []
            if sources and all(source in inside for source in sources):
                inside[node] = None
            node = node.next
        read = [node for node in inside if any(user not in inside for user in node.users)]
        codes = [node for node in read if _dtype(node) == torch.float8_e4m3fn]
        scales = [node for node in read if _dtype(node) == torch.float32]
        if y in read or len(read) != 2 or not codes or not scales:
            return None
        return Quantised(y, codes[0], scales[0], [node for node in inside if node is not y])

    def format(self) -> str | None:
        """The format of Weft that gives the same codes and scales for random numbers, if there is one."""
        like: Tensor = self.y.meta["example_value"]
        if not all(isinstance(size, int) for size in like.shape):
            return None
        graph = fx.Graph()
        copies = {self.y: graph.placeholder("y")}
        for node in self.inside:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output((copies[self.codes], copies[self.scale]))
        with _disable_current_modes(), torch.no_grad(), backend("reference"):
            y = torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).to(like.dtype)
            try:
                codes, scale = fx.GraphModule({}, graph)(y)
            except Exception:  # whatever a model's own code does on a CPU
                return None
            distances = {spec: d for spec in _FORMATS if (d := _apart(y, spec, codes, scale)) is not None}
        nearest = min(distances, key=distances.__getitem__, default=None)
        return nearest if nearest is not None and distances[nearest] <= 5e-3 else None


def _apart(y: Tensor, spec: str, codes: Tensor, scale: Tensor) -> float | None:
    """Which share of the codes differs from those of a format, by one place at most; None if more than that differs. A
    quotient of a number and a tensor, which PyTorch computes in two roundings, moves scales by one place."""
    try:
        found = quantize(y, spec).rowwise
    except ValueError:  # a row that blocks of 128 do not divide, or a convention without such scales
        return None
    assert found is not None
    if scale.numel() != found.scale.numel() or codes.numel() != found.data.numel():
        return None
    places = codes.flatten().view(torch.int8).int() - found.data.flatten().view(torch.int8).int()
    if places.abs().max() > 1 or not torch.allclose(
        scale.flatten(), found.scale.flatten(), rtol=3e-7, atol=0
    ):
        return None
    return float((places != 0).float().mean())


def _quantise(graph: fx.Graph, found: Counter[str]) -> None:
    """Let ops of Weft in a graph write codes, where nobody reads their results but what quantises them."""
    for op in [node for node in graph.nodes if node.target in (rms_norm, glu)]:
        with_residual = "residual" in op.kwargs
        results = (
            [u for u in op.users if u.target is operator.getitem and u.args[1] == 0]
            if with_residual
            else [op]
        )
        value = results[0].meta.get("example_value") if results else None
        if not isinstance(value, Tensor) or value.requires_grad or "out_dtype" in op.kwargs:
            continue
        part = Quantised.of(results[0])
        spec = part.format() if part is not None else None
        if part is None or spec is None:
            continue
        op.kwargs = {**op.kwargs, "quantize": spec}
        for old, which in ((part.codes, _codes), (part.scale, _scale)):
            with graph.inserting_before(old):
                shape = tuple(old.meta["example_value"].shape)
                _take_the_place(old, graph.call_function(which, (part.y, shape)))
        name = "glu" if op.target is glu else "residual + norm" if with_residual else "norm"
        found[name] -= 1
        found[f"{name} + quantise"] += 1
    for name in [name for name, number in found.items() if not number]:
        del found[name]


def _codes(q: QTensor, shape: tuple[int, ...]) -> Tensor:
    assert q.rowwise is not None
    return q.rowwise.data.reshape(shape)


def _scale(q: QTensor, shape: tuple[int, ...]) -> Tensor:
    assert q.rowwise is not None
    return q.rowwise.scale.reshape(shape)


def compile_pass() -> Any:
    """A pass for Inductor's `pre_grad_custom_pass` that finds residual + norm, norm and gated units in a model, in
    inference also those that are quantised to FP8 afterwards, and computes them with Weft.

    Its `found` counts, by name, what it has found in the graphs that were compiled. A graph that Inductor has in its
    cache already holds Weft's ops: it is not searched again, and not counted.

    >>> import torch, weft
    >>> model = torch.nn.Sequential(torch.nn.RMSNorm(64, eps=1e-6), torch.nn.Linear(64, 64))
    >>> y = torch.compile(model, options={"pre_grad_custom_pass": weft.compile_pass()})(torch.randn(4, 64))
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class CompilePass(CustomGraphPass):
        def __init__(self) -> None:
            self.found: Counter[str] = Counter()

        def __call__(self, graph: fx.Graph) -> None:
            fuse(graph, self.found)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    return CompilePass()

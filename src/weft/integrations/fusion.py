"""Compile pass that finds Weft's ops in a traced model that knows nothing of Weft.

    torch.compile(model, options={"pre_grad_custom_pass": weft.compile_pass()})

The pass works on the graph that `torch.compile` has traced, before autograd: each op it inserts brings its own
backward. A rule is a few lines of plain PyTorch and the op that computes the same. Rules are matched by what is
computed, not by how it is spelled: `x * x`, `x.pow(2)` and `torch.square(x)` are equal, factors come in either order,
and a conversion to the dtype that a tensor already has is ignored. If the input of a norm is the sum of a residual
connection, the sum moves into the op as well, which no replacement of modules can do.

In inference, if a norm or gated unit is then quantized to FP8, its op writes the codes. Projects write that in too
many ways for rules: what the graph computes between the result and its codes is run on random values, and the pass
picks the Weft format that gives the same codes and scales.
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
    """Pattern to look for, and its replacement."""

    name: str
    pattern: Callable[..., Tensor]
    op: Callable[..., Any]
    options: dict[str, Any]


# The first match wins: a weight around zero plus the 1 that is added to it would match as a weight, too.
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
    """Operation of a node with its inputs."""

    op: str
    inputs: tuple[Any, ...]


def meaning(node: fx.Node) -> Meaning | None:
    """Return what a node computes, or None if no rule uses it."""
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
        keeps_dim = options.pop("keepdim", arguments[2] if len(arguments) > 2 else False)
        return (
            Meaning("mean", (arguments[0],))
            if dims in (-1, [-1], (-1,)) and keeps_dim and not options
            else None
        )
    if name == "silu":
        return (
            Meaning("silu", (arguments[0],)) if not options.get("inplace") and len(arguments) == 1 else None
        )
    if name == "gelu":
        approximation = options.pop("approximate", arguments[1] if len(arguments) > 1 else "none")
        return Meaning("gelu_tanh" if approximation == "tanh" else "gelu", (arguments[0],))
    if name == "rms_norm":
        values = dict(zip(("input", "normalized_shape", "weight", "eps"), arguments, strict=False)) | options
        return Meaning(name, tuple(values.get(n) for n in ("input", "normalized_shape", "weight", "eps")))
    return None if name is None or options else Meaning(name, tuple(arguments))


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("example_value")
    return value.dtype if isinstance(value, Tensor) else None


# ---- comparing ------------------------------------------------------------------------------------------


class Match(NamedTuple):
    """Match of a rule."""

    bound: dict[str, Any]  # the pattern's arguments in the graph
    inside: frozenset[fx.Node]  # nodes that are no longer needed


class Pattern:
    """Traced graph of a rule."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.graph = fx.symbolic_trace(rule.pattern).graph
        (self.result,) = (node.args[0] for node in self.graph.nodes if node.op == "output")

    def match(self, node: fx.Node) -> Match | None:
        """Return the match of the rule that computes `node`, or None."""
        for match in self._compare(self.result, node, Match({}, frozenset())):
            covered = match.inside | {node}
            if all(user in covered for inner in match.inside - {node} for user in inner.users):
                return match
        return None

    def _compare(self, pattern: Any, node: Any, so_far: Match) -> Iterator[Match]:
        """Yield all ways in which a node of the graph computes what a node of the pattern does."""
        if not isinstance(pattern, fx.Node):
            if not isinstance(node, fx.Node) and pattern == node:
                yield so_far
        elif pattern.op == "placeholder":
            yield from self._bind(str(pattern.target), node, so_far)
        elif not isinstance(node, fx.Node):
            return
        else:
            expected = meaning(pattern)
            assert expected is not None, f"{pattern} is not allowed in a pattern"
            if expected.op == "cast":
                yield from self._compare_cast(expected, node, so_far)
                return
            actual = meaning(node)
            if actual is None or actual.op != expected.op or len(actual.inputs) != len(expected.inputs):
                # Skip a conversion to the dtype that a tensor already has.
                if actual is not None and actual.op == "cast" and _dtype(actual.inputs[0]) == _dtype(node):
                    yield from self._compare(pattern, actual.inputs[0], _with(so_far, node))
                return
            orders = [actual.inputs, actual.inputs[::-1]] if expected.op in _EITHER_ORDER else [actual.inputs]
            for inputs in orders:
                yield from self._compare_all(expected.inputs, inputs, _with(so_far, node))

    def _compare_all(
        self, patterns: tuple[Any, ...], nodes: tuple[Any, ...], so_far: Match
    ) -> Iterator[Match]:
        if not patterns:
            yield so_far
            return
        for match in self._compare(patterns[0], nodes[0], so_far):
            yield from self._compare_all(patterns[1:], nodes[1:], match)

    def _compare_cast(self, expected: Meaning, node: fx.Node, so_far: Match) -> Iterator[Match]:
        """Match a conversion of the pattern: `.float()`, or to the dtype of x, which is bound by what is converted."""
        inner, to_x = expected.inputs[0], expected.inputs[1] is not None
        actual = meaning(node)
        converted = actual is not None and actual.op == "cast"
        sources = [(actual.inputs[0], _with(so_far, node))] if converted and actual is not None else []
        for source, state in [*sources, (node, so_far)]:
            for match in self._compare(inner, source, state):
                dtype = _dtype(match.bound["x"]) if to_x else torch.float32
                if _dtype(node) == dtype:
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
            # Widening a weight before the product changes no value.
            actual = meaning(node)
            if actual is not None and actual.op == "cast" and _dtype(node) == torch.float32:
                node, inside = actual.inputs[0], inside | {node}
            if node.meta["example_value"].dim() != 1:
                return
        if so_far.bound.get(name, node) is node:
            yield Match(so_far.bound | {name: node}, inside)


_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _with(match: Match, node: fx.Node) -> Match:
    return Match(match.bound, match.inside | {node})


# ---- replacing ------------------------------------------------------------------------------------------


def fuse(graph: fx.Graph, counts: Counter[str]) -> None:
    """Replace patterns in a graph by Weft's ops, and count them in `counts`."""
    patterns = [Pattern(rule) for rule in RULES]
    removed: set[fx.Node] = set()
    # Backwards: the conversion of a norm's result is part of the norm, and without it another rule would match.
    for node in reversed(list(graph.nodes)):
        for pattern in patterns if node not in removed else ():
            match = pattern.match(node)
            if match is not None:
                removed |= match.inside
                counts[_replace(graph, node, pattern.rule, match.bound)] += 1
                break
    graph.eliminate_dead_code()
    _quantize(graph, counts)
    graph.eliminate_dead_code()
    graph.lint()


def _replace(graph: fx.Graph, node: fx.Node, rule: Rule, bound: dict[str, Any]) -> str:
    options = dict(rule.options)
    if rule.op is glu:
        with graph.inserting_before(node):
            new = graph.call_function(glu, (bound["gate"], bound["up"]), options)
        _replace_uses(node, new)
        return rule.name
    x, weight = bound["x"], bound["weight"]
    options["eps"] = bound["eps"]
    if _dtype(node) != _dtype(x):
        options["out_dtype"] = _dtype(node)
    parts = _residual(x, weight)
    if parts is None:
        with graph.inserting_before(node):
            new = graph.call_function(rms_norm, (x, weight), options)
        _replace_uses(node, new)
        return rule.name
    with graph.inserting_after(x):
        new = graph.call_function(rms_norm, (parts[0], weight), {**options, "residual": parts[1]})
    with graph.inserting_after(new):
        total = graph.call_function(operator.getitem, (new, 1))
        normed = graph.call_function(operator.getitem, (new, 0))
    _replace_uses(x, total)
    _replace_uses(node, normed)
    return "residual + norm"


def _replace_uses(old: fx.Node, new: fx.Node) -> None:
    new.meta["example_value"] = old.meta.get("example_value")
    old.replace_all_uses_with(new)


def _residual(x: fx.Node, weight: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the two tensors whose sum is x, if they are alike and the weight is available before x."""
    addition = meaning(x)
    if (
        addition is None
        or addition.op != "add"
        or not all(isinstance(part, fx.Node) for part in addition.inputs)
    ):
        return None
    values = [part.meta.get("example_value") for part in (x, *addition.inputs)]
    if not all(isinstance(value, Tensor) for value in values):
        return None
    alike = all(value.shape == values[0].shape and value.dtype == values[0].dtype for value in values)
    return tuple(addition.inputs) if alike and weight.op in ("placeholder", "get_attr") else None


# ---- quantized results ----------------------------------------------------------------------------------

_FORMATS = [
    f"e4m3:{block}:{convention}{scales}"
    for block in ("row", "1x128")
    for convention in CONVENTIONS
    for scales in ("", ":pow2")
]


class QuantizedPart(NamedTuple):
    """Part of a graph that quantizes y: nodes that depend only on y, and the two of them that others read."""

    y: fx.Node
    codes: fx.Node
    scale: fx.Node
    inside: list[fx.Node]  # in the order of the graph

    @staticmethod
    def of(y: fx.Node) -> QuantizedPart | None:
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
        return QuantizedPart(y, codes[0], scales[0], [node for node in inside if node is not y])

    def format(self) -> str | None:
        """Return the Weft format that gives the same codes and scales for random values, or None."""
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
            except Exception:  # a model's own code may raise anything on a CPU
                return None
            distances = {
                spec: d for spec in _FORMATS if (d := _difference(y, spec, codes, scale)) is not None
            }
        nearest = min(distances, key=distances.__getitem__, default=None)
        return nearest if nearest is not None and distances[nearest] <= 5e-3 else None


def _difference(y: Tensor, spec: str, codes: Tensor, scale: Tensor) -> float | None:
    """Return the share of codes that differ from a format's, each by one unit at most; None if they differ more.
    PyTorch computes the quotient of a number and a tensor with two roundings, which moves scales by one unit."""
    try:
        expected = quantize(y, spec).rowwise
    except ValueError:  # rows not divisible into blocks of 128, or a convention without such scales
        return None
    assert expected is not None
    if scale.numel() != expected.scale.numel() or codes.numel() != expected.data.numel():
        return None
    places = codes.flatten().view(torch.int8).int() - expected.data.flatten().view(torch.int8).int()
    if places.abs().max() > 1 or not torch.allclose(
        scale.flatten(), expected.scale.flatten(), rtol=3e-7, atol=0
    ):
        return None
    return float((places != 0).float().mean())


def _quantize(graph: fx.Graph, counts: Counter[str]) -> None:
    """Let ops of Weft in a graph write codes if their results are read only to be quantized."""
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
        part = QuantizedPart.of(results[0])
        spec = part.format() if part is not None else None
        if part is None or spec is None:
            continue
        op.kwargs = {**op.kwargs, "quantize": spec}
        for old, read_part in ((part.codes, _codes), (part.scale, _scale)):
            with graph.inserting_before(old):
                shape = tuple(old.meta["example_value"].shape)
                _replace_uses(old, graph.call_function(read_part, (part.y, shape)))
        name = "glu" if op.target is glu else "residual + norm" if with_residual else "norm"
        counts[name] -= 1
        counts[f"{name} + quantize"] += 1
    for name in [name for name, count in counts.items() if not count]:
        del counts[name]


def _codes(q: QTensor, shape: tuple[int, ...]) -> Tensor:
    assert q.rowwise is not None
    return q.rowwise.data.reshape(shape)


def _scale(q: QTensor, shape: tuple[int, ...]) -> Tensor:
    assert q.rowwise is not None
    return q.rowwise.scale.reshape(shape)


def compile_pass() -> Any:
    """Return a pass for Inductor's `pre_grad_custom_pass` that replaces residual + norm, norm and gated units of a
    model by Weft's ops, in inference also those that are then quantized to FP8.

    Its `found` counts, by name, the matches in the compiled graphs. A graph in Inductor's cache already holds Weft's
    ops: it is neither searched again nor counted.

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

"""Primitives of scalar functions and of functions of rows: their text in Triton, definition in PyTorch and derivative.

Arithmetic is in fp32 for floats, and in the promoted type of PyTorch for integers. `/` and `//`, `%` follow Triton:
the first divides in fp32, the others round toward zero as in C.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .expression import Graph, Value

Gradient = Callable[..., Sequence["Value | None"]]

FLOATS = ("float16", "bfloat16", "float32", "float64")
TYPES = {
    "int1": torch.bool,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    **dict.fromkeys(FLOATS, torch.float32),
}


class Row(NamedTuple):
    """How a primitive of a row combines elements."""

    combine: str  # two partial results, {0} and {1}
    identity: float  # of `combine`, which stands for elements outside of the row
    is_scan: bool = False  # one result for each element


class Primitive(NamedTuple):
    """Operation on scalars.

    `kind` says which types it takes: "float" converts its operands to fp32, "number" promotes them to one type, which
    is that of the result, "comparison" does the same with a bool as the result, "bits" is for integers and bools, and
    "total" is "number" with integers and bools as int64.
    """

    kind: str
    triton: str  # with {0}, {1}, ... for the operands
    torch: Callable[..., Tensor]
    gradient: Gradient | None = None  # (gradient of the result, result, *operands): those of the operands
    row: Row | None = (
        None  # of a row: a reduction or a scan over its elements, in PyTorch over the last dimension
    )


def apply(name: str, *operands: Any) -> Any:
    graph: Graph = next(each.graph for each in operands if hasattr(each, "graph"))
    return graph.apply(name, *operands)


def _where(condition: Any, a: Any, b: Any) -> Any:
    return apply("where", condition, a, b)


def _none(*operands: Any) -> Sequence[None]:
    """Derivative of a function that is constant almost everywhere."""
    return [None] * (len(operands) - 2)


def _simple(slope: Callable[[Any], Any]) -> Gradient:
    """Derivative of a function of one operand, from its slope."""
    return lambda g, y, x: (g * slope(x),)


def _of_result(slope: Callable[[Any], Any]) -> Gradient:
    """Derivative of a function of one operand, from the slope as a function of the result."""
    return lambda g, y, x: (g * slope(y),)


def _of_larger(g: Any, y: Any, a: Any, b: Any) -> Any:
    """Derivative of a maximum; equal operands share the gradient, as in PyTorch."""
    half = _where(a == b, g * 0.5, 0.0)
    return _where(a > b, g, half), _where(b > a, g, half)


def _of_smaller(g: Any, y: Any, a: Any, b: Any) -> Any:
    half = _where(a == b, g * 0.5, 0.0)
    return _where(a < b, g, half), _where(b < a, g, half)


def _sign(x: Any) -> Any:
    return _where(x > 0, 1.0, _where(x < 0, -1.0, 0.0))


def _round(x: Tensor) -> Tensor:
    """Round half away from zero."""
    whole = torch.trunc(x)
    return whole + torch.where((x - whole).abs() >= 0.5, torch.sign(x), 0.0)


def _truncating(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="trunc")


def _extremum_of_row(name: str, identity: float) -> Callable[[Tensor], Tensor]:
    """Return the extremum of a row, where a NaN counts as the identity; that of no elements is the identity."""

    def compute(x: Tensor) -> Tensor:
        least = identity if x.is_floating_point() else clamped(identity, x.dtype)
        x = torch.where(x.isnan(), least, x) if x.is_floating_point() else x
        padded = torch.cat([x, x.new_full((*x.shape[:-1], 1), least)], dim=-1)
        result: Tensor = getattr(padded, f"a{name}")(-1, keepdim=True)
        return result

    return compute


def clamped(number: float, dtype: torch.dtype) -> int:
    """Return an infinity as the integer of a dtype that stands for it."""
    return torch.iinfo(dtype).max if number > 0 else torch.iinfo(dtype).min


def _of_extremum(g: Any, y: Any, x: Any) -> Any:
    """Elements that are equal to the extremum share its gradient."""
    return (_where(x == y, g / apply("sum", _where(x == y, 1.0, 0.0)), 0.0),)


_NAN = ", propagate_nan=tl.PropagateNan.ALL)"

PRIMITIVES: dict[str, Primitive] = {
    # Arithmetic.
    "add": Primitive("number", "({0} + {1})", torch.add, lambda g, y, a, b: (g, g)),
    "sub": Primitive("number", "({0} - {1})", torch.sub, lambda g, y, a, b: (g, -g)),
    "mul": Primitive("number", "({0} * {1})", torch.mul, lambda g, y, a, b: (g * b, g * a)),
    "truediv": Primitive("float", "({0} / {1})", torch.div, lambda g, y, a, b: (g / b, -g * y / b)),
    "div_rn": Primitive("float", "tl.div_rn({0}, {1})", torch.div, lambda g, y, a, b: (g / b, -g * y / b)),
    "floordiv": Primitive("bits", "({0} // {1})", _truncating, _none),
    "mod": Primitive(
        "number", "({0} % {1})", torch.fmod, lambda g, y, a, b: (g, -g * apply("trunc", a / b))
    ),
    "neg": Primitive("number", "(-{0})", torch.neg, lambda g, y, x: (-g,)),
    "abs": Primitive("number", "tl.abs({0})", torch.abs, lambda g, y, x: (g * _sign(x),)),
    "fma": Primitive(
        "float", "tl.fma({0}, {1}, {2})", lambda a, b, c: a * b + c, lambda g, y, a, b, c: (g * b, g * a, g)
    ),
    # A NaN is ignored beside a number unless it is asked to propagate, as in Triton.
    "maximum": Primitive("number", "tl.maximum({0}, {1})", torch.fmax, _of_larger),
    "minimum": Primitive("number", "tl.minimum({0}, {1})", torch.fmin, _of_smaller),
    "maximum_or_nan": Primitive("number", "tl.maximum({0}, {1}" + _NAN, torch.maximum, _of_larger),
    "minimum_or_nan": Primitive("number", "tl.minimum({0}, {1}" + _NAN, torch.minimum, _of_smaller),
    # Choices and comparisons.
    "where": Primitive(
        "where", "tl.where({0}, {1}, {2})", torch.where,
        lambda g, y, c, a, b: (None, _where(c, g, 0.0), _where(c, 0.0, g)),
    ),
    "eq": Primitive("comparison", "({0} == {1})", torch.eq, _none),
    "ne": Primitive("comparison", "({0} != {1})", torch.ne, _none),
    "lt": Primitive("comparison", "({0} < {1})", torch.lt, _none),
    "le": Primitive("comparison", "({0} <= {1})", torch.le, _none),
    "gt": Primitive("comparison", "({0} > {1})", torch.gt, _none),
    "ge": Primitive("comparison", "({0} >= {1})", torch.ge, _none),
    "isnan": Primitive("comparison", "({0} != {0})", torch.isnan, _none),
    "isinf": Primitive("comparison", "(tl.abs({0}) == float('inf'))", torch.isinf, _none),
    # Integers and bools.
    "and_": Primitive("bits", "({0} & {1})", torch.bitwise_and, _none),
    "or_": Primitive("bits", "({0} | {1})", torch.bitwise_or, _none),
    "xor": Primitive("bits", "({0} ^ {1})", torch.bitwise_xor, _none),
    "invert": Primitive("bits", "(~{0})", torch.bitwise_not, _none),
    "lshift": Primitive("bits", "({0} << {1})", torch.bitwise_left_shift, _none),
    "rshift": Primitive("bits", "({0} >> {1})", torch.bitwise_right_shift, _none),
    # Functions of a float.
    "exp": Primitive("float", "tl.exp({0})", torch.exp, _of_result(lambda y: y)),
    "exp2": Primitive("float", "tl.exp2({0})", torch.exp2, _of_result(lambda y: y * math.log(2))),
    "expm1": Primitive("float", "expm1({0})", torch.expm1, _of_result(lambda y: y + 1.0)),
    "log": Primitive("float", "tl.log({0})", torch.log, lambda g, y, x: (g / x,)),
    "log2": Primitive("float", "tl.log2({0})", torch.log2, lambda g, y, x: (g / (x * math.log(2)),)),
    "log10": Primitive("float", "libdevice.log10({0})", torch.log10, lambda g, y, x: (g / (x * math.log(10)),)),
    "log1p": Primitive("float", "log1p({0})", torch.log1p, lambda g, y, x: (g / (x + 1.0),)),
    "sqrt": Primitive("float", "tl.sqrt_rn({0})", torch.sqrt, lambda g, y, x: (g * 0.5 / y,)),
    "rsqrt": Primitive("float", "tl.rsqrt({0})", torch.rsqrt, lambda g, y, x: (g * -0.5 * y / x,)),
    "sin": Primitive("float", "tl.sin({0})", torch.sin, _simple(lambda x: apply("cos", x))),
    "cos": Primitive("float", "tl.cos({0})", torch.cos, _simple(lambda x: -apply("sin", x))),
    "tan": Primitive("float", "libdevice.tan({0})", torch.tan, _of_result(lambda y: 1.0 + y * y)),
    "asin": Primitive(
        "float", "libdevice.asin({0})", torch.asin, _simple(lambda x: apply("rsqrt", 1.0 - x * x))
    ),
    "acos": Primitive(
        "float", "libdevice.acos({0})", torch.acos, _simple(lambda x: -apply("rsqrt", 1.0 - x * x))
    ),
    "atan": Primitive("float", "libdevice.atan({0})", torch.atan, lambda g, y, x: (g / (1.0 + x * x),)),
    "sinh": Primitive("float", "libdevice.sinh({0})", torch.sinh, _simple(lambda x: apply("cosh", x))),
    "cosh": Primitive("float", "libdevice.cosh({0})", torch.cosh, _simple(lambda x: apply("sinh", x))),
    "tanh": Primitive("float", "libdevice.tanh({0})", torch.tanh, _of_result(lambda y: 1.0 - y * y)),
    "asinh": Primitive(
        "float", "libdevice.asinh({0})", torch.asinh, _simple(lambda x: apply("rsqrt", x * x + 1.0))
    ),
    "acosh": Primitive(
        "float", "libdevice.acosh({0})", torch.acosh, _simple(lambda x: apply("rsqrt", x * x - 1.0))
    ),
    "atanh": Primitive("float", "libdevice.atanh({0})", torch.atanh, lambda g, y, x: (g / (1.0 - x * x),)),
    "sigmoid": Primitive("float", "sigmoid({0})", torch.sigmoid, _of_result(lambda y: y * (1.0 - y))),
    "erf": Primitive(
        "float", "tl.erf({0})", torch.erf, _simple(lambda x: apply("exp", -x * x) * (2 / math.sqrt(math.pi)))
    ),
    "erfc": Primitive(
        "float", "libdevice.erfc({0})", torch.special.erfc,
        _simple(lambda x: apply("exp", -x * x) * (-2 / math.sqrt(math.pi))),
    ),
    "floor": Primitive("float", "tl.floor({0})", torch.floor, _none),
    "ceil": Primitive("float", "tl.ceil({0})", torch.ceil, _none),
    "trunc": Primitive("float", "libdevice.trunc({0})", torch.trunc, _none),
    "rint": Primitive("float", "libdevice.rint({0})", torch.round, _none),
    "round": Primitive("float", "libdevice.round({0})", _round, _none),
    # Functions of two floats.
    "pow": Primitive(
        "float", "libdevice.pow({0}, {1})", torch.pow,
        lambda g, y, a, b: (g * b * apply("pow", a, b - 1.0), g * y * apply("log", a)),
    ),
    "atan2": Primitive(
        "float", "libdevice.atan2({0}, {1})", torch.atan2,
        lambda g, y, a, b: (g * b / (a * a + b * b), -g * a / (a * a + b * b)),
    ),
    "hypot": Primitive(
        "float", "libdevice.hypot({0}, {1})", torch.hypot, lambda g, y, a, b: (g * a / y, g * b / y)
    ),
    "copysign": Primitive(
        "float", "libdevice.copysign({0}, {1})", torch.copysign,
        lambda g, y, a, b: (_where(y == a, g, -g), None),
    ),
    # Of a row.
    "sum": Primitive(
        "total", "tl.sum({0}, 1, keep_dims=True)", lambda x: x.sum(-1, keepdim=True), lambda g, y, x: (g,),
        Row("({0} + {1})", 0.0),
    ),
    "max": Primitive(
        "number", "tl.max({0}, 1, keep_dims=True)", _extremum_of_row("max", -math.inf), _of_extremum,
        Row("tl.maximum({0}, {1})", -math.inf),
    ),
    "min": Primitive(
        "number", "tl.min({0}, 1, keep_dims=True)", _extremum_of_row("min", math.inf), _of_extremum,
        Row("tl.minimum({0}, {1})", math.inf),
    ),
    "cumsum": Primitive(
        "total", "tl.cumsum({0}, 1)", lambda x: x.cumsum(-1), lambda g, y, x: (apply("cumsum_reversed", g),),
        Row("({0} + {1})", 0.0, is_scan=True),
    ),
    "cumsum_reversed": Primitive(
        "total", "tl.cumsum({0}, 1, reverse=True)", lambda x: x.flip(-1).cumsum(-1).flip(-1),
        lambda g, y, x: (apply("cumsum", g),), Row("({0} + {1})", 0.0, is_scan=True),
    ),
}  # fmt: skip

# Methods of Python's operators, without underscores.
BINARY = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "truediv", "floordiv": "floordiv", "mod": "mod",
    "and_": "and", "or_": "or", "xor": "xor", "lshift": "lshift", "rshift": "rshift",
    "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
}  # fmt: skip
COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
UNARY = {"neg": "neg", "invert": "invert", "abs": "abs"}


def simplified(name: str, inputs: Sequence[Value]) -> Value | None:
    """Return the operand or number that an operation on 0 or 1 is equal to in a gradient, where a product with 0 is 0
    whatever the other operand is; None if it has to be computed."""
    first, second = ([each.constant for each in inputs] + [None, None])[:2]
    if name == "add":
        return inputs[1] if _is(first, 0.0) else inputs[0] if _is(second, 0.0) else None
    if name == "mul":
        if _is(first, 0.0) or _is(second, 0.0):
            return inputs[0] if _is(first, 0.0) else inputs[1]
        return inputs[1] if _is(first, 1.0) else inputs[0] if _is(second, 1.0) else None
    if name in ("sum", "cumsum", "cumsum_reversed") and _is(first, 0.0):
        return inputs[0]
    if name == "neg" and type(first) in (int, float):
        return inputs[0].graph.number(-first)
    if name == "where" and inputs[1].index == inputs[2].index:
        return inputs[1]
    return None


def _is(value: Any, number: float) -> bool:
    """Return whether a constant is this float; an integer would change the type of a sum, and -0.0 its sign."""
    return isinstance(value, float) and value == number and math.copysign(1.0, value) > 0


def type_named(dtype: Any) -> str:
    """Return the name of a type that a function converts to; all floats are fp32."""
    for name in (getattr(dtype, "name", None), str(dtype)):
        if name in TYPES:
            return "float32" if name in FLOATS else name
    raise TypeError(f"a scalar is converted to {', '.join(TYPES)}; got {dtype!r}")


# ---- functions of tl and libdevice ------------------------------------------------------------------------------


def _signature(text: str) -> inspect.Signature:
    namespace: dict[str, Any] = {}
    exec(f"def f({text}): pass", namespace)
    return inspect.signature(namespace["f"])


def _extremum(name: str) -> Callable[..., Any]:
    return lambda graph, x, y, nan: graph.apply(f"{name}_or_nan" if nan else name, x, y)


def _clamp(graph: Graph, x: Any, low: Any, high: Any, nan: bool) -> Value:
    suffix = "_or_nan" if nan else ""
    return graph.apply("minimum" + suffix, graph.apply("maximum" + suffix, x, low), high)


def _plain(name: str) -> Callable[..., Any]:
    return lambda graph, *operands: graph.apply(name, *operands)


def _reduction(name: str) -> Callable[..., Any]:
    def apply_to_row(graph: Graph, x: Any, axis: Any = None, keep_dims: bool = False) -> Value:
        if axis not in (None, 0, -1):
            raise TypeError(f"a row has one axis: tl.{name}(x), not axis={axis}")
        return graph.apply(name, x)

    return apply_to_row


_PARAMETERS = {"where": "condition, x, y", "fma": "x, y, z"}
_HIDDEN = {"maximum_or_nan", "minimum_or_nan", "cumsum_reversed"}

CALLS: dict[str, tuple[inspect.Signature, Callable[..., Any]]] = {
    name: (
        _signature(_PARAMETERS.get(name, "x, y" if "{1}" in each.triton else "x")),
        _plain(name),
    )
    for name, each in PRIMITIVES.items()
    if name not in _HIDDEN and name not in BINARY and name != "neg" and each.row is None
} | {
    "maximum": (_signature("x, y, propagate_nan=False"), _extremum("maximum")),
    "minimum": (_signature("x, y, propagate_nan=False"), _extremum("minimum")),
    "clamp": (_signature("x, min, max, propagate_nan=False"), _clamp),
    "fdiv": (_signature("x, y, ieee_rounding=False"), lambda graph, x, y, _: graph.apply("truediv", x, y)),
    "sqrt_rn": (_signature("x"), _plain("sqrt")),
    "cast": (_signature("x, dtype"), lambda graph, x, dtype: graph.lifted(x).to(dtype)),
    "fmod": (_signature("x, y"), _plain("mod")),
    "sum": (_signature("input, axis=None, keep_dims=False"), _reduction("sum")),
    "max": (_signature("input, axis=None, keep_dims=False"), _reduction("max")),
    "min": (_signature("input, axis=None, keep_dims=False"), _reduction("min")),
    "cumsum": (
        _signature("input, axis=0, reverse=False"),
        lambda graph, x, axis, reverse: _reduction("cumsum_reversed" if reverse else "cumsum")(graph, x, axis),
    ),
    "static_assert": (_signature("cond, msg=''"), lambda graph, cond, msg: None),
}  # fmt: skip


OF_ROWS = frozenset(name for name, each in PRIMITIVES.items() if each.row is not None) | {"length"}


def advice() -> str:
    scalar = ", ".join(sorted({*CALLS} - OF_ROWS))
    row = ", ".join(sorted({*CALLS} & OF_ROWS))
    return (
        f"it may use arithmetic, comparisons, .to() and {scalar}; a function of rows also {row} and x.numel"
    )

"""Contracts of Weft's launches for `triton_loom.prove`: what every launch of a call guarantees, for all sizes at once.

Nobody writes them. The call of a workload is traced with symbols for its sizes (`symbolic`). One trace stands for the
sizes for which host code takes the same branches: a region. Then the solver is asked for sizes outside all regions, and
the call is traced there, until no sizes are left. Launches that look the same in several regions are one contract.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from operator import add, mul
from typing import Any

import sympy
from torch.utils._sympy import functions as torch_sympy

from ...runtime import Variant
from ..compiled.offline import ttir_of
from ..families import Workload, loaded_of
from .loaded import Given, Loaded, exception_index, within
from .tracing import LARGEST, Launched, Pointer, Size, Trace, candidates, variable

try:
    from triton_loom.ir.provenance import root_of
    from triton_loom.ir.reader import parse
    from triton_loom.prove import Buffer, Contract, cdiv, descriptors, symbol
    from triton_loom.prove.compiling import renamed
    from triton_loom.prove.obligations import ACCESSES
    from triton_loom.prove.solver import QUICK, ask, z3
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "contracts are proven by triton-loom with the solver z3, and one of them is not installed: "
        "pip install 'weft[prove]'"
    ) from error

# Names of element types in TTIR. Kernels see fp8 elements as bytes.
_ELEMENTS = {"fp64": "f64", "fp32": "f32", "fp16": "f16", "bf16": "bf16", "u8": "i8"}


# ---- expressions --------------------------------------------------------------------------------------


class Untranslatable(Exception):
    """An expression of host code that cannot be translated into z3's integers."""


class Translator:
    """Translates sympy expressions into z3's. Divisors must be positive: the conditions for that are collected in
    `positive`, and users of the expressions must prove them."""

    def __init__(self, names: Mapping[sympy.Symbol, str]) -> None:
        self.names = names
        self.positive: list[Any] = []

    def __call__(self, e: Any) -> Any:
        if isinstance(e, bool) or e is sympy.true or e is sympy.false:
            return z3.BoolVal(bool(e))
        if isinstance(e, int) or e.is_Integer:
            return int(e)
        if isinstance(e, sympy.Symbol):
            if e not in self.names:
                raise Untranslatable(f"{e} depends on values in memory")
            return z3.Int(self.names[e])
        for kinds, translate in self._TABLE:
            if isinstance(e, kinds):
                return translate(self, e)
        raise Untranslatable(f"unsupported {type(e).__name__} in {e}")

    def _product(self, e: Any) -> Any:
        factors = list(e.args)
        for index, factor in enumerate(factors):
            # Python writes a ceiling as -(-a // b).
            if isinstance(factor, torch_sympy.FloorDiv) and _is_negative(factor.args[0]):
                rest = sympy.Mul(-1, *factors[:index], *factors[index + 1 :])
                ceiling = cdiv(self(-factor.args[0]), self._divisor(factor.args[1]))
                return self(rest) * ceiling
        return reduce(mul, map(self, factors))

    def _power(self, e: Any) -> Any:
        base, exponent = e.args
        if not (exponent.is_Integer and exponent >= 0):
            raise Untranslatable(f"unsupported power {e}")
        return reduce(mul, [self(base)] * int(exponent), 1)

    def _divisor(self, e: Any) -> Any:
        divisor = self(e)
        if isinstance(divisor, int):
            if divisor <= 0:
                raise Untranslatable(f"unsupported division by {divisor}")
        elif not e.is_positive:
            self.positive.append(divisor > 0)
        return divisor

    def _quotient(self, e: Any) -> Any:
        a, b = e.args
        if _is_negative(b):
            a, b = -a, -b  # sympy factors the signs out of a // -(-b // c)
        a, b = self(a), self._divisor(b)
        return a // b if isinstance(a, int) and isinstance(b, int) else a / b

    def _remainder(self, e: Any) -> Any:
        return self(e.args[0]) % self._divisor(e.args[1])

    def _equation(self, e: Any) -> Any:
        left, right = e.args
        if isinstance(left, torch_sympy.Mod | torch_sympy.PythonMod) and right == 0:
            operands = _ored(left.args[0])
            divisor = int(left.args[1]) if left.args[1].is_Integer else 0
            if len(operands) > 1 and divisor > 0 and divisor & (divisor - 1) == 0:
                all_divide = z3.And(*(z3.simplify(_z3(self(operand)) % divisor == 0) for operand in operands))
                return z3.Not(all_divide) if isinstance(e, sympy.Ne) else all_divide
        left, right = self(left), self(right)
        return left != right if isinstance(e, sympy.Ne) else left == right

    def _extreme(self, e: Any) -> Any:
        operands = [_z3(self(operand)) for operand in e.args]
        is_min = isinstance(e, torch_sympy.Min | sympy.Min)
        return reduce(lambda a, b: z3.If(a <= b if is_min else a >= b, a, b), operands)

    _TABLE: tuple[tuple[Any, Any], ...] = (
        (sympy.Add, lambda self, e: reduce(add, map(self, e.args))),
        (sympy.Mul, _product),
        ((sympy.Pow, torch_sympy.PowByNatural), _power),
        (torch_sympy.FloorDiv, _quotient),
        ((torch_sympy.Mod, torch_sympy.PythonMod), _remainder),
        ((sympy.Max, sympy.Min, torch_sympy.Max, torch_sympy.Min), _extreme),
        (
            torch_sympy.Where,
            lambda self, e: z3.If(self(e.args[0]), _z3(self(e.args[1])), _z3(self(e.args[2]))),
        ),
        ((sympy.Eq, sympy.Ne), _equation),
        (sympy.Lt, lambda self, e: self(e.args[0]) < self(e.args[1])),
        (sympy.Le, lambda self, e: self(e.args[0]) <= self(e.args[1])),
        (sympy.Gt, lambda self, e: self(e.args[0]) > self(e.args[1])),
        (sympy.Ge, lambda self, e: self(e.args[0]) >= self(e.args[1])),
        (sympy.And, lambda self, e: z3.And(*map(self, e.args))),
        (sympy.Or, lambda self, e: z3.Or(*map(self, e.args))),
        (sympy.Not, lambda self, e: z3.Not(self(e.args[0]))),
    )


def _is_negative(e: Any) -> bool:
    """Return whether an expression is written as a negative one: -a // b, or a product with an odd number of such. It
    only affects how the expression is written, not its value: a // b is (-a) // (-b) for all signs."""
    if isinstance(e, torch_sympy.FloorDiv):
        return _is_negative(e.args[0]) != _is_negative(e.args[1])
    if isinstance(e, sympy.Mul):
        return sum(map(_is_negative, e.args)) % 2 == 1
    return bool(e.could_extract_minus_sign())


def _z3(value: Any) -> Any:
    return z3.IntVal(value) if isinstance(value, int) else value


def _ored(e: Any) -> list[Any]:
    """Return the operands of a | b | …, which a power of two divides exactly if it divides each operand."""
    if type(e).__name__ == "BitwiseFn_bitwise_or":
        return [operand for side in e.args for operand in _ored(side)]
    return [e]


# ---- regions --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Region:
    """Sizes for which host code takes the same branches, and one example of them."""

    conditions: tuple[Any, ...]
    example: Mapping[str, int]

    @property
    def formula(self) -> Any:
        return z3.And(*self.conditions) if self.conditions else z3.BoolVal(True)


def region_of(
    trace: Trace, sizes: Sequence[Size], example: Mapping[str, int], translate: Translator
) -> Region:
    """Return the region of a trace. Its example must satisfy every condition, which guards against wrong ones."""
    conditions = tuple(condition for guard in trace.guards if z3.is_expr(condition := translate(guard)))
    domain = _domain(sizes)
    for condition in translate.positive:
        if ask([*domain, *conditions], condition).verdict != "proven":
            raise Untranslatable(f"a divisor that may not be positive: {condition}")
    region = Region(tuple(c for c in conditions if not z3.is_true(c)), dict(example))
    values = [(z3.Int(name), z3.IntVal(value)) for name, value in example.items()]
    for condition in region.conditions:
        if not z3.is_true(z3.simplify(z3.substitute(condition, *values))):
            raise AssertionError(f"{condition} does not hold at {dict(example)}, where it was recorded")
    return region


def _domain(sizes: Sequence[Size]) -> list[Any]:
    return [z3.And(z3.Int(size.name) >= 1, z3.Int(size.name) <= LARGEST) for size in sizes]


# ---- cases: a launch with its contract ------------------------------------------------------------------


@dataclass
class Case:
    """A launch that is the same, up to its sizes, in one or more regions."""

    workload: str
    launched: Launched
    contract: Contract  # assumes only the conditions common to all regions
    regions: list[Region]
    narrow: Contract  # assumes that the sizes are in one of the regions
    overlapping: bool  # arguments share a storage at different offsets: their races are not checked

    @property
    def variant(self) -> Variant:
        return self.launched.variant


@dataclass
class Contracts:
    """The contracts of a workload on a target, and what they leave out."""

    workload: str
    target: str
    sizes: list[Size]  # sizes that are symbols; all others are fixed
    fixed: dict[str, int] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)
    regions: int = 0
    refused: dict[str, str] = field(default_factory=dict)  # by the op's message: sizes that it refuses
    gaps: list[str] = field(default_factory=list)  # reasons that sizes are left out; empty: none are
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        return not self.gaps


def contracts_of(workload: Workload, target: str, *, regions: int = 64) -> Contracts:
    """Return the contracts of all launches of a workload for all sizes, or for at most `regions` regions."""
    begin = time.perf_counter()
    sizes = variable(workload, target)
    result = Contracts(str(workload), target, sizes)
    names = {size.name for size in sizes}
    result.fixed = {size.name: size.usual for size in candidates(workload) if size.name not in names}
    if not sizes:
        result.gaps.append("none of its sizes can be a symbol: this is of its own sizes alone")
    example = {size.name: size.usual for size in sizes}
    seen: list[Any] = []
    groups: dict[Any, list[tuple[Launched, Region]]] = {}
    while True:
        trace = Trace.of(workload, target, sizes, example)
        location = ", ".join(f"{name} = {value}" for name, value in example.items()) or "its own sizes"
        if trace.failure is not None:
            result.gaps.append(f"at {location}: {trace.failure}")
            break
        translate = Translator({expression: name for name, expression in trace.sizes.items()})
        try:
            region = region_of(trace, sizes, example, translate)
            result.regions += 1
            if trace.refused is not None:
                result.refused.setdefault(trace.refused, location)
            else:
                for launched in _with_sole_writers(trace.launches, target):
                    plain = without_extremes(launched, region, sizes, translate)
                    groups.setdefault(_key(plain, translate), []).append((plain, region))
        except Untranslatable as error:
            result.gaps.append(f"at {location}: {error}")
            break
        seen.append(region.formula)
        if not sizes:
            break
        outside = ask([*_domain(sizes), *(z3.Not(formula) for formula in seen)], z3.BoolVal(False), 4 * QUICK)
        if outside.verdict == "proven":
            break
        if outside.verdict == "unknown":
            result.gaps.append("the solver does not find out whether there are sizes besides those looked at")
            break
        if result.regions >= regions:
            result.gaps.append(f"more than {result.regions} regions")
            break
        example = {size.name: outside.value(z3.Int(size.name)) for size in sizes}
    for members in groups.values():
        try:
            result.cases.append(_case(str(workload), members, sizes))
        except Untranslatable as error:
            result.gaps.append(f"{members[0][0].variant.kernel}: {error}")
    result.seconds = time.perf_counter() - begin
    return result


def _with_sole_writers(launches: Sequence[Launched], target: str) -> list[Launched]:
    """Return the launches of a call, keeping in `empty` only the tensors that a single launch writes."""
    writers = [
        [launched.pointers[name].storage for name in stored(launched, target)] for launched in launches
    ]
    narrowed = []
    for launched, written in zip(launches, writers, strict=True):
        sole = {number for number in written if sum(number in other for other in writers) == 1}
        empty = frozenset(name for name in launched.empty if launched.pointers[name].storage in sole)
        narrowed.append(replace(launched, empty=empty))
    return narrowed


def without_extremes(
    launched: Launched, region: Region, sizes: Sequence[Size], translate: Translator
) -> Launched:
    """Return the launch with max(1, e) replaced by e where e is positive in the region. PyTorch writes strides like
    that in case a tensor has no elements; without it, contiguous dimensions can be recognized."""
    pointers = launched.pointers.values()
    parts = [*launched.grid, *launched.integers.values()]
    parts += [e for p in pointers for e in (*p.shape, *p.stride, p.offset)]
    facts, replacements = [*_domain(sizes), *region.conditions], {}
    extremes = {e for part in parts if not isinstance(part, int) for e in part.atoms(torch_sympy.Max)}
    # Sort, for an order that is the same in every process: the solver orders terms by creation.
    for extreme in sorted(extremes, key=str):
        operands = [e for e in extreme.args if e != 1]
        if len(operands) == 1 and ask(facts, _z3(translate(operands[0])) >= 1).verdict == "proven":
            replacements[extreme] = operands[0]

    def plain(e: Any) -> Any:
        return e if isinstance(e, int) else e.xreplace(replacements)

    return replace(
        launched,
        grid=tuple(map(plain, launched.grid)),
        integers={name: plain(e) for name, e in launched.integers.items()},
        pointers={
            name: replace(
                p,
                shape=tuple(map(plain, p.shape)),
                stride=tuple(map(plain, p.stride)),
                offset=plain(p.offset),
            )
            for name, p in launched.pointers.items()
        },
    )


def _key(launched: Launched, translate: Translator) -> Any:
    """Return a key that is equal for launches of one contract. Storages are numbered per trace, so they are
    renumbered."""
    order = {
        number: index
        for index, number in enumerate(dict.fromkeys(p.storage for p in launched.pointers.values()))
    }
    common_symbols = {symbol: sympy.Symbol(name, positive=True) for symbol, name in translate.names.items()}

    def text(e: Any) -> str:
        return str(e if isinstance(e, int) else e.xreplace(common_symbols))

    pointers = tuple(
        (
            name,
            p.dtype,
            *(tuple(map(text, part)) for part in (p.shape, p.stride)),
            text(p.offset),
            order[p.storage],
        )
        for name, p in launched.pointers.items()
    )
    integers = tuple((name, text(value)) for name, value in launched.integers.items())
    return launched.variant, tuple(map(text, launched.grid)), integers, pointers


def _case(workload: str, members: list[tuple[Launched, Region]], sizes: Sequence[Size]) -> Case:
    launched = members[0][0]
    regions = [region for _, region in members]
    names = _names_in(launched, sizes)
    translate = Translator(names)
    common = [
        condition
        for condition in regions[0].conditions
        if all(any(condition.eq(other) for other in region.conditions) for region in regions[1:])
    ]
    exact = z3.Or(*(region.formula for region in regions)) if len(regions) > 1 else regions[0].formula
    symbols = tuple(symbol(size.name, 1, LARGEST) for size in sizes)
    integers = {name: translate(value) for name, value in launched.integers.items()}
    arguments: dict[str, Any] = dict(integers)
    launch_arguments = Given(
        integers, {name: tuple(map(translate, p.shape)) for name, p in launched.pointers.items()}
    )
    for name in launched.pointers:
        arguments[name] = _buffer(launched, name, launch_arguments, regions[0].example, translate)
    grid: Any = tuple(translate(axis) for axis in (*launched.grid, 1, 1)[:3])
    facts = [*_domain(sizes), exact]
    for condition in translate.positive:
        if ask(facts, condition).verdict != "proven":
            raise Untranslatable(f"a divisor that may not be positive: {condition}")
    contracts = [
        Contract(
            arguments=arguments,
            grid=grid,
            sizes=symbols,
            assumptions=tuple(a for a in assumed if not z3.is_true(a)),
            outputs=tuple(name for name in arguments if all(name in member.empty for member, _ in members)),
        )
        for assumed in ((*common, *translate.positive), (exact,))
    ]
    offsets = {(p.storage, str(p.offset)) for p in launched.pointers.values()}
    overlapping = len(offsets) > len({p.storage for p in launched.pointers.values()})
    return Case(workload, launched, contracts[0], regions, contracts[1], overlapping)


def _names_in(launched: Launched, sizes: Sequence[Size]) -> dict[sympy.Symbol, str]:
    return {launched.symbols[size.name]: size.name for size in sizes}


def _buffer(
    launched: Launched,
    name: str,
    launch_arguments: Given,
    example: Mapping[str, int],
    translate: Translator,
) -> Buffer:
    pointer = launched.pointers[name]
    variant = launched.variant
    kind = variant.types()[name].removeprefix("*")
    assumed = loaded_of(variant.kernel, name)
    options: dict[str, Any] = {"align": 16 if variant.aligned else pointer.dtype.itemsize}
    if assumed is not None:
        # Tables of integers belong to the launch: none of them is reached through an address loaded from memory.
        options |= {
            "values": _values(assumed, launch_arguments),
            "ascending": assumed.ascending,
            "unreached": True,
        }
        options["distinct"] = _distinct(assumed, launch_arguments)
        inverse = None if assumed.inverse is None else launched.pointers.get(assumed.inverse)
        if inverse is not None and _is_flat(pointer) and _is_flat(inverse):
            options["inverse"] = assumed.inverse
    aliases = [
        other
        for other, p in launched.pointers.items()
        if p.storage == pointer.storage and p.offset == pointer.offset
    ]
    if len(aliases) > 1:
        options["storage"] = aliases[0]
    values = {launched.symbols[size]: value for size, value in example.items()}
    dims = dense_dims(pointer, values)
    element = _ELEMENTS.get(kind, kind)
    if not dims:
        return Buffer(element, 1, **options)
    if len(dims) == 1 and dims[0][1] == 1:
        if name in launched.empty:
            options["shape"] = tuple(translate(size) for size, _ in by_stride(pointer, values))
        return Buffer(element, translate(dims[0][0]), **options)
    sizes, strides = ([translate(dim[position]) for dim in dims] for position in (0, 1))
    return Buffer.strided(element, sizes, strides, **options)


def _values(loaded: Loaded, launch: Given) -> Any:
    """Return the assumption about a loaded integer, or about it and its index."""
    if loaded.apart is None:
        return lambda value: z3.And(*within(loaded, launch, value))
    other, exception = loaded.apart[1], exception_index(loaded, launch)

    def assumed(value: Any, index: Any) -> Any:
        usual, special = (z3.And(*within(bounds, launch, value)) for bounds in (loaded, other))
        return z3.If(index == exception, special, usual)

    return assumed


def _distinct(loaded: Loaded, launch: Given) -> Any:
    """Return whether all elements differ, or the predicate that selects those that do."""
    exception = exception_index(loaded, launch)
    if loaded.distinct and loaded.shared is not None:
        return lambda value, index: value != loaded.shared
    return (
        loaded.distinct
        if exception is None or not loaded.distinct
        else lambda value, index: index != exception
    )


def _is_flat(pointer: Pointer) -> bool:
    """Return whether a tensor is contiguous."""
    contiguous_stride: Any = 1
    for size, stride in zip(reversed(pointer.shape), reversed(pointer.stride), strict=True):
        if size != 1 and sympy.expand(stride - contiguous_stride) != 0:
            return False
        contiguous_stride = contiguous_stride * size
    return True


def by_stride(pointer: Pointer, values: Mapping[Any, int]) -> list[tuple[Any, Any]]:
    """Return (size, stride) of the dimensions of a tensor, larger strides first at the sizes of an example."""
    dims = zip(pointer.shape, pointer.stride, strict=True)
    return sorted(dims, key=lambda dim: -int(sympy.sympify(dim[1]).subs(values)))


def dense_dims(pointer: Pointer, values: Mapping[Any, int]) -> list[tuple[Any, Any]]:
    """Return (size, stride) of a tensor's dimensions, merging contiguous ones and dropping those of size 1 or stride 0.

    Larger strides come first, at the sizes of an example, since that is how the prover recovers the indices of an
    element. In another order it may fail, but nothing wrong is proven."""
    dims: list[tuple[Any, Any]] = []
    for size, stride in by_stride(pointer, values):
        has_size_one = isinstance(size, int | sympy.Integer) and size == 1
        if has_size_one or (stride == 0 and sympy.sympify(size).is_positive):
            continue
        if dims and sympy.expand(dims[-1][1] - size * stride) == 0:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return dims


# ---- kernels in TTIR ------------------------------------------------------------------------------------


def stored(launched: Launched, target: str) -> frozenset[str]:
    """Return the tensors that a launch may write. A kernel that writes to an address not derived from an argument, such
    as one loaded from memory, may write any of them."""
    names = _stored(launched.variant, target)
    return frozenset(launched.pointers) & names if None not in names else frozenset(launched.pointers)


@cache
def _stored(variant: Variant, target: str) -> frozenset[str | None]:
    function = parse(ttir_by_name(variant, target)).entry
    ops = list(function.body.walk())
    pointers = [op.operands[0] for op in ops if op.name in ACCESSES and op.name != "tt.load"]
    roots = {root_of(pointer) for pointer in pointers}
    roots |= {None if pointer is None else root_of(pointer) for pointer in descriptors.stored(ops)}
    return frozenset(root.name if root is not None and root in function.args else None for root in roots)


def ttir_by_name(variant: Variant, target: str) -> str:
    """Return the TTIR of a variant with Weft's argument names: "source.x" is a member of a struct."""
    return renamed(
        ttir_of(variant, target), [leaf.name for leaf in variant.leaves() if leaf.kind != "constexpr"]
    )

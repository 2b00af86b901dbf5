"""Ops of scalar functions against PyTorch: values, promotion, layouts, gradients, and what is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
import triton.language as tl
import triton_loom
from torch import Tensor
from triton_loom.testing import EPS32

import weft
from tests.ops.generated.functions import FUNCTIONS, INTEGERS, Function
from weft.ops.generated.pointwise import Pointwise

SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-30, -1e30, 2.0**-140)


@cache
def op_of(name: str) -> Pointwise:
    return weft.pointwise(FUNCTIONS[name].scalar)


def arguments(function: Function, count: int = 999) -> list[Tensor]:
    """Return random numbers, then every combination of special ones."""
    generator = torch.Generator().manual_seed(1)
    # Where terms cancel, large ones leave nothing to compare.
    values = [x for x in SPECIAL if not (function.noise and abs(x) == 1e30)]
    special = torch.tensor(list(itertools.product(values, repeat=function.arguments)))
    drawn = 4 * torch.randn(count, function.arguments, generator=generator)
    return list(torch.cat([drawn, special]).unbind(1))


def near(got: Tensor, truth: Tensor, noise: float) -> None:
    """Assert that fp32 results are within eight roundings, and `noise` roundings of 1, of float64 ones."""
    if not got.dtype.is_floating_point:
        assert torch.equal(got, truth)
        return
    assert torch.equal(got.isnan(), truth.isnan())
    rounded = truth.to(got.dtype)
    finite = rounded.isfinite()
    assert torch.equal(got[~finite & ~got.isnan()], rounded[~finite & ~got.isnan()])
    error = (got.double() - truth)[finite].abs()
    limit = EPS32 * (8 * truth[finite].abs() + noise) + 2.0**-126
    assert (error <= limit).all(), (error / limit).max()


# ---- values -------------------------------------------------------------------------------------------------


def each(names: Iterable[str], every: int) -> list[Any]:
    """Return the cases of a test: one of so many by day, the others by night. Each builds a kernel."""
    return [
        pytest.param(name, marks=[] if i % every == 0 else pytest.mark.slow) for i, name in enumerate(names)
    ]


@pytest.mark.parametrize("name", each(FUNCTIONS, 6))
def test_values(name: str) -> None:
    function = FUNCTIONS[name]
    inputs = arguments(function)
    near(op_of(name)(*inputs), function.torch(*(x.double() for x in inputs)), function.noise * 16)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.slow
def test_half_precision_rounds_once(name: str, dtype: torch.dtype) -> None:
    inputs = [x.to(dtype) for x in arguments(FUNCTIONS[name])]
    got = op_of(name)(*inputs)
    wide = op_of(name)(*(x.float() for x in inputs))
    assert torch.equal(got.nan_to_num(), wide.to(got.dtype).nan_to_num())


@pytest.mark.parametrize("name", each(INTEGERS, 4))
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_integers(name: str, dtype: torch.dtype) -> None:
    scalar, definition, count = INTEGERS[name]
    if count == 1 and dtype not in (torch.int8, torch.int64):
        pytest.skip("one operand needs no promotion")
    limits = torch.iinfo(dtype)
    drawn = torch.randint(max(limits.min, -(2**40)) + 1, min(limits.max, 2**40), (count, 300)).to(dtype)
    x = drawn.where(drawn != 0, 1)
    got, wanted = weft.pointwise(scalar)(*x), definition(*x)
    assert got.dtype is wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)


ALL = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
)
ALL = (*ALL, torch.float32, torch.float64)


@pytest.mark.parametrize("name", ["add", "div", "lt"])
def test_dtypes_promote_as_in_pytorch(name: str) -> None:
    """Also between tensors of dimension 0 and others, and with numbers."""
    op = op_of(name)
    numbers: list[Any] = (
        [torch.ones(3, dtype=d) for d in ALL] + [torch.ones((), dtype=d) for d in ALL] + [2, 2.5]
    )
    seen = 0
    for x, y in itertools.product(numbers, repeat=2):
        tensors = [each for each in (x, y) if isinstance(each, Tensor)]
        both_bools = all(t.dtype is torch.bool for t in tensors) and len(tensors) == 2
        if not tensors or (name == "add" and both_bools):
            continue
        with weft.backend("reference"):
            got = op(x, y)
        wanted = torch.result_type(x, y)
        if name == "lt":
            wanted = torch.bool
        elif name == "div" and not wanted.is_floating_point:
            wanted = torch.float32
        assert got.dtype is wanted, (x, y)
        seen += 1
    assert seen > 300


def test_bools_are_combined_but_not_added() -> None:
    a, b = torch.tensor([True, False, True]), torch.tensor([True, True, False])
    assert torch.equal(weft.pointwise(lambda x, y: (x & y) | ~x)(a, b), (a & b) | ~a)
    assert torch.equal(weft.pointwise(lambda x, y: tl.where(x, y, x))(a, b), torch.where(a, b, a))
    with pytest.raises(TypeError, match="add takes numbers; convert bools"):
        op_of("add")(a, b)


def test_a_bool_and_an_integer_are_different_numbers() -> None:
    """1 and True are equal, but the results have other dtypes."""
    both, x = weft.pointwise(lambda x, y: x & y), torch.tensor([True, False])
    for number in (1, True, 1):
        assert both(x, number).dtype is (x & number).dtype


def test_numbers_of_64_bits() -> None:
    add = op_of("add")
    x = torch.tensor([1, -1])
    for number in (2**40, -(2**40), 2**62, -(2**31) - 1, 2**31 - 1):
        assert torch.equal(add(x, number), x + number)


def test_casts() -> None:
    cast = weft.pointwise(
        lambda x: (x.to(tl.int32), x.to(tl.int1), x.to(tl.bfloat16), (x > 0).to(tl.float32))
    )
    x = torch.tensor([1.9, -1.9, 0.0, 3.0])
    whole, truth, same, positive = cast(x)
    assert torch.equal(whole, x.int())
    assert torch.equal(truth, x.bool())
    assert torch.equal(same, x)
    assert torch.equal(positive, (x > 0).float())


# ---- layouts ------------------------------------------------------------------------------------------------

BASE = torch.randn(5, 4, 6, 3, 2, 3, 2)
LAYOUTS: dict[str, tuple[Tensor, Tensor]] = {
    "contiguous": (BASE, BASE + 1),
    "seven dimensions in another order": (
        BASE.permute(3, 0, 6, 2, 4, 1, 5),
        BASE.permute(3, 0, 6, 2, 4, 1, 5) * 2,
    ),
    "two orders": (BASE[0, :, :, 0, 0, 0, 0], BASE[0, :, :, 1, 1, 1, 1].t().contiguous().t()),
    "steps": (BASE[::2, 1:, ::3], BASE[1::2, 1:, ::3][:2].repeat(2, 1, 1, 1, 1, 1, 1)[:3]),
    "a row": (BASE[0, 0, :, :, 0, 0, 0], torch.randn(3)),
    "a column": (BASE[0, 0, :, :, 0, 0, 0], torch.randn(6, 1)),
    "outer": (torch.randn(7, 1), torch.randn(1, 9)),
    "expanded": (torch.randn(7, 1).expand(7, 9), torch.randn(9).expand(7, 9)),
    "middle": (torch.randn(4, 1, 5), torch.randn(3, 1)),
    "channels last": (torch.randn(2, 6, 3, 3).to(memory_format=torch.channels_last), torch.randn(6, 1, 1)),
    "no dimension": (torch.tensor(2.0), torch.tensor(3.0)),
    "one element": (torch.randn(1, 1, 1), torch.randn(1)),
    "an element of a tensor": (torch.randn(33), torch.tensor(3.0)),
    "empty": (torch.randn(0, 4), torch.randn(4)),
    "empty, and one": (torch.randn(3, 0), torch.randn(3, 1)),
    "odd offsets": (torch.randn(101)[1:], torch.randn(103)[3:]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    x, y = LAYOUTS[name]
    with triton_loom.sanitize():
        got = op_of("sub")(x, y)
    wanted = x - y
    assert torch.equal(got, wanted)
    if x.numel() == wanted.numel() and x.numel():
        assert got.stride() == wanted.stride()


@pytest.mark.parametrize("name", each(LAYOUTS, 3))
def test_gradients_of_layouts(name: str) -> None:
    """Arguments that were broadcast get sums, in fp32 and in a fixed order."""
    x, y = (t.clone(memory_format=torch.preserve_format).requires_grad_() for t in LAYOUTS[name])
    dy = torch.randn((x * y).shape)
    got = torch.autograd.grad(op_of("mul")(x, y), (x, y), dy)
    wanted = torch.autograd.grad((x.double() * y.double()), (x, y), dy.double())
    for a, b, t in zip(got, wanted, (x, y), strict=True):
        assert a.shape == t.shape
        assert a.dtype is t.dtype
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_upstream_gradients_may_be_expanded() -> None:
    x = torch.randn(5, 7, requires_grad=True)
    op_of("square")(x).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())
    x.grad = None
    op_of("square")(x).backward(torch.ones(7, 5).t())
    assert torch.equal(x.grad, 2 * x.detach())


def test_more_than_32_bits_of_offsets() -> None:
    """Columns 2^31 elements apart: the tensors are views of memory that is never touched between."""
    strides = (2**31 + 8, 1)
    memory = torch.empty(3 * 2**31 + 64, dtype=torch.int8)
    x = memory.as_strided((3, 16), strides)
    x.copy_(torch.arange(48).view(3, 16))
    y = torch.ones(16, dtype=torch.int8)
    assert torch.equal(op_of("add")(x, y), x + y)
    out = torch.empty_like(memory).as_strided((3, 16), strides)
    assert torch.equal(op_of("add")(x, y, out=out), torch.arange(48).view(3, 16).to(torch.int8) + 1)


def test_bits_do_not_depend_on_threads() -> None:
    x, weight = torch.randn(300, 1000), torch.randn(1000, requires_grad=True)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results += torch.autograd.grad(op_of("mul")(x, weight).sum(), weight)
    torch.set_num_threads(before)
    assert torch.equal(*results)


# ---- results ------------------------------------------------------------------------------------------------


def test_out() -> None:
    add = op_of("add")
    x, y = torch.randn(4, 6), torch.randn(6)
    wanted = x + y
    out = torch.full((4, 12), math.nan)
    view = out[:, ::2]
    assert add(x, y, out=view) is view
    assert torch.equal(view, wanted)
    assert out[:, 1::2].isnan().all()
    version = x._version
    assert add(x, y, out=x) is x
    assert torch.equal(x, wanted)
    assert x._version > version
    half = torch.empty(4, 6, dtype=torch.bfloat16)
    assert torch.equal(add(x, y, out=half, out_dtype=torch.bfloat16), (x + y).bfloat16())


def test_out_dtype() -> None:
    x = torch.randn(9).bfloat16()
    got = op_of("exp")(x, out_dtype=torch.float32)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, x.float().exp())


def test_several_results() -> None:
    both = weft.pointwise(lambda x, y: (x * y, x > y, x + 1))
    x, y = torch.randn(5, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    product, larger, more = both(x, y)
    assert torch.equal(product, x * y)
    assert torch.equal(larger, x > y)
    assert not larger.requires_grad
    (dx,) = torch.autograd.grad(product.sum() + 2 * more.sum(), x)
    torch.testing.assert_close(dx, y.detach().expand(5, 3) + 2)
    (dx,) = torch.autograd.grad(both(x, y)[2].sum(), x)
    assert torch.equal(dx, torch.ones(5, 3))


# ---- gradients ----------------------------------------------------------------------------------------------

SMOOTH = [name for name, function in FUNCTIONS.items() if function.differentiable]


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_are_slopes(name: str) -> None:
    """In float64, by finite differences."""
    function = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(3)
    inputs = [
        (
            function.low
            + (function.high - function.low) * torch.rand(7, dtype=torch.float64, generator=generator)
        )
        for _ in range(function.arguments)
    ]
    assert torch.autograd.gradcheck(op_of(name), [x.requires_grad_() for x in inputs])


@pytest.mark.parametrize("name", each(SMOOTH, 10))
def test_gradients_in_fp32(name: str) -> None:
    """The kernel of the gradient, against float64."""
    function = FUNCTIONS[name]
    inputs = [
        function.low + (function.high - function.low) * torch.rand(500) for _ in range(function.arguments)
    ]
    leaves = [x.requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    dy = torch.randn(500)
    got = torch.autograd.grad(op_of(name)(*leaves), leaves, dy)
    wanted = torch.autograd.grad(function.torch(*exact), exact, dy.double(), allow_unused=True)
    for a, b in zip(got, wanted, strict=True):
        truth = torch.zeros_like(a) if b is None else b
        assert ((a - truth).abs() <= EPS32 * 64 * (truth.abs() + 1)).all()


def test_equal_operands_share_a_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    (dx,) = torch.autograd.grad(op_of("maximum")(x, 1.0).sum(), x)
    assert torch.equal(dx, torch.full((3,), 0.5))


def test_a_branch_that_is_not_taken_has_no_part_in_the_gradient() -> None:
    root = weft.pointwise(lambda x: tl.where(x > 0, x, -x) * 2)
    x = torch.tensor([-2.0, 3.0], requires_grad=True)
    root(x).sum().backward()
    assert torch.equal(x.grad, torch.tensor([-2.0, 2.0]))


def test_a_given_backward() -> None:
    """It sees the arguments and the gradients of the results, of which some may be absent."""
    straight = weft.pointwise(backward=lambda x, scale, dout0, dout1: (dout0 + 2 * dout1, 0.0))(
        lambda x, scale: (x * scale, x + scale)
    )
    x = torch.randn(4, requires_grad=True)
    first, second = straight(x, 3.0)
    (dx,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
    assert torch.equal(dx, torch.ones(4))
    (dx,) = torch.autograd.grad(second.sum() + first.sum(), x)
    assert torch.equal(dx, torch.full((4,), 3.0))
    with pytest.raises(TypeError, match="must return 2 gradients, for x, y; got 1"):
        weft.pointwise(backward=lambda x, y, dout: dout)(lambda x, y: x * y)(x, 1.0).sum().backward()


def test_what_has_no_derivative_is_refused() -> None:
    power = weft.pointwise(lambda x: x << 1)
    assert torch.equal(power(torch.tensor([3])), torch.tensor([6]))
    x = torch.randn(3, requires_grad=True)
    y = op_of("mul")(x, x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        dx.sum().backward()


# ---- compilers and others -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_eager(dynamic: bool) -> None:
    op = weft.pointwise(lambda x, y, gate: x + y * gate)

    def function(x: Tensor, y: Tensor, gate: float) -> Tensor:
        return op(x, y, gate=gate).sum(0)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows, gate in ((5, 2.0), (7, 3.0), (9, 4)):
        x, y = torch.randn(rows, 33, requires_grad=True), torch.randn(33, requires_grad=True)
        assert torch.equal(compiled(x, y, gate), function(x, y, gate))
        gradients = [torch.autograd.grad(f(x, y, gate).sum(), (x, y)) for f in (compiled, function)]
        for a, b in zip(*gradients, strict=True):
            assert torch.equal(a, b)


def test_numbers_compile_nothing() -> None:
    """Neither floats nor integers are constants of the kernel; nor are sizes."""
    op = weft.pointwise(lambda x, y: x * y + y)
    x = torch.randn(4, 40)
    op(x, 2.0)
    from weft.ops.generated import kernels

    def variants() -> int:
        return sum(
            len(k.variants) for name, k in kernels._kernels.items() if name.startswith(f"{op.op.name}_")
        )

    before = variants()
    for number in (3.0, 4.5, -1.0):
        op(x, number)
        op(torch.randn(7, 48), number)
    assert variants() == before == 1


def test_meta_tensors_and_opcheck() -> None:
    assert op_of("add")(torch.empty(3, 1, device="meta"), torch.empty(4, device="meta")).shape == (3, 4)
    x = torch.randn(3, 4, requires_grad=True)
    op = op_of("mul").op
    values = op.arguments.flatten(op.arguments.cls(x, None, None, 2.0, None, None, True, False))
    torch.library.opcheck(
        op.overload, values, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )


def test_functional_gradients() -> None:
    x = torch.randn(5)
    got = torch.func.grad(lambda x: op_of("sigmoid")(x).sum())(x)
    torch.testing.assert_close(got, torch.sigmoid(x) * (1 - torch.sigmoid(x)))


def test_helpers_and_constants_of_the_surroundings() -> None:
    """Closures, globals and `@triton.jit` helpers; traced once, when the op is made."""
    shift = 3

    def helper(x: Any) -> Any:
        return x + shift

    op = weft.pointwise(lambda x: helper(x) * math.pi)
    torch.testing.assert_close(op(torch.ones(2)), torch.full((2,), 4 * math.pi))


def test_ops_of_one_name() -> None:
    def twice(x: Any) -> Any:
        return x * 2

    first, second = weft.pointwise(twice), weft.pointwise(twice)
    assert first.op.name != second.op.name
    assert torch.equal(first(torch.ones(2)), second(torch.ones(2)))


def test_quantized_and_sparse_arguments() -> None:
    """A QTensor is decoded, other layouts are refused."""
    x = torch.randn(8, 128)
    q = weft.quantize(x, "1x128")
    assert torch.equal(op_of("add")(q, 1.0), q.dequantize() + 1.0)


# ---- parameters that may be left out, and tables ------------------------------------------------------------


@weft.pointwise
def scheduled(x: Any, v: Any, gate: Any = None, table: Any = None, step: Any = None) -> Any:
    v = v if gate is None else v * gate
    return x + (v if table is None else table[step, 1] * v)


def test_parameters_that_are_left_out() -> None:
    x, v, gate = torch.randn(5, 33), torch.randn(5, 33), torch.randn(5, 1, requires_grad=True)
    assert torch.equal(scheduled(x, v), x + v)
    assert torch.equal(scheduled(x, v=v, gate=None), x + v)
    y = scheduled(x, v, gate)
    torch.testing.assert_close(y, x + v * gate)
    (dgate,) = torch.autograd.grad(y, gate, torch.ones_like(y))
    torch.testing.assert_close(dgate, v.sum(-1, keepdim=True))
    with pytest.raises(TypeError, match="misses v"):
        scheduled(x, gate=gate)
    with pytest.raises(TypeError, match="v must be a tensor; got None"):
        scheduled(x, None)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "one row"])
def test_tables_are_read_at_a_step_on_the_device(layout: str, dtype: torch.dtype) -> None:
    x, v = torch.zeros(5, 33), torch.ones(5, 33)
    table = {
        "contiguous": torch.randn(7, 3),
        "transposed": torch.randn(3, 7).t(),
        "one row": torch.randn(1, 3),
    }
    for step in range(-2, 9):
        with triton_loom.sanitize():
            y = scheduled(x, v, None, table[layout], torch.tensor(step, dtype=dtype))
        inside = 0 <= step < len(table[layout])
        expected = table[layout][step, 1] if inside else torch.tensor(math.nan)
        torch.testing.assert_close(y, expected.expand(5, 33), equal_nan=True, rtol=0, atol=0)
    for step in (torch.iinfo(dtype).min, torch.iinfo(dtype).max):
        assert scheduled(x, v, None, table[layout], torch.tensor(step, dtype=dtype)).isnan().all()


def test_tables_without_rows_and_columns() -> None:
    x = torch.zeros(5, 33)
    for shape in ((0, 3), (3, 1), (3, 0)):
        for dtype in (torch.float32, torch.float64):
            table = torch.zeros(shape, dtype=dtype)
            assert scheduled(x, x, None, table, torch.tensor(0)).isnan().all()


def test_a_step_for_each_element() -> None:
    lookup = weft.pointwise(lambda x, table, i: x + table[i])
    x, i = torch.randn(4, 33), torch.randint(-1, 12, (4, 33))
    table = torch.randn(10).bfloat16()
    expected = torch.where((i >= 0) & (i < 10), table.float()[i.clamp(0, 9)], math.nan) + x
    torch.testing.assert_close(lookup(x, table, i), expected, equal_nan=True, rtol=0, atol=0)
    assert lookup(x.bfloat16(), table.float(), i).dtype is torch.bfloat16  # a table does not promote


def test_gradients_through_a_table() -> None:
    x, v, gate = (torch.randn(s, requires_grad=True) for s in ((5, 33), (5, 33), (5, 1)))
    table, step = torch.randn(4, 2), torch.tensor(2)
    y = scheduled(x, v, gate, table, step)
    dx, dv, dgate = torch.autograd.grad(y, (x, v, gate), torch.ones_like(y))
    a = table[2, 1]
    assert torch.equal(dx, torch.ones_like(x))
    torch.testing.assert_close(dv, (a * gate).expand(5, 33))
    torch.testing.assert_close(dgate, (a * v).sum(-1, keepdim=True))
    y = scheduled(x, v, gate, table, step)
    step += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_tables_compile_quantize_and_shard() -> None:
    x, v = torch.randn(8, 256), torch.randn(8, 256)
    table, step = torch.randn(4, 2), torch.tensor(3)
    eager = scheduled(x, v, None, table, step)
    compiled = torch.compile(scheduled, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, v, None, table, step), eager)
    q = scheduled(x, v, None, table, step, quantize="1x128")
    assert torch.equal(q.rowwise.data, weft.quantize(eager, "1x128").rowwise.data)
    a = scheduled._arguments((x, v, None, table, step), None)
    rule = scheduled.op.shard(a)
    assert rule.inputs["table"] == "table0 table1"
    assert {"table0", "table1"} <= set(rule.whole)


def test_mistakes_with_tables_are_named() -> None:
    x, table, step = torch.ones(3), torch.ones(4, 2), torch.tensor(0)
    for call, error, message in (
        (
            lambda: scheduled(x, x, None, table[0], step),
            ValueError,
            "indexed by 2 numbers; got torch.float32 (2,)",
        ),
        (lambda: scheduled(x, x, None, table.long(), step), ValueError, "a table of floats"),
        (lambda: scheduled(x, x, None, [[1.0, 2.0]], step), TypeError, "table must be a tensor; got a list"),
        (lambda: scheduled(x, x, None, table, step.float()), TypeError, "table must be integers"),
        (lambda: scheduled(x, x, None, table.clone().requires_grad_(), step), ValueError, "gets no gradient"),
        (lambda: scheduled(x, x.clone().requires_grad_(), out=x), ValueError, "out= is for inference"),
        (lambda: scheduled(1.0, 1.0, None, table, 0), TypeError, "needs a tensor among x, v, gate, step"),
    ):
        with pytest.raises(error) as raised:
            call()
        assert message in str(raised.value)
    with pytest.raises(ValueError, match="out shares memory with table"):
        scheduled(torch.ones(2), torch.ones(2), None, table, step, out=table[1])


# ---- what is refused ----------------------------------------------------------------------------------------


def branching(x: Any) -> Any:
    return x if x > 0 else -x


def test_functions_that_cannot_be_traced() -> None:
    for scalar, message in (
        (branching, "tl.where"),
        (lambda x: math.exp(x), "functions of `math` take numbers"),
        (lambda x: tl.sum(x), "sum is for functions of rows: use @weft.rowwise"),
        (lambda x: tl.load(x), "tl.load is not among"),
        (lambda x: x[0], "cannot be indexed"),
        (lambda x: x + "a", "computes with its parameters and with numbers"),
        (lambda *x: x[0], "without stars and other defaults"),
        (lambda x, y=1.0: x * y, "without stars and other defaults"),
        (lambda x, t: x + t + t[0], "t is a table"),
        (lambda x, t: t[0] + t[0, 1] + x, "t is a table"),
        (lambda x: [x + y for y in x], "cannot be iterated over"),
        (lambda: 1.0, "needs parameters"),
        (lambda out: out + 1, "rename the parameter out"),
        (lambda x: x.to("complex64"), "is converted to"),
    ):
        with pytest.raises((TypeError, AttributeError), match=message):
            weft.pointwise(scalar)  # type: ignore[arg-type]


def test_parameters_may_have_the_names_of_a_kernels_variables() -> None:
    def scalar(x: Any, mask: Any, row: Any, col: Any, v3: Any, off: Any, tl_: Any) -> Any:
        return tl.where(mask > 0, x, row) + col * v3 + off * tl_

    op = weft.pointwise(scalar)
    for x in (torch.randn(7, 4, 5), torch.randn(7, 5, 4).transpose(1, 2)):
        values = [*x, 0.5] if x.is_contiguous() else [*x[:6], x[6, 0, 0].item()]
        x_, mask, row, col, v3, off, number = values[:7]
        wanted = torch.where(mask > 0, x_, row) + col * v3 + off * number
        torch.testing.assert_close(op(*values[:7]), wanted)


@pytest.mark.parametrize(
    ("scalar", "kept"),
    [
        (lambda x, y: x + y, 0),
        (lambda x, y: x * y, 2),
        (lambda x, y: tl.exp(x) - y, 1),
        (lambda x, y: x + tl.floor(y), 0),
    ],
)
def test_only_what_the_gradient_reads_is_kept(scalar: Any, kept: int) -> None:
    sizes: list[int] = []

    def noted(tensor: Tensor) -> Tensor:
        sizes.append(tensor.untyped_storage().nbytes() // tensor.element_size())
        return tensor

    x, y = (torch.randn(40, 50, requires_grad=True) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        result = weft.pointwise(scalar)(x, y)
    assert sorted(sizes)[2 - kept :] == [2000] * kept
    assert sum(sizes) <= 2000 * kept + 2
    result.sum().backward()
    assert x.grad is not None
    assert x.grad.is_contiguous()


def test_mistakes_are_named() -> None:
    add, x = op_of("add"), torch.ones(3, 4)
    for call, error, message in (
        (lambda: add(1, 2), TypeError, "needs a tensor among x, y"),
        (lambda: add([1], x), TypeError, "x must be a tensor; got a list"),
        (lambda: add(x), TypeError, r"\(x, y\) misses y"),
        (lambda: add(x, x, x), TypeError, "takes 2 arguments; got 3"),
        (lambda: add(x, x, y=x), TypeError, "was given twice y"),
        (lambda: add(x, z=x, y=x), TypeError, "has no parameter z"),
        (lambda: add(x, torch.ones(5)), ValueError, r"x \(3, 4\), y \(5,\)"),
        (lambda: add(x, x.to(torch.complex64)), (TypeError, ValueError), "y must be"),
        (lambda: add(x, x.to(torch.float8_e4m3fn)), (TypeError, ValueError), "y must be"),
        (lambda: add(x, x, out=x.bfloat16()), ValueError, "out must be float32"),
        (lambda: add(x, x, out=torch.ones(4)), ValueError, "out must have the shape"),
        (lambda: add(x[:, :2], 1.0, out=x[:, 1:3]), ValueError, "out shares memory with x"),
        (lambda: add(x, 1.0, out=torch.ones(1, 4).expand(3, 4)), ValueError, "elements of out share memory"),
        (lambda: add(x, x, out=(x, x)), ValueError, "has 1 results; out has 2"),
        (lambda: add(x, x, out_dtype=torch.int32), ValueError, "out_dtype"),
        (lambda: add(x.int(), 1, out_dtype=torch.float32), ValueError, "is torch.int32: leave it out"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert torch.equal(x, torch.ones(3, 4))


# ---- the check of a user's own op ---------------------------------------------------------------------------


def test_check_accepts_right_ops_and_names_the_mistake() -> None:
    from weft.testing import check

    names = check(op_of("silu_and_mul"))
    assert {"accuracy in bfloat16", "guard_bands in float32", "gradients", "sanitized", "compiled"} <= set(
        names
    )
    assert check(op_of("log"), torch.rand(5, 9) + 0.5)
    assert check(op_of("gt"))
    wrong = weft.pointwise(backward=lambda x, dout: dout * x)(lambda x: x * x)
    with pytest.raises(AssertionError, match=r", gradients: "):
        check(wrong)
    with pytest.raises(TypeError, match=r"takes an op that @weft\.pointwise or"):
        check(torch.add)  # type: ignore[arg-type]


def test_kernels_are_files_that_other_processes_find() -> None:
    from weft.ops.generated import kernels
    from weft.runtime import recording
    from weft.runtime.variant import kernel_of

    with recording("sm_90") as variants:
        op_of("add")(torch.empty(8, 64, device="meta"), 1.0)
    (variant,) = variants
    assert (kernels.folder() / f"{variant.kernel}.py").read_text().startswith(f"def {variant.kernel}(")
    kernels._kernels.pop(variant.kernel)
    assert kernel_of(variant).__name__ == variant.kernel

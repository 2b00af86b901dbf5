"""Invalid operands of products, and layers of which only some parameters train."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map

import weft
from weft import Recipe
from weft.ops.common.results import plain_result
from weft.ops.product.arguments import MatmulArgs, matmul_args
from weft.ops.product.matmul import matmul_op
from weft.ops.product.operands import INT32_DEPTH
from weft.ops.product.recipes import RECIPES
from weft.quant import PLAIN, Codes
from weft.quant.qtensor import stand_in

# Generous relative errors of results and gradients of a recipe, over two to four products.
ERRORS = {
    "bf16": 0.02,
    "fp8_block": 0.12,
    "fp8_row": 0.12,
    "fp8_tensor": 0.2,
    "mxfp8": 0.12,
    "nvfp4": 0.5,
    "int8_row": 0.06,
}

# Recipes that the longest test runs by day; the others run by night.
BY_DAY = (None, "fp8_block", "nvfp4")


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


# ---- codes ----------------------------------------------------------------------------------------------


def codes_of(x: Tensor, spec: str) -> Codes:
    codes = weft.quantize(x, spec).rowwise
    assert codes is not None
    return codes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda codes: codes._replace(format=None), "is incomplete"),
        (lambda codes: codes._replace(scale=None), "is incomplete"),
        (lambda codes: PLAIN._replace(format=codes.format), "but has no codes"),
        (lambda codes: codes._replace(format="e5m2:1x128:te"), "codes are torch.float8_e4m3fn"),
        (lambda codes: codes._replace(format="e4m3:mx:te"), "scales are torch.float32"),
        (lambda codes: codes._replace(data=codes.data[:, :64]), r"codes have the shape \(8, 64\)"),
        (lambda codes: codes._replace(scale=codes.scale[:, :1]), r"scales have the shape \(8, 1\)"),
        (lambda codes: codes._replace(format="e4m3:row:te"), r"scales have the shape \(8, 2\)"),
        (lambda codes: codes._replace(global_scale=torch.ones(())), "left over"),
    ],
)
@pytest.mark.parametrize("how", ["auto", "reference", "out", "traced"])
def test_ops_raise_for_codes_that_they_would_misread(how: Any, change: Any, message: str) -> None:
    """The op itself validates codes, without the checks of a public function."""
    x, w = torch.randn(8, 256), torch.randn(256, 16)
    args = matmul_args(stand_in(x), w, plain_result(x.dtype), a_codes=change(codes_of(x, "1x128")))
    with pytest.raises(ValueError, match=message):
        call_the_op(args, how)


def call_the_op(args: MatmulArgs, how: Any) -> None:
    if how == "out":
        outputs = matmul_op.allocate(args)
        matmul_op.into(outputs._replace(result=outputs.result._replace(y=torch.empty(8, 16))), args)
    elif how == "traced":
        with FakeTensorMode() as mode:
            is_tensor = lambda t: isinstance(t, Tensor)  # noqa: E731
            matmul_op(tree_map(lambda t: mode.from_tensor(t) if is_tensor(t) else t, args))
    else:
        with weft.backend(how):
            matmul_op(args)


@pytest.mark.parametrize("how", ["auto", "reference", "out", "traced"])
def test_ops_raise_for_unsupported_pairs(how: Any) -> None:
    x, w = torch.randn(8, 256), torch.randn(256, 16)
    codes = {"a_codes": codes_of(x, "1x128"), "b_codes": codes_of(w.T.contiguous(), "mx")}
    args = matmul_args(stand_in(x), stand_in(w), plain_result(x.dtype), **codes)
    with pytest.raises(ValueError, match="e4m3:1x128 and e4m3:mx"):
        call_the_op(args, how)


def test_dense_readers_raise_for_codes_with_group_slots() -> None:
    """`glu` restarts the blocks of a column-wise copy at each group, whose positions a dense product does not know."""
    x, ends = torch.randn(256, 256), torch.tensor([100, 200])
    q = weft.glu(x, ends=ends, align=16, quantize="1x128", columnwise=True)
    assert relative(q.dequantize(), weft.glu(x, ends=ends, align=16)) < 0.05
    for read in (lambda: q.T.dequantize(), lambda: weft.matmul(q.T, torch.randn(256, 16))):
        with pytest.raises(ValueError, match="scales have the shape"):
            read()


def test_a_stray_format_does_not_outlive_the_codes() -> None:
    """Under torch.compile a QTensor without the copy that a product reads is decoded and read as a plain tensor."""
    x, w = torch.randn(40, 128), torch.randn(128, 64)
    q = weft.quantize(x, "mx", rowwise=False, columnwise=True)
    compiled = torch.compile(weft.matmul, backend="aot_eager", fullgraph=True)
    assert relative(compiled(q, w), q.dequantize() @ w) < 1e-6
    args = matmul_args(q, w, plain_result(x.dtype), a_codes=PLAIN._replace(format=q.spec))
    assert relative(matmul_op(args).result.y, q.dequantize() @ w) < 1e-6


@pytest.mark.parametrize(
    "formats",
    [("mx", "row", "mx"), ("1x128", "128x128", "mx"), ("int8:row", "row", "row"), ("nvfp4", "nvfp4", "row")],
    ids="-".join,
)
def test_recipes_with_unsupported_pairs_raise(formats: tuple[str, str, str]) -> None:
    with pytest.raises(ValueError, match="cannot compute"):
        Recipe(*formats)


def test_recipes_that_rotate_only_one_operand_raise() -> None:
    rotated = "e2m1:nvfp4:te:hadamard-columnwise"
    for formats in (("nvfp4", "nvfp4", rotated), (rotated, "nvfp4", "nvfp4")):
        with pytest.raises(ValueError, match=r"dw = dy\^T x.*rotated"):
            Recipe(*formats)


def test_a_short_name_means_one_format() -> None:
    """`1x128` and `e4m3:1x128` take defaults; a spec that names its convention takes none."""
    assert weft.Format.of("e4m3:1x128") == weft.Format.of("1x128")
    assert weft.Format.of("int8:128x128") == weft.Format("128x128", "int8")
    assert weft.Format.of("e4m3:1x128:te") != weft.Format.of("1x128")
    x, w = torch.randn(8, 128), torch.randn(128, 128)
    other = weft.quantize(x, "e4m3:1x128:te")  # scales that are not powers of two can be read too
    assert relative(weft.linear(other, w, recipe="fp8_block"), x @ w.T) < ERRORS["fp8_block"]


# ---- gradients that are codes ---------------------------------------------------------------------------


def products(x: Tensor, w: Tensor) -> dict[str, Any]:
    ends, rows = torch.tensor([128, 256]), weft.row_map(torch.randint(2, (256, 1)), 2, align=128)
    return {
        "matmul": lambda: weft.matmul(x, w.T),
        "linear": lambda: weft.linear(x, w),
        "linear, bf16": lambda: weft.linear(x, w, recipe="bf16"),
        "linear, fp8_block": lambda: weft.linear(x, w, recipe="fp8_block"),
        "grouped_matmul": lambda: weft.grouped_matmul(x, torch.stack([w, w]), ends, align=128),
        "permute": lambda: weft.permute(x, rows)[:256],
    }


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("spec", ["1x128", "mx", "e5m2:tensor"])
@pytest.mark.parametrize("name", products(torch.empty(256, 128), torch.empty(256, 128)))
def test_quantized_gradients_are_used_by_value(name: str, spec: str, compiled: bool) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(256, 128, requires_grad=True), torch.randn(256, 128, requires_grad=True)
    function = products(x, w)[name]
    y = (torch.compile(function, backend="aot_eager") if compiled else function)()
    q = weft.quantize(torch.randn(y.shape), spec, columnwise=True)
    got = torch.autograd.grad(y, [x, w], q, allow_unused=True, retain_graph=not compiled)
    wanted = torch.autograd.grad(function(), [x, w], q.dequantize(), allow_unused=True)
    limit = ERRORS["fp8_block"] if "fp8" in name else 1e-2 if "bf16" in name else 1e-5
    for mine, its in zip(got, wanted, strict=True):
        assert (mine is None) == (its is None)
        assert mine is None or its is None or relative(mine, its) < limit


def test_products_take_the_quantized_gradient_of_a_gated_unit() -> None:
    """A quantized gradient that lost its format used to be 19 times too large here."""
    x, w = torch.randn(64, 128, requires_grad=True), torch.randn(256, 128)
    (got,) = torch.autograd.grad(weft.glu(weft.matmul(x, w.T), quantize_grad="1x128").sum(), x)
    (wanted,) = torch.autograd.grad(weft.glu(weft.matmul(x, w.T)).sum(), x)
    assert relative(got, wanted) < 0.05


# ---- partly frozen layers -------------------------------------------------------------------------------


def layer_of_experts(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "x": torch.randn(64, 128, dtype=dtype),
        "up": torch.randn(4, 256, 128) / 11,
        "down": torch.randn(4, 128, 128) / 11,
        "weights": torch.rand(64, 2) + 0.1,
        "up_bias": torch.randn(4, 256) / 10,
        "down_bias": torch.randn(4, 128) / 10,
    }


CHOSEN = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(i))[:2] for i in range(64)])


def run_experts(recipe: str | None, weights: Tensor, biased: bool, **tensors: Tensor) -> Tensor:
    biases = {name: tensors.pop(name) for name in ("up_bias", "down_bias")}
    torch.manual_seed(1)
    return weft.experts(routing=(weights, CHOSEN), recipe=recipe, **tensors, **(biases if biased else {}))


def run_linear(recipe: str | None, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    torch.manual_seed(1)
    return weft.linear(x, weight, bias, recipe=recipe)


def assert_partly_frozen(
    function: Any, tensors: dict[str, Tensor], limit: float, unused: tuple[str, ...] = ()
) -> None:
    """Assert that a tensor trained alone gets the gradient that it gets when all train."""
    torch.manual_seed(2)
    all_of_them = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    y = function(**all_of_them)
    dy = torch.randn(y.shape)
    used = [n for n in tensors if n not in unused]
    expected = dict(
        zip(used, torch.autograd.grad(y, [all_of_them[n] for n in used], dy.to(y.dtype)), strict=True)
    )
    for name in used:
        alone = {n: t.clone().requires_grad_(n == name) for n, t in tensors.items()}
        (got,) = torch.autograd.grad(function(**alone), alone[name], dy.to(y.dtype))
        assert got.isfinite().all(), name
        assert relative(got, expected[name]) < limit, name


@pytest.mark.parametrize(
    "biased", [pytest.param(False, id="plain", marks=pytest.mark.slow), pytest.param(True, id="biased")]
)
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(r, marks=[] if r in BY_DAY else [pytest.mark.slow]) for r in (None, *RECIPES)],
)
def test_experts_with_one_trained_parameter(recipe: str | None, biased: bool) -> None:
    """Training only `down`, or only the routing weights, used to read uninitialized memory."""
    tensors = layer_of_experts()
    unused = () if biased else ("up_bias", "down_bias")
    limit = ERRORS["nvfp4"] if recipe == "nvfp4" else 1e-5  # equal codes, unless they are drawn
    assert_partly_frozen(lambda **kw: run_experts(recipe, biased=biased, **kw), tensors, limit, unused)
    plain = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    mine = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    used = [n for n in tensors if n not in unused]
    wanted = torch.autograd.grad(run_experts(None, biased=biased, **plain).sum(), [plain[n] for n in used])
    got = torch.autograd.grad(run_experts(recipe, biased=biased, **mine).sum(), [mine[n] for n in used])
    for name, a, b in zip(used, got, wanted, strict=True):
        assert relative(a, b) < (2 * ERRORS[recipe] if recipe else 1e-6), name


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_a_layer_with_one_trained_parameter(recipe: str | None) -> None:
    torch.manual_seed(0)
    tensors = {"x": torch.randn(72, 128), "weight": torch.randn(256, 128) / 11, "bias": torch.randn(256)}
    assert_partly_frozen(
        lambda **kw: run_linear(recipe, **kw), tensors, ERRORS["nvfp4"] if recipe == "nvfp4" else 1e-5
    )


def test_frozen_experts_without_the_copy_for_a_gradient_raise() -> None:
    """The gradient used to be zeros or garbage, because `down` was checked against x instead of its own operand."""
    tensors = layer_of_experts()
    tensors["up"].requires_grad_()
    tensors["down"] = weft.quantize(tensors["down"], "mx")
    with pytest.raises(ValueError, match="down has no column-wise copy"):
        run_experts("mxfp8", biased=False, **tensors)


def test_mismatched_routing_shapes_raise() -> None:
    tensors = layer_of_experts()
    tensors["weights"] = tensors["weights"].T.contiguous()
    with pytest.raises(ValueError, match=r"both \[..., k\]; got \(2, 64\) and \(64, 2\)"):
        run_experts(None, biased=False, **tensors)


@pytest.mark.parametrize("spec", ["1x128", "mx", "row", "nvfp4"])
@pytest.mark.parametrize("recipe", [None, "fp8_block"])
def test_experts_of_quantized_tokens(recipe: str | None, spec: str) -> None:
    """Codes in the recipe's format are moved as they are; others are decoded, and with gradients all are."""
    tensors = layer_of_experts()
    x = tensors.pop("x")
    q = weft.quantize(x, spec)
    with torch.no_grad():
        got = run_experts(recipe, biased=False, x=q, **tensors)
        wanted = run_experts(recipe, biased=False, x=q.dequantize(), **tensors)
    assert relative(got, wanted) < (1e-6 if recipe is None or spec == "1x128" else ERRORS["fp8_block"])
    tensors["up"].requires_grad_()
    (up,) = torch.autograd.grad(run_experts(recipe, biased=False, x=q, **tensors).sum(), tensors["up"])
    (up_decoded,) = torch.autograd.grad(
        run_experts(recipe, biased=False, x=q.dequantize(), **tensors).sum(), tensors["up"]
    )
    assert torch.equal(up, up_decoded)


# ---- infinities -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("recipe", RECIPES)
def test_nonfinite_gradients_stay_nonfinite(recipe: str, bad: float) -> None:
    """Saturating formats used to hide an overflow from `GradScaler`, which then took the step."""
    torch.manual_seed(0)
    x, w = torch.randn(64, 128, requires_grad=True), torch.randn(256, 128, requires_grad=True)
    dy = torch.randn(64, 256)
    dy[3, 5] = bad
    dx, dw = torch.autograd.grad(weft.linear(x, w, recipe=recipe), [x, w], dy)
    assert not dx[3].isfinite().any()
    assert not dw[5].isfinite().any()


def test_nonfinite_gradients_stay_nonfinite_with_delayed_scaling() -> None:
    torch.manual_seed(0)
    scaling = weft.DelayedScaling(history=4)
    x, w = torch.randn(64, 128), torch.randn(256, 128, requires_grad=True)
    dy = torch.randn(64, 256)
    for step in range(3):
        dy[3, 5] = torch.inf if step == 1 else 1.0
        (dw,) = torch.autograd.grad(weft.linear(x, w, recipe="fp8_tensor", scaling=scaling), w, dy)
        assert bool(dw.isfinite().all()) == (step != 1)
        scaling.step()
        # The step that overflowed does not affect later scales.
        assert scaling.grad_scale == 1 / (57344 / dy[dy.isfinite()].abs().max())


def test_grad_scaler_skips_a_step_that_overflowed() -> None:
    layer = weft.nn.Linear(128, 128, bias=False, recipe="fp8_block")
    before, optimizer = layer.weight.detach().clone(), torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale((layer(torch.randn(8, 128)) * torch.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight, before)
    assert scaler.get_scale() == 2.0**15


def test_finite_gradients_have_the_same_bytes_in_both_conventions() -> None:
    """The convention that keeps infinities makes the same codes and scales for finite gradients."""
    dy = torch.randn(256, 512) * torch.logspace(-8, 4, 256)[:, None]
    for recipe in RECIPES.values():
        if recipe.grad is not None and recipe.grad != recipe.x:
            f = weft.Format.of(recipe.grad)
            te = weft.Format(f.block, f.element, "te", f.power_of_two)
            mine, its = (weft.quantize(dy, spec, columnwise=True) for spec in (f, te))
            for a, b in ((mine.rowwise, its.rowwise), (mine.columnwise, its.columnwise)):
                assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
                assert torch.equal(a.scale, b.scale)


# ---- weights that are quantized once --------------------------------------------------------------------


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD], ids=lambda kind: kind.__name__)
def test_weights_are_quantized_again_after_a_fused_step(make: Any) -> None:
    """Fused optimizers change weights without incrementing their version."""
    layer = weft.nn.Linear(128, 128, bias=False, recipe="fp8_block")
    optimizer, x = make(layer.parameters(), lr=1.0, fused=True), torch.randn(8, 128)
    with weft.reuse_weights():
        first = layer(x)
        first.sum().backward()
        optimizer.step()
        second = layer(x)
    assert not torch.equal(first, second)
    assert torch.equal(second, layer(x))


def test_reuse_belongs_to_one_thread() -> None:
    """Another thread's block does not make this thread reuse weights."""
    w, x = torch.randn(128, 128), torch.randn(8, 128)
    entered, done = threading.Event(), threading.Event()

    def other() -> None:
        with weft.reuse_weights():
            weft.linear(x, w, recipe="fp8_block")
            entered.set()
            done.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(60)
    first = weft.linear(x, w, recipe="fp8_block")
    w.data.mul_(2.0)
    assert torch.equal(weft.linear(x, w, recipe="fp8_block"), first * 2)
    done.set()
    thread.join()


# ---- results in the caller's memory ---------------------------------------------------------------------


def test_a_result_that_overlaps_its_operands_raises() -> None:
    """Otherwise programs would read tiles that others have already overwritten."""
    a, b, ends = torch.randn(300, 300), torch.randn(300, 300), torch.tensor([300])
    for call in (
        lambda: weft.matmul(a, b, out=a),
        lambda: weft.matmul(a, b, out=b),
        lambda: weft.matmul(a[:200], b, out=a[100:]),
        lambda: weft.matmul(a, b, bias=a[0], out=a),
        lambda: weft.grouped_matmul(a, b[None], ends, out=a),
        lambda: weft.grouped_wgrad(a, b, ends, out=b[None]),
        lambda: weft.glu(a[:1], out=a[:1, :150]),
    ):
        with pytest.raises(ValueError, match="shares memory"):
            call()
    wanted = a @ b + a
    out = a.clone()
    assert relative(weft.matmul(a, b, out=out, accumulate=True), wanted) < 1e-5


def test_a_compiled_result_that_overlaps_its_operands_is_right_or_raises() -> None:
    a, b = torch.randn(300, 300), torch.randn(300, 300)
    product, norm = (
        torch.compile(f, backend="aot_eager", fullgraph=True) for f in (weft.matmul, weft.rms_norm)
    )
    with pytest.raises(TorchDynamoException, match="shares memory"):
        product(a, b, out=a)
    part = a.clone()
    assert relative(product(part[:200], b, out=part[100:]), a[:200] @ b) < 1e-5
    x = a.clone()
    assert relative(norm(x, out=x), weft.rms_norm(a)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_result_has_the_dtype_of_out(dtype: torch.dtype) -> None:
    a, b = torch.randn(40, 96).bfloat16(), torch.randn(96, 64).bfloat16()
    ends = torch.tensor([40])
    for call, shape in (
        (lambda out: weft.matmul(a, b, out=out), (40, 64)),
        (lambda out: weft.grouped_matmul(a, b.T[None].contiguous(), ends, out=out), (40, 64)),
        (lambda out: weft.grouped_wgrad(weft.matmul(a, b), a, ends, out=out), (1, 64, 96)),
    ):
        out = torch.full(shape, torch.nan, dtype=dtype)
        assert call(out) is out
        assert out.isfinite().all()
    with pytest.raises(ValueError, match="leave out_dtype out"):
        weft.matmul(a, b, out=torch.empty(40, 64), out_dtype=torch.float16)


@pytest.mark.parametrize("recipe", [None, "bf16", "fp8_block", "fp8_tensor"])
def test_main_grad_compiled(recipe: str | None) -> None:
    """A compiled layer used to leave `main_grad` at zero and return a gradient instead."""
    layer, x = weft.nn.Linear(128, 128, recipe=recipe), torch.randn(32, 128)
    layer.weight.main_grad = torch.ones(128, 128)
    layer(x).sum().backward()
    wanted, layer.weight.main_grad = layer.weight.main_grad, torch.ones(128, 128)
    torch.compile(layer, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert torch.equal(layer.weight.main_grad, wanted)
    assert layer.weight.grad is None


# ---- long sums ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [INT32_DEPTH, INT32_DEPTH + 1, 2 * INT32_DEPTH + 3])
@pytest.mark.parametrize("m", [1, 70])
def test_sums_of_int8_do_not_exceed_int32(m: int, k: int) -> None:
    ones = weft.quantize(torch.ones(m, k), "int8:row"), weft.quantize(torch.ones(3, k), "int8:row").T
    for engine in ("weft", "auto"):
        assert torch.allclose(weft.matmul(*ones, engine=engine), torch.full((m, 3), float(k)), rtol=1e-6)


def test_sums_of_int8_over_many_rows_do_not_exceed_int32() -> None:
    rows = INT32_DEPTH + 64
    q = weft.quantize(torch.ones(rows, 16), "int8:row", rowwise=False, columnwise=True)
    dw = weft.grouped_wgrad(q, q, torch.tensor([16, rows]), align=1)
    assert torch.allclose(dw[1], torch.full((16, 16), float(rows - 16)), rtol=1e-6)


@pytest.mark.parametrize("spec", [None, "row", "mx"])
def test_adversarial_sums_are_within_their_bound(spec: str | None) -> None:
    """A large term that absorbs small ones gives an error near K * 2^-24 * sum |a b|, not K / 16 of that."""
    k = 4096
    a = torch.full((1, k), 2.0**-12)
    a[0, 0] = 1.0
    b = a.clone()
    left, right = (a, b) if spec is None else (weft.quantize(a, spec), weft.quantize(b, spec))
    exact = [t.double() if spec is None else t.dequantize().double() for t in (left, right)]
    truth, terms = exact[0] @ exact[1].T, exact[0].abs() @ exact[1].abs().T
    error = (weft.matmul(left, right.T, engine="weft").double() - truth).abs()
    assert (error <= (k + 4) * 2.0**-24 * terms).all()
    assert (error > (k / 16 + 4) * 2.0**-24 * terms).all() or spec is not None


# ---- seeds ----------------------------------------------------------------------------------------------


def test_a_seed_is_drawn_on_the_host() -> None:
    """Default devices and dispatch modes do not affect the draw."""
    x, w = torch.randn(32, 128), torch.randn(128, 128, requires_grad=True)
    with torch.device("meta"):
        y = weft.linear(x, w, recipe="nvfp4")
    assert y.device.type == "cpu"
    with FakeTensorMode():
        fake = weft.linear(torch.empty(32, 128), torch.empty(128, 128, requires_grad=True), recipe="nvfp4")
    assert fake.shape == (32, 128)
    meta = weft.linear(x.to("meta"), w.detach().to("meta").requires_grad_(), recipe="nvfp4")
    assert meta.shape == (32, 128)

"""What products refuse, whoever calls them, and what a layer keeps right where only a part of it trains."""

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

# Relative errors of results and gradients in the numbers of a recipe, with some room: of two to four products.
ERRORS = {
    "bf16": 0.02,
    "fp8_block": 0.12,
    "fp8_row": 0.12,
    "fp8_tensor": 0.2,
    "mxfp8": 0.12,
    "nvfp4": 0.5,
    "int8_row": 0.06,
}


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


# ---- codes ----------------------------------------------------------------------------------------------


def codes_of(x: Tensor, spec: str) -> Codes:
    codes = weft.quantize(x, spec).rowwise
    assert codes is not None
    return codes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda codes: codes._replace(format=None), "without the others"),
        (lambda codes: codes._replace(scale=None), "without the others"),
        (lambda codes: PLAIN._replace(format=codes.format), "and no codes"),
        (lambda codes: codes._replace(format="e5m2:1x128:te"), "codes are torch.float8_e4m3fn"),
        (lambda codes: codes._replace(format="e4m3:mx:te"), "scales are torch.float32"),
        (lambda codes: codes._replace(data=codes.data[:, :64]), r"codes have the shape \(8, 64\)"),
        (lambda codes: codes._replace(scale=codes.scale[:, :1]), r"scales have the shape \(8, 1\)"),
        (lambda codes: codes._replace(format="e4m3:row:te"), r"scales have the shape \(8, 2\)"),
        (lambda codes: codes._replace(global_scale=torch.ones(())), "left over"),
    ],
)
@pytest.mark.parametrize("how", ["auto", "reference", "out", "traced"])
def test_an_op_refuses_codes_that_it_would_misread(how: Any, change: Any, said: str) -> None:
    """Whoever calls the op itself: here nobody has checked anything before."""
    x, w = torch.randn(8, 256), torch.randn(256, 16)
    args = matmul_args(stand_in(x), w, plain_result(x.dtype), a_codes=change(codes_of(x, "1x128")))
    with pytest.raises(ValueError, match=said):
        call_the_op(args, how)


def call_the_op(args: MatmulArgs, how: Any) -> None:
    if how == "out":
        room = matmul_op.allocate(args)
        matmul_op.into(room._replace(result=room.result._replace(y=torch.empty(8, 16))), args)
    elif how == "traced":
        with FakeTensorMode() as mode:
            is_tensor = lambda t: isinstance(t, Tensor)  # noqa: E731
            matmul_op(tree_map(lambda t: mode.from_tensor(t) if is_tensor(t) else t, args))
    else:
        with weft.backend(how):
            matmul_op(args)


@pytest.mark.parametrize("how", ["auto", "reference", "out", "traced"])
def test_an_op_refuses_formats_that_do_not_multiply(how: Any) -> None:
    x, w = torch.randn(8, 256), torch.randn(256, 16)
    codes = {"a_codes": codes_of(x, "1x128"), "b_codes": codes_of(w.T.contiguous(), "mx")}
    args = matmul_args(stand_in(x), stand_in(w), plain_result(x.dtype), **codes)
    with pytest.raises(ValueError, match="e4m3:1x128 and e4m3:mx"):
        call_the_op(args, how)


def test_codes_of_groups_in_slots_are_refused_by_who_knows_no_groups() -> None:
    """`glu` begins the blocks of a column-wise copy anew with each group of rows; a dense product cannot know where."""
    x, ends = torch.randn(256, 256), torch.tensor([100, 200])
    q = weft.glu(x, ends=ends, align=16, quantize="1x128", columnwise=True)
    assert relative(q.dequantize(), weft.glu(x, ends=ends, align=16)) < 0.05
    for read in (lambda: q.T.dequantize(), lambda: weft.matmul(q.T, torch.randn(256, 16))):
        with pytest.raises(ValueError, match="scales have the shape"):
            read()


def test_a_stray_format_does_not_outlive_the_codes() -> None:
    """A QTensor that lacks the copy which a product reads is decoded where a compiler meets it, and read as numbers."""
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
def test_recipes_whose_formats_do_not_multiply_are_refused(formats: tuple[str, str, str]) -> None:
    with pytest.raises(ValueError, match="cannot compute"):
        Recipe(*formats)


def test_recipes_that_rotate_one_of_two_operands_are_refused() -> None:
    rotated = "e2m1:nvfp4:te:hadamard-columnwise"
    for formats in (("nvfp4", "nvfp4", rotated), (rotated, "nvfp4", "nvfp4")):
        with pytest.raises(ValueError, match=r"dw = dy\^T x.*rotated"):
            Recipe(*formats)


def test_a_short_name_means_one_format() -> None:
    """`1x128` and `e4m3:1x128` are the usual choice; a spec that names its convention says everything."""
    assert weft.Format.of("e4m3:1x128") == weft.Format.of("1x128")
    assert weft.Format.of("int8:128x128") == weft.Format("128x128", "int8")
    assert weft.Format.of("e4m3:1x128:te") != weft.Format.of("1x128")
    x, w = torch.randn(8, 128), torch.randn(128, 128)
    other = weft.quantize(x, "e4m3:1x128:te")  # its scales are no powers of two, and are read all the same
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
def test_a_gradient_in_codes_is_that_of_its_numbers(name: str, spec: str, compiled: bool) -> None:
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


def test_a_gated_unit_hands_its_gradient_to_any_product() -> None:
    """The chain in which a gradient in codes arises: 19 times too large where its format was lost."""
    x, w = torch.randn(64, 128, requires_grad=True), torch.randn(256, 128)
    (got,) = torch.autograd.grad(weft.glu(weft.matmul(x, w.T), quantize_grad="1x128").sum(), x)
    (wanted,) = torch.autograd.grad(weft.glu(weft.matmul(x, w.T)).sum(), x)
    assert relative(got, wanted) < 0.05


# ---- layers of which a part trains ----------------------------------------------------------------------


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


def run_experts(recipe: str | None, weights: Tensor, biased: bool, **given: Tensor) -> Tensor:
    biases = {name: given.pop(name) for name in ("up_bias", "down_bias")}
    torch.manual_seed(1)
    return weft.experts(routing=(weights, CHOSEN), recipe=recipe, **given, **(biases if biased else {}))


def run_linear(recipe: str | None, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    torch.manual_seed(1)
    return weft.linear(x, weight, bias, recipe=recipe)


def assert_partly_frozen(
    function: Any, given: dict[str, Tensor], limit: float, unused: tuple[str, ...] = ()
) -> None:
    """Each tensor alone gets the gradient that it has among all of them, and all are near those of plain numbers."""
    torch.manual_seed(2)
    all_of_them = {n: t.clone().requires_grad_() for n, t in given.items()}
    y = function(**all_of_them)
    dy = torch.randn(y.shape)
    used = [n for n in given if n not in unused]
    whole = dict(
        zip(used, torch.autograd.grad(y, [all_of_them[n] for n in used], dy.to(y.dtype)), strict=True)
    )
    for name in used:
        alone = {n: t.clone().requires_grad_(n == name) for n, t in given.items()}
        (got,) = torch.autograd.grad(function(**alone), alone[name], dy.to(y.dtype))
        assert got.isfinite().all(), name
        assert relative(got, whole[name]) < limit, name


@pytest.mark.parametrize(
    "biased", [pytest.param(False, id="plain", marks=pytest.mark.slow), pytest.param(True, id="biased")]
)
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_experts_of_which_one_parameter_trains(recipe: str | None, biased: bool) -> None:
    """`down` alone, or the weights of the router alone, used to read memory that nobody had written."""
    given = layer_of_experts()
    unused = () if biased else ("up_bias", "down_bias")
    limit = ERRORS["nvfp4"] if recipe == "nvfp4" else 1e-5  # the same codes, but for drawn ones
    assert_partly_frozen(lambda **kw: run_experts(recipe, biased=biased, **kw), given, limit, unused)
    plain = {n: t.clone().requires_grad_() for n, t in given.items()}
    mine = {n: t.clone().requires_grad_() for n, t in given.items()}
    used = [n for n in given if n not in unused]
    wanted = torch.autograd.grad(run_experts(None, biased=biased, **plain).sum(), [plain[n] for n in used])
    got = torch.autograd.grad(run_experts(recipe, biased=biased, **mine).sum(), [mine[n] for n in used])
    for name, a, b in zip(used, got, wanted, strict=True):
        assert relative(a, b) < (2 * ERRORS[recipe] if recipe else 1e-6), name


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_a_layer_of_which_one_parameter_trains(recipe: str | None) -> None:
    torch.manual_seed(0)
    given = {"x": torch.randn(72, 128), "weight": torch.randn(256, 128) / 11, "bias": torch.randn(256)}
    assert_partly_frozen(
        lambda **kw: run_linear(recipe, **kw), given, ERRORS["nvfp4"] if recipe == "nvfp4" else 1e-5
    )


def test_frozen_experts_without_the_copy_that_a_gradient_reads_are_refused() -> None:
    """Its gradient was zeros or garbage: `down` was checked against x, and not against what it multiplies."""
    given = layer_of_experts()
    given["up"].requires_grad_()
    given["down"] = weft.quantize(given["down"], "mx")
    with pytest.raises(ValueError, match="down has no column-wise copy"):
        run_experts("mxfp8", biased=False, **given)


def test_weights_and_experts_of_other_shapes_are_refused() -> None:
    given = layer_of_experts()
    given["weights"] = given["weights"].T.contiguous()
    with pytest.raises(ValueError, match=r"both \[..., k\]; got \(2, 64\) and \(64, 2\)"):
        run_experts(None, biased=False, **given)


@pytest.mark.parametrize("spec", ["1x128", "mx", "row", "nvfp4"])
@pytest.mark.parametrize("recipe", [None, "fp8_block"])
def test_experts_of_quantized_tokens(recipe: str | None, spec: str) -> None:
    """Codes that the recipe reads are moved as they are; others are decoded. With gradients all are."""
    given = layer_of_experts()
    x = given.pop("x")
    q = weft.quantize(x, spec)
    with torch.no_grad():
        got = run_experts(recipe, biased=False, x=q, **given)
        wanted = run_experts(recipe, biased=False, x=q.dequantize(), **given)
    assert relative(got, wanted) < (1e-6 if recipe is None or spec == "1x128" else ERRORS["fp8_block"])
    given["up"].requires_grad_()
    (up,) = torch.autograd.grad(run_experts(recipe, biased=False, x=q, **given).sum(), given["up"])
    (same,) = torch.autograd.grad(
        run_experts(recipe, biased=False, x=q.dequantize(), **given).sum(), given["up"]
    )
    assert torch.equal(up, same)


# ---- infinities -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gradient_that_is_not_finite_stays_so(recipe: str, bad: float) -> None:
    """Formats that saturate hid an overflow from `GradScaler`, which then took the step."""
    torch.manual_seed(0)
    x, w = torch.randn(64, 128, requires_grad=True), torch.randn(256, 128, requires_grad=True)
    dy = torch.randn(64, 256)
    dy[3, 5] = bad
    dx, dw = torch.autograd.grad(weft.linear(x, w, recipe=recipe), [x, w], dy)
    assert not dx[3].isfinite().any()
    assert not dw[5].isfinite().any()


def test_a_gradient_that_is_not_finite_stays_so_with_delayed_scaling() -> None:
    torch.manual_seed(0)
    scaling = weft.DelayedScaling(history=4)
    x, w = torch.randn(64, 128), torch.randn(256, 128, requires_grad=True)
    dy = torch.randn(64, 256)
    for step in range(3):
        dy[3, 5] = torch.inf if step == 1 else 1.0
        (dw,) = torch.autograd.grad(weft.linear(x, w, recipe="fp8_tensor", scaling=scaling), w, dy)
        assert bool(dw.isfinite().all()) == (step != 1)
        scaling.step()
        # The step that overflowed leaves no trace in the scales of the next ones.
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


def test_gradients_of_finite_numbers_keep_their_bytes() -> None:
    """The convention that keeps infinities makes the same codes and scales otherwise."""
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
def test_weights_are_quantized_anew_after_a_fused_step(make: Any) -> None:
    """Fused optimizers change weights without moving their version."""
    layer = weft.nn.Linear(128, 128, bias=False, recipe="fp8_block")
    optimizer, x = make(layer.parameters(), lr=1.0, fused=True), torch.randn(8, 128)
    with weft.reuse_weights():
        first = layer(x)
        first.sum().backward()
        optimizer.step()
        again = layer(x)
    assert not torch.equal(first, again)
    assert torch.equal(again, layer(x))


def test_reuse_belongs_to_one_thread() -> None:
    """While another thread is in its block, weights that this one changes without counting are read anew."""
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


def test_a_result_over_its_operands_is_refused() -> None:
    """Programs read tiles that others have written by then: 9,000 off."""
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


def test_a_compiled_result_over_its_operands_is_right_or_refused() -> None:
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
    """A compiled layer left `main_grad` at zero and made a gradient instead."""
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
    """One large term among small ones that it swallows: the error is K * 2^-24 * sum |a b|, and not K / 16 of it."""
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
    """Neither a default device nor a mode sees it."""
    x, w = torch.randn(32, 128), torch.randn(128, 128, requires_grad=True)
    with torch.device("meta"):
        y = weft.linear(x, w, recipe="nvfp4")
    assert y.device.type == "cpu"
    with FakeTensorMode():
        fake = weft.linear(torch.empty(32, 128), torch.empty(128, 128, requires_grad=True), recipe="nvfp4")
    assert fake.shape == (32, 128)
    meta = weft.linear(x.to("meta"), w.detach().to("meta").requires_grad_(), recipe="nvfp4")
    assert meta.shape == (32, 128)

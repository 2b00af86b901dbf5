"""Options of the gated norm, its shapes and layouts, quantized results, and regression tests for bugs of other
libraries. The catalogue also tests its workloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_loom.testing import assert_not_worse, words

import weft
from tests.catalogue.calls import arguments_of, compiled_variants, opcheck
from tests.catalogue.layouts import LAYOUTS, far_apart
from weft import Format, QTensor
from weft.lab import oracle
from weft.lab.calls import assert_same, backward, own_numbers, results, run, upstreams
from weft.lab.copies import assert_copies
from weft.lab.families import Call
from weft.lab.families.gated_norm import gated_norm_truth
from weft.lab.truth import near
from weft.ops.norm.gated.arguments import GatedNormBackwardArgs, GatedNormGradients
from weft.ops.norm.gated.gated import gated_norm_backward_op
from weft.runtime import choosing_for, recording

BF16 = torch.bfloat16


def draw(*shape: int, dtype: torch.dtype = BF16, std: float = 1.5) -> Tensor:
    return (torch.randn(shape) * std).to(dtype)


def call_of(
    batch: int = 2, length: int = 5, cols: int = 96, dtype: torch.dtype = BF16, weight: bool = True, **options: Any
) -> Call:  # fmt: skip
    """Build a call with x [B, L, K], and gate and y [L, B, K] unless transpose=False."""
    options.setdefault("transpose", True)
    lead = (length, batch) if options["transpose"] else (batch, length)
    tensors = {"x": draw(batch, length, cols, dtype=dtype), "gate": draw(*lead, cols, dtype=dtype, std=2.0)}
    if weight:
        tensors["weight"] = draw(cols, dtype=dtype)
    return Call(weft.gated_norm, {**tensors, **options})


def check(call: Call, target: str | None = None) -> dict[str, Tensor]:
    """Compare y and all gradients with float64, as launched on a CPU or on a GPU."""
    call = call.requiring_grad()
    gradients = upstreams(results(call))
    with choosing_for(target or "cpu"):
        outputs = results(call)
        got = {**outputs, **backward(call, outputs, gradients)}
    expected = gated_norm_truth(call, gradients)
    assert set(got) == set(expected)
    for name, wanted in expected.items():
        if not isinstance(got[name], QTensor):
            assert not isinstance(wanted, Tensor)
            near(got[name], wanted)
    return got


# ---- equal to models -----------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_dtype", [BF16, torch.float32])
def test_llama_casting_matches_qwen3_next(weight_dtype: torch.dtype) -> None:
    """Qwen3NextRMSNormGated of transformers rounds z, then its product with the weight, then applies the gate."""
    x, gate, weight = draw(64, 200), draw(64, 200, std=2.0), draw(200, dtype=weight_dtype)
    h = x.float()
    z = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(BF16)
    wanted = ((weight * z) * F.silu(gate.float())).to(BF16)
    got = weft.gated_norm(x, gate, weight, act="silu", casting="llama")
    # 1 / sqrt and exp in fp32 rarely round differently from PyTorch's.
    assert (got != wanted).float().mean() < 1e-3
    once = weft.gated_norm(x, gate, weight, act="silu")
    assert (once != wanted).float().mean() > 0.1, "the data must distinguish the two castings"


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 4},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"weight": False, "act": "silu"},
                {"transpose": False, "weight_offset": 1.0},
                {"cols": 10002},
            )
        ),
    ],
    ids=str,
)
def test_llama_casting_with(options: dict[str, Any]) -> None:
    """Results and gradients, which depend on the rounded values, match float64."""
    check(call_of(casting="llama", **options))


@pytest.mark.parametrize("columnwise", [pytest.param(False, marks=pytest.mark.slow), True])
def test_codes_of_llama_casting(columnwise: bool) -> None:
    """Codes encode the fp32 product with the gate, whose factors are rounded."""
    call = call_of(2, 65, 96, groups=2, casting="llama")
    y = call.with_(out_dtype=torch.float32)()
    assert_copies(call.with_(quantize="1x128", columnwise=columnwise)(), y.flatten(0, 1))


def naive(x: Tensor, gate: Tensor, weight: Tensor, groups: int, act: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute like modeling code: norm in fp32, back to the dtype, times the weight, times the gate."""
    parts = x.transpose(0, 1).unflatten(-1, (groups, -1))
    wide = parts.float() if x.dtype == BF16 else parts
    z = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype).flatten(-2)
    return z * weight * act(gate)


@pytest.mark.compat
@pytest.mark.parametrize(("act", "function"), [("sigmoid", torch.sigmoid), ("silu", F.silu)])
def test_matches_modeling_code(act: str, function: Callable[[Tensor], Tensor]) -> None:
    call = call_of(2, 12, 96, groups=4, act=act)
    dy = draw(12, 2, 96)
    outcomes = []
    for dtype in (torch.float64, BF16):
        leaves = [call[name].to(dtype).requires_grad_() for name in ("x", "gate", "weight")]
        y = naive(*leaves, 4, function)
        outcomes.append([y, *torch.autograd.grad(y, leaves, dy.to(dtype))])
    leaves = [call[name].clone().requires_grad_() for name in ("x", "gate", "weight")]
    y = weft.gated_norm(*leaves, groups=4, act=act, transpose=True)  # type: ignore[arg-type]
    for got, truth, eager in zip([y, *torch.autograd.grad(y, leaves, dy)], *outcomes, strict=True):
        assert_not_worse(got, truth, eager)


def test_one_group_and_an_open_gate_is_rms_norm() -> None:
    """The gated norm equals `rms_norm` if the gate is open: sigmoid(100) = 1 in fp32."""
    x, weight = draw(6, 96), draw(96)
    got = weft.gated_norm(x, torch.full_like(x, 100.0), weight, eps=1e-3, weight_offset=1.0)
    assert torch.equal(got, weft.rms_norm(x, weight, eps=1e-3, weight_offset=1.0))


def test_groups_are_separate_norms() -> None:
    call = call_of(3, 4, 96, groups=3)
    got = run(call)
    for group in range(3):
        part = slice(32 * group, 32 * group + 32)
        alone = call.with_(
            groups=1, **{name: t[..., part].contiguous() for name, t in call.tensors().items()}
        )
        outputs = results(alone.requiring_grad())
        gradient = upstreams(results(call.requiring_grad()))["y"][..., part]
        wanted = run(alone, {"y": gradient})
        assert outputs["y"].shape == (4, 3, 32)
        assert_same({n: t[..., part].contiguous() for n, t in got.items()}, wanted, f"group {group}")


def test_transpose_matches_a_transposed_view() -> None:
    """Results have the bits of a transposed x, and the gradient has the layout of x."""
    call = call_of(3, 7, 96, groups=2)
    got = run(call)
    moved = call.with_(x=call["x"].transpose(0, 1).contiguous(), transpose=False)
    wanted = run(moved, upstreams(results(call.requiring_grad())))
    wanted["dx"] = wanted["dx"].transpose(0, 1)
    assert_same(got, wanted, "transposed")
    assert got["dx"].is_contiguous()
    assert got["y"].is_contiguous()


def test_heads() -> None:
    """An x [B, L, H, d], as from attention, equals [B, L, H * d]; heads may also share one weight."""
    call = call_of(2, 5, 96, groups=4)
    heads = call.with_(x=call["x"].view(2, 5, 4, 24))
    got, wanted = run(heads), run(call)
    assert got["dx"].shape == (2, 5, 4, 24)
    got["dx"] = got["dx"].view(2, 5, 96)
    assert_same(got, wanted, "heads")
    shared = call_of(2, 5, 24, groups=1)
    shared = shared.with_(x=draw(2, 5, 4, 24), gate=draw(5, 2, 4, 24))
    check(shared)
    repeated = call.with_(
        x=shared["x"].view(2, 5, 96), gate=shared["gate"].view(5, 2, 96), weight=shared["weight"].repeat(4)
    )
    assert torch.equal(shared().view(5, 2, 96), repeated())


# ---- sizes ---------------------------------------------------------------------------------------------

# B, L, K, groups; on a CPU and on a GPU
SIZES = [
    (1, 1, 1, 1),
    (2, 12, 64, 4),  # a length that 8 does not divide, in more than one batch
    (3, 13, 200, 4),
    (1, 130, 33, 3),
    (2, 3, 1026, 1),
    (2, 17, 2048, 4),
    (2, 20, 10002, 2),  # in chunks on a CPU, with more than one row per program
]
QUICK = SIZES[:2] + SIZES[3:5]  # much like other sizes on a GPU
LONG = [(2, 3, 20000, 1), (1, 2, 40016, 2)]  # in chunks on a GPU; groups of 20000 and 20008 columns


@pytest.mark.parametrize(
    ("target", "batch", "length", "cols", "groups"),
    [
        pytest.param(target, *size, marks=[pytest.mark.slow] if target != "cpu" and size in QUICK else [])
        for size in SIZES
        for target in ("cpu", "sm_90")
    ],
)
def test_sizes(target: str, batch: int, length: int, cols: int, groups: int) -> None:
    act = "silu" if cols % 3 == 0 else "sigmoid"
    check(call_of(batch, length, cols, groups=groups, act=act, weight_offset=0.5), target)


@pytest.mark.parametrize(("batch", "length", "cols", "groups"), LONG)
@pytest.mark.parametrize("target", ["sm_80", pytest.param("gfx942", marks=pytest.mark.slow)])
def test_long_groups(target: str, batch: int, length: int, cols: int, groups: int) -> None:
    check(call_of(batch, length, cols, groups=groups, act="silu"), target)


@pytest.mark.parametrize("length", [*range(1, 10), 12, 15, 16, 17, 63, 64, 65])
def test_every_row_of_every_batch(length: int) -> None:
    """Every row is right for lengths that 8 does not divide, several programs, and several rows per program."""
    for target in ("cpu", "sm_90"):
        check(call_of(3, length, 64, groups=2), target)


@pytest.mark.parametrize("cols", [0, 6])
def test_empty_inputs(cols: int) -> None:
    for batch, length in ((2, 0), (0, 3), (2, 3 * (cols == 0))):
        call = call_of(batch, length, cols, groups=3 if cols else 1)
        got = run(call)
        assert got["y"].shape == (length, batch, cols)
        assert got["dx"].shape == (batch, length, cols)
        assert not got["dweight"].count_nonzero()


def test_no_weight() -> None:
    got = check(call_of(2, 5, 96, groups=3, weight=False, act="silu"))
    assert "dweight" not in got


@pytest.mark.parametrize(
    ("dtype", "gate_dtype"),
    [
        (torch.float16, torch.float32),
        pytest.param(torch.float32, torch.float16, marks=pytest.mark.slow),
    ],
)
def test_dtypes(dtype: torch.dtype, gate_dtype: torch.dtype) -> None:
    """Each gradient has the dtype of its tensor; y has the dtype of x, or `out_dtype`."""
    call = call_of(dtype=dtype, groups=2)
    call = call.with_(gate=call["gate"].to(gate_dtype), weight=call["weight"].float())
    got = check(call)
    assert (got["y"].dtype, got["dx"].dtype, got["dgate"].dtype) == (dtype, dtype, gate_dtype)
    assert got["dweight"].dtype == torch.float32
    assert check(call.with_(out_dtype=BF16))["y"].dtype == BF16


# ---- layouts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("transpose", [False, True])
def test_layouts(layout: Callable[[Tensor], Tensor], transpose: bool) -> None:
    """Any strides give the bits of the contiguous tensor, forward and backward."""
    call = call_of(3, 5, 96, groups=3, transpose=transpose)
    for name, tensor in call.tensors().items():
        strided = layout(tensor)
        wanted = run(call.with_(**{name: strided.contiguous().clone()}))
        assert_same(run(call.with_(**{name: strided})), wanted, f"{layout.__name__} {name}")
    gradient = upstreams(results(call.requiring_grad()))["y"]
    strided = layout(gradient)
    wanted = run(call, {"y": strided.contiguous().clone()})
    assert_same(run(call, {"y": strided}), wanted, f"{layout.__name__} gradient")


def test_layouts_of_heads() -> None:
    """Includes heads before tokens, a slice of a packed projection, and strides beyond three dimensions."""
    gate, weight = draw(5, 2, 4, 24), draw(24)
    packed = draw(2, 5, 3 * 96)
    forms = {
        "heads first": draw(2, 4, 5, 24).transpose(1, 2),
        "packed": packed[..., 96:192].unflatten(-1, (4, 24)),
        "sparse": draw(4, 10, 8, 48)[::2, ::2, ::2, :24],
        "backwards": draw(24, 4, 5, 2).permute(3, 2, 1, 0),
    }
    for what, x in forms.items():
        for groups in (1, 2):
            call = Call(
                weft.gated_norm,
                {"x": x, "gate": gate, "weight": weight, "groups": groups, "transpose": True},
            )
            assert_same(run(call), run(call.with_(x=x.contiguous())), what)
        quantized = call.with_(quantize="mx", columnwise=True)
        assert_same(results(quantized), results(quantized.with_(x=x.contiguous())), what)


def test_only_unusual_layouts_are_copied() -> None:
    """A transposed or sliced x is read in place, without a copy."""
    x, gate = draw(2, 5, 3 * 96)[..., 96:192], draw(5, 2, 96)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "contiguous", lambda *_: pytest.fail("x was copied"))
        weft.gated_norm(x, gate, groups=2, transpose=True)
        weft.gated_norm(x.unflatten(-1, (4, 24)), gate.unflatten(-1, (4, 24)), transpose=True)


def test_offsets_have_64_bits() -> None:
    x, gate, dy = (far_apart(4, 96) for _ in range(3))
    for groups, format in ((1, None), (2, None), (2, "mx")):
        call = Call(weft.gated_norm, {"x": x, "gate": gate, "groups": groups, "quantize": format})
        if format:
            call = call.with_(columnwise=True)
        near_by = call.with_(x=x.contiguous(), gate=gate.contiguous())
        assert_same(run(call, {"y": dy}), run(near_by, {"y": dy.contiguous()}), "far apart")


def test_rows_past_2_to_the_31_are_counted_in_64_bits() -> None:
    """The bound includes rows of programs past the end."""
    for rows, kind in ((2**20, "i32"), (2**31 - 1, "i64"), (2**31 + 5, "i64")):
        x = torch.empty(rows, 1, device="meta", dtype=BF16)
        with recording("sm_90") as variants:
            weft.gated_norm(x, x, quantize="tensor", columnwise=True)
            needs = GatedNormGradients(x=True, gate=True, weight=False)
            gated_norm_backward_op(
                GatedNormBackwardArgs(x, x, x, None, x[:, 0].float(), 1, "silu", 0.0, "fp32", False, needs)
            )
        kinds = {v.kernel: dict(v.signature)["bound"] for v in variants if "gated" in v.kernel}
        assert kinds == dict.fromkeys(kinds, kind)
        assert len(kinds) == 3


# ---- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["sigmoid", "silu"])
def test_gates_from_zero_to_extreme(act: str) -> None:
    """1 - sigmoid keeps its precision if the gate is wide open, and nothing overflows if it is shut."""
    sizes = torch.tensor([0.0, 1e-38, 1e-20, 1e-3, 1.0, 8.0, 17.0, 30.0, 60.0, 85.0, 100.0, 1e4, 1e30])
    gate = torch.cat([sizes, -sizes]).repeat(8, 8)
    call = Call(weft.gated_norm, {"x": draw(8, 208, dtype=torch.float32), "gate": gate, "act": act})
    for target in ("cpu", "sm_90"):
        got = check(call, target)
        assert all(t.isfinite().all() for t in got.values())
    with weft.backend("reference"):
        check(call)
    if act == "sigmoid":
        assert got["dgate"][:, gate[0] == 30.0].count_nonzero() == 8 * (gate[0] == 30.0).sum()


@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-20, 1e-3, 1e15])
def test_magnitudes(size: float) -> None:
    x = torch.cat([torch.randn(1, 1, 96) * size, torch.randn(1, 1, 96)], 1)
    check(call_of(1, 2, 96, torch.float32, groups=2).with_(x=x))


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
def test_a_special_value_stays_in_its_group(special: float) -> None:
    call = call_of(2, 5, 96, groups=3)
    x = call["x"].clone()
    x[1, 4, 40] = special
    got, wanted = call.with_(x=x)(), call()
    changed = torch.zeros(5, 2, 96, dtype=torch.bool)
    changed[4, 1, 32:64] = True
    assert torch.equal(got[~changed], wanted[~changed])
    assert got[4, 1, 40].isnan()
    quantized = call.with_(x=x, quantize="mx")().dequantize()
    assert torch.equal(quantized[~changed], call.with_(quantize="mx")().dequantize()[~changed])


# ---- quantized -----------------------------------------------------------------------------------------


def assert_oracle(call: Call, q: QTensor) -> None:
    """Compare the copies of q with the oracle's, for the fp32 values that the op computes itself."""
    dropped = ("rowwise", "return_amax")
    value = own_numbers(Call(call.function, {k: v for k, v in call.kwargs.items() if k not in dropped}))["y"]
    value = value.reshape(-1, value.shape[-1])
    f = q.format
    for copy, transpose in ((q.rowwise, False), (q.columnwise, True)):
        if copy is None:
            continue
        wanted = oracle.quantize(
            value, block=f.block, element=f.element, convention=f.convention, transpose=transpose,  # type: ignore[arg-type]
            power_of_two=bool(f.power_of_two), scale=call["quant_scale"],
        )  # fmt: skip
        assert torch.equal(copy.data.view(torch.uint8), wanted.data)
        assert torch.equal(words(copy.scale), words(wanted.scale.reshape(copy.scale.shape)))
        if wanted.global_scale is not None:
            assert torch.equal(copy.global_scale, wanted.global_scale)


def slowly(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


QUANTIZED = [
    # one pass: blocks within groups, or one group
    ("1x128", 512, 4, {}),
    ("mx", 192, 3, {"columnwise": True}),
    ("row", 96, 1, {}),
    slowly("row", 2050, 1, {}),
    ("e2m1:mx:te", 33, 1, {"columnwise": True}),
    ("tensor", 96, 4, {"quant_scale": True}),
    # two passes
    ("1x128", 200, 4, {"columnwise": True}),
    ("1x128", 96, 2, {"rowwise": False, "columnwise": True}),
    slowly("128x128", 256, 2, {}),
    ("nvfp4", 96, 2, {"columnwise": True}),
    slowly("nvfp4", 200, 4, {}),
    slowly("nvfp4", 128, 2, {}),
    slowly("tensor", 96, 4, {}),
    ("tensor", 96, 4, {"columnwise": True, "quant_scale": True}),
    ("row", 96, 4, {}),
]


@pytest.mark.parametrize(("format", "cols", "groups", "options"), QUANTIZED)
def test_quantized(format: str, cols: int, groups: int, options: dict[str, Any]) -> None:
    """Codes, scales and amax are right; the gradient passes straight through."""
    call = call_of(2, 67, cols, groups=groups, act="silu")
    plain = run(call)
    gradients = upstreams(results(call.requiring_grad()))
    if "quant_scale" in options:
        options = {**options, "quant_scale": torch.tensor([0.02])}
    call = call.with_(quantize=format, **options)
    outputs = call.with_(return_amax=True)()
    q, largest = outputs
    assert_oracle(call, q)
    assert largest == own_numbers(call)["y"].abs().max()
    assert (q.shape, q.dtype) == ((67, 2, cols), BF16)
    assert_same({"q": call()}, {"q": q}, "without amax")
    with weft.backend("reference"):
        wanted = call()
        for side in ("rowwise", "columnwise"):
            assert (getattr(q, side) is None) == (getattr(wanted, side) is None)
            if getattr(q, side) is not None:
                same = words(getattr(q, side).data) == words(getattr(wanted, side).data)
                assert same.float().mean() > 0.99
    got = run(call, gradients)
    assert_same(
        {n: got[n] for n in ("dx", "dgate", "dweight")},
        {n: plain[n] for n in ("dx", "dgate", "dweight")},
        format,
    )


@pytest.mark.parametrize(
    ("target", "format", "cols", "groups"),
    [
        ("sm_90", "1x128", 512, 4),
        ("sm_80", "mx", 200, 4),
        slowly("sm_90", "row", 200, 1),
        slowly("sm_90", "nvfp4", 128, 2),
        slowly("sm_90", "row", 20000, 1),
        slowly("gfx942", "128x128", 384, 3),
        slowly("sm_100", "tensor", 33, 3),
    ],
)
def test_quantized_as_launched_on(target: str, format: str, cols: int, groups: int) -> None:
    """Another order of addition moves a value by an ulp, and rarely its code by a step."""
    call = call_of(3, 43, cols, groups=groups, quantize=format, columnwise=format != "row")
    with choosing_for(target):
        got = call()
    wanted = call()
    for side in ("rowwise", "columnwise"):
        if getattr(wanted, side) is not None:
            for field in ("data", "scale"):
                here, there = (getattr(getattr(each, side), field) for each in (got, wanted))
                if here.dtype == torch.float32:  # unrounded scales move as much as the values
                    torch.testing.assert_close(here, there, rtol=2**-21, atol=0)
                else:
                    assert (words(here) == words(there)).float().mean() > 0.995


def test_rowwise_copy_is_the_same_with_a_columnwise_one() -> None:
    for format, groups in (("1x128", 2), ("nvfp4", 2)):
        call = call_of(2, 67, 256, groups=groups, quantize=format)
        both = call.with_(columnwise=True)()
        assert_same({"q": call().rowwise.data}, {"q": both.rowwise.data}, format)
        assert_same({"q": call().rowwise.scale}, {"q": both.rowwise.scale}, format)


# ---- launches ------------------------------------------------------------------------------------------


def test_launches() -> None:
    """Each direction is one launch, plus the weight's sum; formats whose scales need a first pass take more."""
    x, gate, weight = (
        torch.empty(s, dtype=BF16, device="meta") for s in ((2, 4096, 2048), (4096, 2, 2048), (2048,))
    )
    norm, stripe = "gated_norm_kernel", "gated_norm_stripe_kernel"
    expected: list[tuple[dict[str, Any], list[str]]] = [
        ({}, [norm]),
        ({"quantize": "1x128"}, [norm]),
        ({"quantize": "mx"}, [norm]),
        ({"quantize": "1x128", "columnwise": True}, [norm, stripe]),
        ({"quantize": "nvfp4"}, [norm, "_tensor_scale_kernel", norm]),
        ({"quantize": "row", "groups": 1}, [norm]),
        ({"quantize": "row"}, [norm, "quantize_rows_kernel"]),
    ]
    for options, kernels in expected:
        with recording("sm_90") as variants:
            weft.gated_norm(x, gate, weight, **{"groups": 4, "transpose": True, **options})
        assert [v.kernel for v in variants] == kernels, options
    rstd = torch.empty(4096 * 2 * 4, device="meta")
    for need_weight, kernels in (
        (True, ["gated_norm_backward_kernel", "_sum_kernel"]),
        (False, ["gated_norm_backward_kernel"]),
    ):
        with recording("sm_90") as variants:
            needs = GatedNormGradients(True, True, need_weight)
            gated_norm_backward_op(
                GatedNormBackwardArgs(x, gate, gate, weight, rstd, 4, "sigmoid", 0.0, "fp32", True, needs)
            )
        assert [v.kernel for v in variants] == kernels


def test_a_new_number_of_rows_compiles_nothing() -> None:
    make = lambda length: call_of(2, length, 96, groups=2)  # noqa: E731
    run(make(64))
    before = compiled_variants()
    for length in (1, 2, 3, 16, 17, 63, 100, 129):
        run(make(length))
    assert compiled_variants() == before


# ---- autograd ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names", [("x",), ("gate",), ("weight",), ("x", "weight"), ("gate", "weight"), ("x", "gate")]
)
@pytest.mark.parametrize("cols", [96, pytest.param(10002, marks=pytest.mark.slow)])
def test_gradients_of_a_subset(cols: int, names: tuple[str, ...]) -> None:
    """Any subset of the gradients has the same bits as all of them together."""
    call = call_of(2, 5, cols, groups=2)
    full = run(call)
    leaves = {name: call[name].clone().requires_grad_() for name in names}
    outputs = results(call.with_(**leaves))
    got = backward(call.with_(**leaves), outputs, upstreams(outputs))
    assert set(got) == {f"d{name}" for name in names}
    assert_same(got, {name: full[name] for name in got}, ", ".join(names))


def test_gradients_of_zero_and_of_a_sum() -> None:
    call = call_of(2, 5, 96, groups=2).requiring_grad()
    outputs = results(call)
    zero = backward(call, outputs, {"y": torch.zeros_like(outputs["y"])}, retain_graph=True)
    assert not any(gradient.count_nonzero() for gradient in zero.values())
    outputs["y"].sum().backward()  # an expanded gradient
    wanted = backward(call, results(call), {"y": torch.ones_like(outputs["y"])})
    assert_same({f"d{n}": t.grad for n, t in call.tensors().items()}, wanted, "sum")


def test_gradcheck_of_the_reference() -> None:
    inputs = [
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 12), (3, 2, 12), (12,))
    ]
    for name in ("sigmoid", "silu"):
        assert torch.autograd.gradcheck(
            lambda *t, act=name: weft.gated_norm(*t, groups=3, act=act, transpose=True, weight_offset=1.0),
            inputs,
        )


def test_second_derivatives_raise() -> None:
    x = torch.randn(3, 64, requires_grad=True)
    y = weft.gated_norm(x, torch.randn(3, 64)).square().sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        first.sum().backward()


# ---- PyTorch's own machinery ---------------------------------------------------------------------------


def block(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return weft.gated_norm(x.unflatten(-1, (4, 24)), gate, weight, groups=4, transpose=True) * 2


def quantized_block(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    q = weft.gated_norm(x, gate, weight, groups=2, act="silu", transpose=True, quantize="mx", columnwise=True)
    return q.dequantize()


@pytest.mark.parametrize("function", [pytest.param(block, marks=pytest.mark.slow), quantized_block])
def test_compiled_is_eager(function: Callable[..., Tensor]) -> None:
    """Fullgraph with dynamic lengths: forward and backward match eager bit for bit."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (5, 8, 70):
        call = call_of(2, length, 96)
        outcomes = []
        for f in (function, compiled):
            leaves = [call[name].clone().requires_grad_() for name in ("x", "gate", "weight")]
            y = f(*leaves)
            torch.manual_seed(5)
            outcomes.append([y, *torch.autograd.grad(y, leaves, torch.randn_like(y))])
        assert_same(dict(enumerate(outcomes[1])), dict(enumerate(outcomes[0])), "compiled")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("op", "options"),
    [
        ("gated_norm", {}),
        ("gated_norm", {"quantize": "int8:1x128:te:pow2", "columnwise": True}),
        ("gated_norm_backward", {}),
    ],
)
def test_opcheck(op: str, options: dict[str, Any]) -> None:
    opcheck(op, arguments_of(call_of(2, 5, 96, groups=2, **options), op)[0])


# ---- invalid arguments ---------------------------------------------------------------------------------


def test_invalid_arguments_raise() -> None:
    x, gate, weight = draw(2, 5, 96), draw(5, 2, 96), draw(96)
    wrong: list[tuple[str, dict[str, Any]]] = [
        (r"gate must have the shape \(2, 5, 96\)", {"gate": gate, "transpose": False}),
        (r"gate must have the shape \(5, 2, 96\)", {"gate": draw(2, 5, 96)}),
        ("gate must be bfloat16, .*; got torch.int32", {"gate": gate.int()}),
        ("divide the last dimension, 96; got 5", {"groups": 5}),
        ("divide the last dimension, 96; got 0", {"groups": 0}),
        (r"weight must have the shape \(96,\)", {"weight": draw(24)}),
        ("weight must be bfloat16, .*; got torch.int32", {"weight": weight.int()}),
        ("weight must be on cpu", {"weight": weight.to("meta")}),
        ("act must be 'sigmoid' or 'silu'; got 'gelu'", {"act": "gelu"}),
        ("go with quantize", {"columnwise": True}),
        ("go with quantize", {"return_amax": True}),
        ("out_dtype is for a plain result", {"quantize": "mx", "out_dtype": torch.float32}),
        ("one scale per whole column", {"quantize": "row", "columnwise": True}),
        ("at least one copy", {"quantize": "mx", "rowwise": False}),
        ("quant_scale is a single scale", {"quantize": "mx", "quant_scale": torch.ones(1)}),
    ]
    for message, options in wrong:
        with pytest.raises(ValueError, match=message):
            weft.gated_norm(**{"x": x, "gate": gate, "weight": weight, "transpose": True, **options})
    with pytest.raises(ValueError, match=r"for an x of shape \[B, L, ..., K\]; got \(5, 96\)"):
        weft.gated_norm(x[0], gate[:, 0], transpose=True)
    with pytest.raises(ValueError, match="x must be bfloat16"):
        weft.gated_norm(x.int(), x)
    with pytest.raises(ValueError, match="at least one dimension"):
        weft.gated_norm(x[0, 0, 0], x)


def test_formats_by_name_and_by_object() -> None:
    call = call_of(2, 5, 256, groups=2, quantize="1x128")
    assert_same({"q": call()}, {"q": call.with_(quantize=Format.of("1x128"))()}, "format")

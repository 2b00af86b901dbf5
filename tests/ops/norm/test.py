"""Options of the norms, as PyTorch or a model defines them, and regression tests for bugs of other libraries."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_loom.testing import assert_not_worse

import weft
from tests.support.covering import covering
from weft import Format, QTensor

NORMS = (weft.rms_norm, weft.layer_norm)
BF16 = torch.bfloat16


def draw(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape).to(dtype)


def assert_same_copies(got: QTensor, wanted: QTensor) -> None:
    """Compare the bytes of each copy that `wanted` has."""
    for side in ("rowwise", "columnwise"):
        if (copy := getattr(wanted, side)) is not None:
            assert getattr(got, side).format == copy.format
            for a, b in zip(getattr(got, side)[:3], copy[:3], strict=True):
                assert a is b or torch.equal(*(t.flatten().view(torch.uint8) for t in (a, b))), side


# ---- equal to PyTorch and to the definitions of models -------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_rms_norm_matches_pytorch(dtype: torch.dtype) -> None:
    """Also without a weight, and with eps inside the root, like PyTorch."""
    x, weight = draw(6, 96, dtype=dtype), draw(96, dtype=dtype)
    for w in (None, weight):
        truth = F.rms_norm(x.double(), (96,), None if w is None else w.double(), 1e-3)
        assert_not_worse(weft.rms_norm(x, w, eps=1e-3), truth, F.rms_norm(x, (96,), w, 1e-3))


@pytest.mark.compat
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_layer_norm_matches_pytorch(dtype: torch.dtype) -> None:
    x, weight, bias = draw(6, 96, dtype=dtype), draw(96, dtype=dtype), draw(96, dtype=dtype)
    for w, b in ((None, None), (weight, bias)):
        doubled = [None if t is None else t.double() for t in (w, b)]
        truth = F.layer_norm(x.double(), (96,), *doubled)
        assert_not_worse(weft.layer_norm(x, w, b), truth, F.layer_norm(x, (96,), w, b))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_llama_casting_matches_hugging_face(dtype: torch.dtype) -> None:
    """LlamaRMSNorm normalizes in fp32, rounds to the dtype, then multiplies by the weight in that dtype."""
    x, weight = draw(64, 200, dtype=dtype), draw(200, dtype=dtype)
    h = x.float()
    z = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
    hugging_face = weight * z
    llama = weft.rms_norm(x, weight, casting="llama")
    once = weft.rms_norm(x, weight)
    # The kernel's 1 / sqrt(…) is correctly rounded, rsqrt is not: rarely, z rounds to the other side.
    assert (llama != hugging_face).float().mean() < 1e-3
    assert (once != hugging_face).float().mean() > 0.1, "the data must distinguish the two castings"
    exact = z.float() * weight.float()
    assert torch.equal(llama[llama == hugging_face], exact.to(dtype)[llama == hugging_face])


def test_weight_offset_matches_gemma() -> None:
    """GemmaRMSNorm computes (1 + weight) in fp32 and rounds once."""
    x, weight = draw(64, 200), draw(200) * 0.1
    h = x.float()
    gemma = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + weight.float())).to(BF16)
    got = weft.rms_norm(x, weight, weight_offset=1)
    assert (got != gemma).float().mean() < 1e-3
    # Adding 1 in bf16 first would lose most of the weight.
    assert (weft.rms_norm(x, weight + 1) != gemma).float().mean() > 0.05


@pytest.mark.parametrize("function", NORMS)
def test_residual_is_added_before_the_norm(function: Any) -> None:
    """Fused and unfused results are equal bit for bit."""
    x, residual, weight = draw(6, 96), draw(6, 96), draw(96)
    y, h = function(x, weight, residual=residual)
    assert torch.equal(h, x + residual)
    assert torch.equal(y, function(x + residual, weight))


def test_promoted_dtype_matches_hugging_face() -> None:
    """LlamaRMSNorm with fp32 weights multiplies a bf16 z to an fp32 product."""
    x, weight, bias = draw(64, 200), draw(200, dtype=torch.float32), draw(200, dtype=torch.float32)
    h = x.float()
    z = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(BF16)
    got = weft.rms_norm(x, weight, casting="llama", out_dtype="promote")
    assert got.dtype == torch.float32
    assert (got != weight * z).float().mean() < 1e-3  # where 1 / sqrt(…) and rsqrt round differently
    x, h, weight, bias = (t.to("meta") for t in (x, h, weight, bias))
    assert weft.rms_norm(x, weight.to(BF16), out_dtype="promote").dtype == BF16
    assert weft.rms_norm(x.half(), weight.to(BF16), out_dtype="promote").dtype == torch.float32
    assert weft.layer_norm(x, weight.to(BF16), bias, out_dtype="promote").dtype == torch.float32
    assert weft.layer_norm(x, modulation=(None, bias), out_dtype="promote").dtype == torch.float32
    assert weft.rms_norm(x, residual=h, out_dtype="promote")[0].dtype == torch.float32
    with pytest.raises(ValueError, match="a plain result"):
        weft.rms_norm(x, quantize="1x128", out_dtype="promote")


@pytest.mark.parametrize(
    ("x_dtype", "residual_dtype", "casting"),
    [
        (BF16, torch.float32, "llama"),
        (torch.float32, BF16, "fp32"),
        pytest.param(BF16, torch.float16, "llama", marks=pytest.mark.slow),
    ],
)
def test_residual_of_another_dtype(x_dtype: torch.dtype, residual_dtype: torch.dtype, casting: Any) -> None:
    """The sum, its norm and all gradients match PyTorch's own sum, each gradient in the dtype of its tensor."""
    x, residual = draw(6, 1030, dtype=x_dtype), draw(6, 1030, dtype=residual_dtype)
    weight = draw(1030)
    outcomes = []
    for fused in (True, False):
        leaves = [t.clone().requires_grad_() for t in (x, residual, weight)]
        if fused:
            y, h = weft.rms_norm(
                leaves[0], leaves[2], residual=leaves[1], casting=casting, out_dtype="promote"
            )
        else:
            h = leaves[0] + leaves[1]
            y = weft.rms_norm(h, leaves[2], casting=casting, out_dtype="promote")
        torch.manual_seed(5)
        gradients = torch.autograd.grad((y, h), leaves, [torch.randn(t.shape).to(t.dtype) for t in (y, h)])
        outcomes.append((y, h, *gradients))
    for got, wanted in zip(*outcomes, strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=1e-5 if got.dtype == torch.float32 else 2**-7, atol=1e-5)
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1], outcomes[1][1])


def vllm_fused_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Round in the order of vLLM's fused_add_rms_norm."""
    total = x.float() + residual.float()
    z = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    return z.to(x.dtype) * weight, total.to(x.dtype)


@pytest.mark.parametrize("cols", [200, 1100])
def test_unrounded_sum_matches_vllm(cols: int) -> None:
    """Rows of one tile and of several, also written over their own inputs, as in serving."""
    x, residual, weight = draw(64, cols), draw(64, cols), draw(cols)
    wanted, total = vllm_fused_add(x, residual, weight)
    options: dict[str, Any] = {"casting": "llama", "unrounded_sum": True}
    y, h = weft.rms_norm(x, weight, residual=residual, **options)
    assert torch.equal(h, total)
    assert (y != wanted).float().mean() < 1e-3
    rounded, _ = weft.rms_norm(x, weight, residual=residual, casting="llama")
    assert (rounded != wanted).float().mean() > 0.1, "the data must distinguish the two sums"
    over, total = x.clone(), residual.clone()
    weft.rms_norm(over, weight, residual=total, out=over, residual_out=total, **options)
    assert torch.equal(over, y)
    assert torch.equal(total, h)


@pytest.mark.parametrize(
    ("format", "over"),
    [
        ("128x128", None),
        ("nvfp4", None),
        ("nvfp4", "residual"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("1x128", "x"), ("row", "x"), ("row", "residual"))
        ),
    ],
)
def test_quantized_unrounded_sum(format: str, over: str | None) -> None:
    """Codes are those of the norm of the fp32 sum, with any number of passes, even if h overwrites one of its terms."""
    x, residual, weight = draw(130, 96), draw(130, 96), draw(96)
    options: dict[str, Any] = {"quantize": format, "columnwise": format == "1x128"}
    wanted, total = weft.rms_norm(x.float() + residual.float(), weight, **options), x + residual
    into = {None: None, "x": x, "residual": residual}[over]
    got, h = weft.rms_norm(x, weight, residual=residual, unrounded_sum=True, residual_out=into, **options)
    assert torch.equal(h, total)
    assert_same_copies(got, wanted)


@pytest.mark.parametrize("function", NORMS)
def test_scale_invariance(function: Any) -> None:
    """Scaling x by a power of two does not change a bit."""
    x = draw(6, 96, dtype=torch.float32)
    assert torch.equal(function(x, eps=0.0), function(x * 64, eps=0.0))


# ---- modulation ----------------------------------------------------------------------------------------


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Compute the modulated norm in float64 from PyTorch's own norm."""
    y = F.layer_norm(x.double(), x.shape[-1:])
    return y * (1 + scale.double()) + shift.double()


@pytest.mark.parametrize("lead", [(2, 5), (2,), (2, 1), (1,), (1, 1), ()])
def test_modulation_per_row_and_per_sample(lead: tuple[int, ...]) -> None:
    x = draw(2, 5, 96)
    scale, shift = draw(*lead, 96), draw(*lead, 96)
    middle = [*lead, *[1] * (2 - len(lead))]
    truth = modulated(x, scale.view(*middle, 96), shift.view(*middle, 96))
    eager = F.layer_norm(x, (96,)) * (1 + scale.view(*middle, 96)) + shift.view(*middle, 96)
    got = weft.layer_norm(x, modulation=(scale, shift))
    assert_not_worse(got, truth, eager)
    assert torch.equal(weft.layer_norm(x, modulation=torch.cat([scale, shift], -1)), got)


def test_scale_alone_and_shift_alone() -> None:
    x = draw(2, 5, 96).requires_grad_()
    scale, shift = draw(2, 96).requires_grad_(), draw(2, 96).requires_grad_()
    zero = torch.zeros_like(scale)
    gradient = draw(2, 5, 96)
    for pair, full in (((scale, None), (scale, zero)), ((None, shift), (zero, shift))):
        tensor = next(t for t in pair if t is not None)
        got, wanted = weft.layer_norm(x, modulation=pair), weft.layer_norm(x, modulation=full)
        assert torch.equal(got, wanted)
        gradients = (torch.autograd.grad(y, (x, tensor), gradient) for y in (got, wanted))
        for a, b in zip(*gradients, strict=True):
            assert torch.equal(a, b)
    assert torch.equal(weft.layer_norm(x, modulation=(None, None)), weft.layer_norm(x))


def test_modulation_gate_is_returned() -> None:
    """The gate has a gradient, which is packed with those of scale and shift."""
    x = draw(2, 5, 96)
    packed = draw(2, 3 * 96).requires_grad_()
    y, gate = weft.layer_norm(x, modulation=packed)
    assert torch.equal(gate, packed[:, 192:])
    (gradient,) = torch.autograd.grad((y.float().sum() + 3 * gate.float().sum()), packed)
    assert (gradient[:, 192:] == 3).all()
    assert gradient[:, :192].count_nonzero()
    y, h, gate, amax = weft.layer_norm(
        x, residual=x, modulation=packed.detach(), quantize="1x128", return_amax=True
    )
    assert isinstance(y, QTensor)
    assert torch.equal(h, x + x)
    assert torch.equal(gate, packed[:, 192:])
    assert amax > 0


def test_wrong_shapes_of_modulation_raise() -> None:
    x = draw(2, 5, 96)
    for wrong in (draw(2, 96), draw(2, 4 * 96), draw(2, 100)):
        with pytest.raises(ValueError, match=r"packed modulation ends in 192 .* or 288"):
            weft.layer_norm(x, modulation=wrong)
    for lead in ((3,), (5,), (2, 4), (2, 5, 3)):
        with pytest.raises(ValueError, match=r"modulation's scale must be .*96"):
            weft.layer_norm(x, modulation=(draw(*lead, 96), draw(*lead, 96)))
    with pytest.raises(ValueError, match="one shape"):
        weft.layer_norm(x, modulation=(draw(2, 96), draw(2, 5, 96)))


# ---- terms added before the norm -----------------------------------------------------------------------


def added(x: Tensor, pre_bias: Tensor, residual: Tensor, gate: Tensor) -> Tensor:
    """Compute h by PyTorch in fp32, rounded once."""
    return (residual.float() + (x.float() + pre_bias.float()) * gate.float()).to(x.dtype)


@pytest.mark.parametrize("lead", [(2, 5), (2,), (2, 1), (1,), ()])
@pytest.mark.parametrize("function", NORMS)
def test_residual_gate_per_row_and_per_sample(function: Any, lead: tuple[int, ...]) -> None:
    """Fused and unfused results are equal bit for bit."""
    x, residual, weight, gate = draw(2, 5, 96), draw(2, 5, 96), draw(96), draw(*lead, 96)
    pre_bias = draw(96, dtype=torch.float32)
    wanted = added(x, pre_bias, residual, gate.view(*lead, *[1] * (2 - len(lead)), 96))
    y, h = function(x, weight, residual=residual, pre_bias=pre_bias, residual_gate=gate)
    assert torch.equal(h, wanted)
    assert torch.equal(y, function(wanted, weight))


@pytest.mark.parametrize("function", NORMS)
def test_pre_bias_without_a_residual(function: Any) -> None:
    x, pre_bias, weight, gradient = draw(6, 96), draw(96), draw(96), draw(6, 96)
    y = function(x, weight, pre_bias=pre_bias)
    assert torch.equal(y, function(x + pre_bias, weight))
    h, bias, w = ((x + pre_bias).requires_grad_(), pre_bias.requires_grad_(), weight.requires_grad_())
    wanted = torch.autograd.grad(function(h, w), (h, w), gradient)
    got = torch.autograd.grad(function(x.requires_grad_(), w, pre_bias=bias), (x, w, bias), gradient)
    for a, b in zip(got, wanted, strict=False):
        assert torch.equal(a, b)
    assert_not_worse(got[2], wanted[0].double().sum(0), wanted[0].sum(0))


@pytest.mark.parametrize(
    ("format", "columnwise"),
    [*covering(("1x128", "128x128", "nvfp4", "tensor"), (False, True), together=1), ("row", False)],
    ids=lambda value: {False: "rows", True: "both"}.get(value, value),
)
def test_quantized_norm_of_all_terms(format: str, columnwise: bool) -> None:
    """Copies are those of a norm of h, with any number of passes, with and without a residual."""
    x, residual, pre_bias, gate = draw(2, 65, 96), draw(2, 65, 96), draw(96), draw(2, 96)
    options: dict[str, Any] = {"quantize": format, "columnwise": columnwise}
    h = added(x, pre_bias, residual, gate[:, None])
    for requires_grad in (False, True):
        x.requires_grad_(requires_grad)
        q, r = weft.layer_norm(x, residual=residual, pre_bias=pre_bias, residual_gate=gate, **options)
        assert torch.equal(r, h)
        assert_same_copies(q, weft.layer_norm(h, **options))
        q = weft.layer_norm(x, pre_bias=pre_bias, **options)
        assert_same_copies(q, weft.layer_norm(x.detach() + pre_bias, **options))
        q, y = weft.layer_norm(x, pre_bias=pre_bias, return_plain=True, **options)
        assert torch.equal(y, weft.layer_norm(x.detach() + pre_bias))


def test_modulation_gate_serves_as_residual_gate() -> None:
    """The gate is a view into the packed modulation, as in a block of a diffusion transformer."""
    x, residual, packed = draw(2, 5, 96), draw(2, 5, 96), draw(2, 3 * 96).requires_grad_()
    y, gate = weft.layer_norm(x, modulation=packed)
    _, h = weft.layer_norm(y, residual=residual, residual_gate=gate)
    assert torch.equal(h, added(y, torch.zeros(96), residual, gate[:, None]))
    (gradient,) = torch.autograd.grad(h, packed, draw(2, 5, 96), retain_graph=True)
    assert gradient[:, :192].count_nonzero()
    assert gradient[:, 192:].count_nonzero()


@pytest.mark.parametrize("wanted", [False, True])
def test_x_is_saved_only_for_the_gradient_of_the_gate(wanted: bool) -> None:
    x, residual, gate = draw(6, 96).requires_grad_(), draw(6, 96), draw(96).requires_grad_(wanted)
    y, h = weft.rms_norm(x, residual=residual, residual_gate=gate)
    saved = {t.data_ptr() for t in y.grad_fn.saved_tensors if t is not None}
    assert h.data_ptr() in saved
    assert (x.data_ptr() in saved) == wanted


def test_wrong_residual_gates_raise() -> None:
    x = draw(2, 5, 96)
    with pytest.raises(ValueError, match="residual_gate= needs residual="):
        weft.rms_norm(x, residual_gate=draw(96))
    for shape in ((3, 96), (5, 96), (2, 4, 96), (95,)):
        with pytest.raises(ValueError, match=r"residual_gate must be .*96"):
            weft.rms_norm(x, residual=x, residual_gate=draw(*shape))
    with pytest.raises(ValueError, match="residual_out= needs residual="):
        weft.rms_norm(x, pre_bias=draw(96), residual_out=x)


# ---- out= ----------------------------------------------------------------------------------------------


def test_out_and_residual_out() -> None:
    x, residual, weight = draw(6, 96), draw(6, 96), draw(96)
    wanted, h = weft.rms_norm(x, weight, residual=residual)
    out, residual_out = torch.empty_like(x), torch.empty_like(x)
    y, r = weft.rms_norm(x, weight, residual=residual, out=out, residual_out=residual_out)
    assert y.data_ptr() == out.data_ptr()
    assert r.data_ptr() == residual_out.data_ptr()
    assert torch.equal(out, wanted)
    assert torch.equal(residual_out, h)
    with weft.backend("reference"):
        out.zero_()
        assert weft.rms_norm(x, weight, residual=residual, out=out)[0].data_ptr() == out.data_ptr()
    assert out.count_nonzero()


@pytest.mark.parametrize("cols", [96, 4096])
def test_in_place(cols: int) -> None:
    """y may overwrite x, and the new residual the old one, as in serving. Long rows are read more than once."""
    x, residual, weight = draw(6, cols), draw(6, cols), draw(cols)
    for options in ({}, {"pre_bias": draw(cols), "residual_gate": draw(cols)}):
        wanted, h = weft.rms_norm(x, weight, residual=residual, **options)
        y, r = x.clone(), residual.clone()
        weft.rms_norm(y, weight, residual=r, out=y, residual_out=r, **options)
        assert torch.equal(y, wanted)
        assert torch.equal(r, h)
    wanted, y = weft.rms_norm(x, pre_bias=weight), x.clone()
    weft.rms_norm(y, pre_bias=weight, out=y)
    assert torch.equal(y, wanted)


@pytest.mark.parametrize(("format", "columnwise"), [("1x128", True), ("128x128", False), ("nvfp4", False)])
def test_residual_in_place_with_several_passes(format: str, columnwise: bool) -> None:
    """Passes after the one that overwrites the residual do not read it."""
    x, residual = draw(130, 96), draw(130, 96)
    wanted, h = weft.rms_norm(x, residual=residual, quantize=format, columnwise=columnwise)
    r = residual.clone()
    got, _ = weft.rms_norm(x, residual=r, residual_out=r, quantize=format, columnwise=columnwise)
    assert torch.equal(r, h)
    assert_same_copies(got, wanted)


@pytest.mark.compat
@pytest.mark.parametrize(("format", "columnwise"), [("1x128", False), ("1x128", True), ("nvfp4", False)])
def test_out_is_a_qtensor(format: str, columnwise: bool) -> None:
    x, residual = draw(130, 96), draw(130, 96)
    wanted, _ = weft.rms_norm(x, residual=residual, quantize=format, columnwise=columnwise)
    out = weft.quantize(torch.zeros_like(x), format, columnwise=columnwise)
    got, _ = weft.rms_norm(x, residual=residual, quantize=format, columnwise=columnwise, out=out)
    for side in ("rowwise", "columnwise"):
        if getattr(wanted, side) is None:
            continue
        assert getattr(got, side).data.data_ptr() == getattr(out, side).data.data_ptr()
        assert getattr(out, side).format == getattr(wanted, side).format
        for a, b in zip(getattr(out, side)[:3], getattr(wanted, side)[:3], strict=True):
            assert a is b or torch.equal(a.float(), b.float())


def test_wrong_outputs_raise() -> None:
    x = draw(6, 96)
    for wrong in (
        torch.empty(6, 95, dtype=BF16),
        torch.empty(6, 96),
        torch.empty(96, 6, dtype=BF16).t(),
        x.to("meta"),
    ):
        what = r"must (be bfloat16 like|be contiguous|have the shape \(6, 96\)|be on cpu)"
        with pytest.raises(ValueError, match=f"^out {what}"):
            weft.rms_norm(x, out=wrong)
        with pytest.raises(ValueError, match=f"^residual_out {what}"):
            weft.rms_norm(x, residual=x, residual_out=wrong)
    with pytest.raises(ValueError, match="residual_out= needs residual="):
        weft.rms_norm(x, residual_out=x)
    with pytest.raises(ValueError, match="no_grad"):
        weft.rms_norm(x.clone().requires_grad_(), out=x)
    with pytest.raises(ValueError, match="the result is"):
        weft.rms_norm(x, quantize="mx", out=weft.quantize(x, "1x128"))
    lacking = weft.quantize(x, "mx", rowwise=False, columnwise=True)
    for columnwise in (False, True):
        with pytest.raises(ValueError, match=r"the result is .* with rowwise"):
            weft.rms_norm(x, quantize="mx", columnwise=columnwise, out=lacking)


def test_out_under_torch_compile() -> None:
    x, out = draw(6, 96), draw(6, 96)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def f(x: Tensor, out: Tensor) -> Tensor:
        weft.rms_norm(x, out=out)
        return out * 1

    assert torch.equal(f(x, out), weft.rms_norm(x))
    assert torch.equal(out, weft.rms_norm(x))


# ---- invalid arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"weight": torch.ones(95)}, r"weight must have the shape \(96,\)"),
        ({"weight": torch.ones(1, 96)}, r"weight must have the shape \(96,\)"),
        ({"bias": torch.ones(97)}, r"bias must have the shape \(96,\)"),
        ({"pre_bias": torch.ones(6, 96)}, r"pre_bias must have the shape \(96,\)"),
        ({"residual": torch.ones(6, 95).bfloat16()}, r"residual must have the shape \(6, 96\)"),
        ({"residual": torch.ones(6, 96).double()}, "residual must be bfloat16, float16 or float32"),
        ({"casting": "gemma"}, "casting must be 'fp32' or 'llama'"),
        ({"columnwise": True}, "go with quantize"),
        ({"return_amax": True}, "go with quantize"),
        ({"return_plain": True}, "go with quantize"),
        ({"quantize": "1x64"}, "unknown format '1x64'"),
        ({"quantize": "1x128", "rowwise": False}, "at least one copy"),
        ({"quantize": "row", "columnwise": True}, "1x128"),
        ({"quantize": "1x128", "quant_scale": torch.ones(1)}, "for block 'tensor'"),
        ({"quantize": "1x128", "out_dtype": torch.float32}, "out_dtype is for a plain result"),
    ],
)
def test_invalid_options_raise(kwargs: dict[str, Any], message: str) -> None:
    for function in NORMS:
        with pytest.raises(ValueError, match=message):
            function(draw(6, 96), **kwargs)


def test_invalid_inputs_raise() -> None:
    with pytest.raises(ValueError, match="at least one dimension"):
        weft.rms_norm(torch.tensor(1.0))
    with pytest.raises(ValueError, match="must be bfloat16, float16, float32 or float64"):
        weft.rms_norm(torch.ones(4, 4, dtype=torch.int32))


# ---- quantized results ---------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["1x128", "tensor", "e4m3:tensor:vllm"])
def test_amax_is_the_largest_y(format: str) -> None:
    x = draw(130, 96)
    y = weft.rms_norm(x, out_dtype=torch.float32)
    q, amax = weft.rms_norm(x, quantize=format, return_amax=True)
    assert amax.shape == ()
    assert amax == y.abs().max()
    if Format.of(format).block == "tensor":
        again = weft.rms_norm(x, quantize=format, quant_scale=q.rowwise.scale)
        assert torch.equal(again.rowwise.data.view(torch.uint8), q.rowwise.data.view(torch.uint8))
        # Delayed scaling: the amax of this step and the scale of an earlier step, in one pass.
        q, amax = weft.rms_norm(x, quantize=format, quant_scale=torch.tensor(0.01), return_amax=True)
        assert amax == y.abs().max()
        assert q.rowwise.scale == torch.tensor(0.01)


@pytest.mark.parametrize(
    ("format", "columnwise"),
    [
        *covering(("e4m3:1x128:te", "mx", "128x128", "nvfp4", "tensor"), (False, True), together=1),
        ("row", False),
    ],
    ids=lambda value: {False: "rows", True: "both"}.get(value, value),
)
def test_plain_result_besides_the_quantized_one(format: str, columnwise: bool) -> None:
    """Codes are those without `return_plain`, with any number of passes, and y is that of the plain call."""
    x, residual, weight = draw(130, 96), draw(130, 96), draw(96)
    options: dict[str, Any] = {"quantize": format, "columnwise": columnwise}
    wanted, h = weft.layer_norm(x, weight, residual=residual)
    q, y, r, amax = weft.layer_norm(
        x, weight, residual=residual, return_plain=True, return_amax=True, **options
    )
    assert torch.equal(y, wanted)
    assert torch.equal(r, h)
    assert amax.to(BF16) == y.abs().max()
    assert_same_copies(q, weft.layer_norm(x, weight, residual=residual, **options)[0])
    q, y = weft.rms_norm(x, return_plain=True, out_dtype=torch.float32, **options)
    assert torch.equal(y, weft.rms_norm(x, out_dtype=torch.float32))
    assert q.dtype == y.dtype
    if columnwise:
        _, y = weft.rms_norm(x, return_plain=True, rowwise=False, **options)
        assert torch.equal(y, weft.rms_norm(x))


def test_gradients_of_plain_and_quantized_results_add_up() -> None:
    x, weight, one, two = draw(6, 96), draw(96), draw(6, 96), draw(6, 96)
    leaves = x.requires_grad_(), weight.requires_grad_()
    plain = weft.rms_norm(x, weight)
    q, y = weft.rms_norm(x, weight, quantize="1x128", return_plain=True)
    for gradients in ({"y": one}, {"q": two}, {"y": one, "q": two}):
        outputs = [{"y": y, "q": q.dequantize()}[name] for name in gradients]
        got = torch.autograd.grad(outputs, leaves, list(gradients.values()), retain_graph=True)
        wanted = torch.autograd.grad(plain, leaves, sum(gradients.values()), retain_graph=True)  # type: ignore[arg-type]
        for a, b in zip(got, wanted, strict=True):
            assert torch.equal(a, b)


def test_amax_of_no_rows() -> None:
    x = draw(0, 96)
    _, _, amax = weft.rms_norm(x, residual=x, quantize="1x128", return_amax=True)
    assert amax == 0


@pytest.mark.parametrize(("format", "norm"), [("1x128", weft.rms_norm), ("mx", weft.layer_norm)])
def test_columnwise_copy_does_not_depend_on_the_rowwise_one(format: str, norm: Any) -> None:
    x, residual = draw(130, 96), draw(130, 96)
    both, _ = norm(x, residual=residual, quantize=format, columnwise=True)
    alone, h = norm(x, residual=residual, quantize=format, rowwise=False, columnwise=True)
    assert torch.equal(h, x + residual)
    assert alone.rowwise is None
    assert_same_copies(both, alone)


@pytest.mark.parametrize(
    ("of", "residual", "dtype"),
    covering(
        (
            ("e4m3:1x128:te", weft.rms_norm),
            ("e4m3:1x128:te", weft.layer_norm),
            ("mx", weft.rms_norm),
            ("mx", weft.layer_norm),
            ("128x128", weft.layer_norm),
            ("nvfp4", weft.rms_norm),
            ("tensor", weft.layer_norm),
        ),
        (False, True),
        (BF16, torch.float32),
        together=1,
    ),
    ids=lambda value: f"{value[0]}-{value[1].__name__}" if isinstance(value, tuple) else str(value),
)
def test_rowwise_copy_does_not_depend_on_the_columnwise_one(
    of: tuple[str, Any], residual: bool, dtype: torch.dtype
) -> None:
    """Copies are equal bit for bit, on data whose sums depend on the order of addition."""
    format, norm = of
    x, weight = draw(130, 1100, dtype=dtype), draw(1100, dtype=dtype)
    options: dict[str, Any] = {"residual": draw(130, 1100, dtype=dtype)} if residual else {}
    alone = norm(x, weight, quantize=format, **options)
    both = norm(x, weight, quantize=format, columnwise=True, **options)
    alone, both = (q[0] if residual else q for q in (alone, both))
    assert both.columnwise is not None
    assert_same_copies(both, alone)


def test_out_dtype() -> None:
    x = draw(6, 96)
    y = weft.rms_norm(x, out_dtype=torch.float32)
    assert y.dtype == torch.float32
    assert torch.equal(y.to(BF16), weft.rms_norm(x))


# ---- regression tests for bugs of other libraries ------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("function", NORMS)
def test_fewer_rows_than_programs(function: Any) -> None:
    """Every row enters the weight's gradient once, for 1 to 17 rows on 16 multiprocessors."""
    for rows in range(1, 18):
        x = draw(rows, 96).requires_grad_()
        weight = draw(96).requires_grad_()
        gradient = draw(rows, 96)
        dx, dweight = torch.autograd.grad(function(x, weight), (x, weight), gradient)
        doubled = [t.detach().double().requires_grad_() for t in (x, weight)]
        eager = [t.detach().requires_grad_() for t in (x, weight)]
        torch_norm = F.rms_norm if function is weft.rms_norm else F.layer_norm
        eps = 1e-6 if function is weft.rms_norm else 1e-5
        outcomes = [
            torch.autograd.grad(torch_norm(a, (96,), w, eps=eps), (a, w), gradient.to(a.dtype))
            for a, w in (doubled, eager)
        ]
        for got, truth, plain in zip((dx, dweight), *outcomes, strict=True):
            assert_not_worse(got, truth, plain)


@pytest.mark.parametrize("cols", [32, 64, 128, 256])
def test_small_hidden_sizes_are_written(cols: int) -> None:
    y = weft.rms_norm(draw(24, cols), quantize="1x128", columnwise=True)
    assert y.dequantize().isfinite().all()
    assert y.dequantize().count_nonzero() > 0.9 * 24 * cols


@pytest.mark.parametrize(("batch", "length"), [(2, 12), (3, 43), (2, 65)])
def test_batches_that_end_within_a_stripe(batch: int, length: int) -> None:
    """Each batch has the codes of a call of its own, also if all rows end just past a stripe (129, 130)."""
    x = draw(batch, length, 96)
    q = weft.rms_norm(x, quantize="1x128", columnwise=True)
    for i in range(batch):
        alone = weft.rms_norm(x[i], quantize="1x128")
        rows = slice(i * length, (i + 1) * length)
        different = q.rowwise.data[rows].view(torch.uint8) != alone.rowwise.data.view(torch.uint8)
        assert different.float().mean() < 1e-3


def test_gradients_with_default_arguments() -> None:
    for function in (*NORMS, weft.quantize):
        x = draw(6, 96).requires_grad_()
        y = function(x)
        (y.dequantize() if isinstance(y, QTensor) else y).float().square().sum().backward()
        assert x.grad is not None
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", ["x", "residual"])
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_strides_of_dimensions_of_size_one(dim: int, name: str) -> None:
    shape = [2, 3, 4, 96]
    shape[dim] = 1
    tensors = {"x": draw(*shape), "residual": draw(*shape)}
    strides = list(tensors[name].stride())
    strides[dim] = 977
    odd = {**tensors, name: tensors[name].as_strided(shape, strides)}
    for a, b in zip(weft.rms_norm(**odd), weft.rms_norm(**tensors), strict=True):
        assert torch.equal(a, b)


def test_positional_call_matches_pytorch() -> None:
    """x is the only required argument, and the default eps is 1e-6 in every dtype."""
    x = torch.full((1, 64), 1e-4)
    assert torch.allclose(weft.rms_norm(x), x / (x.square().mean() + 1e-6).sqrt())
    assert torch.allclose(weft.rms_norm(x, eps=1.0), x / (x.square().mean() + 1.0).sqrt())


def test_no_tensor_is_read_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("the host waits for the device")

    x, scale = draw(6, 96), torch.full((1,), 0.02)
    weft.rms_norm(x, quantize="tensor", quant_scale=scale, return_amax=True)
    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(Tensor, name, refuse)
    weft.rms_norm(x, quantize="tensor", quant_scale=scale, return_amax=True)


@pytest.mark.compat
def test_repeated_calls_give_equal_results() -> None:
    """Calls with other constants and arguments in between leave no state behind."""
    x = draw(6, 96)
    calls = [
        lambda: weft.rms_norm(x),
        lambda: weft.rms_norm(x, eps=0.1),
        lambda: weft.rms_norm(x, weight_offset=3.0, weight=x[0].clone()),
        lambda: weft.layer_norm(x),
        lambda: weft.rms_norm(x, casting="llama"),
    ]
    first = [call() for call in calls]
    for order in itertools.islice(itertools.permutations(range(len(calls))), 0, 120, 17):
        for i in order:
            assert torch.equal(calls[i](), first[i])


def test_numeric_types_share_one_variant() -> None:
    """An int or a NumPy number instead of a float compiles no new variant."""
    import numpy as np

    from weft.runtime import recording

    x, weight = torch.empty(8, 128, device="meta"), torch.empty(128, device="meta")
    with recording("sm_90") as seen:
        for one in (1, 1.0, np.float64(1.0), np.float32(1.0)):
            weft.rms_norm(x, weight, weight_offset=one, eps=one)  # type: ignore[arg-type]
    assert len(set(seen)) == 1

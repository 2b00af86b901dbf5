"""`weft.nn.fold_norm`: a norm's weight in the layers after it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import weft
import weft.nn

from .test_calibration import model_and_batches


def norm_and_layers(kind: str, dtype: torch.dtype) -> tuple[nn.Module, list[nn.Linear]]:
    torch.manual_seed(3)
    norms = {
        "rms": lambda: nn.RMSNorm(48, eps=1e-6),
        "weft rms": lambda: weft.nn.RMSNorm(48),
        "layer": lambda: nn.LayerNorm(48),
        "layer without bias": lambda: nn.LayerNorm(48, bias=False),
        "weft layer": lambda: weft.nn.LayerNorm(48),
    }
    norm = norms[kind]()
    layers = [nn.Linear(48, 32), nn.Linear(48, 16, bias=False)]
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    for module in (norm, *layers):
        module.to(dtype).requires_grad_(False)
    return norm, layers


@pytest.mark.parametrize("kind", ["rms", "weft rms", "layer", "layer without bias", "weft layer"])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_a_folded_norm_gives_the_same_products(kind: str, dtype: torch.dtype, bound: float) -> None:
    norm, layers = norm_and_layers(kind, dtype)
    x = torch.randn(5, 48, dtype=dtype)
    exact = [layer.double()(norm.double()(x.double())) for layer in copy.deepcopy(layers)]
    norm.to(dtype)
    weft.nn.fold_norm(norm, *layers)
    assert norm.weight is None
    assert getattr(norm, "bias", None) is None
    assert (layers[1].bias is None) == ("bias" in kind or "rms" in kind)
    for layer, expected in zip(layers, exact, strict=True):
        assert layer.weight.dtype is dtype
        assert float((layer(norm(x)).double() - expected).norm() / expected.norm()) < bound
    weights = [layer.weight.clone() for layer in layers]
    weft.nn.fold_norm(norm, *layers)  # nothing is left to fold
    assert all(map(torch.equal, weights, (layer.weight for layer in layers)))


def test_weights_of_a_folded_norm_are_rounded_once() -> None:
    norm, layers = norm_and_layers("layer", torch.bfloat16)
    wide = [layer.weight.double() for layer in layers]
    gain, shift, bias = norm.weight.double(), norm.bias.double(), layers[0].bias.double()
    weft.nn.fold_norm(norm, *layers)
    for layer, w in zip(layers, wide, strict=True):
        assert torch.equal(layer.weight, (w * gain).bfloat16())
    assert torch.equal(layers[0].bias, (bias + wide[0] @ shift).bfloat16())
    assert torch.equal(layers[1].bias, (wide[1] @ shift).bfloat16())


class GemmaNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return weft.rms_norm(x, self.weight, weight_offset=1.0)


def test_a_norm_with_an_offset_is_folded_on_request() -> None:
    norm, (_, layer) = GemmaNorm(), norm_and_layers("rms", torch.float32)[1]
    x = torch.randn(5, 48)
    before = layer(norm(x))
    with pytest.raises(TypeError, match=r"fold_norm knows RMSNorm and LayerNorm .* got a GemmaNorm"):
        weft.nn.fold_norm(norm, layer)
    weft.nn.fold_norm(norm, layer, weight_offset=1)
    assert not norm.weight.any()
    assert torch.allclose(layer(norm(x)), before, rtol=0, atol=1e-5)
    assert torch.equal(norm(x), weft.rms_norm(x, None))


def test_norms_that_cannot_be_folded_are_refused() -> None:
    norm, (layer, other) = norm_and_layers("layer", torch.float32)
    tied = nn.Linear(48, 32).requires_grad_(False)
    tied.weight = layer.weight
    weights = [t.clone() for t in (norm.weight, layer.weight, other.weight)]
    static = nn.Linear(48, 32).requires_grad_(False)
    weft.nn.convert(static, "fp8_static", scales=weft.calibrate(static, [torch.randn(2, 48)]))
    trained, codes = nn.Linear(48, 32), nn.Linear(48, 16, bias=False)
    codes.weight = nn.Parameter(weft.quantize(codes.weight.detach(), "row"), requires_grad=False)
    for arguments, error, message in (
        ((norm,), ValueError, "needs the layers"),
        ((norm, other, layer, layer), ValueError, "the same or share their weight"),
        ((norm, layer, tied), ValueError, "the same or share their weight"),
        ((norm, other, nn.Linear(32, 48).requires_grad_(False)), ValueError, "layer 1 takes 32 elements"),
        ((norm, other, trained), ValueError, "the weight of layer 1 requires gradients"),
        ((norm, other, static), TypeError, "layer 1 must be .* got a StaticLinear"),
        ((norm, other, codes), ValueError, "the weight of layer 1 is quantized"),
        ((norm, other, nn.utils.spectral_norm(nn.Linear(48, 16))), ValueError, "computed anew in every call"),
        ((nn.LayerNorm(48), other), ValueError, "the norm's weight requires gradients"),
        ((nn.LayerNorm((4, 12)).requires_grad_(False), other), ValueError, "a weight of one dimension"),
        ((nn.ReLU(), other), TypeError, "got a ReLU"),
    ):
        with pytest.raises(error, match=message):
            weft.nn.fold_norm(*arguments)
    with pytest.raises(ValueError, match="leave out weight_offset=1"):
        weft.nn.fold_norm(norm, other, weight_offset=1)
    assert all(map(torch.equal, weights, (norm.weight, layer.weight, other.weight)))


def test_a_folded_model_is_calibrated_and_served() -> None:
    model, batches = model_and_batches(3)
    model.requires_grad_(False)
    before = model(batches[0])
    scales = weft.calibrate(model, batches)
    for block in model:
        nn.init.uniform_(block.norm.weight, 0.5, 2)
        nn.init.uniform_(block.second_norm.weight, 0.5, 2)
    before = model(batches[0])
    for block in model:
        weft.nn.fold_norm(block.norm, block.qkv)
        weft.nn.fold_norm(block.second_norm, block.up)
    assert float((model(batches[0]) - before).float().norm() / before.float().norm()) < 0.02
    with pytest.raises(ValueError, match=r"the weight of 0\.qkv is not the one that was calibrated"):
        weft.nn.convert(model, "fp8_static", scales=scales)
    weft.nn.convert(model, "fp8_static", scales=weft.calibrate(model, batches))
    assert float((model(batches[0]) - before).float().norm() / before.float().norm()) < 0.06

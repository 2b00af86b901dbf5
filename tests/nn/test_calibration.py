"""`weft.calibrate` and `weft.nn.convert(model, "fp8_static")`: scales from sample batches, and serving with them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
import weft.nn

SIZE = 128


class Block(nn.Module):
    """Block of a diffusion transformer: packed q, k and v, a gelu, and a norm of each kind."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.norm, self.second_norm = weft.nn.RMSNorm(size), weft.nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (-1, 32)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


def model_and_batches(
    batches: int = 5, dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(7)
    model = nn.Sequential(Block(), Block()).to(dtype)
    return model, [torch.randn(2, 12, SIZE, dtype=dtype) * (1 + i) for i in range(batches)]


def hooked_amaxes(model: nn.Module, batches: list[Tensor]) -> dict[str, list[float]]:
    """Return the amax of every linear layer's input in every batch, seen by plain hooks."""
    amaxes = defaultdict(list)

    def hook(name: str) -> Any:
        return lambda module, args: amaxes[name].append(float(args[0].double().abs().max()))

    handles = [
        module.register_forward_pre_hook(hook(name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for handle in handles:
        handle.remove()
    return amaxes


def percentile_of(values: list[float], percentile: float) -> float:
    """Return the percentile by its definition, interpolated linearly, in fp64."""
    position = (len(values) - 1) * percentile / 100
    below, ordered = int(position), sorted(values)
    above = min(below + 1, len(values) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


@torch.no_grad()
def served(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


# ---- calibration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batches", "percentile"), [(5, 99.9), (1, 99.9), (4, 50), (5, 0), (3, 100.0)])
def test_amaxes_are_those_of_plain_hooks(batches: int, percentile: float) -> None:
    model, data = model_and_batches(batches)
    result = weft.calibrate(model, data, percentile=percentile)
    expected = hooked_amaxes(model, data)
    assert list(result.layers) == list(expected)
    for name, values in expected.items():
        assert result.layers[name].amax == pytest.approx(percentile_of(values, percentile), rel=1e-15)


def test_two_runs_write_the_same_file(tmp_path: Path) -> None:
    model, batches = model_and_batches()
    for name in "ab":
        weft.calibrate(model, batches, out=tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
    assert weft.nn.Calibration.load(tmp_path / "a") == weft.calibrate(model, batches)


def test_the_file_serves_with_the_scales_of_its_amaxes(tmp_path: Path) -> None:
    model, batches = model_and_batches()
    before = served(model, batches[0])
    result = weft.calibrate(model, batches, out=tmp_path / "scales.json")
    report = weft.nn.convert(model, "fp8_static", scales=tmp_path / "scales.json")
    assert report.changed == list(result.layers)
    for name, layer in result.layers.items():
        scale = weft.scale_from_amax(torch.tensor(layer.amax, dtype=torch.float32), "tensor")
        assert torch.equal(model.get_submodule(name).x_scale, scale.reshape(()))
    y = served(model, batches[0])
    assert 1e-3 < float((y - before).float().norm() / before.float().norm()) < 0.05
    weft.nn.convert(model, None)
    assert type(model[0].qkv) is nn.Linear
    assert torch.equal(served(model, batches[0]), before)


def test_a_changed_weight_is_refused() -> None:
    model, batches = model_and_batches()
    scales = weft.calibrate(model, batches)
    with torch.no_grad():
        model[1].up.weight[3, 5] += 1
    with pytest.raises(ValueError, match=r"the weight of 1\.up is not the one that was calibrated"):
        weft.nn.convert(model, "fp8_static", scales=scales)
    assert type(model[0].qkv) is nn.Linear  # nothing was converted

"""`weft.calibrate`: scales from sample batches, and the file that keeps them."""

from __future__ import annotations

import json
import sys
import warnings
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
import weft.nn
from weft.nn.scales import Calibration, LayerScale, hash_of

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


class Guarded(nn.Module):
    """Model whose forward refuses host reads, as a CUDA graph does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return weft.capture(self.inner, x)(x).clone()


def test_forward_never_waits_for_the_device() -> None:
    model, batches = model_and_batches(2)
    amaxes = [layer.amax for layer in weft.calibrate(Guarded(model), batches).layers.values()]
    assert amaxes == [layer.amax for layer in weft.calibrate(model, batches).layers.values()]


class Named(nn.Module):
    """Model with two arguments, whose first layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.spare = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: Tensor, shift: Tensor | float = 0.0) -> Tensor:
        return self.second(self.first(input=x) + self.first(x + shift))


X, SHIFT = torch.linspace(-1, 2, 32).view(2, 16), torch.full((16,), 5.0)


@pytest.mark.parametrize(
    ("batch", "amax"),
    [(X, 2.0), ((X, SHIFT), 7.0), ([X, SHIFT], 7.0), ({"shift": SHIFT, "x": X}, 7.0), ((X, -0.5), 2.0)],
)
def test_kinds_of_batches(batch: Any, amax: float) -> None:
    """The amax of a batch is the largest over all calls of a layer, which may pass the input by name."""
    result = weft.calibrate(Named(), [batch])
    assert result.layers["first"].amax == amax
    assert result.uncalled == ["spare"]
    assert str(result).endswith("never called: spare")


def test_layers_without_a_scale_are_left_alone() -> None:
    model = Named()
    with torch.no_grad():
        model.first.weight.zero_()
        model.first.bias.zero_()
    scales = weft.calibrate(model, [X, X[:0]])  # empty rows show nothing
    assert scales.batches == 2
    report = weft.nn.convert(model, "fp8_static", scales=scales)
    assert report.changed == ["first"]
    assert report.left == {
        "second": "its inputs were all zero during calibration",
        "spare": "it was never called during calibration",
    }
    assert served(model, X).shape == (2, 32)


def test_only_batches_that_call_a_layer_count() -> None:
    class Sometimes(Named):
        def forward(self, x: Tensor, shift: Tensor | float = 0.0) -> Tensor:
            return self.spare(x) if shift else self.first(x)

    result = weft.calibrate(Sometimes(), [(X * 4, 1), X, (X, 1), X[:0]], percentile=0)
    assert (result.layers["first"].amax, result.layers["spare"].amax) == (2.0, 2.0)


def test_model_and_random_state_stay_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 16)).train()
    model[1].eval()
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 3,))  # the layer takes its result
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state, hooks = torch.get_rng_state(), [len(m._forward_pre_hooks) for m in model.modules()]

    def drawn() -> Any:
        for scale in (1, 2):
            torch.rand(3)
            yield X * scale

    assert weft.calibrate(model, drawn(), percentile=100).layers["0"].amax == 12.0
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == [True, True, False, True, True]
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.is_grad_enabled()


def test_hooks_are_removed_after_an_exception() -> None:
    model = Named().train()
    with pytest.raises(RuntimeError, match="shapes"):
        weft.calibrate(model, [X, torch.randn(2, 3)])
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert all(m.training for m in model.modules())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "a NaN"), (float("-inf"), "an Inf")])
def test_nan_and_inf_are_refused(value: float, word: str) -> None:
    bad = X.clone()
    bad[1, 3] = value
    with pytest.raises(ValueError, match=f"the input of first has {word} in batch 1"):
        weft.calibrate(Named(), [X, bad])


def test_outliers_are_warned_of_once() -> None:
    batches = [X * factor for factor in (1, 1, 1, 1, 21)]
    with pytest.warns(UserWarning, match=r"first \(42, 21 times its median\)") as warned:
        result = weft.calibrate(Named(), batches, percentile=50)
    assert len(warned) == 1
    assert result.layers["first"].amax == 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weft.calibrate(Named(), [X, X, X * 20])


def test_autocast_is_observed_as_it_is_served() -> None:
    model, x = Named(), X / 3
    with torch.autocast("cpu", torch.bfloat16):
        scales = weft.calibrate(model, [x])
        weft.nn.convert(model, "fp8_static", scales=scales)
        y = served(model, x)
    assert scales.layers["first"].amax == float(x.bfloat16().abs().max()) != float(x.abs().max())
    assert y.dtype is torch.bfloat16


def test_a_compiled_model_is_observed() -> None:
    model, batches = model_and_batches(1)
    expected = weft.calibrate(model, batches)
    compiled = torch.compile(model, backend="aot_eager")
    served(compiled, batches[0])
    result = weft.calibrate(compiled, batches)
    assert [layer.amax for layer in result.layers.values()] == [
        layer.amax for layer in expected.layers.values()
    ]


def test_calls_that_cannot_be_calibrated() -> None:
    model = Named()
    for batches, message in (
        ([], "batches is empty"),
        (["text"], "a batch must be a tensor, a tuple or list .* got str"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            weft.calibrate(model, batches)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        weft.calibrate(model.forward, [X])
    for percentile in (-1, 101, float("nan")):
        with pytest.raises(ValueError, match="percentile"):
            weft.calibrate(model, [X], percentile=percentile)
    with pytest.raises(ValueError, match="no layer that 'fp8_static' converts"):
        weft.calibrate(nn.Sequential(nn.ReLU()), [X])
    with pytest.raises(ValueError, match=r"first takes an input in torch\.float64"):
        weft.calibrate(model, [X.double()])
    for wrapped in (nn.DataParallel(model), nn.Sequential(nn.DataParallel(model))):
        with pytest.raises(ValueError, match="is a DataParallel: calibrate and convert the model before"):
            weft.calibrate(wrapped, [X])
    scales = weft.calibrate(model, [X])
    for recipe in ("fp8_block", "fp8_row", "fp8_static"):
        layer = weft.nn.Linear(16, 16) if recipe == "fp8_static" else weft.nn.Linear(16, 16, recipe=recipe)
        other = nn.Sequential(layer)
        if recipe == "fp8_static":
            weft.nn.convert(other, recipe, scales=weft.calibrate(other, [X]))
        with pytest.raises(ValueError, match=f"0 computes with the recipe '{recipe}'"):
            weft.calibrate(other, [X])
    weft.nn.convert(model, "fp8_static", scales=scales)
    with pytest.raises(ValueError, match="first computes with the recipe 'fp8_static'"):
        weft.calibrate(model, [X])


def test_weights_that_have_no_hash_are_refused() -> None:
    model = Named()
    model.second = nn.Linear(16, 32, device="meta")
    with pytest.raises(ValueError, match="the weight of second has no values on the device meta"):
        weft.calibrate(model, [X])
    model.second = nn.Linear(16, 32)
    model.second.weight = nn.Parameter(weft.quantize(torch.randn(32, 16), "row"), requires_grad=False)
    with pytest.raises(ValueError, match="the weight of second is quantized, as e4m3:row:te"):
        weft.calibrate(model, [X])
    gathered = weft.nn.Linear(128, 128, recipe="fp8_block")
    weft.nn.gather_quantized(gathered)
    gathered.recipe = None
    with pytest.raises(ValueError, match="the weight of the model itself is gathered as codes"):
        weft.calibrate(gathered, [torch.randn(2, 128)])


def test_hashes_tell_values_from_layouts() -> None:
    w = torch.randn(6, 8)
    strided = torch.empty(8, 12).t()[::2].copy_(w)
    assert not strided.is_contiguous()
    same = {hash_of("", t) for t in (w, strided, nn.Parameter(w), (-w)._neg_view())}
    assert len(same) == 1
    changed = w.clone()
    changed[5, 7] = torch.nextafter(changed[5, 7], torch.tensor(9.0))
    others = [hash_of("", t) for t in (changed, w.bfloat16(), w.view(8, 6), w.t(), w.view(torch.int32))]
    assert len(same.union(others)) == 6
    assert hash_of("", w[:0]) != hash_of("", w[:, :0])


def test_progress_is_shown_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weft.calibrate(Named(), [X])
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.modules["weft.nn.calibrate"], "is_quiet", lambda: False)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich believes that this is a terminal
    shown = weft.calibrate(Named(), [X, X])
    out, err = capsys.readouterr()
    assert (shown.batches, out) == (2, "")
    assert "calibrating" in err


# ---- the file -------------------------------------------------------------------------------------------


def test_floats_survive_the_file_exactly(tmp_path: Path) -> None:
    layers = {
        "größe": LayerScale("sha256:0", 0.1 + 0.2),
        "": LayerScale("sha256:1", 5e-324),
        "b": LayerScale("x", None),
    }
    written = Calibration("e4m3:tensor:te", 99.9, 3, layers)
    written.save(tmp_path / "scales.json")
    assert Calibration.load(tmp_path / "scales.json") == written
    content = json.loads((tmp_path / "scales.json").read_text())
    assert (content["file"], content["schema"], content["weft"]) == ("weft calibration", 1, weft.__version__)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c | {"schema": 2}, "its schema is 2, and this Weft .* reads 1"),
        (lambda c: c | {"file": "tiles"}, "does not say that it is a weft calibration"),
        (lambda c: [c], "does not say that it is a weft calibration"),
        (lambda c: {k: v for k, v in c.items() if k != "layers"}, "KeyError: 'layers'"),
        (lambda c: c | {"layers": 3}, "AttributeError"),
        (lambda c: c | {"layers": {"a": {"weight": 1, "amax": 1.0}}}, "the hash of a is 1"),
        (lambda c: c | {"layers": {"a": {"weight": "1", "amax": "1.0"}}}, "the amax of a is '1.0'"),
        (lambda c: c | {"layers": {"a": {"weight": "1", "amax": -1.0}}}, "the amax of a is -1.0"),
        (lambda c: c | {"layers": {"a": {"weight": "1", "amax": float("nan")}}}, "the amax of a is nan"),
        (lambda c: c | {"layers": {"a": {"weight": "1", "amax": True}}}, "the amax of a is True"),
        (lambda c: c | {"layers": {"a": {"weight": "1"}}}, "KeyError: 'amax'"),
    ],
)  # fmt: skip
def test_unusable_files_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    path, model = tmp_path / "scales.json", Named()
    weft.calibrate(model, [X], out=path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(
        ValueError, match=f"scales.json is not a calibration that this Weft can read: .*{message}"
    ):
        weft.nn.convert(model, "fp8_static", scales=path)
    assert type(model.first) is nn.Linear


def test_corrupt_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "scales.json", Named()
    scales = weft.calibrate(model, [X], out=path)
    for text in ("", path.read_text()[:-20], "\0"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"scales\.json is not a calibration .*JSONDecodeError"):
            weft.nn.convert(model, "fp8_static", scales=str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="UnicodeDecodeError"):
        weft.nn.convert(model, "fp8_static", scales=path)
    with pytest.raises(FileNotFoundError):
        weft.nn.convert(model, "fp8_static", scales=tmp_path / "none.json")
    with pytest.raises(
        ValueError, match="the calibration is for int8:tensor:te, and 'fp8_static' takes e4m3"
    ):
        weft.nn.convert(model, "fp8_static", scales=replace(scales, format="int8:tensor:te"))
    with pytest.raises(FileNotFoundError, match="in a directory that does not exist"):
        weft.calibrate(model, iter(lambda: pytest.fail("ran"), None), out=tmp_path / "none" / "scales.json")
    assert [p.name for p in tmp_path.iterdir()] == ["scales.json"]

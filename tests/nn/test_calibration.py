"""`weft.calibrate` and `weft.nn.convert(model, "fp8_static")`: scales from sample batches, and serving with them."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
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

from .test_convert import Net

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
    [(X, 2.0), ((X, SHIFT), 7.0), ([X, SHIFT], 7.0), ({"shift": SHIFT, "x": X}, 7.0), ((X, -10.0), 11.0)],
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
    with pytest.raises(FileNotFoundError):
        weft.calibrate(model, [X], out=tmp_path / "none" / "scales.json")
    assert [p.name for p in tmp_path.iterdir()] == ["scales.json"]


# ---- conversion -----------------------------------------------------------------------------------------


def test_scales_go_with_the_recipe() -> None:
    model = Named()
    with pytest.raises(ValueError, match="'fp8_static' needs scales="):
        weft.nn.convert(model, "fp8_static")
    for recipe in (None, "fp8_block"):
        with pytest.raises(ValueError, match="scales= is for the recipe 'fp8_static'"):
            weft.nn.convert(model, recipe, scales="scales.json")


def test_a_layer_that_was_not_calibrated_is_refused() -> None:
    model = Named()
    scales = weft.calibrate(model, [X], filter=lambda name, module: name != "second")
    assert list(scales.layers) == ["first", "spare"]
    with pytest.raises(ValueError, match="the calibration has no layer second: calibrate the same model"):
        weft.nn.convert(model, "fp8_static", scales=scales)
    with pytest.raises(ValueError, match=r"no layer 0\.first; its weight is there under the name first"):
        weft.nn.convert(nn.Sequential(model), "fp8_static", scales=scales)
    only = weft.nn.convert(model, "fp8_static", scales=scales, filter=lambda name, module: name == "first")
    assert only.changed == ["first"]


def test_which_layers_are_converted() -> None:
    """The rules of other recipes hold; frozen scales are for linear layers with a weight of their own alone."""

    class Own(weft.nn.Linear):
        pass

    model = Net()
    model.computed = nn.utils.spectral_norm(nn.Linear(128, 128))
    model.own_class, model.wide = Own(128, 128), nn.Linear(128, 128).double()
    model.experts = weft.nn.Experts(2, 128, 128)
    scales = weft.calibrate(model, [torch.arange(24).view(2, 12)])
    assert list(scales.layers) == ["up", "down", "own"]
    report = weft.nn.convert(model, "fp8_static", scales=scales)
    assert report.changed == ["up", "down", "own"]
    assert report.left == {
        "gate": "named gate, like a head or router",
        "narrow": "100 outputs are not multiples of 16, the recipe's block",
        "doubled": "a subclass of torch.nn.Linear may compute something else",
        "tied": "it shares its weight with an embedding",
        "computed": "its weight is computed anew in every call",
        "own_class": "a subclass of weft.nn.Linear may compute something else",
        "wide": "its weight is in torch.float64",
        "experts": "'fp8_static' is for linear layers",
    }


def test_recipes_follow_each_other_and_are_undone_exactly() -> None:
    model = nn.Sequential(
        nn.Linear(128, 128), weft.nn.Linear(128, 128), weft.nn.Linear(128, 128, recipe="bf16")
    )
    hook = model[0].register_forward_hook(lambda module, args, y: None)
    members = [dict(m.__dict__) for m in model.modules()]
    classes = [type(m) for m in model.modules()]
    x = torch.randn(4, 128)
    before, scales = served(model, x), weft.calibrate(model, [x])
    results = []
    for recipe in ("fp8_static", "fp8_static", "fp8_block", "fp8_static", None):
        weft.nn.convert(model, recipe, scales=scales if recipe == "fp8_static" else None)
        recipes = {getattr(layer, "recipe", None) for layer in model}
        assert recipes == ({recipe} if recipe else {None, "bf16"})
        results.append(served(model, x))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[3])
    assert torch.equal(results[4], before)
    assert [dict(m.__dict__) for m in model.modules()] == members
    assert [type(m) for m in model.modules()] == classes
    hook.remove()
    assert weft.nn.convert(model, None).changed == []


def test_the_product_is_as_stated() -> None:
    """Codes times codes, times both scales, plus the bias, rounded once."""
    layer, x = weft.nn.Linear(256, 128), torch.randn(3, 5, 256).bfloat16()
    layer.requires_grad_(False)
    scales = weft.calibrate(layer, [x / 2])  # so that some of x saturates
    weft.nn.convert(layer, "fp8_static", scales=scales)
    x_scale = scales.layers[""].amax / 448
    codes = (x.double() / x_scale).clamp(-448, 448).to(torch.float8_e4m3fn).double()
    assert bool((codes.abs() == 448).any())
    w_scale = float(layer.weight.abs().max()) / 448
    weight = (layer.weight.double() / w_scale).to(torch.float8_e4m3fn).double()
    expected = codes @ weight.T * (x_scale * w_scale) + layer.bias.double()
    y = layer(x)
    assert y.dtype is torch.bfloat16
    assert (
        float((y.double() - expected).norm() / expected.norm()) < 4e-3
    )  # bf16's own; another scale gives 2e-2
    assert torch.equal(y[1, 2], layer(x[1, 2]))
    assert layer(x[:0]).shape == (0, 5, 128)


def test_norms_and_gated_units_write_the_codes() -> None:
    """In a decoder layer, all projections but attention's output take codes that the op before them wrote."""
    attention = weft.nn.Attention(128, 4, 2, rotary=weft.nn.Rotary(10000.0))
    layer = weft.nn.DecoderLayer(attention, weft.nn.GLU(128, 256)).requires_grad_(False).bfloat16()
    x = torch.randn(2, 9, 128).bfloat16()
    before, scales = layer(x), weft.calibrate(layer, [x])
    amaxes = {name.rpartition(".")[2]: entry.amax for name, entry in scales.layers.items()}
    assert amaxes["q_proj"] == amaxes["k_proj"] == amaxes["v_proj"]
    assert amaxes["gate_proj"] == amaxes["up_proj"]
    weft.nn.convert(layer, "fp8_static", scales=scales)
    taken = {}
    for name, module in layer.named_modules():
        if isinstance(module, weft.nn.Linear):
            module.register_forward_pre_hook(
                lambda module, args, name=name: taken.setdefault(name.rpartition(".")[2], args[0])
            )
    y = layer(x)
    assert {name for name, h in taken.items() if not isinstance(h, weft.QTensor)} == {"o_proj"}
    for name, h in taken.items():
        if name != "o_proj":
            assert torch.equal(h.rowwise.scale.reshape(()), layer.get_submodule(_path(layer, name)).x_scale)
    assert float((y - before).float().norm() / before.float().norm()) < 0.05
    # q, k and v whose scales differ quantize their input themselves.
    changed = dict(scales.layers)
    key = next(name for name in changed if name.endswith("k_proj"))
    changed[key] = replace(changed[key], amax=changed[key].amax * 1.5)
    weft.nn.convert(layer, "fp8_static", scales=replace(scales, layers=changed))
    assert attention.input_numbers() == weft.nn.Numbers()
    assert float((layer(x) - before).float().norm() / before.float().norm()) < 0.05


def _path(model: nn.Module, last: str) -> str:
    return next(name for name, _ in model.named_modules() if name.rpartition(".")[2] == last)


def converted(batches: int = 2) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a converted model, an input and the result."""
    model, data = model_and_batches(batches)
    weft.nn.convert(model, "fp8_static", scales=weft.calibrate(model, data))
    return model, data[0], served(model, data[0])


def test_converted_models_are_captured_compiled_and_copied() -> None:
    model, x, y = converted()
    replay = weft.capture(model, x)
    assert torch.equal(replay(x), y)
    assert torch.equal(replay(x + 1), served(model, x + 1))
    for other in (
        torch.compile(model, fullgraph=True, backend="aot_eager"),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ):
        assert torch.equal(served(other, x), y)
    with torch.inference_mode():
        assert torch.equal(model(x), y)


def test_converted_layers_move_with_the_model() -> None:
    model, x, y = converted()
    model.float().bfloat16()
    layer = model[0].up
    assert layer.x_scale.dtype is torch.float32
    assert layer.weight_codes.dtype is torch.bfloat16
    assert torch.equal(served(model, x), y)
    assert "x_scale" not in dict(model[0].up.named_buffers())
    moved = model.to("meta")
    assert moved[0].up.x_scale.is_meta
    assert moved[0].up.weight_codes.is_meta


def test_state_dicts_keep_their_keys_and_load() -> None:
    model, batches = model_and_batches(2)
    state = copy.deepcopy(model.state_dict())
    scales = weft.calibrate(model, batches)
    weft.nn.convert(model, "fp8_static", scales=scales)
    y = served(model, batches[0])
    assert list(model.state_dict()) == list(state)
    for assign in (False, True):
        model.load_state_dict(copy.deepcopy(state), assign=assign)
        assert torch.equal(served(model, batches[0]), y)
    # A model without values gets its codes back with its weights.
    model.to_empty(device="cpu")
    for p in model.parameters():
        p.data.fill_(7)
    model[0].up.weight_codes.rowwise.data.view(torch.uint8).fill_(1)
    model.load_state_dict(state)
    assert torch.equal(served(model, batches[0]), y)
    other = {name: tensor + 1 if name == "1.up.weight" else tensor for name, tensor in state.items()}
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=r"the weight of 1\.up changed after the layer was converted"):
            model.load_state_dict(copy.deepcopy(other), assign=assign)
        with pytest.raises(RuntimeError, match=r"the weight of 1\.up changed after the layer was converted"):
            served(model, batches[0])
        model.load_state_dict(state)
        assert torch.equal(served(model, batches[0]), y)


def test_a_weight_written_later_is_refused_unless_it_is_the_same() -> None:
    model, x, y = converted()
    with torch.no_grad():
        model[0].up.weight.copy_(model[0].up.weight.clone())
    assert torch.equal(served(model, x), y)
    with torch.no_grad():
        model[0].up.weight[0, 0] += 1
    with pytest.raises(RuntimeError, match=r"the weight of 0\.up changed .* undo 'fp8_static'"):
        served(model, x)
    weft.nn.convert(model, None)
    served(model, x)


def test_gradients_are_refused() -> None:
    model, x, y = converted()
    with pytest.raises(RuntimeError, match=r"0\.qkv is converted to 'fp8_static', which has no gradients"):
        model(x)
    model.requires_grad_(False)
    assert torch.equal(model(x), y)
    with pytest.raises(RuntimeError, match="which has no gradients"):
        model(x.clone().requires_grad_())
    # A frozen part below a trained one.
    head = nn.Linear(SIZE, 16).bfloat16()
    head(model(x)).float().sum().backward()
    assert head.weight.grad is not None


def test_tied_layers_share_their_codes() -> None:
    model = Named()
    model.spare.weight = model.first.weight
    scales = weft.calibrate(model, [X])
    assert scales.layers["first"].weight == scales.layers["spare"].weight
    layers = scales.layers | {"spare": scales.layers["first"]}
    weft.nn.convert(model, "fp8_static", scales=replace(scales, layers=layers))
    assert model.first.weight is model.spare.weight
    assert model.first.weight_codes is model.spare.weight_codes
    served(model, X)


def test_the_recipe_of_a_converted_layer_is_fixed() -> None:
    model, _, _ = converted()
    assert "recipe='fp8_static'" in repr(model[0].up)
    with pytest.raises(
        AttributeError, match=r"0\.up has frozen scales: change its recipe with weft\.nn\.convert"
    ):
        model[0].up.recipe = "fp8_block"


def test_a_new_process_serves_the_same_bits(tmp_path: Path) -> None:
    model, batches = model_and_batches(2)
    weft.calibrate(model, batches, out=tmp_path / "scales.json")
    torch.save({"state": model.state_dict(), "x": batches[0]}, tmp_path / "model.pt")
    weft.nn.convert(model, "fp8_static", scales=tmp_path / "scales.json")
    torch.save(served(model, batches[0]), tmp_path / "y.pt")
    script = tmp_path / "serve.py"
    script.write_text(
        "import sys, torch, weft.nn\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.nn.test_calibration import model_and_batches, served\n"
        "model, _ = model_and_batches(1)\n"
        f"saved = torch.load({str(tmp_path / 'model.pt')!r})\n"
        "with torch.no_grad():\n"
        "    for p in model.parameters(): p.fill_(3)\n"
        "model.load_state_dict(saved['state'])\n"
        f"weft.nn.convert(model, 'fp8_static', scales={str(tmp_path / 'scales.json')!r})\n"
        f"assert torch.equal(served(model, saved['x']), torch.load({str(tmp_path / 'y.pt')!r}))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


# ---- folding a norm -------------------------------------------------------------------------------------


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

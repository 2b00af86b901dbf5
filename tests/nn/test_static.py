"""`weft.nn.convert(model, "fp8_static")`: which layers serve with frozen scales, and how."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import weft
import weft.nn

from .test_calibration import SIZE, Named, X, model_and_batches, served
from .test_convert import Net


def test_scales_go_with_the_recipe() -> None:
    model = Named()
    with pytest.raises(
        ValueError, match=r"got 'fp8_static', which needs a calibration: see weft\.nn\.convert"
    ):
        weft.nn.Linear(16, 16, recipe="fp8_static")
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
    for module in layer.modules():
        module._forward_pre_hooks.clear()
    assert torch.equal(weft.capture(layer, x)(x), y)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), y)
    # q, k and v whose scales differ quantize their input themselves.
    changed = dict(scales.layers)
    key = next(name for name in changed if name.endswith("k_proj"))
    changed[key] = replace(changed[key], amax=changed[key].amax * 1.5)
    weft.nn.convert(layer, "fp8_static", scales=replace(scales, layers=changed))
    assert attention.input_numbers() == weft.nn.Numbers()
    assert float((layer(x) - before).float().norm() / before.float().norm()) < 0.05


def test_a_transformers_model_is_served() -> None:
    from .models import ids, of_transformers

    model, tokens = of_transformers("llama").requires_grad_(False).bfloat16(), ids()
    before = model(tokens).logits
    scales = weft.calibrate(model, [{"input_ids": tokens}, {"input_ids": tokens.flip(1)}])
    q, k, v = (scales.layers[f"model.layers.1.self_attn.{name}_proj"].amax for name in "qkv")
    assert q == k == v
    report = weft.nn.convert(model, "fp8_static", scales=scales)
    assert report.left == {"lm_head": "the model's head"}
    assert float((model(tokens).logits - before).float().norm() / before.float().norm()) < 0.06
    weft.nn.convert(model, None)
    assert torch.equal(model(tokens).logits, before)


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


def test_frozen_scales_err_like_those_of_every_call() -> None:
    """On inputs that were not calibrated, the difference from bf16 is that of scales computed anew in every call."""
    model, batches = model_and_batches(6)
    *calibrated, x = batches
    x = x / 3
    reference, differences = served(model, x), []
    scales = weft.calibrate(model, [batch / (1 + i) * 2 for i, batch in enumerate(calibrated)])
    for recipe in ("fp8_tensor", "fp8_static"):
        weft.nn.convert(model, recipe, scales=scales if recipe == "fp8_static" else None)
        differences.append(float((served(model, x) - reference).float().norm() / reference.float().norm()))
    assert differences[1] < 1.15 * differences[0] < 0.03


def test_wrapped_and_sharded_models() -> None:
    """Those are refused; a converted model may be wrapped."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Named().requires_grad_(False)
        model.spare.requires_grad_(True)
        scales = weft.calibrate(model, [X])
        wrapped = nn.parallel.DistributedDataParallel(model)
        for call in (
            lambda: weft.calibrate(wrapped, [X]),
            lambda: weft.nn.convert(wrapped, "fp8_static", scales=scales),
        ):
            with pytest.raises(
                ValueError, match="is a DistributedDataParallel: calibrate and convert the model"
            ):
                call()
        weft.nn.convert(model, "fp8_static", scales=scales)
        y = model(X)
        assert torch.equal(nn.parallel.DistributedDataParallel(model)(X), y)  # it writes the parameters anew
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        assert torch.equal(model(X), y)
        sharded = Named()
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match="the weight of first is sharded"):
            weft.calibrate(sharded, [X])
    finally:
        dist.destroy_process_group()

"""`weft.nn.convert`: converting the layers of a model, and undoing it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft
import weft.integrations
import weft.nn


class Doubled(nn.Linear):
    """Linear layer as a user may have modified it."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Net(nn.Module):
    """Net with layers of every kind that the conversion distinguishes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 128)
        self.up = nn.Linear(128, 256)
        self.down = nn.Linear(256, 128, bias=False)
        self.gate = nn.Linear(128, 128)
        self.narrow = nn.Linear(128, 100)
        self.doubled = Doubled(128, 128)
        self.own = weft.nn.Linear(128, 128)
        self.tied = nn.Linear(128, 50, bias=False)
        self.tied.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        h = h + self.down(torch.relu(self.up(h))) * self.gate(h)
        h = h + self.own(self.doubled(h)) + nn.functional.pad(self.narrow(h), (0, 28))
        return self.tied(h)


IDS = torch.arange(24).view(2, 12) * 2


def results(function: Any, model: nn.Module) -> list[Tensor]:
    y = function(IDS)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), list(model.parameters()))]


def test_conversion_is_reported_and_reversible() -> None:
    model = Net()
    before = results(model, model)
    state, members = model.state_dict(), {name: dict(m.__dict__) for name, m in model.named_modules()}
    hook = model.up.register_forward_hook(lambda module, args, y: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = weft.nn.convert(model, "fp8_block")
    assert report.changed == ["up", "down", "own"]
    assert report.left == {
        "gate": "named gate, like a head or router",
        "narrow": "100 outputs are not multiples of 128, the recipe's block",
        "doubled": "a subclass of torch.nn.Linear may compute something else",
        "tied": "it shares its weight with an embedding",
    }
    assert report.count("linear") == 3
    assert "left alone: named gate" in str(report)
    # The objects and names stay the same.
    assert list(model.state_dict()) == list(state)
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == state[name].data_ptr()
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    assert isinstance(model.up, nn.Linear)
    assert model.up._forward_hooks
    assert "recipe='fp8_block'" in repr(model.up)
    x = torch.randn(4, 128)
    assert torch.equal(model.up(x), weft.linear(x, model.up.weight, model.up.bias, recipe="fp8_block"))
    assert 1e-3 < float((results(model, model)[0] - before[0]).norm() / before[0].norm()) < 0.1

    assert weft.nn.convert(model, "mxfp8").changed == report.changed  # another recipe
    assert model.down.recipe == "mxfp8"
    assert weft.nn.convert(model, None).changed == report.changed
    hook.remove()
    assert type(model.up) is type(model.down) is nn.Linear
    assert type(model.own) is weft.nn.Linear
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == members
    assert all(map(torch.equal, results(model, model), before))


def test_a_model_without_a_known_module_is_reported_unchanged() -> None:
    """An empty table would look like a broken one to a newcomer."""
    model = nn.Sequential(nn.ReLU())
    for report in (weft.nn.convert(model, "fp8_block"), weft.integrations.apply(model)):
        assert str(report) == "nothing was changed: the model has no module that Weft computes"


def test_converted_models_compile_checkpoint_copy_and_pickle() -> None:
    model = Net()
    before = results(model, model)
    weft.nn.convert(model, "fp8_block")
    wanted = results(model, model)
    ways = {
        "compiled": (torch.compile(model, fullgraph=True, backend="eager"), model),
        "checkpointed": (lambda ids: checkpoint(model, ids, use_reentrant=False), model),
    }
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        ways[f"copy {len(ways)}"] = (other, other)
    for name, (function, owner) in ways.items():
        assert all(map(torch.equal, results(function, owner), wanted)), name
    weft.nn.convert(model, None)
    assert all(map(torch.equal, results(ways["compiled"][0], model), before))


def test_a_filter_replaces_the_rule() -> None:
    model = Net()
    report = weft.nn.convert(model, "fp8_row", filter=lambda name, module: name in ("gate", "narrow", "tied"))
    assert report.changed == ["gate"]
    assert report.left["up"] == "left out by the filter"
    assert report.left["narrow"] == "100 outputs are not multiples of 16, the recipe's block"
    assert weft.nn.convert(Net(), "bf16", filter=lambda name, module: True).changed == [
        "up", "down", "gate", "narrow", "own", "tied",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="recipe must be"):
        weft.nn.convert(model, "fp9")


def test_weft_modules_take_the_recipe() -> None:
    experts = weft.nn.Experts(4, 128, 128)
    moe = weft.nn.MoE(weft.nn.Router(128, 4, 2), experts)
    model = weft.nn.DecoderLayer(weft.nn.Attention(128, 1), moe)
    report = weft.nn.convert(model, "fp8_block")
    assert len(report.changed) == 5
    assert report.left == {"mlp.gate": "not a torch.nn.Linear"}
    assert experts.recipe == "fp8_block"
    weft.nn.convert(model, None)
    assert experts.recipe is None
    narrow = weft.nn.Experts(2, 128, 64)  # 128 rows of gate and value, but 64 inputs of the second product
    assert weft.nn.convert(narrow, "fp8_block").left == {
        "": "64 inputs are not multiples of 128, the recipe's block"
    }


def test_a_transformers_model_is_converted() -> None:
    """Its head is found through its own method; the loss stays near the original."""
    from tests.nn.models import ids, of_transformers

    model, tokens = of_transformers("llama"), ids()
    before = model(tokens, labels=tokens).loss
    report = weft.nn.convert(model, "fp8_block")
    left = report.left
    assert left.pop("lm_head") == "the model's head"
    assert {name.rpartition(".")[2] for name in left} == {"k_proj", "v_proj"}  # 64 outputs
    assert len(report.changed) == 10
    loss = model(tokens, labels=tokens).loss
    assert 0 < (loss - before).abs() < 0.02 * before
    loss.backward()
    weft.nn.convert(model, None)
    assert torch.equal(model(tokens, labels=tokens).loss, before)


def test_lazy_layers_are_left_alone_until_they_have_sizes() -> None:
    model = nn.Sequential(nn.LazyLinear(128), nn.Linear(128, 128))
    report = weft.nn.convert(model, "fp8_block")
    assert "still unknown" in report.left["0"]
    model(torch.randn(4, 128))
    assert weft.nn.convert(model, "fp8_block").changed == ["0", "1"]


def test_layers_that_torch_bypasses_are_left_alone() -> None:
    """The fast path of `TransformerEncoderLayer` reads the weights in eval mode as if nothing were converted."""
    model = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    report = weft.nn.convert(model, "fp8_block")
    assert report.changed == []
    assert "bypasses it" in report.left["linear1"]


def test_undoing_leaves_own_recipes_as_they_were() -> None:
    model = nn.Sequential(weft.nn.Linear(128, 128, recipe="mxfp8"), nn.Linear(128, 128))
    weft.nn.convert(model, None)
    assert model[0].recipe == "mxfp8"
    for recipe in ("fp8_block", "bf16"):
        weft.nn.convert(model, recipe)
        assert model[0].recipe == recipe
    weft.nn.convert(model, None)
    assert model[0].recipe == "mxfp8"
    assert type(model[1]) is nn.Linear

"""Weft in models that know nothing of it, compared with the same models without it."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft.integrations
from tests.catalogue.calls import compiled_variants
from tests.integrations.tiny import MODELS, batch, build, distance, step
from weft.integrations.logits import DeferredLogits
from weft.integrations.recognize import RouterOptions, recognize_norm, recognize_router
from weft.integrations.rotations import recognize_rotary, rotating_functions
from weft.integrations.trials import LeftAlone


@pytest.fixture
def computed_logits(monkeypatch: pytest.MonkeyPatch) -> list[DeferredLogits]:
    """Return the list of logits that were computed."""
    computed: list[DeferredLogits] = []
    make = DeferredLogits.tensor

    def recording(self: DeferredLogits) -> Tensor:
        if self.computed is None and self.origin is None:
            computed.append(self)
        return make(self)

    monkeypatch.setattr(DeferredLogits, "tensor", recording)
    return computed


# ---- parity ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_fp32_results_match_the_unchanged_model(name: str, computed_logits: list[DeferredLogits]) -> None:
    model = build(name)
    loss, gradients = step(model)
    report = weft.integrations.apply(model, strict=True)
    assert report.count("norm") >= 5
    assert report.count("loss") == 1
    assert report.count("experts") == {"qwen3_moe": 2, "deepseek_v3": 1, "gpt_oss": 2}.get(name, 0)
    assert report.count("mlp") == {"qwen3_moe": 0, "gpt_oss": 0}.get(name, 2)
    weft_loss, weft_gradients = step(model)
    assert not computed_logits
    torch.testing.assert_close(weft_loss, loss, rtol=1e-6, atol=1e-6)
    assert distance(weft_gradients, gradients) < 5e-6
    # Rope and router are added on request.
    report = weft.integrations.apply(model, strict=True, rope=True, router=report.count("experts") > 0)
    assert report.count("rope") == 2
    assert report.count("router") == report.count("experts")
    weft_loss, weft_gradients = step(model)
    torch.testing.assert_close(weft_loss, loss, rtol=1e-6, atol=1e-6)
    assert distance(weft_gradients, gradients) < 5e-6
    weft.integrations.unapply(model)
    again, unchanged = step(model)
    assert torch.equal(again, loss)
    assert all(torch.equal(unchanged[n], gradients[n]) for n in gradients)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("gemma3", "gpt_oss") else pytest.param(name, marks=pytest.mark.slow)
        for name in MODELS
    ],
)
def test_bf16_is_no_further_from_fp64_than_the_unchanged_model(name: str) -> None:
    """The routing of fp64 is replayed: otherwise rounding would route tokens with two nearly tied experts
    differently."""
    routed: list[tuple[Tensor, Tensor]] = []

    def replay(model: Any, exact: bool) -> None:
        position = iter(range(99))

        def replaced(_: nn.Module, inputs: Any) -> Any:
            hidden, indices, weights = inputs
            if exact:
                routed.append((indices, weights.detach()))
            indices, weights = routed[next(position)]
            return hidden, indices, weights.to(hidden.dtype)

        for module in model.modules():
            if type(module).__name__.endswith("Experts"):
                module.register_forward_pre_hook(replaced)

    gradients = {}
    for kind in ("exact", "theirs", "mine"):
        model = build(name, torch.bfloat16)
        if kind == "exact":
            model.double()
        if kind == "mine":
            weft.integrations.apply(model, strict=True)
        replay(model, exact=kind == "exact")
        gradients[kind] = step(model)[1]
    assert len(routed) == {"qwen3_moe": 2, "deepseek_v3": 1, "gpt_oss": 2}.get(name, 0)
    weft_error, model_error = (distance(gradients[kind], gradients["exact"]) for kind in ("mine", "theirs"))
    print(f"{name}: {weft_error:.4f}, unchanged {model_error:.4f}")
    assert 1e-3 < weft_error < 1.25 * model_error, (weft_error, model_error)


# ---- logits ---------------------------------------------------------------------------------------------


def test_logits_are_computed_when_they_are_read(computed_logits: list[DeferredLogits]) -> None:
    model, inputs = build("gemma3"), batch()
    wanted = model(**inputs).logits
    weft.integrations.apply(model)
    logits = model(**inputs).logits
    assert not computed_logits
    assert logits.shape == wanted.shape
    assert logits.dtype == wanted.dtype
    assert "not made" in repr(logits)
    assert torch.equal(logits.argmax(-1), wanted.argmax(-1))
    assert len(computed_logits) == 1
    torch.testing.assert_close(logits + 0, wanted)
    torch.testing.assert_close(torch.softmax(logits, -1), wanted.softmax(-1))
    assert len(computed_logits) == 1, "they are computed once"
    model.eval()
    assert type(model(**inputs).logits) is Tensor
    model.train()
    with torch.no_grad():
        assert type(model(**inputs).logits) is Tensor


def test_the_same_tokens_are_generated() -> None:
    model, ids = build("llama").eval(), batch()["input_ids"]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids, **options)
    weft.integrations.apply(model)
    assert torch.equal(model.generate(ids, **options), wanted)


@pytest.mark.parametrize("way", ["checkpointing", "autocast", "accumulated"])
def test_training_computes_no_logits(way: str, computed_logits: list[DeferredLogits]) -> None:
    """`accumulated`: the Trainer divides the sum of losses by the number of tokens of all its batches."""

    def run(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
        if way == "checkpointing":
            model.gradient_checkpointing_enable()
        if way == "accumulated":
            return step(model, {**batch(), "num_items_in_batch": torch.tensor(91)})
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            return step(model)

    loss, gradients = run(build("llama"))
    model = build("llama")
    weft.integrations.apply(model)
    weft_loss, weft_gradients = run(model)
    assert not computed_logits
    assert weft_loss.dtype == loss.dtype
    bound = 0.03 if way == "autocast" else 5e-6
    torch.testing.assert_close(weft_loss, loss, rtol=bound, atol=bound)
    assert distance(weft_gradients, gradients) < bound


def test_applied_models_compile_to_one_graph(computed_logits: list[DeferredLogits]) -> None:
    """The graph has no breaks, as fullgraph=True ensures."""
    model, inputs = build("llama"), batch()
    loss, gradients = step(model)
    weft.integrations.apply(model, rope=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    output = compiled(**inputs, use_cache=False)
    output.loss.backward()
    assert not computed_logits
    torch.testing.assert_close(output.loss, loss, rtol=1e-6, atol=1e-6)
    assert distance({n: p.grad for n, p in model.named_parameters()}, gradients) < 5e-6


@pytest.mark.slow
def test_two_ranks_match_the_unchanged_model() -> None:
    """DDP and FSDP2 work, with checkpointing and with the head sharded separately, whose weight exists only while it is
    called. A rank that reads logits alone gets them if the weight is there, else an error instead of waiting
    forever."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(Path(__file__).parent / "ranks_adopt.py")
    done = subprocess.run([*launch, script], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "apart, logits made" in line]
    assert len(lines) == 6, done.stdout
    for line in lines:
        name, _, rest = line.partition(": ")
        error, times = rest.split(" apart, logits made ")
        assert float(error) < (0.03 if "bf16" in name else 5e-6), line
        assert times == "0 times", line
    reads = dict(line.split(": ", 1) for line in done.stdout.splitlines() if line.startswith("read alone"))
    assert reads["read alone, head in the root, before backward"] == "logits (2, 24)"
    assert "all ranks would have to gather it" in reads["read alone, head apart, before backward"]
    for name in ("head apart", "head in the root"):
        assert "the loss has run backward" in reads[f"read alone, {name}, after backward"]


@pytest.mark.parametrize("order", ["before", "after"])
def test_peft_adapters_match_before_and_after_apply(
    order: str, computed_logits: list[DeferredLogits]
) -> None:
    """Adapters on projections of attention and the feed-forward layer work, added before Weft or after it."""
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def adapted(model: Any) -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=["q_proj", "gate_proj"], r=4, init_lora_weights=False)
        return peft.get_peft_model(model, config)

    loss, gradients = step(adapted(build("llama")))
    model = build("llama")
    if order == "before":
        model = adapted(model)
    report = weft.integrations.apply(model, strict=True)
    assert (report.count("norm"), report.count("mlp"), report.count("loss")) == (5, 2, 1)
    weft_loss, weft_gradients = step(model if order == "before" else adapted(model))
    assert not computed_logits
    torch.testing.assert_close(weft_loss, loss, rtol=1e-6, atol=1e-6)
    assert distance(weft_gradients, gradients) < 5e-6


class Own(nn.Module):
    """A user's own model."""

    def __init__(self, softcap: float | None = None, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.lm_head = nn.LayerNorm(32), nn.Linear(32, 50)
        self.softcap, self.scale = softcap, scale

    def forward(self, x: Tensor) -> Any:
        logits = self.lm_head(self.norm(x)) * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def plain(loss: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss(model(x)), [x, *model.parameters()]))


TARGET = torch.tensor([[3, 1, -100, 49, 0], [7, 8, 9, -100, 2]])
LOSSES = {
    "shifted": lambda y: nn.functional.cross_entropy(y[:, :-1].reshape(-1, 50), TARGET[:, 1:].flatten()),
    "rows": lambda y: nn.functional.cross_entropy(y.view(-1, 50), TARGET.view(-1), reduction="none").sum(),
    "a module": lambda y: nn.CrossEntropyLoss(label_smoothing=0.1)(y.flatten(0, 1).float(), TARGET.flatten()),
    "weights": lambda y: nn.functional.cross_entropy(y[0], TARGET[0], torch.linspace(0.5, 2, 50)),
    "a mask": lambda y: nn.functional.cross_entropy(y[TARGET >= 0], TARGET[TARGET >= 0]),
    "one sample": lambda y: nn.functional.cross_entropy(input=y[1, ..., :], target=TARGET[1]),
}
# Anything but such a loss computes the logits: the last dimension elsewhere, probabilities, other arithmetic.
OTHERS = {
    "classes second": lambda y: nn.functional.cross_entropy(y.transpose(1, 2), TARGET),
    "probabilities": lambda y: nn.functional.cross_entropy(y[0], torch.full((5, 50), 0.02)),
    "some classes": lambda y: nn.functional.cross_entropy(y[0, :, :30], TARGET[0].clamp(max=29)),
    "shifted logits": lambda y: nn.functional.cross_entropy((y + 1.0 * TARGET[..., None])[0], TARGET[0]),
    "nll": lambda y: nn.functional.nll_loss(y.log_softmax(-1).view(-1, 50), TARGET.view(-1)),
    "in place": lambda y: nn.functional.cross_entropy(y.view(-1, 50).mul_(0.5), TARGET.view(-1)),
}


@pytest.mark.parametrize(
    "model", [Own(), Own(softcap=2.0), Own(softcap=1.5, scale=0.25)], ids=["", "cap", "both"]
)
@pytest.mark.parametrize("name", [*LOSSES, *OTHERS])
def test_losses_of_own_models_match(
    name: str, model: nn.Module, computed_logits: list[DeferredLogits]
) -> None:
    x = torch.randn(2, 5, 32, requires_grad=True)
    loss = (LOSSES | OTHERS)[name]
    model = copy.deepcopy(model)
    wanted = plain(loss, model, x)
    weft.integrations.apply(model, strict=True)
    results = plain(loss, model, x)
    assert len(computed_logits) == (name in OTHERS)
    for actual, expected in zip(results, wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_logits_changed_in_place_are_used() -> None:
    """Views notice that their base was changed in place."""
    model, x, target = Own(), torch.randn(5, 32), TARGET[0]
    weft.integrations.apply(model)
    logits = model(x)
    rows = logits.view(-1, 50)
    logits.mul_(0.5)
    wanted = nn.functional.cross_entropy(
        0.5 * nn.functional.linear(model.norm(x), *model.lm_head.parameters()), target
    )
    torch.testing.assert_close(nn.functional.cross_entropy(rows, target), wanted)
    torch.testing.assert_close(nn.functional.cross_entropy(logits, target), wanted)


# ---- apply and unapply ----------------------------------------------------------------------------------


def test_new_lengths_compile_nothing() -> None:
    model = build("qwen3_moe")
    weft.integrations.apply(model, rope=True, router=True)

    def train(samples: int, tokens: int) -> None:
        step(model, batch(samples, tokens))

    for samples, tokens in ((1, 8), (2, 24), (1, 97)):
        train(samples, tokens)
    before = compiled_variants()
    assert before >= 10
    for tokens in (8, 9, 11, 16, 31, 32, 33, 40, 63, 64, 65, 77, 100, 127, 128, 129, 160, 200, 255, 301):
        train(1, tokens)
    assert compiled_variants() == before


def test_apply_changes_only_forward_of_one_instance() -> None:
    model, other = build("qwen3"), build("qwen3")
    keys, text, loss = list(model.state_dict()), repr(model), step(other)[0]
    first = str(weft.integrations.apply(model))
    assert list(model.state_dict()) == keys
    assert repr(model) == text
    assert all("forward" not in module.__dict__ for module in other.modules())
    assert str(weft.integrations.apply(model)) == first, "applied twice"
    wanted = step(model)[0]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(step(twin)[0], wanted)
        twin.model.norm.weight.data.zero_()
        assert not torch.equal(step(twin)[0], wanted), "a copy computes with its own parameters"
        assert weft.integrations.unapply(twin) == 12
    assert weft.integrations.unapply(model) == 12
    assert weft.integrations.unapply(model) == 0
    assert torch.equal(step(model)[0], loss)


def test_kinds_are_selectable() -> None:
    model = build("deepseek_v3")
    report = weft.integrations.apply(model, norm=False, loss=False)
    assert {entry.kind for entry in report.entries} == {"mlp", "experts"}
    weft.integrations.unapply(model)
    report = weft.integrations.apply(model, mlp=False, experts=False, norm=False, loss=model.lm_head)
    assert [entry.name for entry in report.entries] == ["lm_head"]


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(8)
        self.sum_norm = SumNorm()
        self.mlp = OddMLP()
        self.norm = nn.LayerNorm(8)
        self.norm.forward = self.norm.forward  # like accelerate's hooks


class SumNorm(nn.Module):
    eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().sum(-1, keepdim=True) + self.eps)


class OddMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x) * 0.5)


def test_unrecognized_modules_are_left_alone() -> None:
    model = Odd()
    report = weft.integrations.apply(model)
    assert not report.changed
    reasons = report.left
    assert reasons.keys() == {"batch_norm", "sum_norm", "mlp", "norm"}
    assert "already replaced" in reasons["norm"]
    assert "left alone" in str(report)
    with pytest.raises(ValueError, match=r"(?s)sum_norm.*no head was found"):
        weft.integrations.apply(model, strict=True)


def test_mistakes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module; got a list"):
        weft.integrations.apply([nn.Linear(2, 2)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be a module of the model"):
        weft.integrations.apply(Own(), loss=nn.Linear(2, 2))


# ---- norms ----------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """RMSNorm in the orders of rounding that models use."""

    def __init__(self, eps: float, offset: float, last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.little, self.offset, self.last = eps, offset, last

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.little)
        if self.last:
            return (wide * (self.offset + self.weight.float())).to(hidden_states.dtype)
        return (self.offset + self.weight) * wide.to(hidden_states.dtype)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_norms_are_recognized_by_their_results(eps: float, offset: float, last: bool) -> None:
    module = Norm(eps, offset, last)
    if offset and not last:
        # It rounds the sum of weight and offset to bf16, for which Weft has no option.
        with pytest.raises(LeftAlone):
            recognize_norm(module)
    else:
        casting = "fp32" if last else "llama"
        assert recognize_norm(module) == ("rms", eps, offset, casting, not last, None, ("weight",))


def test_a_norm_keeps_its_dtypes() -> None:
    """Rows are bf16 and weights fp32, as in mixed precision."""
    for last in (False, True):
        model = nn.Sequential(Norm(1e-6, 0.0, last))
        x = torch.randn(7, 64).bfloat16()
        wanted = model(x)
        weft.integrations.apply(model)
        actual = model(x)
        assert actual.dtype == wanted.dtype == (torch.bfloat16 if last else torch.float32)
        torch.testing.assert_close(actual, wanted, rtol=1e-2 if last else 1e-6, atol=1e-6)


def norms_of(package: str) -> Iterator[type[nn.Module]]:
    """Yield the classes named *RMSNorm of a package of transformers' models."""
    import importlib

    module = importlib.import_module(package)
    for name, member in sorted(vars(module).items()):
        if name.endswith("RMSNorm") and isinstance(member, type) and member.__module__ == package:
            yield member


def packages() -> list[str]:
    import transformers

    root = Path(transformers.__file__).parent / "models"
    return [
        f"transformers.models.{path.parent.name}.{path.stem}"
        for path in sorted(root.glob("*/modeling_*.py"))
        if "RMSNorm(nn.Module)" in path.read_text()
    ]


def assert_same_bits(actual: Tensor, expected: Tensor, module: nn.Module, x: Tensor, label: str) -> None:
    """Assert equal bits, unless the exact value lies halfway between two bf16 values, to within 1e-6 of it: then an
    fp32 sum decides, by the order of its terms."""
    differ = actual != expected
    if not differ.any():
        return
    weft.integrations.unapply(module)
    exact = module.double()(x.double())[differ]
    middle = (actual.double() + expected.double())[differ] / 2
    assert ((exact - middle).abs() <= 1e-6 * exact.abs()).all(), label


def check_norms(names: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the recognized norms, each equal to its class in every bit, and the reasons for the others."""
    recognized, left = [], {}
    x = torch.randn(33, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
    for name in names:
        for kind in norms_of(name):
            label = f"{name.rpartition('.')[2]}.{kind.__name__}"
            try:
                module = kind(96).bfloat16()
            except Exception as error:
                left[label] = f"not made from a size: {error}"
                continue
            for parameter in module.parameters():
                parameter.data = torch.rand(parameter.shape).bfloat16() + 0.5
            try:
                recognize_norm(module)
            except LeftAlone as reason:
                left[label] = str(reason)
                continue
            wanted = module(x)
            weft.integrations.apply(nn.Sequential(module))
            assert_same_bits(module(x), wanted, copy.deepcopy(module), x, label)
            recognized.append(label)
    return recognized, left


def test_norms_of_transformers_are_recognized() -> None:
    models = ("llama", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_moe", "t5")
    recognized, left = check_norms([f"transformers.models.{name}.modeling_{name}" for name in models])
    assert len(recognized) == 5, left


@pytest.mark.slow
def test_all_norms_of_transformers_are_recognized() -> None:
    """There are 190 classes; those left alone are printed, so that a new release shows its additions."""
    recognized, left = check_norms(packages())
    print(f"{len(recognized)} recognized, {len(left)} left alone")
    for name, reason in left.items():
        print(f"  {name}: {reason}")
    assert len(recognized) > 150
    assert len(left) < 25


def attention_and_router(name: str) -> tuple[nn.Module, nn.Module]:
    modules = dict(build(name).named_modules())
    return (
        next(m for m in modules.values() if type(m).__name__.endswith("Attention")),
        next(m for m in modules.values() if type(m).__name__.lower().endswith("router")),
    )


def test_routers_and_rotations_are_recognized_by_their_results() -> None:
    _, router = attention_and_router("deepseek_v3")
    assert recognize_router(router) == RouterOptions(
        k=2,
        convention="deepseek_v3",
        renormalize=True,
        scale=2.5,
        groups=4,
        group_topk=2,
        own_logits=False,
        own_weights=False,
    )
    attention, router = attention_and_router("qwen3_moe")
    router.norm_topk_prob = False  # type: ignore[assignment]
    options = recognize_router(router)
    assert not options.renormalize
    assert options.own_logits
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(5))
    for actual, expected in zip(
        options(x, router.weight, None, None),  # type: ignore[arg-type]
        type(router).forward(router, x),  # type: ignore[attr-defined]
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)
    router.forward_noise = nn.Parameter(torch.zeros(3))
    with pytest.raises(LeftAlone, match="forward_noise"):
        recognize_router(router)
    (rotation,) = recognize_rotary(attention)
    assert (rotation.tables, rotation.style, rotation.out_style) == ("halves", "neox", None)
    q = torch.randn(2, 4, 7, 32)
    assert not rotation.fits(q, torch.zeros(2, 7, 16))  # a part of a head: left to the model
    with pytest.raises(ValueError, match=r"(?s)no attention rotates by a function.*no router"):
        weft.integrations.apply(Own(), rope=True, router=True, loss=False, strict=True)


@pytest.mark.slow
def test_all_rotations_of_transformers_are_recognized() -> None:
    """Functions that attention calls to rotate are recognized; those left alone are printed."""
    import importlib

    recognized, left = [], {}
    for name in packages():
        for kind in vars(importlib.import_module(name)).values():
            if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == name:
                probe = kind.__new__(kind)
                if not rotating_functions(probe):
                    continue
                try:
                    recognize_rotary(probe)
                    recognized.append(kind.__name__)
                except LeftAlone as reason:
                    left[kind.__name__] = str(reason)
    print(f"{len(recognized)} recognized, {len(left)} left alone")
    for label, reason in left.items():
        print(f"  {label}: {reason}")
    assert len(recognized) > 100
    by_call = [name for name, reason in left.items() if "with other arguments than" in reason]
    assert len(by_call) < 25  # they pass the dimension along which cos and sin are equal
    assert len(left) - len(by_call) < 25


def test_checkpointing_the_whole_model_computes_no_logits(computed_logits: list[DeferredLogits]) -> None:
    """If a user checkpoints the whole model, its forward runs again in backward."""
    model = Own()
    weft.integrations.apply(model)
    x = torch.randn(2, 5, 32, requires_grad=True)
    loss = LOSSES["shifted"]
    wanted = plain(loss, model, x)
    results = torch.autograd.grad(
        checkpoint(lambda x: loss(model(x)), x, use_reentrant=False), [x, *model.parameters()]
    )
    assert not computed_logits
    for actual, expected in zip(results, wanted, strict=True):
        assert torch.equal(actual, expected)

"""Every tiny model of the zoo, unchanged and with Weft, compared side by side.

    python -m tests.integrations.sweep                     # all models, a line each
    python -m tests.integrations.sweep LlamaForCausalLM    # some of them
    python -m tests.integrations.sweep --page docs/models.md

A model runs unchanged, with `weft.integrations.apply` (all kinds, including rope and router) and with
`attn_implementation="weft"`, in fp32. Logits, losses and gradients must be within `BOUND` of the unchanged model. If
gradients are not, because a model is badly conditioned, they must be at most twice as far from fp64 as the unchanged
model's, and within `WORST`. Each check proves that what it covers happens: that dropout drops, that hooks run, that a
pad matters.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy
import torch
import transformers
from torch import Tensor, nn

import weft.integrations
from tests.integrations import zoo
from tests.integrations.parity import Step, gradient_distance
from weft.integrations import adopt, masks
from weft.integrations import transformers as attention
from weft.report import Report

BOUND = 5e-6
WORST = 100 * BOUND  # for badly conditioned models
PADS = 7


class Skip(Exception):
    """Reason a check does not apply to a model."""


class Result(NamedTuple):
    """Outcome of a check: relative distances from the unchanged model."""

    off: float  # of logits or gradients
    loss: float | None = None
    from_fp64: tuple[float, float] | None = None  # with Weft, and unchanged; only beyond BOUND
    failure: str = ""

    def worse(self, other: Result) -> Result:
        far = self if self.off >= other.off else other
        losses = [loss for loss in (self.loss, other.loss) if loss is not None]
        return far._replace(loss=max(losses, default=None))

    def is_fine(self) -> bool:
        """Return whether distances are within BOUND, or due to the model: its fp32 is hardly closer to fp64."""
        if self.off <= BOUND and (self.loss or 0.0) <= BOUND:
            return True
        if self.from_fp64 is None or not self.off <= WORST:
            return False
        weft, unchanged = self.from_fp64
        return weft <= 2 * unchanged and (self.loss or 0.0) <= BOUND


class Row(NamedTuple):
    """Results of the checks of a model, without those that do not apply."""

    entry: zoo.Entry
    report: Report
    results: dict[str, Result]
    engines: Counter[str]  # engines of attention: "Weft", or the reason for PyTorch

    @property
    def failures(self) -> dict[str, str]:
        return {name: result.failure for name, result in self.results.items() if result.failure}


# ---- models ---------------------------------------------------------------------------------------------


class Subject:
    """Model of the zoo, and its inputs."""

    def __init__(self, entry: zoo.Entry) -> None:
        attention.register()
        self.entry = entry
        self.model = zoo.build(entry)
        self.own = "sdpa" if self.model._supports_sdpa else "eager"
        self.model.set_attn_implementation(self.own)
        self.inputs = zoo.batch(entry)
        copy.deepcopy(self.model)(**self.inputs)  # raises what the unchanged model raises

    def unchanged(self, **options: Any) -> Any:
        if not options:
            return copy.deepcopy(self.model)
        model = zoo.build(self.entry, **options)
        model.set_attn_implementation(self.own)
        return model

    def variants(self, *names: str, **options: Any) -> Iterator[tuple[str, Any]]:
        """Yield the model with Weft: "apply", "attention", or both."""
        for name in names or ("apply", "attention", "both"):
            model = self.unchanged(**options)
            if name != "attention":
                weft.integrations.apply(model, rope=True, router=True)
            if name != "apply":
                model.set_attn_implementation("weft")
            yield name, model

    def padded(self, how: str) -> dict[str, Tensor]:
        """Return a batch whose first sample has padding: on the left, on the right, or between its tokens."""
        if "input_ids" not in self.inputs:
            raise Skip("no tokens to pad")
        mask = torch.ones_like(self.inputs["input_ids"])
        padded_tokens = {"left": slice(0, PADS), "right": slice(-PADS, None), "hole": slice(9, 9 + PADS)}[how]
        mask[0, padded_tokens] = 0
        return {**self.inputs, "attention_mask": mask}


def step(model: Any, inputs: dict[str, Any], seed: int = 0) -> Step:
    model.zero_grad()
    torch.manual_seed(seed)
    numpy.random.seed(seed)  # speech models mask their inputs at random
    inputs = {
        name: value.to(model.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    with mock.patch.object(nn.functional, "ctc_loss", ctc_loss):
        return Step.of(model(**inputs).loss, model)


def ctc_loss(log_probs: Tensor, *args: Any, own: Any = nn.functional.ctc_loss, **options: Any) -> Tensor:
    """Compute the loss in fp64. In fp32 its sums of logarithms round gradients by 1e-5, with any logits."""
    loss: Tensor = own(log_probs.double(), *args, **options)
    return loss


def logits(model: Any, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**inputs).logits.clone()


def distance(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    assert bool(expected.isfinite().all())
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def farthest(distances: Iterable[float]) -> Result:
    """Return the largest distance of logits, or the first that is beyond BOUND or NaN."""
    worst = 0.0
    for off in distances:
        if not off <= BOUND:
            return Result(off)
        worst = max(worst, off)
    return Result(worst)


def require(condition: Any, what: str) -> None:
    if not bool(condition):
        raise AssertionError(f"this check cannot fail: {what}")


# ---- checks ---------------------------------------------------------------------------------------------


def compare(
    subject: Subject, run: Callable[[Any], Step], *variants: str, wanted: Step | None = None, **options: Any
) -> Result:
    """Return the largest distance of a step's loss and gradients from the unchanged model's. Gradients beyond BOUND are
    also compared with fp64."""
    wanted = run(subject.unchanged(**options)) if wanted is None else wanted
    worst = Result(0.0, 0.0)
    for _, model in subject.variants(*variants, **options):
        actual = run(model)
        result = Result(gradient_distance(actual, wanted), abs(actual.loss - wanted.loss) / abs(wanted.loss))
        if not result.off <= BOUND:
            exact = run(in_double(subject.unchanged(**options)))
            result = result._replace(
                from_fp64=(gradient_distance(actual, exact), gradient_distance(wanted, exact))
            )
        if not result.is_fine():
            return result
        worst = worst.worse(result)
    return worst


def in_double(model: Any) -> Any:
    if any(adopt.is_experts(module) for module in model.modules()):
        model.set_experts_implementation("eager")  # other implementations have no fp64 products
    return model.double()


def check_training(subject: Subject) -> Result:
    """Compare loss and gradients of a step."""
    return compare(subject, lambda model: step(model, subject.inputs))


def check_evaluation(subject: Subject) -> Result:
    """Compare logits with all tokens visible."""
    wanted = logits(subject.unchanged().eval(), subject.inputs)
    return farthest(distance(logits(model.eval(), subject.inputs), wanted) for _, model in subject.variants())


def check_padding(subject: Subject, how: str) -> Result:
    """Compare logits of a padded batch: all of them if the model's own attention is `sdpa`, else those of tokens that
    see a key, since eager attention has arbitrary results for the others."""
    inputs = subject.padded(how)
    wanted = logits(subject.unchanged().eval(), inputs)
    keep = torch.ones_like(inputs["attention_mask"], dtype=torch.bool)
    if subject.own == "eager":
        keep = inputs["attention_mask"].bool()
    if wanted.shape[:2] != keep.shape:
        raise Skip("its logits do not correspond to its tokens")
    changed = distance(wanted, logits(subject.unchanged().eval(), subject.inputs))
    if changed == 0:
        raise Skip("ignores padding")
    require(changed > 1e-4, "padding changes nothing")
    return farthest(
        distance(logits(model.eval(), inputs)[keep], wanted[keep]) for _, model in subject.variants("both")
    )


def check_packed(subject: Subject) -> Result:
    """Compare logits of two packed sequences, by positions, and by starts if Weft computes attention."""
    if subject.entry.kind != "causal":
        raise Skip("no packed batches")
    first, tokens = 10, zoo.LENGTH
    positions = torch.cat([torch.arange(first), torch.arange(tokens - first)]).expand(2, -1)
    inputs = {"input_ids": subject.inputs["input_ids"], "use_cache": False}
    own = subject.unchanged().eval()
    try:
        wanted = logits(own, {**inputs, "position_ids": positions})
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise Skip("takes no position_ids") from error
    packed_inputs = {**inputs, "position_ids": positions}
    worst = farthest(
        distance(logits(model.eval(), packed_inputs), wanted) for _, model in subject.variants("both")
    )
    alone = [
        logits(own, {**inputs, "input_ids": part})
        for part in inputs["input_ids"].split([first, tokens - first], 1)
    ]
    if distance(torch.cat(alone, 1), wanted) > 1e-4:
        return worst  # the model's own attention does not keep sequences apart
    starts = torch.tensor([0, first, tokens, tokens + first, 2 * tokens], dtype=torch.int32)
    starts_of_sequences = {
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": 20,
        "max_length_k": 20,
    }
    by_starts = (
        distance(logits(model.eval(), {**packed_inputs, **starts_of_sequences}), wanted)
        for _, model in subject.variants("both")
    )
    return farthest([worst.off, *by_starts])


def check_dropout(subject: Subject) -> Result:
    """Compare a step with dropout wherever the model has any: the same random numbers are drawn."""
    try:
        own = subject.unchanged(dropout=0.2)
        wanted = step(own, subject.inputs, seed=1)
    except ValueError as error:
        raise Skip("refuses dropout") from error
    if gradient_distance(step(own, subject.inputs, seed=2), wanted) < 1e-3:
        raise Skip("no dropout")
    return compare(
        subject, lambda model: step(model, subject.inputs, seed=1), "both", wanted=wanted, dropout=0.2
    )


class Hooks:
    """Hooks that change the inputs and outputs of modules, and count their calls."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: Counter[str] = Counter()
        for name, module in model.named_modules():
            if name and (not list(module.children()) or "mlp" in name.rpartition(".")[2].lower()):
                module.register_forward_hook(functools.partial(self.forward, name))
        head = getattr(model, "lm_head", None)
        if isinstance(head, nn.Module):
            head.register_full_backward_hook(self.backward)

    def forward(self, name: str, module: nn.Module, inputs: Any, output: Any) -> Any:
        self.calls[name] += 1
        return output * 1.01 if isinstance(output, Tensor) and output.is_floating_point() else output

    def backward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.calls["backward"] += 1


def check_hooks(subject: Subject) -> Result:
    """Compare a step with hooks on every leaf and feed-forward layer: each runs as often as in the unchanged model."""
    counts: list[Counter[str]] = []

    def run(model: Any) -> Step:
        hooks = Hooks(model)
        if model.dtype != torch.float64:  # in fp64 experts run one by one
            counts.append(hooks.calls)
        return step(model, subject.inputs)

    wanted = run(subject.unchanged())
    require(len(counts[0]) > 5, "no hook runs")
    require(
        gradient_distance(wanted, step(subject.unchanged(), subject.inputs)) > 1e-4, "hooks change nothing"
    )
    off = compare(subject, run, "both", wanted=wanted)
    for weft_counts in counts[1:]:
        if weft_counts != counts[0]:
            differences = {
                name: (weft_counts[name], count)
                for name, count in counts[0].items()
                if weft_counts[name] != count
            }
            raise AssertionError(f"hooks ran (with Weft, unchanged) {differences}")
    return off


def check_cross_attention(subject: Subject) -> Result:
    """Compare logits of a decoder that is shorter than its encoder, one sample of which has padding."""
    if subject.entry.kind not in ("seq2seq", "speech"):
        raise Skip("no cross attention")
    inputs = dict(subject.inputs) if subject.entry.kind == "speech" else subject.padded("right")
    del inputs["labels"]
    inputs["decoder_input_ids"] = subject.inputs["labels"][:, 6:11].clamp(min=3)
    own = subject.unchanged().eval()
    wanted = logits(own, inputs)
    name = "input_features" if subject.entry.kind == "speech" else "input_ids"
    other = inputs[name].clone()
    other[..., -PADS - 1] = 3 + (other[..., -PADS - 1] + 1) % 100
    require(distance(logits(own, {**inputs, name: other}), wanted) > 1e-6, "the encoder changes nothing")
    return farthest(distance(logits(model.eval(), inputs), wanted) for _, model in subject.variants("both"))


def check_generation(subject: Subject) -> Result:
    """Compare tokens generated from a prompt with padding on the left, with a cache."""
    if subject.entry.kind == "masked" or not subject.model.can_generate():
        raise Skip("does not generate")
    inputs = subject.padded("left")
    del inputs["labels"]
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}

    def generate(model: Any) -> Tensor:
        torch.manual_seed(0)
        return model.eval().generate(**inputs, **options)

    try:
        wanted = generate(subject.unchanged())
    except Exception as error:  # a model that cannot generate from such a prompt may raise anything
        raise Skip(f"does not generate: {type(error).__name__}") from error
    for name, model in subject.variants("both"):
        tokens = generate(model)
        if not torch.equal(tokens, wanted):
            raise AssertionError(f"{name}: {tokens.tolist()} for {wanted.tolist()}")
    return Result(0.0)


def check_checkpointing(subject: Subject) -> Result:
    """Compare gradients of a step whose layers run again in backward."""
    if not subject.model.supports_gradient_checkpointing:
        raise Skip("no checkpointing")
    inputs = subject.inputs | ({"use_cache": False} if subject.entry.kind in ("causal", "seq2seq") else {})

    def run(model: Any) -> Step:
        model.gradient_checkpointing_enable()
        return step(model, inputs)

    try:
        wanted = run(subject.unchanged())
    except Exception as error:  # a model that cannot rerun its layers may raise anything
        raise Skip("does not run again") from error
    return compare(subject, run, "both", wanted=wanted)


def check_frozen(subject: Subject) -> Result:
    """Compare gradients of a step in which norms, and then the head and embeddings, are frozen."""

    def run(model: Any, names: tuple[str, ...]) -> Step:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name.lower() for part in names))
        return step(model, subject.inputs)

    norms, ends = (
        compare(subject, functools.partial(run, names=names), "both")
        for names in (("norm", "ln_"), ("head", "embed", "wte", "shared"))
    )
    return norms.worse(ends)


def check_state(subject: Subject) -> Result:
    """Check that `apply` changes nothing but forwards: no parameter, buffer, mode or random state."""
    model = subject.unchanged()
    before = {name: value.clone() for name, value in model.state_dict(keep_vars=False).items()}
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5)
    numbers = torch.get_rng_state()
    weft.integrations.apply(model, rope=True, router=True)
    if not torch.equal(torch.get_rng_state(), numbers):
        raise AssertionError("random numbers were drawn")
    if modes != [module.training for module in model.modules()]:
        raise AssertionError("training modes changed")
    for name, value in [*model.state_dict().items(), *model.named_buffers()]:
        if not torch.equal(value, before.get(name, buffers.get(name))):
            raise AssertionError(f"{name} changed")
    return Result(0.0)


def check_reached(subject: Subject) -> Result:
    """Check that Weft computes every replaced module that the unchanged model calls; none falls back to its class."""
    fallbacks: Counter[str] = Counter()
    reached: set[int] = set()

    def rotate(options: Any, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        def own(*inputs: Any, **options_of_call: Any) -> Any:
            fallbacks[options.name] += 1
            return original(*inputs, **options_of_call)

        reached.add(0)
        return rotate_by_weft(options, own, *args, **named)

    def counting(own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: nn.Module, *args: Any, **named: Any) -> Any:
            fallbacks[type(self).__name__] += adopt._is_replaced(self)
            return own(self, *args, **named)

        return forward

    def recording(own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(module: nn.Module, *args: Any) -> Any:
            reached.add(id(module))
            return own(module, *args)

        return forward

    own = subject.unchanged()
    called: set[str] = set()
    for name, module in own.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: called.add(name))
    step(own, subject.inputs)
    rotate_by_weft, model = adopt._rotate, subject.unchanged()
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(adopt, "_rotate", rotate))
        forwards = list(adopt._FORWARDS)
        for name in ("norm_forward", "mlp_forward", "experts_forward", "router_forward", "head_forward"):
            forwards.append(recording(getattr(adopt, name)))
            patches.enter_context(mock.patch.object(adopt, name, forwards[-1]))
        patches.enter_context(mock.patch.object(adopt, "_FORWARDS", tuple(forwards)))
        report = weft.integrations.apply(model, rope=True, router=True)
        modules = dict(model.named_modules())
        changed = [entry for entry in report.entries if entry.changed]
        for kind in {type(modules[entry.name]) for entry in changed if entry.kind not in ("rope", "loss")}:
            patches.enter_context(mock.patch.object(kind, "forward", counting(kind.forward)))
        fallbacks.clear()
        reached.clear()
        step(model, subject.inputs)
    if +fallbacks:
        raise AssertionError(f"replaced, but not computed by Weft: {dict(+fallbacks)}")
    identities = {entry.name: 0 if entry.kind == "rope" else id(modules[entry.name]) for entry in changed}
    missed = sorted(name for name in identities.keys() & called if identities[name] not in reached)
    if missed:
        raise AssertionError(f"replaced, but not called: {missed}")
    return Result(0.0)


@contextmanager
def counted(engines: Counter[str]) -> Iterator[None]:
    """Count the engines of attention: "Weft", or the reason for PyTorch."""

    def by_weft(*args: Any, own: Any = attention.attention, **options: Any) -> Any:
        engines["Weft"] += 1
        return own(*args, **options)

    def by_pytorch(*args: Any, own: Any = attention._by_pytorch, **options: Any) -> Any:
        engines[why_pytorch(*args, **options)] += 1
        return own(*args, **options)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(attention, "attention", by_weft))
        patches.enter_context(mock.patch.object(attention, "_by_pytorch", by_pytorch))
        yield


def why_pytorch(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> str:
    """Return the reason a call is left to PyTorch's attention."""
    for name in attention.OF_PYTORCH:
        if options.get(name) is not None:
            return name
    if max(query.shape[-1], value.shape[-1]) > attention.WIDEST:
        return "wide heads"
    if mask is not None and not isinstance(mask, masks.BandMask):
        return "the model's own mask"
    if mask is not None and mask.visible is None:
        return "dense mask"
    if mask is not None and tuple(mask.shape) != (len(query), 1, query.shape[2], key.shape[2]):
        return "mask of another shape"
    return "scaling" if (options["scaling"] or 1.0) <= 0 else "other"


CHECKS: dict[str, Callable[[Subject], Result]] = {
    "training": check_training,
    "evaluation": check_evaluation,
    "left pads": functools.partial(check_padding, how="left"),
    "right pads": functools.partial(check_padding, how="right"),
    "hole": functools.partial(check_padding, how="hole"),
    "packed": check_packed,
    "cross": check_cross_attention,
    "dropout": check_dropout,
    "hooks": check_hooks,
    "checkpointing": check_checkpointing,
    "frozen": check_frozen,
    "generation": check_generation,
    "state": check_state,
    "reached": check_reached,
}


# ---- the sweep ------------------------------------------------------------------------------------------


def examine(entry: zoo.Entry, *checks: str) -> Row:
    """Build a model and run checks on it, all by default. Raises what building or running it unchanged raises."""
    return examined(Subject(entry), *checks)


def examined(subject: Subject, *checks: str) -> Row:
    """Run checks on a model, all by default."""
    engines: Counter[str] = Counter()
    results: dict[str, Result] = {}
    for name in checks or CHECKS:
        # With dropout, and for a batch with padding between tokens, PyTorch computes attention by design.
        usual = name in ("training", "evaluation", "left pads", "right pads", "packed", "cross")
        try:
            with counted(engines if usual else Counter()):
                result = CHECKS[name](subject)
            if not result.is_fine():
                result = result._replace(failure=str(result))
        except Skip:
            continue
        except Exception as error:  # anything a model raises with Weft is a result
            frame = traceback.extract_tb(error.__traceback__)[-1]
            location = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
            failure = f"{type(error).__name__}: {str(error)[:300]} ({location})"
            result = Result(float("nan"), failure=failure)
        results[name] = result
    report = weft.integrations.apply(subject.unchanged(), rope=True, router=True)
    return Row(subject.entry, report, results, engines)


def main() -> None:
    from tests.integrations.models_page import line, page

    parser = argparse.ArgumentParser(description="Compare tiny models of transformers with Weft and without.")
    parser.add_argument("names", nargs="*", help="classes; all of them by default")
    parser.add_argument("--page", type=Path, help="write the page to this file if nothing failed")
    options = parser.parse_args()
    if options.page and options.names:
        parser.error("--page covers all models: remove the names")
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for entry in zoo.entries():
        if options.names and entry.name not in options.names:
            continue
        try:
            subject = Subject(entry)
        except Exception as error:  # a model that cannot be built small, or does not run unchanged
            is_known = isinstance(error, zoo.CannotBuild)
            left_out[entry.name] = (
                str(error) if is_known else f"the unchanged model raises {type(error).__name__}"
            )
            print(f"{entry.name}: left out, {type(error).__name__}: {str(error)[:100]!r}", flush=True)
            continue
        rows.append(examined(subject))
        print(line(rows[-1]), rows[-1].failures or "", flush=True)
    failed = [row.entry.name for row in rows if row.failures]
    print(f"{len(rows)} models, {len(left_out)} left out; failed: {', '.join(failed) or 'none'}")
    if options.page and not failed:
        options.page.write_text(page(rows, left_out))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

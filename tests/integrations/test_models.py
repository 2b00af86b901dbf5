"""Transformers models unchanged and with Weft; and that the sweep detects mistakes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'weft[transformers]'")

import transformers

from tests.integrations import models_page, sweep, zoo
from weft.integrations import adopt, logits, masks
from weft.integrations import transformers as attention
from weft.integrations.recognize import NormOptions
from weft.integrations.rotations import RotaryOptions

# Outside nightly runs: dense, sinks and experts, an encoder with a decoder.
BY_DAY = ("LlamaForCausalLM", "GptOssForCausalLM", "BartForConditionalGeneration")


PAGE = Path(__file__).parents[2] / "docs/models.md"


def entry(name: str) -> zoo.Entry:
    return next(entry for entry in zoo.entries() if entry.name == name)


def page_cells() -> dict[str, list[str]]:
    """Return the cells of each model's line on the page."""
    lines = PAGE.read_text().partition(f"| {' | '.join(models_page.COLUMNS)} |\n")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()[1:]]
    return {line[0]: line for line in cells}


@pytest.mark.parametrize(
    "name",
    [
        one.name if one.name in BY_DAY else pytest.param(one.name, marks=pytest.mark.slow)
        for one in zoo.entries()
    ],
)
def test_a_transformers_model_matches_the_unchanged_one(name: str) -> None:
    """The checks of `sweep` compare logits, loss, gradients and tokens; the model's line on the page must agree."""
    try:
        subject = sweep.Subject(entry(name))
    except Exception as error:  # too large in any configuration, or not runnable from tokens alone
        assert name not in page_cells()
        pytest.skip(f"{type(error).__name__}: {error}")
    row = sweep.examined(subject)
    assert not row.failures
    if f"transformers {transformers.__version__}," in PAGE.read_text():
        cells = page_cells()[name]
        kinds = len(models_page.KINDS)
        assert [*cells[: kinds + 1], cells[kinds + 2]] == models_page.facts(row)
        figures = dict(zip(models_page.COLUMNS, cells, strict=True))
        for column, checks in models_page.FIGURES.items():
            assert bool(figures[column]) == any(check in row.results for check in checks), column


def test_the_page_has_over_two_hundred_models_and_agrees_with_the_command() -> None:
    text, cells = PAGE.read_text(), page_cells()
    assert len(cells) > 200
    assert cells.keys() <= {one.name for one in zoo.entries()}
    head, names = models_page.PAGE.split("{table}")[0], ("models", "versions", "bound")
    pattern = re.escape(head)
    for name in names:
        pattern = pattern.replace(re.escape(f"{{{name}}}"), f"(?P<{name}>.+)" if name != "bound" else "5e-06")
    match = re.match(pattern, text)
    assert match, (
        "docs/models.md is not what `python -m tests.integrations.sweep --page docs/models.md` writes"
    )
    assert int(match["models"]) == len(cells)


def test_the_page_has_no_figure_beyond_the_bound() -> None:
    for name, cells in page_cells().items():
        for figure in cells[len(models_page.KINDS) + 3 :]:
            small = figure in ("", "same") or figure.endswith("*") or float(figure) <= sweep.BOUND
            assert small, f"{name}: {figure}"


@pytest.mark.parametrize(
    ("result", "fine"),
    [
        (sweep.Result(4e-6, 4e-6), True),
        (sweep.Result(6e-6), False),
        (sweep.Result(1e-7, 6e-6), False),
        (sweep.Result(float("nan")), False),
        (sweep.Result(1e-7, float("nan")), False),
        (sweep.farthest([1e-7, float("nan"), 1e-7]), False),
        (sweep.farthest([1e-7, 4e-6, 1e-7]), True),
        (sweep.Result(1e-5, 1e-7, from_fp64=(1e-5, 6e-6)), True),
        (sweep.Result(1e-5, 1e-7, from_fp64=(1e-5, 4e-6)), False),
        (sweep.Result(1e-5, 6e-6, from_fp64=(1e-5, 6e-6)), False),
        (sweep.Result(0.5, 1e-7, from_fp64=(0.5, 0.5)), False),
    ],
)
def test_only_badly_conditioned_gradients_may_be_beyond_the_bound(result: sweep.Result, fine: bool) -> None:
    assert result.is_fine() == fine


def unpacked(band: Any, batch: int, tokens: int) -> masks.Visible:
    return masks.Visible(band.left, band.right, False)


def unpadded(band: Any, shape: Any, offset: int, padding: Any) -> Any:
    return masks.visible_keys(band, shape, offset, None, padding.device)


def other_eps(self: NormOptions, *inputs: Any, own: Any = NormOptions.of) -> Any:
    return own(self._replace(eps=(self.eps or 0.0) + 1e-4), *inputs)


def back_to_the_class(module: Any, options: Any, *inputs: Any) -> Any:
    return type(module).forward(module, *inputs)


SABOTAGES: dict[str, tuple[str, str, Callable[[pytest.MonkeyPatch], None]]] = {
    "another eps": (
        "LlamaForCausalLM",
        "training",
        lambda patch: patch.setattr(NormOptions, "of", other_eps),
    ),
    "no scale": (
        "LlamaForCausalLM",
        "evaluation",
        lambda patch: patch.setattr(
            attention, "attention", lambda *a, own=attention.attention, **o: own(*a, **{**o, "scale": 1.0})
        ),
    ),
    "no padding": (
        "LlamaForCausalLM",
        "left pads",
        lambda patch: patch.setattr(masks, "_padded", unpadded),
    ),
    "no sequences": (
        "LlamaForCausalLM",
        "packed",
        lambda patch: patch.setattr(masks, "_packed", unpacked),
    ),
    "no pads between tokens": (
        "LlamaForCausalLM",
        "hole",
        lambda patch: patch.setattr(masks, "_padded", unpadded),
    ),
    "no dropout": (
        "LlamaForCausalLM",
        "dropout",
        lambda patch: patch.setattr(
            attention,
            "_by_pytorch",
            lambda *a, own=attention._by_pytorch, **o: own(*a, **{**o, "dropout": 0.0}),
        ),
    ),
    "hooks that run twice": (
        "LlamaForCausalLM",
        "hooks",
        lambda patch: (
            patch.setattr(logits, "_is_hooked", lambda head: False),
            patch.setattr(logits, "_is_gathered", lambda head: True),
        )[0],
    ),
    "hooks that are passed by": (
        "LlamaForCausalLM",
        "hooks",
        lambda patch: patch.setattr(adopt, "is_hooked_within", lambda *_: False),
    ),
    "rotations that are never reached": (
        "LlamaForCausalLM",
        "reached",
        lambda patch: patch.setattr(RotaryOptions, "fits", lambda *_: False),
    ),
    "norms that are never reached": (
        "LlamaForCausalLM",
        "reached",
        lambda patch: (
            patch.setattr(adopt, "norm_forward", back_to_the_class),
            patch.setattr(adopt, "_FORWARDS", (*adopt._FORWARDS, back_to_the_class)),
        )[0],
    ),
    "rotations in a model that does not rotate": (
        "GraniteMoeHybridForCausalLM",
        "reached",
        lambda patch: patch.setattr(adopt, "_rotates", lambda model: True),
    ),
    "random numbers": (
        "LlamaForCausalLM",
        "state",
        lambda patch: patch.setattr(
            adopt, "recognize_norm", lambda *a, own=adopt.recognize_norm: (torch.rand(1), own(*a))[1]
        ),
    ),
    "keys of the encoder": (
        "BartForConditionalGeneration",
        "cross",
        lambda patch: patch.setattr(
            masks.Visible,
            "arguments",
            lambda self, own=masks.Visible.arguments: own(self._replace(right=0)),
        ),
    ),
    "tokens": (
        "LlamaForCausalLM",
        "generation",
        lambda patch: patch.setattr(
            masks.Visible,
            "arguments",
            lambda self, own=masks.Visible.arguments: own(self._replace(left=2)),
        ),
    ),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_the_sweep_detects_sabotage(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check fails if the behavior it covers is broken."""
    model, check, sabotage = SABOTAGES[name]
    sabotage(monkeypatch)
    assert sweep.examine(entry(model), check).failures.keys() == {check}

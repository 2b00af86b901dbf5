"""Examples started in the wrong way tell the user what to run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.examples import example

ROOT = Path(__file__).parents[2]


def call(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> Any:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    return example(name).main()


def test_ring_attention_without_torchrun_says_what_to_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: it ended in a PyTorch traceback about MASTER_ADDR or RANK."""
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        call(monkeypatch, "ring_attention")
    message = capsys.readouterr().err
    assert "torchrun --nproc-per-node 4 examples/ring_attention.py" in message


def test_ring_attention_refuses_chunks_of_different_lengths(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit):
        call(monkeypatch, "ring_attention", "--tokens", "510")
    assert "--tokens 510 is not a multiple of the 4 ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [
        ("serve", "transformers", "transformers"),
        ("finetune_trl", "trl", "trl"),
        ("finetune_trl", "datasets", "trl"),
        ("torchtitan_moe", "torchtitan", "torchtitan"),
    ],
)
def test_example_without_its_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, extra: str
) -> None:
    """Regression: each ended in `ModuleNotFoundError`."""
    monkeypatch.setitem(sys.modules, module, None)
    for variable in ("HF_HUB_OFFLINE", "ACCELERATE_USE_CPU"):  # examples set them; monkeypatch restores them
        monkeypatch.setenv(variable, "1")
    with pytest.raises(SystemExit, match=rf"examples/{name}.py needs .*: pip install -e \"\.\[{extra}\]\""):
        example(name)


def test_train_moe_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "a.json").write_text(json.dumps({}))
    with pytest.raises(SystemExit, match=r'--plot needs matplotlib: pip install -e "\.\[plot\]"'):
        call(monkeypatch, "train_moe", "--plot", "curves.png", str(tmp_path / "a.json"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--steps 0", "argument --steps: 0 is not a positive number"),
        ("--heads 3", "--hidden 256 is not a multiple of twice the --heads 3"),
        ("--top-k 9", "--top-k 9 is more than the --experts 8"),
        ("--plot x.png missing.json", "there is no file missing.json: --json missing.json writes it"),
        ("--json /dev/null/x.json", "--json /dev/null/x.json cannot be written"),
    ],
)
def test_train_moe_refuses_what_cannot_run_before_it_reads_the_text(
    arguments: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: each ended in a traceback, the unwritable file's only after the whole run."""
    with pytest.raises(SystemExit):
        call(monkeypatch, "train_moe", *arguments.split())
    assert said in capsys.readouterr().err


def test_train_moe_by_default_is_the_short_run() -> None:
    """Regression: without arguments it trained for ten minutes. The recorded runs use --steps 600."""
    train_moe = example("train_moe")
    seconds_per_step = max(
        run["seconds"] / run["config"]["steps"]
        for run in (
            json.loads((ROOT / f"docs/runs/{recipe}.json").read_text()) for recipe in ("bf16", "fp32")
        )
    )
    assert train_moe.Config().recipe == "bf16"
    assert train_moe.Config().steps * seconds_per_step < 120.0
    assert "Weft has none" not in train_moe.__doc__

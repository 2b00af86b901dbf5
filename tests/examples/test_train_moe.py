"""The training example learns, resumes with the bits of an uninterrupted run, and divides its work over ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.examples import example, run_ranks

ROOT = Path(__file__).parents[2]
TINY = {"layers": 1, "hidden": 128, "heads": 2, "experts": 4, "width": 128, "sequence": 64, "sequences": 4}


train_moe = example("train_moe")


def tiny(**changes: Any) -> Any:
    """Return a configuration that trains in a few seconds."""
    return train_moe.Config(**{"recipe": "fp32", "steps": 6, "validate_every": 2, **TINY, **changes})


def test_command_writes_what_it_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [word for name, size in TINY.items() for word in (f"--{name}", str(size))]
    file = tmp_path / "runs/fp32.json"
    command = ["train_moe.py", "--recipe", "fp32", "--steps", "12", "--validate-every", "5", *sizes]
    monkeypatch.setattr(sys, "argv", [*command, "--json", str(file)])
    train_moe.main()
    assert "fp32: validation loss" in capsys.readouterr().out
    run = json.loads(file.read_text())
    assert run["config"] == {"seed": 0, "top_k": 2, "learning_rate": 2e-3} | run["config"] | TINY
    assert len(run["train"]) == 12
    assert [step for step, _ in run["validation"]] == [5, 10, 12]
    # An untrained model has a loss of log(256) = 5.5; one that knows the frequency of each byte has about 3.5.
    assert 5.3 < run["train"][0] < 5.8
    assert run["validation"][-1][1] < 4.5
    assert run["seconds"] > 0.0
    # At least the block's input and output, in fp32.
    assert run["saved_bytes"] > 2 * 4 * 64 * 128 * 4


def test_recipes_and_seeds_see_the_same_text() -> None:
    text = train_moe.standard_library()
    assert all(len(part) > 500_000 for part in text)
    assert 0.03 < len(text.validation) / len(text.train) < 0.3
    first, again, other = (
        train_moe.batch(text.train, tiny(recipe=recipe), seed=seed, ranks=train_moe.Ranks())
        for recipe, seed in (("fp32", 3), ("fp8_block", 3), ("fp32", 4))
    )
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1]), "the target is the next byte"
    halves = [
        train_moe.batch(text.train, tiny(), seed=3, ranks=train_moe.Ranks(rank, 2))[0] for rank in range(2)
    ]
    assert torch.equal(torch.stack(halves, 1).flatten(0, 1), first[0]), "ranks divide the batch"


def test_interrupted_run_resumes_with_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, ranks = tiny(seed=1), train_moe.Ranks()
    uninterrupted = train_moe.train(config, ranks)
    batch = train_moe.batch

    def stopped(text: Any, config: Any, *, seed: int, ranks: Any) -> Any:
        if seed == (config.seed << 32) + 5:
            raise KeyboardInterrupt
        return batch(text, config, seed=seed, ranks=ranks)

    monkeypatch.setattr(train_moe, "batch", stopped)
    with pytest.raises(KeyboardInterrupt):
        train_moe.train(config, ranks, checkpoint=tmp_path)
    monkeypatch.setattr(train_moe, "batch", batch)
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]
    resumed = train_moe.train(config, ranks, checkpoint=tmp_path)
    assert resumed["train"] == uninterrupted["train"]
    assert resumed["validation"] == uninterrupted["validation"]
    with pytest.raises(SystemExit, match="another configuration"):
        train_moe.train(tiny(seed=2), ranks, checkpoint=tmp_path)


@pytest.mark.slow
def test_compiled_blocks_compute_the_same() -> None:
    config, ranks = tiny(steps=2), train_moe.Ranks()
    eager, compiled = (train_moe.train(config, ranks, compiled=on)["train"] for on in (False, True))
    # Fused arithmetic rounds differently: by a few times fp32's 2^-24 in a loss of 5.
    assert compiled == pytest.approx(eager, rel=1e-4)
    torch.compiler.reset()


@pytest.mark.slow
def test_two_ranks_train_the_same_model(tmp_path: Path) -> None:
    """FSDP2 runs through torchrun, and one process resumes from the checkpoint of two ranks."""
    config = tiny()
    alone = train_moe.train(config, train_moe.Ranks())
    flags = [
        word
        for name, value in {**TINY, "recipe": "fp32", "steps": 6, "validate-every": 2}.items()
        for word in (f"--{name}", str(value))
    ]
    outputs = ["--json", str(tmp_path / "two.json"), "--checkpoint", str(tmp_path / "two")]
    run_ranks("train_moe", *flags, *outputs, ranks=2)
    two = json.loads((tmp_path / "two.json").read_text())
    # Each rank's balance loss covers its own tokens, which changes the curve slightly from the second step on.
    assert two["train"][0] == pytest.approx(alone["train"][0], rel=1e-5)
    assert two["train"] == pytest.approx(alone["train"], rel=5e-3)
    resumed = train_moe.train(config, train_moe.Ranks(), checkpoint=tmp_path / "two")
    assert resumed["train"] == two["train"]


def test_plot_draws_every_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for recipe, end in (("bf16", 2.0), ("fp8_block", 2.1)):
        run = {"config": {"recipe": recipe}, "train": [5.0, 3.0, end], "validation": [[2, 3.0], [3, end]]}
        (tmp_path / f"{recipe}.json").write_text(json.dumps(run))
    train_moe.plot(tmp_path / "curves.png", sorted(tmp_path.glob("*.json")))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")

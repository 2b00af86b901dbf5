"""Launch choices: which of three places answers, which files are refused, and that what is tuned is launched."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft import aot
from weft.lab.checks import accuracy
from weft.lab.families import for_op
from weft.lab.tuning import asked
from weft.runtime import TARGETS, Capabilities, catalogue, choices, choosing_for, devices, recording
from weft.runtime.capabilities import Tuned
from weft.runtime.choices import TilesError, path_for, read, tuned_for, write

ROWS = ("norm.rows", (256, 1))  # what a norm of 256 columns asks for


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where tuned files lie, and nothing that was read before."""
    kept = (tuned_for, devices.of_device, devices.of_target)

    def forget() -> None:
        for cached in kept:
            cached.cache_clear()

    monkeypatch.setenv("WEFT_CHOICES", str(tmp_path))
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


def tuned(path: Path, target: str = "cpu", device: str = "", **fields: int) -> Path:
    write(path, target, device, {ROWS: {"config": fields or {"tile": 128}}})
    return path


def this_cpu() -> Path:
    return path_for(devices.device_name(torch.device("cpu")))


def tiles(target: str = "cpu") -> list[int]:
    """Of the variants of a norm."""
    with recording(target) as variants:
        weft.rms_norm(torch.empty(4, 256, device="meta"))
    return [dict(variant.constants)["TILE"] for variant in variants]  # type: ignore[misc]


# ---- three places -----------------------------------------------------------------------------------------


def test_every_op_makes_choices() -> None:
    """On an sm_90, by its workloads: nothing is launched that no file can change."""
    target = Capabilities.of("sm_90")
    for op in catalogue:
        found: set[str] = set()
        for workload in for_op(op)[:3]:
            with recording("sm_90"):
                found |= {name for name, _ in asked(workload.make("meta"), target)}
        assert found or not for_op(op), op


def test_what_is_asked_is_a_config_within_its_limits() -> None:
    for target in (*TARGETS, "cpu"):
        for op in catalogue:
            if not for_op(op) or not for_op(op)[0].runs_on(target):
                continue
            with recording(target):
                keys = asked(for_op(op)[0].make("meta"), Capabilities.of(target))
            for name, facts in keys:
                one = choices.choices[name]
                one.check(one.fields_of(one.default(facts, Capabilities.of(target))))


def test_rules_that_are_shipped_are_read() -> None:
    shipped = {name for name, one in choices.choices.items() if one.rules}
    assert shipped == {"attention", "matmul.many"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"config": ["m", "n", "num_warps"]}, "zip"),
        ({"rules": [{"when": {"size": 1}, "targets": {}}]}, "has no fact size"),
        ({"rules": [{"when": {}, "targets": {"sm_1": [64, 64, 4, 1]}}]}, "unknown target 'sm_1'"),
        ({"rules": [{"when": {}, "targets": {"": [48, 64, 4, 1]}}]}, "m of attention must be a power of two"),
        (
            {"rules": [{"when": {}, "targets": {"": ["64", 64, 4, 1]}}]},
            "must be a power of two from 16 to 256",
        ),
        (
            {"rules": [{"when": {}, "targets": {"": [64, 64, 4, 9]}}]},
            "num_stages of attention must be an integer",
        ),
    ],
)
def test_a_mistake_in_rules_is_named(changed: dict[str, Any], said: str) -> None:
    table = {
        "config": ["m", "n", "num_warps", "num_stages"],
        "rules": [{"when": {}, "targets": {"": [64, 64, 4, 1]}}],
    }
    one = choices.choices["attention"]
    assert len(choices._rules(one, table, Path("choices.json"))) == 1
    with pytest.raises(TilesError, match=said):
        choices._rules(one, table | changed, Path("choices.json"))


def test_a_choice_has_one_name() -> None:
    with pytest.raises(ValueError, match="two choices"):
        choices.choice("norm.rows")(lambda target: None)


# ---- files ------------------------------------------------------------------------------------------------


def test_what_is_tuned_is_launched_and_right(folder: Path) -> None:
    before = tiles()
    with choosing_for(devices.of_device(torch.device("cpu"))):
        assert tiles() == before == [256]
    tuned(this_cpu(), device=devices.device_name(torch.device("cpu")))
    for cached in (tuned_for, devices.of_device, devices.of_target):
        cached.cache_clear()
    assert tiles() == [128]
    launched: list[int] = []
    with weft.runtime.observing(lambda launch, *call: launched.append(launch.constants["TILE"])):
        y = weft.rms_norm(torch.ones(3, 256))
    assert launched == [128]
    assert torch.allclose(y, torch.ones(3, 256))
    assert tiles("sm_90") == [256], "the file of a device is not that of another target"


def test_a_workload_passes_its_check_with_what_is_tuned() -> None:
    workload = next(w for w in for_op("norm") if w.cols == 2048)
    target = replace(
        Capabilities.of("cpu"), tuned=Tuned({("norm.rows", (2048, 1)): {"tile": 256, "rows": 2}})
    )
    with choosing_for(target):
        accuracy(workload)


def test_round_trip(folder: Path) -> None:
    path = tuned(folder / "some.json", rows=2, tile=512)
    other = ("norm.backward", (256,))
    write(path, "cpu", "", {other: {"config": {"tile": 64}, "gain": 1.2}})
    header, entries = read(path)
    assert header["target"] == "cpu"
    assert {key: entry["config"] for key, entry in entries.items()} == {
        ROWS: {"rows": 2, "tile": 512},
        other: {"tile": 64},
    }
    assert entries[ROWS]["facts"] == {"cols": 256, "smallest_tile": 1}
    write(path, "cpu", "", {other: None})
    assert read(path)[1].keys() == {ROWS}
    assert [file.name for file in folder.iterdir() if not file.name.endswith(".lock")] == ["some.json"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda found: "{", "is no file of `weft tune`"),
        (lambda found: [], "is no file of `weft tune`"),
        (lambda found: found | {"schema": 99}, "another format: 99"),
        (lambda found: found | {"triton": "2.0"}, r"another Triton: 2\.0"),
        (lambda found: found | {"sources": "?"}, "another Weft"),
        (lambda found: found | {"choices": {"nothing": []}}, "there is no choice 'nothing'"),
        (lambda found: _config(found, {"size": 1}), "norm.rows has no field 'size'"),
        (lambda found: _config(found, {"tile": 100}), "must be a power of two"),
        (lambda found: _config(found, {"tile": 1 << 20}), "from 64 to 16384"),
        (lambda found: _config(found, {"tile": True}), "must be a power of two"),
        (
            lambda found: found | {"choices": {"norm.rows": [{"facts": {"cols": 1}, "config": {}}]}},
            "the facts of",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning(damage: Any, said: str, folder: Path) -> None:
    path = tuned(this_cpu(), device=devices.device_name(torch.device("cpu")))
    found = damage(json.loads(path.read_text()))
    path.write_text(found if isinstance(found, str) else json.dumps(found))
    tuned_for.cache_clear()
    devices.of_device.cache_clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            weft.rms_norm(torch.ones(2, 256))
        assert devices.of_device(torch.device("cpu")).tuned.path is None
    (one,) = warned
    with pytest.raises(TilesError, match=said):
        read(path)
    assert "run `weft tune` again, or remove it" in str(one.message)


def _config(found: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    found["choices"]["norm.rows"][0]["config"] = fields
    return found


def test_a_file_that_is_written_again_keeps_nothing_of_another_weft(folder: Path) -> None:
    path = tuned(folder / "old.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sources": "?"}))
    write(path, "cpu", "", {("norm.backward", (256,)): {"config": {"tile": 64}}})
    assert read(path)[1].keys() == {("norm.backward", (256,))}


def test_devices_have_files_of_their_own(folder: Path) -> None:
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
    for device, tile in zip(names, (128, 64), strict=True):
        tuned(path_for(device), "sm_90", device, tile=tile)
    assert len({path_for(device) for device in names}) == 2
    found = [tuned_for("sm_90", device).find(*ROWS) for device in names]
    assert found == [{"tile": 128}, {"tile": 64}]
    assert tuned_for("sm_90", "NVIDIA H800").find(*ROWS) is None
    assert tuned_for("sm_90").find(*ROWS) is None, "a target has no file in a folder"


def test_an_empty_variable_means_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = devices.device_name(torch.device("cpu"))
    tuned(this_cpu(), device=name)
    tuned_for.cache_clear()
    assert tuned_for("cpu", name).entries
    monkeypatch.setenv("WEFT_CHOICES", "")
    tuned_for.cache_clear()
    assert not tuned_for("cpu", name).entries
    with pytest.raises(TilesError, match="unset it"):
        path_for(name)


def test_many_processes_write_one_file(folder: Path) -> None:
    path, children = folder / "shared.json", []
    for number in range(8):
        child = os.fork()
        if not child:
            for cols in range(10):
                write(path, "cpu", "", {("norm.rows", (10 * number + cols, 1)): {"config": {"tile": 64}}})
            os._exit(0)
        children.append(child)
    assert all(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children)
    assert {facts[0] for _, facts in read(path)[1]} == set(range(80))


# ---- bundles ----------------------------------------------------------------------------------------------


def test_a_bundle_has_what_a_named_file_chooses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CHOICES", str(tuned(folder / "h100.json", "sm_90", "NVIDIA H100")))
    devices.of_target.cache_clear()
    tuned_for.cache_clear()
    calls = [lambda: weft.rms_norm(torch.empty(4, 256, device="meta"))]
    (variant,) = aot.variants_of(calls, "sm_90")
    assert dict(variant.constants)["TILE"] == 128
    (variant,) = aot.variants_of(calls, "sm_80")
    assert dict(variant.constants)["TILE"] == 256


def test_what_is_missing_names_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tuned(this_cpu(), device=devices.device_name(torch.device("cpu")), tile=64)
    for cached in (tuned_for, devices.of_device, devices.of_target):
        cached.cache_clear()
    monkeypatch.setenv("WEFT_NO_JIT", "1")
    monkeypatch.setattr(weft.runtime.launch.bundle, "find", lambda *call: None)
    from weft.ops.norm.kernels import norm_kernel

    monkeypatch.setattr(norm_kernel, "variants", {})
    weft.runtime.Launch.of.cache_clear()
    with pytest.raises(RuntimeError, match=f"`WEFT_CHOICES={path} weft aot build --target cpu .*--op norm"):
        weft.rms_norm(torch.ones(2, 256, dtype=torch.float16))


def test_a_file_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that somebody mistyped; the folder that is looked into unasked may well be missing."""
    monkeypatch.setenv("WEFT_CHOICES", str(tmp_path / "no-such-file.json"))
    choices.tuned_for.cache_clear()
    with pytest.warns(UserWarning, match=r"WEFT_CHOICES=.*no-such-file.json names no file and no folder"):
        assert choices.tuned_for("cpu", "some device") is choices.NOTHING_TUNED
    monkeypatch.delenv("WEFT_CHOICES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))
    choices.tuned_for.cache_clear()
    assert choices.tuned_for("cpu", "some device") is choices.NOTHING_TUNED
    choices.tuned_for.cache_clear()

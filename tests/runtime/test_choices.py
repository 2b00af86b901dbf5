"""Launch choices: which of three sources answers, which files are refused, and that tuned choices are launched."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from weft import aot
from weft.lab.checks import accuracy
from weft.lab.families import OPS, for_op
from weft.lab.tuning import asked
from weft.runtime import GPUS, Capabilities, choices, choosing_for, devices, recording
from weft.runtime.capabilities import Tuned
from weft.runtime.choices import TilesError, path_for, read, tuned_for, write

ROWS = ("norm.rows", (256, 1))  # the choice and facts of a norm of 256 columns


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of tuned files, with all caches cleared."""
    caches = (tuned_for, devices.of_device, devices.of_target)

    def forget() -> None:
        for cached in caches:
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
    """Return the tiles of the variants that a norm launches."""
    with recording(target) as variants:
        weft.rms_norm(torch.empty(4, 256, device="meta"))
    return [dict(variant.constants)["TILE"] for variant in variants]  # type: ignore[misc]


# ---- three sources ----------------------------------------------------------------------------------------


def test_every_op_makes_choices() -> None:
    """On sm_90 every op asks for a choice in its workloads: a file can change every launch."""
    target = Capabilities.of("sm_90")
    for op in OPS:
        names: set[str] = set()
        for workload in for_op(op)[:3]:
            with recording("sm_90"):
                names |= {name for name, _ in asked(workload.make("meta"), target)}
        assert names, op


def test_default_configs_are_within_their_limits() -> None:
    for target in (*GPUS, "cpu"):
        for op in OPS:
            if not for_op(op)[0].runs_on(target):
                continue
            with recording(target):
                keys = asked(for_op(op)[0].make("meta"), Capabilities.of(target))
            for name, facts in keys:
                one = choices.choices[name]
                one.check(one.fields_of(one.default(facts, Capabilities.of(target))))


@pytest.mark.parametrize(
    ("version", "target", "family"),
    [((11, 0), "sm_110", "sm_100"), ((10, 3), "sm_103", "sm_100"), ((12, 1), "sm_121", "sm_120")],
)
def test_relatives_have_the_choices_of_their_family(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], target: str, family: str
) -> None:
    """A device has its family's tiles, whether the table has a row of its own for it or it is newer than the table."""
    properties = SimpleNamespace(major=version[0], minor=version[1], multi_processor_count=20, name="GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    facts = devices.facts_of.__wrapped__(torch.device("cuda"))
    assert (facts.target, facts.family, facts.multiprocessors) == (target, family, 20)
    for kind in ("half", "fp8", "mx8", "mx4"):
        assert choices.choices["matmul.many"].default((kind,), facts) == choices.choices[
            "matmul.many"
        ].default((kind,), Capabilities.of(family))


def test_shipped_rules_are_read() -> None:
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
def test_mistakes_in_rules_are_named(changed: dict[str, Any], said: str) -> None:
    table = {
        "config": ["m", "n", "num_warps", "num_stages"],
        "rules": [{"when": {}, "targets": {"": [64, 64, 4, 1]}}],
    }
    one = choices.choices["attention"]
    assert len(choices._rules(one, table, Path("choices.json"))) == 1
    with pytest.raises(TilesError, match=said):
        choices._rules(one, table | changed, Path("choices.json"))


def test_a_choice_is_declared_once() -> None:
    with pytest.raises(ValueError, match="is declared twice"):
        choices.choice("norm.rows")(lambda target: None)


# ---- files ------------------------------------------------------------------------------------------------


def test_tuned_choices_are_launched_and_correct(folder: Path) -> None:
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
    assert tiles("sm_90") == [256], "the file of a device does not serve another target"


def test_a_workload_passes_its_check_with_tuned_choices() -> None:
    workload = next(w for w in for_op("norm") if w.cols == 2048)
    target = replace(
        Capabilities.of("cpu"), tuned=Tuned({("norm.rows", (2048, 1)): {"tile": 256, "rows": 2}})
    )
    with choosing_for(target):
        accuracy(workload)


def test_files_round_trip(folder: Path) -> None:
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
        (lambda content: "{", "is not a file of `weft tune`"),
        (lambda content: [], "is not a file of `weft tune`"),
        (lambda content: content | {"schema": 99}, "another format: 99"),
        (lambda content: content | {"triton": "2.0"}, r"another Triton: 2\.0"),
        (lambda content: content | {"sources": "?"}, "another Weft"),
        (lambda content: content | {"choices": {"nothing": []}}, "there is no choice 'nothing'"),
        (lambda content: _config(content, {"size": 1}), "norm.rows has no field 'size'"),
        (lambda content: _config(content, {"tile": 100}), "must be a power of two"),
        (lambda content: _config(content, {"tile": 1 << 20}), "from 64 to 16384"),
        (lambda content: _config(content, {"tile": True}), "must be a power of two"),
        (
            lambda content: content | {"choices": {"norm.rows": [{"facts": {"cols": 1}, "config": {}}]}},
            "the facts of",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning(damage: Any, said: str, folder: Path) -> None:
    path = tuned(this_cpu(), device=devices.device_name(torch.device("cpu")))
    content = damage(json.loads(path.read_text()))
    path.write_text(content if isinstance(content, str) else json.dumps(content))
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
    assert "run `weft tune` again or remove it" in str(one.message)


def _config(content: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    content["choices"]["norm.rows"][0]["config"] = fields
    return content


def test_rewriting_a_file_drops_entries_of_another_weft(folder: Path) -> None:
    path = tuned(folder / "old.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sources": "?"}))
    write(path, "cpu", "", {("norm.backward", (256,)): {"config": {"tile": 64}}})
    assert read(path)[1].keys() == {("norm.backward", (256,))}


def test_devices_have_separate_files(folder: Path) -> None:
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
    for device, tile in zip(names, (128, 64), strict=True):
        tuned(path_for(device), "sm_90", device, tile=tile)
    assert len({path_for(device) for device in names}) == 2
    configs = [tuned_for("sm_90", device).find(*ROWS) for device in names]
    assert configs == [{"tile": 128}, {"tile": 64}]
    assert tuned_for("sm_90", "NVIDIA H800").find(*ROWS) is None
    assert tuned_for("sm_90").find(*ROWS) is None, "a folder has no file of a target"


def test_an_empty_variable_disables_tuning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = devices.device_name(torch.device("cpu"))
    tuned(this_cpu(), device=name)
    tuned_for.cache_clear()
    assert tuned_for("cpu", name).entries
    monkeypatch.setenv("WEFT_CHOICES", "")
    tuned_for.cache_clear()
    assert not tuned_for("cpu", name).entries
    with pytest.raises(TilesError, match="unset it"):
        path_for(name)


def test_concurrent_processes_write_one_file(folder: Path) -> None:
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


def test_a_bundle_uses_the_choices_of_a_named_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CHOICES", str(tuned(folder / "h100.json", "sm_90", "NVIDIA H100")))
    devices.of_target.cache_clear()
    tuned_for.cache_clear()
    calls = [lambda: weft.rms_norm(torch.empty(4, 256, device="meta"))]
    (variant,) = aot.variants_of(calls, "sm_90")
    assert dict(variant.constants)["TILE"] == 128
    (variant,) = aot.variants_of(calls, "sm_80")
    assert dict(variant.constants)["TILE"] == 256


def test_the_error_of_a_missing_kernel_names_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_missing_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped path warns; the default folder may be missing without a warning."""
    monkeypatch.setenv("WEFT_CHOICES", str(tmp_path / "no-such-file.json"))
    choices.tuned_for.cache_clear()
    with pytest.warns(UserWarning, match=r"WEFT_CHOICES=.*no-such-file.json is neither a file nor a folder"):
        assert choices.tuned_for("cpu", "some device") is choices.NOTHING_TUNED
    monkeypatch.delenv("WEFT_CHOICES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))
    choices.tuned_for.cache_clear()
    assert choices.tuned_for("cpu", "some device") is choices.NOTHING_TUNED
    choices.tuned_for.cache_clear()

"""`weft tune`: candidates that are refused, candidates that win, and the file written."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft.cli import main
from weft.lab.bench.clocks import Times
from weft.lab.calls import returned
from weft.lab.commands import tune
from weft.lab.compiled import Binary
from weft.lab.families import Call, for_op
from weft.lab.model import BOARDS, Tile, latency_stretch, tile_stretch
from weft.lab.tuning import Candidate, asked, default_of, why_not
from weft.runtime import Capabilities
from weft.runtime.choices import choices, read

WORKLOAD = for_op("dequantize")[0]  # 2048 columns
KEY = ("quantize", ("dequantize", 2048))
CPU = Capabilities.of("cpu")
SMALL = ("--op", "dequantize", "--most", "0.05")


def taking(monkeypatch: pytest.MonkeyPatch, **milliseconds: float) -> list[int]:
    """Replace timing by the given milliseconds for a candidate's tile, named tile_512; others take 10."""
    sizes: list[int] = []

    def times(candidates: Sequence[Candidate], call: Call) -> list[Times]:
        sizes.append(len(candidates))
        durations = [milliseconds.get(f"tile_{each.fields['tile']}", 10.0) for each in candidates]
        return [Times(0.99 * each, each, 1.01 * each) for each in durations]

    monkeypatch.setattr(tune, "_times", times)
    return sizes


def test_tuning_runs_on_this_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without stand-ins: candidates are built, judged and timed."""
    monkeypatch.setattr(tune, "ROUNDS", 5)
    out = tmp_path / "choices.json"
    assert main(["tune", *SMALL, "--out", str(out)]) == 0
    header, _ = read(out)
    assert header["target"] == "cpu"
    assert header["device"].startswith("cpu")
    said = capsys.readouterr().out
    assert "measured on cpu" in said
    assert "0 of 1 choices" in said or "1 of 1 choices" in said


def test_a_faster_candidate_wins_and_the_search_continues_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = taking(monkeypatch, tile_512=8.0, tile_256=6.0)
    out = tmp_path / "choices.json"
    assert main(["tune", *SMALL, "--out", str(out)]) == 0
    entry = read(out)[1][KEY]
    assert entry["config"]["tile"] == 256
    assert entry["instead_of"]["tile"] == 1024
    assert entry["gain"] == pytest.approx(10 / 6, rel=1e-3)
    assert (entry["how"], entry["workload"]) == ("measured", str(WORKLOAD))
    assert sizes[-1] == 2, "the best was not timed again against only the default"
    # Another run in which nothing is faster removes the entry.
    taking(monkeypatch, tile_512=9.8)
    assert main(["tune", *SMALL, "--out", str(out)]) == 0
    assert read(out)[1] == {}


def test_a_candidate_that_fails_a_check_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.lab import tuning

    taking(monkeypatch, tile_512=5.0)

    def fails(workload: Any) -> None:
        raise AssertionError("a byte beside the result was written")

    monkeypatch.setitem(tuning.CHECKS, "guard_bands", fails)
    out = tmp_path / "choices.json"
    assert main(["tune", *SMALL, "--out", str(out)]) == 0
    assert read(out)[1] == {}


# ---- judging ----------------------------------------------------------------------------------------------


def test_other_bits_are_refused_if_bits_are_promised() -> None:
    """A reordered sum may differ in its last bit, but the scales and codes derived from it may not."""
    x = torch.randn(2, 128, 128, generator=torch.Generator().manual_seed(1))
    workload = for_op("multi_tensor_reduce")[0]

    def codes(x: torch.Tensor) -> Any:
        return weft.quantize(x[0] * weft.grad_norm([x]), "row")

    def number(x: torch.Tensor) -> Any:
        return weft.grad_norm([x])

    for function, refused in ((codes, True), (number, False)):
        call = Call(function, {"x": x})
        key = next(key for key in asked(call, CPU) if key[:1] == ("multi_tensor",) and "reduce" in key[1])
        default = default_of(key, CPU)
        wanted = returned(call)
        assert why_not(default, workload, call, wanted) == ""
        other = Candidate.of(key, default.config._replace(tile=256), CPU)
        assert not torch.equal(number(x), other.running(lambda: number(x))()), "the sum has the same bits"
        reason = why_not(other, workload, call, wanted)
        assert ("bits that are promised" in reason) == refused, reason


def test_a_wrong_candidate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    call = WORKLOAD.make(rows=4)
    default = default_of(KEY, CPU)
    wanted = returned(call)
    assert why_not(default, WORKLOAD, call, wanted) == ""
    rolled = {name: value.roll(1, 0) for name, value in wanted.items()}
    assert "far from the default's" in why_not(default, WORKLOAD, call, rolled)
    impossible = Candidate.of(KEY, default.config._replace(tile=128, rows=3), CPU)
    assert why_not(impossible, WORKLOAD, call, wanted), "tiles of three rows cannot be compiled"


def test_candidates_are_near_and_within_limits() -> None:
    one = choices["norm.rows"]
    for target, fields in (("sm_90", {"rows", "tile", "num_warps"}), ("cpu", {"rows", "tile"})):
        config = one.default((4096, 1), Capabilities.of(target))
        near = list(one.near(config, Capabilities.of(target)))
        assert len(near) == len(set(near)) >= 3
        for other in near:
            changed = {name for name in config._fields if getattr(other, name) != getattr(config, name)}
            assert len(changed) == 1
            assert changed <= fields
            one.check(one.fields_of(other))


# ---- modelled ---------------------------------------------------------------------------------------------

GOOD = Binary("sm_90", 40, 0, 0, 0, {128: 64}, {128: 64}, False, (), 0.1, Counter({"LDG.E.128": 64}))


def test_a_target_is_modelled_and_spilling_candidates_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is compiled: two warps spill, and eight have more loads in flight."""

    def compile_all(jobs: Sequence[Any], **options: Any) -> list[Binary]:
        binaries = []
        for variant, _ in jobs:
            few = variant.num_warps == 2
            loads = {128: 64} if variant.num_warps == 8 else {128: 1}
            binaries.append(replace(GOOD, loads=loads, spill_bytes=64 * few, stack=64 * few, registers=255))
        return binaries

    monkeypatch.setattr(tune, "compile_all", compile_all)
    monkeypatch.setattr("weft.lab.compiled.binaries._narrow", lambda *call: [])
    assert main(["tune", "--op", "dequantize", "--target", "sm_90"]) == 0
    said = capsys.readouterr().out
    assert "modelled for sm_90" in said
    assert "Nothing is written" in said
    out = tmp_path / "choices.json"
    assert main(["tune", "--op", "dequantize", "--target", "sm_90", "--out", str(out)]) == 0
    header, entries = read(out)
    assert (header["target"], header["device"]) == ("sm_90", "")
    (entry,) = entries.values()
    assert entry["config"]["num_warps"] == 8
    assert entry["how"] == "modelled"
    assert json.loads(out.read_text())["file"] == "weft tiles"


def test_the_model_prefers_more_loads_in_flight_and_larger_tiles() -> None:
    board = BOARDS["H100"]
    more, less = (replace(GOOD, loads={128: number}) for number in (4, 1))
    assert latency_stretch(board, less, 10**6, 1, 128) > latency_stretch(board, more, 10**6, 1, 128) >= 1
    assert latency_stretch(board, more, 8 * 132 + 1, 8, 128) > latency_stretch(board, more, 8 * 132, 8, 128)
    assert (
        tile_stretch(board, "bf16", Tile(32, 32, 64)) > tile_stretch(board, "bf16", Tile(128, 256, 64)) == 1
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--op", "nothing"], "there is no op 'nothing'"),
        (["--workload", "nothing"], "no workload has 'nothing' in its name"),
        (["--target", "sm_90", "--device", "cuda"], "give --device, which is measured, or --target"),
        (["--op", "rope"], "WEFT_CHOICES is empty"),
    ],
)
def test_arguments_that_cannot_be_tuned_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = [] if arguments == ["--op", "rope"] else ["--out", "/dev/null"]
    assert main(["tune", *arguments, *out]) == 2
    assert said in capsys.readouterr().err

"""Bundles of compiled kernels: they serve without a compiler, and mismatches are refused with a reason."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_loom.testing import Forks, launching_nothing

import weft
from tests.support import IMPORTED
from weft import aot
from weft.cli import main
from weft.lab.families import for_op
from weft.runtime import bundle as bundles
from weft.runtime import choosing_for, launch
from weft.runtime.variant import triton_target

SERVE = """
import os, sys, torch, triton, weft

def refuse(*args, **kwargs):
    raise AssertionError("a kernel is compiled")

triton.compile = refuse
y = weft.quantize(torch.arange(256.0).view(2, 128), "1x128")
torch.save(y.rowwise, sys.argv[1])
print(*os.listdir(os.environ["TRITON_CACHE_DIR"]))
"""


@pytest.fixture(scope="module")
def bundle_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a CPU bundle with what one call launches."""
    path = tmp_path_factory.mktemp("bundle") / "quantize.weft"
    x = torch.empty(2, 128, device="meta")
    aot.build(path, "cpu", aot.variants_of([lambda: weft.quantize(x, "1x128")], "cpu"))
    path.chmod(0o444)
    return path


def test_a_fresh_process_compiles_nothing(bundle_path: Path, tmp_path: Path) -> None:
    (script := tmp_path / "serve.py").write_text(SERVE)
    (cache := tmp_path / "cache").mkdir()
    environment = {"WEFT_BUNDLE": str(bundle_path), "WEFT_NO_JIT": "1", "TRITON_CACHE_DIR": str(cache)}
    done = Forks(*IMPORTED).run(script, tmp_path / "y.pt", **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "loom\n", "Triton's cache has more than the file that Loom loads the kernel from"
    got = torch.load(tmp_path / "y.pt", weights_only=False)
    wanted = weft.quantize(torch.arange(256.0).view(2, 128), "1x128").rowwise
    assert torch.equal(got.data.view(torch.uint8), wanted.data.view(torch.uint8))
    assert torch.equal(got.scale, wanted.scale)


def test_a_missing_kernel_names_its_key_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_NO_JIT", "1")
    monkeypatch.setattr(launch.bundle, "find", lambda *call: None)
    from weft.ops.glu.kernels import glu_kernel

    monkeypatch.setattr(glu_kernel, "variants", {})
    launch.Launch.of.cache_clear()
    with pytest.raises(
        RuntimeError, match=r"`weft aot build --target cpu .*--op glu .*The variant is [0-9a-f]{16}$"
    ):
        weft.glu(torch.randn(3, 34, dtype=torch.float16))


def test_kernels_of_a_gpu_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that launches nothing gets sm_90 binaries from the bundle, without a single compilation."""
    path, x = tmp_path / "sm_90.weft", torch.randn(8, 256, dtype=torch.bfloat16)
    calls = [lambda: weft.rms_norm(x.to("meta"))]
    loaded = aot.load(aot.build(path, "sm_90", aot.variants_of(calls, "sm_90")).path)
    monkeypatch.setattr(launch, "build", lambda *call: pytest.fail("a kernel is compiled"))
    try:
        with launching_nothing(), choosing_for("sm_90"):
            weft.rms_norm(x)
        assert loaded.served == 1
    finally:
        aot.unload(loaded)


def rewritten(path: Path, to: Path, **changed: Any) -> Path:
    """Copy a bundle with changes to its manifest."""
    with zipfile.ZipFile(path) as file, zipfile.ZipFile(to, "w") as copy:
        for name in file.namelist():
            content = file.read(name)
            if name == "manifest.json":
                content = json.dumps(json.loads(content) | changed).encode()
            copy.writestr(name, content)
    return to


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"schema": 99}, "has format 99; this Weft reads format 1"),
        (
            {"triton": "2.0"},
            r"was built with Triton 2\.0, but .* is installed; .*weft aot build --target cpu",
        ),
        ({"sources": "?"}, r"was built by another Weft \(.*\); build it again"),
    ],
)
def test_a_bundle_of_another_version_is_refused(
    changed: dict[str, Any], said: str, bundle_path: Path, tmp_path: Path
) -> None:
    with pytest.raises(aot.BundleError, match=said):
        aot.load(rewritten(bundle_path, tmp_path / "other.weft", **changed))


def test_a_file_that_is_not_a_bundle_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "no.weft").write_text("no")
    for path in (file, tmp_path / "absent.weft"):
        with pytest.raises(aot.BundleError, match="is not a bundle of Weft"):
            aot.load(path)
    assert main(["aot", "inspect", str(file)]) == 1
    assert "is not a bundle" in capsys.readouterr().err


def test_another_processor_and_damage_are_detected(bundle_path: Path, tmp_path: Path) -> None:
    x = torch.empty(2, 128, device="meta")
    (variant,) = aot.variants_of([lambda: weft.quantize(x, "1x128")], "cpu")
    from weft.ops.quantize.kernels import quantize_rows_kernel as kernel

    cpu = triton_target("cpu")
    assert bundles.Bundle.open(bundle_path).find(kernel.fn, variant, cpu) is not None
    other = aot.load(rewritten(bundle_path, tmp_path / "other.weft", platform="a machine from 1999"))
    aot.unload(other)
    with pytest.raises(aot.BundleError, match="another processor"):
        other.find(kernel.fn, variant, cpu)
    manifest = json.loads(zipfile.ZipFile(bundle_path).read("manifest.json"))
    for entry in manifest["kernels"].values():
        entry["files"] = dict.fromkeys(entry["files"], "0")
    damaged = bundles.Bundle.open(rewritten(bundle_path, tmp_path / "damaged.weft", **manifest))
    with pytest.raises(aot.BundleError, match="is damaged"):
        damaged.find(kernel.fn, variant, cpu)


def test_the_command_builds_and_inspects_a_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made.weft"
    arguments = ["--workload", str(for_op("dequantize")[0]), "--out", str(out)]
    assert main(["aot", "build", "--target", "cpu", *arguments]) == 0
    assert main(["aot", "inspect", str(out)]) == 0
    assert capsys.readouterr().out.count("dequantize_kernel") == 2
    assert main(["aot", "build", "--target", "cpu", "--op", "nothing", "--out", str(out)]) == 2
    assert main(["aot", "build", "--target", "cpu", "--workload", "nothing", "--out", str(out)]) == 2


def test_keys_have_no_addresses() -> None:
    """Everything that determines a kernel has the same text in every process."""
    from weft.lab.compiled.binaries import collected
    from weft.lab.families import distinct

    keys = {bundles.key_of(variant) for variant in collected(distinct(), "sm_90")}
    assert len(keys) > 400


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(os, "fork"), reason="processes are forked")
def test_forked_processes_share_a_bundle(bundle_path: Path) -> None:
    """Each process reads for itself: no file position is shared."""
    x = torch.empty(2, 128, device="meta")
    (variant,) = aot.variants_of([lambda: weft.quantize(x, "1x128")], "cpu")
    from weft.ops.quantize.kernels import quantize_rows_kernel as kernel

    opened, cpu = bundles.Bundle.open(bundle_path), triton_target("cpu")
    children = []
    for _ in range(8):
        child = os.fork()
        if not child:
            served = all(opened.find(kernel.fn, variant, cpu) is not None for _ in range(5))
            os._exit(0 if served else 1)
        children.append(child)
    assert all(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children)

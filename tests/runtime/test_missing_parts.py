"""A machine without Triton, Loom or a compiler: every op runs in plain PyTorch, and one warning says so."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from triton_loom.testing import Forks

from tests.support import IMPORTED
from tests.support.absent import without

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's driver serves")

ALL_WORKS = """
import torch, weft
from weft import layouts
assert not any(name in sys.modules for name in missing)
x = torch.randn(5, 200, requires_grad=True)
y, h = weft.rms_norm(x, torch.ones(200), residual=x)
y.sum().backward()
assert x.grad is not None
q = weft.rms_norm(x, quantize="nvfp4", columnwise=True)
assert q.dequantize().shape == (5, 200)
for format in ("1x128", "128x128", "mx", "row", "tensor"):
    assert (weft.quantize(x, format, columnwise=True).dequantize() - x).abs().max() < 0.3
compiled = torch.compile(lambda x: weft.rms_norm(x), fullgraph=True, backend="aot_eager")
assert torch.equal(compiled(x), weft.rms_norm(x))
try:
    with weft.backend("triton"):
        weft.rms_norm(x)
except RuntimeError as error:
    assert "triton" in str(error)
    print("done")
"""

# Prints the warnings of calls that fall back to plain PyTorch unasked, and the error of a call that must not.
WARNED = """
import threading, warnings
import torch, weft
x = torch.randn(5, 200, requires_grad=True)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    with weft.backend("reference"):
        wanted = weft.rms_norm(x)
    weft.rms_norm(torch.empty(3, 64, device="meta"))
    assert not seen, "nobody asked for a kernel"
    y = weft.rms_norm(x)
    y.sum().backward()
    thread = threading.Thread(target=weft.quantize, args=(x.detach(),))
    thread.start()
    thread.join()
    compiled = torch.compile(lambda x: weft.rms_norm(x), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), y)
assert torch.equal(y, wanted)
for warning in seen:
    print(warning.category.__name__, warning.message)
try:
    with weft.backend("triton"):
        weft.rms_norm(x)
except RuntimeError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Fork a process for programs that may find everything imported."""
    with Forks(*IMPORTED, PYTHONPATH=os.pathsep.join(sys.path)) as forks:
        yield forks


@pytest.fixture(scope="module")
def forks_of_torch() -> Iterator[Forks]:
    """Fork a process for programs that import Weft themselves."""
    with Forks("torch") as forks:
        yield forks


def test_everything_works_without_triton(tmp_path: Path, forks_of_torch: Forks) -> None:
    (script := tmp_path / "script.py").write_text(without(("triton", "triton_loom"), ALL_WORKS))
    done = forks_of_torch.run(script)
    assert done.stdout == "done\n", done.stderr


@NO_GPU
@pytest.mark.parametrize(
    ("missing", "environment", "reason"),
    [
        (("triton_loom",), {}, "install Loom, `pip install .*`, and a C\\+\\+ compiler"),
        (("triton", "triton_loom"), {}, "Triton is missing or does not import; `weft doctor` says what to install"),
        ((), {"TRITON_INTERPRET": "1"}, "TRITON_INTERPRET=1 disables kernels; unset it"),
        ((), {"PATH": "", "CXX": ""}, "Loom turns Triton kernels into C\\+\\+ and found no compiler(.|\n)*apt install"),
        ((), {"PATH": "", "CXX": "/nonexistent"}, "CXX=/nonexistent names no program that can be run: unset it"),
    ],
    ids=["loom", "triton", "interpreter", "compiler", "wrong-compiler"],
)  # fmt: skip
def test_ops_in_plain_pytorch_warn_once_and_say_what_is_missing(
    tmp_path: Path, forks: Forks, forks_of_torch: Forks, missing: tuple[str, ...],
    environment: dict[str, str], reason: str,
) -> None:  # fmt: skip
    """Neither ops inside `weft.backend("reference")` nor meta tensors cause a warning."""
    (script := tmp_path / "script.py").write_text(without(missing, WARNED) if missing else WARNED)
    imports = missing or "TRITON_INTERPRET" in environment  # detected while Weft is imported
    done = (forks_of_torch if imports else forks).run(script, CC="", **environment)
    assert done.returncode == 0, done.stderr
    warning, _, error = done.stdout.partition(
        "backend('triton') was asked for, but no Triton driver launches on 'cpu': "
    )
    assert warning.count("RuntimeWarning") == 1
    assert re.match(
        "RuntimeWarning Weft's ops on cpu tensors run in plain PyTorch .WEFT_BACKEND=reference does so without "
        f"this warning.\\. For kernels: {reason}",
        warning,
    )
    assert re.match(reason, error)

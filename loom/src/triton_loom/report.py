"""`python -m triton_loom report script.py`: run a script unchanged, then report what its kernels did.

For each kernel: its launches, the bytes it read and wrote, its compile and run times, and whether the
sanitizer found something; then every finding, and the bytes of each tensor.
"""

from __future__ import annotations

import runpy
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import count, sanitize
from .tables import in_units, table
from .witness.counters import ArgumentCount, LaunchCount, Traffic
from .witness.sanitizer import Sanitizer


def run(script: str, arguments: Sequence[str], device: str | None = None) -> int:
    """Run a script as `python script` would, print the report, and return an exit code.

    The code is 1 if there are findings, else the script's own. With `device="cpu"`, tensors that the script puts on
    a GPU are put on the CPU.
    """
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)  # as Python sets it for a script
    code = 0
    with (
        sanitize(collect=True) as seen,
        count() as counted,
        timed() as times,
        redirected() if device == "cpu" else nullcontext(),
    ):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException as error:
            traceback.print_exception(error.with_traceback(_script_traceback(error)))
            if "CUDA" in str(error) and device is None:
                print(NO_GPU.format(script=script), file=sys.stderr)
            code = 1
    sys.stdout.flush()
    print(text(counted.launches, seen, times))
    return 1 if seen.findings else code


NO_GPU = """
The script needs a GPU, but Loom runs its kernels on the CPU. Create the tensors on the CPU, or redirect them with:
    python -m triton_loom report --device cpu {script}"""


def _script_traceback(error: BaseException) -> Any:
    """Return the script's part of a traceback."""
    trace = error.__traceback__
    while trace is not None and (
        "runpy" in trace.tb_frame.f_code.co_filename or trace.tb_frame.f_globals is globals()
    ):
        trace = trace.tb_next
    return trace


# ---- report -----------------------------------------------------------------------------------------------


@dataclass
class Times:
    """Seconds, by kernel name."""

    compiling: dict[str, float] = field(default_factory=dict)  # no entry for kernels from Triton's cache
    running: dict[str, float] = field(default_factory=dict)


def text(launches: Sequence[LaunchCount], seen: Sanitizer, times: Times) -> str:
    """Return the report."""
    findings = seen.findings
    if not launches:
        return "\n".join(["", "no Triton kernel was launched", *map(str, findings), seen.summary])
    kernels: dict[str, list[LaunchCount]] = {}
    for launch in launches:
        kernels.setdefault(launch.kernel, []).append(launch)
    rows = [("kernel", "launches", "read", "written", "compiled", "ran", "verdict")]
    for kernel, kernel_launches in kernels.items():
        rows.append(
            (
                kernel,
                f"{len(kernel_launches):,}",
                in_units(sum(launch.loads.distinct for launch in kernel_launches)),
                in_units(sum(launch.stores.distinct for launch in kernel_launches)),
                f"{times.compiling[kernel]:.2f} s" if kernel in times.compiling else "cached",
                f"{1e3 * times.running.get(kernel, 0):,.3g} ms",
                _verdict(kernel, seen),
            )
        )
    tensors: list[tuple[str, ...]] = [
        ("bytes moved", "", "requested", "distinct", "per program", "per launch")
    ]
    for kernel, kernel_launches in kernels.items():
        tensors.append((kernel, *[""] * 5))
        for name in dict.fromkeys(name for launch in kernel_launches for name in launch.arguments):
            counts = [launch.arguments[name] for launch in kernel_launches if name in launch.arguments]
            for direction, traffic in _directions(counts):
                tensors.append((f"  {name}", direction, *map(in_units, traffic)))
    programs = sum(x * y * z for x, y, z in (launch.grid for launch in launches))
    summary = f"{len(launches):,} launches, {programs:,} programs, "
    summary += f"{sum(launch.dot_flops for launch in launches):,} flops in dots, {len(findings)} findings"
    notes = [
        "compiled and ran: with every access checked and counted, which takes several times as long",
        "per program, per launch: sum of the 32-byte sectors that each touches",
    ]
    lines = ["", *table(rows, "<>>>>><"), "", *map(str, findings), *[""] * bool(findings)]
    return "\n".join([*lines, *table(tensors, "<<>>>>"), "", *notes, summary, seen.summary])


def _verdict(kernel: str, seen: Sanitizer) -> str:
    """Summarize all launches of a kernel: the number of findings, else the worst verdict."""
    if findings := sum(finding.kernel == kernel for finding in seen.findings):
        return f"{findings} finding{'s' * (findings > 1)}"
    outcomes = {verdict.outcome for verdict in seen.verdicts if verdict.kernel == kernel}
    return "not checked" if not outcomes or "not checked" in outcomes else "clean"


def _directions(counts: list[ArgumentCount]) -> Iterator[tuple[str, Traffic]]:
    for direction in ("loads", "stores"):
        traffic = Traffic()
        for argument_count in counts:
            traffic = traffic.plus(getattr(argument_count, direction))
        if traffic.requested:
            yield direction, traffic


# ---- times --------------------------------------------------------------------------------------------------


@contextmanager
def timed() -> Iterator[Times]:
    """Time compilations and launches inside a `with` block, by Triton's own hooks."""
    from triton import knobs

    times, started = Times(), [0.0]

    def compiled(*, src: Any, metadata: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            _add(seconds.compiling, metadata["name"], times.total / 1e6)

    def enter(_: Any) -> None:
        started[0] = time.perf_counter()

    def leave(launch: Any) -> None:
        _add(times.running, launch.get()["name"], time.perf_counter() - started[0])

    seconds, previous_listener = times, knobs.compilation.listener
    knobs.compilation.listener = compiled
    knobs.runtime.launch_enter_hook.add(enter)
    knobs.runtime.launch_exit_hook.add(leave)
    try:
        yield times
    finally:
        knobs.compilation.listener = previous_listener
        knobs.runtime.launch_enter_hook.remove(enter)
        knobs.runtime.launch_exit_hook.remove(leave)


def _add(sums: dict[str, float], name: str, seconds: float) -> None:
    sums[name] = sums.get(name, 0.0) + seconds


# ---- scripts written for a GPU ---------------------------------------------------------------------------------


@contextmanager
def redirected() -> Iterator[None]:
    """Create tensors on the CPU inside a `with` block where a GPU is requested, and keep CPU tensors there.

    Waiting for the GPU returns at once. `torch.cuda.is_available()` remains False, and so does `is_cuda` of a
    tensor.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    def on_cpu(value: Any) -> Any:
        if isinstance(value, str) and value.split(":")[0] == "cuda":
            return "cpu"
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value

    class Redirect(TorchFunctionMode):
        def __torch_function__(
            self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function is torch.Tensor.cuda:
                return args[0]
            redirected_kwargs = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
            return function(*map(on_cpu, args), **redirected_kwargs)

    synchronize = torch.cuda.synchronize
    torch.cuda.synchronize = lambda device=None: None
    try:
        with Redirect():
            yield
    finally:
        torch.cuda.synchronize = synchronize

"""`weft doctor`: show what this machine has, what runs where, whether it works, and how to fix what does not.

Everything is gathered first into a `Report` of plain data, each question separately so that one failure leaves the
other answers standing. The table on the screen and `--json` show the same report.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from typing import Any, Literal, TypeVar

import torch
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .. import __version__, backend, language, quantize, rms_norm
from ..ops.attention.engines import attention_on
from ..ops.product.engines import products_on
from ..runtime import capabilities_of, launch_device, loom
from ..runtime.environment import VARIABLES as VARIABLES_OF_WEFT
from ..runtime.environment import is_on
from .needs import missing, try_to_write
from .screen import plain_table

T = TypeVar("T")

SUPPORTED_TRITON = ("3.7", "3.10")  # from the first version, below the second

# Variables that change how kernels are compiled or found. No others are reported.
VARIABLES = (
    "CC",
    "CUDA_VISIBLE_DEVICES",
    "CXX",
    "HIP_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "ROCR_VISIBLE_DEVICES",
)
PREFIXES = ("TRITON_", "WEFT_", "LOOM_")


@dataclass
class Fact:
    """Fact about the machine."""

    name: str
    value: str
    ok: bool = True


@dataclass
class Device:
    """Device, and the implementations that serve it."""

    name: str  # PyTorch's name: cpu, cuda:0
    hardware: str
    runs: str
    fp8: str
    products: str = "reference"  # the engines of products
    attention: str = "reference"  # the engine of attention
    capabilities: dict[str, Any] | None = None


@dataclass
class Check:
    """Self-test of one op on one device."""

    device: str
    op: str
    ok: bool
    first_ms: float | None = None
    second_ms: float | None = None
    error: str = ""


@dataclass
class Advice:
    """Advice on something that is broken, meaning present but not working, or merely missing."""

    what: str
    command: str
    broken: bool
    optional: bool = False  # only commands that few people run need it


@dataclass
class Cache:
    path: str
    bytes: int = 0
    complete: bool = True  # whether all files were counted
    writable: bool = False
    problem: str = ""


@dataclass
class Report:
    weft: str = __version__
    facts: list[Fact] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    advice: list[Advice] = field(default_factory=list)
    cache: Cache | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        return all(check.ok for check in self.checks) and not any(advice.broken for advice in self.advice)


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what this machine has, what runs where, and what to fix",
        description="Show what this machine has, what runs where, and what to fix. "
        "The exit code is 0 if everything that is present works.",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON, for a bug report")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    report = examine()
    if args.json:
        print(json.dumps({**asdict(report), "healthy": report.healthy}, indent=2))
    else:
        Console().print(render(report))
    return 0 if report.healthy else 1


# ---- gathering --------------------------------------------------------------------------------------------


def examine() -> Report:
    """Gather the report. Raises nothing: whatever fails is part of the report."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", loom.DETOUR)  # the report says so
        return _examine()


def _examine() -> Report:
    report = Report()
    report.environment = {
        name: value
        for name, value in sorted(os.environ.items())
        if name in VARIABLES or name.startswith(PREFIXES)
    }
    for question in (_software, _loom, _driver, _cache, _devices, _packages, _environment, _self_test):
        try:
            question(report)
        except Exception as error:
            name = question.__name__.strip("_").replace("_", "-")
            report.facts.append(Fact(name, f"could not be examined: {_full_text(error)}", ok=False))
            report.advice.append(Advice(f"{name} could not be examined", "weft doctor --json", broken=True))
    return report


def _software(report: Report) -> None:
    report.facts.append(
        Fact("Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    )
    build = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "CPU build"
    )
    report.facts.append(Fact("torch", f"{torch.__version__}, {build}"))
    if not (torch.version.cuda or torch.version.hip):
        if os.path.exists("/dev/nvidia0"):
            report.advice.append(
                Advice(
                    "There is an NVIDIA GPU, but torch was built without CUDA",
                    f"{loom.pip()} install --force-reinstall torch",
                    broken=False,
                )
            )
        elif os.path.exists("/dev/kfd"):
            report.advice.append(
                Advice(
                    "There is an AMD GPU, but torch was built without ROCm: choose a build",
                    "https://pytorch.org/get-started/locally",
                    broken=False,
                )
            )
    requirement = f"'triton>={SUPPORTED_TRITON[0]},<{SUPPORTED_TRITON[1]}'"
    if not (language.usable() or language.INTERPRETED):
        reason = (
            "not installed"
            if importlib.util.find_spec("triton") is None
            else "installed, but does not import"
        )
        report.facts.append(Fact("Triton", reason, ok=reason == "not installed"))
        report.advice.append(
            Advice(
                "Without Triton everything runs in plain PyTorch",
                f"{loom.pip()} install {requirement}",
                broken=reason != "not installed",
            )
        )
        return
    version = metadata.version("triton")
    supported = _number(SUPPORTED_TRITON[0]) <= _number(version) < _number(SUPPORTED_TRITON[1])
    note = (
        ""
        if supported
        else f"; tested versions are {SUPPORTED_TRITON[0]} and later, below {SUPPORTED_TRITON[1]}"
    )
    report.facts.append(Fact("Triton", version + note, ok=supported))
    if not supported:
        report.advice.append(
            Advice(f"Triton {version} is not tested", f"{loom.pip()} install {requirement}", broken=False)
        )


def _loom(report: Report) -> None:
    if not loom.is_installed():
        report.facts.append(Fact("Loom", "not installed"))
        return
    report.facts.append(Fact("Loom", metadata.version("triton-loom")))
    if not language.TRITON:
        return
    from triton_loom.device import toolchain

    try:
        command = toolchain.compiler()
    except toolchain.BuildError as error:
        report.facts.append(Fact("C++ compiler", str(error), ok=False))
        wrong = os.environ.get("CXX", "").strip()
        what = f"CXX={wrong} is not a compiler" if wrong else "Loom found no C++ compiler"
        report.advice.append(
            Advice(
                f"{what}, so ops on CPU tensors run in plain PyTorch",
                "unset CXX" if wrong else _install_compiler(),
                broken=True,
            )
        )
        return
    report.facts.append(Fact("C++ compiler", shlex.join(command)))


def _driver(report: Report) -> None:
    if not language.TRITON:
        return
    from triton.runtime import driver

    try:
        active = driver.active
        target = active.get_current_target()
    except Exception as error:
        several = "0 active" not in str(error)  # a machine without a GPU has none at all
        report.facts.append(
            Fact("Triton driver", "none: " + _full_text(error) if several else "none", ok=not several)
        )
        chosen = os.environ.get("TRITON_DEFAULT_BACKEND")
        if chosen:
            report.advice.append(
                Advice(
                    f"TRITON_DEFAULT_BACKEND={chosen} is not a driver", "unset TRITON_DEFAULT_BACKEND", True
                )
            )
        elif several:
            report.advice.append(
                Advice("Triton has several drivers", "export TRITON_DEFAULT_BACKEND=nvidia", True)
            )
        return
    # Triton calls a compute capability 90, everyone else sm_90.
    arch = f"sm_{target.arch}" if isinstance(target.arch, int) else target.arch
    report.facts.append(Fact("Triton driver", f"{type(active).__name__}: {target.backend}, {arch}"))


def _cache(report: Report) -> None:
    if not language.TRITON:
        return
    from triton import knobs

    cache = report.cache = Cache(str(knobs.cache.dir))
    cache.bytes, cache.complete = _size(cache.path)
    try:
        try_to_write(cache.path)
        cache.writable = True
    except OSError as error:
        cache.problem = error.strerror or str(error)
    if cache.writable and os.path.isdir(cache.path) and loom.is_installed():
        from triton_loom.device import storage

        try:
            storage.check_trusted(cache.path)
        except storage.UntrustedCache as error:
            cache.problem = str(error).removeprefix(cache.path).strip().partition(", so Loom")[0]
    size = f"{cache.bytes / 2**20:.1f} MiB" if cache.complete else f"more than {cache.bytes / 2**20:.0f} MiB"
    state = cache.problem or "writable"
    report.facts.append(Fact("Triton cache", f"{cache.path}, {size}, {state}", ok=not cache.problem))
    if not cache.writable:
        what = f"Triton cannot write to its cache: {cache.problem}"
        report.advice.append(Advice(what, "export TRITON_CACHE_DIR=$(mktemp -d)", broken=True))
    elif cache.problem:
        what = f"Loom refuses to run code from a cache that {cache.problem}"
        report.advice.append(Advice(what, f"chmod go-w {shlex.quote(cache.path)}", broken=True))


def _devices(report: Report) -> None:
    served = launch_device()
    with_loom = loom.is_installed()
    cpu = Device(
        "cpu", f"{_processor()}, {torch.get_num_threads()} threads", "reference (PyTorch)", "reference"
    )
    if served == "cpu":
        _describe(cpu, "Triton (Loom)")
    report.devices.append(cpu)
    for index in range(torch.cuda.device_count()):
        gpu = Device(f"cuda:{index}", "", "reference (PyTorch)", "reference")
        report.devices.append(gpu)
        try:
            properties = torch.cuda.get_device_properties(index)
            gpu.hardware = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
            if served == "cuda":
                _describe(gpu, "Triton")
        except Exception as error:
            gpu.runs, gpu.fp8 = "nothing", "none"
            what = str(error) if isinstance(error, RuntimeError) else _full_text(error)
            report.advice.append(
                Advice(f"{gpu.name}: {what}", "with weft.backend('reference'):  # plain PyTorch there", True)
            )
    if language.TRITON and served is None and not with_loom and not torch.cuda.device_count():
        what = "Without a GPU or Loom everything runs in plain PyTorch. To run the kernels on this CPU"
        report.advice.append(Advice(what, loom.install_command(), broken=False))
    elif served == "cuda" and with_loom:
        cpu.runs += "; Triton (Loom) in triton_loom.active()"


def _describe(device: Device, runs: str) -> None:
    can = capabilities_of(torch.device(device.name))
    device.runs = runs if device.name == "cpu" else f"{runs} ({can.target})"
    device.fp8 = "conversion" if can.fp8_cast else "integer"
    device.products = products_on(can.target)
    device.attention = attention_on(can.target)
    device.capabilities = {fact.name: getattr(can, fact.name) for fact in fields(can) if fact.repr}
    if can.tuned.path is not None:
        device.runs += f", tiles of {can.tuned.path}"


def _packages(report: Report) -> None:
    """Advise installing the packages without which commands refuse to run."""
    advised = {advice.command for advice in report.advice}
    for package in missing():
        command = package.install()
        if command not in advised and (
            language.TRITON or package.module != "triton_loom"
        ):  # Loom needs Triton
            report.advice.append(Advice(package.purpose, command, broken=False, optional=package.optional))


def _environment(report: Report) -> None:
    if language.INTERPRETED:
        what = "TRITON_INTERPRET=1 disables Weft's kernels, so everything runs in plain PyTorch"
        report.advice.append(Advice(what, "unset TRITON_INTERPRET", broken=False))
    if is_on("WEFT_NO_JIT"):
        report.facts.append(Fact("WEFT_NO_JIT", "kernels that are not compiled yet are errors"))
        report.advice.append(
            Advice("WEFT_NO_JIT keeps the self-test from compiling", "unset WEFT_NO_JIT", False)
        )
    for name in report.environment:
        if name.startswith("WEFT_") and name not in VARIABLES_OF_WEFT:
            near = difflib.get_close_matches(name, VARIABLES_OF_WEFT, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            report.advice.append(
                Advice(f"Weft does not read the variable {name}{hint}", f"unset {name}", broken=False)
            )


# ---- self-test --------------------------------------------------------------------------------------------


def _self_test(report: Report) -> None:
    for device in report.devices:
        if device.runs == "nothing":
            continue
        for name, test in (("rms_norm", _test_norm), ("quantize 1x128", _test_quantize)):
            check = Check(device.name, name, ok=True)
            report.checks.append(check)
            try:
                test(check, torch.device(device.name))
            except Exception as error:
                check.ok, check.error = False, _full_text(error)
    if any(check.error.startswith("BuildError") for check in report.checks):
        what = "The C++ compiler does not build kernels; its output is above. To install one"
        report.advice.append(Advice(what, _install_compiler(), broken=True))


def _test_norm(check: Check, device: torch.device) -> None:
    x, weight = _test_input().to(device), torch.linspace(0.5, 1.5, 384, device=device)
    y = _timed(check, device, lambda: rms_norm(x, weight))
    exact = x.double()
    exact = exact * torch.rsqrt(exact.square().mean(1, keepdim=True) + 1e-6) * weight.double()
    # Every term of the mean is rounded in fp32 and so is the result: a few units of 6e-8 in total.
    worst = float(((y.double() - exact).abs() / exact.abs().clamp(min=1e-3)).max())
    if not worst < 2e-6:
        check.ok, check.error = False, f"relative error {worst:.1e} against float64; expected at most 2e-6"


def _test_quantize(check: Check, device: torch.device) -> None:
    x = _test_input()
    result = _timed(check, device, lambda: quantize(x.to(device), "1x128", columnwise=True))
    with backend("reference"):
        expected = quantize(x, "1x128", columnwise=True)
    for side in ("rowwise", "columnwise"):
        for part in ("data", "scale"):
            actual, wanted = (getattr(getattr(q, side), part).cpu().contiguous() for q in (result, expected))
            differing = int((actual.view(torch.uint8) != wanted.view(torch.uint8)).sum())
            if differing:
                check.ok, check.error = (
                    False,
                    f"{differing} bytes of the {side} {part} differ from the reference",
                )
                return
    # e4m3 has four significant bits: half a unit in the last place is 1/16. That holds down to its smallest normal
    # value.
    worst = float(((result.dequantize().cpu() - x).abs() / x.abs().clamp(min=0.1)).max())
    if not worst <= 1 / 16:
        check.ok, check.error = False, f"dequantized values have a relative error of {worst:.2f}"


def _test_input() -> torch.Tensor:
    """Return the same values every time, without touching the caller's random state."""
    return torch.randn(256, 384, generator=torch.Generator().manual_seed(0))


def _timed(check: Check, device: torch.device, call: Callable[[], T]) -> T:
    """Return the second result and record the time of both calls: the first compiles, or loads what was compiled
    before."""
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        result = call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - begin) * 1e3)
    check.first_ms, check.second_ms = times
    return result


# ---- answers to small questions ---------------------------------------------------------------------------


def _full_text(error: BaseException) -> str:
    """Return the full text of an error: the cause may be in any of its lines."""
    return f"{type(error).__name__}: {error}".rstrip(": \n")


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def _install_compiler() -> str:
    sudo = "" if getattr(os, "geteuid", lambda: 0)() == 0 else "sudo "
    for tool, command in (
        ("apt-get", f"{sudo}apt-get install g++"),
        ("dnf", f"{sudo}dnf install gcc-c++"),
        ("zypper", f"{sudo}zypper install gcc-c++"),
        ("pacman", f"{sudo}pacman -S gcc"),
        ("xcode-select", "xcode-select --install"),
    ):
        if shutil.which(tool):
            return command
    return "conda install cxx-compiler"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            for line in cpuinfo:
                if line.startswith("model name"):
                    return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _size(path: str, seconds: float = 1.0) -> tuple[int, bool]:
    """Return the size of the files below a directory in bytes, and whether all were counted in time."""
    total, end = 0, time.monotonic() + seconds
    for directory, _, files in os.walk(path):
        for name in files:
            try:
                total += os.lstat(os.path.join(directory, name)).st_size
            except OSError:
                continue
        if time.monotonic() > end:
            return total, False
    return total, True


# ---- the screen -------------------------------------------------------------------------------------------


def render(report: Report) -> Group:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for fact in report.facts:
        facts.add_row(fact.name, Text(fact.value, style="" if fact.ok else "red"))
    for name, value in report.environment.items():
        facts.add_row(name, Text(value))

    devices = _table("device", "hardware", "runs", "FP8 encode")
    engines = _table("device", "products by", "attention by")
    for device in report.devices:
        devices.add_row(*map(Text, (device.name, device.hardware, device.runs, device.fp8)))
        engines.add_row(*map(Text, (device.name, device.products, device.attention)))
    can = [device for device in report.devices if device.capabilities and device.name != "cpu"]

    checks = _table("device", "op", "result", "first call", "second call")
    for check in report.checks:
        result = Text("ok", "green") if check.ok else Text("failed", "red")
        checks.add_row(
            check.device, check.op, result, _milliseconds(check.first_ms), _milliseconds(check.second_ms)
        )
    for column in checks.columns[-2:]:
        column.justify = "right"

    parts: list[Any] = [_title("This machine"), _inset(facts), _title("What runs where"), _inset(devices)]
    parts.append(_inset(engines))
    if can:
        parts.append(_inset(_capabilities(can)))
    parts += [_title("Self-test"), _inset(checks)]
    for error in dict.fromkeys(check.error for check in report.checks if not check.ok):
        parts.append(_inset(Text(error, "red")))
    parts.append(_title("To do"))
    necessary = [advice for advice in report.advice if not advice.optional]
    optional = [advice for advice in report.advice if advice.optional]
    parts += _lines(necessary)
    failed = sum(not check.ok for check in report.checks)
    if failed:
        parts.append(_inset(Text(f"{failed} of {len(report.checks)} self-tests failed.", "red")))
    elif not necessary:
        parts.append(_inset(Text("nothing", "green")))
    if optional:
        parts += [_title("Optional"), *_lines(optional)]
    return Group(*parts)


def _lines(advice: Sequence[Advice]) -> Iterator[Padding]:
    for each in advice:
        yield _inset(Text.assemble((each.what, "red" if each.broken else ""), ":"))
        yield Padding(Text(each.command, "bold"), (0, 0, 0, 6))


def _capabilities(devices: list[Device]) -> Table:
    """Return the capabilities that change kernels, one row per GPU."""
    names: dict[str, Literal["center", "right"]] = {
        "fp8_cast": "center",
        "fp8_dot": "center",
        "mx_dot": "center",
        "nvfp4_dot": "center",
        "descriptors": "center",
        "multiprocessors": "right",
    }
    table = _table("device", *(name.replace("_", " ") for name in names))
    for column, justify in zip(table.columns[1:], names.values(), strict=True):
        column.justify = justify
    for device in devices:
        values = [(device.capabilities or {})[name] for name in names]
        words = [("no", "yes")[v] if isinstance(v, bool) else str(v) for v in values]
        table.add_row(device.name, *words)
    return table


def _table(*headers: str) -> Table:
    table = plain_table()
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def _title(text: str) -> Text:
    return Text(text, "bold cyan")


def _inset(what: Any) -> Padding:
    return Padding(what, (0, 0, 0, 2))


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} ms" if value >= 1 else f"{value * 1e3:.0f} µs"

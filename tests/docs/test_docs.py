"""The documents are run: every Python block, every command that is quick, and "Adding an op" step by step. What takes
long and is tested elsewhere, in other words, is run by night."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

from triton_loom.testing import Forks

import weft.cli
from tests.support import IMPORTED
from website.versions import supported
from weft.quant import CONVENTIONS, Format
from weft.runtime import TARGETS
from weft.workloads import WORKLOADS
from weft.workloads.published import BANDWIDTH, PUBLISHED

ROOT = Path(__file__).parents[2]
README, CONTRIBUTING, CHANGELOG = (ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG"))
FORMATS, PROOF, ROWS, TRAFFIC = (
    ROOT / "docs" / f"{name}.md" for name in ("formats", "proof", "published", "traffic")
)
PAGES = [
    README,
    *sorted((ROOT / "docs").rglob("*.md")),
]  # their Python blocks are scripts; CONTRIBUTING's are parts of files
DOCUMENTS = [*PAGES, CONTRIBUTING]
WITNESS = ROOT / "loom/docs/witness.md"
PROJECTS = {name: tomllib.loads((ROOT / name / "pyproject.toml").read_text()) for name in (".", "loom")}


# A warning is an error, but for one that PyTorch gives when it imports its own Inductor on a CPU.
WARNINGS = ("-W", "error", "-W", "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


class Block(NamedTuple):
    language: str
    text: str
    place: str

    def __str__(self) -> str:
        return self.place


def blocks(document: Path, language: str) -> list[Block]:
    text = document.read_text()
    found = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        assert match[1], f"a block of {document.name} without a language:\n{match[2]}"
        line = text[: match.start()].count("\n") + 2
        found.append(Block(match[1], match[2], f"{document.relative_to(ROOT)}:{line}"))
    return [block for block in found if block.language == language]


def lines(document: Path) -> list[tuple[str, str]]:
    """(command, place) of every line of the bash blocks, split at &&, without comments."""
    return [
        (command.strip(), block.place)
        for block in blocks(document, "bash")
        for line in block.text.splitlines()
        for command in re.sub(r"\s+#.*", "", line).split("&&")
        if command.strip()
    ]


def run(*command: str, forks: Forks | None = None, **environment: str) -> str:
    """What a command prints, run in a checkout: in a new process, or in one of `forks` if it is a Python script."""
    if forks is not None:
        done = forks.run(*command, cwd=ROOT, **environment)
    else:
        env = os.environ | environment
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def program_of(name: str) -> str:
    """The script of that name that belongs to this Python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    assert found is not None
    return found


def run_text(text: str, directory: Path, forks: Forks | None) -> str:
    """What a Python script prints, in which a warning is an error. Kernels have to be defined in a file."""
    script = directory / "script.py"
    script.write_text(text)
    python = [] if forks is not None else [sys.executable, *WARNINGS]
    return run(*python, str(script), forks=forks)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks(*IMPORTED, flags=WARNINGS) as forks:
        yield forks


# ---- Python ------------------------------------------------------------------------------------------------


SCRIPTS = [block for document in (*PAGES, WITNESS) for block in blocks(document, "python")]
DISTRIBUTED = [block for block in SCRIPTS if "init_process_group" in block.text]
# Pages whose blocks run with every change: what a newcomer pastes. Those of the others are for the night.
BY_DAY = ("README.md", "docs/first_contact.md")


def needs(text: str) -> list[pytest.MarkDecorator]:
    """Of a program: what takes long, and is skipped where the framework that it is about is not installed."""
    missing = importlib.util.find_spec("trl") is None
    frameworks = [pytest.mark.slow, pytest.mark.skipif(missing, reason="trl is not installed")]
    return frameworks if re.search(r"(\b|_)trl\b", text) else []


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(
            block,
            marks=needs(block.text)
            if block.place.startswith(BY_DAY)
            else [*needs(block.text), pytest.mark.slow],
        )
        for block in SCRIPTS
        if block not in DISTRIBUTED
    ],
    ids=str,
)
def test_python_block_runs_by_itself(block: Block, tmp_path: Path, forks: Forks) -> None:
    # One with the imports that forks have behind them.
    printed = run_text(block.text, tmp_path, None if block is SCRIPTS[0] else forks)
    # A comment after print says what comes out: the sizes in it must be among the output.
    for comment in re.findall(r"^print\(.*\)  # (.*)$", block.text, re.MULTILINE):
        for size in re.findall(r"\[[\d, ]+\]", comment):
            assert size in printed, f"{block}: {size} is promised, printed was\n{printed}"


@pytest.mark.slow
@pytest.mark.parametrize("block", DISTRIBUTED, ids=str)
def test_distributed_block_runs_on_two_ranks(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block.text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        printed, _ = rank.communicate(timeout=120)
        assert rank.returncode == 0, printed
        for promised in re.findall(r"print\(.*\)  # (.*?)(?: …)?$", block.text, re.MULTILINE):
            assert promised in printed, f"{promised} is promised, printed was\n{printed}"


def test_there_are_python_blocks() -> None:
    assert len(blocks(README, "python")) >= 4
    assert len(blocks(ROOT / "docs/guide.md", "python")) >= 8
    assert DISTRIBUTED


# ---- commands ----------------------------------------------------------------------------------------------

QUICK = ("weft", "python examples/")
# What needs a GPU or compiles for minutes: its arguments are read, and nothing is run.
READ_ONLY = ("weft verify --device cuda", "weft tune --device cuda", "weft aot build --target sm_")
# Commands that count bytes or compile, ranks, and examples whose functions have tests of their own.
BY_NIGHT = (
    "weft traffic",
    "weft published",
    "weft verify",
    "weft bench",
    "weft audit",
    "weft tune",
    "weft aot",
    "weft prove",
    "python examples/sharded_vocabulary.py",
    "python examples/moe_block.py",
    "python examples/train_moe.py",
)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.slow] if command.startswith(BY_NIGHT) else needs(command))
        for command in dict.fromkeys(c for document in DOCUMENTS for c, _ in lines(document))
        if command.startswith(QUICK) and not command.startswith(READ_ONLY)
    ],
)
def test_quick_command_runs(command: str, forks: Forks) -> None:
    program, *arguments = shlex.split(command)
    if command == "weft doctor":  # one command by itself, from the script that pip installs
        assert run(program_of(program), *arguments)
    elif program == "python":
        assert run(*arguments, forks=forks)
    else:
        assert run(program_of(program), *arguments, forks=forks)


def extras(project: str) -> dict[str, list[str]]:
    return dict(PROJECTS[project]["project"].get("optional-dependencies", {}))


def developer_tools() -> set[str]:
    wanted = [r for project in PROJECTS for r in extras(project)["dev"]]
    return {re.split(r"[<>=\[ ]", requirement)[0] for requirement in wanted}


def check_pip(arguments: list[str]) -> None:
    """Projects and extras exist; a pinned version is the one of CI and within the range of the project."""
    assert arguments[0] == "install"
    words = iter(arguments[1:])
    for word in words:
        if word == "--index-url":
            assert next(words).startswith("https://download.pytorch.org/whl/")
        elif word == "-e":
            project, _, wanted = next(words).partition("[")
            assert project in PROJECTS
            for extra in filter(None, wanted.rstrip("]").split(",")):
                assert extra in extras(project)
        else:
            name, _, version = word.partition("==")
            requirements = [*PROJECTS["."]["project"]["dependencies"], "numpy"]  # which PyTorch misses
            assert any(re.match(rf"{name}\b", requirement) for requirement in requirements), word
            if version:
                assert version == supported()[name].tested["main"]


def check_pytest(arguments: list[str]) -> None:
    words = iter(arguments)
    markers = {line.partition(":")[0] for line in PROJECTS["."]["tool"]["pytest"]["ini_options"]["markers"]}
    for word in words:
        if word == "-n":
            assert "pytest-xdist" in developer_tools()
            next(words)
        elif word == "-m":
            assert next(words) in markers
        elif word == "-k":
            next(words)
        else:
            assert (ROOT / word).exists(), word


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_slow_commands_name_what_exists(document: Path) -> None:
    for command, place in lines(document):
        program, *arguments = shlex.split(command)
        if program == "weft":
            weft.cli.parser().parse_args(arguments)
            continue
        if command.startswith(QUICK):
            continue
        if program == "pip":
            check_pip(arguments)
        elif program == "pytest":
            assert "pytest" in developer_tools()
            check_pytest(arguments)
        elif program in ("ruff", "mypy"):
            assert program in developer_tools()
        elif program == "pre-commit":
            assert program in developer_tools()
            assert (ROOT / ".pre-commit-config.yaml").exists()
        elif program in (".ci/run", ".ci/release"):  # tests/runtime/test_project.py
            assert os.access(ROOT / program, os.X_OK)
        elif program == "mkdocs":
            assert arguments[0] in ("serve", "build")
            assert any(requirement.startswith("mkdocs>") for requirement in extras(".")["docs"])
        elif program == "python3":
            assert arguments == ["-m", "venv", ".venv"]
        else:
            assert command == "source .venv/bin/activate", f"{place}: no test knows the command {command!r}"


# ---- what is said --------------------------------------------------------------------------------------------


def anchors(document: Path) -> set[str]:
    """What GitHub calls the headings: in lower case, hyphens for spaces, without punctuation."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", [*DOCUMENTS, CHANGELOG], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith("https://"):
            continue
        path, _, heading = link.partition("#")
        page = document.parent / path if path else document
        assert page.exists(), link
        assert not heading or heading in anchors(page), link
    for path in re.findall(r"`((?:src|loom|tests|examples|\.ci)/[\w./]*)`", text):
        assert (ROOT / path).exists() or "softplus" in path, path


def test_traffic_table_has_every_workload() -> None:
    """Each has its line, with its reason; none moves more than it says."""
    listed = {}
    for line in TRAFFIC.read_text().splitlines():
        if cells := re.match(r"\| `(\S+)` \|.*\| ([\d.]+) \| ([^|]*) \|$", line):
            listed[cells[1]] = float(cells[2]), cells[3].strip()
    for workload in WORKLOADS:
        ratio, reason = listed.pop(str(workload))
        assert reason == workload.rereads, workload
        assert ratio <= workload.moves + 0.0005 or workload.least_bytes() < 64_000, workload
    assert not listed, "lines of workloads that are no more"


def test_published_table_has_every_row() -> None:
    """With its limit and time; none moves more than its workload says. And its speed."""
    counted, measured = (
        {int(cells[0]): cells for cells in table}
        for table in (
            [
                [cell.strip() for cell in line.strip("|").split("|")]
                for line in part.splitlines()
                if line[:3] != "| #"
            ]
            for part in re.findall(r"^\| # .*\n\|-.*\n((?:\|.*\n)+)", ROWS.read_text(), re.MULTILINE)
        )
    )
    assert list(counted) == list(measured) == [row.number for row in PUBLISHED] == list(range(1, 18))
    for row in PUBLISHED:
        workload, cells = row.find(), counted[row.number]
        assert (cells[1], measured[row.number][1]) == (row.title, row.title)
        assert float(cells[2].replace(",", "")) == workload.rows
        assert float(cells[7]) <= workload.moves, row
        limit, published = (float(cell.replace(",", "")) for cell in cells[-3:-1])
        assert limit == round(workload.least_bytes() / BANDWIDTH * 1e6, 1)
        assert published == row.microseconds
        assert float(measured[row.number][5]) >= 0.8


def rows(document: Path, heading: str) -> Iterator[list[str]]:
    """The cells of the document's table under the header line that begins like this."""
    text = document.read_text()
    table = text[text.index(f"| {heading} |") :].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def test_table_of_formats() -> None:
    stated = {}
    for block, _, elements, scale in rows(FORMATS, "block"):
        formats = [f for f in Format.all() if f.block == block.strip("`")]
        stated[block.strip("`")] = set(re.findall(r"`(\w+)`", elements))
        assert stated[block.strip("`")] == {f.element for f in formats}
        kinds = {"float32": "fp32", "float8_e8m0fnu": "e8m0", "float8_e4m3fn": "e4m3"}
        assert scale.startswith(kinds[str(formats[0].scale_dtype).removeprefix("torch.")])
        if formats[0].scale_dtype.itemsize == 4:
            assert bool(Format(formats[0].block).power_of_two) == ("power of two" in scale)
    assert stated.keys() == {f.block for f in Format.all()}


def test_table_of_conventions() -> None:
    stated = set()
    for name, floor, scale, data, on in rows(FORMATS, "convention"):
        rule = CONVENTIONS[name.strip("`")]
        stated.add(rule.name)
        assert (float(floor), scale.replace("MAX", "max"), data.replace("MAX", "max")) == (
            rule.amax_floor,
            rule.scale,
            rule.data,
        )
        every = {f.block for f in Format.all()}
        fp32 = {f.block for f in Format.all() if f.scale_dtype.itemsize == 4}
        others = {block for block in every if not block.startswith("nvfp4")}
        meant = {"all": every, "all but both `nvfp4`": others, "fp32 scales": fp32}[on]
        assert {f.block for f in Format.all() if f.convention == rule.name} == meant
    assert stated == set(CONVENTIONS)


def test_table_of_ops() -> None:
    """It has every function of the package that computes, and no other."""
    listed = [name for cells in rows(README, "op") for name in re.findall(r"`(\w+)`", cells[0])]
    public = {name for name in weft.__all__ if inspect.isfunction(getattr(weft, name))}
    assert len(listed) == len(set(listed))
    assert set(listed) == public - {
        "backend",
        "capture",
        "compile_pass",
        "set_backend",
        "scale_from_amax",
        "glu_backward",
        "record_engines",
        "reuse_weights",
    }


def test_targets_and_places_for_figures() -> None:
    text = PROOF.read_text()
    assert ", ".join(TARGETS) in text
    assert len(TARGETS) == 7
    assert "seven GPU targets" in README.read_text()
    for place in ("speed", "host"):
        assert text.index(f"<!-- {place} -->") < text.index(f"<!-- /{place} -->")


def test_geometric_mean_is_that_of_the_table() -> None:
    speeds = [float(cells[-1]) for cells in rows(PROOF, "op")]
    mean = f"{statistics.geometric_mean(speeds):.2f}"
    assert f"Geometric mean of the last column {mean}," in PROOF.read_text()
    assert f"{mean} times `torch.compile`" in README.read_text()


# ---- "Adding an op" --------------------------------------------------------------------------------------------


def apply_diff(block: Block, root: Path) -> None:
    """Lines with - become the lines with + that follow; + alone comes after the line before it."""
    first, *rest = block.text.splitlines()
    path = root / first.removeprefix(" # ")
    text = path.read_text().splitlines()
    at = 0
    for line in rest:
        sign, content = line[0], line[1:]
        if sign == "+":
            text.insert(at, content)
            at += 1
            continue
        assert content in text, f"{block}: {path.name} has no line {content!r} any more"
        at = text.index(content)
        if sign == "-":
            del text[at]
        else:
            at += 1
    path.write_text("\n".join(text) + "\n")


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with the op that CONTRIBUTING.md adds."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__", ".*"))
    files: dict[str, str] = {}
    for block in blocks(CONTRIBUTING, "python"):
        first, _, text = block.text.partition("\n")
        path, _, continued = first.removeprefix("# ").partition(", ")
        assert path.startswith("src/weft/"), f"{block}: the first line names the file"
        assert (path in files) == (continued == "continued"), f"{block}: {first}"
        files[path] = files[path] + "\n\n" + text if continued else text
    assert len(files) == 3
    for path, text in files.items():
        assert not (root / path).exists()
        (root / path).write_text(text)
    for block in blocks(CONTRIBUTING, "diff"):
        apply_diff(block, root)
    return root


@pytest.fixture(scope="module")
def extended_forks(extended: Path) -> Iterator[Forks]:
    """Of a Python that has imported the copy."""
    with Forks(*IMPORTED, flags=WARNINGS, PYTHONPATH=path_of(extended)) as forks:
        yield forks


def path_of(root: Path) -> str:
    return os.pathsep.join([str(root / "src"), str(ROOT), str(ROOT / "loom" / "tests")])


def test_added_op_is_in_style(extended: Path) -> None:
    for path in ("ops/glu/softplus_gate.py", "workloads/softplus_gate.py", "ops/scale_rows.py"):
        file = str(extended / "src" / "weft" / path)
        settings = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", file]
        run(sys.executable, "-m", "ruff", "check", *settings)
        run(sys.executable, "-m", "ruff", "format", "--check", *settings)


# What holds for any op with a reference: judged by the reference in float64, differentiated by autograd.
ADDED = """
import torch
from triton_loom.testing import EPS32, assert_rounded_once
from torch.library import opcheck

import weft
from weft.workloads import for_op

assert "checkout" in weft.__file__, weft.__file__
op = weft.catalogue["softplus_gate"]
assert weft.catalogue["softplus_gate_backward"] and op.differentiable
for workload in for_op("softplus_gate"):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        call = workload.make(rows=3, dtype=dtype).requiring_grad()
        y = call()
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        gradients = torch.autograd.grad(y, list(call.tensors().values()), dy)
        exact = [t.detach().double().requires_grad_() for t in call.tensors().values()]
        truth = op.reference(op.arguments.build(*exact)).y
        wanted = [truth, *torch.autograd.grad(truth, exact, dy.double())]
        for got, right in zip([y, *gradients], wanted, strict=True):
            # exp, log, a quotient and three products.
            assert_rounded_once(got, right, 8 * EPS32 * right.detach().abs())

gate, x = (torch.randn(3, 40, dtype=torch.float64, requires_grad=True) for _ in range(2))
torch.autograd.gradcheck(weft.ops.softplus_gate, (gate, x))
gate, x = (torch.randn(5, 40, requires_grad=True) for _ in range(2))
opcheck(op.overload, (gate, x))
compiled = torch.compile(weft.ops.softplus_gate, fullgraph=True, backend="aot_eager")
for function in (weft.ops.softplus_gate, compiled):
    grads = torch.autograd.grad(function(gate, x).square().sum(), (gate, x))
    if function is compiled:
        assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))
    before = grads
assert torch.equal(compiled(gate, x), weft.ops.softplus_gate(gate, x))
special = torch.tensor([float("inf"), -float("inf"), float("nan"), -90.0, 90.0])
ones = torch.ones(5)
got, right = weft.ops.softplus_gate(special, ones), op.reference(op.arguments.build(special, ones)).y
torch.testing.assert_close(got, right, rtol=1e-6, atol=0, equal_nan=True)
assert weft.ops.softplus_gate(gate[:0], x[:0]).shape == (0, 40)
assert torch.equal(weft.ops.softplus_gate(gate.t(), x.t()), weft.ops.softplus_gate(gate, x).t())
print("proven")
"""


def test_added_op_is_right(extended_forks: Forks, tmp_path: Path) -> None:
    assert run_text(ADDED, tmp_path, extended_forks).endswith("proven\n")


QUANTISED = """
import warnings

import torch

import weft
from triton_loom.testing import EPS32, assert_rounded_once, words
from weft.ops.scale_rows import scale_rows

generator = torch.Generator().manual_seed(2)
for shape in ((5, 7, 200), (3, 256), (33, 1), (0, 64)):
    x = torch.randn(shape, generator=generator).bfloat16()
    factor = torch.randn(shape[:-1], generator=generator)
    factor.view(-1)[:1] = float("inf")
    assert torch.equal(scale_rows(x, factor), (x.float() * factor[..., None]).bfloat16())
    # By registers and by way of fp32; the formats of either kind differ in `quantize` alone.
    for format in ("1x128", "mx", "row", "tensor", "128x128", "nvfp4") if x.dim() == 3 else ("1x128", "tensor"):
        for columnwise in (False, True) if format != "row" else (False,):
            q = scale_rows(x, factor, quantize=format, columnwise=columnwise)
            wanted = weft.quantize(x.float() * factor[..., None], format, columnwise=columnwise)
            for copy, right in ((q.rowwise, wanted.rowwise), (q.columnwise, wanted.columnwise)):
                for got, part in zip(copy or (), right or (), strict=True):
                    assert got is part is None or torch.equal(words(got), words(part)), format
warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's own, when it traces a torch.autograd.Function
x, factor = torch.randn(6, 96, requires_grad=True), torch.randn(6, requires_grad=True)
for function in (scale_rows, torch.compile(scale_rows, fullgraph=True, backend="aot_eager")):
    for format in (None, "1x128"):
        y = function(x, factor, quantize=format)
        y = y if format is None else y.dequantize()
        dx, dfactor = torch.autograd.grad(y.sum(), (x, factor))
        assert torch.equal(dx, factor[:, None].expand(6, 96))
        total = x.double().sum(1)
        assert_rounded_once(dfactor, total, 96 * EPS32 * x.double().abs().sum(1))
print("proven")
"""


@pytest.mark.slow
def test_added_quantising_op_is_right(extended_forks: Forks, tmp_path: Path) -> None:
    assert run_text(QUANTISED, tmp_path, extended_forks).endswith("proven\n")


BINARIES = """
import torch

import weft
from weft.runtime import Binary, compile_all, recording
from weft.workloads import for_op


def main():
    jobs = []
    for target in ("sm_90", "gfx942"):
        with recording(target) as variants:
            for op in ("softplus_gate", "softplus_gate_backward"):
                for_op(op)[0].make("meta")()
        jobs += [(variant, target) for variant in variants]
    assert len(jobs) == 4
    for binary in compile_all(jobs):
        assert isinstance(binary, Binary), binary
        assert set(binary.loads) == set(binary.stores) == {128}, binary
        assert binary.spill_bytes == 0 and not binary.uses_fp64, binary
    print("compiled")


if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_added_op_compiles_for_gpus(extended_forks: Forks, tmp_path: Path) -> None:
    assert run_text(BINARIES, tmp_path, extended_forks).endswith("compiled\n")


def test_added_op_inherits_every_check(extended: Path) -> None:
    (command,) = [c for c, _ in lines(CONTRIBUTING) if c.startswith("pytest tests/catalogue")]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    printed = run(sys.executable, "-m", *shlex.split(command), *options, PYTHONPATH=path_of(extended))
    passed = re.search(r"(\d+) passed", printed)
    assert passed, printed
    assert int(passed[1]) > 10, printed
    assert "skipped" not in printed, printed

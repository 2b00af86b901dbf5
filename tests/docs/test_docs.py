"""Run the documents: every Python block and every quick command by day, the rest by night."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shlex
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

from triton_loom.testing import Forks

import weft.cli
from tests.support import IMPORTED
from website.versions import supported
from weft.lab.families import WORKLOADS
from weft.lab.published import BANDWIDTH, PUBLISHED
from weft.quant import CONVENTIONS, Format
from weft.runtime import TARGETS

from .pages import (
    ADDING,
    CHANGELOG,
    CONTRIBUTING,
    README,
    ROOT,
    WARNINGS,
    WRITING,
    Block,
    blocks,
    guide,
    lines,
    program_of,
    run,
    run_text,
)

FORMATS, PROOF, ROWS, TRAFFIC = (
    ROOT / "docs" / f"{name}.md" for name in ("formats", "proof", "published", "traffic")
)
DOCUMENTS = [README, CONTRIBUTING, *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [
    document for document in DOCUMENTS if document not in (ADDING, WRITING)
]  # their Python blocks are scripts
WITNESS = ROOT / "loom/docs/witness.md"
PROJECTS = {name: tomllib.loads((ROOT / name / "pyproject.toml").read_text()) for name in (".", "loom")}


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks(*IMPORTED, flags=WARNINGS) as forks:
        yield forks


# ---- Python ------------------------------------------------------------------------------------------------


SCRIPTS = [block for document in (*PAGES, WITNESS) for block in blocks(document, "python")]
DISTRIBUTED = [block for block in SCRIPTS if "init_process_group" in block.text]
# Pages whose blocks newcomers paste run with every change; the others run by night.
BY_DAY = ("README.md", "docs/first_contact.md")


# Frameworks that a program may use, and whether it is slow then.
FRAMEWORKS = {"trl": True, "transformers": False, "torchtitan": True}


def needs(text: str) -> list[pytest.MarkDecorator]:
    """Return marks for a program or for the command that runs an example. It is skipped where an imported framework is
    missing, and left to the night if it is slow."""
    if text.startswith("python examples/"):
        text = (ROOT / text.split()[1]).read_text()
    marks = []
    for name, long in FRAMEWORKS.items():
        if re.search(rf"^ *(import|from) .*\b{name}\b", text, re.MULTILINE):
            missing = importlib.util.find_spec(name) is None
            marks.append(pytest.mark.skipif(missing, reason=f"{name} is not installed: pip install {name}"))
            marks += [pytest.mark.slow] if long else []
    return marks


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(
            block,
            marks=needs(block.text)
            if block.location.startswith(BY_DAY)
            else [*needs(block.text), pytest.mark.slow],
        )
        for block in SCRIPTS
        if block not in DISTRIBUTED
    ],
    ids=str,
)
def test_python_block_runs_by_itself(block: Block, tmp_path: Path, forks: Forks) -> None:
    # Run one block without forks, to include the imports.
    printed = run_text(block.text, tmp_path, None if block is SCRIPTS[0] else forks)
    # A comment after print promises output: the sizes in it must be printed.
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
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **rendezvous, "RANK": str(rank)},
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
# Commands that need a GPU or compile for minutes: their arguments are parsed, but they do not run.
READ_ONLY = ("weft verify --device cuda", "weft tune --device cuda", "weft aot build --target sm_")
# Commands that count bytes or compile, ranks, and examples whose functions have tests of their own.
BY_NIGHT = (
    "weft report traffic",
    "weft report published",
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
        if command.startswith(QUICK) and not command.startswith(READ_ONLY) and command not in guide()
    ],
)
def test_quick_command_runs(command: str, forks: Forks) -> None:
    program, *arguments = shlex.split(command)
    if command == "weft doctor":  # run one command from the script that pip installs
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
    """Check that projects and extras exist, and that pinned versions are CI's and in the project's range."""
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
            requirements = [*PROJECTS["."]["project"]["dependencies"], "numpy"]  # which PyTorch lacks
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
def test_tests_run_after_their_requirements_are_installed(document: Path) -> None:
    """Regression: README ran `pytest` after an installation without it."""
    installed = False
    for command, location in lines(document):
        program, *arguments = shlex.split(command)
        if program == "pip":
            wanted = [word for word in arguments if word.endswith("]")]
            installed |= {word.partition("[")[0] for word in wanted if "dev" in word} == {".", "loom"}
        if program in ("pytest", "ruff", "mypy"):
            assert installed, f"{location}: `{command}` needs the extra dev of both packages"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_slow_commands_name_what_exists(document: Path) -> None:
    for command, location in lines(document):
        program, *arguments = shlex.split(command)
        if program == "weft":  # the guide's op exists only in `test_added_op`: use another one here
            weft.cli.parser().parse_args([word.replace("softplus_gate", "glu") for word in arguments])
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
            assert command == "source .venv/bin/activate", (
                f"{location}: no test knows the command {command!r}"
            )


# ---- statements in the text ----------------------------------------------------------------------------------


def anchors(document: Path) -> set[str]:
    """Return GitHub's names of the headings: in lower case, hyphens for spaces, without punctuation."""
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
    """Each workload has a line with its reason; none moves more than it promises."""
    listed = {}
    for line in TRAFFIC.read_text().splitlines():
        if cells := re.match(r"\| `(\S+)` \|.*\| ([\d.]+) \| ([^|]*) \|$", line):
            listed[cells[1]] = float(cells[2]), cells[3].strip()
    for workload in WORKLOADS:
        ratio, reason = listed.pop(str(workload))
        assert reason == workload.rereads, workload
        assert ratio <= workload.moves + 0.0005 or workload.least_bytes() < 64_000, workload
    assert not listed, "lines of workloads that no longer exist"


def test_published_table_has_every_row() -> None:
    """Each row has its limit, published time and speed; none moves more than its workload promises."""
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
    """Yield the cells of the document's table whose header line begins with this heading."""
    text = document.read_text()
    table = text[text.index(f"| {heading} |") :].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def test_table_of_formats_is_complete() -> None:
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


def test_table_of_conventions_is_right() -> None:
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


def test_table_of_ops_is_complete() -> None:
    """The table lists every function of the package that computes, and no other."""
    listed = [name for cells in rows(README, "op") for name in re.findall(r"`(\w+)`", cells[0])]
    public = {name for name in weft.__all__ if inspect.isfunction(getattr(weft, name))}
    assert len(listed) == len(set(listed))
    assert set(listed) == public - {
        "backend",
        "calibrate",
        "capture",
        "compile_pass",
        "set_backend",
        "scale_from_amax",
        "glu_backward",
        "record_engines",
        "reuse_weights",
    }


def test_targets_and_markers_for_figures() -> None:
    text = PROOF.read_text()
    assert ", ".join(TARGETS) in text
    assert len(TARGETS) == 7
    assert "seven GPU targets" in README.read_text()
    for marker in ("speed", "host"):
        assert text.index(f"<!-- {marker} -->") < text.index(f"<!-- /{marker} -->")


def test_geometric_mean_is_that_of_the_table() -> None:
    speeds = [float(cells[-1]) for cells in rows(PROOF, "op")]
    mean = f"{statistics.geometric_mean(speeds):.2f}"
    assert f"Geometric mean of the last column {mean}," in PROOF.read_text()
    assert f"{mean} times `torch.compile`" in README.read_text()


def test_blocks_of_missing_frameworks_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: README's block about transformers failed in CONTRIBUTING.md's environment, which lacks it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    texts = [block.text for block in blocks(README, "python") if "transformers" in block.text]
    assert texts
    for text in (*texts, "python examples/serve.py"):
        (mark,) = needs(text)
        assert mark.name == "skipif"
        assert mark.args == (True,)
    assert not needs("python examples/moe_block.py")

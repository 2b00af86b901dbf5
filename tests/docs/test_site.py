"""Generated pages of the site. That it builds, without a dead link, is a step of `.ci/run`."""

from __future__ import annotations

import doctest
import inspect
import re
from pathlib import Path

import pytest
import yaml

import weft
from website import facts, links, ops, pages
from website.versions import supported, table
from weft.cli.names import made_of, public_ops
from weft.lab.checks import CHECKS
from weft.lab.families import distinct

ROOT = Path(__file__).parents[2]
PAGES = ops.pages()
OPS = tuple(weft.catalogue)  # without those that tests define
SECTIONS = (
    "Example",
    "Arguments",
    "What is computed, and where it is rounded",
    "Gradient",
    "Formats",
    "Evidence",
    "Workloads",
)


def test_every_function_that_computes_has_a_page() -> None:
    """README's table of ops, which another test compares with the package, lists only ops with a page."""
    readme = (ROOT / "README.md").read_text()
    rows = readme[readme.index("| op | in one call") :].split("\n\n")[0].splitlines()[2:]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert len(listed) > 25
    assert listed | {"glu_backward"} == set(public_ops())
    assert {f"ops/{name}.md" for name in public_ops()} <= PAGES.keys()


@pytest.mark.parametrize("name", public_ops())
def test_page_has_every_part(name: str) -> None:
    text = PAGES[f"ops/{name}.md"]
    assert tuple(re.findall(r"^## (.*)$", text, re.MULTILINE)) == SECTIONS
    parts = dict(zip(SECTIONS, re.split(r"^## .*$", text, flags=re.MULTILINE)[1:], strict=True))
    assert all(part.strip() for part in parts.values())
    # The example is the one that doctest runs.
    function = public_ops()[name]
    for example in doctest.DocTestParser().get_examples(inspect.getdoc(function) or ""):
        assert example.source.splitlines()[0] in parts["Example"]
    # Every argument has a line with its default and its meaning.
    for parameter in ops.named(function):
        (line,) = re.findall(rf"^\| `{parameter.name}` \|.*$", parts["Arguments"], re.MULTILINE)
        assert line.count("|") == 5, line
        assert line.split("|")[4].strip(), f"the docstring does not say what {parameter.name} means"
        if parameter.default is not parameter.empty:
            assert line.split("|")[3] == f" `{parameter.default!r}` "
    assert re.search(r"^    \S", parts[SECTIONS[2]], re.MULTILINE), "no formula"
    assert made_of(name) or "no kernels" in parts["Evidence"]
    assert not made_of(name) or all(f"`{check}`" in parts["Evidence"] for check in CHECKS)
    assert "Nothing was measured on a GPU" in parts["Evidence"]


def test_every_op_of_the_catalogue_is_described() -> None:
    for op in OPS:
        owners = facts.owners(op)
        assert owners, f"{op} is on no page"
        for name in owners:
            assert op in made_of(name), f"{name} does not call {op}"
            assert f"| `{op}` |" in PAGES[f"ops/{name}.md"]


def test_every_workload_is_on_a_page() -> None:
    for workload in distinct():
        row = f"{workload.options} | {' x '.join(map(str, workload.shape))} | {workload.rows} |"
        homes = [PAGES[f"ops/{name}.md"] for name in facts.owners(workload.op)]
        assert any(row in page and workload.name in page for page in homes), workload


def test_made_of_returns_the_ops_called() -> None:
    """`made_of` follows names in the source; these results are known."""
    assert made_of("rms_norm") == ("norm_backward", "norm")
    assert set(made_of("linear_cross_entropy")) == {
        "linear_logprobs",
        "linear_logprobs_backward",
        "linear_statistics",
    }
    assert {"row_map", "permute", "grouped_matmul", "glu", "unpermute"} <= set(made_of("experts"))
    assert made_of("merge_attention") == ()
    assert facts.owners("norm") == ("layer_norm", "rms_norm")
    assert facts.owners("linear_statistics") == ("linear_cross_entropy", "linear_logprobs")
    assert {facts.called_by(w) for w in facts.judged("layer_norm", "norm").workloads} == {"layer_norm"}


def test_figures_come_from_the_documents() -> None:
    target, emulated = facts.emulated()
    assert target == "sm_80"
    assert set(emulated) <= set(OPS)
    assert len(emulated) > 30
    assert len(facts.traffic()) > 400
    moved = facts.traffic()["norm:linghe/hidden:1x128-both:8192"]
    assert (moved.least, moved.ratio) == ("68.162", 1.493)
    page = PAGES["ops/rms_norm.md"]
    assert "| 68.162 | 1.493 | the statistics of a row come before the first code" in page
    assert f"{emulated['norm'].same} of {emulated['norm'].options} sets of options" in page


def test_every_export_is_described() -> None:
    for name in weft.__all__:
        thing = getattr(weft, name)
        if callable(thing) and name not in public_ops():
            assert f"\n## {name}\n" in PAGES["ops/objects.md"]


# ---- documents from outside docs/ --------------------------------------------------------------------------


def test_versions_are_on_their_page() -> None:
    page = pages.elsewhere()["versions.md"]
    assert table() in page
    assert all(row.package in page for row in supported().values())


def test_contributing_fits_on_a_page() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_bytes()) <= 10_000
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize(
    ("text", "source", "page", "wanted"),
    [
        ("[a](proof.md#checks)", "docs/guide.md", "guide.md", "[a](proof.md#checks)"),
        ("[a](../loom/README.md)", "docs/guide.md", "guide.md", "[a](loom/index.md)"),
        ("[a](docs/found.md#b)", "loom/README.md", "loom/index.md", "[a](found.md#b)"),
        (
            "[a](../../CONTRIBUTING.md)",
            "docs/start/kernels.md",
            "start/kernels.md",
            "[a](../contributing.md)",
        ),
        ("[a](../.ci/versions)", "docs/integrations.md", "integrations.md", "a"),
        ("[a](https://a.b/c.md)", "docs/guide.md", "guide.md", "[a](https://a.b/c.md)"),
        ("[a](nowhere.md)", "docs/guide.md", "guide.md", "[a](nowhere.md)"),
        ("![a](bench.svg)", "docs/bench.md", "bench.md", "![a](bench.svg)"),
        ("![a](../docs/bench.svg)", "loom/README.md", "loom/index.md", "![a](../bench.svg)"),
        ("![a](../pyproject.toml)", "docs/bench.md", "bench.md", "![a](../pyproject.toml)"),
        ("[a](runs/bench.json)", "docs/bench.md", "bench.md", "[a](runs/bench.json)"),
        (
            "```text\n[a](../loom/README.md)\n```",
            "docs/guide.md",
            "guide.md",
            "```text\n[a](../loom/README.md)\n```",
        ),
    ],
)
def test_links(text: str, source: str, page: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "home", lambda: "")
    assert links.rewrite(text, source, page) == wanted


def test_images_outside_the_site_keep_their_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link of an image outside docs/ stays unchanged, with or without a project home. So `mkdocs build --strict`
    fails; as text, or as a link to a repository, the image would be missing unnoticed."""
    for home in ("", "https://a.b/c"):
        monkeypatch.setattr(links, "home", lambda home=home: home)
        image = "![a](../website/weft.css)"
        assert links.rewrite(image, "docs/bench.md", "bench.md") == image


def test_every_image_of_the_documents_is_on_the_site() -> None:
    sources = {f"docs/{path.relative_to(ROOT / 'docs')}" for path in (ROOT / "docs").rglob("*.md")}
    images = 0
    for source in sources | {source for source in links.ELSEWHERE if source.endswith(".md")}:
        for target in re.findall(
            r"!\[[^\]]*\]\(([^)\s]+)\)|<img[^>]*src=[\"']([^\"']+)", (ROOT / source).read_text()
        ):
            path = Path(source).parent / "".join(target)
            assert links.on_site(str(path)) is not None, f"{source} shows {path}, which is not on the site"
            images += 1
    assert images >= 2


def test_sources_are_linked_once_there_is_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "home", lambda: "https://a.b/c")
    rewritten = links.rewrite("[v](../.ci/versions)", "docs/integrations.md", "integrations.md")
    assert rewritten == "[v](https://a.b/c/blob/main/.ci/versions)"


def test_ops_are_linked_by_name() -> None:
    names = {name: f"ops/{name}.md" for name in public_ops()}
    text = "# `weft.glu`\n`weft.glu` and `weft.nowhere`, [`weft.glu`](x.md)\n\n    `weft.glu`\n"
    linked = links.name_ops(text, "start/training.md", names)
    assert linked == text.replace("\n`weft.glu` and", "\n[`weft.glu`](../ops/glu.md) and")
    assert links.name_ops("`weft.glu`", "ops/glu.md", names) == "`weft.glu`"


def test_menu_has_every_page() -> None:
    """Pages of ops are exempt: the hook adds them. mkdocs checks the converse."""
    text = re.sub(r"!!python\S*", "", (ROOT / "mkdocs.yml").read_text())
    nav = yaml.safe_load(text)["nav"]
    listed = set(re.findall(r"[\w/]+\.md", str(nav)))
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    generated = {page for page in pages.elsewhere() if page.endswith(".md")}
    assert listed == written | generated | {"ops/index.md"}

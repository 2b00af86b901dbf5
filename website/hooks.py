"""What mkdocs calls while it builds the site (`hooks` in mkdocs.yml)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "loom" / "src")]

from mkdocs.structure.files import File, Files  # noqa: E402

from website import ops, pages  # noqa: E402
from website.links import as_site_markdown, home, name_ops, rewrite  # noqa: E402
from weft.cli.names import public_ops  # noqa: E402


def on_config(config: Any) -> Any:
    """The menu of ops is that of the package, and the repository's address that of .ci/home."""
    config.repo_url = home() or None
    for entry in config.nav:
        if "Ops" in entry:
            entry["Ops"] = ["ops/index.md", *_menu(), {"Objects and helpers": "ops/objects.md"}]
    return config


def _menu() -> list[dict[str, list[dict[str, str]]]]:
    return [
        {ops.title(key): [{name: f"ops/{name}.md"} for name in names]}
        for key, names in ops.families().items()
    ]


def on_files(files: Files, config: Any) -> Files:
    """Adds what is generated, and what lies outside of docs/."""
    for place, text in {**pages.elsewhere(), **ops.pages()}.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    place = page.file.src_uri
    if page.file.generated_by is None:
        markdown = rewrite(markdown, f"docs/{place}", place)
    names = {name: f"ops/{name}.md" for name in public_ops()}
    return name_ops(as_site_markdown(markdown), place, names)

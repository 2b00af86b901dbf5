"""Where files of the repository are on the site, and their links as the site needs them."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Documents outside of docs/ that are pages, too: their place in the repository, and on the site.
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "loom/README.md": "loom/index.md",
    **{
        f"loom/docs/{path.name}": f"loom/{path.name}"
        for path in sorted((ROOT / "loom/docs").iterdir())
        if path.suffix in (".md", ".csv")
    },
}


def home() -> str:
    """The address of the public repository, or nothing: see .ci/home."""
    lines = (ROOT / ".ci/home").read_text().splitlines()
    return "".join(line.strip() for line in lines if not line.startswith("#"))


def on_site(path: str) -> str | None:
    """Return the place on the site of a file of the repository: mkdocs copies every file of docs/, whatever it is."""
    if path.startswith("docs/") and (ROOT / path).is_file():
        return path.removeprefix("docs/")
    return ELSEWHERE.get(path)


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with what is neither a fenced block nor a line of an indented one changed."""
    parts = re.split(r"(^ *```.*?^ *```[^\S\n]*$|^ {4,}[^\n]*$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))


def rewrite(text: str, source: str, page: str) -> str:
    """Return a document of the repository with links for its place on the site. A file that is not on the site is
    linked to the repository's home if it has one, and otherwise named without a link. An image has to be on the site:
    its link stays as it is, so that the strict build fails."""

    def changed(match: re.Match[str]) -> str:
        image, label, target = match[1], match[2], match[3]
        if re.match(r"https?://|#|mailto:", target):
            return match[0]
        path, hash_, heading = target.partition("#")
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        place = on_site(found)
        if place is not None:
            return f"{image}[{label}]({posixpath.relpath(place, posixpath.dirname(page) or '.')}{hash_}{heading})"
        if image or not (ROOT / found).exists():
            return match[0]  # mkdocs warns of a link to nowhere, and a warning fails the strict build
        return f"[{label}]({home()}/blob/main/{found})" if home() else label

    return outside_code(text, lambda part: re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", changed, part))


def name_ops(text: str, page: str, ops: dict[str, str]) -> str:
    """`weft.rms_norm` in a sentence becomes a link to the page of that op."""

    def changed(match: re.Match[str]) -> str:
        place = ops.get(match[1])
        if place is None or place == page:
            return match[0]
        return f"[{match[0]}]({posixpath.relpath(place, posixpath.dirname(page) or '.')})"

    def sentences(part: str) -> str:
        lines = part.split("\n")
        # Not in headings, and not inside of a link.
        return "\n".join(
            line if line.startswith("#") else re.sub(r"(?<!\[)`weft\.(\w+)`(?!\])", changed, line)
            for line in lines
        )

    return outside_code(text, sentences)


def as_site_markdown(text: str) -> str:
    """What GitHub reads and Python-Markdown would not: a table inside of <details>, a list right after a sentence."""
    text = text.replace("<details>", '<details markdown="1">')

    def spaced(part: str) -> str:
        return re.sub(r"^((?![-*|>#] ?|\d+\.|\s).+)\n(?=[-*] \S)", r"\1\n\n", part, flags=re.MULTILINE)

    return outside_code(text, spaced)

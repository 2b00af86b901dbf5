"""A page for each public op: what it computes, what it takes, what it is judged on, what is known of it."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import weft
from weft.cli.names import made_of, public_ops
from weft.lab.checks import CHECKS
from weft.lab.families import Workload
from weft.lab.published import PUBLISHED
from weft.runtime import TARGETS

from .facts import described_on, emulated, family, judged, owners, traffic


def families() -> dict[str, list[str]]:
    """The public ops of each family, in the order of the menu."""
    found: dict[str, list[str]] = {}
    for name, function in public_ops().items():
        found.setdefault(family(function), []).append(name)
    return dict(sorted(found.items()))


def title(key: str) -> str:
    """Of a family, from the name of its package."""
    if key == "generated":
        return "Your own"
    return key.upper() if len(key) <= 3 else key.replace("_", " ").capitalize()


def pages() -> dict[str, str]:
    """Path on the site and Markdown of every generated page about ops."""
    made = {f"ops/{name}.md": page(name, function) for name, function in public_ops().items()}
    return {"ops/index.md": index(), "ops/objects.md": objects(), **made}


# ---- docstrings --------------------------------------------------------------------------------------------


def split(thing: Any) -> tuple[str, str]:
    """(text, example) of a docstring: the example is what doctest runs."""
    text, example = [], []
    for part in doctest.DocTestParser().parse(inspect.getdoc(thing) or ""):
        if isinstance(part, doctest.Example):
            lines = part.source.splitlines()
            example += [">>> " + lines[0], *("... " + line for line in lines[1:]), *part.want.splitlines()]
        elif part.strip():
            text.append(part.strip("\n"))
    return _deep_lists("\n\n".join(text)), "\n".join(example)


def _deep_lists(text: str) -> str:
    """Python-Markdown wants what belongs to an item of a list indented by four, where docstrings have two, and an empty
    line before the next item if this one has several paragraphs."""
    lines: list[str] = []
    inside = long = False
    for line in text.split("\n"):
        if line.startswith("- "):
            if long and lines[-1]:
                lines.append("")
            inside, long = True, False
        elif line.strip():
            inside = inside and line.startswith("  ")
            long = long or (inside and not lines[-1])
        lines.append("  " + line if inside and line.startswith("  ") else line)
    return "\n".join(lines)


def first_sentence(thing: Any) -> str:
    paragraph = " ".join(split(thing)[0].split("\n\n")[0].split())
    return re.split(r"(?<=[.:])\s", paragraph + " ")[0].rstrip(".:")


def _type_name(annotation: Any, function: Callable[..., Any]) -> str:
    """An annotation as it is written, with aliases of several choices written out."""
    if not isinstance(annotation, str):
        return getattr(annotation, "__name__", str(annotation))
    names = vars(sys.modules[inspect.unwrap(function).__module__])

    def written_out(match: re.Match[str]) -> str:
        alias = names.get(match[0])
        origin = typing.get_origin(alias)
        if origin is typing.Literal:
            return " | ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in typing.get_args(alias))
        if origin in (typing.Union, types.UnionType):
            return " | ".join(_plain(part) for part in typing.get_args(alias))
        return match[0]

    text = re.sub(r"(?<![\w.\"'])[A-Z]\w*(?![\w\"'\[])", written_out, annotation)
    return re.sub(r"Literal\[([^\]]*)\]", lambda m: " | ".join(m[1].split(", ")), text).replace("'", '"')


def _plain(annotation: Any) -> str:
    if isinstance(annotation, typing.ForwardRef):  # of a NamedTuple
        return annotation.__forward_arg__
    if annotation is type(None):
        return "None"
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(f'"{value}"' for value in typing.get_args(annotation))
    text = (
        annotation.__name__
        if isinstance(annotation, type) and not typing.get_args(annotation)
        else str(annotation)
    )
    return re.sub(r"\b(?:torch|typing|collections\.abc|weft(?:\.\w+)*)\.", "", text)


def named(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function, without the stars that collect unsupported keywords for an error."""
    parameters = inspect.signature(function).parameters.values()
    return [each for each in parameters if each.kind is not each.VAR_KEYWORD]


def signature(name: str, function: Callable[..., Any]) -> str:
    """One argument a line, with defaults."""
    lines, starred = [], False
    for parameter in named(function):
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            lines.append("    *,")
            starred = True
        shown = f": {parameter.annotation}" if isinstance(parameter.annotation, str) else ""
        if parameter.default is not parameter.empty:
            shown += f" = {parameter.default!r}" if shown else f"={parameter.default!r}"
        lines.append(f"    {parameter.name}{shown},")
    result = inspect.signature(function).return_annotation
    return "\n".join([f"weft.{name}(", *lines, f") -> {result}" if isinstance(result, str) else ")"])


def _choices(text: str) -> str:
    """A type in a cell of a table: a bar would end the cell."""
    return " or ".join(f"`{part.strip()}`" for part in re.split(r"\|(?![^\[]*\])", text)).replace("|", "or")


_NAMES = r"(?:`\w+`(?:, | and )?)+"


def meanings(function: Callable[..., Any]) -> dict[str, str]:
    """Return what a docstring says of each argument: in an item that begins with its name, or after "name: "."""
    parameters = inspect.signature(function).parameters
    result: dict[str, str] = {}
    for part in re.split(r"\n\n|\n(?=- )", inspect.cleandoc(inspect.getdoc(function) or "")):
        text = " ".join(part.split())
        if item := re.match(rf"- ({_NAMES})(.*)", text):
            described = dict.fromkeys(re.findall(r"`(\w+)`", item[1]), item[2].strip(" ,:"))
        else:
            pieces = re.split(r"(?:^|(?<=[.;] ))((?:\w+, )*\w+): ", text)
            described = {
                name: meaning.strip()
                for names, meaning in zip(pieces[1::2], pieces[2::2], strict=True)
                for name in names.split(", ")
            }
        result |= {name: meaning for name, meaning in described.items() if name in parameters}
    for name in parameters.keys() - result.keys():
        if others := [f"`{other}`" for other, text in result.items() if f"`{name}`" in text]:
            result[name] = f"See {' and '.join(others)}."
    return {name: text.partition(" Returns ")[0] for name, text in result.items()}


def inherited(function: Callable[..., Any]) -> dict[str, str]:
    """Return the meanings of the other arguments from the ops that a docstring names."""
    result: dict[str, str] = {}
    for name in re.findall(r"`(\w+)`", inspect.getdoc(function) or ""):
        if name in public_ops() and public_ops()[name] is not function:
            result = meanings(public_ops()[name]) | result
    return result


def _cell(text: str) -> str:
    """Return a text that ends no cell of a table."""
    return "".join(
        part.replace("|", " or " if i % 2 else "&#124;")
        for i, part in enumerate(re.split(r"(`[^`]*`)", text))
    )


def introduction(text: str, function: Callable[..., Any]) -> str:
    """Return a docstring's text without the items that the table of arguments shows."""
    parameters = inspect.signature(function).parameters

    def of_arguments(item: str) -> bool:
        names = re.match(rf"- ({_NAMES})", item)
        return names is not None and set(re.findall(r"`(\w+)`", names[1])) <= set(parameters)

    parts = re.split(r"(\n\n|\n(?=- ))", text)
    kept = [
        sep + item for sep, item in zip(["", *parts[1::2]], parts[::2], strict=True) if not of_arguments(item)
    ]
    return "".join(kept).strip()


def arguments(function: Callable[..., Any]) -> str:
    """Return the table of arguments: type, default and meaning of each."""
    lines = ["| argument | type | default | |", "|---|---|---|---|"]
    parameters = named(function)
    described = inherited(function) | meanings(function)
    for parameter in parameters:
        default = "" if parameter.default is parameter.empty else f"`{parameter.default!r}`"
        kind = _choices(_type_name(parameter.annotation, function))
        meaning = _cell(described.get(parameter.name, ""))
        lines.append(f"| `{parameter.name}` | {kind} | {default} | {meaning} |")
    by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if by_name:
        since = (
            "All arguments are keyword-only."
            if len(by_name) == len(parameters)
            else f"`{by_name[0]}` and later arguments are keyword-only."
        )
        lines += ["", since]
    result = inspect.signature(function).return_annotation
    if isinstance(result, str):
        lines += ["", f"Returns {_choices(_type_name(result, function))}."]
    return "\n".join(lines)


# ---- a page ------------------------------------------------------------------------------------------------


def page(name: str, function: Callable[..., Any]) -> str:
    text, example = split(function)
    # As it is written: `inspect.getdoc` would take the indentation of formulas for that of the text.
    maths = (sys.modules[inspect.unwrap(function).__module__].__doc__ or "").strip()
    parts = [
        f"# {name}",
        introduction(text, function),
        _folded("Signature", f"```python\n{signature(name, function)}\n```"),
        "## Example",
        f"```pycon\n{example}\n```",
        "A test runs this example.",
        "## Arguments",
        arguments(function),
        "## What is computed, and where it is rounded",
        maths,
        "## Gradient",
        gradient(name),
        "## Formats",
        formats(name),
        "## Evidence",
        evidence(name),
        "## Workloads",
        workloads(name),
    ]
    return "\n\n".join(parts) + "\n"


def _folded(title: str, text: str) -> str:
    """Return a part that opens when its title is clicked."""
    return f'??? note "{title}"\n\n' + "\n".join(f"    {line}".rstrip() for line in text.splitlines())


def link(name: str) -> str:
    return f"[`{name}`]({name}.md)"


def gradient(name: str) -> str:
    own = [weft.catalogue[op] for op in described_on(name)]
    composed = [op for op in made_of(name) if op not in described_on(name) and not op.endswith("_backward")]
    lines = []
    for op in own:
        if op.differentiable:
            outputs = ", ".join(f"`{op.outputs.names[i]}`" for i in op.differentiable_outputs)
            backward = f"{op.name}_backward"
            how = (
                f"by kernels of its own, `{backward}`"
                if backward in weft.catalogue
                else "without kernels of its own"
            )
            lines.append(f"- `{op.name}` is differentiated {how}. Outputs with a gradient: {outputs}.")
    if own and not lines:
        lines.append("- It has no gradient: differentiating through it is an error.")
    if composed:
        also = "also " if own else ""
        lines.append(
            f"- It {also}calls {', '.join(map(_described, composed))}, whose gradients are on their pages."
        )
    if not made_of(name):
        lines.append("- It is plain PyTorch: autograd differentiates it.")
    sharded = [op.name for op in own if op.shard is not None]
    if sharded:
        lines.append(
            f"- DTensors: {', '.join(f'`{op}`' for op in sharded)} can be [sharded](../sharding.md)."
        )
    return "\n".join(lines)


def _described(op: str) -> str:
    """An op of the catalogue with a link to the page that describes it."""
    places = owners(op)
    return f"[`{op}`]({places[0]}.md)" if places else f"`{op}`"


def formats(name: str) -> str:
    found = {f: None for op in described_on(name) for f in judged(name, op).formats}
    if not made_of(name):
        return "Plain tensors alone."
    if not described_on(name):
        return "Those of the ops that it calls."
    if not found:
        return "Its workloads have plain tensors alone."
    listed = ", ".join(f"`{f}`" for f in sorted(found))
    return f"Its workloads, forward and backward, have these [formats](../formats.md): {listed}."


def evidence(name: str) -> str:
    if not made_of(name):
        return "It has no kernels: it is plain PyTorch, with tests in `tests/ops/`. **Nothing was measured on a GPU.**"
    own = described_on(name)
    others = [op for op in made_of(name) if op not in own]
    lines = []
    if own:
        target, table = emulated()
        lines += [
            f"| op of the catalogue | workloads | bytes / least | emulated on {target}: with Loom's bits | variants |",
            "|---|---:|---:|---|---:|",
        ]
        for op in own:
            ratios = [traffic()[str(w)].ratio for w in judged(name, op).workloads if str(w) in traffic()]
            counted = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "not counted"
            row = table.get(op)
            ran = f"{row.same} of {row.options} sets of options" if row else "not yet"
            if row and row.why:
                ran += f"; others differ by {row.why}"
            lines.append(
                f"| `{op}` | {len(judged(name, op).workloads)} | {counted} | {ran} | {weft.catalogue[op].variants} |"
            )
        lines.append("")
    if others:
        also = "also " if own else ""
        lines += [f"It {also}calls {', '.join(map(_described, others))}; their evidence is there.", ""]
    rows = [row for row in PUBLISHED if row.find().op in own]
    if rows:
        numbers = ", ".join(f"{row.number} ({row.title})" for row in rows)
        lines += [f"Rows of [published times](../published.md) by others: {numbers}.", ""]
    lines += [
        f"Its kernels are compiled for {', '.join(TARGETS)}, and the binaries are read.",
        "**Nothing was measured on a GPU.**",
        "",
    ]
    if own:
        lines += [
            "*Bytes / least*: accesses are counted on a CPU with the launches for an H100; what memory would move is",
            "modelled of them ([how](../traffic.md)); a ratio above 1.02 has its reason in the table of workloads.",
            "*Variants*: how many times its kernels may be compiled for one dtype and one set of options, whatever the",
            "sizes.",
            "",
        ]
    lines += [
        "The checks that every workload goes through ([how each can fail](../proof.md#checks)), on any device:",
        "",
        f"```bash\nweft verify {' '.join(f'--op {op}' for op in own or made_of(name))}\n```",
        "",
        *(f"- `{check}`: {first_sentence(function)}." for check, function in CHECKS.items()),
    ]
    return "\n".join(lines)


def workloads(name: str) -> str:
    own = described_on(name)
    if not own:
        return "Those of the ops that it calls." if made_of(name) else "None: it has no kernels."
    published = {row.workload: row.number for row in PUBLISHED}
    parts = []
    for op in own:
        rows = judged(name, op).workloads
        lines = [
            f'??? note "{op}: {len(rows)} workloads"',
            "",
            "    | model and place | options | shape | rows | for | least, MB | moved / least | why more |",
            "    |---|---|---|---:|---|---:|---:|---|",
        ]
        lines += [f"    {_row(workload, published)}" for workload in rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _row(workload: Workload, published: dict[str, int]) -> str:
    moved = traffic().get(str(workload))
    number = f" (published row {published[str(workload)]})" if str(workload) in published else ""
    shape = " x ".join(str(size) for size in workload.shape)
    figures = f"{moved.least} | {moved.ratio:.3f} | {moved.reason}" if moved else "| | "
    tags = ", ".join(sorted(workload.tags))
    return (
        f"| {workload.name}{number} | {workload.options} | {shape} | {workload.rows} | {tags} | {figures} |"
    )


# ---- what is beside the ops ----------------------------------------------------------------------------------


def index() -> str:
    lines = [
        "# Ops",
        "",
        "A page for each op: an example, arguments, the formula with its roundings, formats, the gradient, the",
        "evidence, and the workloads that it is judged on. They are made of docstrings, `weft.catalogue` and",
        "`weft.lab.families`.",
        "",
        f"{len(public_ops())} functions, made of {len(weft.catalogue)} ops of the catalogue. What else there is:",
        "[objects and helpers](objects.md).",
    ]
    for key, names in families().items():
        about = inspect.getdoc(importlib.import_module(f"weft.ops.{key}")) or ""
        about = about.split("\n\n")[0]
        lines += ["", f"## {title(key)}", "", about, "", "| op | | gradient |", "|---|---|---|"]
        for name in names:
            calls = [weft.catalogue[op] for op in made_of(name)]
            has = "yes" if not calls or any(op.differentiable for op in calls) else "no"
            lines.append(f"| {link(name)} | {first_sentence(public_ops()[name])} | {has} |")
    return "\n".join(lines) + "\n"


def objects() -> str:
    """What `weft` exports besides ops and modules."""
    lines = ["# Objects and helpers", "", "What the ops take and return, and what chooses how they run."]
    for name in sorted(weft.__all__, key=str.lower):
        thing = getattr(weft, name)
        if name in public_ops() or inspect.ismodule(thing) or not callable(thing):
            continue
        text, example = split(thing)
        lines += ["", f"## {name}", ""]
        if inspect.isfunction(thing):
            lines += [f"```python\n{signature(name, thing)}\n```", ""]
        # Headings and indented parts of a docstring stay as they are; a class without one of its own has none to show.
        lines += [text or "See the signature."]
        if example:
            lines += ["", f"```pycon\n{example}\n```"]
        lines += list(_fields(thing))
    return "\n".join(lines) + "\n"


def _fields(thing: Any) -> Iterator[str]:
    """The members of a NamedTuple or a dataclass."""
    annotations = inspect.get_annotations(thing) if isinstance(thing, type) else {}
    shown = {name: kind for name, kind in annotations.items() if not name.startswith("_")}
    if shown:
        yield from ("", "| member | type |", "|---|---|")
        for name, kind in shown.items():
            yield f"| `{name}` | {_choices(kind if isinstance(kind, str) else _plain(kind))} |"

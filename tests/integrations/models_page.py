"""Generator of the page docs/models.md: `python -m tests.integrations.sweep --page docs/models.md`."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence

import torch
import transformers
import triton

import weft
from tests.integrations.sweep import BOUND, Row

KINDS = ("norm", "mlp", "experts", "rope", "router", "loss")
# Columns of figures, each with the checks whose worst result it shows.
FIGURES = {
    "gradients": ("training", "frozen", "checkpointing"),
    "dropout": ("dropout",),
    "hooks": ("hooks",),
    "logits": ("evaluation",),
    "pads": ("left pads", "right pads", "hole"),
    "packed": ("packed",),
    "cross": ("cross",),
}
COLUMNS = ("model", *KINDS, "left alone", "attention", "loss value", *FIGURES, "tokens")

PAGE = """\
# Models of transformers

Look up what Weft computes in each of {models} model classes of transformers, and how close the model stays to itself
without Weft.

```text
python -m tests.integrations.sweep --page docs/models.md
```

This command writes the page. It builds a tiny model of each class with random weights and runs it in fp32, on a CPU:
unchanged, with `weft.integrations.apply(model, rope=True, router=True)`, with `attn_implementation="weft"`, and with
both.

Every error is at most {bound}, except those with a star, which are [compared with fp64](#compared-with-fp64).

## How to read the table

"same" means equal bits. An empty cell means that the model has no such module or takes no such input.

- **norm** to **loss**: modules that `apply` replaced, of those it looked at. Every replaced module that the unchanged
  model calls reaches Weft. It does not call some for these inputs, such as norms of cross attention without an
  encoder.
- **left alone**: reasons for the others, by their numbers [below](#what-is-left-alone).
- **attention**: "Weft", or "PyTorch" and the reason ([who attends](decoding.md#in-transformers)). "its own": the
  model calls no attention function.
- **loss value**: largest relative error of the loss, over all training steps of the row. CTC losses are computed in
  fp64, since their rounding in fp32 would hide that of the models.
- **gradients**: largest error of a training step's gradients, relative to their norm; also with frozen norms, with a
  frozen head and embeddings, and with gradient checkpointing.
- **dropout**: the same with dropout of 0.2 wherever the model has any.
- **hooks**: the same with forward hooks that scale the outputs of all leaf modules and feed-forward layers. Each runs
  as often as in the unchanged model.
- **logits**: largest relative error of the logits in evaluation.
- **pads**: the same with pads on the left, on the right and between tokens.
- **packed**: the same with two packed sequences per row, by `position_ids` and by `cu_seq_lens_q`.
- **cross**: the same for a decoder that is shorter than its padded encoder input.
- **tokens**: greedy generation from a left-padded prompt with a cache.

## The models

Versions: {versions}.

<details><summary>One line per model class</summary>

{table}

</details>

## Compared with fp64

These models are badly conditioned: in fp32 the unchanged model's gradients are about as far from its gradients in fp64
as from those with Weft. The bound is then twice the unchanged model's distance from fp64.

<details><summary>One line per model and check</summary>

{doubles}

</details>

## What is left alone

`apply` leaves these modules as they are, and `strict=True` raises an error for them.

<details><summary>One line per reason</summary>

{reasons}

</details>

## Not in the table

These classes have no row: the command finds no tiny configuration for them, or the unchanged model does not run from
tokens, pixels or sound alone.

<details><summary>Classes, by reason</summary>

{left_out}

</details>
"""


def cell(distances: Iterable[float | None]) -> str:
    """Return the largest distance, with a star beyond the bound."""
    present = [distance for distance in distances if distance is not None]
    if not present:
        return ""
    return "same" if not any(present) else f"{max(present):.0e}" + "*" * (max(present) > BOUND)


def facts(row: Row) -> list[str]:
    """Return the cells of a model's line that are not figures: what is replaced, and who computes attention."""
    cells = [row.entry.name]
    for kind in KINDS:
        entries = [entry.changed for entry in row.report.entries if entry.kind == kind]
        cells.append("" if not entries else f"{sum(entries)}" + f" of {len(entries)}" * (not all(entries)))
    reasons = sorted(row.engines.keys() - {"Weft"})
    pytorch = [f"PyTorch ({', '.join(reasons)})"] if reasons else []
    return [*cells, " and ".join(["Weft"] * ("Weft" in row.engines) + pytorch) or "its own"]


def line(row: Row, numbers: Iterable[int] = ()) -> str:
    """Return a model's line of the table."""
    *cells, attends = facts(row)
    cells += [", ".join(map(str, sorted(numbers))), attends]
    cells.append(cell(result.loss for result in row.results.values()))
    for checks in FIGURES.values():
        cells.append(cell(row.results[check].off for check in checks if check in row.results))
    cells.append("same" if "generation" in row.results else "")
    return f"| {' | '.join(cells)} |"


def page(rows: list[Row], left_out: dict[str, str]) -> str:
    """Return the page of all models."""
    modules: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        for entry in row.report.entries:
            if not entry.changed:
                modules.setdefault((entry.kind, entry.what), set()).add(entry.module)
    reasons = sorted(modules, key=lambda reason: (KINDS.index(reason[0]), -len(modules[reason]), reason[1]))
    number = {reason: position for position, reason in enumerate(reasons, 1)}
    lines = [
        line(row, {number[entry.kind, entry.what] for entry in row.report.entries if not entry.changed})
        for row in rows
    ]
    causes: dict[str, list[str]] = {}
    for name, cause in left_out.items():
        causes.setdefault(cause, []).append(name)
    return PAGE.format(
        models=len(rows),
        versions=versions(),
        bound=f"{BOUND:.0e}",
        table=table(COLUMNS, lines),
        doubles=table(
            ("model", "check", "apart", "Weft from fp64", "unchanged from fp64"),
            (
                f"| {row.entry.name} | {check} | {result.off:.1e} | {result.from_fp64[0]:.1e} "
                f"| {result.from_fp64[1]:.1e} |"
                for row in rows
                for check, result in row.results.items()
                if result.from_fp64 is not None
            ),
        ),
        reasons=table(
            ("number", "kind", "reason", "classes"),
            (
                f"| {number[reason]} | {reason[0]} | {escaped(reason[1])} | {', '.join(sorted(modules[reason]))} |"
                for reason in reasons
            ),
        ),
        left_out=table(
            ("reason", "classes"),
            (f"| {escaped(cause)} | {', '.join(names)} |" for cause, names in causes.items()),
        ),
    )


def versions() -> str:
    """Return the versions that the page is about."""
    of = {"Weft": weft, "transformers": transformers, "torch": torch, "Triton": triton}
    named = [f"{name} {module.__version__}" for name, module in of.items()]
    return ", ".join([*named, f"Python {platform.python_version()}"])


def escaped(text: str) -> str:
    """Return a text escaped for a table cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def table(head: Sequence[str], lines: Iterable[str]) -> str:
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines])

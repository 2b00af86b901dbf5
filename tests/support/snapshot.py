"""Record what every workload launches and the bytes it computes before a redesign, and compare after it.

    python tests/support/snapshot.py record before.json     # some minutes; -k norm: workloads with "norm" in their name
    python tests/support/snapshot.py compare before.json    # prints what differs, and exits with 1 if something does

Each workload has: the launches of its forward and backward for sm_90 and gfx950 at the real size (kernel, grid, warps,
constants, dtypes of pointers, integers, floats), those for a CPU with few rows, and a hash of the bytes of every result
and gradient there. Inputs are drawn from fixed seeds, and uninitialized memory holds a fixed pattern.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from ast import literal_eval
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "loom" / "tests")]

from triton_loom.testing import words  # noqa: E402

from weft.lab.calls import backward, differentiable, handed_through, parts, results, small, under  # noqa: E402
from weft.lab.families import Call, Workload, distinct  # noqa: E402
from weft.runtime import Launch, observing, recording  # noqa: E402

TARGETS = ("sm_90", "gfx950")


@contextmanager
def noting() -> Iterator[list[str]]:
    """Collect a line for each launch, which then takes place as before."""
    seen: list[str] = []

    def note(launch: Launch, grid: Any, pointers: Any, integers: Any, floats: Any) -> None:
        constants = ", ".join(f"{name}={value}" for name, value in sorted(launch.constants.items()))
        kinds = [None if p is None else str(p.dtype).removeprefix("torch.") for p in pointers]
        options = f"warps={launch.num_warps} stages={launch.num_stages}"
        seen.append(
            f"{launch.kernel.name}{grid} {options} [{constants}] {kinds} {list(integers)} {list(floats)}"
        )

    with observing(note):
        yield seen


def gradients_of(outputs: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    """Return an upstream gradient for each differentiable output."""
    gradients = {}
    for seed, (name, value) in enumerate(outputs.items()):
        if value.requires_grad and not handed_through(value):
            drawn = (
                torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
                if device == "cpu"
                else None
            )
            gradients[name] = (torch.empty(value.shape, device=device) if drawn is None else drawn).to(
                value.dtype
            )
    return gradients


def run(call: Call, device: str, *, tracked: bool) -> dict[str, Tensor]:
    """Return results, and gradients if there are any."""
    if not tracked:
        return results(call)
    call = call.requiring_grad()
    outputs = results(call)
    return {**outputs, **backward(call, outputs, gradients_of(outputs, device))}


def snapshot(workload: Workload) -> dict[str, Any]:
    record: dict[str, Any] = {}
    tracked = differentiable(workload)
    for target in TARGETS:
        with under(device=torch.device("meta")), recording(target), noting() as launches:
            run(workload.make("meta"), "meta", tracked=tracked)
        record[target] = launches
    with noting() as launches:
        computed = run(small(workload), "cpu", tracked=tracked)
    record["cpu"] = launches
    record["bytes"] = {
        name: hashlib.sha256(words(value).numpy().tobytes()).hexdigest()[:16]
        for name, value in parts(computed).items()
    }
    return record


ORDERED = re.compile(r"\] (\[.*?\]) (\[.*?\]) (\[.*?\])$")


def in_any_order(line: str) -> str:
    """Normalize a launch by sorting its pointers, integers and floats, and dropping pointers that are None. Their order
    depends on the structs that hold them, and new options add pointers that are None. A leading underscore of the
    kernel's name is ignored."""
    lists = ORDERED.search(line)
    assert lists is not None
    ordered = [
        str(sorted((value for value in literal_eval(group) if value is not None), key=str))
        for group in lists.groups()
    ]
    return " ".join([line[: lists.start() + 1].lstrip("_"), *ordered])


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for part in (*TARGETS, "cpu"):
        old, new = ([in_any_order(line) for line in snapshot_[part]] for snapshot_ in (before, after))
        if old != new:
            yield f"launches on {part}"
            for sign, only, other in (("-", old, new), ("+", new, old)):
                yield from (f"  {sign} {line}" for line in only if line not in other)
    for name in sorted({*before["bytes"], *after["bytes"]}):
        if before["bytes"].get(name) != after["bytes"].get(name):
            yield f"bytes of {name}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("-k", metavar="TEXT", default="", help="only workloads whose name contains this")
    arguments = parser.parse_args()
    selected = [w for w in distinct() if arguments.k in str(w)]
    before = json.loads(arguments.file.read_text()) if arguments.action == "compare" else {}
    records, different = {}, 0
    for number, workload in enumerate(selected, 1):
        records[str(workload)] = after = snapshot(workload)
        if sys.stderr.isatty():
            print(f"\r{number} of {len(selected)}", end="", file=sys.stderr, flush=True)
        if arguments.action == "compare":
            lines = (
                list(differences(before[str(workload)], after))
                if str(workload) in before
                else ["not recorded"]
            )
            different += bool(lines)
            for line in [str(workload), *(f"  {line}" for line in lines)] if lines else []:
                print(line)
    if arguments.action == "record":
        arguments.file.write_text(json.dumps(records, indent=1))
    print(
        f"{len(selected)} workloads, {different} differ" if before else f"{len(selected)} workloads recorded"
    )
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())

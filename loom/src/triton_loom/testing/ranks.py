"""Ranks on this machine: a script is started once for each rank of a group, and leaves its results in a file."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pytest

Results = Callable[[int], list[dict[str, Any]]]


def results_of(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the ranks of a group of that size found, each group run once. `script RANK WORLD DIRECTORY` saves
    `RANK.pt` in the directory."""
    known: dict[int, Path] = {}

    def of(world: int) -> list[dict[str, Any]]:
        if world not in known:
            # Shared by the workers of a run: the first one to come runs the ranks.
            run = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")
            parent = tmp_path_factory.getbasetemp().parent if run else tmp_path_factory.mktemp("ranks")
            known[world] = parent / f"{run}-{script.stem}-{world}"
            try:
                known[world].mkdir()
            except FileExistsError:
                _wait_for(known[world] / "done")
            else:
                _run(script, world, known[world])
        failed = (known[world] / "done").read_text()
        assert not failed, failed
        return [torch.load(known[world] / f"{rank}.pt") for rank in range(world)]

    return of


def _run(script: Path, world: int, directory: Path) -> None:
    """Start the ranks, and end them all as soon as one has failed; `done` says what they said then."""
    logs = [directory / f"{rank}.log" for rank in range(world)]
    ranks: list[subprocess.Popen[bytes]] = []
    failed = True
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, str(script), str(rank), str(world), str(directory)]
            with log.open("wb") as output:
                ranks.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
        for _ in range(4000):
            codes = [rank.poll() for rank in ranks]
            if any(codes) or None not in codes:
                failed = any(codes)
                break
            time.sleep(0.1)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        said = "\n".join(log.read_text() for log in logs if log.exists())
        told = directory / "told"
        told.write_text(said or "the ranks did not start" if failed else "")
        told.rename(directory / "done")  # whole, when others see it


def _wait_for(file: Path) -> None:
    for _ in range(4200):
        if file.exists():
            return
        time.sleep(0.1)
    raise TimeoutError(f"{file} did not appear")

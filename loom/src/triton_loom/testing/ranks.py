"""Ranks on this machine: the `main` of a script runs for each rank of a group, and leaves its results in a file."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ..device import toolchain

if TYPE_CHECKING:
    import pytest

Results = Callable[[int], list[dict[str, Any]]]


def results_of(script: Path, tmp_path_factory: pytest.TempPathFactory, **options: bool) -> Results:
    """What the ranks of a group of that size found, each group run once. `main(rank, world, directory, **options)` of
    the script saves `RANK.pt` in the directory. Ranks are forked when the script has been imported, which must start no
    thread."""
    known: dict[int, Path] = {}

    def of(world: int) -> list[dict[str, Any]]:
        if world not in known:
            # Shared by the workers of a run: the first one to come runs the ranks.
            run = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")
            parent = tmp_path_factory.getbasetemp().parent if run else tmp_path_factory.mktemp("ranks")
            known[world] = parent / "-".join(
                [run, script.stem, str(world), *(f"{name}={value}" for name, value in options.items())]
            )
            try:
                known[world].mkdir()
            except FileExistsError:
                _wait_for(known[world] / "done")
            else:
                _run(script, world, known[world], options)
        failed = (known[world] / "done").read_text()
        assert not failed, failed
        return [torch.load(known[world] / f"{rank}.pt") for rank in range(world)]

    return of


def _run(script: Path, world: int, directory: Path, options: dict[str, bool]) -> None:
    """Run the ranks; `done` says what they said if one has failed."""
    start = f"from {__name__} import run_ranks; run_ranks({str(script)!r}, {world}, {str(directory)!r}, **{options})"
    failed = True
    log = directory / "log"
    try:
        with log.open("wb") as output:
            group = subprocess.Popen(
                [sys.executable, "-c", start],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # threads of NumPy's, which forks would miss
            )
        try:
            failed = group.wait(timeout=400) != 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group.pid, signal.SIGKILL)
            group.wait()
    except subprocess.TimeoutExpired:
        pass
    finally:
        said = log.read_text() if log.exists() else ""
        told = directory / "told"
        told.write_text(said or "the ranks said nothing" if failed else "")
        told.rename(directory / "done")  # whole, when others see it


def run_ranks(script: str, world: int, directory: str, **options: bool) -> None:
    """Fork the ranks from this process, which has imported what they need, and end with the first one that fails."""
    name = Path(script).stem
    spec = importlib.util.spec_from_file_location(name, script)
    assert spec is not None
    assert spec.loader is not None
    sys.path.insert(0, str(Path(script).parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    forking = multiprocessing.get_context("fork")
    lock = forking.Lock()
    build = toolchain.build

    def build_in_turn(*args: Any, **kwargs: Any) -> bytes:
        """Ranks want the same kernel at the same time: one builds it, and the others find it in the cache."""
        with lock:
            return build(*args, **kwargs)

    toolchain.build = functools.lru_cache(build_in_turn)
    ranks = [
        forking.Process(target=module.main, args=(rank, world, Path(directory)), kwargs=options, daemon=True)
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    running = {rank.sentinel: rank for rank in ranks}
    while running:
        for ended in multiprocessing.connection.wait(list(running)):
            rank = running.pop(cast(int, ended))
            rank.join()
            if rank.exitcode:
                raise SystemExit(
                    f"a rank ended with {rank.exitcode}"
                )  # the others are daemons, and end with it


def _wait_for(file: Path) -> None:
    for _ in range(4200):
        if file.exists():
            return
        time.sleep(0.1)
    raise TimeoutError(f"{file} did not appear")

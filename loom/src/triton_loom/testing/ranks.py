"""Run the `main` of a script for each rank of a group on this machine; each rank saves its results in a file."""

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
    """Return a function that runs a group of a given size, once, and returns the results of its ranks.

    `main(rank, world, directory, **options)` of the script saves `RANK.pt` in the directory. Ranks are forked after
    the script has been imported, which must start no thread.
    """
    directories: dict[int, Path] = {}

    def of(world: int) -> list[dict[str, Any]]:
        if world not in directories:
            # Shared by the workers of a test run: the first to arrive runs the ranks.
            run = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")
            parent = tmp_path_factory.getbasetemp().parent if run else tmp_path_factory.mktemp("ranks")
            directories[world] = parent / "-".join(
                [run, script.stem, str(world), *(f"{name}={value}" for name, value in options.items())]
            )
            try:
                directories[world].mkdir()
            except FileExistsError:
                _wait_for(directories[world] / "done")
            else:
                _run(script, world, directories[world], options)
        failed = (directories[world] / "done").read_text()
        assert not failed, failed
        return [torch.load(directories[world] / f"{rank}.pt") for rank in range(world)]

    return of


def _run(script: Path, world: int, directory: Path, options: dict[str, bool]) -> None:
    """Run the ranks. `done` holds their output if one failed, and is empty otherwise."""
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
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # no NumPy threads, which forks would miss
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
        output_text = log.read_text() if log.exists() else ""
        partial = directory / "told"
        partial.write_text(output_text or "the ranks printed nothing" if failed else "")
        partial.rename(directory / "done")  # complete by the time others see it


def run_ranks(script: str, world: int, directory: str, **options: bool) -> None:
    """Fork the ranks from this process, which has imported what they need; exit when one fails."""
    name = Path(script).stem
    spec = importlib.util.spec_from_file_location(name, script)
    assert spec is not None
    assert spec.loader is not None
    sys.path.insert(0, str(Path(script).parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    context = multiprocessing.get_context("fork")
    lock = context.Lock()
    build = toolchain.build

    def build_in_turn(*args: Any, **kwargs: Any) -> bytes:
        """Serialize builds of one kernel by several ranks: one builds it, and the others find it in the cache."""
        with lock:
            return build(*args, **kwargs)

    toolchain.build = functools.lru_cache(build_in_turn)
    ranks = [
        context.Process(target=module.main, args=(rank, world, Path(directory)), kwargs=options, daemon=True)
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
                    f"a rank exited with code {rank.exitcode}"
                )  # the other ranks are daemons and end with this process


def _wait_for(file: Path) -> None:
    for _ in range(4200):
        if file.exists():
            return
        time.sleep(0.1)
    raise TimeoutError(f"{file} did not appear")

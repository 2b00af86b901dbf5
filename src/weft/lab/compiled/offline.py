"""Compile Triton kernels for named GPUs on a machine without one, and read the binaries.

All figures are compiled, none is measured: they tell which instructions, registers and spills a kernel has, not how
fast it is. Few registers together with spills are a bad sign: with far too many live values, ptxas 12.8 was seen to use
32 registers and kilobytes of stack where 255 registers were allowed.

Compilation happens in child processes, because some compiler failures end the process instead of raising and some
compilations never end. A child compiles many variants one after another, since starting it costs far more than a small
kernel does, and is replaced when it is lost.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import io
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ...runtime.capabilities import GPUS
from ...runtime.variant import Variant, build, kernel_of, options_of, source_of, triton_target
from . import machine_code, tensor_memory
from .tensor_memory import early_accesses

# Starting a child imports torch and Triton. This is not part of any compilation, so it has its own limit.
_START_SECONDS = 120.0
_TAIL = 4000


@dataclass(frozen=True)
class Binary:
    """Figures read from one binary.

    `registers` are per thread (NVIDIA) or VGPRs per lane, AGPRs included (AMD). `spill_bytes` are per thread: the
    stores plus loads that ptxas reports, or four times the spilled VGPRs and SGPRs. `stack` is local memory per thread,
    not all of which is spill; `shared` is per block, and not checked against the target's limit.

    `loads` and `stores` count instructions on global (or generic) memory by their width in bits. Copies from global to
    shared memory count as loads and the reverse as stores; those of TMA move at least 16 bytes at a time and count as
    128. Neither atomics nor AMD's scalar loads are counted.

    `uses_fp64` means any float64 arithmetic or conversion. `early_accesses` are accesses to accumulators in tensor
    memory that an MMA may still be adding to, a mistake of some versions of Triton (`tensor_memory.py`). `opcodes`
    counts the mnemonics of the whole binary. `seconds` is the duration of the last compilation.
    """

    target: str
    registers: int
    spill_bytes: int
    stack: int
    shared: int
    loads: dict[int, int]
    stores: dict[int, int]
    uses_fp64: bool
    early_accesses: tuple[str, ...]
    seconds: float
    opcodes: Counter[str] = field(repr=False)

    def with_opcodes(self, opcodes: Counter[str]) -> Binary:
        """Return the binary with the counts of its instructions, once they are known."""
        accesses: dict[str, Counter[int]] = {"load": Counter(), "store": Counter()}
        classify = (
            machine_code.classify_nvidia if self.target.startswith("sm_") else machine_code.classify_amd
        )
        for opcode, n in opcodes.items():
            if access := classify(opcode):
                kind, bits = access
                accesses[kind][bits] += n
        return replace(self, opcodes=opcodes, loads=dict(accesses["load"]), stores=dict(accesses["store"]))

    def count(self, pattern: str) -> int:
        """Count the instructions whose mnemonic begins with this regular expression."""
        return sum(n for opcode, n in self.opcodes.items() if re.match(pattern, opcode))


@dataclass(frozen=True)
class _Unread:
    """A binary whose instructions are not disassembled yet."""

    binary: Binary
    code: bytes
    kernel: str


class CompileError(RuntimeError):
    """A variant that did not compile: it was refused, the compiler died, or it took too long.

    `stderr` is the end of what the compiler wrote meanwhile.
    """

    def __init__(self, target: str, kernel: str, reason: str, stderr: str) -> None:
        super().__init__(target, kernel, reason, stderr)
        self.target = target
        self.kernel = kernel
        self.reason = reason
        self.stderr = stderr

    def __str__(self) -> str:
        text = f"{self.kernel} for {self.target}: {self.reason}"
        return f"{text}\n{self.stderr}" if self.stderr else text


def compile_all(
    variants: Iterable[tuple[Variant, str]],
    *,
    workers: int = 1,
    timeout: float = 120,
    progress: Callable[[int, int, Binary | CompileError], None] | None = None,
) -> list[Binary | CompileError]:
    """Compile each (variant, target) and return the binaries or errors, in the same order.

    A failure is returned, not raised, and concerns its own variant only. `timeout` is in seconds for each variant.
    After each one, `progress` is called with the number done, the total, and the result.
    """
    jobs = list(variants)
    unknown = {target for _, target in jobs} - set(GPUS)
    if unknown:
        raise ValueError(f"unknown targets {sorted(unknown)}; known are {', '.join(GPUS)}")
    if workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers}")
    results: dict[int, Binary | CompileError] = {}
    cache_files = [_figures_file(*job) for job in jobs]

    def finish(index: int, result: Binary | CompileError) -> None:
        results[index] = result
        if progress is not None:
            progress(len(results), len(jobs), result)

    def finish_new(index: int, result: Binary | CompileError) -> None:
        cache_file = cache_files[index]
        if isinstance(result, Binary) and cache_file is not None:
            _write_cache(cache_file, result)
        finish(index, result)

    for index, cache_file in enumerate(cache_files):
        if cache_file is not None and cache_file.exists():
            finish(index, _read_cache(cache_file))
    new = [index for index in range(len(jobs)) if index not in results]
    with _Disassembly(workers, finish_new) as disassembly:
        for index, result in _compiled(jobs, new, workers, timeout):
            if isinstance(result, _Unread):
                disassembly.add(index, result)
            else:
                finish_new(index, result)
    return [results[index] for index in range(len(jobs))]


def _figures_file(variant: Variant, target: str) -> Path | None:
    """Return the file beside Triton's cache with an earlier run's figures for this binary, or None without a cache key.
    Its name derives from Triton's own key. If there is none, the child process reports what is wrong."""
    try:
        from triton import knobs
        from triton.compiler import make_backend
        from triton.compiler.compiler import get_cache_invalidating_env_vars, get_cache_key

        gpu = triton_target(target)
        backend = make_backend(gpu)
        source = source_of(kernel_of(variant), variant, gpu)
        options = backend.parse_options({**options_of(variant), **source.parse_options()})
        key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
    except Exception:
        return None
    digest = hashlib.sha256(f"{_hash_of_readers()} {target} {key}".encode()).hexdigest()
    return Path(knobs.cache.dir) / "weft-offline" / f"{digest}.json"


@functools.cache
def _hash_of_readers() -> str:
    """Return a hash of the code that reads binaries: figures that other code has read are not trusted."""
    files = (__file__, machine_code.__file__, tensor_memory.__file__)
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()


def _write_cache(path: Path, binary: Binary) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(vars(binary)))
    partial.replace(path)


def _read_cache(path: Path) -> Binary:
    binary = Binary(**json.loads(path.read_text()))
    return replace(binary, early_accesses=tuple(binary.early_accesses)).with_opcodes(Counter(binary.opcodes))


def _compiled(
    jobs: Sequence[tuple[Variant, str]], wanted: Sequence[int], workers: int, timeout: float
) -> Iterator[tuple[int, Binary | _Unread | CompileError]]:
    """Yield the index and result of each wanted job, in the order in which children finish them."""
    waiting, left = deque(wanted), len(wanted)
    team: list[_Worker] = []
    try:
        while left:
            while waiting and len(team) < workers:
                team.append(_Worker(timeout))
            for worker in [w for w in team if w.job is None]:
                if waiting:
                    index = waiting.popleft()
                    worker.give(index, *jobs[index])
                else:
                    team.remove(worker)
                    worker.stop()
            next_deadline = min(worker.deadline for worker in team)
            readable = wait([worker.pipe for worker in team], max(0.0, next_deadline - time.monotonic()))
            for worker in list(team):
                job = worker.job
                assert job is not None
                result = worker.listen(worker.pipe in readable)
                if worker.lost:
                    team.remove(worker)
                    worker.stop()
                if result is not None:
                    left -= 1
                    yield job, result
    finally:
        for worker in team:
            worker.stop()


class _Disassembly:
    """Batches of NVIDIA binaries to disassemble, many kernels of a target at a time. The disassembler takes half a
    second to start, longer than most kernels take to compile."""

    AT_ONCE = 32

    def __init__(self, workers: int, finish: Callable[[int, Binary | CompileError], None]) -> None:
        self.pool = ThreadPoolExecutor(workers)
        self.finish = finish
        self.gathered: dict[str, list[tuple[int, _Unread]]] = {}
        self.running: list[tuple[list[tuple[int, _Unread]], Future[list[Counter[str] | RuntimeError]]]] = []

    def add(self, index: int, unread: _Unread) -> None:
        target = unread.binary.target
        batch = self.gathered.setdefault(target, [])
        batch.append((index, unread))
        if len(batch) == self.AT_ONCE:
            self._begin(target)
        self._collect([future for _, future in self.running if future.done()])

    def _begin(self, target: str) -> None:
        batch = self.gathered.pop(target)
        codes = [unread.code for _, unread in batch]
        self.running.append((batch, self.pool.submit(machine_code.disassembled, codes, target)))

    def _collect(self, futures: list[Future[list[Counter[str] | RuntimeError]]]) -> None:
        for batch, future in [(b, f) for b, f in self.running if f in futures]:
            for (index, unread), opcodes in zip(batch, future.result(), strict=True):
                if isinstance(opcodes, RuntimeError):
                    self.finish(index, CompileError(unread.binary.target, unread.kernel, str(opcodes), ""))
                else:
                    self.finish(index, unread.binary.with_opcodes(opcodes))
        self.running = [(b, f) for b, f in self.running if f not in futures]

    def __enter__(self) -> _Disassembly:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self.pool:
            if kind is None:
                for target in list(self.gathered):
                    self._begin(target)
                self._collect([future for _, future in self.running])


class _Worker:
    """Parent's handle of a child process that compiles."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.job: int | None = None
        self.lost = False
        self.target = self.kernel = ""
        self.ready = False
        self.deadline = time.monotonic() + _START_SECONDS
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.log_start = 0
        self.pipe, theirs = multiprocessing.Pipe()
        # Share the parent's path, so that the child finds the modules that the parent can import.
        command = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"import {__name__} as offline; offline._serve({theirs.fileno()}, {timeout})"
        )
        # Use a new session, so that stopping the child also stops the assembler it may be waiting for.
        self.process = subprocess.Popen(
            [sys.executable, "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.log,
            pass_fds=(theirs.fileno(),),
            env=_environment(),
            start_new_session=True,
        )
        theirs.close()

    def give(self, index: int, variant: Variant, target: str) -> None:
        self.job, self.target, self.kernel = index, target, f"{variant.module}.{variant.kernel}"
        if self.ready:  # a child that is still starting has a deadline of its own, and its log still matters
            self.log_start = self.log.seek(0, os.SEEK_END)
            self.deadline = time.monotonic() + self.timeout
        with contextlib.suppress(OSError):  # if the child has died, `listen` will find out
            self.pipe.send((variant, target))

    def listen(self, readable: bool) -> Binary | _Unread | CompileError | None:
        """Return the result of the job, or None while it is still running."""
        if not readable:
            if time.monotonic() < self.deadline:
                return None
            self.lost = True
            limit = self.timeout if self.ready else _START_SECONDS
            return self._failure(f"{'no result' if self.ready else 'not started'} after {limit:g} s")
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            self.lost = True
            return self._failure(f"the compiler died ({self._ending()})")
        if message is None:
            self.ready = True
            self.deadline = time.monotonic() + self.timeout
            return None
        result = message if isinstance(message, (Binary, _Unread)) else self._failure(str(message))
        self.job = None
        return result

    def stop(self) -> None:
        # Nobody has waited for the child yet, so its id cannot belong to another process.
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.pipe.close()
        self.log.close()

    def _ending(self) -> str:
        end = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        if end is None or end.si_code == os.CLD_EXITED:
            return f"exit status {end.si_status if end else 'unknown'}"
        return signal.Signals(end.si_status).name

    def _failure(self, reason: str) -> CompileError:
        self.log.seek(self.log_start)
        text = self.log.read().decode(errors="replace").strip()
        # The compiler may print its whole module after its error, so the tail alone might not show the error.
        error = next((line for line in text.splitlines() if re.search(r"\berror\b", line, re.IGNORECASE)), "")
        if error and error not in reason:
            reason = f"{reason}: {error.strip()[:400]}"
        return CompileError(self.target, self.kernel, reason, text[-_TAIL:])


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    # Interpreted kernels cannot be compiled, and a cache of binaries alone has no PTX to read.
    for name in ("TRITON_INTERPRET", "TRITON_STORE_BINARY_ONLY"):
        environment.pop(name, None)
    # Kernels can query the present GPU, and their code must not depend on it.
    environment.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    return environment


# ---- code of the child process --------------------------------------------------------------------------------


def _serve(handle: int, timeout: float) -> None:
    os.set_inheritable(handle, False)  # Triton hands inheritable files to the assembler, which can outlive us
    pipe = Connection(handle)
    with contextlib.suppress(ImportError):  # its location differs between releases
        from triton.runtime.cache import triton_key

        triton_key()  # hashes the compiler once per process, which must not count as the first variant's time
    gc.freeze()  # imported objects are many and stay alive: exclude them from garbage collection
    pipe.send(None)
    while True:
        try:
            variant, target = pipe.recv()
        except EOFError:
            return
        signal.alarm(int(timeout) + 10)  # in case the parent is gone and cannot stop us
        try:
            result: Binary | _Unread | str = _compile(variant, target)
        except Exception as error:
            traceback.print_exc()
            result = f"{type(error).__name__}: {error}"[:_TAIL]
        signal.alarm(0)
        sys.stderr.flush()
        pipe.send(result)


def ttir_of(variant: Variant, target: str) -> str:
    """Return the TTIR of a variant for a target, after Triton's own passes."""
    return _compiled_to("ttir", variant, target)


def ttgir_of(variant: Variant, target: str) -> str:
    """Return the TTGIR of a variant for a target, in a fraction of the time of a full compilation."""
    return _compiled_to("ttgir", variant, target)


def _compiled_to(last: str, variant: Variant, target: str) -> str:
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    gpu = triton_target(target)
    source = source_of(kernel_of(variant), variant, gpu)
    backend = make_backend(gpu)
    options = backend.parse_options(options_of(variant))
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    implementation = backend.get_codegen_implementation(options)
    module = source.make_ir(gpu, options, implementation, backend.get_module_map(), context)
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, {})
        if stage == last:
            break
    return str(module)


def _compile(variant: Variant, target: str) -> Binary | _Unread:
    begin = time.perf_counter()
    kernel = kernel_of(variant)
    names = [name for name, _ in variant.signature]
    if names != list(kernel.arg_names):
        raise ValueError(f"the signature has parameters {names}, but the kernel has {list(kernel.arg_names)}")
    types, constants = variant.types(), dict(variant.constants)
    expected = {name for name, kind in types.items() if kind == "constexpr"}
    if expected != set(constants):
        raise ValueError(f"constants were passed for {sorted(constants)}, but needed for {sorted(expected)}")
    if wrong := set(variant.divisible) - set(types):
        raise ValueError(f"the kernel has no integer parameters {sorted(wrong)} that could be divisible")
    gpu = triton_target(target)
    compiled = build(kernel, variant, gpu)
    if gpu.backend == "cuda":
        cubin, ptx = compiled.asm["cubin"], compiled.asm["ptx"]
        resources = machine_code.resources(cubin, lambda: _assembler_log(ptx, gpu, options_of(variant)))
        fp64 = re.search(_PTX_FP64, ptx) is not None
        opcodes: Counter[str] = Counter()
    else:
        resources, opcodes = machine_code.read_assembly(compiled.asm["amdgcn"])
        fp64 = any("_f64" in opcode for opcode in opcodes)
    binary = Binary(
        target=target,
        registers=resources.registers,
        spill_bytes=resources.spill_bytes,
        stack=resources.stack,
        shared=compiled.metadata.shared,
        loads={},
        stores={},
        uses_fp64=fp64,
        early_accesses=tuple(early_accesses(compiled.asm["ttgir"])),
        seconds=time.perf_counter() - begin,
        opcodes=Counter(),
    )
    if gpu.backend == "cuda":
        return _Unread(binary, machine_code.instructions(cubin), f"{variant.module}.{variant.kernel}")
    return binary.with_opcodes(opcodes)


# Moves of 64-bit values are not arithmetic, whatever type they carry.
_PTX_FP64 = re.compile(r"(?<![\w.])(?!(?:ld|st|mov|selp)\b)[a-z]\w*(?:[.:]+\w+)*\.f64\b")


def _assembler_log(ptx: str, gpu: Any, options: dict[str, Any]) -> str:
    """Return the output of ptxas -v, run exactly as Triton runs it: its options differ between releases."""
    from triton import knobs
    from triton.backends.compiler import Language
    from triton.compiler import make_backend

    backend = make_backend(gpu)
    stages: dict[str, Callable[[str, dict[str, Any]], bytes]] = {}
    backend.add_stages(stages, backend.parse_options(dict(options)), Language.TRITON)
    log = io.StringIO()
    with knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True
        stages["cubin"](ptx, {})
    return log.getvalue()

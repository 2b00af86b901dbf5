"""Compiled kernels on disk: when one is stale, who may have written it, and many processes at once."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton
import triton.language as tl
import triton_loom
from processes import run_python
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.extra import libdevice
from triton_loom import compiler
from triton_loom.device import storage, toolchain
from triton_loom.options import LoomOptions

KERNEL = """
#include "launch.h"
struct Args { i32 *x; };
static void program(const Args &a, const Program &p) { a.x[p.id[0]] = p.id[0]; }
LOOM_KERNEL(count, Args, program, 0)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o755)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(directory))
    return directory


@pytest.fixture
def fresh_toolchain(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Yield a toolchain with empty caches, and empty them again after the test."""
    memories = toolchain.compiler, toolchain.identity, toolchain.is_gcc, toolchain.build
    for memory in memories:
        memory.cache_clear()
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    for memory in memories:
        memory.cache_clear()


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# ---- the compiler ----------------------------------------------------------------------------------------


def test_an_optimizer_bug_is_worked_around(fresh_toolchain: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fails = 'case "$*" in *-O2*) echo "kernel.cpp: internal compiler error: in loops" >&2; exit 1;; esac'
    fresh_toolchain.setenv("CXX", str(script(tmp_path / "bin" / "my-compiler", f'{fails}; exec g++ "$@"')))
    assert toolchain.build(KERNEL)
    with pytest.raises(toolchain.BuildError, match="does not compile"):
        toolchain.build("not C++")


def test_cxx_is_respected(fresh_toolchain: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    wrapper = script(tmp_path / "bin" / "my-compiler", f'echo "$@" >> {log}; exec g++ "$@"')
    fresh_toolchain.setenv("CXX", f"{wrapper} -DGIVEN")
    fresh_toolchain.setenv("CC", "clang")
    assert toolchain.compiler() == (str(wrapper), "-DGIVEN")
    toolchain.build(KERNEL)
    assert "-DGIVEN" in log.read_text()


@pytest.mark.parametrize(
    ("cc", "cxx"),
    [("gcc", "g++"), ("x86_64-linux-gnu-gcc-9", "x86_64-linux-gnu-g++-9"), ("clang-7", "clang++-7")],
)
def test_the_cxx_sibling_of_cc_is_used(
    fresh_toolchain: pytest.MonkeyPatch, tmp_path: Path, cc: str, cxx: str
) -> None:
    sibling = script(tmp_path / "bin" / cxx, "")
    script(tmp_path / "bin" / cc, "")
    fresh_toolchain.setenv("CC", str(tmp_path / "bin" / cc))
    assert toolchain.compiler() == (str(sibling),)
    sibling.unlink()
    toolchain.compiler.cache_clear()
    assert toolchain.compiler() != (
        str(sibling),
    )  # a C compiler whose C++ half is not installed is no compiler


def test_a_missing_compiler_is_an_error(fresh_toolchain: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert triton_loom.obstacle() is None
    toolchain.compiler.cache_clear()
    fresh_toolchain.setenv("PATH", str(tmp_path))
    with pytest.raises(toolchain.BuildError, match=r"apt install g\+\+"):
        toolchain.build(KERNEL)
    assert triton_loom.obstacle() == toolchain.NO_COMPILER


def test_a_missing_cxx_is_an_error(fresh_toolchain: pytest.MonkeyPatch) -> None:
    """There is no fallback from the compiler that the user chose."""
    fresh_toolchain.setenv("CXX", "/nonexistent/c++ -O1")
    with pytest.raises(
        toolchain.BuildError, match=r"^CXX=/nonexistent/c\+\+ -O1 names no program .* unset it"
    ):
        toolchain.compiler()
    assert str(triton_loom.obstacle()).startswith("CXX=/nonexistent/c++ -O1 names")


def test_a_broken_compiler_is_named_as_the_cause(fresh_toolchain: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error does not blame the kernel, and has the compiler's whole output."""
    broken = script(tmp_path / "bin" / "my-compiler", "echo no license >&2; echo call the vendor >&2; exit 1")
    fresh_toolchain.setenv("CXX", str(broken))
    with pytest.raises(
        toolchain.BuildError, match=r"(?s)does not work: .*-std=.*no license\ncall the vendor$"
    ):
        toolchain.build(KERNEL)


def test_a_compiler_without_output_is_an_error(fresh_toolchain: pytest.MonkeyPatch) -> None:
    fresh_toolchain.setenv("CXX", "true")
    with pytest.raises(toolchain.BuildError, match=r"the C\+\+ compiler does not work"):
        toolchain.build(KERNEL)


def test_an_error_shows_the_command_and_the_diagnostic() -> None:
    with pytest.raises(toolchain.BuildError, match=r"(?s)-std=c\+\+17.*kernel\.cpp:1:.*nonsense"):
        toolchain.build("nonsense();")


def test_the_product_depends_on_nothing_but_libc() -> None:
    library = Path(toolchain.load(toolchain.build(KERNEL), "count")._name)
    needed = subprocess.check_output(["readelf", "-d", library], text=True)
    assert set(re.findall(r"Shared library: \[(\w+)", needed)) <= {"libc", "libm"}


def test_building_twice_gives_the_same_bytes(fresh_toolchain: pytest.MonkeyPatch) -> None:
    first = toolchain.build(KERNEL)
    toolchain.build.cache_clear()
    assert toolchain.build(KERNEL) == first


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names of x86 processors")
def test_other_processors_can_be_named() -> None:
    assert toolchain.build(KERNEL, "x86-64") != toolchain.build(KERNEL, "x86-64-v3")


KERNEL_OF_TRITON = """#include "simd.h"
#include "tile.h"
#include "launch.h"

struct Args { f32 *x; };
static void program(const Args &a, const Program &p) { a.x[p.id[0]] = NUMBER; }
LOOM_KERNEL(numbers, Args, program, 0)
"""


def logging_compiler(tmp_path: Path) -> tuple[Path, Path]:
    log = tmp_path / "log"
    log.touch()
    return script(tmp_path / "bin" / "g++", f'echo "$*" >> {log}; exec g++ "$@"'), log


def test_the_same_text_is_built_once(
    cache: Path, fresh_toolchain: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This holds even for processes that share only the cache."""
    wrapper, log = logging_compiler(tmp_path)
    fresh_toolchain.setenv("CXX", str(wrapper))
    first = toolchain.build(KERNEL)
    toolchain.build.cache_clear()
    assert toolchain.build(KERNEL) == first
    assert log.read_text().count("\n") == 1
    toolchain.build(KERNEL, quick=True)
    toolchain.build(KERNEL, "x86-64")
    assert log.read_text().count("\n") == 3
    cached = list((cache / "loom-build").glob("*.so"))
    assert len(cached) == 3
    assert first in [file.read_bytes() for file in cached]


def test_nothing_is_loaded_from_where_others_can_write(
    cache: Path, fresh_toolchain: pytest.MonkeyPatch
) -> None:
    toolchain.build(KERNEL)
    toolchain.build.cache_clear()
    (cache / "loom-build").chmod(0o777)
    with pytest.raises(storage.UntrustedCache, match="loom-build can be written by every user"):
        toolchain.build(KERNEL)


@pytest.mark.parametrize("quick", [False, True])
def test_headers_are_precompiled_for_the_second_kernel(
    cache: Path, fresh_toolchain: pytest.MonkeyPatch, tmp_path: Path, quick: bool
) -> None:
    """The first kernel does not wait for it; the binary is the same with and without precompiled headers."""
    wrapper, log = logging_compiler(tmp_path)
    fresh_toolchain.setenv("CXX", str(wrapper))
    sources = [KERNEL_OF_TRITON.replace("NUMBER", f"{number}.0f") for number in range(4)]
    first, *others = (toolchain.build(source, quick=quick) for source in sources)
    commands = log.read_text().splitlines()
    assert ["c++-header" in command for command in commands] == [False, True, False, False, False]
    assert ["-include" in command for command in commands] == [False, False, True, True, True]
    (digest,) = (cache / "loom-build").glob("*.gch")
    digest.write_bytes(b"no digest of anything")  # the compiler then reads the headers themselves
    for file in (cache / "loom-build").glob("*.so"):
        file.unlink()
    toolchain.build.cache_clear()
    assert [toolchain.build(source, quick=quick) for source in sources] == [first, *others]


ACCESSES = """
  typedef VECTOR V;
  lane<V>::type *const at = (lane<V>::type *)a.x;
  const auto m = splat<like<V, i32>>(-1);
  const auto address = splat<like<V, i64>>((i64)at);
  const V v = seen_load<V>(p, 0, 0, at, p.id[1], m, load_each<V>(p, 0, 0, address, m, V{}));
  seen_store<V>(p, 0, 0, at, p.id[1], m, v), store_each<V>(p, 0, 0, address, m, v);
  begin_atomic(p), seen_atomic(p, 0, 0, at, true, RELEASE, [&] { return *at; });
  fits(p, 0, p.id[1]);
"""


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_the_witness_is_compiled_for_the_second_kernel(
    cache: Path, fresh_toolchain: pytest.MonkeyPatch, tmp_path: Path, mode: int
) -> None:
    """The first kernel has the witness in its own text. Either way, all functions that a kernel calls are there."""
    wrapper, log = logging_compiler(tmp_path)
    fresh_toolchain.setenv("CXX", str(wrapper))
    text = f"#define LOOM_WITNESS {mode}\n" + KERNEL_OF_TRITON.replace(
        '"launch.h"', '"launch.h"\n#include "witness.h"'
    )
    for vector in ("u8x16", "u8x32", "u16x16", "f32x16", "f64x8"):
        source = text.replace("a.x[p.id[0]] = NUMBER;", ACCESSES.replace("VECTOR", vector))
        assert toolchain.load(toolchain.build(source, quick=True), vector).loom_launch
    commands = log.read_text().splitlines()
    assert [f"-DLOOM_WITNESS={mode}" in command for command in commands] == [0, 0, 1, 0, 0, 0, 0]
    assert [".o " in command for command in commands[3:]] == [True] * 4


# ---- the key ---------------------------------------------------------------------------------------------


def key() -> str:
    return compiler.LoomBackend(GPUTarget("cpu", "native", 1)).hash()


def test_the_key_costs_no_process(fresh_toolchain: pytest.MonkeyPatch) -> None:
    fresh_toolchain.setattr(subprocess, "Popen", None)
    assert key() == key()


def test_another_compiler_is_another_key(fresh_toolchain: pytest.MonkeyPatch, tmp_path: Path) -> None:
    binary = script(tmp_path / "bin" / "g++", 'exec /usr/bin/g++ "$@"')
    fresh_toolchain.setenv("CXX", str(binary))
    keys = {key()}
    for change in (lambda: os.utime(binary, (1, 1)), lambda: fresh_toolchain.setenv("CXX", f"{binary} -g")):
        change()
        for memory in (toolchain.compiler, toolchain.identity):
            memory.cache_clear()
        keys.add(key())
    assert len(keys) == 3


def test_another_processor_is_another_key(fresh_toolchain: pytest.MonkeyPatch) -> None:
    before = key()
    toolchain.identity.cache_clear()
    fresh_toolchain.setattr(toolchain, "processor", lambda: "flags: fpu")
    assert key() != before


def test_another_header_is_another_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "compiler.py").write_text("")
    monkeypatch.setattr(compiler, "__file__", str(tmp_path / "compiler.py"))
    keys = set()
    for text in ("one", "two"):
        (tmp_path / "include" / "simd.h").write_text(text)
        compiler._hash_of_sources.cache_clear()
        keys.add(key())
    compiler._hash_of_sources.cache_clear()
    assert len(keys) == 2


@triton.jit
def rounded(x_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, libdevice.rint(tl.load(x_ptr + i, i < 9, other=0)), i < 9)


@pytest.mark.parametrize("arch", ["native", "native+sanitize", "native+explain"])
def test_all_code_that_compiles_is_in_the_key(cache: Path, arch: str) -> None:
    """A change of any other file does not invalidate compiled kernels."""
    ran: set[str] = set()
    sys.setprofile(lambda frame, event, arg: ran.add(frame.f_code.co_filename))
    try:
        source = ASTSource(rounded, {"x_ptr": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": 16})
        triton.compile(source, target=GPUTarget("cpu", arch, 1))
    finally:
        sys.setprofile(None)
    package = Path(triton_loom.__file__).parent
    compiling = {Path(file) for file in ran if package in Path(file).parents}
    assert package / "codegen" / "emit.py" in compiling
    names_found_late = {package / "__init__.py"}
    assert compiling <= {*compiler.sources(), *names_found_late}


def test_the_prover_is_not_in_the_key() -> None:
    assert not {file.parent.name for file in compiler.sources()} & {
        "prove",
        "ptx",
        "emulator",
        "witness",
        "testing",
    }


def test_options_are_in_the_key() -> None:
    assert LoomOptions().hash() == LoomOptions.of({"num_warps": 4, "unheard_of": 1, "maxnreg": None}).hash()
    assert LoomOptions().hash() != LoomOptions(debug=True).hash()


# ---- loading ---------------------------------------------------------------------------------------------


def test_loads_from_a_private_directory(cache: Path) -> None:
    library = Path(toolchain.load(toolchain.build(KERNEL), "count")._name)
    assert library.parent.parent == cache
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(library.stat().st_mode) == 0o600
    assert list(library.parent.iterdir()) == [library]


@pytest.mark.parametrize("what", ["cache", "directory", "file"])
def test_refuses_what_others_can_write(cache: Path, what: str) -> None:
    binary = toolchain.build(KERNEL)
    file = Path(toolchain.load(binary, "count")._name)
    changed = {"cache": cache, "directory": file.parent, "file": file}[what]
    changed.chmod(changed.stat().st_mode | 0o002)
    with pytest.raises(
        storage.UntrustedCache, match=f"{changed.name} can be written by every user.*chmod go-w"
    ):
        toolchain.load(binary, "count")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_refuses_what_belongs_to_others(cache: Path) -> None:
    os.chown(cache, 12345, -1)
    with pytest.raises(storage.UntrustedCache, match="belongs to user 12345"):
        toolchain.load(toolchain.build(KERNEL), "count")


def test_a_group_may_write_if_it_is_ones_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.chmod(0o775)
    for answer in (True, False):
        monkeypatch.setattr(storage, "_is_private_group", lambda group, answer=answer: answer)
        if answer:
            storage.check_trusted(str(cache))
        else:
            with pytest.raises(storage.UntrustedCache, match="can be written by all of group"):
                storage.check_trusted(str(cache))


def test_a_damaged_file_is_replaced(cache: Path) -> None:
    binary = toolchain.build(KERNEL + "// damaged")
    path = storage.keep(binary, str(cache / "loom"), "kernel.so")
    Path(path).write_bytes(binary[:100])
    storage.keep(binary, str(cache / "loom"), "kernel.so")
    assert Path(path).read_bytes() == binary


def test_a_cache_without_room_is_no_obstacle(cache: Path) -> None:
    (cache / "loom").write_text("a file where the directory should be")
    library = Path(toolchain.load(toolchain.build(KERNEL), "count")._name)
    assert cache not in library.parents
    assert library.parent.stat().st_mode & 0o077 == 0


# ---- many processes --------------------------------------------------------------------------------------

# One process imports everything, then forks into `processes`, which all start from the same empty cache.
CROWD = """
import os, sys, traceback
import torch, triton, triton.language as tl
from triton.runtime.cache import triton_key
from triton_loom import compiler
from triton_loom.device import toolchain

torch.set_num_threads(1)
triton_key(), toolchain.identity(), compiler._hash_of_sources()

@triton.jit
def double(x_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i) * 2)

def compile_and_launch():
    x = torch.arange(64.0)
    double[(4,)](x, BLOCK=16)
    assert torch.equal(x, torch.arange(64.0) * 2), x

binary = toolchain.build(sys.stdin.read())

def load_only():
    assert toolchain.load(binary, "count").loom_launch

def crowd(processes, act):
    start, go = os.pipe()
    children = []
    for _ in range(processes):
        if pid := os.fork():
            children.append(pid)
            continue
        try:
            os.close(go)
            os.read(start, 1)  # returns for all when the parent closes its end
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(go)
    return [os.waitpid(pid, 0)[1] for pid in children]

processes = int(sys.argv[2])
failed = sum(map(bool, crowd(processes, compile_and_launch if sys.argv[1] == "launch" else load_only)))
print(f"{failed} of {processes} failed")
"""


@pytest.mark.parametrize("act", ["load", "launch"])
@pytest.mark.parametrize("processes", [16, pytest.param(200, marks=pytest.mark.slow)])
def test_many_processes_start_at_once(cache: Path, tmp_path: Path, act: str, processes: int) -> None:
    program = tmp_path / "crowd.py"
    program.write_text(CROWD)
    command = [sys.executable, program, act, str(processes)]
    run = subprocess.run(command, input=KERNEL, capture_output=True, text=True)
    assert run.stdout == f"0 of {processes} failed\n", run.stderr[-3000:]
    assert len(list((cache / "loom").iterdir())) == 1  # one product, no leftovers


ONE_LAUNCH = """
import torch, triton, triton.language as tl

@triton.jit
def double(x_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i) * 2)

double[(1,)](torch.ones(16), BLOCK=16)
"""


def test_a_second_process_does_not_compile(cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    compiler = script(tmp_path / "bin" / "g++", f'echo run >> {log}; exec g++ "$@"')
    program = tmp_path / "launch.py"
    program.write_text(ONE_LAUNCH)
    for _ in range(2):
        assert run_python(program, CXX=str(compiler)).returncode == 0
        assert log.read_text() == "run\n"

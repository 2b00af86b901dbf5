"""The CPU as a Triton device: its activation, its launches, and its properties.

The first half launches kernels written by hand against include/launch.h, so that only the launch can fail; the
second half goes through `@triton.jit`.
"""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
import triton_loom
from triton.backends import Backend, backends
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor
from triton_loom.device import launcher, toolchain
from triton_loom.driver import CPU, LoomDriver

pytestmark = pytest.mark.compat

THREADS = [1, 2, 4]


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with triton_loom.active():
        yield


def by_hand(
    body: str, signature: dict[str, Any], args: str, scratch: int = 0, **metadata: Any
) -> Callable[..., None]:
    """Return `launch((x, y, z), *args)` for a kernel given as the C++ of its Args and of its program."""
    text = f"""
        #include "launch.h"
        struct Args {{ {args} }};
        extern "C" int gettid(), sched_yield();
        static void program(const Args &a, const Program &p) {{ {body} }}
        LOOM_KERNEL(by_hand, Args, program, {scratch})
    """
    about = {
        "name": "by_hand",
        "serial": False,
        "launch_cooperative_grid": False,
        "scratch_bytes": scratch,
        "spins": False,
    }
    run = launcher.LoomLauncher(SimpleNamespace(signature=signature), SimpleNamespace(**(about | metadata)))
    _, function = launcher.load(toolchain.build(text), "by_hand")

    def launch(grid: tuple[int, int, int], *arguments: Any, enter: Any = None, leave: Any = None) -> None:
        run(*grid, 0, function, None, "metadata", enter, leave, *arguments)

    return launch


# ---- programs and threads --------------------------------------------------------------------------------

COUNT = """
    long long at = (p.id[2] * (long long)p.grid[1] + p.id[1]) * p.grid[0] + p.id[0];
    __atomic_fetch_add(a.counts + at, 1, __ATOMIC_RELAXED);
"""


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize(
    "grid", [(1, 1, 1), (7, 1, 1), (1, 9, 1), (3, 5, 2), (1, 1, 11), (100_003, 1, 1)], ids=str
)
def test_every_program_runs_once(grid: tuple[int, int, int], threads: int) -> None:
    torch.set_num_threads(threads)
    launch = by_hand(COUNT, {"counts": "*i32"}, "i32 *counts;")
    counts = torch.zeros(grid[::-1], dtype=torch.int32)
    launch(grid, counts)
    assert (counts == 1).all()


@pytest.mark.parametrize("grid", [(0, 1, 1), (4, 0, 1), (4, 4, 0)], ids=str)
def test_an_empty_grid_launches_nothing(grid: tuple[int, int, int]) -> None:
    launch = by_hand('fail(p, "ran");', {"n": "i32"}, "i32 n;")
    seen: list[str] = []
    launch(grid, 1, enter=lambda _: seen.append("enter"), leave=lambda _: seen.append("exit"))
    assert seen == ["enter", "exit"]


@pytest.mark.parametrize("grid", [(-1, 1, 1), (-2, -3, 1), (2**31, 1, 1)], ids=str)
def test_an_impossible_grid_is_refused(grid: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="extent of a grid"):
        by_hand("", {"n": "i32"}, "i32 n;")(grid, 1)


# Every program waits until the promised number of threads have begun one.
RECORD_THREAD = """
    a.thread[p.id[0]] = gettid();
    __atomic_fetch_add(a.begun, 1, __ATOMIC_RELAXED);
    while (__atomic_load_n(a.begun, __ATOMIC_RELAXED) < a.promised) sched_yield();
"""
RECORD = ({"thread": "*i64", "begun": "*i32", "promised": "i32"}, "i64 *thread; i32 *begun; i32 promised;")


def threads_of(launch: Callable[..., None], programs: int, promised: int) -> set[int]:
    thread = torch.zeros(programs, dtype=torch.int64)
    launch((programs, 1, 1), thread, torch.zeros(1, dtype=torch.int32), promised)
    return set(thread.tolist())


class TestThreads:
    @pytest.mark.parametrize("threads", THREADS)
    def test_launches_use_as_many_threads_as_torch(self, threads: int) -> None:
        torch.set_num_threads(threads)
        assert len(threads_of(by_hand(RECORD_THREAD, *RECORD), 64, threads)) == threads

    def test_launches_use_no_more_threads_than_programs(self) -> None:
        torch.set_num_threads(4)
        assert len(threads_of(by_hand(RECORD_THREAD, *RECORD), 2, 2)) == 2

    def test_launches_use_torchs_own_threads(self) -> None:
        """A second pool would add threads to the process; these are torch's."""
        torch.set_num_threads(4)
        torch.randn(1 << 20).exp_().sum()
        before = set(os.listdir("/proc/self/task"))
        used = threads_of(by_hand(RECORD_THREAD, *RECORD), 64, 4)
        assert {str(thread) for thread in used} <= before
        assert set(os.listdir("/proc/self/task")) == before

    def test_cooperative_programs_all_run_at_once(self) -> None:
        """There are more programs than cores, each waiting for all others, although the kernel is also serial."""
        torch.set_num_threads(1)
        launch = by_hand(RECORD_THREAD, *RECORD, launch_cooperative_grid=True, serial=True)
        assert len(threads_of(launch, 9, 9)) == 9


def test_serial_programs_run_in_order() -> None:
    torch.set_num_threads(4)
    launch = by_hand(
        "a.order[(*a.next)++] = p.id[0] + 100 * p.id[1];",
        {"order": "*i32", "next": "*i32"},
        "i32 *order; i32 *next;",
        serial=True,
    )
    order = torch.zeros(70, dtype=torch.int32)
    launch((10, 7, 1), order, torch.zeros(1, dtype=torch.int32))
    assert order.tolist() == [x + 100 * y for y in range(7) for x in range(10)]


# Fills scratch memory with the program's number, gives the others time, and checks whether it is still there.
OWN_SCRATCH = """
    i32 *own = (i32 *)p.scratch;
    if ((u64)own % 64) fail(p, "alignment");
    for (int i = 0; i < 250; ++i) own[i] = p.id[0] + a.salt;
    for (volatile int pause = 0; pause < 2000; ++pause) {}
    for (int i = 0; i < 250; ++i) if (own[i] != p.id[0] + a.salt) fail(p, "overwritten");
    __atomic_fetch_add(a.done, 1, __ATOMIC_RELAXED);
"""


def test_scratch_memory_is_each_threads_own() -> None:
    """This holds even if several of the caller's threads launch at once: 4 x 3 threads share nothing."""
    torch.set_num_threads(3)
    launch = by_hand(OWN_SCRATCH, {"salt": "i32", "done": "*i32"}, "i32 salt; i32 *done;", scratch=1000)

    def caller(salt: int) -> int:
        torch.set_num_threads(3)
        finished = torch.zeros(1, dtype=torch.int32)
        for _ in range(20):
            launch((50, 1, 1), salt, finished)
        return int(finished)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(caller, [0, 1000, 2000, 3000])) == [1000] * 4


def test_scratch_memory_grows() -> None:
    touch = "p.scratch[{0} - 1] = 1;"
    for size in (64, 1 << 20, 1 << 12):
        by_hand(touch.format(size), {"n": "i32"}, "i32 n;", scratch=size)((8, 1, 1), 0)


@pytest.mark.parametrize("threads", THREADS)
def test_a_failing_program_raises(threads: int) -> None:
    torch.set_num_threads(threads)
    text = """
        if (p.id[1] == 3 && p.id[0] == 5) fail(p, "x > 0");
        ++a.counts[p.id[1] * 8 + p.id[0]];
    """
    launch = by_hand(text, {"counts": "*i32"}, "i32 *counts;")
    counts, seen = torch.zeros(8, 8, dtype=torch.int32), list[str]()
    with pytest.raises(triton_loom.DeviceAssertion, match=r"x > 0 \(in program \(5, 3, 0\) of by_hand\)"):
        launch((8, 8, 1), counts, enter=seen.append, leave=seen.append)
    assert seen == ["metadata"] * 2
    assert counts.sum() <= 64
    if threads == 1:
        assert counts.sum() == 3 * 8 + 6
    launch((5, 8, 1), counts)  # and the next launch is not concerned


def test_a_long_message_is_cut() -> None:
    with pytest.raises(triton_loom.DeviceAssertion, match=r"^x{495} \("):
        by_hand(f'fail(p, "{"x" * 2000}");', {"n": "i32"}, "i32 n;")((1, 1, 1), 0)


# ---- arguments -------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


def packed(signature: dict[str, Any], *args: Any) -> bytes:
    return launcher.argument_packer(signature)(args)


def test_scalars_are_laid_out_as_in_c() -> None:
    kinds = ["i1", "i64", "i8", "u8", "i16", "u16", "i32", "u32", "u64", "fp16", "bf16", "fp32", "u1", "fp64"]
    values = [True, -(2**63), -128, 255, -(2**15), 2**16 - 1, -(2**31), 2**32 - 1, 2**64 - 1]
    floats = [1.5, -1.5, 0.1, False, 0.1]
    read = "i1 i64 i8 u8 i16 u16 i32 u32 u64 u16 u16 f32 i1 f64".replace("i1 ", "bool ").split()
    members = " ".join(f"{kind} m{i};" for i, kind in enumerate(read))
    copy = " ".join(f"a.out[{i}] = a.m{i};" for i in range(len(read)))
    launch = by_hand(
        copy, {**{f"m{i}": kind for i, kind in enumerate(kinds)}, "out": "*fp64"}, members + "f64 *out;"
    )
    out = torch.zeros(14, dtype=torch.float64)
    launch((1, 1, 1), *values, *floats, out)
    assert out.tolist() == [*map(float, values), 0x3E00, 0xBFC0, float(torch.tensor(0.1)), 0.0, 0.1]


def test_floats_beyond_float32_become_infinite() -> None:
    assert packed({"x": "fp32", "y": "fp32"}, 1e300, -1e300) == struct.pack("ff", float("inf"), float("-inf"))


def test_integers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(struct.error):
        packed({"x": "u8"}, 256)


def test_tuples_are_flattened_and_constants_left_out() -> None:
    x, y = torch.zeros(3), torch.zeros(3)
    signature = {"a": ("*fp32", "constexpr", ("i32",)), "B": "constexpr", "c": Pair("i64", "*fp32"), "d": ()}
    got = packed(signature, (x, 16, (7,)), 128, Pair(9, y), ())
    assert got == struct.pack("@PiqP", x.data_ptr(), 7, 9, y.data_ptr())


def test_descriptors_are_unpacked() -> None:
    x = torch.zeros(6, 16, dtype=torch.float16)
    got = packed(
        {"x": "tensordesc<fp16[4, 8]>"}, TensorDescriptor(x, [6, 16], [16, 1], [4, 8], padding="nan")
    )
    assert got == struct.pack("@Pqqqq??iiqq", x.data_ptr(), 6, 16, 16, 1, True, False, 6, 16, 16, 1)


def test_pointers() -> None:
    x = torch.zeros(3)
    wrapped, empty = triton.reinterpret(x, tl.int32), torch.empty(0)
    got = packed(dict.fromkeys("abcde", "*i32"), x, wrapped, empty, None, 4096)
    assert got == struct.pack("PPPPP", x.data_ptr(), x.data_ptr(), 0, 0, 4096)


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: triton.reinterpret(x, tl.int32)], ids=["tensor", "wrapper"]
)
def test_a_tensor_elsewhere_is_refused(wrap: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(ValueError, match=r"argument 'x_ptr\[1\]' is a tensor on meta"):
        packed({"x_ptr": ("i32", "*fp32")}, (1, wrap(torch.zeros(3, device="meta"))))


# ---- which device is current -----------------------------------------------------------------------------


class Other(LoomDriver):
    """Stand-in for another backend."""

    answer = True

    @classmethod
    def is_active(cls) -> bool:
        return cls.answer


class AlsoDefers(LoomDriver):
    @classmethod
    def is_active(cls) -> bool:
        return not any(b.driver.is_active() for b in backends.values() if b.driver is not cls)


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("TRITON_DEFAULT_BACKEND", raising=False)
    for name in ("nvidia", "amd"):
        monkeypatch.delitem(backends, name, raising=False)
    return monkeypatch


def test_active_without_other_devices(undecided: pytest.MonkeyPatch) -> None:
    assert LoomDriver.is_active()


def test_defers_to_any_other_device(undecided: pytest.MonkeyPatch) -> None:
    undecided.setitem(backends, "other", Backend(backends["cpu"].compiler, Other))
    assert not LoomDriver.is_active()
    undecided.setattr(Other, "answer", False)
    assert LoomDriver.is_active()


def test_can_be_requested(undecided: pytest.MonkeyPatch) -> None:
    undecided.setitem(backends, "other", Backend(backends["cpu"].compiler, Other))
    undecided.setenv("TRITON_DEFAULT_BACKEND", "cpu")
    assert LoomDriver.is_active()


def test_two_that_defer_to_each_other_agree(undecided: pytest.MonkeyPatch) -> None:
    undecided.setitem(backends, "other", Backend(backends["cpu"].compiler, AlsoDefers))
    assert [LoomDriver.is_active(), AlsoDefers.is_active()].count(True) == 1


def test_active_nests_and_restores() -> None:
    driver = triton.runtime.driver
    for previous in (None, Other()):
        driver.set_active(previous)
        with triton_loom.active():
            outer = driver.active
            assert type(outer) is LoomDriver
            with contextlib.suppress(KeyError), triton_loom.active():
                assert type(driver.active) is LoomDriver
                raise KeyError
            assert driver.active is outer
        assert driver._active is previous


def test_a_device_of_its_own() -> None:
    driver = triton.runtime.driver.active
    assert driver.get_current_device() == CPU < 0
    assert driver.get_active_torch_device() == torch.device("cpu")
    assert driver.get_current_target().backend == "cpu"


def test_import_triton_stays_light() -> None:
    """Importing Triton finds the backend, and imports nothing that Triton alone would not."""
    code = """if True:
        import sys, triton
        print("cpu" in triton.backends.backends)
        heavy = {"torch", "numpy", "ctypes", "triton.language", "triton_loom.device", "triton_loom.options"}
        print(sorted(heavy & set(sys.modules)))
    """

    def imported(**environment: str) -> list[str]:
        run = [sys.executable, "-c", code]
        return subprocess.check_output(run, env=os.environ | environment, text=True).splitlines()

    with_loom, alone = imported(TRITON_BACKENDS_IN_TREE="0"), imported(TRITON_BACKENDS_IN_TREE="1")
    assert (with_loom[0], alone[0]) == ("True", "False")
    assert with_loom[1] == alone[1]


def test_loom_may_be_used_before_triton_is_imported() -> None:
    """Triton imports Loom's driver during its own import; Loom must not import Triton first."""
    code = """if True:
        import triton_loom
        with triton_loom.active(), triton_loom.sanitize() as seen, triton_loom.count() as counted:
            print(seen.findings, counted.launches)
    """
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[] []\n"


# ---- through @triton.jit ---------------------------------------------------------------------------------


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + tl.load(y_ptr + offsets, mask=mask), mask=mask)


def add(n: int, **options: Any) -> Any:
    x, y, out = torch.randn(n), torch.randn(n), torch.empty(n)
    kernel = add_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n, BLOCK=128, **options)
    assert torch.equal(out, x + y)
    return kernel


@pytest.mark.parametrize("n", [1, 127, 128, 100_003])
def test_vector_add(n: int) -> None:
    add(n)


def test_an_empty_tensor() -> None:
    add_kernel[(1,)](torch.empty(0), torch.empty(0), torch.empty(0), 0, BLOCK=128)
    add_kernel[(0,)](torch.empty(0), torch.empty(0), torch.empty(0), 0, BLOCK=128)


def test_the_c_text_is_kept() -> None:
    kernel = add(1000)
    assert set(kernel.asm) == {"source", "ttir", "c", "so"}
    assert "LOOM_KERNEL(add_kernel" in kernel.asm["c"]
    assert kernel.asm["so"].startswith(b"\x7fELF")
    assert kernel.metadata.name == kernel.name == "add_kernel"


def test_options_of_other_devices_are_accepted() -> None:
    add(1000, num_warps=8, num_stages=5, num_ctas=2, maxnreg=128, launch_pdl=True, waves_per_eu=2, kpack=2)
    add(1000, matrix_instr_nonkdim=16, schedule_hint="attention", enable_fp_fusion=False)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(KeyError, match="num_wraps"):
        add(1000, num_wraps=8)


def test_missing_and_wrong_arguments_are_named() -> None:
    """A compiled kernel takes arguments unchecked. Constants may be left out, and are not checked."""
    x, y, out = torch.ones(3, 16)
    compiled = add_kernel[(1,)](x, y, out, 16, BLOCK=16)
    compiled[(1, 1, 1)](x, y, out, 16)
    takes = (
        r"add_kernel: the kernel takes 5 arguments \(x_ptr, y_ptr, out_ptr, n, BLOCK\), constants included"
    )
    with pytest.raises(TypeError, match=rf"{takes}, and 2 were given: out_ptr, n are missing"):
        compiled[(1, 1, 1)](x, y)
    with pytest.raises(TypeError, match=r"compiled for n: i32, which 2\.5 is not"):
        compiled[(1, 1, 1)](x, y, out, 2.5)
    with pytest.raises(TypeError, match="compiled for out_ptr: \\*fp32, which 'a' is not"):
        compiled[(1, 1, 1)](x, y, "a", 16)
    with pytest.raises(TypeError, match=r"must be an integer.*cdiv.*\(2.5, 1, 1\)"):
        compiled[(2.5, 1, 1)](x, y, out, 16)
    with triton_loom.sanitize():
        watched = add_kernel[(1,)](x, y, out, 16, BLOCK=16)
        with pytest.raises(TypeError, match=rf"{takes}, and 3 were given: n is missing"):
            watched[(1, 1, 1)](x, y, out)


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(RuntimeError, match="storage"):
        add_kernel[(1,)](torch.ones(4).to_sparse(), torch.ones(4), torch.empty(4), 4, BLOCK=128)


def test_hooks_see_each_launch() -> None:
    seen = []
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook

    def entered(metadata: Any) -> None:
        seen.append(("enter", metadata.get()["name"]))

    def left(metadata: Any) -> None:
        seen.append(("exit", metadata.get()["name"]))

    enter.add(entered)
    leave.add(left)
    try:
        add(1000)
    finally:
        enter.remove(entered)
        leave.remove(left)
    assert seen == [("enter", "add_kernel"), ("exit", "add_kernel")]


def test_warmup_compiles_without_running() -> None:
    kernel = add_kernel.warmup(torch.float64, torch.float64, torch.float64, 64, BLOCK=64, grid=(1,))
    kernel._init_handles()
    device = triton.runtime.driver.active.get_active_torch_device()
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    # The usual estimate of the number of resident programs on a GPU.
    by_registers = properties["max_num_regs"] // (kernel.n_regs * properties["warpSize"] * 8)
    by_memory = properties["max_shared_mem"] // kernel.metadata.shared
    assert properties["multiprocessor_count"] * min(by_registers, by_memory) > 0


def test_do_bench() -> None:
    assert 0 < triton.testing.do_bench(lambda: add(1000), warmup=1, rep=5) < 1000
    low, high = triton.testing.do_bench(lambda: add(1000), warmup=1, rep=5, quantiles=[0.2, 0.8])
    assert 0 < low <= high


def test_autotune() -> None:
    configs = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (32, 256) for warps in (4, 8)]
    tuned = triton.autotune(configs, key=["n"])(add_kernel)
    x, y, out = torch.randn(3, 5000)
    tuned[lambda meta: (triton.cdiv(5000, meta["BLOCK"]),)](x, y, out, 5000)
    assert torch.equal(out, x + y)
    assert tuned.best_config in configs


@triton.jit
def tuple_kernel(pointers, sizes, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(pointers[0] + offsets, mask=offsets < sizes[0], other=0.0)
    if pointers[1] is not None:
        x += tl.load(pointers[1] + offsets, mask=offsets < sizes[1], other=0.0)
    tl.store(out_ptr + offsets, x)


def test_tuple_arguments() -> None:
    x, y, out = torch.ones(64), torch.ones(64), torch.empty(64)
    tuple_kernel[(1,)]((x, y), (40, 30), out, BLOCK=64)
    assert out.tolist() == [2.0] * 30 + [1.0] * 10 + [0.0] * 24
    tuple_kernel[(1,)]((x, None), (40, 1), out, BLOCK=64)
    assert out.tolist() == [1.0] * 40 + [0.0] * 24


@triton.jit
def descriptor_kernel(source, target, columns, scale, flag):
    row = tl.program_id(0) * 4
    for column in range(0, columns, 16):
        tile = source.load([row, column]) * scale
        if flag:
            tile = -tile
        target.store([row, column], tile)


@pytest.mark.parametrize("padding", ["zero", "nan"])
def test_descriptor_arguments(padding: str) -> None:
    """Descriptors stand between other arguments, so that any wrong layout shows."""
    x, out = torch.randn(6, 40), torch.zeros(8, 48)
    source = TensorDescriptor(x, [6, 40], [40, 1], [4, 16], padding=padding)
    descriptor_kernel[(2,)](source, TensorDescriptor(out, [8, 48], [48, 1], [4, 16]), 48, 0.5, True)
    assert torch.equal(out[:6, :40], x * -0.5)
    outside = torch.cat([out[6:].flatten(), out[:6, 40:].flatten()])
    assert outside.isnan().all() if padding == "nan" else (outside == 0).all()


@triton.jit
def barrier_kernel(counter_ptr, x_ptr, out_ptr, n):
    pid = tl.program_id(0)
    tl.store(x_ptr + pid, pid + 1)
    tl.atomic_add(counter_ptr, 1)
    while tl.atomic_add(counter_ptr, 0) < n:
        pass
    tl.store(out_ptr + pid, tl.load(x_ptr + (pid + 1) % n))


def test_a_grid_barrier() -> None:
    counter, x, out = torch.zeros(1, dtype=torch.int32), *torch.zeros(2, 6, dtype=torch.int32)
    barrier_kernel[(6,)](counter, x, out, 6, launch_cooperative_grid=True)
    assert out.tolist() == [2, 3, 4, 5, 6, 1]


@triton.jit
def assert_kernel(x_ptr):
    tl.device_assert(tl.load(x_ptr + tl.program_id(0)) > 0, "not positive")


def test_device_assert() -> None:
    x = torch.ones(10, dtype=torch.int32)
    assert_kernel[(10,)](x, debug=True)
    x[7] = 0
    with pytest.raises(
        triton_loom.DeviceAssertion, match=r"not positive.*program \(7, 0, 0\) of assert_kernel"
    ):
        assert_kernel[(10,)](x, debug=True)
    assert_kernel[(7,)](x, debug=True)


@triton.jit
def libdevice_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.arange(0, BLOCK), libdevice.fast_expf(libdevice.pow(x, 2.0)))


@triton.jit
def rounding_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.arange(0, BLOCK), libdevice.add_rz(x, x))


def test_libdevice() -> None:
    x, out = torch.rand(2, 64)
    libdevice_kernel[(1,)](x, out, BLOCK=64)
    torch.testing.assert_close(out, x.square().exp())


def test_missing_libdevice_functions_are_named() -> None:
    with pytest.raises(triton.CompilationError, match=r"libdevice\.add_rz does not exist on the CPU"):
        rounding_kernel[(1,)](torch.ones(64), torch.ones(64), BLOCK=64)
    with pytest.raises(
        triton.CompilationError, match=r"libdevice\.pow takes .*fp32, fp32.*, not \(bf16, fp32\)"
    ):
        libdevice_kernel[(1,)](torch.ones(64, dtype=torch.bfloat16), torch.ones(64), BLOCK=64)

"""Triton's own NVIDIA driver on the emulated libcuda: launches that arrive at the machine, and refused ones."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
import triton_loom
from triton import knobs
from triton.compiler import ASTSource
from triton.runtime import _allocation, driver
from triton.runtime.errors import OutOfResources
from triton_loom.emulator import libcuda
from triton_loom.emulator.devices import DEVICES
from triton_loom.emulator.driver import EmulatedDriver
from triton_loom.emulator.findings import Access, Finding
from triton_loom.ptx.text import Place

from .conftest import Recorder

TARGET = "sm_90"
PTR = 8  # bytes of a pointer


@triton.jit
def add_one(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1, mask=at < n)


def launch_add_one(grid: tuple[int, ...] = (4,), function: Any = add_one, **options: Any) -> Any:
    x = torch.arange(1000.0)
    y = torch.empty(1000)
    kernel = function[grid](x, y, 1000, BLOCK=256, **options)
    return kernel, x, y


# ---- what arrives ----------------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_a_launch_arrives(recorder: Recorder, target: str) -> None:
    with triton_loom.emulate(target) as gpu:
        _, x, y = launch_add_one((4, 3, 2), num_warps=8)
    arrived = recorder.last
    assert (arrived["grid"], arrived["block"], arrived["shared_bytes"]) == ((4, 3, 2), 256, 0)
    assert f".target {target}" in arrived["ptx"]
    # Two pointers, an integer, padding to a pointer's alignment, and the pointers of two kinds of scratch memory.
    assert arrived["parameters"] == struct.pack("=QQi4xQQ", x.data_ptr(), y.data_ptr(), 1000, 0, 0)
    spans = {each.name: (each.begin, each.end) for each in arrived["memory"]}
    assert spans == {
        "x_ptr": (x.data_ptr(), x.data_ptr() + 4000),
        "y_ptr": (y.data_ptr(), y.data_ptr() + 4000),
    }
    (launch,) = gpu.launches
    assert (launch.kernel, launch.grid, launch.threads) == ("add_one", (4, 3, 2), 256)
    assert "test_driver.py:" in launch.launched_from
    assert not launch.cooperative
    assert "add_one" in gpu.report()


class Pair(NamedTuple):
    ptr: Any
    stride: Any


@triton.jit
def every_type(
    out_ptr, i1: tl.int1, i8: tl.int8, u8: tl.uint8, i16: tl.int16, u16: tl.uint16, i32, u32: tl.uint32, i64,
    u64: tl.uint64, fp16: tl.float16, bf16: tl.bfloat16, fp32, fp64: tl.float64, missing_ptr, pair, many,
    FLAG: tl.constexpr,
):  # fmt: skip
    sum = i1.to(tl.int64) + i8 + u8 + i16 + u16 + i32 + u32 + i64 + u64.to(tl.int64)
    sum += (fp16.to(tl.float64) + bf16 + fp32 + fp64).to(tl.int64)
    tl.store(out_ptr, sum + tl.load(pair.ptr) + pair.stride + many[0] + many[1][0])


def test_parameters_of_every_type(recorder: Recorder) -> None:
    out, pointed = torch.empty(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    with triton_loom.emulate(TARGET):
        every_type[(1,)](
            out, True, -3, 200, -30_000, 60_000, -(2**31), 2**32 - 2, -(2**40), 2**64 - 2,
            1.5, -2.5, 0.1, 0.2, None, Pair(pointed, 7), (9, (2**33,)), FLAG=True,
        )  # fmt: skip
    half = struct.unpack("=H", struct.pack("=e", 1.5))[0]
    brain = struct.unpack("=I", struct.pack("=f", -2.5))[0] >> 16
    natural = struct.pack(
        "@QbbBhHiIqQHHfdQiiqQQ",
        *[out.data_ptr(), 1, -3, 200, -30_000, 60_000, -(2**31), 2**32 - 2, -(2**40), 2**64 - 2],
        *[half, brain, 0.1, 0.2, pointed.data_ptr(), 7, 9, 2**33, 0, 0],
    )
    assert recorder.last["parameters"] == natural
    assert [each.name for each in recorder.last["memory"]] == ["out_ptr", "pair.ptr"]


@triton.jit
def transposed(x_ptr, y_ptr, N: tl.constexpr):
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(y_ptr + column * N + row, tl.load(x_ptr + row * N + column))


def test_dynamic_shared_memory(recorder: Recorder) -> None:
    """A kernel has to opt in to more than 48 KiB: Triton requests it when it loads the module."""
    x, y = torch.randn(2, 128, 128)
    with triton_loom.emulate(TARGET):
        kernel = transposed[(1,)](x, y, N=128)
    assert recorder.last["shared_bytes"] == kernel.metadata.shared > 48 * 1024


def test_a_cooperative_launch(recorder: Recorder) -> None:
    with triton_loom.emulate(TARGET) as gpu:
        launch_add_one((4,), launch_cooperative_grid=True)
        assert gpu.launches[-1].cooperative
        most = 132 * 2048 // 128
        launch_add_one((most,), launch_cooperative_grid=True)
        with pytest.raises(RuntimeError, match=f"{most + 1} blocks, and an sm_90 .* holds {most} of them"):
            launch_add_one((most + 1,), launch_cooperative_grid=True)
        launch_add_one((most + 1,))


def test_a_launch_of_nothing(recorder: Recorder) -> None:
    with triton_loom.emulate(TARGET) as gpu:
        launch_add_one((4, 0))
    assert not gpu.launches
    assert gpu.report() == "sm_90: no kernel was launched"


@triton.jit
def made_on_the_device(x_ptr, y_ptr, N: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [N, N], [N, 1], [N, N])
    y = tl.make_tensor_descriptor(y_ptr, [N, N], [N, 1], [N, N])
    y.store([0, 0], x.load([0, 0]))


def test_scratch_memory_is_there_and_known(recorder: Recorder) -> None:
    x, y = torch.randn(2, 32, 32)
    with triton_loom.emulate(TARGET):
        kernel = made_on_the_device[(3,)](x, y, N=32)
    size = kernel.metadata.global_scratch_size * 3
    assert size > 0
    scratch = next(each for each in recorder.last["memory"] if each.name == "scratch memory")
    (address,) = struct.unpack("=Q", recorder.last["parameters"][2 * PTR : 3 * PTR])
    assert (scratch.begin, scratch.end) == (address, address + size)
    assert address % kernel.metadata.global_scratch_align == 0
    assert _allocation._allocator.get() is _allocation._NULL_ALLOCATOR


def test_launches_of_two_threads(recorder: Recorder) -> None:
    """The device is chosen for the process, so that autograd's threads launch on it too."""
    with triton_loom.emulate(TARGET) as gpu:
        launch_add_one()
        threads = [threading.Thread(target=launch_add_one) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(gpu.launches) == 5
    for launch in recorder.launches:
        pointers = struct.unpack("=QQ", launch["parameters"][: 2 * PTR])
        assert {each.begin for each in launch["memory"]} == set(pointers)


def test_an_autotuner_launches_every_configuration_once(recorder: Recorder) -> None:
    configurations = [triton.Config({"BLOCK": block}) for block in (128, 256, 512)]
    tuned = triton.autotune(configurations, key=["n"])(add_one)
    with triton_loom.emulate(TARGET):
        tuned[lambda meta: (meta["BLOCK"],)](torch.ones(1000), torch.ones(1000), 1000)
    assert [launch["grid"][0] for launch in recorder.launches] == [128, 256, 512, 128]
    assert tuned.best_config is configurations[0]


# ---- what is refused ---------------------------------------------------------------------------------------------


def test_too_much_shared_memory(recorder: Recorder) -> None:
    x = torch.ones(256, 256)
    with triton_loom.emulate(TARGET), pytest.raises(OutOfResources, match="shared memory"):
        made_on_the_device[(1,)](x, x, N=256)  # Triton itself compares with what the device says that it has
    with triton_loom.emulate("sm_86") as gpu:
        kernel, *_ = launch_add_one()
        most = DEVICES["sm_86"].shared_per_block
        clusters = driver.active.utils.cuOccupancyMaxActiveClusters  # which asks for shared memory first
        assert clusters(kernel.function, most, 1) == 84
        with pytest.raises(RuntimeError, match=r"asks for 101377 bytes .* an sm_86 has 101376 for a block"):
            clusters(kernel.function, most + 1, 1)
        gpu.launches.clear()
        launched_with(kernel, shared=most)
        with pytest.raises(RuntimeError, match="asks for 101377 bytes"):
            launched_with(kernel, shared=most + 1)
    assert [launch.shared_bytes for launch in gpu.launches] == [most]


def launched_with(
    kernel: Any, grid: tuple[int, int, int] = (1, 1, 1), warps: int = 4, ctas: int = 1, shared: int = 0
) -> None:
    """Launch a kernel with another configuration than it was compiled for."""
    x = torch.ones(1000)
    kernel.run(*grid, 0, kernel.function, (warps, ctas, shared), None, None, None, x, x, 1000, 256)


def test_launches_that_cuda_refuses(recorder: Recorder) -> None:
    with triton_loom.emulate("sm_80") as gpu:
        kernel, *_ = launch_add_one()
        with pytest.raises(
            RuntimeError, match=r"blocks of 256 x 1 x 1 threads, and was compiled .* for 128 x 1 x 1"
        ):
            launched_with(kernel, warps=8)
        with pytest.raises(RuntimeError, match="a grid of 1 x 65536 x 1 blocks"):
            launched_with(kernel, grid=(1, 65536, 1))
        with pytest.raises(RuntimeError, match="is allowed 49152: more than 48 KiB have to be asked for"):
            launched_with(kernel, shared=48 * 1024 + 1)
        with pytest.raises(RuntimeError, match="clusters of 2 blocks; an sm_80 has up to 1"):
            launched_with(kernel, ctas=2)
    assert len(gpu.launches) == len(recorder.launches) == 1
    with triton_loom.emulate("sm_90"):
        launched_with(kernel)  # its PTX is for an sm_80, which later ones run too
        kernel, *_ = launch_add_one()
        with pytest.raises(RuntimeError, match="clusters of 9 blocks; an sm_90 has up to 8"):
            launched_with(kernel, ctas=9)
        with pytest.raises(NotImplementedError, match=r"clusters of \(2, 1, 1\) blocks .* not emulated"):
            launched_with(kernel, ctas=2)
    with (
        triton_loom.emulate("sm_100"),
        pytest.raises(RuntimeError, match=r"compiled for sm_90a, and .* an sm_100"),
    ):
        launched_with(kernel)


def test_no_launch_outside_a_block(recorder: Recorder) -> None:
    with triton_loom.emulate(TARGET):
        kernel, *_ = launch_add_one()
    with pytest.raises(RuntimeError, match="no GPU is being emulated"):
        launched_with(kernel)


def test_a_binary_is_no_module(recorder: Recorder) -> None:
    with triton_loom.emulate(TARGET), pytest.raises(RuntimeError, match="the module is a cubin"):
        driver.active.utils.load_binary("add_one", b"\x7fELF and more", 0, 90)
    with triton_loom.emulate(TARGET), pytest.raises(RuntimeError, match=r"there is no \.entry in this PTX"):
        driver.active.utils.load_binary("add_one", b"no PTX", 0, 90)


def test_a_bare_address(recorder: Recorder) -> None:
    x, y = torch.ones(1000), torch.ones(1000)
    with triton_loom.emulate(TARGET) as gpu:
        kernel = add_one.warmup(x, y, 1000, BLOCK=256, grid=(1,))
        with pytest.raises(ValueError, match="y_ptr is the bare address"):
            kernel[(1, 1, 1)](x, y.data_ptr(), 1000, 256)
        gpu.allow(y)
        kernel[(1, 1, 1)](x, y.data_ptr(), 1000, 256)
    assert [each.name for each in recorder.last["memory"]] == ["x_ptr", "allowed[0]"]


def test_an_unknown_target() -> None:
    with pytest.raises(ValueError, match="no 'sm_70' can be emulated; there are sm_80, sm_86"):
        triton_loom.emulate("sm_70").__enter__()


def test_a_real_driver_is_left_alone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    libcuda.refuse_beside_a_gpu()
    with pytest.raises(libcuda.RealDriver, match="is loaded in this process"):
        libcuda.refuse_beside_a_gpu(
            loaded="libc.so.6"
        )  # any library that is loaded and is not the emulated one
    (tmp_path / "nvidiactl").touch()
    libcuda.refuse_beside_a_gpu(devices=str(tmp_path))  # PyTorch is built without CUDA here
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(libcuda.RealDriver, match="CUDA_VISIBLE_DEVICES="):
        libcuda.refuse_beside_a_gpu(devices=str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    libcuda.refuse_beside_a_gpu(devices=str(tmp_path))


# ---- findings and errors ---------------------------------------------------------------------------------------


def test_findings_are_raised_or_collected(recorder: Recorder) -> None:
    access = Access("st.shared.b32 [%r1], %r2", 7, Place("kernel.py", 3), (0, 0, 0), 33)
    race = Finding("shared memory race", "add_one", access)
    recorder.findings = [race]
    with triton_loom.emulate(TARGET) as gpu:
        with pytest.raises(triton_loom.HazardError, match="shared memory race in add_one") as error:
            launch_add_one()
        assert error.value.findings == [race]
    assert gpu.findings == [race]
    with triton_loom.emulate(TARGET, raises=False) as gpu:
        launch_add_one()
        launch_add_one()
    assert gpu.findings == [race, race]
    assert gpu.report().endswith(f"{race}\n{race}")
    assert "12" in gpu.report()  # warp instructions of both launches


def test_an_error_of_the_machine_is_raised_as_it_is(recorder: Recorder) -> None:
    recorder.error = ZeroDivisionError("in the machine")
    with triton_loom.emulate(TARGET):
        with pytest.raises(ZeroDivisionError, match="in the machine"):
            launch_add_one()
        recorder.error = None
        launch_add_one()


# ---- blocks -------------------------------------------------------------------------------------------------------


def test_a_block_restores_everything(recorder: Recorder) -> None:
    before = driver.active, knobs.runtime.add_stages_inspection_hook, dict(os.environ)
    with contextlib.suppress(ZeroDivisionError), triton_loom.emulate(TARGET):
        assert isinstance(driver.active, EmulatedDriver)
        assert driver.active.get_active_torch_device() == torch.device("cpu")
        raise ZeroDivisionError
    assert (driver.active, knobs.runtime.add_stages_inspection_hook, dict(os.environ)) == before
    assert knobs.runtime.add_stages_inspection_hook is None


def test_nested_blocks(recorder: Recorder) -> None:
    with triton_loom.emulate("sm_80") as outer:
        kernel, *_ = launch_add_one()
        with triton_loom.emulate("sm_90", checks=False, delivery="early") as inner:
            launch_add_one()
            with triton_loom.emulate("sm_80") as innermost:
                assert launch_add_one()[0] is kernel  # it is compiled once
            launch_add_one()
            with triton_loom.active():  # Loom's own device
                _, x, y = launch_add_one()
            assert torch.equal(y, x + 1)
        launch_add_one()
    assert [len(gpu.launches) for gpu in (outer, inner, innermost)] == [2, 2, 1]
    targets = ["sm_80" if ".target sm_80" in launch["ptx"] else "sm_90" for launch in recorder.launches]
    assert targets == ["sm_80", "sm_90", "sm_80", "sm_90", "sm_80"]
    assert [launch["options"].checks for launch in recorder.launches] == [True, False, True, False, True]
    assert recorder.launches[1]["options"].delivery == "early"


@pytest.fixture
def compiled_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return `add_one` with an empty cache: the PTX names its file, Triton's key does not, so a cache shared by two
    checkouts may have the PTX of one with the module of the other."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return triton.jit(add_one.fn)


def test_loom_and_the_gpu_take_turns(recorder: Recorder, compiled_anew: Any) -> None:
    """They launch the same kernel in turn; neither gets the other's compiled kernel."""
    with triton_loom.active():
        for _ in range(2):
            _, x, y = launch_add_one(function=compiled_anew)
            assert torch.equal(y, x + 1)
            with triton_loom.emulate(TARGET) as gpu:
                kernel, x, y = launch_add_one(function=compiled_anew)
            assert len(gpu.launches) == 1
            assert kernel.asm["cubin"] == kernel.asm["ptx"].encode() == recorder.last["ptx"].encode()


def test_binaries_of_real_and_emulated_gpus_are_separate(compiled_anew: Any) -> None:
    """A kernel compiled for a real GPU is a binary, even if the emulated one compiled it first."""
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}

    def compiled() -> Any:
        source = ASTSource(compiled_anew, signature, {"BLOCK": 64})
        return triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", 90, 32))

    with triton_loom.emulate(TARGET):
        emulated = compiled()
    real = compiled()
    assert emulated.hash != real.hash
    assert emulated.kernel == emulated.asm["ptx"].encode()
    assert real.kernel.startswith(b"\x7fELF")
    assert emulated.asm["ptx"] == real.asm["ptx"]


def test_another_hook_is_called(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def hook(*arguments: Any) -> Any:
        seen.append(len(arguments))
        return "another's key", "another's hash"

    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", hook)
    monkeypatch.setattr(knobs.compilation, "always_compile", True)
    with triton_loom.emulate(TARGET):
        add_one[(1,)](torch.ones(8), torch.ones(8), 8, BLOCK=8)
    assert {0, 5} == set(seen)
    assert len(recorder.launches) == 1


# ---- what the device says of itself -------------------------------------------------------------------------------


@pytest.mark.parametrize("target", DEVICES)
def test_properties(target: str) -> None:
    device = DEVICES[target]
    with triton_loom.emulate(target):
        active = driver.active
        for number in (active.get_current_device(), 0):
            properties = active.utils.get_device_properties(number)
            assert properties["max_shared_mem"] == device.shared_per_block
            assert properties["multiprocessor_count"] == device.multiprocessors
            assert properties["sm_clock_rate"] == device.clock * 1000
            assert (properties["warpSize"], properties["max_num_regs"]) == (32, 65536)
        assert active.get_current_target().arch == device.capability
        assert active.get_device_capability() == divmod(device.capability, 10)
        with pytest.raises(RuntimeError, match="there is no device 7"):
            active.utils.get_device_properties(7)


def test_there_is_no_device_outside_a_block() -> None:
    with triton_loom.emulate(TARGET):
        library = ctypes.CDLL("libcuda.so.1")  # by name, as Triton looks for it
    assert library.cuInit(0) == 100  # CUDA_ERROR_NO_DEVICE
    count = ctypes.c_int(7)
    assert library.cuDeviceGetCount(ctypes.byref(count)) == 0
    assert count.value == 0


def test_the_memory_of_the_products() -> None:
    """Twice the clock times the width is the data sheet's bandwidth, in GB/s."""
    sheets = {"sm_80": 2039, "sm_86": 768, "sm_89": 864, "sm_90": 3350, "sm_100": 8000, "sm_120": 1792}
    assert set(sheets) == set(DEVICES)
    for target, bandwidth in sheets.items():
        device = DEVICES[target]
        assert 2 * device.memory_clock * device.memory_bits / 8000 == pytest.approx(bandwidth, rel=0.025)

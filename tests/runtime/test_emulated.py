"""Weft's ops on an emulated GPU: its choices are launched on it, by the same path as on a real one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton_loom
from triton_loom.emulator.devices import DEVICES

import weft
from weft.runtime import Capabilities, Launch, capabilities_of, choosing_for, observing

CPU = torch.device("cpu")


def norm() -> Any:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 1000, dtype=torch.bfloat16), torch.randn(1000, dtype=torch.bfloat16)
    return weft.rms_norm(x, weight, residual=torch.randn_like(x))


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_an_op_is_launched_on_the_emulated_gpu(target: str) -> None:
    chosen: list[Launch] = []
    before = norm()
    with observing(lambda launch, *_: chosen.append(launch)), choosing_for(target):
        norm()
    with observing(lambda launch, *_: chosen.append(launch)), triton_loom.emulate(target) as gpu:
        emulated = norm()
    after = norm()
    on_loom, on_gpu = chosen
    assert on_gpu is on_loom  # the tiles are the target's
    (launch,) = gpu.launches
    assert (launch.kernel, launch.threads) == (on_gpu.kernel.name, 32 * on_gpu.num_warps)
    for results in (emulated, after):
        assert all(torch.equal(a, b) for a, b in zip(results, before, strict=True))


def test_the_emulator_moves_the_bytes_that_loom_counts() -> None:
    """Lanes request exactly the bytes of the kernel's loads and stores: no thread loads what another one has."""
    with triton_loom.count() as counted, choosing_for("sm_80"):
        norm()
    with triton_loom.emulate("sm_80", counters=True) as gpu:
        norm()
    (counters,) = gpu.counters.values()
    memory = counters.total.memory
    assert memory.loads.bytes == counted.loads.requested
    assert memory.stores.bytes == counted.stores.requested
    assert memory.atomics.requests == 0


def test_capabilities_are_those_of_the_emulated_gpu() -> None:
    for target, device in DEVICES.items():
        with triton_loom.emulate(target):
            capabilities = capabilities_of(CPU)
            assert capabilities == Capabilities.of(target)
            assert capabilities.multiprocessors == device.multiprocessors
            assert capabilities.shared_bytes == device.shared_per_block
            with choosing_for("gfx942"):
                assert capabilities_of(CPU).target == "gfx942"
    assert capabilities_of(CPU) == Capabilities.of("cpu")


def test_tensors_whose_addresses_are_in_memory() -> None:
    """A tensor list of any length goes to one kernel, which reads the addresses from a table."""
    tensors = [torch.full((length,), 2.0) for length in (1, 100, 3)]
    with triton_loom.emulate("sm_80"):
        total = weft.grad_norm(tensors)
    assert total.item() == pytest.approx(2 * 104**0.5)

"""Triton kernels by their PTX: results, no findings, and detection of each barrier or wait that is left out."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_loom.emulator.machine import CHECKED, MemoryRange, Options, Outcome, Program, run


@triton.jit
def softmax_kernel(out_ptr, x_ptr, stride, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + column, mask=column < cols, other=-float("inf"))
    power = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * stride + column, power / tl.sum(power, 0), mask=column < cols)


@triton.jit
def rms_norm_kernel(out_ptr, x_ptr, weight_ptr, cols, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, cols, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * cols + column, mask=column < cols, other=0).to(tl.float32)
        total += x * x
    rstd = tl.rsqrt(tl.sum(total, 0) / cols + eps)
    for first in range(0, cols, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * cols + column, mask=column < cols, other=0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=column < cols, other=0).to(tl.float32)
        tl.store(out_ptr + row * cols + column, (x * rstd * weight).to(tl.bfloat16), mask=column < cols)


@triton.jit
def matmul_kernel(out_ptr, a_ptr, b_ptr, depth, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Multiply [BLOCK, depth] by [depth, BLOCK], `depth` a multiple of STEP."""
    m, k = tl.arange(0, BLOCK), tl.arange(0, STEP)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for first in range(0, depth, STEP):
        a = tl.load(a_ptr + m[:, None] * depth + first + k[None, :])
        b = tl.load(b_ptr + (first + k[:, None]) * BLOCK + m[None, :])
        total = tl.dot(a, b, total)
    tl.store(out_ptr + m[:, None] * BLOCK + m[None, :], total)


@triton.jit
def histogram_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_add(out_ptr + tl.arange(0, 64), tl.histogram(x, 64))


@dataclass(frozen=True)
class Example:
    """A kernel with its arguments: the first is the output, the last ones are constants."""

    kernel: triton.JITFunction
    types: str
    constants: dict[str, int]
    arguments: Callable[[], list[object]]
    wanted: Callable[[list[torch.Tensor]], torch.Tensor]
    grid: int
    stages: int = 1
    redundant: int = 0  # barriers and waits that nothing depends on

    def launch(self, ptx: str, shared: int, options: Options = CHECKED) -> tuple[list[torch.Tensor], Outcome]:
        arguments = self.arguments()
        outcome = launch(ptx, shared, self.grid, arguments, options)
        return [a for a in arguments if isinstance(a, torch.Tensor)], outcome


@cache
def compiled(name: str) -> tuple[str, int]:
    """Return the PTX of an example for sm_80, and the bytes of dynamic shared memory."""
    example = EXAMPLES[name]
    types = example.types.split()
    names = [name for name in example.kernel.arg_names if name not in example.constants]
    signature = dict(zip(names, types, strict=True)) | dict.fromkeys(example.constants, "constexpr")
    aligned = {(number,): [["tt.divisibility", 16]] for number, type_ in enumerate(types) if type_ != "fp32"}
    source = ASTSource(example.kernel, signature, example.constants, aligned)
    options = {"num_stages": example.stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options)
    return kernel.asm["ptx"], kernel.metadata.shared


def launch(ptx: str, shared: int, grid: int, arguments: Sequence[object], options: Options) -> Outcome:
    program = Program.of(ptx)
    parameters = bytearray(program.parameter_bytes)
    values = [*arguments, 0, 0]  # and no scratch memory
    for value, place in zip(values, program.flat.kernel.parameters.values(), strict=True):
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        code = "<f" if isinstance(number, float) else {4: "<i", 8: "<Q"}[place.size]
        struct.pack_into(code, parameters, place.offset, number)
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    return run(
        program,
        grid=(grid, 1, 1),
        block=program.threads,
        shared_bytes=shared,
        parameters=bytes(parameters),
        memory=[MemoryRange(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors],
        options=options,
    )


def _rms_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    _, x, weight = (t.double() for t in tensors)
    return x * (x.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight


EXAMPLES = {
    "softmax": Example(
        softmax_kernel, "*fp32 *fp32 i32 i32", {"BLOCK": 1024},
        lambda: [torch.zeros(4, 1000), torch.randn(4, 1000), 1000, 1000],
        lambda tensors: tensors[1].double().softmax(1), grid=4,
    ),
    "rms_norm": Example(
        rms_norm_kernel, "*bf16 *bf16 *bf16 i32 fp32", {"BLOCK": 512},
        lambda: [*(torch.randn(8, 1200).bfloat16() for _ in range(2)), torch.randn(1200).bfloat16(), 1200, 1e-5],
        _rms_norm, grid=8,
    ),
    "matmul": Example(
        matmul_kernel, "*fp32 *bf16 *bf16 i32", {"BLOCK": 64, "STEP": 32},
        lambda: [torch.zeros(64, 64), torch.randn(64, 192).bfloat16(), torch.randn(192, 64).bfloat16(), 192],
        lambda tensors: tensors[1].double() @ tensors[2].double(), grid=1, stages=3,
        redundant=1,  # before the loop, between copies to buffers that nobody has read yet
    ),
    "histogram": Example(
        histogram_kernel, "*i32 *i32", {"BLOCK": 512},
        lambda: [torch.zeros(64, dtype=torch.int32), torch.randint(0, 64, (2048,), dtype=torch.int32)],
        lambda tensors: torch.bincount(tensors[1], minlength=64), grid=4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_results_without_findings(name: str) -> None:
    example = EXAMPLES[name]
    ptx, shared = compiled(name)
    for options in (CHECKED, Options(delivery="early"), Options(checks=False, threads=1)):
        tensors, outcome = example.launch(ptx, shared, options)
        assert not outcome.findings
        expected = example.wanted(tensors)
        tolerance = 2**-8 if tensors[0].dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(tensors[0].double(), expected.double(), rtol=tolerance, atol=1e-4)


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_missing_barriers_and_waits_are_reported(name: str) -> None:
    """Each is left out in turn. Those not reported are redundant, and their number is known."""
    example = EXAMPLES[name]
    ptx, shared = compiled(name)
    orders = list(re.finditer(r"^\s*(bar\.sync|bar\.warp\.sync|cp\.async\.wait_group)[^\n]*$", ptx, re.M))
    reported = 0
    for order in orders:
        _, outcome = example.launch(ptx[: order.start()] + "\n" + ptx[order.end() :], shared)
        reported += bool(outcome.findings)
    assert orders
    assert reported == len(orders) - example.redundant


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_too_little_shared_memory(name: str) -> None:
    example = EXAMPLES[name]
    ptx, shared = compiled(name)
    _, outcome = example.launch(ptx, shared - 1)
    assert {finding.kind for finding in outcome.findings} == {"shared memory out of bounds"}

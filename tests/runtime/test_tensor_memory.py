"""Waits for sums in tensor memory before they are read, in every kernel with a dot, for sm_100."""

from __future__ import annotations

import inspect
import re
import sys

import pytest
import torch
import triton

import weft
from tests.runtime.test_compile import fullest
from weft.lab.compiled.binaries import collected
from weft.lab.compiled.offline import ttgir_of
from weft.lab.compiled.tensor_memory import early_accesses
from weft.lab.families import WORKLOADS
from weft.runtime import Variant, recording

# Versions that omit the wait for the second of two dots into one accumulator.
WRONG = triton.__version__.startswith(("3.7.", "3.8."))


def two_products(num_stages: int, separate: bool = False) -> Variant:
    pointers = tuple((f"{name}_ptr", "*bf16") for name in "abcd")
    constants = {"TILE": 128, "DEPTH": 64, "APART": separate}
    return Variant(
        module="tests.runtime.offline_kernels",
        kernel="two_products",
        signature=(
            *pointers,
            ("out_ptr", "*fp32"),
            ("depth", "i32"),
            *((name, "constexpr") for name in constants),
        ),
        constants=tuple(constants.items()),
        aligned=True,
        num_warps=4,
        num_stages=num_stages,
        divisible=("depth",),
    )


@pytest.mark.compat
@pytest.mark.parametrize("target", ["sm_100", "sm_103", "sm_110"])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_two_dots_into_one_accumulator_are_awaited(num_stages: int, target: str) -> None:
    accesses = early_accesses(ttgir_of(two_products(num_stages), target))
    if WRONG and num_stages > 1:
        (access,) = accesses
        assert access.startswith("ttng.tmem_load at offline_kernels.py:")
    else:
        assert not accesses


@pytest.mark.compat
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_two_accumulators_are_distinguished(num_stages: int) -> None:
    """A product with a gated unit is correct until its waits are removed."""
    text = ttgir_of(two_products(num_stages, separate=True), "sm_100")
    assert not early_accesses(text)
    waits = re.findall(r"\n *ttng\.wait_barrier.*", text)
    # An MMA is done when a later one is: only what follows the last wait is not awaited.
    assert len(early_accesses(text.replace(waits[-1], ""))) == 1
    for wait in waits:
        text = text.replace(wait, "")
    assert len(early_accesses(text)) == 2


MMA = "ttng.tc_gen5_mma %a, %b, %sums, %wide, %wide, %own[%wide] {is_async} : !x, !x, !x, !x"
LOOP = f"""
module {{
  tt.func public @kernel(%a: !x, %b: !x, %count: i32, %wide: i1) {{
    %zero = arith.constant 0 : i32
    %sums = ttng.tmem_alloc : () -> !x
    %barriers = ttg.local_alloc : () -> !x
    %first = ttg.memdesc_index %barriers[%zero] : !x -> !x
    %last = scf.for %i = %zero to %count step %zero iter_args(%before = %first) -> (!x) : i32 {{
      %own = ttg.memdesc_index %barriers[%i] : !x -> !x
      {MMA}
      BODY
      scf.yield %own : !x
    }}
    AFTER
    tt.return
  }}
}}
"""
READ = "%x = ttng.tmem_load %sums : !x -> !x"


WAIT_OWN, WAIT_BEFORE, WAIT_LAST, WAIT_FIRST = (
    f"ttng.wait_barrier %{name}, %zero : !x" for name in ("own", "before", "last", "first")
)
# Code in the loop and after it, and the number of early accesses.
PROGRAMS = {
    "no wait": ("", READ, 1),
    "waits at once": (f"{WAIT_OWN}\n{READ}", "", 0),
    "waits an iteration late": (f"{WAIT_BEFORE}\n{READ}", "", 1),
    "waits for one of two": (f"{MMA.replace('own', 'first')}\n{WAIT_OWN}\n{READ}", "", 1),
    "waits for the last": (WAIT_BEFORE, f"{WAIT_LAST}\n{READ}", 0),
    "waits for all but the last": (WAIT_BEFORE, READ, 1),
    "waits if there was one": ("", f"scf.if %wide {{\n{WAIT_LAST}\n}}\n{READ}", 0),
    "waits if there was one, else yields": (
        "",
        f"%z = scf.if %wide -> (!x) {{\n{WAIT_LAST}\nscf.yield %a : !x\n}} else {{\nscf.yield %b : !x\n}}\n{READ}",
        0,
    ),
    "reads in one branch": ("", f"scf.if %wide {{\n{READ}\n}} else {{\n{WAIT_LAST}\n}}", 1),
    "reads in the other": ("", f"scf.if %wide {{\n{WAIT_LAST}\n}} else {{\n{READ}\n}}", 1),
    "waits for all": ("", f"ttng.tc_gen5_commit %first, %wide : !x\n{WAIT_FIRST}\n{READ}", 0),
    "writes": ("ttng.tmem_store %a, %sums, %wide : !x -> !x", f"{WAIT_LAST}\n{READ}", 1),
    "reads a part": ("", f"%part = ttng.tmem_subslice %sums : !x -> !x\n{READ.replace('sums', 'part')}", 1),
    "reads something else": ("", f"%more = ttng.tmem_alloc : () -> !x\n{READ.replace('sums', 'more')}", 0),
}


@pytest.mark.parametrize(("body", "after", "count"), PROGRAMS.values(), ids=PROGRAMS)
def test_small_programs(body: str, after: str, count: int) -> None:
    assert len(early_accesses(LOOP.replace("BODY", body).replace("AFTER", after))) == count


@pytest.mark.parametrize(
    "line", ["%y = scf.while (%z = %a) : (i32) -> i32 {\n}", "cf.br ^bb1", "ttg.warp_specialize(%a)"]
)
def test_unsupported_control_flow_is_reported(line: str) -> None:
    (report,) = early_accesses(LOOP.replace("BODY", line).replace("AFTER", READ))
    assert report.startswith("not checked")


def further() -> dict[Variant, str]:
    """Return variants of calls that no workload makes: several dots per iteration for one product (fp32 operands are
    split into parts), and skipped tiles of the gradient."""
    names: dict[Variant, str] = {}
    target = torch.empty(512, dtype=torch.int64, device="meta")
    for of_hidden, of_weight, options in (
        (torch.bfloat16, torch.float32, {}),
        (torch.float32, torch.float32, {}),
        (torch.bfloat16, torch.bfloat16, {"skip_below": 1e-4}),
    ):
        hidden = torch.empty(512, 4096, dtype=of_hidden, device="meta", requires_grad=True)
        weight = torch.empty(4096, 4096, dtype=of_weight, device="meta", requires_grad=True)
        with recording("sm_100") as variants:
            weft.linear_logprobs(hidden, weight, target, **options).sum().backward()
        for variant in variants:
            names.setdefault(variant, f"linear_logprobs of {of_hidden} and {of_weight} with {options}")
    return names


def has_dot(variant: Variant) -> bool:
    return re.search(r"\bdot\w*\(", inspect.getsource(sys.modules[variant.module])) is not None


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_kernel_with_a_dot_reads_too_early(every: bool) -> None:
    """The TTGIR, which takes a second per kernel, is checked for the fullest variants of each kernel, and nightly for
    all. The nightly tests of binaries check every kernel."""
    launched = collected(WORKLOADS, "sm_100")
    chosen = set(launched) if every else fullest(launched)
    names = {**further(), **{variant: name for variant, name in launched.items() if variant in chosen}}
    texts = {variant: ttgir_of(variant, "sm_100") for variant in names if has_dot(variant)}
    problems = [
        f"{variant.kernel} of {names[variant]}: {access}"
        for variant, text in texts.items()
        for access in early_accesses(text)
    ]
    assert not problems, "\n".join(problems)
    # If Triton's notation changed, nothing would be detected in any kernel.
    reading = [variant.kernel for variant, text in texts.items() if "ttng.tmem_load" in text]
    assert {"matmul_kernel", "linear_logprobs_kernel", "router_linear_kernel"} <= set(reading)
    without_waits = [re.sub(r"\n *ttng\.wait_barrier.*", "", text) for text in texts.values()]
    assert sum(bool(early_accesses(text)) for text in without_waits) == len(reading)

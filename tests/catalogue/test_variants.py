"""Kernels compile few times, and take integers of any size."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

import weft
from tests.catalogue.calls import compiled_variants, launched
from tests.catalogue.families import cases
from weft.lab.calls import assert_same, differentiable, few_rows, results, run, small
from weft.lab.families import Call, Inputs, distinct, for_op
from weft.runtime import Variant, launch, recording

# ---- variant counts ---------------------------------------------------------------------------------

HIDDEN_SIZES = sorted(
    {1 << i for i in range(18)}
    | {(1 << i) + 1 for i in range(18)}
    | {(1 << i) + 16 for i in range(4, 18)}
    | {760, 1536, 2880, 3072, 3584, 5120, 7168, 12288, 14336, 18432, 24576}
)


@pytest.mark.parametrize("op", weft.catalogue)
def test_variants_are_a_small_closed_set(op: str) -> None:
    """An op with one set of options compiles no more variants than it declares, whatever the sizes. A new number of
    rows compiles nothing."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 1 << 20, (200,), generator=generator).tolist()
    limit = weft.catalogue[op].variants
    for workload in {w.options: w for w in distinct(for_op(op))}.values():
        by_rows = set()
        for count in rows[: 200 if workload.options in ("plain", "1x128-both") else 40]:
            by_rows |= launched(lambda w=workload, count=count: w.make("meta", rows=count))
        kernels = {variant.kernel for variant in by_rows}
        assert len(by_rows) <= 2 * len(kernels), f"{workload}: {len(by_rows)} variants over row counts"
        by_cols = set()
        shape = tuple(5 if size == "rows" else size for size in workload.shape[:-1])
        for cols in HIDDEN_SIZES:
            inputs = Inputs("meta", workload.dtype, 0)
            by_cols |= launched(lambda w=workload, i=inputs, s=(*shape, cols): w.build(w, i, s))
        assert len(by_cols) <= limit, f"{workload}: {len(by_cols)} variants over sizes, {limit} declared"


@pytest.mark.parametrize("make", cases().values(), ids=cases())
def test_a_new_number_of_rows_compiles_nothing(make: Callable[..., Call]) -> None:
    run(make(rows=64))
    run(make(rows=63))
    before = compiled_variants()
    for rows in (1, 2, 3, 16, 17, 100, 127, 128, 129, 200, 256):
        run(make(rows=rows))
    assert compiled_variants() == before


# ---- integers of 64 bits ----------------------------------------------------------------------------


def traced(variant: Variant) -> None:
    """Let Triton check the types of a kernel, without compiling it further."""
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options = backend.parse_options({"num_warps": variant.num_warps, "num_stages": variant.num_stages})
    kernel = getattr(importlib.import_module(variant.module), variant.kernel)
    source = ASTSource(
        fn=kernel.fn, signature=dict(variant.signature), constexprs=variant.constants_by_path()
    )
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )


@pytest.mark.parametrize("target", ["sm_90", pytest.param("sm_80", marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", weft.catalogue)
def test_every_kernel_takes_integers_of_64_bits(
    op: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size or a stride of 2^30 is enough to need them."""
    monkeypatch.setattr(launch, "WIDE", 0)
    variants: set[Variant] = set()
    for workload in {w.options: w for w in distinct(for_op(op)) if w.runs_on(target)}.values():
        with recording(target) as seen:
            workload.make("meta", rows=few_rows(workload))()
        variants.update(seen)
    assert variants
    for variant in variants:
        assert "i32" not in variant.types().values()
    # By day, one variant of each kernel goes through Triton: the one with the most arguments.
    by_size = sorted(variants, key=lambda variant: len(variant.types()))
    for variant in by_size if target == "sm_80" else {v.kernel: v for v in by_size}.values():
        traced(variant)


@pytest.mark.slow
@pytest.mark.parametrize("op", weft.catalogue)
def test_integers_of_64_bits_change_no_result(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for workload in {w.options: w for w in distinct(for_op(op))}.values():
        evaluate = run if differentiable(workload) else results
        wanted = evaluate(small(workload))
        with monkeypatch.context() as changed:
            changed.setattr(launch, "WIDE", 0)
            assert_same(evaluate(small(workload)), wanted, "64 bits")


# ---- PyTorch's dispatcher ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", cases().values(), ids=cases())
def test_the_dispatcher_gives_the_bits_of_eager_calls(make: Callable[[], Call]) -> None:
    """`torch.ops.weft` gives the bits of the direct path that eager calls take."""

    class Passing(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Passing.calls += func.namespace == "weft"
            return func(*args, **(kwargs or {}))

    call = make()
    wanted = run(call)
    with Passing():
        got = run(call)
    assert Passing.calls
    assert_same(got, wanted, "dispatched")

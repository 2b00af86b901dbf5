"""Memory that callers provide: workspaces, tensors that share memory, and `out=` under transforms."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.catalogue.memory import launches_in_callers_memory, workspace_of
from tests.support.allocations import allocations_of
from weft.lab.families import for_op
from weft.ops.quantize import launch as quantize_launch
from weft.runtime import overlap, overlaps_itself, scratch
from weft.runtime.launch import skipping_launches

X = torch.linspace(-3.0, 3.0, 64 * 256).view(64, 256)


def bytes_needed(call: Callable[[], Any]) -> int:
    with weft.workspace() as needed:
        call()
    return needed.nbytes


# ---- the counter ----------------------------------------------------------------------------------------


def test_every_allocation_is_counted() -> None:
    x = torch.ones(10)
    assert allocations_of(lambda: x.view(5, 2)[1:]) == []
    assert allocations_of(lambda: torch.empty(100)) == [400]
    assert allocations_of(x.clone) == [40]
    assert allocations_of(lambda: torch.UntypedStorage(24)) == [24]


def test_an_op_that_allocates_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = next(w for w in for_op("quantize") if w.options == "tensor-amax")
    launches_in_callers_memory(workload)

    def allocate(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    monkeypatch.setattr(quantize_launch, "scratch", allocate)
    with pytest.raises(AssertionError, match="bytes were allocated"):
        launches_in_callers_memory(workload)


# ---- workspaces -----------------------------------------------------------------------------------------


def test_calls_share_a_workspace() -> None:
    """Each call starts at the beginning again, so that the largest one decides."""
    small, large = (bytes_needed(lambda rows=rows: weft.quantize(X[:rows], "tensor")) for rows in (2, 64))
    assert 0 < small < large

    def both() -> None:
        weft.quantize(X, "tensor")
        weft.quantize(X[:2], "tensor")

    assert bytes_needed(both) == large
    with weft.workspace(torch.empty(large, dtype=torch.uint8)):
        both()


def test_a_small_workspace_is_refused_with_the_bytes_needed() -> None:
    needed = bytes_needed(lambda: weft.quantize(X, "tensor"))
    for size in (0, 4, needed - 1):
        message = f"weft::quantize needs {needed} bytes of workspace here; the buffer has {size}"
        with weft.workspace(torch.empty(size, dtype=torch.uint8)), pytest.raises(ValueError, match=message):
            weft.quantize(X, "tensor")
    out = weft.quantize(X, "tensor")
    before = out.rowwise.data.clone()  # type: ignore[union-attr]
    with weft.workspace(torch.empty(8)), pytest.raises(ValueError, match="needs"):
        weft.quantize(X + 2, "tensor", out=out)
    assert torch.equal(out.rowwise.data.view(torch.uint8), before.view(torch.uint8))  # type: ignore[union-attr]


def test_copies_of_awkward_strides_are_scratch() -> None:
    x = torch.randn(4, 6, 8, 32)[:, ::2].transpose(1, 2)[:, ::3]
    spread = torch.randn(4, 64).t()
    for y in (x, x.transpose(-1, -2), spread):
        wanted, out = weft.quantize(y, "row"), torch.empty_like(weft.quantize(y, "row"))
        needed = bytes_needed(lambda y=y, out=out: weft.quantize(y, "row", out=out))
        assert needed >= y.numel() * 4
        with weft.workspace(torch.empty(needed, dtype=torch.uint8)):
            assert allocations_of(lambda y=y, out=out: weft.quantize(y, "row", out=out)) == []
        assert torch.equal(out.dequantize(), wanted.dequantize())


def test_blocks_nest() -> None:
    """The innermost workspace counts, and an exception leaves its block."""
    needed = bytes_needed(lambda: weft.quantize(X, "tensor"))
    with weft.workspace() as outer:
        with weft.workspace() as inner, pytest.raises(ValueError, match="x must be"):
            weft.quantize(weft.quantize(X, "tensor").rowwise.data)  # type: ignore[union-attr]
        assert (outer.nbytes, inner.nbytes) == (0, needed)
        with inner, inner:
            weft.quantize(X, "tensor")
        weft.quantize(X, "tensor")
    assert outer.nbytes == needed


def test_a_workspace_belongs_to_its_thread() -> None:
    with weft.workspace() as space:
        thread = threading.Thread(target=lambda: weft.quantize(X, "tensor"))
        thread.start()
        thread.join()
    assert space.nbytes == 0


def test_only_launches_take_from_a_workspace() -> None:
    """What a call returns, or computes before it launches, outlives the next call."""
    with weft.workspace() as space:
        scratch((3,), torch.float32, X.device)
        with weft.backend("reference"):
            weft.quantize(X, "tensor")
    assert space.nbytes == 0
    buffer = workspace_of(4096).tensor
    with weft.workspace(buffer):
        q, amax = weft.quantize(X, "tensor", return_amax=True)
    assert not overlap(amax, buffer)
    assert q.rowwise is not None
    assert not overlap(q.rowwise.data, buffer)


def test_skipped_launches_are_those_of_one_thread() -> None:
    results: list[Tensor] = []
    with skipping_launches():
        thread = threading.Thread(target=lambda: results.append(weft.rms_norm(X)))
        thread.start()
        thread.join()
        skipped = weft.rms_norm(X)
    assert torch.equal(results[0], weft.rms_norm(X))
    assert not torch.equal(skipped, results[0])


@pytest.mark.parametrize(
    ("buffer", "error", "message"),
    [
        (100, TypeError, "buffer must be a tensor, or None to count bytes; got int"),
        (torch.empty(8, 8).t()[1:], ValueError, "must be a plain contiguous tensor"),
        (torch.empty(8, requires_grad=True), ValueError, "that requires no gradient"),
        (weft.quantize(X), ValueError, "must be a plain contiguous tensor"),
        (torch.empty(100, dtype=torch.uint8)[4:], ValueError, "must start at a multiple of 64 bytes"),
    ],
)
def test_wrong_buffers_are_refused(buffer: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        weft.workspace(buffer)


def test_a_workspace_on_another_device_is_refused() -> None:
    with (
        weft.workspace(torch.empty(4096, device="meta")),
        pytest.raises(ValueError, match="workspace is on meta, but a call needs memory on cpu"),
    ):
        weft.quantize(X, "tensor")


def test_a_workspace_that_holds_arguments_is_refused() -> None:
    buffer = torch.zeros(1 << 16)
    x, out = buffer[: X.numel()].view(X.shape), weft.rms_norm(X)
    inside = buffer[X.numel() : 2 * X.numel()].view(X.shape)
    with weft.workspace(buffer):
        with pytest.raises(ValueError, match="x shares memory with the workspace"):
            weft.rms_norm(x)
        with pytest.raises(ValueError, match="out shares memory with the workspace"):
            weft.rms_norm(X, out=inside)
        assert weft.rms_norm(X, out=out) is out


def test_compiled_functions_use_a_workspace_around_them() -> None:
    def function(x: Tensor, out: Tensor) -> None:
        weft.gated_norm(x, x, out=out)
        out += weft.quantize(x, "tensor").dequantize()

    def inside(x: Tensor) -> Tensor:
        with weft.workspace():
            return weft.rms_norm(x)

    wanted, out = torch.empty_like(X), torch.empty_like(X)
    with torch.no_grad():
        function(X, wanted)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert bytes_needed(lambda: compiled(X, out)) > 0
        assert torch.equal(out, wanted)
        with pytest.raises(Exception, match=r"weft.workspace|Observed exception"):
            torch.compile(inside, fullgraph=True, backend="aot_eager")(X)


# ---- results --------------------------------------------------------------------------------------------


def test_results_are_refused_where_gradients_are_wanted() -> None:
    x, out = X.clone().requires_grad_(), torch.empty_like(X)
    for call in (
        lambda: weft.rms_norm(x, out=out),
        lambda: weft.rms_norm(X, out=x),
        lambda: weft.dequantize(weft.quantize(x), out=out),
        lambda: weft.rope(x.view(64, 4, 64), weft.Rotation(1e4), out=out.view(64, 4, 64)),
    ):
        with pytest.raises(ValueError, match=r"for inference: call this under torch\.no_grad"):
            call()
        with torch.no_grad():
            call()


def test_reference_results_are_written() -> None:
    with weft.backend("reference"):
        q, out = weft.quantize(X), torch.empty_like(weft.quantize(X))
        assert weft.quantize(X, out=out) is out
        assert torch.equal(out.dequantize(), q.dequantize())
        y = torch.empty_like(X)
        assert weft.dequantize(q, out=y) is y
        assert torch.equal(y, q.dequantize())


# ---- tensors that share memory --------------------------------------------------------------------------


def random_view(memory: Tensor, generator: torch.Generator) -> Tensor:
    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    shape = [draw(1, 4) for _ in range(draw(1, 4))]
    strides = [draw(0, 7) * (1 if draw(0, 2) else draw(1, 5)) for _ in shape]
    return memory.as_strided(shape, strides, draw(0, 24))


def elements(x: Tensor) -> list[int]:
    """Return the positions of the elements of a view of `range`."""
    return x.flatten().tolist()  # type: ignore[no-any-return]


def test_overlap_is_never_missed() -> None:
    generator = torch.Generator().manual_seed(0)
    memory, told_apart = torch.arange(400), 0
    for _ in range(3000):
        x, y = random_view(memory, generator), random_view(memory, generator)
        together = bool({*elements(x)} & {*elements(y)})
        assert overlap(x, y) == overlap(y, x)
        assert overlap(x, y) or not together, (x.shape, x.stride(), y.shape, y.stride())
        told_apart += not overlap(x, y)
        repeats = len({*elements(x)}) < x.numel()
        assert overlaps_itself(x) or not repeats, (x.shape, x.stride())
    assert told_apart > 300


def test_slices_of_one_tensor_are_told_apart() -> None:
    packed = torch.zeros(2, 6, 12, 8, dtype=torch.bfloat16)
    for dim in range(4):
        first, second = packed.chunk(2, dim)
        assert not overlap(first, second)
        assert not overlap(packed.transpose(1, 2).chunk(2, dim)[0], packed.transpose(1, 2).chunk(2, dim)[1])
        assert overlap(first, packed)
        assert not overlaps_itself(first)
    q, k, v = packed.split((8, 2, 2), 2)
    assert not overlap(q, k)
    assert not overlap(k[:, 1:5].float(), v)
    assert not overlap(packed[:, ::2], packed[:, 1::2])
    assert overlap(packed[:, ::2], packed[:, 1:4])
    assert not overlap(q.view(torch.int16), v)

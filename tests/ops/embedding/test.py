"""Rows by index against PyTorch in float64: values, sums and their bits, tables in codes, shards, main gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton_loom
from torch import Tensor
from triton_loom.testing import EPS32, results_of

import weft
from tests.catalogue.layouts import far_apart
from tests.ops.embedding import ranks_embedding as ranks
from weft.lab.traffic import totals
from weft.ops.common.results import plain_result
from weft.ops.embedding.arguments import PART, GatherArgs, SumRowsArgs, SumRowsOutputs
from weft.ops.embedding.gather import gather_op, sum_rows_op
from weft.quant import PLAIN
from weft.runtime import choosing_for


def zipf(tokens: int, rows: int) -> Tensor:
    """Draw ids of which the first is an eighth."""
    ids = (torch.rand(tokens) ** 8 * rows).long()
    ids[::8] = 0
    return ids


def all_of(tokens: int, rows: int) -> Tensor:
    return torch.randperm(rows)[:tokens]


def outside(tokens: int, rows: int) -> Tensor:
    """Draw ids of which most have no row. Of negative powers of two all low digits are 0, as those of row 0."""
    ids = torch.randint(-rows, 2 * rows, (tokens,))
    ids[:12] = -(2 ** torch.arange(12))
    return ids


IDS: dict[str, Callable[[int, int], Tensor]] = {
    "zipf": zipf,
    "distinct": all_of,
    "one id": lambda tokens, rows: torch.full((tokens,), rows - 1),
    "two long runs": lambda tokens, rows: torch.arange(tokens) % 2 * (rows - 1),
    "outside": outside,
}


def sums(ids: Tensor, dy: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return sums of rows in float64, and the error that fp32 may add."""
    dy, known = dy.double().reshape(ids.numel(), -1), (ids.flatten() >= 0) & (ids.flatten() < rows)
    kept = ids.flatten()[known]
    zero = torch.zeros(rows, dy.shape[1], dtype=torch.float64)
    size = zero.index_add(0, kept, dy[known].abs())
    terms = torch.bincount(kept, minlength=rows).clamp(min=1).sqrt()[:, None]
    return zero.index_add(0, kept, dy[known]), 2 * EPS32 * terms * size


def near(got: Tensor, truth: Tensor, noise: Tensor) -> None:
    """Assert that a tensor is within the noise, and one rounding to its dtype, of the truth, and is not all zeros."""
    assert (got != 0).any()
    limit = noise + truth.abs() * torch.finfo(got.dtype).eps / 2 + 1e-40
    assert ((got.double() - truth).abs() <= limit).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of", IDS)
def test_gradients_are_sums_of_rows(of: str, dtype: torch.dtype) -> None:
    rows, tokens, cols = 1500, 1200, 65
    weight, ids = torch.randn(rows, cols, dtype=dtype, requires_grad=True), IDS[of](tokens, rows)
    dy = torch.randn(tokens, cols).to(dtype)
    weft.embedding(ids, weight).backward(dy)
    near(weight.grad, *sums(ids, dy, rows))


@pytest.mark.parametrize("length", [1, PART - 1, PART, PART + 1, 3 * PART, 3 * PART + 5])
@pytest.mark.parametrize("begin", [0, 1, PART - 1, PART])
def test_runs_of_any_length(begin: int, length: int) -> None:
    """A row whose ids begin anywhere and take several parts, between other rows that take one and several."""
    counts = torch.tensor([begin, length, 2 * PART + 1, 3, 0, PART + 1])
    ids = torch.repeat_interleave(torch.arange(6), counts)[torch.randperm(int(counts.sum()))]
    x = torch.randint(-8, 9, (len(ids), 8)).float()  # integers, whose sums are exact
    got = weft.index_add_(torch.zeros(6, 8), ids, x)
    assert torch.equal(got, torch.zeros(6, 8).index_add_(0, ids, x))


@pytest.mark.parametrize("rows", [1, 2, 1023, 1025, 70_000, 1_100_000])
def test_tables_of_any_length(rows: int) -> None:
    ids = torch.randint(0, rows, (700,))
    ids[:2] = torch.tensor([rows - 1, 0])
    x = torch.randint(-8, 9, (700, 3)).float()
    got = weft.index_add_(torch.zeros(rows, 3), ids, x)
    assert torch.equal(got, torch.zeros(rows, 3).index_add_(0, ids, x))


def test_bits_depend_on_the_rows_of_an_id_alone() -> None:
    """The sum of a row is the same in any run, for any number of threads, and among any other ids."""
    ids, dy = zipf(3000, 40), torch.randn(3000, 32)
    wanted = weft.index_add_(torch.zeros(40, 32), ids, dy)
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert torch.equal(weft.index_add_(torch.zeros(40, 32), ids, dy), wanted)
    torch.set_num_threads(threads)
    for id in (0, 7, 39):
        own = ids == id
        alone = weft.index_add_(torch.zeros(1, 32), torch.zeros(int(own.sum()), dtype=torch.int64), dy[own])
        assert torch.equal(alone[0], wanted[id])
    with choosing_for("sm_90"):
        assert torch.equal(weft.index_add_(torch.zeros(40, 32), ids, dy), wanted)


def test_rows_are_added_in_order() -> None:
    """In fp32 1e8 - 1e8 + 1 is 1, and any other order loses it."""
    dy = torch.tensor([[1e8], [-1e8], [1.0]]).repeat(PART, 1)
    got = weft.index_add_(torch.zeros(1, 1), torch.zeros(len(dy), dtype=torch.int32), dy)
    expected = torch.zeros(())
    for part in dy.flatten().split(PART):
        total = torch.zeros(())
        for each in part:
            total = total + each
        expected = expected + total
    assert got.item() == expected.item() != 0


def test_scale_and_padding() -> None:
    weight = torch.randn(9, 16, requires_grad=True)
    reference = weight.detach().clone().requires_grad_()
    ids, dy = torch.randint(0, 9, (3, 50)), torch.randn(3, 50, 16)
    y = weft.embedding(ids, weight, scale=2.5, padding_idx=-2)
    expected = 2.5 * F.embedding(ids, reference, padding_idx=7)
    torch.testing.assert_close(y, expected)
    y.backward(dy)
    expected.backward(dy)
    assert weight.grad[7].eq(0).all()
    torch.testing.assert_close(weight.grad, reference.grad)


@pytest.mark.parametrize(
    "ids", [torch.empty(0, 3, dtype=torch.int64), torch.tensor(2), torch.tensor([[1, -1, 5]])]
)
def test_odd_ids(ids: Tensor) -> None:
    """No ids, one without a dimension, and ids that the table does not have: their rows are NaN, without a gradient."""
    weight = torch.randn(5, 7, requires_grad=True)
    y = weft.embedding(ids, weight)
    assert y.shape == (*ids.shape, 7)
    known = (ids >= 0) & (ids < 5)
    assert torch.equal(y[known], weight[ids[known]])
    assert y[~known].isnan().all()
    y.nansum().backward()
    counts = torch.bincount(ids[known].flatten(), minlength=5).float()
    assert torch.equal(weight.grad, counts[:, None].expand(5, 7))


@pytest.mark.parametrize("dy", ["one value", "transposed", "every other row"])
def test_layouts_of_gradients(dy: str) -> None:
    weight, ids = torch.randn(6, 8, requires_grad=True), torch.randint(0, 6, (5, 4))
    gradient = {
        "one value": torch.ones(()).expand(5, 4, 8),
        "transposed": torch.randn(4, 5, 8).transpose(0, 1),
        "every other row": torch.randn(10, 4, 8)[::2],
    }[dy]
    weft.embedding(ids, weight).backward(gradient)
    near(weight.grad, *sums(ids, gradient.contiguous(), 6))


# ---- main gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["argument", "attribute", "quantized"])
def test_main_grad(how: str) -> None:
    """Each backward adds, and rows that no id names are not even read."""
    weight = torch.randn(50, 32, dtype=torch.bfloat16, requires_grad=True)
    main = torch.ones(50, 32)
    main[25:] = math.nan
    options: dict[str, Any] = {"main_grad": main}
    if how == "attribute":
        weight.main_grad, options = main, {}  # type: ignore[attr-defined]
    elif how == "quantized":
        options["quantize"] = "mx"
    expected, noise = torch.ones(25, 32, dtype=torch.float64), torch.zeros(25, 32, dtype=torch.float64)
    for _ in range(2):
        ids, dy = torch.randint(0, 25, (300,)), torch.randn(300, 32, dtype=torch.bfloat16)
        weft.embedding(ids, weight, scale=3.0, **options).backward(dy)
        total, error = sums(ids, dy, 25)
        expected, noise = expected + 3 * total, noise + 3 * error + EPS32 * (expected.abs() + 3 * total.abs())
    near(main[:25], expected, noise)
    assert main[25:].isnan().all()
    assert weight.grad is None


def test_main_grad_with_another_producer() -> None:
    """A tied head adds to the same tensor between forward and backward, in a compiled graph as in eager mode."""

    def step(ids: Tensor, weight: Tensor, main: Tensor) -> Tensor:
        return weft.embedding(ids, weight, main_grad=main)

    ids, grads = torch.tensor([1, 1, 0]), []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        weight, main = torch.ones(3, 4, requires_grad=True), torch.zeros(3, 4)
        y = function(ids, weight, main)
        main += 1
        y.sum().backward()
        assert weight.grad is None
        grads.append(main)
    assert torch.equal(grads[0], torch.tensor([2.0, 3.0, 1.0])[:, None].expand(3, 4))
    assert torch.equal(grads[0], grads[1])


def test_traffic_of_gradients() -> None:
    """Each row of dy is read once, and each touched row of the main gradient is read and written once."""
    tokens, rows, cols = 6000, 9000, 1024
    weight = torch.randn(rows, cols, dtype=torch.bfloat16, requires_grad=True)
    ids, main = zipf(tokens, rows), torch.zeros(rows, cols)
    y = weft.embedding(ids, weight, main_grad=main)
    dy = torch.randn_like(y)
    with choosing_for("sm_90"), triton_loom.count() as counted:
        y.backward(dy)
    floor = dy.nbytes + 2 * 4 * cols * len(ids.unique()) + ids.nbytes
    assert totals(counted.launches).modelled <= 1.05 * floor


# ---- codes ----------------------------------------------------------------------------------------------


def by_night(*formats: str) -> list[Any]:
    return [pytest.param(each, marks=pytest.mark.slow) for each in formats]


FORMATS = (
    "1x128",
    "row",
    "int4:1x128",
    "nvfp4",
    *(
        pytest.param(each, marks=pytest.mark.slow)
        for each in ("mx", "int8:row", "nvfp4_16x16", "128x128", "tensor")
    ),
)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("cols", [256, pytest.param(100, marks=pytest.mark.slow)])
def test_tables_in_codes(format: str, cols: int) -> None:
    table = weft.quantize(torch.randn(40, cols), format)
    ids = torch.randint(0, 40, (3, 30))
    got = weft.embedding(ids, table, scale=2.0, out_dtype=torch.float32)
    with weft.backend("reference"):
        rows = table.dequantize(torch.float32)[ids]
    assert torch.equal(got, 2 * rows)


@pytest.mark.parametrize(
    "format",
    [
        "1x128",
        "row",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("mx", "nvfp4", "128x128", "tensor")),
    ],
)
@pytest.mark.parametrize("target", ["cpu", pytest.param("sm_90", marks=pytest.mark.slow)])
def test_quantized_results(format: str, target: str) -> None:
    """Codes are those of the fp32 rows, in both copies."""
    weight, ids = torch.randn(40, 1100).bfloat16(), torch.randint(0, 40, (130,))
    wanted = weft.quantize(weight.float()[ids] * 1.7, format, columnwise=format != "row")
    with choosing_for(target):
        got = weft.embedding(ids, weight, scale=1.7, quantize=format, columnwise=format != "row")
    for mine, its in ((got.rowwise, wanted.rowwise), (got.columnwise, wanted.columnwise)):
        assert (mine is None) == (its is None)
        if mine is not None and its is not None:
            assert torch.equal(mine.data.view(torch.uint8), its.data.view(torch.uint8))
            assert torch.equal(mine.scale.float(), its.scale.float())


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_a_scale_for_each_of_long_rows(target: str) -> None:
    """No program reads a row of this length at once."""
    weight, ids = torch.randn(4, 20_000), torch.tensor([3, 0, 3])
    with choosing_for(target):
        got = weft.embedding(ids, weight, quantize="row")
    wanted = weft.quantize(weight[ids], "row")
    assert torch.equal(got.rowwise.data.view(torch.uint8), wanted.rowwise.data.view(torch.uint8))
    assert torch.equal(got.rowwise.scale, wanted.rowwise.scale)


@pytest.mark.parametrize("format", ["1x128", "nvfp4"])
def test_codes_in_a_compiled_graph(format: str) -> None:
    def rows(ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        y = weft.embedding(ids, table, quantize="mx", columnwise=True)
        return y.dequantize(), weft.gather_rows(table, ids).dequantize()

    table, ids = weft.quantize(torch.randn(50, 256), format), torch.randint(0, 50, (2, 10))
    got = torch.compile(rows, fullgraph=True, backend="aot_eager")(ids, table)
    assert all(map(torch.equal, got, rows(ids, table)))


def test_gradient_through_a_quantized_result() -> None:
    weight, ids = torch.randn(10, 128, requires_grad=True), torch.randint(0, 10, (30,))
    weft.embedding(ids, weight, quantize="1x128").dequantize().sum().backward()
    assert torch.equal(weight.grad, torch.bincount(ids, minlength=10).float()[:, None].expand(10, 128))


@pytest.mark.parametrize("format", ["1x128", "mx", "row", "int8:row", "nvfp4"])
def test_codes_are_moved(format: str) -> None:
    x, index = weft.quantize(torch.randn(20, 200), format), torch.randint(0, 20, (50,))
    index[::4] = -1
    for backend in ("auto", "reference"):
        with weft.backend(backend):
            got = weft.gather_rows(x, index)
        assert got.spec == x.spec
        known = index >= 0
        assert torch.equal(
            got.rowwise.data.view(torch.uint8)[known], x.rowwise.data.view(torch.uint8)[index[known]]
        )
        assert torch.equal(got.rowwise.scale.float()[known], x.rowwise.scale.float()[index[known]])
        assert got.rowwise.data.view(torch.uint8)[~known].eq(0).all()
        assert got.rowwise.scale.float()[~known].eq(1).all()


# ---- shards ---------------------------------------------------------------------------------------------


class OneRank(weft.VocabShard):
    """A shard whose rank is alone."""

    def sum_rows(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("cuts", [(0, 20, 31), (0, 0, 3, 31, 31)])
def test_shards_of_the_vocabulary(cuts: tuple[int, ...]) -> None:
    """Shards of any length, empty ones too: their results add up to the whole, and their gradients are its rows."""
    weight, ids = torch.randn(31, 16), torch.randint(0, 31, (5, 20))
    whole = weight.clone().requires_grad_()
    dy, total = torch.randn(5, 20, 16), torch.zeros(5, 20, 16)
    weft.embedding(ids, whole, scale=0.5, padding_idx=3).backward(dy)
    for start, stop in itertools.pairwise(cuts):
        part = weight[start:stop].clone().requires_grad_()
        shard: Any = OneRank(None, start, stop, 31)  # type: ignore[arg-type]
        y = weft.embedding(ids, part, scale=0.5, padding_idx=3, shard=shard)
        y.backward(dy)
        total += y.detach()
        assert torch.equal(part.grad, whole.grad[start:stop])
    assert torch.equal(total, weight[ids] * 0.5)


def test_a_shard_of_one_rank() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shard = weft.VocabShard.of(dist.group.WORLD, 31)
        weight, ids = torch.randn(31, 128, requires_grad=True), torch.randint(0, 31, (20,))
        y = weft.embedding(ids, weight, shard=shard)
        assert torch.equal(y, weight[ids])
        y.sum().backward()
        assert weight.grad.sum() == 20 * 128
        q = weft.embedding(ids, weight.detach(), shard=shard, quantize="1x128")
        assert torch.equal(q.dequantize(), weft.quantize(weight.detach()[ids]).dequantize())
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Ranks with a shard each, and ranks with some of the ids each, get the rows and gradients of the whole."""
    ids, weight, dy = ranks.inputs()
    weight.requires_grad_()
    y = weft.embedding(ids, weight, scale=3.0)
    y.backward(dy)
    for rank, got in enumerate(results_of(Path(ranks.__file__), tmp_path_factory)(2)):
        assert torch.equal(got["y"], y)
        assert torch.equal(got["dweight"], weight.grad[ranks.CUTS[rank] : ranks.CUTS[rank + 1]])
        assert torch.equal(got["mesh y"], y)
        torch.testing.assert_close(got["mesh dweight"], weight.grad)


# ---- outside of embeddings ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(30,), (30, 5), (30, 4, 3), (30, 0)])
def test_gathered_rows(shape: tuple[int, ...]) -> None:
    x, index = torch.randn(shape, dtype=torch.float64).float().requires_grad_(), torch.randint(-1, 30, (4, 6))
    y = weft.gather_rows(x, index)
    known = (index >= 0).view(4, 6, *[1] * (x.dim() - 1))
    assert torch.equal(y, torch.where(known, x[index.clamp(min=0)], 0.0))
    y.sum().backward()
    counts = torch.bincount(index[index >= 0].flatten(), minlength=30).float()
    assert torch.equal(x.grad, counts.view(30, *[1] * (x.dim() - 1)).expand(shape))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.float64, torch.float16])
def test_gathered_dtypes(dtype: torch.dtype) -> None:
    x = torch.randint(-100, 100, (9, 3)).to(dtype)
    assert torch.equal(weft.gather_rows(x, torch.tensor([8, 0], dtype=torch.int32)), x[[8, 0]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rows_added_in_place(dtype: torch.dtype) -> None:
    out, x, index = (
        torch.randn(12, 2, 5).to(dtype),
        torch.randn(90, 2, 5).to(dtype),
        torch.randint(-1, 12, (90,)),
    )
    before = out.clone()
    got = weft.index_add_(out, index, x, alpha=-2.0)
    assert got is out
    known = index >= 0
    truth = before.double().index_add(0, index[known], x[known].double(), alpha=-2)
    limit = truth.abs() * torch.finfo(dtype).eps / 2 + 90 * 4 * EPS32
    assert ((out.double() - truth).abs() <= limit).all()


def test_float64_keeps_its_digits() -> None:
    out = torch.full((2, 3), 1 / 3, dtype=torch.float64)
    third = out.clone()
    ids, x = torch.tensor([1, 1]), torch.ones(2, 3)
    args = SumRowsArgs(x, ids, 2, 0, -1, 1.0, False, torch.float64, out)
    sum_rows_op.into(SumRowsOutputs(out), args)
    assert torch.equal(out, third + torch.tensor([[0.0], [2.0]]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sums_of_segments(dtype: torch.dtype) -> None:
    lengths = torch.tensor([0, 3, 700, 0, 1, 256, 257])
    ends = lengths.cumsum(0).to(dtype)
    x = torch.randn(int(ends[-1]) + 9, 6, requires_grad=True)
    got = weft.segment_sum(x, ends)
    ids = torch.repeat_interleave(torch.arange(7), lengths)
    near(got, *sums(ids, x.detach()[: len(ids)], 7))
    dy = torch.randn(7, 6)
    got.backward(dy)
    assert torch.equal(x.grad, torch.cat([dy[ids], torch.zeros(9, 6)]))


def test_embeddings_can_be_differentiated_twice() -> None:
    weight, ids = torch.randn(5, 3, dtype=torch.float64, requires_grad=True), torch.tensor([0, 3, 3])
    assert torch.autograd.gradgradcheck(lambda w: weft.embedding(ids, w, scale=2.0), weight)


def test_offsets_have_64_bits() -> None:
    """Rows past 2^31 elements are right, forward and backward."""
    weight, dy = far_apart(4, 96), far_apart(4, 96)
    ids = torch.tensor([3, 0, 3, 2])
    assert torch.equal(weft.embedding(ids, weight), weight.contiguous()[ids])
    got = weft.index_add_(torch.zeros(4, 96, dtype=dy.dtype), ids, dy)
    near(got[[0, 2, 3]], *(each[[0, 2, 3]] for each in sums(ids, dy.contiguous(), 4)))


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_tiles_of_gpus(target: str) -> None:
    ids, weight = zipf(2000, 70), torch.randn(70, 1100, requires_grad=True)
    dy = torch.randn(2000, 1100)
    y = weft.embedding(ids, weight)
    y.backward(dy)
    assert torch.equal(y, weight[ids])
    near(weight.grad, *sums(ids, dy, 70))
    wanted, weight.grad = weight.grad, None
    with choosing_for(target):
        y = weft.embedding(ids, weight)
        y.backward(dy)
    assert torch.equal(y, weight[ids])
    assert torch.equal(weight.grad, wanted)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: weft.embedding(torch.ones(3), torch.ones(2, 2)), "ids must be int32 or int64"),
        (lambda: weft.embedding(torch.ones(3).long(), torch.ones(2)), r"weight must be \[V, D\]"),
        (lambda: weft.embedding(torch.ones(3).long(), torch.ones(2, 2), padding_idx=2), "padding_idx must be"),
        (lambda: weft.embedding(torch.ones(3).long(), torch.ones(2, 2), main_grad=torch.ones(3, 2)), "main_grad"),
        (lambda: weft.embedding(torch.ones(3).long(), torch.ones(2, 2), shard=3), "shard must be"),
        (lambda: weft.embedding(torch.ones(3).long(), torch.ones(2, 2), columnwise=True), "go with quantize"),
        (lambda: weft.gather_rows(weft.quantize(torch.ones(4, 128), "128x128"), torch.ones(3).long()), "128x128"),
        (lambda: weft.index_add_(torch.ones(3, 2).t(), torch.ones(3).long(), torch.ones(3, 3)), "contiguous"),
        (lambda: weft.index_add_(torch.ones(3), torch.ones(3).long(), torch.ones(3, requires_grad=True)), "no_grad"),
        (lambda: weft.index_add_(x := torch.ones(3), torch.ones(3).long(), x), "shares memory"),
        (lambda: weft.index_add_(torch.ones(3), torch.ones(2).long(), torch.ones(3)), "index must have the shape"),
        (lambda: weft.index_add_(torch.ones(3).double(), torch.ones(3).long(), torch.ones(3)), "x must be float64"),
        (lambda: weft.embedding(torch.ones(3).long(), x := torch.ones(2, 2), main_grad=x.double()), "main_grad"),
        (lambda: weft.segment_sum(torch.ones(3), torch.ones(2, 2).long()), r"ends must be \[segments\]"),
    ],
)  # fmt: skip
def test_mistakes_are_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        call()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ids": torch.tensor([1.7])}, "ids must be int32 or int64"),
        ({"table": torch.ones(4)}, r"the table must be \[rows, D\]"),
        ({"table": torch.empty(2**31, 1, device="meta"), "ids": torch.ones(1, device="meta").int()}, "at most 2"),
        ({"x": torch.ones(2, 4)}, "each row of x has an id"),
        ({"ids": torch.tensor([1.7]), "x": torch.ones(1, 4)}, "ids must be int32 or int64"),
        ({"x": torch.ones(1, 4), "onto": torch.ones(3, 2)}, r"onto must have the shape \(7, 4\)"),
        ({"x": torch.ones(1, 4), "onto": torch.ones(7, 4).bfloat16()}, "onto must be float32"),
    ],
)  # fmt: skip
def test_ops_refuse_what_they_would_misread(changes: dict[str, Any], words: str) -> None:
    ids = torch.tensor([1])
    options = plain_result(torch.float32)
    gathered = GatherArgs(torch.ones(2, 4), PLAIN, ids, 0, 2, 0.0, 1.0, -1, False, options)
    summed = SumRowsArgs(torch.ones(1, 4), ids, 7, 0, -1, 1.0, False, torch.float32, None)
    op: Any = sum_rows_op if "x" in changes else gather_op
    a: Any = summed if "x" in changes else gathered
    with pytest.raises(ValueError, match=words):
        op(a._replace(**changes))

"""Multi-tensor statistics and clipping: values, lists of every kind, and tables of addresses."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton_loom
from torch import Tensor
from triton_loom.testing import EPS32

import weft
from tests.catalogue.layouts import LAYOUTS
from weft.lab.compiled import Binary, compile_all
from weft.lab.families.multi_tensor import STATISTICS, clipped, statistic
from weft.lab.truth import Near, near
from weft.runtime import choosing_for, recording

module = importlib.import_module("weft.ops.multi_tensor.table")
CHUNK = module.CHUNK
WHAT = list(STATISTICS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(tensors: list[Tensor], what: str) -> Tensor:
    got: Tensor = STATISTICS[what](tensors)
    wanted = statistic(tensors, what)
    assert got.shape == ()
    if isinstance(wanted, Tensor):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)
    else:
        near(got, wanted)
    return got


def draw(*shape: int, dtype: torch.dtype = torch.float32, zeros: bool = True) -> Tensor:
    x = torch.randn(shape).to(dtype)
    if zeros:
        x[torch.rand(shape) < 0.2] = 0.0
    return x


def mixed() -> list[Tensor]:
    """Return tensors with full and partial chunks, at any address, of one element and empty."""
    return [
        draw(3 * CHUNK + 4321),
        draw(7, 5, dtype=torch.bfloat16),
        draw(0),
        draw(CHUNK, dtype=torch.float16),
        draw(1),
        draw(2 * CHUNK + 9, dtype=torch.bfloat16)[3:],
        draw(CHUNK + 2)[1:],
        draw(5, dtype=torch.float16)[3:],
        draw(2, dtype=torch.bfloat16)[1:],
        draw(4097),
        torch.tensor(0.75),
    ]


# ---- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize("what", WHAT)
def test_mixed_lists(what: str, target: str) -> None:
    """Lists may mix dtypes (linghe reads bf16 as fp32 and counts 0 of 128 zeros), sizes and alignments."""
    tensors = mixed()
    with choosing_for(target):
        check(tensors, what)
        for t in tensors:
            check([t], what)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("what", WHAT)
def test_every_element_counts(what: str, dtype: torch.dtype) -> None:
    """A single element counts at either end of a tensor, chunk or tile, and before the first 16-byte boundary."""
    size = CHUNK + 700
    with choosing_for("cpu"):
        for offset in (0, 1):
            for index in (0, 1, 511, 512, CHUNK - 1, CHUNK, CHUNK + 511, CHUNK + 512, size - 1):
                x = torch.full((size + offset,), 1.0 if what == "zeros" else 0.0, dtype=dtype)[offset:]
                x[index] = {"zeros": 0.0, "nonfinite": -torch.inf}.get(what, -2.5)
                got = STATISTICS[what]([x[:0], x])
                assert got == {"zeros": 1, "nonfinite": True}.get(what, 2.5), (offset, index)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    x = torch.tensor([0.0, -0.0, info.smallest_normal, torch.nan, torch.inf, -info.max], dtype=dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    subnormal = torch.tensor([1, -(2 ** (8 * dtype.itemsize - 1)) + 1], dtype=bits).view(dtype)
    assert weft.count_zeros([torch.cat([x, subnormal])]) == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nonfinite(dtype: torch.dtype) -> None:
    largest = torch.tensor([torch.finfo(dtype).max, -torch.finfo(dtype).max, 0.0, -0.0], dtype=dtype)
    assert not weft.any_nonfinite([largest])
    for special in (torch.nan, -torch.nan, torch.inf, -torch.inf):
        x = torch.cat([largest, torch.tensor([special], dtype=dtype)])
        assert weft.any_nonfinite([largest, x, largest])


@pytest.mark.parametrize("what", ["norm1", "norm2", "norminf"])
def test_infinite_and_nan(what: str) -> None:
    """A NaN of either sign, in any chunk, dominates infinities, which dominate everything else."""
    norm = STATISTICS[what]
    for dtype in (torch.float32, torch.bfloat16):
        x = draw(2 * CHUNK + 5, dtype=dtype)
        x[3] = -torch.inf
        assert norm([x]) == torch.inf
        for index in (0, CHUNK + 1, 2 * CHUNK + 4):
            for nan in (torch.nan, -torch.nan):
                y = x.clone()
                y[index] = math.copysign(torch.nan, nan)
                assert norm([y]).isnan()
    negative = torch.tensor([-1], dtype=torch.int32).view(torch.float32)
    assert negative.signbit()
    assert norm([torch.ones(3), negative, torch.ones(3)]).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_square_overflows_or_vanishes(dtype: torch.dtype) -> None:
    """Elements of every magnitude are summed accurately, even next to each other in one chunk or in several."""
    for scale in (1e-44, 1e-38, 1e-30, 1e-22, 1e-13, 1e-6, 1e6, 1e13, 1e17, 1e19, 1e22, 1e30, 1e35):
        x = (torch.randn(CHUNK + 77, dtype=torch.float64) * scale).to(dtype)
        got, truth = weft.grad_norm([x]), x.double().norm()
        smallest = 2.0**-149  # up to half of it is lost if the norm is subnormal
        near(got, Near(truth, 4 * EPS32 * truth + smallest))
        small, large = x * 1e-3, torch.randn(5).to(dtype)
        truth = torch.cat([x.double(), small.double(), large.double()]).norm()
        near(weft.grad_norm([small, x, large]), Near(truth, 4 * EPS32 * truth))
    for exponent in range(-149, 127):
        assert weft.grad_norm([torch.tensor([2.0**exponent])]) == 2.0**exponent


def test_norms_above_the_largest_value_are_infinite() -> None:
    largest = torch.full((100,), torch.finfo(torch.float32).max)
    assert weft.grad_norm([largest[:1]]) == largest[0]
    for p in (1, 2):
        assert weft.grad_norm([largest], p) == torch.inf
    assert weft.grad_norm([largest], math.inf) == largest[0]
    halves = [torch.tensor([2.0**126])] * 3
    assert weft.grad_norm(halves, 1) == 3 * 2.0**126
    near(weft.grad_norm(halves), Near(torch.tensor(3.0).double().sqrt() * 2.0**126, torch.tensor(2.0**104)))


def test_errors_do_not_add_up() -> None:
    """Equal elements round in one direction; torch's own norm of these is off by 6e-4 on a CPU."""
    x = torch.full((2**24 + 3,), 0.1)
    assert (weft.grad_norm([x]).double() / x.double().norm() - 1).abs() < 1e-6
    assert (weft.grad_norm([x], 1).double() / x.double().sum() - 1).abs() < 1e-6
    many = [torch.full((1,), 0.1)] * 20000
    assert (weft.grad_norm(many, 1).double() / (20000 * x[0].double()) - 1).abs() < 1e-7


def test_many_chunks() -> None:
    """There are more chunks than one tile of the last launch holds."""
    tensors = [draw(3) for _ in range(700)] + [torch.zeros(CHUNK), draw(CHUNK, zeros=False)] * 2
    for what in WHAT:
        check(tensors, what)
    assert weft.count_zeros([torch.zeros(40 * CHUNK)] * 3) == 120 * CHUNK
    tensors[600] = torch.tensor([torch.inf])
    for what in WHAT[:3]:
        assert STATISTICS[what](tensors) == torch.inf
    assert weft.any_nonfinite(tensors)


def test_zeros_are_read_once() -> None:
    """All-zero chunks, such as gradients of experts without tokens, are not rescanned for underflow."""
    for value, times in ((0.0, 1), (-0.0, 1), (1e-30, 2), (1.0, 1)):
        x = torch.full((CHUNK + 5,), value)
        with triton_loom.count() as counted:
            weft.grad_norm([x])
        assert counted.launches[0].arguments["reached[0]"].loads.requested == times * 4 * x.numel()


def test_the_same_bits_on_gpus_of_any_size() -> None:
    """The number of multiprocessors does not change the bits."""
    tensors = mixed()
    norms = []
    for target in ("sm_80", "sm_90", "sm_120"):
        with choosing_for(target):
            norms.append([weft.grad_norm(tensors, p).view(torch.int32) for p in (1, 2)])
    assert all(a == b for other in norms[1:] for a, b in zip(norms[0], other, strict=True))


@pytest.mark.parametrize("what", WHAT)
def test_float64(what: str) -> None:
    """float64 works alone and next to other dtypes, and makes a norm float64."""
    got = check([draw(999).double(), draw(3).double()], what)
    assert got.dtype == {"zeros": torch.int64, "nonfinite": torch.bool}.get(what, torch.float64)
    check([draw(999), draw(70).double(), draw(5, dtype=torch.bfloat16)], what)


def test_empty_lists() -> None:
    for tensors in ([], [None], [torch.zeros(0)], [torch.zeros(3, 0), None, torch.zeros(0).bfloat16()]):
        for p in (1, 2, math.inf):
            norm = weft.grad_norm(tensors, p)
            assert norm == 0.0
            assert norm.dtype == torch.float32
        assert weft.count_zeros(tensors) == 0
        assert not weft.any_nonfinite(tensors)
        assert weft.clip_grads_(tensors, 1.0) == 0.0
    assert weft.grad_norm([None, torch.tensor([3.0]), None, torch.tensor([4.0])]) == 5.0


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_layouts(layout: Callable[[Tensor], Tensor]) -> None:
    x = layout(draw(6, 5, 300))
    for what in WHAT:
        check([draw(3), x], what)
    if x.is_neg():
        with pytest.raises(ValueError, match="view of the negative of its memory: pass a clone"):
            weft.clip_grads_([x], 1.0)
    elif layout.__name__ not in ("expanded", "constant"):
        memory = torch.tensor([], dtype=x.dtype).set_(x.untyped_storage())
        gaps, wanted = memory.isnan(), x * 0.5
        weft.clip_grads_([draw(3), x], 1.0, norm=torch.tensor(2.0 - 1e-6))
        assert torch.equal(x, wanted)
        assert torch.equal(memory.isnan(), gaps), "memory in the gaps was changed"


def test_dense_tensors_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "contiguous", None)
    x = draw(4, 6, 8)
    for t in (x.permute(2, 0, 1), x.transpose(0, 1), x[:, :1].expand(4, 1, 8)[0], x.permute(1, 2, 0)[:1]):
        if module.is_dense(t):
            check([t], "norm2")
    assert module.is_dense(x.permute(2, 0, 1))
    assert not module.is_dense(x[:, :5])
    assert not module.is_dense(x[:1].expand(4, 6, 8))
    assert not module.is_dense(x[..., ::2])


@pytest.mark.parametrize("position", range(4))
def test_an_empty_tensor_anywhere(position: int) -> None:
    """An empty tensor may come at any position in any dtype. TransformerEngine's optimizer skipped the tensors after
    it, or went out of bounds."""
    tensors = [draw(CHUNK + 3), draw(5, dtype=torch.bfloat16), draw(70)]
    for dtype in (*DTYPES, torch.float64):
        tensors_with_empty = [
            *tensors[:position],
            draw(0, dtype=dtype),
            draw(3, 0, dtype=dtype),
            *tensors[position:],
        ]
        for what in WHAT:
            check(tensors_with_empty, what)
        copies = copy.deepcopy(tensors_with_empty)
        norm = weft.clip_grads_(copies, 0.5)
        for t, before in zip(copies, tensors_with_empty, strict=True):
            if t.numel():
                near(t, clipped(before, norm, 0.5))


@pytest.mark.slow
def test_more_than_2_to_the_31_elements() -> None:
    size = 2**31 + CHUNK + 5
    x = torch.zeros(size, dtype=torch.bfloat16)
    x[-1] = 3.0
    assert weft.count_zeros([x]) == size - 1
    assert weft.grad_norm([x, torch.tensor([4.0])]) == 5.0


# ---- clipping ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_clip(target: str) -> None:
    tensors = mixed()
    before = copy.deepcopy(tensors)
    with choosing_for(target):
        norm = weft.clip_grads_(tensors, 2.0)
        near(norm, statistic(before, "norm2"))  # type: ignore[arg-type]
        for t, was in zip(tensors, before, strict=True):
            if t.numel():
                near(t, clipped(was, norm, 2.0))
        assert weft.grad_norm(tensors) <= 2.0


@pytest.mark.parametrize("norm_type", [1, 2, math.inf])
def test_clip_matches_torch(norm_type: float) -> None:
    wanted = [torch.nn.Parameter(torch.empty(n)) for n in (1000, 1, 30)]
    for parameter in wanted:
        parameter.grad = draw(*parameter.shape)
    gradients = [parameter.grad.clone() for parameter in wanted if parameter.grad is not None]
    norm = weft.clip_grads_(gradients, 0.7, norm_type)
    torch.testing.assert_close(
        norm, torch.nn.utils.clip_grad_norm_(wanted, 0.7, norm_type), rtol=1e-6, atol=0
    )
    for got, parameter in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, parameter.grad, rtol=1e-6, atol=0)


def test_clip_is_a_drop_in_replacement_for_torchs() -> None:
    """Arguments have the same names and order, and clip a model's gradients equally."""
    torchs = list(inspect.signature(torch.nn.utils.clip_grad_norm_).parameters.values())
    ours = list(inspect.signature(weft.clip_grads_).parameters.values())
    assert [(p.name, p.default, p.kind) for p in ours[: len(torchs)]] == [
        (p.name, p.default, p.kind) for p in torchs
    ]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(torchs) :])
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((0.1,), {}),
        ((1,), {"norm_type": 1}),
        ((0.1, "inf"), {}),
        ((0.1, 2, True, False), {}),
        ((), {"max_norm": 0.1, "norm_type": float("inf"), "error_if_nonfinite": True, "foreach": True}),
        ((torch.tensor(0.1),), {}),
    ]
    for args, kwargs in calls:
        models = []
        for clip in (weft.clip_grads_, torch.nn.utils.clip_grad_norm_):
            torch.manual_seed(2)
            model = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))
            model[0].bias.requires_grad_(False)
            model(torch.randn(5, 8)).square().sum().backward()
            norm = clip(model.parameters(), *args, **kwargs)
            models.append([norm, *(p.grad for p in model.parameters() if p.grad is not None)])
        for got, wanted in zip(*models, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("norm_type", [1, 2, math.inf])
@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_error_if_nonfinite(special: float, norm_type: float) -> None:
    x, y = torch.tensor([1.0, special]), torch.full((3,), 7.0)
    with pytest.raises(RuntimeError, match=r"the norm of the gradients is (nan|inf), so nothing was clipped"):
        weft.clip_grads_([y, x], 1.0, norm_type, error_if_nonfinite=True)
    assert torch.equal(y, torch.full((3,), 7.0))
    with pytest.raises(RuntimeError, match="nothing was clipped"):
        weft.clip_grads_([y], 1.0, norm=torch.tensor(special), error_if_nonfinite=True)
    weft.clip_grads_([y, x], 1.0, norm_type)
    assert x[1].isnan()


def test_clip_rounds_once() -> None:
    x = draw(5000, dtype=torch.bfloat16)
    norm = torch.tensor(3.7)
    coefficient = torch.tensor(1.3) / (norm + 1e-6)
    wanted = (x.float() * coefficient).bfloat16()
    weft.clip_grads_([x], 1.3, norm=norm)
    assert torch.equal(x, wanted)


@pytest.mark.parametrize("size", [1, CHUNK + 5])
def test_clip_by_a_norm_inside_a_clipped_tensor(size: int) -> None:
    """The norm is read before it is scaled."""
    x, y = torch.full((size,), 4.0), torch.full((3 * CHUNK,), 2.0)
    for norm in (x[0], x[-1]):
        x.fill_(4.0 - 1e-6)
        y.fill_(2.0)
        weft.clip_grads_([x, y], 1.0, norm=norm)
        torch.testing.assert_close(x, torch.full_like(x, 1.0), rtol=1e-6, atol=0)
        torch.testing.assert_close(y, torch.full_like(y, 0.5), rtol=1e-6, atol=0)


def test_clip_of_a_small_norm() -> None:
    x = torch.tensor([1e-5, -3e-6])
    weft.clip_grads_([x], 1e-6, norm=torch.tensor(1e-5))
    torch.testing.assert_close(x, torch.tensor([1e-5, -3e-6]) / 11, rtol=1e-6, atol=0)


@pytest.mark.parametrize("norm", [0.0, 0.5, 1.0 - 2e-6])
def test_nothing_to_clip_changes_nothing(norm: float) -> None:
    x, y = draw(700), draw(700, dtype=torch.bfloat16)
    x[:2], y[:2] = torch.nan, torch.inf
    before = [x.clone(), y.clone()]
    with triton_loom.count() as counted:
        weft.clip_grads_([x, y], 1.0, norm=torch.tensor(norm))
    assert len(counted.launches) == 2
    assert counted.stores.requested == 0, "unchanged tensors must not be written"
    for got, was in zip((x, y), before, strict=True):
        assert torch.equal(got.nan_to_num(7.0), was.nan_to_num(7.0))


@pytest.mark.parametrize("norm", [torch.nan, torch.inf, 0.999999, 1.0, 1.000001, 1e38])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, math.inf])
def test_special_norms_match_torch(norm: float, max_norm: float) -> None:
    parameter = torch.nn.Parameter(torch.empty(4))
    parameter.grad = torch.tensor([1.0, -2.0, torch.inf, torch.nan])
    x = parameter.grad.clone()
    total = torch.tensor(norm)
    torch.nn.utils.clip_grads_with_norm_([parameter], max_norm, total)
    assert weft.clip_grads_([x], max_norm, norm=total) is total
    torch.testing.assert_close(x, parameter.grad, rtol=1e-6, atol=0, equal_nan=True)


def test_clip_of_float64_next_to_other_dtypes() -> None:
    x, y = torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float64)
    norm = weft.clip_grads_([x, y], 1.0)
    assert norm.dtype == torch.float64
    torch.testing.assert_close(y, torch.tensor([0.8], dtype=torch.float64), rtol=1e-6, atol=0)
    torch.testing.assert_close(x, torch.tensor([0.6]), rtol=1e-6, atol=0)


def test_clip_raises_for_shared_memory() -> None:
    x = draw(100)
    for tensors in ([x, x], [x[:60], x[59:]], [x[50:], draw(3), x[:51]]):
        before = x.clone()
        with pytest.raises(ValueError, match="share memory"):
            weft.clip_grads_(tensors, 0.1)
        assert torch.equal(x, before)
    with pytest.raises(ValueError, match="expanded"):
        weft.clip_grads_([x[:1].expand(7)], 0.1)
    x = x.double()  # served by the reference
    with pytest.raises(ValueError, match="expanded"):
        weft.clip_grads_([x[:1].expand(7)], 0.1)
    with pytest.raises(ValueError, match="share memory"), weft.backend("reference"):
        weft.clip_grads_([x.float()] * 2, 0.1)
    weft.clip_grads_([x[:50], x[50:]], 0.1)
    assert weft.grad_norm([x, x]) > weft.grad_norm([x]), "a repeated tensor must count twice"


def test_clip_raises_before_it_writes() -> None:
    """Each precision is a separate op call; none is made if one of them must raise."""
    for wrong in ([draw(4).double()] * 2, [draw(1).double().expand(3)], [draw(3).double().to_sparse()]):
        x = torch.full((5,), 2.0)
        with pytest.raises(ValueError, match=r"share memory|expanded|sparse"):
            weft.clip_grads_([x, *wrong], 0.1, norm=torch.tensor(3.0))
        assert torch.equal(x, torch.full((5,), 2.0))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_slices_that_share_memory_are_scaled_once(backend: Any) -> None:
    x = draw(6, 9, zeros=False)
    wanted = x.clone()
    wanted[:, :7] *= 0.5
    with weft.backend(backend):
        weft.clip_grads_([x[:, :4], x[:, 3:7]], 1.0, norm=torch.tensor(2.0 - 1e-6))
    assert torch.equal(x, wanted)


def test_autograd_sees_that_tensors_changed() -> None:
    x = draw(5)
    y = (x * torch.ones(5, requires_grad=True)).sum()
    weft.clip_grads_([x], 0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# ---- the table -----------------------------------------------------------------------------------------


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Record the tables that are built."""
    tables: list[Any] = []
    original = module._build
    monkeypatch.setattr(module, "_build", lambda *args: (tables.append(original(*args)), tables[-1])[1])
    module._tables.clear()
    yield tables
    module._tables.clear()


def test_a_table_is_built_once(built: list[Any]) -> None:
    tensors = mixed()
    for _ in range(3):
        weft.grad_norm(tensors)
        weft.count_zeros(list(tensors))
        weft.clip_grads_([t[...] for t in tensors], 1.0)
    assert len(built) == 1
    assert weft.grad_norm(tensors[:-1]) < weft.grad_norm([*tensors, torch.full((4,), 3.0)])
    assert len(built) == 3
    longer = torch.ones(64)
    norms = [weft.grad_norm([longer[:n].view(dtype)], 1) for n in (64, 32) for dtype in DTYPES[:2]]
    assert norms[0] == 64
    assert norms[2] == 32
    assert len(built) == 7, "another size, another dtype at the same address"


def test_a_moved_tensor_gets_a_new_table(built: list[Any]) -> None:
    x = torch.ones(16)
    assert weft.grad_norm([x]) == 4.0
    x.data = torch.full((16,), 2.0)
    assert weft.grad_norm([x]) == 8.0
    assert len(built) == 2


def test_tables_are_bounded(built: list[Any]) -> None:
    keep = torch.ones(4)
    tensors = [torch.ones(4) for _ in range(2 * module.TABLES)]
    for t in tensors:
        assert weft.grad_norm([keep]) == 2.0
        assert weft.grad_norm([t]) == 2.0
    assert len(module._tables) == module.TABLES
    assert len(built) == 1 + len(tensors), "a table in use must stay cached"
    for _ in range(3):  # copies of non-dense tensors are temporary
        weft.grad_norm([keep[::2]])
    assert len(module._tables) == module.TABLES
    assert weft.grad_norm([keep]) == 2.0
    assert len(built) == 4 + len(tensors)


def test_another_default_device(built: list[Any]) -> None:
    """`torch.set_default_device` does not affect the table, which is built on the host."""
    tensors = mixed()
    with torch.device("meta"):
        results = [STATISTICS[what](tensors) for what in WHAT]
        assert weft.clip_grads_(tensors, 1.0, norm=torch.tensor(0.5, device="cpu")).device.type == "cpu"
        assert weft.grad_norm([]) == 0.0
    assert len(built) == 1
    module._tables.clear()
    assert all(torch.equal(a, STATISTICS[what](tensors)) for a, what in zip(results, WHAT, strict=True))


def test_chunks_begin_at_multiples_of_16_bytes() -> None:
    tensors = [t for t in mixed() if t.numel()]
    table, _ = module.table_of(tensors)
    reached = 0
    for dtype, first, chunks in table.segments:
        for address, count in table.entries[first : first + chunks].tolist():
            aligned = address % 16 == 0
            assert aligned or count * dtype.itemsize < 16
            assert 0 < count <= CHUNK
            reached += count
    assert reached == sum(t.numel() for t in tensors)
    assert {s.dtype for s in table.segments} == set(DTYPES)
    assert table.chunks == len(table.entries) == sum(s.chunks for s in table.segments)


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_the_witness_knows_the_tensors_of_a_table(target: str) -> None:
    """The witness reports nothing, sees each byte read once, and detects an access past a tensor's end."""
    tensors = mixed()
    with choosing_for(target), triton_loom.sanitize(), triton_loom.count() as counted:
        weft.grad_norm(tensors)
        weft.clip_grads_(tensors, 1.0, norm=torch.tensor(2.0))
    launches = counted.launches
    assert [launch.kernel for launch in launches] == [
        *["multi_tensor_reduce_kernel"] * 3,
        "multi_tensor_total_kernel",
        *["multi_tensor_clip_kernel"] * 3,
    ]
    for number, t in enumerate(tensors):
        moved = [launch.arguments.get(f"reached[{number}]") for launch in launches]
        loads, stores = (
            [getattr(m, side).requested if m else 0 for m in moved] for side in ("loads", "stores")
        )
        size = t.numel() * t.element_size()
        assert sum(loads[:3]) == sum(loads[4:]) == sum(stores) == size
        assert sum(stores[:4]) == 0
    table, _ = module.table_of(tensors)
    last = table.segments[0].chunks - 1
    table.entries[last, 1] += 1
    try:
        sanitizer = triton_loom.sanitize()
        with pytest.raises(triton_loom.SanitizerError, match="none of the"), choosing_for(target), sanitizer:
            weft.grad_norm(tensors)
    finally:
        module._tables.clear()


def test_one_launch_per_dtype() -> None:
    tensors = [torch.empty(n, dtype=d, device="meta") for d in DTYPES for n in (5, 100_000, 0)]
    with recording("sm_90") as variants:
        weft.grad_norm(tensors)
    names = [variant.kernel for variant in variants]
    assert names == [*["multi_tensor_reduce_kernel"] * 3, "multi_tensor_total_kernel"]
    with recording("sm_90") as variants:
        weft.clip_grads_(tensors, 1.0, norm=torch.empty((), device="meta"))
    assert [variant.kernel for variant in variants] == ["multi_tensor_clip_kernel"] * 3


@pytest.mark.parametrize("target", ["sm_90", pytest.param("gfx942", marks=pytest.mark.slow)])
def test_accesses_are_128_bits_wide(target: str) -> None:
    """Full tiles are read and written 128 bits at a time for any list."""
    bits = {"fp32": 32, "bf16": 16}
    tensors = [torch.empty(4096, 8192, dtype=dtype, device="meta") for dtype in DTYPES[:2]]
    with recording(target) as variants:
        weft.grad_norm(tensors)
        weft.count_zeros(tensors)
        weft.clip_grads_(tensors, 1.0, norm=torch.empty((), device="meta"))
    chosen = [v for v in variants if "total" not in v.kernel]
    assert len(chosen) == 6
    for variant, binary in zip(chosen, compile_all([(v, target) for v in chosen]), strict=True):
        assert isinstance(binary, Binary), binary
        constants = dict(variant.constants)
        element = str(constants["ELEMENT"]).replace("int32", "fp32").replace("int16", "bf16")
        threads = variant.num_warps * (64 if target.startswith("gfx") else 32)
        needed = constants["TILE"] * bits[element] // (128 * threads)
        assert binary.loads.get(128, 0) >= needed
        assert "clip" not in variant.kernel or binary.stores.get(128, 0) >= needed
        assert not binary.spill_bytes
        assert not binary.uses_fp64
        narrow = binary.loads.get(bits[element], 0) - ("clip" in variant.kernel and element == "fp32")
        limit = constants["TILE"] // threads * (2 if constants.get("WHAT") == "norm2" else 1)
        assert narrow <= limit, "only the ends of a tensor may be read element by element"


# ---- PyTorch -------------------------------------------------------------------------------------------


def step(*gradients: Tensor) -> tuple[Tensor, ...]:
    """Compute statistics and clip as a training step does."""
    doubled = [g * 2 for g in gradients]
    zeros, bad = weft.count_zeros(doubled), weft.any_nonfinite(doubled)
    norm = weft.clip_grads_(doubled, 1.0)
    return norm, zeros, bad, weft.grad_norm(doubled, math.inf), *[d + 1 for d in doubled]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_is_eager(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    gradients = [draw(40, 3), draw(0), draw(5000, dtype=torch.bfloat16), draw(3).double()]
    for got, wanted in zip(compiled(*gradients), step(*gradients), strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_clips_its_arguments(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *g: weft.clip_grads_(list(g), 1.0), fullgraph=True, backend=backend)
    gradients = [draw(40, 3), draw(5000, dtype=torch.bfloat16)]
    wanted = copy.deepcopy(gradients)
    assert compiled(*gradients) == weft.clip_grads_(wanted, 1.0)
    assert all(map(torch.equal, gradients, wanted))


def test_opcheck() -> None:
    gradients = [draw(40, 3), draw(0), draw(500, dtype=torch.bfloat16), draw(6, 9)[:, :4]]
    for what in ("norm2", "zeros"):
        torch.library.opcheck(weft.catalogue["multi_tensor_reduce"].overload, (gradients, what))
    torch.library.opcheck(weft.catalogue["multi_tensor_clip"].overload, (gradients, torch.tensor(3.0), 1.0))


def test_inference_mode() -> None:
    with torch.inference_mode():
        x = draw(9)
        norm = weft.clip_grads_([x], 0.5)
        assert norm > 0.5
        near(weft.grad_norm([x]), Near(torch.tensor(0.5).double(), torch.tensor(1e-5)))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_wrong_arguments() -> None:
    x = torch.ones(3)
    with pytest.raises(ValueError, match=r"norm_type must be 1, 2 or math.inf; got 3"):
        weft.grad_norm([x], 3)
    with pytest.raises(ValueError, match=r"norm_type must be 1, 2 or math.inf; got two"):
        weft.clip_grads_([x], 1.0, "two")
    with pytest.raises(ValueError, match=r"float64; got torch.int32"):
        weft.count_zeros([x, torch.ones(3, dtype=torch.int32)])
    matrix, weight = torch.ones(3, 4), torch.nn.Parameter(x.clone())
    weight.grad = x.to_sparse()
    for sparse in (x.to_sparse(), matrix.to_sparse_csr(), x.to_sparse().double(), matrix.to_mkldnn(), weight):
        for function in (weft.grad_norm, lambda t: weft.clip_grads_(t, 1.0, norm=x[0])):
            with pytest.raises(ValueError, match=r"one has the layout torch\.(sparse_co|sparse_csr|_mkldnn)"):
                function([x, sparse])
    with pytest.raises(ValueError, match=r"at least 0; got -1"):
        weft.clip_grads_([x], -1.0)
    with pytest.raises(ValueError, match=r"one floating-point element; got torch.int64"):
        weft.clip_grads_([x], 1.0, norm=torch.tensor(3))
    with pytest.raises(ValueError, match="their own groups"):
        weft.grad_norm([weft.Shards([x]), x])
    with pytest.raises(TypeError, match=r"norm must be a tensor, as grad_norm returns it; got a float"):
        weft.clip_grads_([x], 1.0, norm=2.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"max_norm must be a number"):
        weft.clip_grads_([x], torch.ones((), device="meta"))  # type: ignore[arg-type]
    for groups in (3, "tp", [3], (None,)):
        with pytest.raises(TypeError, match=r"a tuple of torch.distributed process groups"):
            weft.grad_norm([x], groups=groups)  # type: ignore[arg-type]
    layer = torch.nn.Linear(3, 2)
    wrong: dict[str, Any] = {
        r"got a Linear: give its parameters\(\)": layer,
        r"got a dict: give its values\(\)": dict(layer.named_parameters()),
        r"one entry is a tuple: give parameters\(\), without their names": list(layer.named_parameters()),
        r"one entry is a Linear: give its parameters\(\)": [layer],
        r"got a float: give tensors": 1.0,
        r"one entry is a str: give tensors": "abc",
        r"one entry is a list: give tensors": [[x]],
    }
    for message, tensors in wrong.items():
        for function in (
            weft.grad_norm,
            weft.count_zeros,
            weft.any_nonfinite,
            lambda t: weft.clip_grads_(t, 1.0),
        ):
            with pytest.raises(TypeError, match=message):
                function(tensors)
    with pytest.raises(ValueError, match="their own groups"):
        weft.grad_norm([weft.Shards([x])], groups=(object(),))

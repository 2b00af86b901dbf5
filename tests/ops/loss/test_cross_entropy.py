"""Cross entropy against PyTorch and a float64 truth: targets of every kind, values, layouts, gradients, in place."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton_loom
from torch import Tensor
from triton_loom.testing import EPS32, NAN, Guarded, check, ulp

import weft
from tests.catalogue.layouts import LAYOUTS, far_apart, transposed
from tests.ops.loss.ranks_vocabulary import unread_labels
from tests.support.covering import covering
from weft.lab.calls import assert_same
from weft.lab.families import Call
from weft.lab.families.cross_entropy import cross_entropy_truth
from weft.lab.truth import Near, arguments, near
from weft.ops import CrossEntropy
from weft.ops.loss.cross_entropy.arguments import CrossEntropyArgs, CrossEntropyBackwardArgs
from weft.ops.loss.reduction import LossOptions
from weft.ops.loss.statistics import Softmax, Wanted
from weft.runtime import choosing_for, recording

ALL: dict[str, Any] = {"return_lse": True, "return_entropy": True, "return_accuracy": True}
EVERYTHING: dict[str, Any] = {
    "label_smoothing": 0.1,
    "z_loss": 1e-2,
    "softcap": 20.0,
    "temperature": 1.25,
    **ALL,
}


def problem(
    rows: int, cols: int, dtype: torch.dtype = torch.bfloat16, ignored: int = 3, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return logits with some confident tokens, and targets of which every `ignored`-th is ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, cols, generator=generator) * 2
    target = torch.randint(0, cols, (rows,), generator=generator)
    logits[torch.arange(0, rows, 2), target[::2]] += 9.0
    if ignored:
        target[1::ignored] = -100
    return logits.to(dtype), target


def named(result: Any) -> dict[str, Tensor]:
    if isinstance(result, CrossEntropy):
        return {k: v for k, v in result._asdict().items() if v is not None}
    return {"loss": result}


def upstream_of(outputs: dict[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, generator=generator)
        for name, value in outputs.items()
        if value.requires_grad
    }


def run(logits: Tensor, target: Tensor, upstream: dict[str, Tensor] | None = None, **options: Any) -> Any:
    """Return the outputs, and dlogits for random upstream gradients of all of them."""
    leaf = logits.detach().requires_grad_()
    outputs = named(weft.cross_entropy(leaf, target, **options))
    upstream = upstream or upstream_of(outputs)
    outputs["dlogits"] = torch.autograd.grad(
        [outputs[name] for name in upstream], leaf, list(upstream.values())
    )[0]
    return {name: value.detach() for name, value in outputs.items()}


def expect(logits: Tensor, target: Tensor, upstream: dict[str, Tensor] | None = None, **options: Any) -> None:
    """Check outputs and gradient against the truth."""
    leaf = logits.detach().requires_grad_()
    upstream = upstream or upstream_of(named(weft.cross_entropy(leaf, target, **options)))
    got = run(logits, target, upstream, **options)
    a = arguments(Call(weft.cross_entropy, {"logits": logits, "target": target, **options}))
    wanted = cross_entropy_truth(a, upstream)
    for name, value in got.items():
        right = wanted[name]
        if isinstance(right, Near):
            assert value.dtype == (logits.dtype if name == "dlogits" else torch.float32), name
            near(value, right)
        else:
            assert torch.equal(value, right), name


# ---- PyTorch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weighted", "smoothing", "reduction"), covering((False, True), (0.0, 0.3), ("mean", "sum", "none"))
)
def test_equals_pytorch(reduction: str, smoothing: float, weighted: bool) -> None:
    """Loss and gradient equal F.cross_entropy in float64, with ignored tokens and a random upstream gradient."""
    logits, target = problem(13, 203, torch.float32)
    assert (target == -100).any()
    weight = torch.rand(203) if weighted else None
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    leaf = logits.double().requires_grad_()
    loss = F.cross_entropy(leaf, target, None if weight is None else weight.double(), **options)
    upstream = torch.randn(loss.shape)
    (gradient,) = torch.autograd.grad(loss, leaf, upstream.double())
    got = run(logits, target, {"loss": upstream}, class_weight=weight, **options)
    torch.testing.assert_close(got["loss"].double(), loss.detach(), rtol=1e-6, atol=2e-6)
    check(got["dlogits"], gradient, 4e-7 * gradient.abs().max())


@pytest.mark.parametrize("function", ["mean", "sum", "none"])
@pytest.mark.parametrize("all_ignored", ["zero", "nan"])
def test_no_token_has_a_target(function: Any, all_ignored: Any) -> None:
    """The result is 0 with zero gradients, or PyTorch's; also without any tokens."""
    for rows in (5, 0):
        logits = torch.randn(rows, 40, requires_grad=True)
        target = torch.full((rows,), -100)
        got = weft.cross_entropy(
            logits, target, reduction=function, all_ignored=all_ignored, return_accuracy=True
        )
        wanted = F.cross_entropy(logits.double(), target, reduction=function).float()
        if function == "mean" and all_ignored == "zero":
            wanted = torch.zeros(())
        torch.testing.assert_close(got.loss.detach(), wanted, equal_nan=True, rtol=0, atol=0)
        torch.testing.assert_close(got.accuracy, wanted, equal_nan=True, rtol=0, atol=0)
        (gradient,) = torch.autograd.grad(got.loss.sum(), logits)
        assert gradient.shape == logits.shape
        assert not gradient.count_nonzero()


def test_weights_of_zero() -> None:
    """A mean over weights that sum to zero equals a mean over no tokens."""
    logits, target = problem(4, 40, torch.float32, ignored=0)
    weight = torch.zeros(40)
    got = run(logits, target, {"loss": torch.ones(())}, class_weight=weight)
    assert not got["loss"].count_nonzero()
    assert not got["dlogits"].count_nonzero()
    assert weft.cross_entropy(logits, target, class_weight=weight, all_ignored="nan").isnan()


# ---- the truth ----------------------------------------------------------------------------------------------

SIZES = [(1, 1), (3, 2), (5, 7), (4, 64), (3, 65), (2, 1000), (3, 2047), (2, 2048), (3, 3073), (3, 5127)]


@pytest.mark.parametrize(("rows", "cols"), SIZES)
def test_sizes(rows: int, cols: int) -> None:
    """Rows of one tile, many or none, beginning at every address modulo 16 bytes."""
    expect(*problem(rows, cols), **EVERYTHING, reduction="none")
    expect(*problem(rows, cols))


@pytest.mark.parametrize(
    ("cols", "dtype"), covering((68, 2063, 4096), (torch.float16, torch.float32), together=1)
)
def test_dtypes(cols: int, dtype: torch.dtype) -> None:
    expect(*problem(5, cols, dtype), **EVERYTHING, class_weight=torch.rand(cols).bfloat16())
    expect(*problem(5, cols, dtype), reduction="sum")


OPTIONS: dict[str, dict[str, Any]] = {
    "z": {"z_loss": 0.05},
    "scaled": {"temperature": 4.0, "reduction": "none"},
    "capped": {"softcap": 5.0, "return_accuracy": True, "reduction": "sum"},
    "smoothed": {"label_smoothing": 0.2, "return_lse": True},
    "weighted": {"class_weight": torch.arange(3000) % 7 / 4.0, "reduction": "mean"},
    "weighted, smoothed": {
        "class_weight": torch.arange(3000) % 7 / 4.0,
        "label_smoothing": 1.0,
        "reduction": "none",
    },
    "entropy": {"return_entropy": True, "reduction": "none"},
    "accuracy": {"return_accuracy": True, "reduction": "none"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    """Each option alone, for rows with a body of tiles and a rest."""
    expect(*problem(6, 3000), **OPTIONS[name])


@pytest.mark.parametrize("rows", [1023, 1025, 2500])
def test_sums_over_many_rows(rows: int) -> None:
    expect(*problem(rows, 5, torch.float32), return_accuracy=True)
    expect(*problem(rows, 5, torch.float32), return_accuracy=True, reduction="sum")


CONFIGURED = [("sm_90", 20001), ("gfx942", 1100), ("sm_80", 33)]
SLOWLY_CONFIGURED = [
    case
    for case in itertools.product(("sm_90", "gfx942", "sm_80"), (33, 1100, 4097, 20001, 40960))
    if case not in CONFIGURED
]


@pytest.mark.parametrize(
    ("target", "cols"),
    [*CONFIGURED, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOWLY_CONFIGURED)],
)
def test_configuration_of_gpu(target: str, cols: int) -> None:
    """The tiles of GPUs, and gradients of rows split into spans, match the truth."""
    with choosing_for(target):
        expect(*problem(3, cols), **EVERYTHING, reduction="none")


def test_splitting_rows_into_spans_changes_no_bit() -> None:
    """A GPU splits a single row over many programs, but not thousands of rows."""
    logits, target = problem(2, 50001)
    repeated = logits[:1].expand(3000, -1)
    with choosing_for("sm_90"):
        split = run(logits, target, {"loss": torch.ones(2)}, reduction="none")["dlogits"]
        unsplit = run(repeated, target[:1].expand(3000), {"loss": torch.ones(3000)}, reduction="none")[
            "dlogits"
        ]
    assert torch.equal(split[0], unsplit[-1])


# ---- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.9, 0.99, 0.999, 0.9999])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradient_of_a_confident_target(p: float, dtype: torch.dtype) -> None:
    """p - 1 is computed in fp32 and rounded once, also in place."""
    cols = 2100
    logits = torch.zeros(2, cols)
    logits[:, 77] = torch.tensor(p / (1 - p) * (cols - 1)).log()
    logits = logits.to(dtype)
    target = torch.tensor([77, 78])
    exact = torch.softmax(logits.double(), 1)
    exact[[0, 1], target] -= 1
    for inplace in (False, True):
        leaf = logits.clone().requires_grad_()
        loss = weft.cross_entropy(leaf.clone(), target, reduction="sum", inplace=inplace)
        (got,) = torch.autograd.grad(loss, leaf)
        limit = ulp(exact, dtype) / 2 + 16 * EPS32
        assert ((got.double() - exact).abs() <= limit).all()
        assert abs(got[0, 77].double() / exact[0, 77] - 1) < (
            5e-3 if dtype == torch.bfloat16 else 16 * EPS32 / (1 - p)
        )


@pytest.mark.parametrize("shift", [1e4, -1e4, -104.0, -3e38])
def test_a_common_offset_changes_nothing(shift: float) -> None:
    """fp32 logits that are multiples of 1/64 can be shifted without rounding."""
    logits, target = problem(5, 2500, torch.float32)
    logits = (logits * 64).round() / 64
    options: dict[str, Any] = {"label_smoothing": 0.1, "return_entropy": True, "reduction": "none"}
    if shift < -1e38:
        logits, options = logits * 0, {"return_entropy": True, "reduction": "none"}
    moved = logits + shift
    assert torch.equal(moved.double(), logits.double() + shift) or shift < -1e38
    upstream = {"loss": torch.randn(5), "entropy": torch.randn(5)}
    wanted, got = (run(x, target, upstream, **options) for x in (logits, moved))
    assert_same(got, wanted, f"moved by {shift}")
    near_by = run(logits.bfloat16(), target, upstream, **options)["loss"]
    assert near_by.isfinite().all()


def test_a_wide_spread_with_smoothing() -> None:
    """A logit 120 or more below the largest has a finite share of the loss."""
    logits, target = problem(4, 600, torch.float32)
    logits[:, ::2] -= 120.0
    logits[1] *= 30
    expect(logits, target, label_smoothing=0.1, return_entropy=True)


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, EVERYTHING], ids=["plain", "smoothed", "all"]
)
def test_padding_of_minus_infinity(options: dict[str, Any]) -> None:
    """Padding a vocabulary with minus infinity changes no loss or gradient, and the padding's gradient is 0."""
    real, pad = 2085, 27
    logits, target = problem(6, real, torch.float32)
    padded = F.pad(logits, (0, pad), value=-torch.inf)
    scattered = torch.cat([padded[:, -pad:], logits], 1)  # padding comes first
    options = {**options, "reduction": "none"}
    wanted = run(logits, target, **options)
    first = torch.where(target == -100, target, target + pad)
    for x, y, columns in ((padded, target, slice(0, real)), (scattered, first, slice(pad, None))):
        got = run(x, y, **options)
        gradient = got.pop("dlogits")
        torch.testing.assert_close(gradient[:, columns], wanted["dlogits"], rtol=1e-5, atol=1e-6)
        gradient[:, columns] = 0
        assert not gradient.count_nonzero()
        for name, value in got.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=1e-6)
        expect(x, y, **options)


def test_tiles_of_minus_infinity() -> None:
    """Whole tiles of minus infinity at the beginning, middle and end of a row, and a target inside one."""
    logits, target = problem(4, 8000, torch.float32, ignored=0)
    logits[0, :3000] = logits[1, 2000:5000] = logits[2, 4000:] = -torch.inf
    target = torch.tensor([5000, 100, 17, 50])
    expect(logits, target, return_entropy=True, label_smoothing=0.1, reduction="none")
    loss = weft.cross_entropy(logits, torch.tensor([100, 100, 17, 50]), reduction="none")
    assert loss[0] == torch.inf
    assert loss[1:].isfinite().all()


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
@pytest.mark.parametrize("col", [3, 2000, 2499])
def test_a_special_value_stays_in_its_row(special: float, col: int) -> None:
    """A special value makes all results of its row NaN: no maximum swallows it."""
    logits, target = problem(4, 2500, ignored=0)
    options: dict[str, Any] = {"reduction": "none", "return_lse": True, "return_entropy": True}
    wanted = run(logits, target, **options)
    logits[2, col] = special
    for name, value in run(logits, target, **options).items():
        others = [0, 1, 3]
        assert torch.equal(value[others], wanted[name][others]), name
        row = value[2]
        assert row.isnan().any() or (name == "lse" and special == torch.inf), name


def test_properties() -> None:
    """0 <= entropy <= log V, log-probabilities do not exceed 0, and the gradients of a row sum to 0."""
    logits, target = problem(40, 300, torch.float32, ignored=0)
    logits[0] = 0.0
    logits[1, 5] = 1e4
    got = run(logits, target, **ALL, reduction="none")
    assert (got["entropy"] >= -1e-6).all()
    assert (got["entropy"] <= torch.tensor(300.0).log() + 1e-6).all()
    assert got["entropy"][1] == 0
    torch.testing.assert_close(got["entropy"][0], torch.tensor(300.0).log())
    assert (got["loss"] >= 0).all()
    gradient = run(logits, target, {"loss": torch.randn(40)}, reduction="none")["dlogits"]
    assert gradient.double().sum(1).abs().max() < 1e-5


# ---- targets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ignored_tokens_are_not_read(reduction: Any) -> None:
    """Results and gradients of ignored tokens are written as 0, even if their logits are NaN."""
    logits, target = problem(7, 3001)
    ignored = target == -100
    assert 0 < ignored.sum() < 7
    wanted = run(logits, target, **EVERYTHING, reduction=reduction)
    logits[ignored] = torch.nan
    got = run(logits, target, **EVERYTHING, reduction=reduction)
    assert_same(got, wanted, "NaN in ignored rows")
    assert not got["dlogits"][ignored].count_nonzero()
    for name in ("lse", "entropy"):
        assert not got[name][ignored].count_nonzero()
    other = torch.where(ignored, 7, target)
    assert_same(run(logits, other, **EVERYTHING, ignore_index=7, reduction=reduction), got, "another index")


@pytest.mark.parametrize("wrong", [-1, 2500, 2507, -(2**31), 2**31 - 1, 2**32 + 3, -(2**40)])
def test_a_target_outside_of_the_vocabulary(wrong: int) -> None:
    """The token's results are NaN and its gradient is zero, as on a GPU; other tokens are unaffected, and nothing
    outside is read."""
    logits, target = problem(4, 2500, ignored=3)
    options: dict[str, Any] = {"reduction": "none", "class_weight": torch.rand(2500), **EVERYTHING}
    wanted = run(logits, target, **options)
    target[2] = wrong
    kind = torch.int32 if -(2**31) <= wrong < 2**31 else torch.int64
    guarded = Guarded.of(logits, NAN)
    with unread_labels(), triton_loom.sanitize():
        got = run(guarded.tensor, target.to(kind), **options)
    for name, value in got.items():
        others = [0, 1, 3]
        assert torch.equal(value[others], wanted[name][others]), name
        assert value[2].isnan().all() or name in ("dlogits", "accuracy"), name
    assert not got["dlogits"][2].count_nonzero()
    with unread_labels():
        mean = run(logits, target.to(kind), {"loss": torch.ones(())})
    assert mean["loss"].isnan()
    assert mean["dlogits"].isfinite().all()


def test_dtype_of_targets() -> None:
    logits, target = problem(5, 300)
    assert_same(run(logits, target.int(), **ALL), run(logits, target, **ALL), "int32")


def test_accuracy_among_equal_logits() -> None:
    """Among equal largest logits, the lowest column is the prediction."""
    logits = torch.zeros(4, 2500, dtype=torch.bfloat16)
    logits[:, [30, 2040, 2400]] = 3.0
    target = torch.tensor([30, 2040, 2400, 5])
    got = weft.cross_entropy(logits, target, reduction="none", return_accuracy=True)
    assert got.accuracy.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert weft.cross_entropy(logits, target, return_accuracy=True).accuracy == 0.25
    ignored = torch.tensor([30, -100, 2400, -100])
    assert weft.cross_entropy(logits, ignored, return_accuracy=True).accuracy == 0.5
    assert weft.cross_entropy(logits, target, reduction="sum", return_accuracy=True).accuracy == 1.0
    logits[:, [30, 2040]] = 0.0
    logits[:, 2450] = 3.0  # after the last whole tile, like 2400
    target = torch.tensor([2400, 2450, 2400, 2450])
    got = weft.cross_entropy(logits, target, reduction="none", return_accuracy=True)
    assert got.accuracy.tolist() == [1.0, 0.0, 1.0, 0.0]


# ---- layouts and sizes --------------------------------------------------------------------------------------


def assert_alike(got: dict[str, Tensor], wanted: dict[str, Tensor], logits: Tensor, what: str) -> None:
    """Check equality: of bits if rows begin at equal addresses modulo 16 bytes, which decide the order of sums."""
    offsets = lambda x: (x.storage_offset() + torch.arange(x[..., 0].numel()) * x.stride(-2)) % 8  # noqa: E731
    if logits.dim() == 2 and torch.equal(offsets(logits), offsets(logits.contiguous().clone())):
        assert_same(got, wanted, what)
    for name, value in got.items():
        step = (
            ulp(wanted[name].double(), value.dtype) if name == "dlogits" else 8 * EPS32 * wanted[name].abs()
        )
        assert ((value.double() - wanted[name].double()).abs() <= step + 1e-6).all(), f"{what}: {name}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_layout_of_logits(layout: Callable[[Tensor], Tensor]) -> None:
    """Any strides of logits, targets and weights give the bits of contiguous ones."""
    for shape in ((5, 1003), (3, 2, 72)):
        logits, target = problem(shape[0] * shape[-2] if len(shape) > 2 else shape[0], shape[-1])
        logits, target = logits.view(shape), target.view(shape[:-1])
        weight = torch.rand(shape[-1])
        options: dict[str, Any] = {**EVERYTHING, "reduction": "none"}
        laid_out = layout(logits)
        wanted = run(laid_out.contiguous(), target, class_weight=weight, **options)
        assert_alike(run(laid_out, target, class_weight=weight, **options), wanted, laid_out, layout.__name__)
        targets = torch.stack([target, target], -1)[..., 0]
        weights = torch.stack([weight, weight], -1)[:, 0]
        strided = run(laid_out, targets, class_weight=weights, **options)
        assert_alike(strided, wanted, laid_out, "strided target and weight")


@pytest.mark.parametrize("cols", [1000, 1003])
def test_shifted_tokens(cols: int) -> None:
    """Dropping the last token of each sequence leaves rows at two strides; the logits are not copied."""
    logits, target = problem(12, cols)
    logits = logits.view(3, 4, cols)[:, :-1]
    target = target.view(3, 4)[:, 1:]
    wanted = run(logits.contiguous(), target.contiguous(), **EVERYTHING)
    got = run(logits, target, **EVERYTHING)
    if cols % 8 == 0:
        assert_same(got, wanted, "shifted")
    assert_alike(got, wanted, logits, "shifted")
    expect(logits, target, **EVERYTHING)
    with triton_loom.count() as counted:
        weft.cross_entropy(logits, target)
    read = counted.launches[0].arguments["logits_ptr"].loads
    expected = (target != -100).sum() * cols * 2
    assert expected <= read.requested <= expected + 100, "only rows with a target are read, in place"


@pytest.mark.parametrize("layout", [*LAYOUTS, torch.zeros_like], ids=lambda f: f.__name__)
def test_layout_of_gradients(layout: Callable[[Tensor], Tensor]) -> None:
    """Each token has its own upstream gradient, even if all are one element in memory."""
    logits, target = problem(6, 210)
    logits, target = logits.view(3, 2, 210), target.view(3, 2)
    upstream = {name: torch.randn(3, 2) for name in ("loss", "lse", "entropy")}
    options: dict[str, Any] = {**EVERYTHING, "reduction": "none"}
    for name, gradient in upstream.items():
        laid_out = layout(gradient)
        wanted = run(logits, target, {**upstream, name: laid_out.contiguous().clone()}, **options)
        assert_same(run(logits, target, {**upstream, name: laid_out}, **options), wanted, name)


def test_infinite_upstream_gradient_stays_in_its_row() -> None:
    logits, target = problem(4, 210, ignored=0)
    upstream = torch.tensor([1.0, torch.inf, 2.0, torch.nan])
    got = run(logits, target, {"loss": upstream}, reduction="none")["dlogits"]
    assert not got[1].isfinite().any()
    assert got[3].isnan().all()
    assert got[[0, 2]].isfinite().all()


def test_offsets_have_64_bits() -> None:
    """Row offsets beyond 2^31 elements do not overflow."""
    logits = far_apart(4, 96)
    target = torch.tensor([3, 95, -100, 0])
    near_by = run(logits.contiguous(), target, **EVERYTHING)
    assert_same(run(logits, target, **EVERYTHING), near_by, "far apart")
    wanted = run(logits.contiguous(), target, {"loss": torch.ones(())}, **EVERYTHING)["dlogits"]
    weft.cross_entropy(computed(logits), target, **EVERYTHING, inplace=True).loss.backward()
    assert torch.equal(logits, wanted)


def test_more_rows_than_a_grid_axis() -> None:
    """70,001 rows exceed the 65,535 programs of a secondary grid axis."""
    logits, target = problem(70_001, 3)
    got = run(logits, target, {"loss": torch.randn(70_001)}, reduction="none")
    last = run(logits[-5:], target[-5:], {"loss": torch.randn(70_001)[-5:]}, reduction="none")
    assert torch.equal(got["loss"][-5:], last["loss"])


def test_a_token_depends_only_on_itself() -> None:
    """This holds for vocabularies in multiples of 8; otherwise the row's address modulo 16 bytes also matters."""
    logits, target = problem(9, 3064)
    upstream = {"loss": torch.randn(9), "entropy": torch.randn(9)}
    options: dict[str, Any] = {"reduction": "none", "return_entropy": True}
    together = run(logits, target, upstream, **options)
    for row in (0, 4, 8):
        one = {name: g[row : row + 1] for name, g in upstream.items()}
        alone = run(logits[row : row + 1].clone(), target[row : row + 1], one, **options)
        assert_same(alone, {name: value[row : row + 1] for name, value in together.items()}, f"row {row}")


# ---- gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [("loss",), ("lse",), ("entropy",), ("lse", "entropy")])
def test_gradients_of_some_outputs(used: tuple[str, ...]) -> None:
    logits, target = problem(5, 1030)
    upstream = {name: torch.randn(5) for name in used}
    expect(logits, target, upstream, reduction="none", label_smoothing=0.1, **ALL)


def test_z_loss_equals_the_term_computed_from_lse() -> None:
    """The option equals the same term computed from lse."""
    logits, target = problem(6, 700, torch.float32)
    leaf = logits.requires_grad_()
    option = weft.cross_entropy(leaf, target, z_loss=0.3)
    loss, lse, *_ = weft.cross_entropy(leaf, target, return_lse=True)
    composed = loss + 0.3 * lse.square().sum() / (target != -100).sum()
    torch.testing.assert_close(option, composed)
    torch.testing.assert_close(
        *(torch.autograd.grad(value, leaf)[0] for value in (option, composed)), atol=1e-6, rtol=1e-5
    )


def test_micro_batches_add_up_to_the_batch() -> None:
    """Gradients of micro-batches, each divided by the tokens of the batch, equal those of the batch."""
    logits, target = problem(12, 500, torch.float32)
    batch = run(logits, target, {"loss": torch.ones(())})["dlogits"]
    count = (target != -100).sum()
    parts = [
        run(x, y, {"loss": 1.0 / count}, reduction="sum")["dlogits"]
        for x, y in zip(logits.split(5), target.split(5), strict=True)
    ]
    torch.testing.assert_close(torch.cat(parts), batch, rtol=1e-6, atol=1e-9)


def test_two_losses_of_the_same_logits() -> None:
    """Logits are not overwritten without `inplace`."""
    logits, target = problem(4, 200, torch.float32)
    leaf = logits.requires_grad_()
    before = leaf.detach().clone()
    both = weft.cross_entropy(leaf, target) + weft.cross_entropy(leaf, target, label_smoothing=0.2)
    (gradient,) = torch.autograd.grad(both, leaf, retain_graph=True)
    assert torch.equal(leaf.detach(), before)
    assert torch.equal(torch.autograd.grad(both, leaf)[0], gradient)
    separate = [
        run(logits, target, {"loss": torch.ones(())}, label_smoothing=a)["dlogits"] for a in (0.0, 0.2)
    ]
    torch.testing.assert_close(gradient, separate[0] + separate[1])


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_gradcheck_of_the_reference(options: dict[str, Any]) -> None:
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, -100, 6, 3])
    weight = torch.rand(7, dtype=torch.float64) if options else None

    def f(x: Tensor) -> Any:
        got = weft.cross_entropy(x, target, class_weight=weight, **options)
        return got if isinstance(got, Tensor) else (got.loss, got.lse, got.entropy)

    assert torch.autograd.gradcheck(f, (logits,))


def test_second_derivatives_raise() -> None:
    logits = torch.randn(4, 7, requires_grad=True)
    loss = weft.cross_entropy(logits, torch.tensor([0, 1, 2, 3]))
    (first,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        first.square().sum().backward()


def test_only_necessary_kernels_are_launched() -> None:
    logits, target = problem(3, 64)
    with recording("sm_90") as seen:
        weft.cross_entropy(logits.requires_grad_(), target, return_accuracy=True).accuracy + 1
    assert [v.kernel for v in seen] == ["cross_entropy_kernel", "cross_entropy_totals_kernel"]
    with recording("sm_90") as seen:
        weft.cross_entropy(logits, target, reduction="none").sum().backward()
    assert [v.kernel for v in seen] == ["cross_entropy_kernel", "cross_entropy_backward_kernel"]


# ---- in place -----------------------------------------------------------------------------------------------


def computed(logits: Tensor) -> Tensor:
    """Return the same memory as the result of an operation, since a leaf must not be overwritten."""
    return logits.detach().add_(torch.zeros((), requires_grad=True))


@pytest.mark.parametrize("cols", [64, 1003, 3000])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_in_place_gradient_has_the_same_bits(cols: int, backend: Any) -> None:
    logits, target = problem(5, cols)
    with weft.backend(backend):
        wanted = run(logits, target, {"loss": torch.ones(5)}, **EVERYTHING, reduction="none")["dlogits"]
        inplace_logits = logits.clone().requires_grad_().clone()
        loss = weft.cross_entropy(inplace_logits, target, **EVERYTHING, reduction="none", inplace=True).loss
        assert torch.equal(inplace_logits.detach(), logits), "forward changes nothing"
        (gradient,) = torch.autograd.grad(loss, inplace_logits, torch.ones(5))
    assert torch.equal(gradient, wanted)
    assert torch.equal(inplace_logits.detach(), wanted)
    assert gradient.data_ptr() == inplace_logits.data_ptr()


def test_in_place_of_strided_rows() -> None:
    """Memory between the rows is unchanged."""
    memory = torch.randn(3, 5, 1040).bfloat16()
    before = memory.clone()
    logits = memory[:, :-1, :1003]
    target = torch.randint(0, 1003, (3, 4))
    wanted = run(logits.clone(), target, {"loss": torch.ones(())})["dlogits"]
    weft.cross_entropy(computed(logits), target, inplace=True).backward()
    assert torch.equal(logits, wanted)
    memory[:, :-1, :1003] = before[:, :-1, :1003]
    assert torch.equal(memory, before)


def test_autograd_detects_overwritten_logits() -> None:
    """A second use of overwritten logits raises autograd's error."""
    hidden, weight = torch.randn(4, 16, requires_grad=True), torch.randn(200, 16)
    target = torch.tensor([1, 2, -100, 199])

    def logits() -> Tensor:
        return hidden @ weight.t()

    loss = weft.cross_entropy(logits(), target, inplace=True)
    (gradient,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (wanted,) = torch.autograd.grad(weft.cross_entropy(logits(), target), hidden)
    assert torch.equal(gradient, wanted)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, hidden)
    shared = logits()
    other, loss = shared.square().sum(), weft.cross_entropy(shared, target, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (other + loss).backward()


def test_in_place_needs_disjoint_contiguous_rows() -> None:
    target = torch.zeros(4, dtype=torch.int64)
    for logits in (
        torch.randn(1, 30).expand(4, 30),
        transposed(torch.randn(4, 30)),
        torch.randn(60)[:45].as_strided((4, 30), (5, 1)),
    ):
        with pytest.raises(ValueError, match="inplace=True needs"):
            weft.cross_entropy(logits, target, inplace=True)


def test_in_place_rejects_a_leaf() -> None:
    """Backward would replace the user's values by the gradient; PyTorch also refuses in-place changes of a leaf."""
    logits, target = problem(4, 30)
    leaf, wide = logits.clone().requires_grad_(), logits.view(2, 2, 30).clone().requires_grad_()
    for tensor, kind in (
        (leaf, "a leaf"),
        (wide.view(4, 30), "a view of a leaf"),
        (wide[1], "a view of a leaf"),
    ):
        with pytest.raises(RuntimeError, match=f"inplace=True would overwrite {kind} that requires grad"):
            weft.cross_entropy(tensor, target[: len(tensor)], inplace=True)
    # Without a backward nothing is overwritten.
    wanted = weft.cross_entropy(logits, target)
    with torch.no_grad():
        assert torch.equal(weft.cross_entropy(leaf, target, inplace=True), wanted)
    assert torch.equal(weft.cross_entropy(logits, target, inplace=True), wanted)
    assert torch.equal(leaf.detach(), logits)


def test_in_place_reads_and_writes_once() -> None:
    """Bytes are counted with the launches of an H100."""
    logits, target = problem(20, 20000, ignored=0)
    loss = weft.cross_entropy(computed(logits), target, inplace=True)
    with choosing_for("sm_90"), triton_loom.count() as counted:
        loss.backward()
    (launch,) = counted.launches
    argument = launch.arguments["logits_ptr"]
    written = launch.arguments["dlogits_ptr"]
    size = logits.numel() * 2
    assert size <= argument.loads.requested <= 1.001 * size
    assert argument.stores.requested + written.stores.requested == size


# ---- PyTorch's machinery ------------------------------------------------------------------------------------


def head(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    loss, lse, entropy, _ = weft.cross_entropy(hidden @ weight.t(), target, **EVERYTHING)
    return loss, lse.square().sum() + entropy.sum()


def head_in_place(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    return (weft.cross_entropy(hidden @ weight.t(), target, inplace=True),)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (head, {"backend": "aot_eager", "dynamic": True}),
        (head_in_place, {"backend": "aot_eager", "dynamic": True}),
        pytest.param(head, {}, marks=pytest.mark.slow),
        pytest.param(head_in_place, {}, marks=pytest.mark.slow),
    ],
    ids=["dynamic", "dynamic in place", "inductor", "inductor in place"],
)
def test_compiled_equals_eager(function: Callable[..., Any], options: dict[str, Any]) -> None:
    """Dynamic shapes compile without a graph break and give the bits of eager mode."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, **options)
    for rows in (5, 9) if options else (5,):
        _, target = problem(rows, 203)
        results = []
        for f in (function, compiled):
            leaves = [
                torch.randn(n, 24, generator=torch.Generator().manual_seed(n)).requires_grad_()
                for n in (rows, 203)
            ]
            outputs = f(*leaves, target)
            gradients = torch.autograd.grad(outputs, leaves, [torch.ones(()) for _ in outputs])
            results.append({str(i): t for i, t in enumerate((*outputs, *gradients))})
        assert_same(results[1], results[0], f"compiled with {rows} rows")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck(reduction: str) -> None:
    logits, target = problem(5, 40, torch.float32)
    logits.requires_grad_()
    op, backward = weft.catalogue["cross_entropy"], weft.catalogue["cross_entropy_backward"]
    args = CrossEntropyArgs(
        logits,
        target,
        torch.rand(40),
        Softmax(0, 40, -100, 20.0, 0.8),
        LossOptions(0.1, 1e-3, reduction, True),
        Wanted(entropy=True, spread=True, accuracy=True),
        inplace=False,
    )
    torch.library.opcheck(op.overload, op.arguments.flatten(args))
    with torch.no_grad():
        o = op(args)
    args = CrossEntropyBackwardArgs(
        logits.detach(),
        target,
        args.weight,
        o.largest,
        o.total,
        o.inverse,
        o.smooth,
        o.entropy,
        dloss=torch.randn(o.loss.shape),
        dlse=o.lse,
        dentropy=o.entropy,
        dspread=None,
        softmax=args.softmax,
        label_smoothing=0.1,
        z_loss=1e-3,
    )
    torch.library.opcheck(backward.overload, backward.arguments.flatten(args))


def test_checkpoint_autocast_and_no_grad() -> None:
    from torch.utils.checkpoint import checkpoint

    logits, target = problem(5, 300)
    wanted = run(logits, target)
    leaf = logits.clone().requires_grad_()
    loss = checkpoint(weft.cross_entropy, leaf, target, use_reentrant=False)
    loss.backward(upstream_of({"loss": loss})["loss"])
    assert_same({"loss": loss, "dlogits": leaf.grad}, wanted, "checkpoint")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(run(logits, target), wanted, "autocast")
    with torch.no_grad():
        plain = weft.cross_entropy(leaf, target)
    assert not plain.requires_grad
    assert torch.equal(plain, wanted["loss"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logits": torch.randn(4, 0)}, "at least one column"),
        ({"logits": torch.ones(4, 9, dtype=torch.int64)}, "bfloat16, float16"),
        ({"target": torch.zeros(5, dtype=torch.int64)}, "one class per row"),
        ({"target": torch.zeros(4)}, "int32 or int64"),
        ({"class_weight": torch.ones(8)}, "class_weight must"),
        ({"reduction": "max"}, "reduction must be"),
        ({"all_ignored": "one"}, "all_ignored"),
        ({"label_smoothing": 1.5}, "from 0 to 1"),
        ({"softcap": 0.0}, "above 0"),
        ({"temperature": -1.0}, "above 0"),
        ({"ignore_index": 2**31}, "32 bits"),
    ],
)
def test_invalid_arguments_raise(changed: dict[str, Any], message: str) -> None:
    call = {"logits": torch.randn(4, 9), "target": torch.zeros(4, dtype=torch.int64), **changed}
    with pytest.raises(ValueError, match=message):
        weft.cross_entropy(**call)

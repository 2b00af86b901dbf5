"""Resolution of gradient lists: iterables, parameters, quantized tensors, and ranks with groups or DTensors."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_loom.testing import EPS32, Results, results_of

import weft
from tests.ops.multi_tensor import ranks_gradients
from tests.ops.multi_tensor.test import WHAT, draw
from tests.support.covering import covering
from weft.lab.families.multi_tensor import STATISTICS, clipped, statistic
from weft.lab.problem import run_op
from weft.lab.truth import Near, near
from weft.quant import Codes

# ---- lists and parameters ------------------------------------------------------------------------------


def iterables(tensors: list[Tensor]) -> dict[str, Callable[[], Any]]:
    """Return factories of iterables over the same tensors; some iterables can be read only once."""
    return {
        "list": lambda: list(tensors),
        "tuple": lambda: tuple(tensors),
        "generator": lambda: (t for t in tensors),
        "iterator": lambda: iter(tensors),
        "map": lambda: map(Tensor.detach, tensors),
        "values of a dict": lambda: dict(enumerate(tensors)).values(),
        "with None": lambda: (t for t in [None, *tensors, None]),
        "shards": lambda: weft.Shards(t for t in tensors),
        "several shards": lambda: (weft.Shards(iter([t])) for t in tensors),
    }


@pytest.mark.parametrize("kind", iterables([]))
def test_any_iterable(kind: str) -> None:
    for tensors in ([draw(30), draw(7, 5, dtype=torch.bfloat16)], [draw(30), draw(7).double()]):
        make = iterables(tensors)[kind]
        for what in WHAT:
            wanted = statistic(tensors, what)
            got = STATISTICS[what](make())
            near(got, wanted) if isinstance(wanted, Near) else torch.testing.assert_close(got, wanted)
        before = copy.deepcopy(tensors)
        norm = weft.clip_grads_(make(), 0.5)
        for t, was in zip(tensors, before, strict=True):
            near(t, clipped(was, norm, 0.5))
    assert weft.any_nonfinite(iterables([draw(3), torch.tensor([torch.nan])])[kind]())


def test_one_tensor_alone() -> None:
    x = torch.tensor([3.0, 4.0, 0.0])
    assert weft.grad_norm(x) == 5.0
    assert weft.count_zeros(x) == 1
    assert not weft.any_nonfinite(x)
    assert weft.clip_grads_(x, 1.0) == 5.0
    assert weft.grad_norm(x) <= 1.0
    assert weft.grad_norm(torch.tensor(2.0)) == 2.0


def test_a_generator_that_was_read_before_warns() -> None:
    gradients = (t for t in [torch.ones(4)])
    assert weft.grad_norm(gradients) == 2.0
    for function in (
        weft.grad_norm,
        weft.count_zeros,
        weft.any_nonfinite,
        lambda g: weft.clip_grads_(g, 1.0),
    ):
        with pytest.warns(UserWarning, match="the generator of tensors is empty") as caught:
            assert function(gradients) == 0
        assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weft.grad_norm([])


def parameters() -> tuple[list[Tensor], list[Tensor]]:
    """Return (tensors, gradients): parameters, leaves, tensors without a gradient, a master weight that has a gradient
    without requiring one, a result that retains its gradient; and those gradients."""
    leaf, master, without_gradient = draw(7).requires_grad_(), draw(5), draw(4).requires_grad_()
    trained, frozen = torch.nn.Parameter(draw(9)), torch.nn.Parameter(draw(3), requires_grad=False)
    half = torch.nn.Parameter(draw(6, dtype=torch.bfloat16))
    without_gradient.data[0] = torch.inf
    result = draw(8).requires_grad_() * 1.0
    result.retain_grad()
    with_gradient = [trained, leaf, master, half, result]
    for t in with_gradient:
        if t is not result:
            t.grad = draw(*t.shape, dtype=t.dtype)
    result.backward(draw(8))
    return [*with_gradient, frozen, without_gradient], [t.grad for t in with_gradient if t.grad is not None]


@pytest.mark.parametrize("what", WHAT)
def test_parameters_contribute_their_gradients(what: str) -> None:
    tensors, gradients = parameters()
    wanted = statistic(gradients, what)
    got = STATISTICS[what](iter(tensors))
    assert not got.requires_grad
    near(got, wanted) if isinstance(wanted, Near) else torch.testing.assert_close(got, wanted)
    for t, gradient in zip(tensors, gradients, strict=False):
        alone = STATISTICS[what](t)
        assert torch.equal(alone, STATISTICS[what]([gradient]))
    assert STATISTICS[what](tensors[-2:]) == 0, "tensors without a gradient must not count"


def test_clip_never_writes_to_parameters() -> None:
    """Gradients are scaled as torch scales them, and weights do not change."""
    tensors, gradients = parameters()
    weights = [t.detach().clone() for t in tensors]
    before = [g.clone() for g in gradients]
    norm = weft.clip_grads_(tensors, 0.5)
    near(norm, statistic(before, "norm2"))  # type: ignore[arg-type]
    for t, was in zip(gradients, before, strict=True):
        near(t, clipped(was, norm, 0.5))
    for t, weight in zip(tensors, weights, strict=True):
        assert torch.equal(t, weight)
    weft.clip_grads_(tensors, 0.1, norm=torch.tensor(1.0))
    assert all(map(torch.equal, tensors, weights))


def test_a_view_of_a_parameter_is_not_clipped() -> None:
    weight = torch.nn.Parameter(draw(6, 4))
    before, other = weight.detach().clone(), torch.full((3,), 5.0)
    for view in (weight.view(-1), weight[2:], weight.t()):
        with pytest.raises(ValueError, match=r"a view of a leaf that requires a gradient"):
            weft.clip_grads_([other, view], 0.1)
        near(weft.grad_norm([view]), statistic([view], "norm2"))  # type: ignore[arg-type]
    assert torch.equal(weight, before)
    assert torch.equal(other, torch.full((3,), 5.0))
    weight.grad = draw(6, 4)
    weft.clip_grads_([weight.grad.view(-1)], 0.1)
    assert weft.grad_norm(weight) <= 0.1


def test_differentiable_gradients() -> None:
    """Gradients made with `create_graph=True` require a gradient, are not leaves, and contribute themselves."""
    weight = torch.nn.Parameter(draw(9))
    (gradient,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
    assert gradient.requires_grad
    near(weft.grad_norm([gradient]), statistic([gradient], "norm2"))  # type: ignore[arg-type]
    before = gradient.detach().clone()
    norm = weft.clip_grads_([gradient], 0.5)
    assert not norm.requires_grad
    near(gradient.detach(), clipped(before, norm, 0.5))


# ---- quantized gradients -------------------------------------------------------------------------------

BLOCKS = ("tensor", "row", "1x128", "128x128")


def quantized(spec: str, **options: Any) -> weft.QTensor:
    x = draw(60, 200)  # non-dense scales, and partial blocks
    x[:, :3] *= 1e3
    q: weft.QTensor = weft.quantize(x.bfloat16(), spec, **options)
    return q


def copies_of(q: weft.QTensor) -> list[Tensor]:
    """Return the values of each copy before they are rounded to the tensor's dtype."""
    values = []
    for side in ("rowwise", "columnwise"):
        copy = getattr(q, side)
        if copy is not None:
            alone = weft.QTensor(
                q.shape, q.dtype, q.format, **{"rowwise": None, "columnwise": None, side: copy}
            )
            values.append(alone.dequantize(torch.float64))
    return values


@pytest.mark.parametrize(
    "spec", ["1x128", "e5m2:128x128:te", "row", "int8:tensor:vllm", "mx", "e2m1:mx:te", "nvfp4"]
)
def test_statistics_of_quantized_gradients(spec: str) -> None:
    for columnwise in (False, True):
        q = quantized(spec, columnwise=columnwise)
        parameter = torch.nn.Parameter(torch.empty(60, 200, dtype=torch.bfloat16))
        parameter.grad = q
        for what in WHAT:
            wanted = statistic([q.dequantize(), torch.ones(3)], what)
            got = STATISTICS[what]([parameter, torch.ones(3)])
            near(got, wanted) if isinstance(wanted, Near) else torch.testing.assert_close(got, wanted)
    bad = draw(4, 128)
    bad[1, 7] = torch.nan
    assert weft.any_nonfinite([weft.quantize(bad, "row")])


@pytest.mark.parametrize(
    ("element", "block", "power_of_two"),
    [*covering(("e4m3", "int8"), BLOCKS, (False, True), together=1), ("e2m1", "nvfp4", False)],
)
def test_clip_scales_the_scales(element: Any, block: Any, power_of_two: bool) -> None:
    """Clipping keeps the codes, and multiplies each scale with one rounding, or none for a power of two."""
    spec = weft.Format(block, element, "te", power_of_two).spec
    for sides in ({}, {"columnwise": True}, {"rowwise": False, "columnwise": True}):
        q = quantized(spec, **sides)
        before, was = copies_of(q), copy.deepcopy(q)
        other = draw(5)
        norm = weft.clip_grads_([q, other], 2.0)
        near(norm, statistic([was.dequantize(), other / (2.0 / (norm + 1e-6))], "norm2"))  # type: ignore[arg-type]
        coefficient = torch.tensor(2.0) / (norm + 1e-6)
        for side in ("rowwise", "columnwise"):
            new, old = getattr(q, side), getattr(was, side)
            if new is not None:
                assert torch.equal(new.data.view(torch.uint8), old.data.view(torch.uint8))
                if old.global_scale is None:
                    assert torch.equal(new.scale, old.scale * coefficient)
                else:
                    assert torch.equal(new.scale.view(torch.uint8), old.scale.view(torch.uint8))
                    assert torch.equal(new.global_scale, old.global_scale * coefficient)
        for got, wanted in zip(copies_of(q), before, strict=True):
            # Roundings of code times scale (two scales in nvfp4), of the scale, and of the coefficient.
            torch.testing.assert_close(got, wanted * coefficient.double(), rtol=3 * EPS32, atol=0)
        assert q.format == dataclasses.replace(was.format, power_of_two=False)
        assert q.spec == was.spec.replace(":pow2", "")
        assert weft.grad_norm([q, other]) <= 2.0 + 2.0**-7, "rounded to bf16"


def test_clip_by_a_power_of_two() -> None:
    """A power-of-two coefficient rounds nothing, and a coefficient of 1 changes nothing."""
    for norm, factor in ((2.0 - 1e-6, 0.5), (0.5, 1.0)):
        for spec in ("1x128", "row", "nvfp4"):
            q = quantized(spec)
            before = q.dequantize()
            weft.clip_grads_([q], 1.0, norm=torch.tensor(norm))
            assert torch.equal(q.dequantize(), before * factor)


def test_clip_raises_for_mx_gradients() -> None:
    """The error comes before anything is written."""
    x, plain = torch.full((3,), 5.0), torch.full((3,), 5.0).double()
    for spec in ("mx", "e2m1:mx:torchao"):
        q = quantized(spec)
        before = q.dequantize()
        with pytest.raises(ValueError, match=r"is a QTensor in .*:mx:.* Clip its dequantize\(\)"):
            weft.clip_grads_([x, plain, q, quantized("row")], 0.1)
        assert torch.equal(q.dequantize(), before)
        assert (x == 5.0).all()
        assert (plain == 5.0).all()
        weft.clip_grads_([q.dequantize()], 0.1)


def test_clip_of_a_layers_quantized_gradients() -> None:
    """A gradient of `quantize_grad` is clipped, and an optimizer that dequantizes it takes a step."""
    for spec in ("1x128", "e4m3:row:te", "nvfp4"):
        weight = torch.nn.Parameter(draw(32, 512))
        before = weight.detach().clone()
        weft.glu(weight, quantize_grad=spec).sum().backward()
        gradient = weight.grad
        assert isinstance(gradient, weft.QTensor)
        values = gradient.dequantize()
        version = gradient._version
        norm = weft.clip_grads_([weight], 0.5)
        assert weight.grad is gradient
        assert gradient._version > version
        near(norm, statistic([values], "norm2"))  # type: ignore[arg-type]
        assert weft.grad_norm([weight]) <= 0.5 * (1 + EPS32)
        torch.optim.SGD([weight], lr=1.0, foreach=False).step()
        torch.testing.assert_close(before - weight, values * (0.5 / (norm + 1e-6)), rtol=1e-5, atol=1e-6)


def test_a_scale_shared_by_both_copies_is_scaled_once() -> None:
    scale = torch.full((1, 1), 0.5)
    codes, codes_t = (torch.ones(shape).to(torch.float8_e4m3fn) for shape in ((4, 6), (6, 4)))
    rowwise, columnwise = Codes(codes, scale), Codes(codes_t, scale.view(1, 1))
    q = weft.QTensor((4, 6), torch.float32, weft.Format("tensor"), rowwise, columnwise)
    weft.clip_grads_([q], 1.0, norm=torch.tensor(2.0 - 1e-6))
    assert scale == 0.25
    assert q.rowwise.format == q.columnwise.format == q.spec
    with pytest.raises(ValueError, match="share memory"):
        weft.clip_grads_([q, q.detach()], 0.1)
    assert scale == 0.25


def test_list_ops_on_quantized_tensors_raise() -> None:
    """An op that writes to a list would change a temporary copy."""
    q = quantized("row")
    before = q.dequantize()
    for call in (
        lambda: torch._foreach_mul_([torch.ones(3), q], 2.0),
        lambda: torch._foreach_add_([q], [torch.ones(60, 200)]),
        lambda: torch.mul(q, 2.0, out=q),
        lambda: run_op("multi_tensor_clip", tensors=[q], norm=torch.tensor(2.0), max_norm=1.0),
    ):
        with pytest.raises(RuntimeError, match="would change a QTensor in place"):
            call()
    assert torch.equal(q.dequantize(), before)
    plain = torch.ones(60, 200)
    torch._foreach_add_([plain], [q.float()])
    assert torch.equal(plain, q.dequantize(torch.float32) + 1)


# ---- the compiler --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parameters", "generator", "values", "quantized"])
def test_compiled_is_eager(kind: str) -> None:
    torch._dynamo.reset()
    layer = torch.nn.Linear(5, 4)
    layer(draw(3, 5)).square().sum().backward()
    gradients = [p.grad for p in layer.parameters()]
    q = quantized("row", columnwise=True)
    before = [copy.deepcopy(g) for g in (*gradients, q)]

    def clip() -> Tensor:
        if kind == "parameters":
            return weft.clip_grads_(layer.parameters(), 0.5)
        if kind == "generator":
            return weft.clip_grads_((p.grad for p in layer.parameters()), 0.5)
        if kind == "values":
            return weft.clip_grads_(dict(layer.named_parameters()).values(), 0.5)
        return weft.clip_grads_([layer.weight, q], 0.5)

    norm = torch.compile(clip, fullgraph=True, backend="aot_eager")()
    wanted = before[:2] if kind != "quantized" else [before[0], before[2]]
    assert torch.equal(norm, weft.clip_grads_(wanted, 0.5))
    got = gradients if kind != "quantized" else [gradients[0], q]
    assert torch.equal(weft.grad_norm(got), weft.grad_norm(wanted))
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(
            a.dequantize() if isinstance(a, weft.QTensor) else a,
            b.dequantize() if isinstance(b, weft.QTensor) else b,
        )


# ---- ranks ---------------------------------------------------------------------------------------------


def test_kinds_of_tensors_without_groups() -> None:
    dense, experts = [draw(30), draw(5, dtype=torch.bfloat16)], [draw(7)]
    kinds = [weft.Shards(dense), weft.Shards([]), weft.Shards(experts)]
    for what in WHAT:
        got, wanted = STATISTICS[what](kinds), statistic(dense + experts, what)
        near(got, wanted) if isinstance(wanted, Near) else torch.testing.assert_close(got, wanted)
    assert STATISTICS["norminf"]([weft.Shards([torch.tensor([torch.nan])]), weft.Shards(dense)]).isnan()


def of_worlds(*names: Callable[[int], Iterable[str]]) -> list[Any]:
    """Parametrize over two ranks, and four in slow runs; with `names`, also over the cases of each group size."""
    parameters_ = []
    for world, marks in ((2, ()), (4, pytest.mark.slow)):
        cases = [(world, name) for name in names[0](world)] if names else [(world,)]
        parameters_ += [pytest.param(*case, marks=marks) for case in cases]
    return parameters_


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of(Path(ranks_gradients.__file__), tmp_path_factory)


def compare(results: list[dict[str, Any]], tensors: list[Tensor]) -> None:
    """Assert that every rank has the full tensors' statistics, with the same bits."""
    for what in WHAT:
        wanted = statistic(tensors, what)
        for rank in results:
            got = rank[what]
            assert type(got) is Tensor
            assert got.shape == ()
            assert torch.equal(got, results[0][what]), "ranks differ"
            near(got, wanted) if isinstance(wanted, Near) else torch.testing.assert_close(got, wanted)
    for rank in results:
        assert torch.equal(rank["clip norm"], results[0]["norm2"])
        assert rank["norm after"] <= ranks_gradients.MAX_NORM * (1 + 2.0**-9), "some are bf16"


@pytest.mark.parametrize("world", of_worlds())
def test_shards_over_groups(world: int, ranks: Results) -> None:
    """The norm over ranks equals the gathered model's, with experts, tensor parallelism and replicated parameters,
    which Megatron has undercounted."""
    results = [rank["groups"] for rank in ranks(world)]
    tensors, _ = ranks_gradients.kinds_of_tensors(0, world)
    compare(results, tensors)
    for rank in results:
        for t, before in zip(rank["clipped"], rank["before"], strict=True):
            near(t, clipped(before, rank["clip norm"], ranks_gradients.MAX_NORM))
        assert all(norm.isnan() for norm in rank["of NaN"])
        assert rank["any NaN"]
        assert rank["zeros of a rank's number"] == sum(range(world))
        near(rank["huge"], Near(torch.tensor(float(world)).double().sqrt() * 2.0**100, torch.tensor(2.0**78)))
        assert rank["error"].startswith("the norm of the gradients is nan")


@pytest.mark.parametrize(("world", "name"), of_worlds(ranks_gradients.placements_of))
def test_distributed_tensors(world: int, name: str, ranks: Results) -> None:
    """Groups follow from placements: replicas count once (NeMo-RL and VeOmni counted each), Partial terms are summed
    first (PyTorch returned norms that were too large by the square root of n), and shards may be empty."""
    results = [rank[name] for rank in ranks(world)]
    placed = ranks_gradients.placements_of(world)[name]
    tensors = ranks_gradients.full_tensors(placed)
    compare(results, tensors)
    for rank in results:
        assert rank["parameter"].count_nonzero() == 0, "a parameter was written to"
        for t, before, (_, placements) in zip(rank["clipped"], tensors, [*placed, ((), ())], strict=True):
            wanted = clipped(before, rank["clip norm"], ranks_gradients.MAX_NORM)
            # Each term is rounded, and terms are three times as large as the sum.
            noise = wanted.noise + ("p" in placements) * 4 * EPS32 * wanted.truth.abs()
            near(t, Near(wanted.truth, noise))


def test_compiled_over_ranks(ranks: Results) -> None:
    for results in ranks(2):
        got, wanted = results["compiled"], results["of every kind"]
        assert type(got["clip norm"]) is Tensor
        assert torch.equal(got["clip norm"], wanted["clip norm"])
        assert all(map(torch.equal, got["clipped"], wanted["clipped"]))


@pytest.mark.parametrize(("world", "name"), of_worlds(ranks_gradients.models_of))
def test_training_over_ranks(world: int, name: str, ranks: Results) -> None:
    """Norms and parameters of a few steps match one float64 process clipped by torch: with FSDP2, tensor parallelism or
    both, uneven and empty shards, and Partial gradients."""
    wanted = ranks_gradients.train(
        ranks_gradients.block().double(), torch.nn.utils.clip_grad_norm_, torch.float64
    )
    assert (wanted["norms"] > 5 * ranks_gradients.MAX_NORM).all(), "nothing is clipped"
    results = ranks(world)
    for rank in results:
        result = rank[name]
        assert torch.equal(result["norms"], results[0][name]["norms"]), "ranks differ"
        # A gradient accumulates about a hundred roundings, and a step changes a parameter by a tenth.
        near(result["norms"], Near(wanted["norms"], 100 * EPS32 * wanted["norms"]))
        for parameter, truth in wanted["parameters"].items():
            near(
                result["parameters"][parameter], Near(truth, 30 * EPS32 * truth.abs().amax().expand_as(truth))
            )
        by_torch = rank.get(f"{name}, by torch")
        if name in ranks_gradients.BY_TORCH:
            torch.testing.assert_close(result["norms"], by_torch["norms"], rtol=1e-6, atol=0)
            assert result["placements"] == by_torch["placements"]
    if name == "tensor parallel":
        assert results[0][name]["placements"]["norm.weight"] == "(Partial(sum),)"
    if name == "both":
        assert "_StridedShard" in results[0][name]["placements"]["up.weight"]


@pytest.mark.parametrize("world", of_worlds())
def test_stages_with_separate_meshes(world: int, ranks: Results) -> None:
    for rank, results in enumerate(ranks(world)):
        norms = results["stages"]
        assert norms["norm"] == 5.0
        assert norms["with the group of the mesh"] == torch.tensor(21.0 + 4.0 * (world // 2)).sqrt()
        assert norms["with others"] == 13.0
        assert norms["anew"] == (4.0 if rank >= world // 2 else torch.tensor(3.0).sqrt())
        assert norms["anew, of all ranks"] == torch.tensor(16.0 + 4.0 * world).sqrt()


@pytest.mark.parametrize("world", of_worlds())
def test_quantized_shards_and_a_distributed_norm(world: int, ranks: Results) -> None:
    for results in ranks(world):
        result = results["quantized"]
        near(result["norm"], statistic([result["numbers"]], "norm2"))  # type: ignore[arg-type]
        assert result["spec"] == "e4m3:1x128:te"
        assert abs(result["after"] - ranks_gradients.MAX_NORM) < 1e-5
        assert result["plain norm"]
        norm = torch.tensor(9.0 * 2 * world).double().sqrt()
        truth = (3.0 / (norm + 1e-6)).expand(2 * world)
        assert ((result["clipped"] - truth).abs() <= 4 * EPS32).all()


@pytest.mark.parametrize("world", of_worlds())
def test_unsupported_placements_raise(world: int, ranks: Results) -> None:
    for results in ranks(world):
        messages = results["refused"]
        assert "redistribute it to Replicate()" in messages[0]
        assert len(messages) == (2 if world == 4 else 1)
        assert all("would be added up twice" in message for message in messages[1:])

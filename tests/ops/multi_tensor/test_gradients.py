"""What a list of gradients stands for: iterables, parameters, quantised tensors, and ranks with groups or DTensors."""

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

# ---- what stands for what ------------------------------------------------------------------------------


def iterables(tensors: list[Tensor]) -> dict[str, Callable[[], Any]]:
    """Ways to give the same tensors, each of them new, as some can be read once."""
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
    """What stands for a gradient, and these: parameters, leaves, what has no gradient, a copy of a weight that requires
    none but has one, a result whose gradient is retained."""
    leaf, master, bare = draw(7).requires_grad_(), draw(5), draw(4).requires_grad_()
    trained, frozen = torch.nn.Parameter(draw(9)), torch.nn.Parameter(draw(3), requires_grad=False)
    half = torch.nn.Parameter(draw(6, dtype=torch.bfloat16))
    bare.data[0] = torch.inf
    result = draw(8).requires_grad_() * 1.0
    result.retain_grad()
    stands = [trained, leaf, master, half, result]
    for t in stands:
        if t is not result:
            t.grad = draw(*t.shape, dtype=t.dtype)
    result.backward(draw(8))
    return [*stands, frozen, bare], [t.grad for t in stands if t.grad is not None]


@pytest.mark.parametrize("what", WHAT)
def test_parameters_stand_for_their_gradients(what: str) -> None:
    given, gradients = parameters()
    wanted = statistic(gradients, what)
    got = STATISTICS[what](iter(given))
    assert not got.requires_grad
    near(got, wanted) if isinstance(wanted, Near) else torch.testing.assert_close(got, wanted)
    for t, gradient in zip(given, gradients, strict=False):
        alone = STATISTICS[what](t)
        assert torch.equal(alone, STATISTICS[what]([gradient]))
    assert STATISTICS[what](given[-2:]) == 0, "without a gradient there is nothing"


def test_clip_never_writes_to_parameters() -> None:
    """Gradients are scaled as torch does it, and weights stay as they are."""
    given, gradients = parameters()
    weights = [t.detach().clone() for t in given]
    before = [g.clone() for g in gradients]
    norm = weft.clip_grads_(given, 0.5)
    near(norm, statistic(before, "norm2"))  # type: ignore[arg-type]
    for t, was in zip(gradients, before, strict=True):
        near(t, clipped(was, norm, 0.5))
    for t, weight in zip(given, weights, strict=True):
        assert torch.equal(t, weight)
    weft.clip_grads_(given, 0.1, norm=torch.tensor(1.0))
    assert all(map(torch.equal, given, weights))


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


def test_gradients_that_can_be_differentiated() -> None:
    """Of `create_graph=True`: they require a gradient, are no leaves, and stand for themselves."""
    weight = torch.nn.Parameter(draw(9))
    (gradient,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
    assert gradient.requires_grad
    near(weft.grad_norm([gradient]), statistic([gradient], "norm2"))  # type: ignore[arg-type]
    before = gradient.detach().clone()
    norm = weft.clip_grads_([gradient], 0.5)
    assert not norm.requires_grad
    near(gradient.detach(), clipped(before, norm, 0.5))


# ---- quantised gradients -------------------------------------------------------------------------------

BLOCKS = ("tensor", "row", "1x128", "128x128")


def quantised(spec: str, **options: Any) -> weft.QTensor:
    x = draw(60, 200)  # scales in layouts with gaps, and blocks that are not full
    x[:, :3] *= 1e3
    q: weft.QTensor = weft.quantize(x.bfloat16(), spec, **options)
    return q


def copies_of(q: weft.QTensor) -> list[Tensor]:
    """The numbers of each copy, as they are before they are rounded to the tensor's dtype."""
    found = []
    for side in ("rowwise", "columnwise"):
        copy = getattr(q, side)
        if copy is not None:
            alone = weft.QTensor(
                q.shape, q.dtype, q.format, **{"rowwise": None, "columnwise": None, side: copy}
            )
            found.append(alone.dequantize(torch.float64))
    return found


@pytest.mark.parametrize(
    "spec", ["1x128", "e5m2:128x128:te", "row", "int8:tensor:vllm", "mx", "e2m1:mx:te", "nvfp4"]
)
def test_statistics_of_quantised_gradients(spec: str) -> None:
    for columnwise in (False, True):
        q = quantised(spec, columnwise=columnwise)
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
    """Codes stay, and each scale is multiplied and rounded once: not at all where it was a power of two."""
    spec = weft.Format(block, element, "te", power_of_two).spec
    for sides in ({}, {"columnwise": True}, {"rowwise": False, "columnwise": True}):
        q = quantised(spec, **sides)
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
            # Of a code times a scale, and in nvfp4 of two scales; the scale itself and the coefficient.
            torch.testing.assert_close(got, wanted * coefficient.double(), rtol=3 * EPS32, atol=0)
        assert q.format == dataclasses.replace(was.format, power_of_two=False)
        assert q.spec == was.spec.replace(":pow2", "")
        assert weft.grad_norm([q, other]) <= 2.0 + 2.0**-7, "rounded to bf16"


def test_clip_of_one_power_of_two() -> None:
    """Nothing is rounded where the coefficient is a power of two, and nothing changes where it is 1."""
    for norm, factor in ((2.0 - 1e-6, 0.5), (0.5, 1.0)):
        for spec in ("1x128", "row", "nvfp4"):
            q = quantised(spec)
            before = q.dequantize()
            weft.clip_grads_([q], 1.0, norm=torch.tensor(norm))
            assert torch.equal(q.dequantize(), before * factor)


def test_clip_refuses_what_has_no_multiples() -> None:
    """Before anything is written."""
    x, plain = torch.full((3,), 5.0), torch.full((3,), 5.0).double()
    for spec in ("mx", "e2m1:mx:torchao"):
        q = quantised(spec)
        before = q.dequantize()
        with pytest.raises(ValueError, match=r"is a QTensor in .*:mx:.* Clip its dequantize\(\)"):
            weft.clip_grads_([x, plain, q, quantised("row")], 0.1)
        assert torch.equal(q.dequantize(), before)
        assert (x == 5.0).all()
        assert (plain == 5.0).all()
        weft.clip_grads_([q.dequantize()], 0.1)


def test_clip_of_quantised_gradients_of_a_layer() -> None:
    """What `quantize_grad` leaves in .grad, by a step of an optimizer that dequantises it."""
    for spec in ("1x128", "e4m3:row:te", "nvfp4"):
        weight = torch.nn.Parameter(draw(32, 512))
        before = weight.detach().clone()
        weft.glu(weight, quantize_grad=spec).sum().backward()
        gradient = weight.grad
        assert isinstance(gradient, weft.QTensor)
        numbers = gradient.dequantize()
        version = gradient._version
        norm = weft.clip_grads_([weight], 0.5)
        assert weight.grad is gradient
        assert gradient._version > version
        near(norm, statistic([numbers], "norm2"))  # type: ignore[arg-type]
        assert weft.grad_norm([weight]) <= 0.5 * (1 + EPS32)
        torch.optim.SGD([weight], lr=1.0, foreach=False).step()
        torch.testing.assert_close(before - weight, numbers * (0.5 / (norm + 1e-6)), rtol=1e-5, atol=1e-6)


def test_a_scale_that_both_copies_have_is_scaled_once() -> None:
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


def test_lists_with_quantised_tensors_are_not_written_to() -> None:
    """An op that writes to a list would change a copy that is thrown away."""
    q = quantised("row")
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


@pytest.mark.parametrize("kind", ["parameters", "generator", "values", "quantised"])
def test_compiled_is_eager(kind: str) -> None:
    torch._dynamo.reset()
    layer = torch.nn.Linear(5, 4)
    layer(draw(3, 5)).square().sum().backward()
    gradients = [p.grad for p in layer.parameters()]
    q = quantised("row", columnwise=True)
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
    wanted = before[:2] if kind != "quantised" else [before[0], before[2]]
    assert torch.equal(norm, weft.clip_grads_(wanted, 0.5))
    got = gradients if kind != "quantised" else [gradients[0], q]
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
    """Two ranks with every change, four for the night; with `names`, each of those that a group of that size has."""
    found = []
    for world, marks in ((2, ()), (4, pytest.mark.slow)):
        cases = [(world, name) for name in names[0](world)] if names else [(world,)]
        found += [pytest.param(*case, marks=marks) for case in cases]
    return found


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of(Path(ranks_gradients.__file__), tmp_path_factory)


def compare(found: list[dict[str, Any]], whole: list[Tensor]) -> None:
    """Statistics of ranks are those of the whole tensors, and the same bits on every rank."""
    for what in WHAT:
        wanted = statistic(whole, what)
        for rank in found:
            got = rank[what]
            assert type(got) is Tensor
            assert got.shape == ()
            assert torch.equal(got, found[0][what]), "ranks agree to the bit"
            near(got, wanted) if isinstance(wanted, Near) else torch.testing.assert_close(got, wanted)
    for rank in found:
        assert torch.equal(rank["clip norm"], found[0]["norm2"])
        assert rank["norm after"] <= ranks_gradients.MAX_NORM * (1 + 2.0**-9), "some are bf16"


@pytest.mark.parametrize("world", of_worlds())
def test_shards_over_groups(world: int, ranks: Results) -> None:
    """The norm over ranks is that of the gathered model with experts, tensor parallelism and parameters that all have,
    which Megatron has undercounted."""
    found = [rank["groups"] for rank in ranks(world)]
    whole, _ = ranks_gradients.kinds_of_tensors(0, world)
    compare(found, whole)
    for rank in found:
        for t, before in zip(rank["clipped"], rank["before"], strict=True):
            near(t, clipped(before, rank["clip norm"], ranks_gradients.MAX_NORM))
        assert all(norm.isnan() for norm in rank["of NaN"])
        assert rank["any NaN"]
        assert rank["zeros of a rank's number"] == sum(range(world))
        near(rank["huge"], Near(torch.tensor(float(world)).double().sqrt() * 2.0**100, torch.tensor(2.0**78)))
        assert rank["error"].startswith("the norm of the gradients is nan")


@pytest.mark.parametrize(("world", "name"), of_worlds(ranks_gradients.placements_of))
def test_distributed_tensors(world: int, name: str, ranks: Results) -> None:
    """Groups are read from placements: replicas count once (NeMo-RL and VeOmni have counted each), terms of a sum are
    no numbers of their own (PyTorch has given a norm of the square root of n times too much), shards may be empty."""
    found = [rank[name] for rank in ranks(world)]
    placed = ranks_gradients.placements_of(world)[name]
    whole = ranks_gradients.whole(placed)
    compare(found, whole)
    for rank in found:
        assert rank["parameter"].count_nonzero() == 0, "a parameter is not written to"
        for t, before, (_, how) in zip(rank["clipped"], whole, [*placed, ((), ())], strict=True):
            wanted = clipped(before, rank["clip norm"], ranks_gradients.MAX_NORM)
            # Terms of three times the sum's size are rounded each.
            noise = wanted.noise + ("p" in how) * 4 * EPS32 * wanted.truth.abs()
            near(t, Near(wanted.truth, noise))


def test_compiled_over_ranks(ranks: Results) -> None:
    for results in ranks(2):
        got, wanted = results["compiled"], results["of every kind"]
        assert type(got["clip norm"]) is Tensor
        assert torch.equal(got["clip norm"], wanted["clip norm"])
        assert all(map(torch.equal, got["clipped"], wanted["clipped"]))


@pytest.mark.parametrize(("world", "name"), of_worlds(ranks_gradients.models_of))
def test_training_over_ranks(world: int, name: str, ranks: Results) -> None:
    """Norms and parameters of some steps are those of one process in float64, which torch clips: with FSDP2, tensor
    parallelism or both, uneven and empty shards, and gradients that are placed as Partial."""
    wanted = ranks_gradients.train(
        ranks_gradients.block().double(), torch.nn.utils.clip_grad_norm_, torch.float64
    )
    assert (wanted["norms"] > 5 * ranks_gradients.MAX_NORM).all(), "nothing is clipped"
    results = ranks(world)
    for rank in results:
        found = rank[name]
        assert torch.equal(found["norms"], results[0][name]["norms"]), "ranks agree to the bit"
        # A gradient has some hundred roundings behind it, and a step is a tenth of a parameter.
        near(found["norms"], Near(wanted["norms"], 100 * EPS32 * wanted["norms"]))
        for parameter, truth in wanted["parameters"].items():
            near(
                found["parameters"][parameter], Near(truth, 30 * EPS32 * truth.abs().amax().expand_as(truth))
            )
        by_torch = rank.get(f"{name}, by torch")
        if name in ranks_gradients.BY_TORCH:
            torch.testing.assert_close(found["norms"], by_torch["norms"], rtol=1e-6, atol=0)
            assert found["placements"] == by_torch["placements"]
    if name == "tensor parallel":
        assert results[0][name]["placements"]["norm.weight"] == "(Partial(sum),)"
    if name == "both":
        assert "_StridedShard" in results[0][name]["placements"]["up.weight"]


@pytest.mark.parametrize("world", of_worlds())
def test_stages_with_meshes_of_their_own(world: int, ranks: Results) -> None:
    for rank, results in enumerate(ranks(world)):
        found = results["stages"]
        assert found["norm"] == 5.0
        assert found["with the group of the mesh"] == torch.tensor(21.0 + 4.0 * (world // 2)).sqrt()
        assert found["with others"] == 13.0
        assert found["anew"] == (4.0 if rank >= world // 2 else torch.tensor(3.0).sqrt())
        assert found["anew, of all ranks"] == torch.tensor(16.0 + 4.0 * world).sqrt()


@pytest.mark.parametrize("world", of_worlds())
def test_quantised_pieces_and_a_distributed_norm(world: int, ranks: Results) -> None:
    for results in ranks(world):
        found = results["quantised"]
        near(found["norm"], statistic([found["numbers"]], "norm2"))  # type: ignore[arg-type]
        assert found["spec"] == "e4m3:1x128:te"
        assert abs(found["after"] - ranks_gradients.MAX_NORM) < 1e-5
        assert found["plain norm"]
        norm = torch.tensor(9.0 * 2 * world).double().sqrt()
        truth = (3.0 / (norm + 1e-6)).expand(2 * world)
        assert ((found["clipped"] - truth).abs() <= 4 * EPS32).all()


@pytest.mark.parametrize("world", of_worlds())
def test_placements_that_are_refused(world: int, ranks: Results) -> None:
    for results in ranks(world):
        messages = results["refused"]
        assert "redistribute it to Replicate()" in messages[0]
        assert len(messages) == (2 if world == 4 else 1)
        assert all("would be added up twice" in message for message in messages[1:])

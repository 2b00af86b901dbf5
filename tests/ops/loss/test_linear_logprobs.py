"""The loss head where workloads do not go: values, layouts, sizes, PyTorch's machinery, and what composes on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton_loom
from torch import Tensor

import weft
from tests.ops.loss.ranks_vocabulary import unread_labels
from weft.lab.calls import assert_same
from weft.lab.families import Call
from weft.lab.families.linear_logprobs import head_truth
from weft.lab.truth import arguments, near
from weft.ops.common.rows import scan_config
from weft.ops.loss.linear_logprobs import launch
from weft.ops.loss.linear_logprobs.arguments import LinearLogprobsArgs
from weft.ops.loss.statistics import Softmax, Wanted
from weft.runtime import Capabilities, choosing_for


def problem(
    rows: int = 70,
    cols: int = 40,
    vocab: int = 300,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    sure: float = 0.0,
) -> dict[str, Tensor]:
    """Hidden states, a head and targets. With `sure`, the targets' logits are about so much above the others."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, cols, generator=generator)
    weight = torch.randn(vocab, cols, generator=generator) / cols**0.5
    target = torch.randint(0, vocab, (rows,), generator=generator)
    hidden += sure * weight[target] / weight[target].square().sum(1, keepdim=True)
    return {"hidden": hidden.to(dtype), "weight": weight.to(dtype), "target": target}


def outputs_of(call: Call) -> dict[str, Tensor]:
    got = call()
    if isinstance(got, Tensor):
        return {"y": got}
    return {name: value for name, value in got._asdict().items() if value is not None}


def run(call: Call, seed: int = 1) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(results and gradients, the upstream gradients), each of its own random number."""
    call = call.requiring_grad()
    got = outputs_of(call)
    generator = torch.Generator().manual_seed(seed)
    upstream = {n: torch.randn(v.shape, generator=generator) for n, v in got.items() if v.requires_grad}
    names = [n for n in ("hidden", "weight", "bias") if call[n] is not None]
    gradients = torch.autograd.grad(
        [got[n] for n in upstream], [call[n] for n in names], [*upstream.values()]
    )
    return got | {f"d{n}": g for n, g in zip(names, gradients, strict=True)}, upstream


def check(call: Call) -> dict[str, Tensor]:
    """Results and gradients beside float64."""
    got, upstream = run(call)
    expected = head_truth(arguments(call), upstream)
    for name, value in got.items():
        wanted = expected[name]
        if isinstance(wanted, Tensor):
            assert torch.equal(value, wanted), name
        else:
            near(value, wanted)
    return got


# ---- right ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logprobs_entropy_and_lse(dtype: torch.dtype) -> None:
    """More tokens and columns than a tile has, and parts of tiles."""
    given = problem(150, 72, 333, dtype)
    bias = torch.randn(333).to(dtype)
    got = check(
        Call(
            weft.linear_logprobs,
            given | {"bias": bias, "return_entropy": True, "return_lse": True, "temperature": 0.7},
        )
    )
    assert (got["logprobs"] <= 0).all(), "a probability above 1"
    assert (got["entropy"] >= 0).all()


ALL = {f"return_{name}": True for name in ("lse", "entropy", "accuracy", "mean_logits", "log_sum_squares")}


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_all_results_of_scaled_logits(softcap: float | None) -> None:
    """A scale before the softcap and one after it, columns that pad the vocabulary, tokens without a target."""
    given = problem(150, 72, 333, sure=6.0)
    given["target"] %= 300
    given["target"][::7] = -100
    bias = torch.randn(333)
    bias[300:] = -torch.inf
    options = {"logit_scale": 1.75, "softcap": softcap, "temperature": 0.7}
    got = check(Call(weft.linear_logprobs, given | {"bias": bias} | options | ALL))
    assert 0 < got["accuracy"].sum() < 150
    assert not got["log_sum_squares"].requires_grad
    assert (got["log_sum_squares"] >= -got["entropy"] - 1e-4).all(), "Jensen's inequality"
    for name in ("mean_logits", "log_sum_squares"):
        assert not got[name][::7].count_nonzero()


def test_squares_of_tiny_and_sure_probabilities() -> None:
    """From one column that has it all to all columns alike."""
    weight = torch.eye(300, 64)
    hidden = torch.zeros(3, 64)
    hidden[0, 5], hidden[1, 5] = 200.0, 30.0
    target = torch.tensor([5, 6, 7])
    found = weft.linear_logprobs(hidden, weight, target, return_log_sum_squares=True, return_mean_logits=True)
    wanted = torch.log_softmax(hidden.double() @ weight.double().T, 1)
    torch.testing.assert_close(
        found.log_sum_squares, torch.logsumexp(2 * wanted, 1).float(), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(found.mean_logits, (hidden @ weight.T).mean(1), rtol=1e-5, atol=1e-4)


def test_a_logit_scale_is_a_scaled_head() -> None:
    """By a power of two, so that the bits are the same; `cross_entropy` takes it as well."""
    given = problem(20, 24, 140, torch.float32)
    scaled = given | {"weight": given["weight"] * 0.25}
    for softcap in (None, 3.0):
        options: dict[str, Any] = {"softcap": softcap, "temperature": 0.5}
        got, _ = run(Call(weft.linear_cross_entropy, given | options | {"logit_scale": 0.25}))
        wanted, _ = run(Call(weft.linear_cross_entropy, scaled | options))
        assert_same({"y": got["y"]}, {"y": wanted["y"]}, "the loss")
        torch.testing.assert_close(got["dhidden"], wanted["dhidden"], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(got["dweight"], wanted["dweight"] * 0.25, rtol=1e-5, atol=1e-7)
        logits = given["hidden"] @ given["weight"].T
        plain = weft.cross_entropy(logits, given["target"], logit_scale=0.25, **options)
        torch.testing.assert_close(plain, got["y"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)])
def test_operands_of_two_dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    given = problem()
    hidden, weight = given["hidden"].to(dtypes[0]), given["weight"].to(dtypes[1])
    check(Call(weft.linear_logprobs, given | {"hidden": hidden, "weight": weight, "return_lse": True}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_confident_targets(dtype: torch.dtype) -> None:
    """At p = 0.999 a gradient of p - 1 that is formed from a rounded p would be 0 (bugs D3, K9)."""
    given = problem(sure=16.0, dtype=dtype)
    got = check(Call(weft.linear_logprobs, given))
    p = got["y"].exp()
    assert ((p > 0.998) & (p < 0.99999)).float().mean() > 0.5
    assert (got["dhidden"].abs().amax(1) > 0).all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_smoothing_with_ignored_tokens(reduction: str) -> None:
    """Bugs B5, C8, E6, E7: what is ignored may be NaN, and is not divided by."""
    given = problem()
    given["target"][::3] = -100
    given["hidden"][::3] = torch.nan
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-3}
    got = check(Call(weft.linear_cross_entropy, given | options))
    assert not got["dhidden"][::3].count_nonzero()
    assert got["dhidden"][1].count_nonzero()


def test_class_weights_accuracy_and_everything() -> None:
    given = problem(90, 64, 260, sure=4.0)
    given["target"][5] = -100
    check(
        Call(
            weft.linear_cross_entropy,
            given
            | {
                "bias": torch.randn(260).bfloat16(), "class_weight": torch.rand(260), "label_smoothing": 0.2,
                "z_loss": 1e-2, "softcap": 8.0, "temperature": 0.75, "return_lse": True, "return_entropy": True,
                "return_accuracy": True,
            },
        )
    )  # fmt: skip


def test_equals_cross_entropy_of_pytorch() -> None:
    given = problem(dtype=torch.float32)
    given["target"][3] = -100
    for options in ({}, {"label_smoothing": 0.1}, {"reduction": "sum"}, {"reduction": "none"}):
        got = weft.linear_cross_entropy(**given, **options)
        logits = given["hidden"] @ given["weight"].t()
        torch.testing.assert_close(
            got, F.cross_entropy(logits, given["target"], **options), rtol=1e-5, atol=1e-6
        )


def test_accuracy_takes_the_first_of_equals() -> None:
    given = problem(4, 16, 140)
    given["weight"][:] = given["weight"][0]
    given["target"][:] = torch.tensor([0, 1, 130, -100])
    _, _, _, hit = weft.linear_cross_entropy(**given, reduction="none", return_accuracy=True)
    assert hit.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_targets_that_are_no_columns() -> None:
    """Bug B5: as on a GPU, NaN results, zero gradients, and nothing else is touched."""
    given = problem(6)
    given["target"][:4] = torch.tensor([-1, 300, 307, 2**40])
    call = Call(weft.linear_logprobs, given | {"return_lse": True}).requiring_grad()
    with unread_labels():
        got = call()
    assert got.logprobs[:4].isnan().all()
    assert got.lse[:4].isnan().all()
    dhidden, dweight = torch.autograd.grad(got.logprobs[4:].sum(), (call["hidden"], call["weight"]))
    assert not dhidden[:4].count_nonzero()
    few = {"hidden": given["hidden"][4:], "weight": given["weight"], "target": given["target"][4:]}
    alone = Call(weft.linear_logprobs, few).requiring_grad()
    wanted = torch.autograd.grad(alone().sum(), (alone["hidden"], alone["weight"]))
    assert_same({"h": dhidden[4:], "w": dweight}, {"h": wanted[0], "w": wanted[1]}, "without the others")


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_a_common_offset_changes_nothing(shift: float) -> None:
    """Bug F1: by a bias, exactly representable beside the logits."""
    given = problem(20, 32, 200, torch.float32)
    given["hidden"], given["weight"] = given["hidden"].round(), (given["weight"] * 8).round() / 8
    plain = weft.linear_logprobs(**given, return_entropy=True)
    moved = weft.linear_logprobs(**given, bias=torch.full((200,), shift), return_entropy=True)
    torch.testing.assert_close(moved.logprobs, plain.logprobs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(moved.entropy, plain.entropy, rtol=1e-5, atol=1e-5)


def test_padding_columns() -> None:
    """A bias of minus infinity takes a column out, of the smoothing too."""
    given = problem(20, 32, 200, torch.float32)
    given["target"] %= 150
    bias = torch.zeros(200)
    bias[150:] = -torch.inf
    short = given | {"weight": given["weight"][:150].contiguous()}
    options: dict[str, Any] = {"label_smoothing": 0.1, "return_entropy": True}
    check(Call(weft.linear_cross_entropy, given | {"bias": bias} | options))
    for a, b in zip(
        weft.linear_cross_entropy(**given, bias=bias, **options)[:3:2],
        weft.linear_cross_entropy(**short, **options)[:3:2],
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    weight = given["weight"].requires_grad_()
    weft.linear_cross_entropy(**given, bias=bias, **options).loss.backward()
    assert weight.grad is not None
    assert not weight.grad[150:].count_nonzero()
    assert weight.grad.isfinite().all()


def test_everything_ignored() -> None:
    """Bug E6."""
    given = problem(9)
    given["target"][:] = -100
    given["hidden"][:] = torch.nan
    for options, wanted in (({}, 0.0), ({"all_ignored": "nan"}, torch.nan), ({"reduction": "sum"}, 0.0)):
        call = Call(weft.linear_cross_entropy, given | options).requiring_grad()
        loss = call()
        torch.testing.assert_close(loss.detach(), torch.tensor(wanted), equal_nan=True)
        for gradient in torch.autograd.grad(loss, (call["hidden"], call["weight"])):
            assert not gradient.count_nonzero()


def test_small_gradients_in_fp16() -> None:
    """A mean over many tokens leaves gradients that fp16 can't hold as such."""
    given = problem(64, 48, 200, torch.float16)
    call = Call(weft.linear_cross_entropy, given | {"reduction": "sum"}).requiring_grad()
    leaves = (call["hidden"], call["weight"])
    whole = torch.autograd.grad(call(), leaves)
    tiny = torch.autograd.grad(call() * 2.0**-14, leaves)
    for a, b in zip(whole, tiny, strict=True):
        error = (a.double() * 2.0**-14 - b.double()).abs().amax()
        assert error <= 2.0**-24, "more than a rounding to fp16's smallest step"


# ---- layouts and sizes ---------------------------------------------------------------------------------


def test_strides() -> None:
    given = problem(24, 40, 130)
    wanted, _ = run(Call(weft.linear_logprobs, given | {"return_entropy": True}))
    spaced = torch.full((24, 56), torch.nan).bfloat16()
    spaced[:, :40] = given["hidden"]
    forms = {
        "rows with gaps": {"hidden": spaced[:, :40]},
        "turned hidden": {"hidden": given["hidden"].t().contiguous().t()},
        "turned weight": {"weight": given["weight"].t().contiguous().t()},
        "targets with gaps": {"target": torch.stack([given["target"]] * 2, 1)[:, 0]},
        "int32": {"target": given["target"].int()},
    }
    for name, form in forms.items():
        got, _ = run(Call(weft.linear_logprobs, given | form | {"return_entropy": True}))
        assert_same(got, wanted, name)


def test_more_dimensions_and_constant_gradients() -> None:
    """Bug E2: sum().backward() sends one number for all."""
    given = problem(24, 40, 130)
    call = Call(weft.linear_logprobs, given).requiring_grad()
    wanted = torch.autograd.grad(call(), (call["hidden"], call["weight"]), torch.ones(24))
    shaped = given | {"hidden": given["hidden"].view(2, 3, 4, 40), "target": given["target"].view(2, 3, 4)}
    call = Call(weft.linear_logprobs, shaped).requiring_grad()
    got = call()
    assert got.shape == (2, 3, 4)
    gradients = torch.autograd.grad(got.sum(), (call["hidden"], call["weight"]))
    assert_same(
        {"h": gradients[0].view(24, 40), "w": gradients[1]}, {"h": wanted[0], "w": wanted[1]}, "shaped"
    )


@pytest.mark.parametrize("rows", [0, 1, 2, 129])
def test_numbers_of_tokens(rows: int) -> None:
    given = problem(rows, 24, 50)
    if rows:
        check(Call(weft.linear_logprobs, given | {"return_entropy": True, "return_lse": True}))
        return
    got, _ = run(Call(weft.linear_logprobs, given))
    assert got["y"].shape == (0,)
    assert got["dhidden"].shape == (0, 24)
    assert not got["dweight"].count_nonzero()


@pytest.mark.parametrize(("cols", "vocab"), [(1, 1), (7, 129), (65, 1), (16, 128)])
def test_odd_sizes(cols: int, vocab: int) -> None:
    given = problem(5, cols, vocab)
    check(Call(weft.linear_logprobs, given | {"bias": torch.randn(vocab).bfloat16(), "return_lse": True}))


def test_many_blocks_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the workspace is, dweight and dbias have the same bits, and dhidden the same error."""
    given = problem(40, 48, 700) | {"bias": torch.randn(700).bfloat16()}
    wanted, _ = run(Call(weft.linear_logprobs, given))
    monkeypatch.setattr(launch, "CPU_BUDGET", 1)
    got = check(Call(weft.linear_logprobs, given))
    for name in ("y", "dweight", "dbias"):
        assert_same({name: got[name]}, {name: wanted[name]}, name)


def test_memory_does_not_grow_with_the_vocabulary() -> None:
    """What is allocated besides results: as much for four times the vocabulary."""
    taken = []
    for vocab in (4096, 16384):
        given = problem(16, 16, vocab)
        sizes: list[int] = []
        empty = torch.empty

        def counted(*args: Any, sizes: list[int] = sizes, empty: Any = empty, **kwargs: Any) -> Tensor:
            made: Tensor = empty(*args, **kwargs)
            sizes.append(made.numel() * made.element_size())
            return made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "CPU_BUDGET", 1 << 20)
            patch.setattr(torch, "empty", counted)
            run(Call(weft.linear_logprobs, given))
        sizes.remove(given["weight"].numel() * 2)  # dweight
        taken.append(max(sizes))
    assert taken[0] == taken[1]


def test_forward_moves_nothing_the_size_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, with the launches of an H100: operands, and some numbers of each token. Bytes are linear in the tokens
    and in the vocabulary: no term has their product."""
    monkeypatch.setattr(
        launch, "_span", lambda vocab, tiles, tile, target: (2, -(-vocab // tile // 2) * tile)
    )

    def moved(rows: int, vocab: int) -> int:
        given = problem(rows, 64, vocab)
        with choosing_for("sm_90"), triton_loom.count() as counted:
            weft.linear_logprobs(**given)
        bytes_ = sum(launch.loads.distinct + launch.stores.distinct for launch in counted.launches)
        operands = 2 * 64 * (rows + vocab)
        # targets and numbers, read by three kernels; statistics of two splits, written and read; results
        of_tokens = rows * (3 * 8 + 4 * 3 + 2 * 2 * 3 * 4 + 4 * 4) + 64
        assert operands <= bytes_ <= operands + of_tokens
        return bytes_

    few, more = (256, 1024), (512, 3072)
    total = {(rows, vocab): moved(rows, vocab) for rows in (256, 512) for vocab in (1024, 3072)}
    assert total[few] + total[more] == total[256, 3072] + total[512, 1024]


def test_skipped_tiles() -> None:
    """With a threshold above everything only tiles with a target are kept; with one below everything, all are."""
    given = problem(200, 32, 1024, sure=14.0)
    given["target"] = given["target"] % 128  # the first tile of columns
    given["hidden"] = problem(200, 32, 1024, sure=14.0)["hidden"]
    wanted, _ = run(Call(weft.linear_logprobs, given))
    same, _ = run(Call(weft.linear_logprobs, given | {"skip_below": 0.0}))
    assert_same(same, wanted, "a threshold of 0")
    got, _ = run(Call(weft.linear_logprobs, given | {"skip_below": 0.999999}))
    assert_same({"y": got["y"]}, {"y": wanted["y"]}, "forward")
    assert not got["dweight"][128:].count_nonzero()
    assert_same({"w": got["dweight"][:128]}, {"w": wanted["dweight"][:128]}, "tiles with targets")
    near_all, _ = run(Call(weft.linear_logprobs, given | {"skip_below": 1e-6}))
    torch.testing.assert_close(near_all["dhidden"], wanted["dhidden"], rtol=2e-2, atol=2e-3)


# ---- PyTorch -------------------------------------------------------------------------------------------


def test_same_bits_every_run_and_for_any_number_of_threads() -> None:
    given = problem(150, 40, 300)
    wanted, _ = run(Call(weft.linear_logprobs, given | {"return_entropy": True}))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert_same(
            run(Call(weft.linear_logprobs, given | {"return_entropy": True}))[0], wanted, f"{threads} threads"
        )


def test_many_tokens_are_added_up_in_fp32() -> None:
    """Bug F3: a weight's gradient of thousands of tokens is rounded once."""
    given = problem(5000, 16, 40)
    given["hidden"] = given["hidden"].abs()  # sums that grow
    check(Call(weft.linear_logprobs, given))


def test_gradient_accumulation_is_the_big_batch() -> None:
    """Bug D14: sums of parts, divided by the tokens of all."""
    given = problem(96, 40, 200, torch.float32)
    given["target"][::5] = -100
    count = (given["target"] != -100).sum()
    whole = Call(weft.linear_cross_entropy, given).requiring_grad()
    wanted = torch.autograd.grad(whole(), whole["weight"])[0]
    weight = given["weight"].clone().requires_grad_()
    for i in range(0, 96, 32):
        part = {"hidden": given["hidden"][i : i + 32], "target": given["target"][i : i + 32]}
        (weft.linear_cross_entropy(weight=weight, **part, reduction="sum") / count).backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("wanted", [("hidden",), ("weight",), ("bias",), ("hidden", "bias"), ()])
def test_gradients_of_a_subset(wanted: tuple[str, ...]) -> None:
    """Bug D9: frozen weights, frozen everything."""
    given = problem(20, 24, 140) | {"bias": torch.randn(140).bfloat16()}
    full, upstream = run(Call(weft.linear_logprobs, given))
    leaves = {name: given[name].clone().requires_grad_() for name in wanted}
    got = weft.linear_logprobs(**(given | leaves))
    assert got.requires_grad == bool(wanted)
    if wanted:
        gradients = torch.autograd.grad(got, [*leaves.values()], upstream["y"])
        for name, gradient in zip(wanted, gradients, strict=True):
            assert_same({name: gradient}, {name: full[f"d{name}"]}, f"only {wanted}")


def test_compiled_is_eager() -> None:
    given = problem(20, 24, 140)
    given["target"][3] = -100

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        out = weft.linear_cross_entropy(
            hidden, weight, target, label_smoothing=0.1, z_loss=1e-3, return_entropy=True
        )
        return out.loss + 0.1 * out.entropy.sum()

    torch._dynamo.reset()
    found = []
    for f in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)):
        leaves = [given[n].clone().requires_grad_() for n in ("hidden", "weight")]
        value = f(*leaves, given["target"])
        found.append({str(i): t for i, t in enumerate((value, *torch.autograd.grad(value, leaves)))})
    assert_same(found[1], found[0], "compiled")


def test_opcheck() -> None:
    given = problem(6, 16, 40)
    leaves = [given[n].requires_grad_() for n in ("hidden", "weight")]
    softmax, wanted = Softmax(0, 40, -100, None, 1.0), Wanted(True, False, False)
    args = LinearLogprobsArgs(*leaves, None, given["target"], None, None, softmax, wanted, None)
    op = weft.catalogue["linear_logprobs"]
    torch.library.opcheck(
        op.overload, op.arguments.flatten(args), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("target", ["sm_90", pytest.param("sm_80", marks=pytest.mark.slow)])
def test_the_launches_of_a_gpu(target: str) -> None:
    """Its tiles, its descriptors, under the sanitizer, beside float64."""
    given = problem(130, 64, 520)
    given["target"][::4] = -100
    with choosing_for(target), triton_loom.sanitize():
        check(Call(weft.linear_logprobs, given | {"return_entropy": True, "return_lse": True}))


def test_gradcheck_of_the_reference() -> None:
    given = problem(5, 6, 9, torch.float64)
    given["target"][2] = -100
    bias = torch.randn(9, dtype=torch.float64, requires_grad=True)

    def f(hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
        out = weft.linear_cross_entropy(
            hidden, weight, given["target"], bias=bias, label_smoothing=0.2, softcap=3.0, temperature=1.4, z_loss=0.1,
            class_weight=torch.linspace(0.5, 1.5, 9).double(), return_entropy=True, return_lse=True,
        )  # fmt: skip
        return out.loss, out.lse, out.entropy

    leaves = (given["hidden"].requires_grad_(), given["weight"].requires_grad_(), bias)
    assert torch.autograd.gradcheck(f, leaves)


def test_refusals() -> None:
    given = problem(4, 8, 10)
    for wrong, message in (
        ({"hidden": given["hidden"][:, :7]}, "with one H"),
        ({"target": given["target"][:3]}, "one class to each row"),
        ({"target": given["target"].float()}, "int32 or int64"),
        ({"bias": torch.zeros(9)}, "bias must have the shape"),
        ({"softcap": 0.0}, "above 0"),
        ({"temperature": 0.0}, "above 0"),
        ({"logit_scale": 0.0}, "logit_scale must be above 0"),
        ({"logit_scale": 2.0**100, "temperature": 2.0**-100}, "so must logit_scale / temperature"),
        ({"skip_below": 1e-6, "return_mean_logits": True}, "one of the two"),
        ({"skip_below": 1.5}, "probability"),
        ({"ignore_index": 2**31}, "32 bits"),
    ):
        with pytest.raises(ValueError, match=message):
            weft.linear_logprobs(**(given | wrong))
    for wrong, message in (
        ({"reduction": "avg"}, "reduction"),
        ({"all_ignored": "one"}, "all_ignored"),
        ({"label_smoothing": 2.0}, "from 0 to 1"),
        ({"label_smoothing": 0.1, "skip_below": 1e-6}, "one of the two"),
        ({"class_weight": torch.zeros(9)}, "class_weight"),
    ):
        with pytest.raises(ValueError, match=message):
            weft.linear_cross_entropy(**(given | wrong))


# ---- what single launches can't show -------------------------------------------------------------------


def test_more_tokens_than_are_numbered_at_a_time() -> None:
    at_a_time = scan_config("order", Capabilities.of("cpu")).tile
    given = problem(at_a_time + 300, 16, 40)
    given["target"][::3] = -100
    given["hidden"][::3] = torch.nan
    check(Call(weft.linear_logprobs, given))


def test_an_ignored_column() -> None:
    """Any number may stand for no target, that of a column too."""
    given = problem(30, 16, 40) | {"ignore_index": 7}
    given["target"][::2] = 7
    got = check(Call(weft.linear_logprobs, given))
    assert not got["y"][::2].count_nonzero()


def test_splits_of_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """One split, of many tiles of the vocabulary."""
    monkeypatch.setattr(launch, "_span", lambda vocab, tiles, tile, device: (1, -(-vocab // tile) * tile))
    given = problem(10, 24, 600)
    check(Call(weft.linear_logprobs, given))
    check(Call(weft.linear_logprobs, given | ALL))
    options: dict[str, Any] = {
        "label_smoothing": 0.3,
        "class_weight": torch.rand(600),
        "return_accuracy": True,
    }
    check(Call(weft.linear_cross_entropy, given | options))
    given["weight"][:] = given["weight"][0]
    given["target"][:] = torch.arange(10) * 60
    _, _, _, hit = weft.linear_cross_entropy(**given, reduction="none", return_accuracy=True)
    assert hit.tolist() == [1.0] + [0.0] * 9


def test_one_live_token() -> None:
    """The hidden states of all others are NaN."""
    given = problem(40, 16, 60)
    given["target"][:] = -100
    given["target"][17] = 5
    given["hidden"][:17] = given["hidden"][18:] = torch.nan
    check(Call(weft.linear_logprobs, given))


def test_wide_hidden_states() -> None:
    check(Call(weft.linear_logprobs, problem(9, 300, 140)))


def test_a_weight_with_gaps() -> None:
    given = problem(9, 24, 140)
    wanted, _ = run(Call(weft.linear_logprobs, given))
    spaced = torch.full((140, 40), torch.nan).bfloat16()
    spaced[:, :24] = given["weight"]
    got, _ = run(Call(weft.linear_logprobs, given | {"weight": spaced[:, :24]}))
    assert_same(got, wanted, "a weight with gaps")


def test_a_quantized_weight() -> None:
    """Dequantised first; the gradient is that of the weight it was made of."""
    given = problem(6, 256, 300)
    weight = given["weight"].clone().requires_grad_()
    got = weft.linear_logprobs(given["hidden"], weft.quantize(weight, "128x128"), given["target"])
    (dweight,) = torch.autograd.grad(got.sum(), weight)
    plain = weft.quantize(given["weight"], "128x128").dequantize().requires_grad_()
    wanted = weft.linear_logprobs(given["hidden"], plain, given["target"])
    (right,) = torch.autograd.grad(wanted.sum(), plain)
    assert_same({"y": got, "w": dweight}, {"y": wanted, "w": right}, "quantised")


def test_scratch_memory_is_there_for_the_launch_alone() -> None:
    """What kernels with descriptors need; whoever set an allocator keeps it."""
    from triton.runtime._allocation import _allocator

    from weft.runtime import launch

    before = _allocator.get()
    seen: list[Any] = []
    launch._with_scratch(lambda *args: seen.append((args, _allocator.get())), 0)(1, 2)
    assert seen[0][0] == (1, 2)
    assert seen[0][1] is not before
    assert _allocator.get() is before

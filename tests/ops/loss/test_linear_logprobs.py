"""The loss head beyond the workloads: values, layouts, sizes, PyTorch integration, and compositions."""

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
    """Return hidden states, a head and targets, whose logits exceed the others by about `sure`."""
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
    """Return (results and gradients, upstream gradients); every upstream element is drawn independently."""
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
    """Check results and gradients against float64."""
    got, upstream = run(call)
    expected = head_truth(arguments(call), upstream)
    for name, value in got.items():
        wanted = expected[name]
        if isinstance(wanted, Tensor):
            assert torch.equal(value, wanted), name
        else:
            near(value, wanted)
    return got


# ---- truth ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logprobs_entropy_and_lse(dtype: torch.dtype) -> None:
    """Tokens and columns fill several tiles and part of another."""
    tensors = problem(150, 72, 333, dtype)
    bias = torch.randn(333).to(dtype)
    got = check(
        Call(
            weft.linear_logprobs,
            tensors | {"bias": bias, "return_entropy": True, "return_lse": True, "temperature": 0.7},
        )
    )
    assert (got["logprobs"] <= 0).all(), "a probability above 1"
    assert (got["entropy"] >= 0).all()


ALL = {f"return_{name}": True for name in ("lse", "entropy", "accuracy", "mean_logits", "log_sum_squares")}


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_all_results_of_scaled_logits(softcap: float | None) -> None:
    """Scales before and after the softcap, padding columns, and tokens without a target."""
    tensors = problem(150, 72, 333, sure=6.0)
    tensors["target"] %= 300
    tensors["target"][::7] = -100
    bias = torch.randn(333)
    bias[300:] = -torch.inf
    options = {"logit_scale": 1.75, "softcap": softcap, "temperature": 0.7}
    got = check(Call(weft.linear_logprobs, tensors | {"bias": bias} | options | ALL))
    assert 0 < got["accuracy"].sum() < 150
    assert not got["log_sum_squares"].requires_grad
    assert (got["log_sum_squares"] >= -got["entropy"] - 1e-4).all(), "Jensen's inequality"
    for name in ("mean_logits", "log_sum_squares"):
        assert not got[name][::7].count_nonzero()


def test_squares_of_tiny_and_large_probabilities() -> None:
    """Distributions range from a single column to a uniform one."""
    weight = torch.eye(300, 64)
    hidden = torch.zeros(3, 64)
    hidden[0, 5], hidden[1, 5] = 200.0, 30.0
    target = torch.tensor([5, 6, 7])
    result = weft.linear_logprobs(
        hidden, weight, target, return_log_sum_squares=True, return_mean_logits=True
    )
    wanted = torch.log_softmax(hidden.double() @ weight.double().T, 1)
    torch.testing.assert_close(
        result.log_sum_squares, torch.logsumexp(2 * wanted, 1).float(), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(result.mean_logits, (hidden @ weight.T).mean(1), rtol=1e-5, atol=1e-4)


def test_logit_scale_equals_a_scaled_head() -> None:
    """The scale is a power of two, so bits are equal; `cross_entropy` accepts it too."""
    tensors = problem(20, 24, 140, torch.float32)
    scaled = tensors | {"weight": tensors["weight"] * 0.25}
    for softcap in (None, 3.0):
        options: dict[str, Any] = {"softcap": softcap, "temperature": 0.5}
        got, _ = run(Call(weft.linear_cross_entropy, tensors | options | {"logit_scale": 0.25}))
        wanted, _ = run(Call(weft.linear_cross_entropy, scaled | options))
        assert_same({"y": got["y"]}, {"y": wanted["y"]}, "the loss")
        torch.testing.assert_close(got["dhidden"], wanted["dhidden"], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(got["dweight"], wanted["dweight"] * 0.25, rtol=1e-5, atol=1e-7)
        logits = tensors["hidden"] @ tensors["weight"].T
        plain = weft.cross_entropy(logits, tensors["target"], logit_scale=0.25, **options)
        torch.testing.assert_close(plain, got["y"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)])
def test_operands_of_two_dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    tensors = problem()
    hidden, weight = tensors["hidden"].to(dtypes[0]), tensors["weight"].to(dtypes[1])
    check(Call(weft.linear_logprobs, tensors | {"hidden": hidden, "weight": weight, "return_lse": True}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_confident_targets(dtype: torch.dtype) -> None:
    """At p = 0.999, a gradient p - 1 computed from a rounded p would be 0."""
    tensors = problem(sure=16.0, dtype=dtype)
    got = check(Call(weft.linear_logprobs, tensors))
    p = got["y"].exp()
    assert ((p > 0.998) & (p < 0.99999)).float().mean() > 0.5
    assert (got["dhidden"].abs().amax(1) > 0).all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_smoothing_with_ignored_tokens(reduction: str) -> None:
    """Ignored tokens may be NaN, and a mean does not count them."""
    tensors = problem()
    tensors["target"][::3] = -100
    tensors["hidden"][::3] = torch.nan
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-3}
    got = check(Call(weft.linear_cross_entropy, tensors | options))
    assert not got["dhidden"][::3].count_nonzero()
    assert got["dhidden"][1].count_nonzero()


def test_class_weights_accuracy_and_everything() -> None:
    tensors = problem(90, 64, 260, sure=4.0)
    tensors["target"][5] = -100
    check(
        Call(
            weft.linear_cross_entropy,
            tensors
            | {
                "bias": torch.randn(260).bfloat16(), "class_weight": torch.rand(260), "label_smoothing": 0.2,
                "z_loss": 1e-2, "softcap": 8.0, "temperature": 0.75, "return_lse": True, "return_entropy": True,
                "return_accuracy": True,
            },
        )
    )  # fmt: skip


def test_equals_pytorch() -> None:
    tensors = problem(dtype=torch.float32)
    tensors["target"][3] = -100
    for options in ({}, {"label_smoothing": 0.1}, {"reduction": "sum"}, {"reduction": "none"}):
        got = weft.linear_cross_entropy(**tensors, **options)
        logits = tensors["hidden"] @ tensors["weight"].t()
        torch.testing.assert_close(
            got, F.cross_entropy(logits, tensors["target"], **options), rtol=1e-5, atol=1e-6
        )


def test_accuracy_takes_the_first_of_equal_logits() -> None:
    tensors = problem(4, 16, 140)
    tensors["weight"][:] = tensors["weight"][0]
    tensors["target"][:] = torch.tensor([0, 1, 130, -100])
    _, _, _, hit = weft.linear_cross_entropy(**tensors, reduction="none", return_accuracy=True)
    assert hit.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_invalid_targets() -> None:
    """Such tokens have NaN results and zero gradients, as on a GPU, and the others are unaffected."""
    tensors = problem(6)
    tensors["target"][:4] = torch.tensor([-1, 300, 307, 2**40])
    call = Call(weft.linear_logprobs, tensors | {"return_lse": True}).requiring_grad()
    with unread_labels():
        got = call()
    assert got.logprobs[:4].isnan().all()
    assert got.lse[:4].isnan().all()
    dhidden, dweight = torch.autograd.grad(got.logprobs[4:].sum(), (call["hidden"], call["weight"]))
    assert not dhidden[:4].count_nonzero()
    few = {"hidden": tensors["hidden"][4:], "weight": tensors["weight"], "target": tensors["target"][4:]}
    alone = Call(weft.linear_logprobs, few).requiring_grad()
    wanted = torch.autograd.grad(alone().sum(), (alone["hidden"], alone["weight"]))
    assert_same({"h": dhidden[4:], "w": dweight}, {"h": wanted[0], "w": wanted[1]}, "without the others")


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_a_common_offset_changes_nothing(shift: float) -> None:
    """The offset is a bias that is exactly representable with the logits."""
    tensors = problem(20, 32, 200, torch.float32)
    tensors["hidden"], tensors["weight"] = tensors["hidden"].round(), (tensors["weight"] * 8).round() / 8
    plain = weft.linear_logprobs(**tensors, return_entropy=True)
    moved = weft.linear_logprobs(**tensors, bias=torch.full((200,), shift), return_entropy=True)
    torch.testing.assert_close(moved.logprobs, plain.logprobs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(moved.entropy, plain.entropy, rtol=1e-5, atol=1e-5)


def test_padding_columns() -> None:
    """A bias of minus infinity removes a column, from the smoothing too."""
    tensors = problem(20, 32, 200, torch.float32)
    tensors["target"] %= 150
    bias = torch.zeros(200)
    bias[150:] = -torch.inf
    short = tensors | {"weight": tensors["weight"][:150].contiguous()}
    options: dict[str, Any] = {"label_smoothing": 0.1, "return_entropy": True}
    check(Call(weft.linear_cross_entropy, tensors | {"bias": bias} | options))
    for a, b in zip(
        weft.linear_cross_entropy(**tensors, bias=bias, **options)[:3:2],
        weft.linear_cross_entropy(**short, **options)[:3:2],
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    weight = tensors["weight"].requires_grad_()
    weft.linear_cross_entropy(**tensors, bias=bias, **options).loss.backward()
    assert weight.grad is not None
    assert not weight.grad[150:].count_nonzero()
    assert weight.grad.isfinite().all()


def test_everything_ignored() -> None:
    """The loss is 0 or NaN as requested, and all gradients are 0."""
    tensors = problem(9)
    tensors["target"][:] = -100
    tensors["hidden"][:] = torch.nan
    for options, wanted in (({}, 0.0), ({"all_ignored": "nan"}, torch.nan), ({"reduction": "sum"}, 0.0)):
        call = Call(weft.linear_cross_entropy, tensors | options).requiring_grad()
        loss = call()
        torch.testing.assert_close(loss.detach(), torch.tensor(wanted), equal_nan=True)
        for gradient in torch.autograd.grad(loss, (call["hidden"], call["weight"])):
            assert not gradient.count_nonzero()


def test_small_gradients_in_fp16() -> None:
    """A mean over many tokens has gradients that underflow in fp16 unless scaled."""
    tensors = problem(64, 48, 200, torch.float16)
    call = Call(weft.linear_cross_entropy, tensors | {"reduction": "sum"}).requiring_grad()
    leaves = (call["hidden"], call["weight"])
    full = torch.autograd.grad(call(), leaves)
    tiny = torch.autograd.grad(call() * 2.0**-14, leaves)
    for a, b in zip(full, tiny, strict=True):
        error = (a.double() * 2.0**-14 - b.double()).abs().amax()
        assert error <= 2.0**-24, "more than a rounding to fp16's smallest step"


# ---- layouts and sizes ---------------------------------------------------------------------------------


def test_strides() -> None:
    tensors = problem(24, 40, 130)
    wanted, _ = run(Call(weft.linear_logprobs, tensors | {"return_entropy": True}))
    padded = torch.full((24, 56), torch.nan).bfloat16()
    padded[:, :40] = tensors["hidden"]
    forms = {
        "padded rows": {"hidden": padded[:, :40]},
        "transposed hidden": {"hidden": tensors["hidden"].t().contiguous().t()},
        "transposed weight": {"weight": tensors["weight"].t().contiguous().t()},
        "strided targets": {"target": torch.stack([tensors["target"]] * 2, 1)[:, 0]},
        "int32": {"target": tensors["target"].int()},
    }
    for name, form in forms.items():
        got, _ = run(Call(weft.linear_logprobs, tensors | form | {"return_entropy": True}))
        assert_same(got, wanted, name)


def test_more_dimensions_and_constant_gradients() -> None:
    """sum().backward() sends an expanded upstream gradient, one element for all tokens."""
    tensors = problem(24, 40, 130)
    call = Call(weft.linear_logprobs, tensors).requiring_grad()
    wanted = torch.autograd.grad(call(), (call["hidden"], call["weight"]), torch.ones(24))
    shaped = tensors | {
        "hidden": tensors["hidden"].view(2, 3, 4, 40),
        "target": tensors["target"].view(2, 3, 4),
    }
    call = Call(weft.linear_logprobs, shaped).requiring_grad()
    got = call()
    assert got.shape == (2, 3, 4)
    gradients = torch.autograd.grad(got.sum(), (call["hidden"], call["weight"]))
    assert_same(
        {"h": gradients[0].view(24, 40), "w": gradients[1]}, {"h": wanted[0], "w": wanted[1]}, "shaped"
    )


@pytest.mark.parametrize("rows", [0, 1, 2, 129])
def test_token_counts(rows: int) -> None:
    tensors = problem(rows, 24, 50)
    if rows:
        check(Call(weft.linear_logprobs, tensors | {"return_entropy": True, "return_lse": True}))
        return
    got, _ = run(Call(weft.linear_logprobs, tensors))
    assert got["y"].shape == (0,)
    assert got["dhidden"].shape == (0, 24)
    assert not got["dweight"].count_nonzero()


@pytest.mark.parametrize(("cols", "vocab"), [(1, 1), (7, 129), (65, 1), (16, 128)])
def test_odd_sizes(cols: int, vocab: int) -> None:
    tensors = problem(5, cols, vocab)
    check(Call(weft.linear_logprobs, tensors | {"bias": torch.randn(vocab).bfloat16(), "return_lse": True}))


def test_many_blocks_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """dweight and dbias have the same bits for any workspace size, and dhidden the same error bound."""
    tensors = problem(40, 48, 700) | {"bias": torch.randn(700).bfloat16()}
    wanted, _ = run(Call(weft.linear_logprobs, tensors))
    monkeypatch.setattr(launch, "CPU_BUDGET", 1)
    got = check(Call(weft.linear_logprobs, tensors))
    for name in ("y", "dweight", "dbias"):
        assert_same({name: got[name]}, {name: wanted[name]}, name)


def test_memory_does_not_grow_with_the_vocabulary() -> None:
    """Allocations besides results stay the same for a vocabulary four times as large."""
    peaks = []
    for vocab in (4096, 16384):
        tensors = problem(16, 16, vocab)
        sizes: list[int] = []
        empty = torch.empty

        def counted(*args: Any, sizes: list[int] = sizes, empty: Any = empty, **kwargs: Any) -> Tensor:
            tensor: Tensor = empty(*args, **kwargs)
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "CPU_BUDGET", 1 << 20)
            patch.setattr(torch, "empty", counted)
            run(Call(weft.linear_logprobs, tensors))
        sizes.remove(tensors["weight"].numel() * 2)  # dweight
        peaks.append(max(sizes))
    assert peaks[0] == peaks[1]


def test_forward_traffic_excludes_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes counted with the launches of an H100 are operands and a few elements per token. They are linear in the
    tokens and in the vocabulary: no term has their product."""
    monkeypatch.setattr(launch, "_span", lambda vocab, tile, target: (2, -(-vocab // tile // 2) * tile))

    def moved(rows: int, vocab: int) -> int:
        tensors = problem(rows, 64, vocab)
        with choosing_for("sm_90"), triton_loom.count() as counted:
            weft.linear_logprobs(**tensors)
        bytes_ = sum(launch.loads.distinct + launch.stores.distinct for launch in counted.launches)
        operands = 2 * 64 * (rows + vocab)
        # targets and positions, read by three kernels; statistics of two splits, written and read; results
        of_tokens = rows * (3 * 8 + 4 * 3 + 2 * 2 * 3 * 4 + 4 * 4) + 64
        assert operands <= bytes_ <= operands + of_tokens
        return bytes_

    few, more = (256, 1024), (512, 3072)
    total = {(rows, vocab): moved(rows, vocab) for rows in (256, 512) for vocab in (1024, 3072)}
    assert total[few] + total[more] == total[256, 3072] + total[512, 1024]


def test_skipped_tiles() -> None:
    """A threshold above all probabilities keeps only tiles with a target; one below all keeps every tile."""
    tensors = problem(200, 32, 1024, sure=14.0)
    tensors["target"] = tensors["target"] % 128  # the first tile of columns
    tensors["hidden"] = problem(200, 32, 1024, sure=14.0)["hidden"]
    wanted, _ = run(Call(weft.linear_logprobs, tensors))
    same, _ = run(Call(weft.linear_logprobs, tensors | {"skip_below": 0.0}))
    assert_same(same, wanted, "a threshold of 0")
    got, _ = run(Call(weft.linear_logprobs, tensors | {"skip_below": 0.999999}))
    assert_same({"y": got["y"]}, {"y": wanted["y"]}, "forward")
    assert not got["dweight"][128:].count_nonzero()
    assert_same({"w": got["dweight"][:128]}, {"w": wanted["dweight"][:128]}, "tiles with targets")
    near_all, _ = run(Call(weft.linear_logprobs, tensors | {"skip_below": 1e-6}))
    torch.testing.assert_close(near_all["dhidden"], wanted["dhidden"], rtol=2e-2, atol=2e-3)


# ---- PyTorch -------------------------------------------------------------------------------------------


def test_same_bits_in_every_run_for_any_number_of_threads() -> None:
    tensors = problem(150, 40, 300)
    wanted, _ = run(Call(weft.linear_logprobs, tensors | {"return_entropy": True}))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert_same(
            run(Call(weft.linear_logprobs, tensors | {"return_entropy": True}))[0],
            wanted,
            f"{threads} threads",
        )


def test_many_tokens_are_summed_in_fp32() -> None:
    """The gradient of the weight over thousands of tokens is rounded once."""
    tensors = problem(5000, 16, 40)
    tensors["hidden"] = tensors["hidden"].abs()  # growing sums
    check(Call(weft.linear_logprobs, tensors))


def test_gradient_accumulation_equals_the_full_batch() -> None:
    """Sums over micro-batches, divided by the tokens of the batch, have its gradient."""
    tensors = problem(96, 40, 200, torch.float32)
    tensors["target"][::5] = -100
    count = (tensors["target"] != -100).sum()
    batch = Call(weft.linear_cross_entropy, tensors).requiring_grad()
    wanted = torch.autograd.grad(batch(), batch["weight"])[0]
    weight = tensors["weight"].clone().requires_grad_()
    for i in range(0, 96, 32):
        part = {"hidden": tensors["hidden"][i : i + 32], "target": tensors["target"][i : i + 32]}
        (weft.linear_cross_entropy(weight=weight, **part, reduction="sum") / count).backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("wanted", [("hidden",), ("weight",), ("bias",), ("hidden", "bias"), ()])
def test_gradients_of_a_subset(wanted: tuple[str, ...]) -> None:
    """Any operands may be frozen, even all of them."""
    tensors = problem(20, 24, 140) | {"bias": torch.randn(140).bfloat16()}
    full, upstream = run(Call(weft.linear_logprobs, tensors))
    leaves = {name: tensors[name].clone().requires_grad_() for name in wanted}
    got = weft.linear_logprobs(**(tensors | leaves))
    assert got.requires_grad == bool(wanted)
    if wanted:
        gradients = torch.autograd.grad(got, [*leaves.values()], upstream["y"])
        for name, gradient in zip(wanted, gradients, strict=True):
            assert_same({name: gradient}, {name: full[f"d{name}"]}, f"only {wanted}")


def test_compiled_equals_eager() -> None:
    tensors = problem(20, 24, 140)
    tensors["target"][3] = -100

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        out = weft.linear_cross_entropy(
            hidden, weight, target, label_smoothing=0.1, z_loss=1e-3, return_entropy=True
        )
        return out.loss + 0.1 * out.entropy.sum()

    torch._dynamo.reset()
    results = []
    for f in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)):
        leaves = [tensors[n].clone().requires_grad_() for n in ("hidden", "weight")]
        value = f(*leaves, tensors["target"])
        results.append({str(i): t for i, t in enumerate((value, *torch.autograd.grad(value, leaves)))})
    assert_same(results[1], results[0], "compiled")


def test_opcheck() -> None:
    tensors = problem(6, 16, 40)
    leaves = [tensors[n].requires_grad_() for n in ("hidden", "weight")]
    softmax, wanted = Softmax(0, 40, -100, None, 1.0), Wanted(True, False, False)
    args = LinearLogprobsArgs(*leaves, None, tensors["target"], None, None, softmax, wanted, None)
    op = weft.catalogue["linear_logprobs"]
    torch.library.opcheck(
        op.overload, op.arguments.flatten(args), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("target", ["sm_90", pytest.param("sm_80", marks=pytest.mark.slow)])
def test_launches_of_a_gpu(target: str) -> None:
    """A GPU's tiles and descriptors pass the sanitizer and match float64."""
    tensors = problem(130, 64, 520)
    tensors["target"][::4] = -100
    with choosing_for(target), triton_loom.sanitize():
        check(Call(weft.linear_logprobs, tensors | {"return_entropy": True, "return_lse": True}))


def test_gradcheck_of_the_reference() -> None:
    tensors = problem(5, 6, 9, torch.float64)
    tensors["target"][2] = -100
    bias = torch.randn(9, dtype=torch.float64, requires_grad=True)

    def f(hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
        out = weft.linear_cross_entropy(
            hidden, weight, tensors["target"], bias=bias, label_smoothing=0.2, softcap=3.0, temperature=1.4, z_loss=0.1,
            class_weight=torch.linspace(0.5, 1.5, 9).double(), return_entropy=True, return_lse=True,
        )  # fmt: skip
        return out.loss, out.lse, out.entropy

    leaves = (tensors["hidden"].requires_grad_(), tensors["weight"].requires_grad_(), bias)
    assert torch.autograd.gradcheck(f, leaves)


def test_invalid_arguments_raise() -> None:
    tensors = problem(4, 8, 10)
    for wrong, message in (
        ({"hidden": tensors["hidden"][:, :7]}, "with one H"),
        ({"target": tensors["target"][:3]}, "one class per row"),
        ({"target": tensors["target"].float()}, "int32 or int64"),
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
            weft.linear_logprobs(**(tensors | wrong))
    for wrong, message in (
        ({"reduction": "avg"}, "reduction"),
        ({"all_ignored": "one"}, "all_ignored"),
        ({"label_smoothing": 2.0}, "from 0 to 1"),
        ({"label_smoothing": 0.1, "skip_below": 1e-6}, "one of the two"),
        ({"class_weight": torch.zeros(9)}, "class_weight"),
    ):
        with pytest.raises(ValueError, match=message):
            weft.linear_cross_entropy(**(tensors | wrong))


# ---- more than one launch or tile ----------------------------------------------------------------------


def test_more_tokens_than_one_tile_of_the_order() -> None:
    at_a_time = scan_config("order", Capabilities.of("cpu")).tile
    tensors = problem(at_a_time + 300, 16, 40)
    tensors["target"][::3] = -100
    tensors["hidden"][::3] = torch.nan
    check(Call(weft.linear_logprobs, tensors))


def test_an_ignored_column() -> None:
    """Any value may be ignore_index, even a column's."""
    tensors = problem(30, 16, 40) | {"ignore_index": 7}
    tensors["target"][::2] = 7
    got = check(Call(weft.linear_logprobs, tensors))
    assert not got["y"][::2].count_nonzero()


def test_splits_of_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single split has many tiles of the vocabulary."""
    monkeypatch.setattr(launch, "_span", lambda vocab, tile, device: (1, -(-vocab // tile) * tile))
    tensors = problem(10, 24, 600)
    check(Call(weft.linear_logprobs, tensors))
    check(Call(weft.linear_logprobs, tensors | ALL))
    options: dict[str, Any] = {
        "label_smoothing": 0.3,
        "class_weight": torch.rand(600),
        "return_accuracy": True,
    }
    check(Call(weft.linear_cross_entropy, tensors | options))
    tensors["weight"][:] = tensors["weight"][0]
    tensors["target"][:] = torch.arange(10) * 60
    _, _, _, hit = weft.linear_cross_entropy(**tensors, reduction="none", return_accuracy=True)
    assert hit.tolist() == [1.0] + [0.0] * 9


def test_one_live_token() -> None:
    """The hidden states of all other tokens are NaN."""
    tensors = problem(40, 16, 60)
    tensors["target"][:] = -100
    tensors["target"][17] = 5
    tensors["hidden"][:17] = tensors["hidden"][18:] = torch.nan
    check(Call(weft.linear_logprobs, tensors))


def test_wide_hidden_states() -> None:
    check(Call(weft.linear_logprobs, problem(9, 300, 140)))


def test_a_weight_with_padded_rows() -> None:
    tensors = problem(9, 24, 140)
    wanted, _ = run(Call(weft.linear_logprobs, tensors))
    padded = torch.full((140, 40), torch.nan).bfloat16()
    padded[:, :24] = tensors["weight"]
    got, _ = run(Call(weft.linear_logprobs, tensors | {"weight": padded[:, :24]}))
    assert_same(got, wanted, "a weight with padded rows")


def test_a_quantized_weight() -> None:
    """The weight is dequantized first, and its gradient goes to the tensor it was quantized from."""
    tensors = problem(6, 256, 300)
    weight = tensors["weight"].clone().requires_grad_()
    got = weft.linear_logprobs(tensors["hidden"], weft.quantize(weight, "128x128"), tensors["target"])
    (dweight,) = torch.autograd.grad(got.sum(), weight)
    plain = weft.quantize(tensors["weight"], "128x128").dequantize().requires_grad_()
    wanted = weft.linear_logprobs(tensors["hidden"], plain, tensors["target"])
    (right,) = torch.autograd.grad(wanted.sum(), plain)
    assert_same({"y": got, "w": dweight}, {"y": wanted, "w": right}, "quantized")


def test_scratch_allocator_is_restored_after_a_launch() -> None:
    """Launches of kernels with descriptors set an allocator, and restore the previous one."""
    from triton.runtime._allocation import _allocator

    from weft.runtime import launch

    before = _allocator.get()
    seen: list[Any] = []
    launch._with_scratch(lambda *args: seen.append((args, _allocator.get())), 0)(1, 2)
    assert seen[0][0] == (1, 2)
    assert seen[0][1] is not before
    assert _allocator.get() is before

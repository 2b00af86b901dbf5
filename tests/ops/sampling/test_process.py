"""Processed logits against a loop over tokens in float64, mask by mask and step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_loom.testing import EPS32, NAN, Guarded, words

import weft
from tests.catalogue.layouts import far_apart
from weft.ops.sampling.parameters import Number
from weft.ops.sampling.process.arguments import ProcessArgs
from weft.ops.sampling.process.process import process_op
from weft.runtime import choosing_for


def bits(mask: Tensor) -> Tensor:
    """Pack bool [B, V] into words as grammar engines do, one bit after another."""
    rows, cols = mask.shape
    packed = torch.zeros(rows, -(-cols // 32), dtype=torch.int64)
    for token in range(cols):
        packed[:, token // 32] |= mask[:, token].long() << (token % 32)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def of_request(value: Any, request: int) -> Any:
    return value[request].item() if isinstance(value, Tensor) else value


def processed(logits: Tensor, mask: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the truth in float64, token by token, and the largest term of each."""
    truth, size = torch.empty(2, *logits.shape, dtype=torch.float64)
    for b in range(len(logits)):
        t, r, presence, frequency = (
            of_request(options.get(name, default), b)
            for name, default in (("temperature", 1.0), ("repetition", 1.0), ("presence", 0.0), ("frequency", 0.0))
        )  # fmt: skip
        for v in range(logits.shape[1]):
            z = logits[b, v].item()
            count = 0 if "counts" not in options else options["counts"][b, v].item()
            if count > 0 or ("prompt" in options and options["prompt"][b, v]):
                z = z / r if z > 0 else z * r
            terms = [abs(z)]
            if count > 0:
                z -= frequency * count + presence
                terms += [abs(frequency * count), abs(presence)]
            if "bias" in options:
                bias = options["bias"].expand(logits.shape)[b, v].item()
                z += bias
                terms.append(abs(bias))
            if mask is not None and not mask[b, v]:
                z, terms = -math.inf, [0.0]
            truth[b, v] = z / t if t else z
            size[b, v] = max(terms) / (t or 1.0)
    return truth, size


def near(got: Tensor, truth: Tensor, size: Tensor) -> None:
    """Assert that results differ from the truth by a few roundings of the largest term and one of the result."""
    infinite = truth.isinf()
    assert torch.equal(got[infinite].double(), truth[infinite])
    limit = 3 * EPS32 * size + truth.abs() * torch.finfo(got.dtype).eps / 2 + 1e-45
    assert ((got.double() - truth).abs() <= limit)[~infinite].all()
    assert (got != 0).any()


def requests(rows: int, cols: int) -> tuple[Tensor, dict[str, Any]]:
    """Draw logits and all that requests may ask for."""
    counts = (torch.rand(rows, cols) * 8 - 5).clamp(min=0).to(torch.int32)
    options = {
        "temperature": torch.tensor([0.7, 0.0, 1.0, 1e-6, 13.0])[:rows],
        "repetition": torch.tensor([1.3, 0.8, 1.0, 2.0, 1.01])[:rows],
        "presence": torch.tensor([0.5, 0.0, -0.4, 2.0, 0.1])[:rows],
        "frequency": torch.tensor([0.0, 0.3, 1.5, -0.2, 0.1])[:rows],
        "counts": counts,
        "prompt": torch.rand(rows, cols) < 0.3,
        "bias": torch.randn(rows, cols),
    }
    return torch.randn(rows, cols) * 3, options


@pytest.mark.parametrize("cols", [1, 31, 33, 70, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_at_once(cols: int, dtype: torch.dtype) -> None:
    logits, options = requests(5, cols)
    mask = torch.rand(5, cols) < 0.7
    mask[:, 0] = True
    logits = logits.to(dtype)
    got = weft.process_logits(logits, **options, allowed=bits(mask))
    assert got.dtype == torch.float32
    near(got, *processed(logits, mask, **options))


@pytest.mark.parametrize("left_out", ["temperature", "repetition", "presence", "frequency", "prompt", "bias"])
def test_each_option_may_be_absent(left_out: str) -> None:
    logits, options = requests(5, 70)
    del options[left_out]
    near(weft.process_logits(logits, **options), *processed(logits, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.3},
        {"repetition": 1.4, "prompt": torch.rand(5, 70) < 0.5},
        {"repetition": 1.4, "counts": torch.ones(5, 70, dtype=torch.int32)},
        {"presence": 1.0, "counts": torch.randint(0, 3, (5, 70), dtype=torch.int32)},
        {"frequency": 0.5, "counts": torch.randint(0, 3, (5, 70), dtype=torch.int32)},
        {"bias": torch.randn(70)},
        {"bias": torch.randn(5, 70, dtype=torch.bfloat16)},
    ],
)
def test_numbers_for_all_requests(options: dict[str, Any]) -> None:
    logits, _ = requests(5, 70)
    near(weft.process_logits(logits, **options), *processed(logits, **options))


def test_penalties_as_servers_define_them() -> None:
    """The prompt counts for repetition alone; a token that was generated, for everything."""
    logits = torch.tensor([[2.0, 2.0, -2.0, -2.0, 2.0]])
    counts = torch.tensor([[0, 3, 0, 1, 0]], dtype=torch.int32)
    prompt = torch.tensor([[True, False, True, False, False]])
    got = weft.process_logits(
        logits, repetition=2.0, presence=0.5, frequency=0.25, counts=counts, prompt=prompt
    )
    assert got.tolist() == [[1.0, 1.0 - 0.5 - 0.75, -4.0, -4.0 - 0.5 - 0.25, 2.0]]


# ---- masks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32])
@pytest.mark.parametrize("cols", [1, 31, 32, 33, 70])
def test_the_lowest_bit_is_the_first_token(cols: int, dtype: torch.dtype) -> None:
    """One request for each token, which alone is allowed."""
    mask = torch.eye(cols, dtype=torch.bool)
    got = weft.process_logits(torch.ones(cols, cols), allowed=bits(mask).view(dtype))
    assert torch.equal(got, torch.where(mask, 1.0, -math.inf))


def test_nothing_and_everything_allowed() -> None:
    words_ = torch.tensor([[0, 0], [-1, -1]], dtype=torch.int32)
    got = weft.process_logits(torch.ones(2, 40), allowed=words_, temperature=0.5)
    assert torch.equal(got, torch.tensor([[-math.inf], [2.0]]).expand(2, 40))


# ---- values ---------------------------------------------------------------------------------------------


def test_values_that_are_no_numbers() -> None:
    """NaN stays NaN unless its token is not allowed; infinities stay."""
    logits = torch.tensor([[math.nan, math.nan, math.inf, -math.inf, 0.0]])
    mask = torch.tensor([[True, False, True, True, True]])
    counts = torch.ones(1, 5, dtype=torch.int32)
    got = weft.process_logits(
        logits, repetition=1.5, presence=1.0, counts=counts, allowed=bits(mask), temperature=0.5
    )
    assert got[0, 0].isnan()
    assert got[0, 1:].tolist() == [-math.inf, math.inf, -math.inf, -2.0]


@pytest.mark.parametrize("temperature", [0.0, torch.zeros(3), 1.0, torch.ones(3)])
def test_temperatures_that_change_nothing(temperature: Any) -> None:
    logits = torch.randn(3, 50).bfloat16()
    assert torch.equal(weft.process_logits(logits, temperature=temperature), logits.float())


def test_zero_on_the_device_makes_one_request_greedy() -> None:
    logits = torch.randn(2, 50)
    got = weft.process_logits(logits, temperature=torch.tensor([0.0, 0.5]))
    assert torch.equal(got, torch.stack([logits[0], logits[1] / 0.5]))


# ---- memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_place_with_one_rounding(dtype: torch.dtype) -> None:
    """Logits in place, in rows of a larger tensor, have the bits of the fp32 result, rounded once."""
    logits, options = requests(4, 70)
    logits = logits.to(dtype)
    expected = weft.process_logits(logits, **options).to(dtype)
    around = torch.full((4, 75), math.nan, dtype=dtype)
    rows = around[:, 2:72]
    rows.copy_(logits)
    assert weft.process_logits(rows, **options, out=rows) is rows
    assert torch.equal(rows, expected)
    assert around[:, :2].isnan().all()
    assert around[:, 72:].isnan().all()
    same = logits.clone()
    assert torch.equal(weft.process_logits(same, **options, out=same), expected)


def test_out_in_another_dtype_between_guards() -> None:
    logits, options = requests(3, 33)
    band = Guarded.of(torch.zeros(3, 33, dtype=torch.float16), NAN)
    weft.process_logits(logits, **options, out=band.tensor)
    assert torch.equal(words(band.check()), words(weft.process_logits(logits, **options).half()))


@pytest.mark.parametrize("layout", ["request", "row"])
def test_several_rows_of_a_request(layout: str) -> None:
    """Tensors have a row for each request, or for each row of the logits."""
    flat, options = requests(3, 40)
    mask = torch.rand(3, 40) < 0.6
    options |= {"allowed": bits(mask)}
    if layout == "request":
        logits, repeated = torch.randn(3, 4, 40), {n: x.repeat_interleave(4, 0) for n, x in options.items()}
        expected = weft.process_logits(logits.view(12, 40), **repeated)
    else:
        logits = flat.view(3, 1, 40)
        expected = weft.process_logits(flat, **options)
        options = {name: x.unsqueeze(1) for name, x in options.items()}
    assert torch.equal(weft.process_logits(logits, **options), expected.view(logits.shape))


def test_one_row() -> None:
    logits = torch.randn(40)
    assert torch.equal(weft.process_logits(logits, temperature=torch.tensor(0.5)), logits / 0.5)


def test_offsets_have_64_bits() -> None:
    """Rows past 2^31 elements are right, of the logits, the counts and the bias."""
    logits = far_apart(4, 96)
    expected = weft.process_logits(logits.contiguous(), bias=logits.contiguous(), temperature=0.5)
    assert torch.equal(weft.process_logits(logits, bias=logits, temperature=0.5), expected)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_tiles_of_gpus(target: str) -> None:
    logits, options = requests(3, 4200)
    expected = weft.process_logits(logits, **options)
    with choosing_for(target):
        assert torch.equal(weft.process_logits(logits, **options), expected)


def test_a_row_does_not_depend_on_others() -> None:
    logits, options = requests(5, 300)
    expected = weft.process_logits(logits, **options)
    order = torch.tensor([3, 0, 4])
    moved = {name: value[order] for name, value in options.items()}
    assert torch.equal(weft.process_logits(logits[order], **moved), expected[order])


# ---- mistakes -------------------------------------------------------------------------------------------

X = torch.randn(4, 40)
COUNTS = torch.zeros(4, 40, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "words_"),
    [
        (lambda: weft.process_logits(X, temperature=-1.0), "temperature must be at least 0"),
        (lambda: weft.process_logits(X, repetition=0.0, counts=COUNTS), "repetition must be above 0"),
        (lambda: weft.process_logits(X, presence=math.inf, counts=COUNTS), "presence must be finite"),
        (lambda: weft.process_logits(X, presence=0.5), "presence= needs counts="),
        (lambda: weft.process_logits(X, repetition=1.5), "repetition= needs counts= or prompt="),
        (lambda: weft.process_logits(X, temperature=torch.ones(4).double()), "temperature must be float32"),
        (lambda: weft.process_logits(X, temperature=torch.ones(3)), r"temperature must be \(4,\)"),
        (lambda: weft.process_logits(X, counts=COUNTS.long()), "counts must be int32"),
        (lambda: weft.process_logits(X, counts=COUNTS[:, :39]), "counts must have 40 elements in each row"),
        (lambda: weft.process_logits(X, counts=COUNTS[:2]), "counts must be"),
        (lambda: weft.process_logits(X, bias=torch.ones(39)), "bias must have 40 elements"),
        (lambda: weft.process_logits(X, allowed=torch.ones(4, 3).int()), "allowed must have 2 elements"),
        (lambda: weft.process_logits(X, allowed=torch.ones(4, 2)), "allowed must be int32 or uint32"),
        (lambda: weft.process_logits(X.clone().requires_grad_()), r"no_grad\(\)"),
        (lambda: weft.process_logits(X, out=torch.ones(40, 4).t()), "out must be contiguous"),
        (lambda: weft.process_logits(X, out=torch.ones(1, 40).expand(4, 40)), "out must be contiguous"),
        (lambda: weft.process_logits(X, out=torch.ones(4, 39)), "out must have the shape"),
        (lambda: weft.process_logits(X, bias=(x := torch.ones(4, 40)), out=x), "shares memory"),
    ],
)  # fmt: skip
def test_mistakes_are_named(call: Callable[[], Any], words_: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words_):
        call()


def test_the_op_refuses_what_it_would_misread() -> None:
    one, zero = Number(None, 1.0), Number(None, 0.0)
    args = ProcessArgs(X, one, one, zero, zero, None, None, None, torch.ones(4, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="allowed must be int32"):
        process_op(args)


def test_gradients_that_nobody_asked_for() -> None:
    with torch.no_grad():
        weft.process_logits(X.clone().requires_grad_())

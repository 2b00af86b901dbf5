"""Rotations and `qkv_prepare`: angles, options, layouts, partial sequences, caches, wrong calls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton_loom
from torch import Tensor
from triton_loom.testing import words

import weft
from tests.catalogue.calls import arguments_of, opcheck
from tests.catalogue.layouts import LAYOUTS, constant, expanded, far_apart
from tests.support.covering import covering
from weft.lab import oracle
from weft.lab.calls import assert_same, backward, results, run, upstreams
from weft.lab.families import Call
from weft.lab.families.qkv import qkv_prepare_truth, spelled_out
from weft.lab.families.rope import rope_truth, spelled_rope
from weft.lab.truth import near
from weft.ops.common.heads import contiguous_heads
from weft.runtime import choosing_for

HEADS, ROTATION = weft.Heads(q=4, kv=2, dim=24), weft.Rotation(1e4)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table(*lead: int, half: int) -> dict[str, Tensor]:
    angle = normal(*lead, half, seed=9, dtype=torch.float32) * 3
    return {"cos": angle.cos(), "sin": angle.sin()}


def packed(
    batch: int = 2, tokens: int = 5, heads: int = 4, kv_heads: int = 2, dim: int = 24, v_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16, **options: Any,
) -> Call:  # fmt: skip
    """Build a call with a packed projection, angle tables unless there is a base, and weights if there is a norm."""
    width = heads * dim * (1 + options.get("gate", False)) + kv_heads * (dim + (v_dim or dim))
    lead = (tokens, batch) if options.get("layout") == "sbhd" else (batch, tokens)
    kwargs: dict[str, Any] = {"qkv": normal(*lead, width, dtype=dtype)}
    if options.get("qk_norm"):
        kwargs |= {"q_weight": normal(dim, seed=1), "k_weight": normal(dim, seed=2, dtype=torch.float32)}
    if options.get("qk_norm") == "layer":
        kwargs |= {"q_bias": normal(dim, seed=3, dtype=torch.float32), "k_bias": normal(dim, seed=4)}
    if "base" not in options and "cos" not in options and options.get("rope_dim") != 0:
        kwargs |= table(tokens, half=options.get("rope_dim", dim) // 2)
    options = {name: value for name, value in options.items() if (name, value) != ("rope_dim", 0)}
    if v_dim is not None:
        options["v_dim"] = v_dim
    return Call(spelled_out, {**kwargs, "heads": heads, "kv_heads": kv_heads, "head_dim": dim, **options})


def check(call: Call) -> dict[str, Tensor]:
    """Check forward and backward against the truth; return all results and gradients."""
    call = call.requiring_grad()
    outputs = results(call)
    gradients = upstreams(outputs)
    truth = rope_truth if call.function is spelled_rope else qkv_prepare_truth
    expected = truth(call, gradients)
    got = {**outputs, **backward(call, outputs, gradients)}
    assert set(got) == set(expected)
    for name, wanted in expected.items():
        near(got[name], wanted)
    return got


# ---- angles --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize("first", [0, (1 << 20) - 64, (1 << 31) - 64])
def test_angles_are_those_of_fp64(first: int, base: float) -> None:
    """Angles are correct to the last place of fp32 at position 2^20 and beyond, where fp32 products fail in the second
    digit."""
    dim = 128
    positions = first + torch.arange(64)
    x = torch.zeros(64, 1, dim)
    x[..., : dim // 2] = 1.0
    y = spelled_rope(x, positions=positions, base=base).double()[:, 0]
    inverse = base ** (-2.0 * torch.arange(dim // 2).double() / dim)
    angle = positions.double()[:, None] * inverse
    # The truth itself is off by a float64 ulp of an angle near 2^31.
    wanted = torch.cat([angle.cos(), angle.sin()], 1)
    allowed = 2.0**-23 + first * 2.0**-52
    assert (y - wanted).abs().max() < allowed
    if first:
        naive = positions.float()[:, None] * inverse.float()
        assert (naive.double().cos() - angle.cos()).abs().max() > 100 * allowed or first > 1 << 30


def test_small_angles_keep_their_digits() -> None:
    """The error is small relative to the sine, which is small for slow pairs."""
    x = torch.zeros(512, 1, 128)
    x[..., :64] = 1.0
    sin = spelled_rope(x, base=1e6).double()[:, 0, 64:]
    wanted = (torch.arange(512).double()[:, None] * 1e6 ** (-torch.arange(64).double() / 64)).sin()
    assert ((sin - wanted).abs() <= 2.0**-22 * wanted.abs() + 2.0**-40).all()


def test_a_base_and_its_table_agree() -> None:
    positions = torch.randint(0, 4000, (2, 5), generator=torch.Generator().manual_seed(1))
    angle = torch.arange(4000).double()[:, None] * 1e4 ** (-torch.arange(12).double() / 12)
    tables = {"cos": angle.cos().float(), "sin": angle.sin().float()}
    by_table = packed(positions=positions, qk_norm="rms", dtype=torch.float32, **tables)()
    by_base = packed(positions=positions, qk_norm="rms", dtype=torch.float32, base=1e4)()
    for a, b in zip(by_table, by_base, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


def inverse_frequencies(kind: str, dim: int) -> tuple[Tensor, float]:
    """Compute (angle per position in fp64, attention factor) as transformers' modeling_rope_utils does."""
    base, factor, original = 5e5, 8.0, 256
    plain = 1.0 / base ** (torch.arange(0, dim, 2).double() / dim)
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "ntk":
        return 1.0 / (base * factor ** (dim / (dim - 2))) ** (torch.arange(0, dim, 2).double() / dim), 1.0
    if kind == "llama3":
        low, high = 1.0, 4.0
        wavelength = 2 * math.pi / plain
        smooth = (original / wavelength - low) / (high - low)
        between = (1 - smooth) * plain / factor + smooth * plain
        slowed = torch.where(wavelength > original / low, plain / factor, plain)
        is_between = ~(wavelength < original / high) & ~(wavelength > original / low)
        return torch.where(is_between, between, slowed), 1.0
    fast, slow = (dim * math.log(original / (n * 2 * math.pi)) / (2 * math.log(base)) for n in (32.0, 1.0))
    fast, slow = max(math.floor(fast), 0), min(math.ceil(slow), dim - 1)
    unscaled_share = 1 - ((torch.arange(dim // 2).double() - fast) / (slow - fast)).clamp(0, 1)
    return plain / factor * (1 - unscaled_share) + plain * unscaled_share, 0.1 * math.log(factor) + 1.0


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn", "llama3"])
def test_scaled_rotations(kind: str) -> None:
    """Scaled rotations equal tables of transformers' angles, forward and backward."""
    dim, base = 64, weft.Rotation(5e5)
    rotation = {
        "linear": lambda: base.linear(8.0),
        "ntk": lambda: base.ntk(8.0),
        "yarn": lambda: base.yarn(8.0, 256),
        "llama3": lambda: base.llama3(8.0, 256),
    }[kind]()
    frequencies, magnitude = inverse_frequencies(kind, dim)
    angle = torch.arange(300).double()[:, None] * frequencies
    cos, sin = (magnitude * angle.cos()).float(), (magnitude * angle.sin()).float()
    runs = []
    for each in (rotation, weft.Rotation(cos=cos, sin=sin)):
        x = normal(300, 2, dim, dtype=torch.float32).requires_grad_()
        y = weft.rope(x, each)
        (dx,) = torch.autograd.grad(y, x, normal(300, 2, dim, seed=1, dtype=torch.float32))
        with weft.backend("reference"):
            torch.testing.assert_close(weft.rope(x, each), y, rtol=1e-5, atol=1e-5)
        runs.append((y, dx))
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    plain = weft.rope(x, base)
    assert (plain - runs[0][0]).abs().max() > 0.1


def test_a_rotation_is_scaled_once_and_by_numbers() -> None:
    base = weft.Rotation(1e4)
    with pytest.raises(ValueError, match="scaled already"):
        base.ntk(2.0).ntk(2.0)
    with pytest.raises(ValueError, match="positive and finite"):
        base.linear(0.0)
    with pytest.raises(TypeError, match="must be a number"):
        base.ntk("2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="by tables cannot be scaled"):
        weft.Rotation(**table(3, half=2)).linear(2.0)  # type: ignore[arg-type]


def test_a_position_without_a_row_is_nan() -> None:
    """A position outside the table gives NaN, not a neighboring row or memory behind the table."""
    tables = table(7, half=12)
    positions = torch.tensor([[0, 6, 7, -1, 3], [1 << 33, 1, 2, 3, 4]])
    q, k, v = packed(positions=positions, **tables)()
    outside = (positions < 0) | (positions >= 7)
    assert q[outside].isnan().all()
    assert k[outside].isnan().all()
    assert q[~outside].isfinite().all()
    assert v.isfinite().all()


# ---- options -------------------------------------------------------------------------------------------

COMBINED: list[dict[str, Any]] = [
    {},
    {"packing": "groups", "qk_norm": "rms", "layout": "sbhd", "out_layout": "bshd", "rope_dim": 12},
    {"qk_norm": "layer", "norm_after": True, "rope_dim": 16, "rope_first": False, "out_layout": "bhsd"},
    {"qk_norm": "layer", "style": "interleaved", "rope_dim": 8, "out_layout": "thd"},
    {
        "qk_norm": "rms",
        "norm_after": True,
        "style": "interleaved",
        "rope_first": False,
        "rope_dim": 12,
        "base": 1e4,
    },
    {"gate": True, "packing": "groups", "v_dim": 10, "qk_norm": "rms", "rope_dim": 0, "weight_offset": 1.0},
    {"gate": True, "v_dim": 40, "base": 500.0, "out_layout": "sbhd"},
]
SLOWLY = [
    {
        "packing": packing, "qk_norm": norm, "norm_after": after, "style": style, "rope_first": first,
        "rope_dim": rope_dim, "gate": gate, "out_layout": layout,
    }
    for (packing, norm, after, style), (first, rope_dim, gate, layout) in zip(
        itertools.product(("flat", "groups"), (None, "rms", "layer"), (False, True), ("neox", "interleaved")),
        itertools.cycle(
            itertools.product((False, True), (24, 10), (False, True), ("bshd", "sbhd", "bhsd", "thd"))
        ),
        strict=False,
    )
]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [*COMBINED, *(pytest.param(options, marks=pytest.mark.slow) for options in SLOWLY)],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)
def test_options(options: dict[str, Any]) -> None:
    check(packed(**options))


SIZES: list[tuple[str, dict[str, int]]] = [
    ("cpu", {"heads": 1, "kv_heads": 1}),
    ("cpu", {"dim": 7, "rope_dim": 6}),
    ("sm_90", {"batch": 1, "tokens": 1, "heads": 3, "kv_heads": 1}),
    ("sm_90", {"dim": 192, "rope_dim": 64, "rope_first": False, "v_dim": 128}),
]
SLOW_SIZES: list[tuple[str, dict[str, int]]] = [
    *(("sm_90" if target == "cpu" else "cpu", sizes) for target, sizes in SIZES),
    *itertools.product(
        ("cpu", "sm_90", "gfx942"),
        [
            {"dim": 2, "heads": 9, "kv_heads": 3},
            {"dim": 80, "rope_dim": 32},
            {"dim": 96, "tokens": 33},
            {"dim": 5, "rope_dim": 0},
        ],
    ),
]


@pytest.mark.parametrize(
    ("target", "sizes"),
    [*SIZES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_SIZES)],
    ids=str,
)
def test_sizes(target: str, sizes: dict[str, int]) -> None:
    """Results are accurate for one head, odd head dims and odd counts, with the tiles of a CPU and of an H100."""
    with choosing_for(target):
        check(packed(**{"qk_norm": "rms", **sizes}))


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("sm_90", COMBINED[1]),
        ("sm_90", COMBINED[3]),
        *(
            pytest.param(target, options, marks=pytest.mark.slow)
            for target in ("sm_90", "gfx942")
            for options in COMBINED[1:]
            if (target, options) not in (("sm_90", COMBINED[1]), ("sm_90", COMBINED[3]))
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_configuration_of(target: str, options: dict[str, Any]) -> None:
    """GPU launches have several tokens and heads per program, and several tiles per backward program."""
    with choosing_for(target):
        check(packed(**{"tokens": 37, "heads": 6, **options}))


@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, marks=pytest.mark.slow), torch.float32])
def test_dtype(dtype: torch.dtype) -> None:
    got = check(packed(dtype=dtype, qk_norm="rms"))
    assert got["y"].dtype == got["dqkv"].dtype == dtype
    assert (got["dq_weight"].dtype, got["dk_weight"].dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("eps", [0.3, 1e-12])
def test_eps(eps: float) -> None:
    """eps is added inside the root, unchanged."""
    check(packed(packing="groups", qk_norm="rms", layout="sbhd", out_layout="bshd", rope_dim=12, eps=eps))


@pytest.mark.parametrize(
    "absent", [("q_weight", "k_weight"), pytest.param(("q_weight",), marks=pytest.mark.slow)]
)
def test_without_weights(absent: tuple[str, ...]) -> None:
    check(packed(qk_norm="rms").with_(**dict.fromkeys(absent)))


def apart(layout: str = "bshd", **options: Any) -> Call:
    """Build a call with separate q, k and v."""
    heads = {"bshd": (2, 5, 4), "sbhd": (5, 2, 4), "bhsd": (2, 4, 5), "thd": (5, 4)}[layout]
    few = tuple(2 if size == 4 else size for size in heads)
    kwargs = {"qkv": normal(*heads, 24), "k": normal(*few, 24, seed=1), "v": normal(*few, 10, seed=2)}
    return Call(spelled_out, {**kwargs, **table(5, half=12), "layout": layout, **options})


@pytest.mark.parametrize(
    ("layout", "out_layout"), [("bshd", "bhsd"), ("bhsd", "thd"), ("sbhd", None), ("thd", "bhsd")]
)  # one compiled kernel serves all
def test_separate_tensors(layout: str, out_layout: str | None) -> None:
    weights = {"qk_norm": "rms", "q_weight": normal(24, seed=5), "k_weight": normal(24, seed=6)}
    check(apart(layout, out_layout=out_layout, **weights))
    check(apart(layout, out_layout=out_layout).with_(v=None))


def test_separate_tensors_are_the_parts_of_a_packed_one() -> None:
    call = packed(qk_norm="rms", gate=True)
    got = run(call)
    x = call["qkv"].clone().requires_grad_()
    q, k, v = x.split((4 * 48, 2 * 24, 2 * 24), -1)
    parts = {"qkv": q.unflatten(-1, (4, 48)), "k": k.unflatten(-1, (2, 24)), "v": v.unflatten(-1, (2, 24))}
    outputs = results(call.with_(**parts))
    assert_same(outputs, {name: got[name] for name in outputs}, "apart")
    gradients = upstreams(results(call.requiring_grad()))
    (dx,) = torch.autograd.grad(list(outputs.values()), x, list(gradients.values()))
    assert torch.equal(dx, got["dqkv"])


@pytest.mark.parametrize("size", [{"tokens": 0}, {"batch": 0}])
def test_empty_inputs(size: dict[str, int]) -> None:
    call = packed(**size, qk_norm="rms")
    got = run(call)
    assert got["y"].numel() == 0
    assert got["dqkv"].shape == call["qkv"].shape
    assert not got["dq_weight"].count_nonzero()


# ---- sequences in parts --------------------------------------------------------------------------------


@pytest.mark.parametrize("angles", ["base", "table"])
def test_packed_sequences_match_separate_ones(angles: str) -> None:
    """128 packed sequences, each with positions from 0, have the bits that each has alone."""
    lengths = [1 + i % 3 for i in range(128)]
    tokens = sum(lengths)
    angle_options: dict[str, Any] = {"base": 1e4} if angles == "base" else table(3, half=12)
    x = normal(tokens, 8 * 24)
    positions = torch.cat([torch.arange(n) for n in lengths]).int()
    options = {"heads": 4, "kv_heads": 2, "head_dim": 24, **angle_options}
    whole = spelled_out(x, positions=positions, **options)
    parts = [spelled_out(part, **options) for part in x.split(lengths)]
    for i, got in enumerate(whole):
        assert torch.equal(got, torch.cat([part[i] for part in parts]))


def test_context_parallel_zig_zag() -> None:
    """Rank r of 4 holds chunks r and 7 - r of every sequence, with their positions."""
    call = packed(tokens=32, base=1e4, qk_norm="rms")
    whole = call()
    for rank in range(4):
        mine = torch.cat([torch.arange(4 * c, 4 * c + 4) for c in (rank, 7 - rank)])
        got = call.with_(qkv=call["qkv"][:, mine], positions=mine)()
        for a, b in zip(got, whole, strict=True):
            assert torch.equal(a, b[:, mine])


def test_tables_of_every_sample() -> None:
    """Each sample uses its own tables, not those of the first."""
    tables = table(2, 5, half=12)
    got = check(packed(**tables))
    for i in range(2):
        alone = packed(**{name: t[i] for name, t in tables.items()})
        assert torch.equal(got["y"][i], alone()[0][i])
    one = {name: t[:1] for name, t in tables.items()}
    assert torch.equal(packed(**one)()[0], packed(**{name: t[0] for name, t in one.items()})()[0])


@pytest.mark.parametrize("angles", ["base", "table"])
@pytest.mark.parametrize("target", ["cpu", pytest.param("sm_90", marks=pytest.mark.slow)])
def test_three_axes(angles: str, target: str) -> None:
    angle_options: dict[str, Any] = {"base": 1e4} if angles == "base" else table(40, half=12)
    positions = torch.randint(0, 40, (3, 2, 5), generator=torch.Generator().manual_seed(2))
    with choosing_for(target):
        call = packed(positions=positions, mrope_sections=(3, 5, 4), **angle_options)
        check(call)
        same = call.with_(positions=positions[:1].expand(3, 2, 5))()
    assert torch.equal(same[0], call.with_(positions=positions[0], mrope_sections=None)()[0])
    check(
        Call(
            spelled_rope,
            {
                "x": normal(5, 3, 24),
                "positions": positions[:, 1],
                "mrope_sections": (0, 12, 0),
                **angle_options,
            },
        )
    )


# ---- one tensor ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"base": 1e4, "style": "interleaved", "rope_dim": 8, "rope_first": False, "layout": "bhsd"},
        {"base": 1e4, "layout": "sbhd", "out_layout": "bhsd", "inverse": True},
    ],
    ids=str,
)
def test_rope(options: dict[str, Any]) -> None:
    check(Call(spelled_rope, {"x": normal(3, 4, 5, 24), **options}))
    check(
        Call(spelled_rope, {"x": normal(5, 1, 24), **{k: v for k, v in options.items() if "layout" not in k}})
    )


def test_rope_is_that_of_qkv_prepare() -> None:
    q, k, v = packed()()
    x = packed()["qkv"].unflatten(-1, (8, 24))
    tables = table(5, half=12)
    assert torch.equal(spelled_rope(x[:, :, :4], **tables), q)
    assert torch.equal(spelled_rope(x[:, :, 4:6], **tables), k)
    assert torch.equal(x[:, :, 6:], v)


def test_rotations_preserve_norms_and_invert() -> None:
    x = normal(2, 50, 3, 64, dtype=torch.float32).requires_grad_()
    y = spelled_rope(x, base=1e4)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(spelled_rope(y, base=1e4, inverse=True), x)
    gradient = normal(*y.shape, seed=1, dtype=torch.float32)
    (dx,) = torch.autograd.grad(y, x, gradient)
    assert torch.equal(dx, spelled_rope(gradient, base=1e4, inverse=True))


def test_scores_depend_only_on_the_distance() -> None:
    x = normal(1, 1, 1, 64, dtype=torch.float32).expand(1, 9, 1, 64)
    far = spelled_rope(x, base=1e4, positions=torch.arange(9) + (1 << 20))[0, :, 0]
    close = spelled_rope(x, base=1e4)[0, :, 0]
    torch.testing.assert_close(far @ far.T, close @ close.T, rtol=1e-5, atol=1e-4)


def test_a_rotation_has_second_derivatives() -> None:
    x = normal(3, 2, 24, dtype=torch.float32).requires_grad_()
    (dx,) = torch.autograd.grad(spelled_rope(x, base=1e4).square().sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    torch.testing.assert_close(ddx, torch.full_like(x, 2.0))
    call = packed().requiring_grad()
    squares = call()[0].float().square().sum()
    (first,) = torch.autograd.grad(squares, call["qkv"], create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        first.float().sum().backward()


# ---- layouts -------------------------------------------------------------------------------------------


def everything() -> Call:
    return packed(qk_norm="layer", gate=True, rope_dim=16, packing="groups", out_layout="bhsd")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_strides_of_inputs(layout: Callable[[Tensor], Tensor]) -> None:
    """Any strides of inputs, tables and positions give the bits of contiguous tensors, forward and backward."""
    positions = torch.tensor([[4, 0, 3, 3, 1], [0, 1, 2, 3, 4]])
    call = everything().with_(positions=positions)
    for name in ("qkv", "k_weight", "cos", "positions"):
        tensor = call[name]
        if not tensor.is_floating_point() and layout.__name__ in (
            "stepped",
            "padded",
            "padded_oddly",
            "off_by_one",
        ):
            continue  # these fill gaps with NaN
        laid_out = layout(tensor)
        wanted = run(call.with_(**{name: laid_out.contiguous().clone()}))
        assert_same(run(call.with_(**{name: laid_out})), wanted, f"{layout.__name__} {name}")
    separate = apart(qk_norm="rms")
    for name in ("qkv", "k", "v"):
        laid_out = layout(separate[name])
        wanted = run(separate.with_(**{name: laid_out.contiguous().clone()}))
        assert_same(run(separate.with_(**{name: laid_out})), wanted, f"{layout.__name__} {name} apart")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_strides_of_gradients(layout: Callable[[Tensor], Tensor]) -> None:
    for call in (everything(), apart("bhsd")):
        gradients = upstreams(results(call.requiring_grad()))
        for name, gradient in gradients.items():
            laid_out = layout(gradient)
            wanted = run(call, {**gradients, name: laid_out.contiguous().clone()})
            assert_same(
                run(call, {**gradients, name: laid_out}), wanted, f"{layout.__name__} gradient of {name}"
            )


def test_expanded_gradients_are_not_copied() -> None:
    """Gradients as sum().backward() sends them are not copied in full."""
    whole = normal(2, 5, 4, 24)
    assert contiguous_heads(constant(whole)).untyped_storage().nbytes() == 2 * 24
    assert contiguous_heads(expanded(whole)).stride(0) == 0
    assert contiguous_heads(whole) is whole


@pytest.mark.parametrize("present", [g for g in itertools.product([False, True], repeat=4) if any(g)])
def test_missing_gradients(present: tuple[bool, ...]) -> None:
    """Missing gradients of some results count as zero."""
    call = everything().requiring_grad()
    outputs = results(call)
    gradients = upstreams(outputs)
    some = {name: g for (name, g), is_present in zip(gradients.items(), present, strict=True) if is_present}
    zeros = {name: g if name in some else torch.zeros_like(g) for name, g in gradients.items()}
    wanted = backward(call, outputs, zeros, retain_graph=True)
    assert_same(backward(call, outputs, some), wanted, "missing gradients")


@pytest.mark.parametrize("wanted", [("qkv",), ("q_weight",), ("k_bias",), ("q_bias", "k_weight"), ()])
def test_gradients_of_a_subset(wanted: tuple[str, ...]) -> None:
    call = everything()
    full = run(call)
    leaves = {name: call[name].clone().requires_grad_() for name in wanted}
    outputs = results(call.with_(**leaves))
    assert outputs["y"].requires_grad == bool(wanted)
    if wanted:
        gradients = {
            name: g
            for name, g in upstreams(results(call.requiring_grad())).items()
            if outputs[name].requires_grad
        }
        got = backward(call.with_(**leaves), outputs, gradients)
        assert set(got) == {f"d{name}" for name in wanted}
        assert_same(got, {name: full[name] for name in got}, "a subset")


def test_gradients_of_a_subset_of_separate_tensors() -> None:
    call = apart(qk_norm="rms")
    full = run(call)
    for name in ("qkv", "k", "v"):
        leaf = call[name].clone().requires_grad_()
        outputs = results(call.with_(**{name: leaf}))
        gradients = upstreams(results(call.requiring_grad()))
        got = backward(call.with_(**{name: leaf}), outputs, gradients)
        assert_same(got, {f"d{name}": full[f"d{name}"]}, name)


def test_inputs_stay_as_they_are() -> None:
    """No op writes to its inputs."""
    call = everything()
    before = {name: t.clone() for name, t in call.tensors().items()}
    run(call)
    assert_same(call.tensors(), before, "inputs")


def test_offsets_have_64_bits() -> None:
    """Row strides beyond 32 bits give the same results."""
    x = far_apart(4, 8 * 24)
    call = Call(
        spelled_out, {"qkv": x, "heads": 4, "kv_heads": 2, "head_dim": 24, "base": 1e4, "qk_norm": "rms"}
    )
    assert_same(run(call), run(call.with_(qkv=x.contiguous())), "far apart")


# ---- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
@pytest.mark.parametrize("style", ["neox", "interleaved"])
def test_a_special_value_stays_in_its_pair(special: float, style: str) -> None:
    """A NaN or Inf spreads to its pair if rotated, else stays alone; a norm spreads it over its head."""
    call = packed(rope_dim=8, style=style)
    x, wanted = call["qkv"].clone(), call()[0]
    for column in (1, 13):
        changed = x.clone()
        changed[1, 2, 24 + column] = special  # of head 1
        got = call.with_(qkv=changed)()[0]
        differs = (got != wanted).nonzero()
        assert (differs[:, :3] == torch.tensor([1, 2, 1])).all()
        columns = {(1, "neox"): [1, 5], (1, "interleaved"): [0, 1]}.get((column, style), [column])
        assert differs[:, 3].tolist() == columns
    changed = x.clone()
    changed[1, 2, 24 + 13] = torch.nan
    got = call.with_(qkv=changed, qk_norm="rms")()[0].isnan()
    assert got[1, 2, 1].all()
    assert got.sum() == 24


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e15])
def test_values(scale: float) -> None:
    for options in ({"qk_norm": "rms", "norm_after": True}, {"qk_norm": "layer"}):
        call = packed(dtype=torch.float32, **options)
        got = results(call.with_(qkv=call["qkv"] * scale))
        for name, wanted in qkv_prepare_truth(call.with_(qkv=call["qkv"] * scale), {}).items():
            assert ((got[name].double() - wanted.truth).abs() <= wanted.noise + 1e-30).all()  # type: ignore[union-attr]


# ---- PyTorch -------------------------------------------------------------------------------------------


def prepared(qkv: Tensor, weight: Tensor, positions: Tensor) -> Any:
    """Prepare heads with objects from outside the function, and one that is created inside."""
    q, k, v, _ = weft.qkv_prepare(
        qkv, heads=HEADS, norm=weft.HeadNorm("rms", weight, weight), rotation=ROTATION, positions=positions,
        out_layout="thd",
    )  # fmt: skip
    return weft.rope(q, weft.Rotation(1e4), inverse=True), k, v


@pytest.mark.parametrize("how", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_is_eager(how: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(prepared, fullgraph=True, backend=how, dynamic=how == "aot_eager")
    for tokens in (5, 8) if how == "aot_eager" else (5,):
        runs = []
        for f in (prepared, compiled):
            leaves = [normal(2, tokens, 8 * 24).requires_grad_(), normal(24, seed=1).requires_grad_()]
            outputs = f(*leaves, torch.arange(tokens))
            gradients = torch.autograd.grad(outputs, leaves, [normal(*o.shape, seed=3) for o in outputs])
            runs.append({str(i): t for i, t in enumerate((*outputs, *gradients))})
        assert_same(runs[1], runs[0], f"compiled with {tokens} tokens")


def test_opcheck() -> None:
    for make in (everything, apart):
        opcheck("qkv_prepare", arguments_of(make().requiring_grad(), "qkv_prepare", results)[0])
    call = Call(spelled_rope, {"x": normal(5, 3, 24).requires_grad_(), "base": 1e4})
    opcheck("rope", arguments_of(call, "rope", results)[0])


def test_opcheck_of_backward() -> None:
    for call in (everything(), apart("thd")):
        (a,) = arguments_of(call, "qkv_prepare_backward")
        opcheck("qkv_prepare_backward", a)


def test_gradcheck_of_the_reference() -> None:
    for call in (
        packed(tokens=2, dim=6, rope_dim=4, heads=2, kv_heads=1, gate=True, qk_norm="layer", norm_after=True),
        packed(tokens=2, dim=6, rope_dim=4, heads=2, kv_heads=1, packing="groups", qk_norm="rms"),
    ):
        names = [name for name in call.tensors() if name not in ("cos", "sin")]
        doubled = call.with_(**{name: call[name].double() for name in call.tensors()})
        inputs = [doubled[name].requires_grad_() for name in names]
        f = lambda *t: doubled.with_(**dict(zip(names, t, strict=True)))()  # noqa: B023, E731
        assert torch.autograd.gradcheck(f, inputs)


# ---- caches --------------------------------------------------------------------------------------------

SLOTS = torch.tensor([[3, 15, -1, 7, 16], [1, 0, 9, -5, 1 << 40]])  # of 16; four write nothing
ODD = 0x5A  # content of an unwritten slot


def with_caches(call: Call, fp8: bool, how: str = "paged") -> Call:
    """Add caches of 16 slots to a call: in pages of 4, as plain slots, or strided with gaps everywhere."""
    heads, dims = call["kv_heads"], (call["head_dim"], call["v_dim"] or call["head_dim"])
    lead = (16,) if how == "slots" else (4, 4)
    code = torch.uint8 if how == "slots" else torch.float8_e4m3fn

    def make(dtype: torch.dtype, kind: int, *dim: int) -> Tensor:
        shape = padded_shape = (*lead, heads, *dim)
        if how == "strided":  # k and v of a page adjacent, heads before slots, and different gaps
            padded_shape = (4, 3, heads + 1, 5 + kind, *(d + 3 for d in dim))
        size = torch.empty(0, dtype=dtype).element_size()
        filled = torch.full((*padded_shape, size), ODD, dtype=torch.uint8).view(dtype)[..., 0]
        return filled if how != "strided" else filled[:, kind].transpose(1, 2)[tuple(map(slice, shape))]

    cache = tuple(make(code if fp8 else call["qkv"].dtype, i, dim) for i, dim in enumerate(dims))
    scales = tuple(make(torch.float32, i) for i in range(2)) if fp8 else None
    return call.with_(slots=SLOTS, cache=cache, cache_scales=scales)


def cache_contents(call: Call) -> list[Tensor]:
    """Return the contents of a call's caches and scales, [slots, heads, …]."""
    written = (*call["cache"], *(call["cache_scales"] or ()))
    paged = call["cache"][0].dim() == 4
    return [t.flatten(0, 1) if paged else t for t in written]


def check_caches(call: Call, tokens: list[Tensor]) -> None:
    """Assert that slots hold their tokens of `tokens` [tokens, heads, …] bit for bit, and others are untouched."""
    slots = call["slots"].flatten().tolist()
    for got, wanted in zip(cache_contents(call), tokens, strict=True):
        raw = words(got).view(len(got), -1)
        untouched = words(torch.full((got.numel() * got.element_size(),), ODD, dtype=torch.uint8))
        expected = untouched.view(raw.dtype).view(raw.shape).clone()
        for slot, token in zip(slots, words(wanted).view(len(slots), -1), strict=True):
            if 0 <= slot < len(raw):
                expected[slot] = token
        assert torch.equal(raw, expected)


def expected_tokens(call: Call) -> list[Tensor]:
    """Return k and v of the call without a cache, or the codes and scales of its fp32 results."""
    plain = call.with_(cache=None, slots=None, cache_scales=None, out_layout="thd")
    if call["layout"] == "sbhd":  # slots are in the order of the input
        batch = call["qkv"].shape[1]
        again = lambda t: t.unflatten(0, (batch, -1)).transpose(0, 1).flatten(0, 1)  # noqa: E731
    else:
        again = lambda t: t  # noqa: E731
    if call["cache_scales"] is None:
        return [again(t) for t in plain()[1:3]]
    parts = {n: plain[n].float() for n in ("qkv", "k", "v") if plain[n] is not None}
    codes, scales = [], []
    for t in plain.with_(**parts)()[1:3]:
        quantized = oracle.quantize(
            again(t).flatten(0, 1), block="row", element="e4m3", convention="te", power_of_two=False
        )
        codes.append(quantized.data.view(torch.uint8).view(t.shape))
        scales.append(quantized.scale.view(t.shape[:2]))
    return [*codes, *scales]


CACHED: list[dict[str, Any]] = [
    {"qk_norm": "rms", "base": 1e4, "out_layout": "bhsd"},
    {"qk_norm": "layer", "style": "interleaved", "rope_dim": 8, "layout": "sbhd", "v_dim": 10},
    {"gate": True, "packing": "groups", "v_dim": 40, "rope_dim": 12, "rope_first": False},
]


@pytest.mark.parametrize(
    ("options", "fp8", "how"),
    covering(CACHED, (False, True), ("slots", "paged", "strided")),
    ids=lambda value: (
        "-".join(map(str, value.values()))
        if isinstance(value, dict)
        else {False: "same", True: "fp8"}.get(value, value)
    ),
)
def test_cache(options: dict[str, Any], fp8: bool, how: str) -> None:
    call = with_caches(packed(**options), fp8, how)
    if options.get("layout") == "sbhd":
        call = call.with_(slots=SLOTS.t())
    got = call()
    check_caches(call, expected_tokens(call))
    plain = call.with_(cache=None, slots=None, cache_scales=None)
    assert_same(dict(zip("qkvg", got, strict=False)), dict(zip("qkvg", plain(), strict=False)), "results")


@pytest.mark.parametrize("scale", [0.02, 1e-3, torch.inf])
@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_cache_with_one_scale(target: str, scale: float) -> None:
    """Fixed scales for k and v, as in vLLM, give saturated codes of x / scale."""
    call = packed(qk_norm="rms", base=1e4, v_dim=10)
    codes = [torch.full((16, 2, dim), ODD, dtype=torch.uint8) for dim in (24, 10)]
    scales = (torch.tensor(scale), torch.tensor([2 * scale]))
    with choosing_for(target):
        wide = call.with_(qkv=call["qkv"].float(), out_layout="thd")()
        got = call.with_(cache=codes, cache_scales=scales, slots=SLOTS)()
        assert_same(dict(enumerate(got)), dict(enumerate(call())), "results")
    again = [torch.full_like(t, ODD) for t in codes]
    with weft.backend("reference"):
        call.with_(cache=again, cache_scales=scales, slots=SLOTS)()
    for heads, cache, other, d in zip(wide[1:3], codes, again, scales, strict=True):
        wanted = (heads / d).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        expected = torch.full_like(cache, ODD)
        for slot, token in zip(SLOTS.flatten().tolist(), wanted, strict=True):
            if 0 <= slot < 16:
                expected[slot] = token
        assert torch.equal(cache, expected)
        # The reference may round the fp32 values differently, which can change a code by one.
        assert ((cache.int() - other.int()).abs() <= 1).all()


@pytest.mark.parametrize("fp8", [None, "head", "tensor"])
def test_cache_without_v(fp8: str | None) -> None:
    """Only k is cached, as for MLA's latent, also from a packed projection."""
    call = packed(qk_norm="rms", base=1e4)
    both = with_caches(call, fp8 == "head", "slots")
    if fp8 == "tensor":
        cache = tuple(torch.full((16, 2, 24), ODD, dtype=torch.uint8) for _ in "kv")
        both = call.with_(cache=cache, cache_scales=(torch.tensor(0.02),) * 2, slots=SLOTS)
    both()
    alone = [
        torch.full_like(words(t), ODD * (1 if t.element_size() == 1 else 0x101)) for t in both["cache"][:1]
    ]
    cache = alone[0].view(both["cache"][0].dtype)
    scales = [t.clone() for t in (both["cache_scales"] or ())[:1]]
    if fp8 == "head":
        scales[0].zero_()
    for backend in ("auto", "reference"):
        with weft.backend(backend):  # type: ignore[arg-type]
            k_cache = weft.KVCache(cache, None, *scales)
            norm = weft.HeadNorm("rms", call["q_weight"], call["k_weight"])
            weft.qkv_prepare(
                call["qkv"], heads=HEADS, norm=norm, rotation=ROTATION, cache=k_cache, slots=SLOTS
            )
        written = [slot for slot in SLOTS.flatten().tolist() if 0 <= slot < 16]
        near_codes = (words(cache)[written].int() - words(both["cache"][0])[written].int()).abs()
        assert (near_codes <= (backend == "reference")).all()
        assert torch.equal(words(cache)[2], words(both["cache"][0])[2]), "unwritten slot"


@pytest.mark.parametrize("fp8", [False, True], ids=["same", "fp8"])
def test_cache_of_an_h100(fp8: bool) -> None:
    """No access is out of bounds with several tokens and heads per program and more slots than tokens."""
    call = packed(batch=1, tokens=37, heads=6, kv_heads=3, qk_norm="rms", packing="groups")
    cache = [torch.full((50, 3, 24), ODD, dtype=torch.uint8).repeat(1, 1, 1 if fp8 else 2) for _ in "kv"]
    cache = [t if fp8 else t.view(torch.bfloat16) for t in cache]
    scales = [torch.full((50, 12), ODD, dtype=torch.uint8).view(torch.float32) for _ in "kv"]
    slots = torch.randperm(50, generator=torch.Generator().manual_seed(4))[:37].int()
    slots[5::7] = torch.tensor([-1, 50, -(1 << 31), (1 << 31) - 1, -50], dtype=torch.int32)
    call = call.with_(cache=tuple(cache), slots=slots, cache_scales=tuple(scales) if fp8 else None)
    with choosing_for("sm_90"), triton_loom.sanitize() as seen:
        call()
    assert seen.launches == 1
    with choosing_for("sm_90"):
        check_caches(call, expected_tokens(call))


@pytest.mark.parametrize("fp8", [False, True], ids=["same", "fp8"])
def test_cache_of_separate_tensors(fp8: bool) -> None:
    call = apart("bhsd", qk_norm="rms")
    call = with_caches(call.with_(head_dim=24, kv_heads=2, v_dim=10), fp8).with_(slots=SLOTS.flatten().int())
    call()
    check_caches(call, expected_tokens(call))


@pytest.mark.parametrize("fp8", [False, True], ids=["same", "fp8"])
def test_decoding(fp8: bool) -> None:
    """Decoding token by token, each at its position, fills the cache as one call does."""
    whole = with_caches(packed(tokens=8, base=1e4, qk_norm="rms"), fp8)
    slots = torch.arange(15, -1, -1).view(2, 8)
    whole.with_(slots=slots)()
    step = with_caches(whole, fp8)
    with torch.inference_mode():
        for i in range(8):
            now = {"qkv": whole["qkv"][:, i : i + 1], "positions": torch.tensor([i])}
            step.with_(slots=slots[:, i : i + 1], **now)()
    assert_same(
        dict(enumerate(cache_contents(step))), dict(enumerate(cache_contents(whole))), "token by token"
    )


@pytest.mark.parametrize("fp8", [False, True], ids=["same", "fp8"])
def test_cache_of_the_reference(fp8: bool) -> None:
    """The reference writes the same slots, with the same bits, since nothing is summed here."""
    for options in ({"rope_dim": 0}, {"rope_dim": 0, "layout": "sbhd"}):
        call, again = (with_caches(packed(**options), fp8, "strided") for _ in range(2))
        slots = SLOTS.t() if options.get("layout") else SLOTS
        call.with_(slots=slots)()
        with weft.backend("reference"):
            again.with_(slots=slots)()
            check_caches(again.with_(slots=slots), expected_tokens(again))
        assert_same(
            dict(enumerate(cache_contents(again))), dict(enumerate(cache_contents(call))), "reference"
        )


@pytest.mark.parametrize("special", [0.0, 1e-42, 1e-30, 3e38, torch.inf, torch.nan])
def test_cached_values(special: float) -> None:
    """A head of zeros gets scale 1, and NaN has a code."""
    call = packed(dtype=torch.float32, rope_dim=0, qk_norm=None)
    x = call["qkv"].clone()
    x[0, 0, 4 * 24 :] = special * x[0, 0, 4 * 24 :].sign() if special == special else special
    call = with_caches(call.with_(qkv=x), True)
    call()
    check_caches(call, expected_tokens(call))


def test_offsets_in_a_cache_have_64_bits() -> None:
    """Page strides beyond 32 bits reach the right pages."""
    call = with_caches(packed(qk_norm="rms"), False)
    caches = [far_apart(4, 4 * 2 * 24).view(4, 4, 2, 24) for _ in "kv"]
    call.with_(cache=tuple(caches))()
    call()
    for far, close in zip(caches, call["cache"], strict=True):
        for slot in (3, 15, 7, 1, 0, 9):
            assert torch.equal(far[slot // 4, slot % 4], close[slot // 4, slot % 4])


@pytest.mark.parametrize("size", [{"tokens": 0}, {"batch": 0}])
def test_nothing_is_cached(size: dict[str, int]) -> None:
    call = with_caches(packed(**size), True).with_(slots=torch.zeros(0, dtype=torch.int64))
    assert call()[1].numel() == 0
    assert all((words(t) == words(t).flatten()[0]).all() for t in cache_contents(call))
    empty = with_caches(packed(), False)
    empty.with_(cache=tuple(t[:0] for t in empty["cache"]))()
    assert all((words(t) == words(t).flatten()[0]).all() for t in cache_contents(empty))


def test_cache_writes_bump_versions_and_refuse_gradients() -> None:
    """Cache writes bump version counters; inputs that require gradients are refused unless grad mode is off."""
    call = with_caches(packed(), True)
    call()
    assert all(t._version == 1 for t in (*call["cache"], *call["cache_scales"]))
    for name in ("qkv", "q_weight"):
        wanted = call.with_(qk_norm="rms", q_weight=torch.ones(24))
        wanted = wanted.with_(**{name: wanted[name].clone().requires_grad_()})
        with pytest.raises(ValueError, match="for inference"):
            wanted()
        with torch.no_grad():
            assert not wanted()[0].requires_grad
    assert call["cache"][0]._version == 3


def cached_step(qkv: Tensor, slots: Tensor, kv: Tensor, scales: Tensor | None) -> Any:
    """Prepare heads with a cache whose k and v are views of one tensor."""
    cache = weft.KVCache(kv[:, 0], kv[:, 1], *(() if scales is None else (scales[:, 0], scales[:, 1])))
    q, k, v, _ = weft.qkv_prepare(qkv, heads=HEADS, rotation=ROTATION, cache=cache, slots=slots)
    return q + 1, k, v, kv.float().sum() if scales is None else scales.sum()


@pytest.mark.parametrize("fp8", [False, True], ids=["same", "fp8"])
@pytest.mark.parametrize("how", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_cache_is_eager(how: str, fp8: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(cached_step, fullgraph=True, backend=how)
    runs = []
    for f in (cached_step, compiled):
        kv = torch.zeros(4, 2, 4, 2, 24, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16)
        scales = torch.zeros(4, 2, 4, 2) if fp8 else None
        outputs = [*f(normal(2, 5, 8 * 24), SLOTS, kv, scales), kv, *([] if scales is None else [scales])]
        runs.append({str(i): t for i, t in enumerate(outputs)})
    assert words(runs[0]["4"]).count_nonzero()
    assert_same(runs[1], runs[0], "compiled")


def test_opcheck_of_a_cache() -> None:
    for fp8 in (False, True):
        call = with_caches(packed(qk_norm="rms"), fp8, "slots")
        for t in (*call["cache"], *(call["cache_scales"] or ())):
            t.zero_()
        opcheck("qkv_prepare_cached", arguments_of(call, "qkv_prepare_cached", results)[0])


@pytest.mark.parametrize(
    ("fp8", "changed", "message"),
    [
        (False, {"cache": None}, "go with a cache"),
        (False, {"slots": None}, "slots="),
        (False, {"slots": SLOTS.float()}, "slots must be"),
        (False, {"slots": SLOTS.t()}, "slots must have the shape"),
        (False, {"cache_scales": (torch.zeros(4, 4, 2),) * 2}, "needs scales, and any other takes none"),
        (True, {"cache_scales": None}, "needs scales, and any other takes none"),
        (True, {"cache_scales": (torch.zeros(4, 4, 2),)}, "a scale each"),
        (True, {"cache_scales": (torch.zeros(4, 4, 3),) * 2}, "k_scale must be"),
        (True, {"cache_scales": (torch.zeros(4, 4, 2), torch.zeros(4, 4, 2).bfloat16())}, "v_scale must be"),
        (True, {"cache_scales": (torch.zeros(4, 4, 2), torch.ones(1))}, "both have one scale"),
        (
            False,
            {"cache": (torch.zeros(4, 4, 2, 24).bfloat16(), torch.zeros(3, 4, 2, 24))},
            "as many slots",
        ),
        (False, {"cache": (torch.zeros(4, 4, 2, 24).bfloat16(), torch.zeros(4, 4, 2, 24))}, "one dtype"),
        (False, {"cache": (torch.zeros(4, 4, 2, 23).bfloat16(),) * 2}, "k of the cache must be"),
        (False, {"cache": (torch.zeros(4, 4, 24, 2).bfloat16().mT,) * 2}, "last stride"),
        (False, {"cache": (torch.zeros(4, 4, 2, 24).half(),) * 2}, "a cache must be"),
        (False, {"cache": (torch.zeros(2, 24).bfloat16(),) * 2}, "k of a cache must be"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
def test_wrong_caches(fp8: bool, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_caches(packed(), fp8).with_(**changed)()
    with pytest.raises(ValueError, match="the call has no v"):
        apart().with_(v=None, cache=with_caches(packed(), False)["cache"], slots=SLOTS)()


# ---- wrong calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"heads": 6}, "columns"),
        ({"heads": 5}, "multiple of kv"),
        ({"heads": None}, "heads=weft.Heads"),
        ({"head_dim": -1}, "at least 1"),
        ({"packing": "pairs"}, "packing"),
        ({"qk_norm": "batch"}, "kind of a HeadNorm"),
        ({"qk_norm": "rms", "eps": -1.0}, "eps must be"),
        ({"qk_norm": "rms", "q_weight": torch.ones(23)}, "q_weight must have the shape"),
        ({"cos": None}, "together"),
        ({"base": 1e4}, "together"),
        ({"cos": torch.ones(4, 12), "sin": torch.ones(4, 12)}, "cos and sin must be"),
        ({"rope_dim": 11}, "even"),
        ({"rope_dim": 26}, "even"),
        ({"style": "gptj"}, "style"),
        ({"positions": torch.zeros(5)}, "int32 or int64"),
        ({"positions": torch.zeros(4, dtype=torch.int64)}, "positions must have the shape"),
        ({"mrope_sections": (4, 4, 4)}, "positions"),
        ({"mrope_sections": (4, 4, 5)}, "three parts"),
        ({"mrope_sections": (4, 4)}, "three numbers"),
        ({"layout": "bhsd"}, "packed"),
        ({"layout": "bsd"}, "layout must be"),
        ({"out_layout": "bsd"}, "out_layout"),
        ({"v": torch.ones(2, 5, 2, 24)}, "without k"),
        ({"k": torch.ones(2, 5, 2, 24).bfloat16()}, "dimensions"),
        ({"cos": None, "sin": None, "positions": torch.zeros(5, dtype=torch.int64)}, "go with a rotation"),
        ({"qkv": torch.ones(2, 5, 192, dtype=torch.int32)}, "must be bfloat16"),
    ],
    ids=str,
)
def test_wrong_calls(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed().with_(**changed)()


def test_wrong_calls_of_rope() -> None:
    x = normal(2, 5, 3, 24)
    with pytest.raises(ValueError, match="a rotation is needed"):
        spelled_rope(x)
    with pytest.raises(ValueError, match="does not go with"):
        spelled_rope(x, base=1e4, out_layout="thd")
    with pytest.raises(ValueError, match="dimensions"):
        spelled_rope(x[0, 0], base=1e4)
    with pytest.raises(ValueError, match="positive"):
        spelled_rope(x, base=-1.0)
    with pytest.raises(ValueError, match="does not go with q"):
        apart().with_(v=normal(2, 4, 2, 10))()
    with pytest.raises(ValueError, match="q=6, but the tensors have 4"):
        apart().with_(heads=6)()
    for wrong in ({"heads": 4}, {"norm": "rms"}, {"rotation": 1e4}, {"cache": (x, x)}):
        with pytest.raises(TypeError, match=f"{next(iter(wrong))} must be a weft"):
            weft.qkv_prepare(normal(2, 5, 192), **{"heads": HEADS, **wrong})

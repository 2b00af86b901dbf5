"""Products: model projections in every pair of formats with their epilogues, and the experts of models, forward and
backward."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...ops import grouped_matmul, grouped_wgrad, matmul, quantize
from ...ops.common.groups import real_rows_reference
from ...quant import QTensor
from ..chain import chain
from ..family import Family, Moved
from ..problem import Call, Inputs, Workload
from ..symbolic.loaded import Loaded
from ..truth import EPS32, Near, arguments
from .glu import activation

# (columns of the result, K) of a model's projection.
PROJECTIONS: dict[str, tuple[int, int]] = {
    "qwen3-30b-a3b/gate_up": (1536, 2048),
    "qwen3-30b-a3b/key": (512, 2048),
    "gpt-oss-20b/key": (512, 2880),
    "odd/33": (47, 33),
}

# Formats of a and b, absent if unquantized; dtype: of unquantized operands.
PAIRS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16-sums": {"dtype": torch.float16, "precision": "fp16"},
    "fp32": {"dtype": torch.float32},
    "bf16x3": {"dtype": torch.float32, "precision": "bf16x3"},
    "int8-row": {"a": "int8:row:te", "b": "int8:row:te"},
    "fp8-tensor": {"a": "e5m2:tensor:te", "b": "tensor"},
    "fp8-row": {"a": "row", "b": "row"},
    "fp8-blocks": {"a": "1x128", "b": "128x128"},
    "fp8-blocks-wgrad": {"a": "1x128", "b": "1x128"},
    "mxfp8": {"a": "mx", "b": "mx"},
    "mxfp4": {"a": "e2m1:mx:te", "b": "e2m1:mx:te"},
    "nvfp4": {"a": "nvfp4", "b": "nvfp4_16x16"},
    "weight-fp8": {"b": "128x128"},
    "weight-int8": {"b": "int8:row:te"},
    "weight-int4": {"b": "int4:1x128:te"},
    "weight-mxfp4": {"b": "e2m1:mx:te"},
}

# Further arguments of `matmul`; bias and residual are flags.
FINISHES: dict[str, dict[str, Any]] = {
    "bias-gelu": {"bias": True, "activation": "gelu_tanh"},
    "residual": {"residual": True, "alpha": 0.5},
    "glu": {"glu": "silu"},
    "glu-1x128": {"a": "1x128", "b": "128x128", "glu": "silu", "quantize": "1x128"},
    "invariant": {"batch_invariant": True},
}
OPTIONS = PAIRS | FINISHES

_MANY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(OPTIONS, ("qwen3-30b-a3b/key",)),
    "bf16": ("qwen3-30b-a3b/gate_up", "odd/33"),
    "fp8-blocks": ("qwen3-30b-a3b/gate_up", "gpt-oss-20b/key", "odd/33"),
    "mxfp4": ("gpt-oss-20b/key", "odd/33"),
    "weight-int4": ("qwen3-30b-a3b/key", "odd/33"),
    "bias-gelu": ("qwen3-30b-a3b/key", "odd/33"),
}
_SHARED = "tiles of rows share b, and tiles of columns a; partial sums of few rows are written and read back"


def _build(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = dict(workload.settings)
    rows, k = shape
    n = settings.pop("columns")
    dtype = inputs.dtype if inputs.dtype == torch.float64 else settings.pop("dtype", inputs.dtype)
    settings.pop("dtype", None)
    width = 2 * n if "glu" in settings else n
    weight = inputs.normal(width, k, std=k**-0.5, dtype=dtype)
    b = settings.pop("b", None)
    kwargs: dict[str, Any] = {"a": inputs.activation(rows, k).to(dtype)}
    if "a" in settings:
        kwargs["a"] = quantize(kwargs["a"], settings.pop("a"))
    kwargs["b"] = (weight if b is None else quantize(weight, b)).T
    if settings.pop("bias", False):
        kwargs["bias"] = inputs.normal(width, std=0.1, dtype=dtype)
    if settings.pop("residual", False):
        kwargs["residual"] = inputs.normal(rows, n, dtype=dtype)
    return Call(matmul, kwargs | settings | {"engine": "weft"})


def _workloads(used: dict[str, tuple[str, ...]], rows: int, *tags: str) -> list[Workload]:
    return [
        Workload(
            op="matmul",
            name=name,
            options=options,
            shape=("rows", k),
            rows=rows,
            build=_build,
            tags=frozenset(tags),
            settings=(("columns", n), *OPTIONS[options].items()),
            rereads=_SHARED,
            moves=1.5,
        )
        for options, names in used.items()
        for name in names
        for n, k in (PROJECTIONS[name],)
    ]


def product_workload(pair: str, m: int, n: int, k: int) -> Workload:
    """Return the workload of an m x n x k product in a pair of formats, for benchmarks of any size."""
    (workload,) = _workloads({pair: ("qwen3-30b-a3b/key",)}, m, "training")
    return replace(
        workload, name=f"{m}x{n}x{k}", shape=("rows", k), settings=(("columns", n), *PAIRS[pair].items())
    )


def _flops(workload: Workload) -> int:
    n = dict(workload.settings)["columns"] * (2 if "glu" in dict(workload.settings) else 1)
    return int(2 * workload.rows * n * workload.cols)


# ---- groups ---------------------------------------------------------------------------------------------------

# (experts on one device, rows of a weight, K).
LAYERS: dict[str, tuple[int, int, int]] = {
    "qwen3-30b-a3b/down": (4, 2048, 768),
    "odd/33": (3, 47, 33),
}

# Formats of rows and weights, absent if unquantized, and further arguments.
GROUPED_OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8-blocks": {"x": "1x128", "w": "128x128", "align": 128},
    "glu-1x128": {"x": "1x128", "w": "128x128", "align": 128, "glu": "silu", "quantize": "1x128"},
    "fp8-blocks-wgrad": {"x": "1x128", "dy": "1x128", "align": 128},
}

_GROUPED: dict[str, dict[str, tuple[str, ...]]] = {
    "grouped_matmul": {
        "bf16": ("qwen3-30b-a3b/down", "odd/33"),
        "fp8-blocks": ("qwen3-30b-a3b/down",),
        "glu-1x128": ("qwen3-30b-a3b/down",),
    },
    "grouped_wgrad": {
        "bf16": ("qwen3-30b-a3b/down", "odd/33"),
        "fp8-blocks-wgrad": ("qwen3-30b-a3b/down",),
    },
}
_SHARED_BY_GROUP = "tiles of rows share the weights of their group, and tiles of columns the rows"


def group_ends(rows: int, groups: int, align: int, device: torch.device) -> Tensor:
    """Return ends that split `rows` unevenly into groups, none of them empty if there are enough rows."""
    if device.type == "meta":
        return torch.empty(groups, dtype=torch.int32, device=device)
    ends: list[int] = []
    begin = 0
    for group in range(groups):
        later = groups - 1 - group
        available = rows - begin - later * align
        size = max(available * 3 // 4 if later else available, 1)
        ends.append(min(begin + size, rows))
        begin = min(-(-ends[-1] // align) * align, rows)
    return torch.tensor(ends, dtype=torch.int32, device=device)


def _quantized(x: Tensor, spec: str | None, along_rows: bool = False) -> Tensor:
    return x if spec is None else quantize(x, spec, rowwise=not along_rows, columnwise=along_rows)


def _build_grouped(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = dict(workload.settings)
    rows, k = shape
    groups, n = settings.pop("groups"), settings.pop("columns")
    align = settings.setdefault("align", 1)
    weight = inputs.normal(groups, n, k, std=k**-0.5)
    kwargs: dict[str, Any] = {
        "x": _quantized(inputs.activation(rows, k), settings.pop("x", None)),
        "w": _quantized(weight, settings.pop("w", None)),
        "ends": group_ends(rows, groups, align, inputs.device),
    }
    return Call(grouped_matmul, kwargs | settings | {"engine": "weft"})


def _build_wgrad(workload: Workload, inputs: Inputs, shape: tuple[int, ...]) -> Call:
    settings = dict(workload.settings)
    rows, k = shape
    groups, n = settings.pop("groups"), settings.pop("columns")
    align = settings.setdefault("align", 1)
    ends = group_ends(rows, groups, align, inputs.device)
    operands = {"dy": inputs.normal(rows, n), "x": inputs.activation(rows, k)}
    kwargs: dict[str, Any] = {
        name: _quantized(_zero_padding(x, ends, align), settings.pop(name, None), along_rows=True)
        for name, x in operands.items()
    }
    return Call(grouped_wgrad, kwargs | {"ends": ends} | settings | {"engine": "weft"})


def _zero_padding(x: Tensor, ends: Tensor, align: int) -> Tensor:
    """Zero the rows that belong to no group."""
    if x.device.type == "meta":
        return x
    return x.masked_fill_(~real_rows_reference(ends, len(x), align)[:, None], 0)


_GROUPED_WORKLOADS = tuple(
    Workload(
        op=op,
        name=name,
        options=options,
        shape=("rows", k),
        rows=512,
        build=_build_grouped if op == "grouped_matmul" else _build_wgrad,
        tags=frozenset({"training"} if op == "grouped_matmul" else {"training", "backward"}),
        settings=(("groups", groups), ("columns", n), *GROUPED_OPTIONS[options].items()),
        rereads=_SHARED_BY_GROUP,
        moves=1.5,
    )
    for op, used in _GROUPED.items()
    for options, names in used.items()
    for name in names
    for groups, n, k in (LAYERS[name],)
)


def _grouped_flops(workload: Workload) -> int:
    return int(2 * workload.rows * dict(workload.settings)["columns"] * workload.cols)


WORKLOADS: tuple[Workload, ...] = (
    *_workloads(_MANY, 512, "training"),
    *_workloads(dict.fromkeys(PAIRS, ("qwen3-30b-a3b/key",)), 16, "inference"),
    *_GROUPED_WORKLOADS,
)


# ---- truth ----------------------------------------------------------------------------------------------------


def numbers(x: Tensor, *, of_b: bool = False) -> Tensor:
    """Decode an operand to float64, from the copy whose scales lie along K."""
    if not isinstance(x, QTensor):
        return x.detach().double()
    from .. import oracle

    f, copy = x.format, x.columnwise if of_b else x.rowwise
    rows, k = (x.shape[1], x.shape[0]) if of_b else (x.numel() // x.shape[-1], x.shape[-1])
    swapped = copy is None
    if swapped:
        copy = x.rowwise if of_b else x.columnwise
        rows, k = k, rows
    assert copy is not None
    codes = oracle.Quantized(copy.data.view(torch.uint8), copy.scale, copy.global_scale)
    assert f.element is not None
    k = (f.transposed if of_b else f).length(
        k
    )  # rotated values stay rotated, because rotations cancel in the product
    values = oracle.dequantize(codes, block=f.stored.block, element=f.element, shape=(rows, k)).double()
    return values.t() if of_b != swapped else values


def product_truth(a: Tensor, b: Tensor) -> Near:
    """Return a @ b with the error that fp32 may make in a sum of K terms.

    Matrix units add at most 16 products at a time, each time rounding the running sum; block and row scales add a few
    roundings."""
    terms = a.shape[-1]
    return Near(a @ b, (terms / 16 + 4) * EPS32 * (a.abs() @ b.abs()))


# Largest |f''| of any activation, which is relu2's.
BEND = 2.0


def _gated(near: Near, act: str) -> Near:
    """Apply f to an inexact value. The slope changes by at most BEND times the error, and f rounds."""
    x = near.truth.detach().requires_grad_()
    value = activation(act)(x)
    (slope,) = torch.autograd.grad(value.sum(), x)
    value, slope = value.detach(), slope.abs()
    noise = (slope + BEND * near.noise) * near.noise + 8 * EPS32 * (value.abs() + near.truth.abs() * slope)
    return Near(value, noise)


def _rounded(near: Near, dtype: torch.dtype) -> Near:
    """Add the error of rounding to dtype."""
    return Near(near.truth, near.noise + torch.finfo(dtype).eps / 2 * (near.truth.abs() + near.noise))


def _times(near: Near, factor: float) -> Near:
    return Near(near.truth * factor, (near.noise + EPS32 * near.truth.abs()) * abs(factor))


def _plus(near: Near, other: Tensor | None) -> Near:
    if other is None:
        return near
    total = near.truth + other.detach().double()
    return Near(total, near.noise + EPS32 * total.abs())


def _through(a: Near, b: Tensor) -> Near:
    """Multiply an inexact operand."""
    exact = product_truth(a.truth, b)
    return Near(exact.truth, exact.noise + a.noise @ b.abs())


def matmul_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the product of the decoded operands with its epilogue, and the gradients."""
    args = arguments(call)
    a, b = numbers(args["a"]), numbers(args["b"], of_b=True)
    alpha = 1.0 if args["alpha"] is None else float(args["alpha"])
    act, gated = args["activation"] or args["glu"], args["glu"] is not None
    z, size = product_truth(a, b), a.abs() @ b.abs()
    # tf32 keeps 10 bits of each operand; sums of up to 128 products in fp16 round eight times or more.
    extra = {"tf32": 2.0**-10, "fp16": 8 * 2.0**-11}.get(args["precision"], 0.0)
    z = _plus(_times(Near(z.truth, z.noise + extra * size), alpha), args["bias"])
    y = z
    if act is not None:
        n = z.truth.shape[-1] // (2 if gated else 1)
        gate = _gated(Near(z.truth[..., :n], z.noise[..., :n]), act)
        up, up_noise = (z.truth[..., n:], z.noise[..., n:]) if gated else (torch.ones_like(gate.truth), 0.0)
        noise = gate.noise * (up.abs() + up_noise) + gate.truth.abs() * up_noise
        y = Near(gate.truth * up, noise + EPS32 * (gate.truth * up).abs())
    expected: dict[str, Near | Tensor] = {"y": _plus(y, args["residual"])}
    if "y" not in gradients:
        return expected
    dy = gradients["y"].detach().double()
    dz = Near(dy, torch.zeros_like(dy))
    if act is not None:
        inner = z.truth.detach().requires_grad_()
        f = activation(act)(inner[..., :n])
        (slope,) = torch.autograd.grad((f * (inner[..., n:] if gated else 1.0) * dy).sum(), inner)
        sizes = torch.cat([dy * up, dy * gate.truth], -1) if gated else dy
        near = Near(
            slope, (BEND * z.noise + 16 * EPS32 * (1 + z.truth.abs())) * sizes.abs().amax(-1, keepdim=True)
        )
        dz = _rounded(near, gradients["y"].dtype)
    expected["da"] = _times(_through(dz, b.mT), alpha)
    transposed = _through(Near(dz.truth.mT, dz.noise.mT), a)
    expected["db"] = _times(Near(transposed.truth.mT, transposed.noise.mT), alpha)
    ones = torch.ones(len(dy), 1, dtype=torch.float64)
    dbias = _through(Near(dz.truth.mT, dz.noise.mT), ones)
    expected["dbias"] = Near(dbias.truth[:, 0], dbias.noise[:, 0])
    expected["dresidual"] = Near(dy, torch.zeros_like(dy))
    return expected


def matrices(w: Tensor, transpose: bool = False) -> Tensor:
    """Decode the groups' matrices [groups, N, K], or with `transpose` [groups, K, N], to float64.

    Reads the copy whose scales lie along the summed dimension."""
    groups, n, k = w.shape
    if not isinstance(w, QTensor):
        values = w.detach().double()
    else:
        flat = QTensor((groups * n, k), w.dtype, w.spec, w.rowwise, w.columnwise)
        values = numbers(flat, of_b=transpose).view(groups, n, k)
    return values.mT if transpose else values


def spans(call: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Return (group, begin, end) of every group, by the rule of `ends` and `align`."""
    expected, begin = [], 0
    for group, end in enumerate(call["ends"].tolist()):
        expected.append((group, begin, max(end, begin)))
        begin = math.ceil(end / call["align"]) * call["align"]
    return expected


def _exact_zeros(*shape: int) -> Near:
    return Near(torch.zeros(*shape, dtype=torch.float64), torch.zeros(*shape, dtype=torch.float64))


def grouped_matmul_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the product of each group, zeros in rows of no group, and the gradients."""
    args = arguments(call)
    w, x = matrices(args["w"], args["transpose"]), numbers(args["x"])
    if args["gather"] is not None:
        slot = args["gather"].slot_of_row.long()
        x = x[slot.clamp(min=0) // args["gather"].row_of_slot.shape[-1]]
    expected = {
        "y": _exact_zeros(len(x), w.shape[1] // (1 if args["glu"] is None else 2)),
        "dx": _exact_zeros(*x.shape),
        "dw": _exact_zeros(*w.shape),
        "dbias": _exact_zeros(*w.shape[:2]),
    }
    for group, begin, end in spans(args):
        options = {name: args[name] for name in ("activation", "glu", "precision")}
        options["bias"] = None if args["bias"] is None else args["bias"][group]
        group_call = Call(matmul, {"a": x[begin:end], "b": w[group].T, **options})
        group_expected = matmul_truth(
            group_call, {"y": gradients["y"][begin:end]} if "y" in gradients else {}
        )
        rows = slice(begin, end)
        for name, target, index in (
            ("y", "y", rows),
            ("da", "dx", rows),
            ("db", "dw", group),
            ("dbias", "dbias", group),
        ):
            if name in group_expected:
                near = group_expected[name]
                assert isinstance(near, Near)
                transposed = name == "db"
                expected[target].truth[index] = near.truth.T if transposed else near.truth
                expected[target].noise[index] = near.noise.T if transposed else near.noise
    if args["transpose"]:
        expected["dw"] = Near(expected["dw"].truth.mT, expected["dw"].noise.mT)
    return {name: near for name, near in expected.items() if name == "y" or "y" in gradients}


def grouped_wgrad_truth(call: Call, gradients: dict[str, Tensor]) -> dict[str, Near | Tensor]:
    """Return the weight gradients: a product over the rows of each group."""
    a = arguments(call)
    dy, x = along_rows(a["dy"]), along_rows(a["x"])
    expected = _exact_zeros(len(a["ends"]), dy.shape[1], x.shape[1])
    for group, begin, end in spans(a):
        part = product_truth(dy[begin:end].T, x[begin:end])
        expected.truth[group], expected.noise[group] = part.truth, part.noise
    if a["accumulate"]:
        expected = _plus(expected, a["out"])
    return {"y": expected}


def along_rows(x: Tensor) -> Tensor:
    """Decode an operand to float64, from the copy whose scales lie along the rows."""
    return numbers(x, of_b=True) if isinstance(x, QTensor) else x.detach().double()


FAMILY = Family(
    workloads=WORKLOADS,
    flops={"matmul": _flops, "grouped_matmul": _grouped_flops, "grouped_wgrad": _grouped_flops},
    truths={
        "matmul": matmul_truth,
        "grouped_matmul": grouped_matmul_truth,
        "grouped_wgrad": grouped_wgrad_truth,
    },
    chains={
        ("matmul", "bf16"): chain(torch.matmul, "a", "b"),
        ("matmul", "fp32"): chain(torch.matmul, "a", "b"),
    },
    # Tiles are operands of dots, whose layouts decide how they are loaded; `test_compiled` checks these kernels.
    moved={"matmul_kernel": Moved(set(), set()), "finish_kernel": Moved(set(), set())},
    loaded={("matmul_kernel", "groups.ends"): Loaded(least=0, ascending=True)},
)

"""Engine selection: Weft's own kernel, or PyTorch's libraries (cuBLASLt, hipBLASLt, CUTLASS, oneDNN) or DeepGEMM, if
installed, where they are as good.

One table decides. `weft doctor` prints it for the devices of a machine, `engine=` overrides it for a call, and
`record_engines()` records what ran. Its reasons for GPUs are public figures; this project measured none of them.
`libraries` calls the other engines.

Other engines take plain products only: no bias, activation, residual or alpha, an unquantized result in a's dtype, and
no `batch_invariant`. On GPUs PyTorch also takes quantized operands whose sizes are multiples of 16. PyTorch's settings
apply to its products: `torch.backends.cuda.matmul` lets cuBLAS add parts of a bf16 sum in bf16.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ...quant import Codes, Format
from ...runtime import Capabilities, remembered
from ..common.engines import is_recorded, note_engine, require_engine
from .arguments import GroupedArgs, MatmulArgs, WgradArgs
from .configs import FEW
from .libraries import INSTALLED
from .operands import INT32_DEPTH, Form

Engine = Literal["auto", "weft", "torch", "deep_gemm"]
ENGINES = get_args(Engine)


class Rule(NamedTuple):
    """Table entry: an engine for products of these pairs on these targets, with more than 64 rows unless `few`. If
    several match, the first whose engine is installed and supports the call wins."""

    targets: tuple[str, ...]
    pairs: tuple[str, ...]  # names from `pair_of`
    few: bool
    engine: str
    why: str


_NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
_BLACKWELL = ("sm_100", "sm_103")

TABLE: tuple[Rule, ...] = (
    Rule(("cpu",), ("bf16",), True, "torch", "oneDNN uses the CPU's matrix unit; measured, 2 to 5 times as fast"),
    Rule(("cpu",), ("grouped bf16",), True, "torch", "oneDNN, one product per group"),
    Rule((*_NVIDIA, "gfx942", "gfx950"), ("bf16", "fp16"), False, "torch", "cuBLAS and hipBLASLt, by public figures"),
    Rule(
        ("sm_89", "sm_90", *_BLACKWELL, "sm_120"), ("fp8 tensor", "fp8 row"), False, "torch",
        "cuBLASLt reaches 1009 TFLOPS on an H100, a Triton kernel 399 (pytorch/ao#2784)",
    ),
    Rule(
        ("sm_90",), ("fp8 1x128 x 128x128", "grouped fp8 1x128 x 128x128"), False, "deep_gemm",
        "1550 TFLOPS on an H800 by its README; 715 against a Triton kernel's 292 on an H200 (sgl-project/sglang#3893)",
    ),
    Rule(("sm_90",), ("fp8 1x128 x 128x128",), False, "torch", "cuBLASLt 12.9 supports these scales only on sm_90"),
    Rule(_BLACKWELL, ("fp8 1x128 x 128x128",), False, "deep_gemm", "cuBLASLt does not support these scales there"),
    Rule(
        _BLACKWELL, ("mxfp8", "nvfp4", "grouped bf16"), False, "torch",
        "cuBLASLt and CUTLASS use two multiprocessors per tile; Triton cannot",
    ),
    Rule(_BLACKWELL, ("int8 row", "int8 tensor"), False, "torch", "Triton does not use the matrix unit for int8 there"),
)  # fmt: skip


@remembered
def pair_of(a: Form, b: Form) -> str:
    """Return the table's name for a pair of operands."""
    if a.block is None and b.block is None:
        return a.element
    if a.block is None or b.block is None:
        return "weight-only"
    if a.in_groups:
        short = {"e4m3": "mxfp8", "e2m1": "mxfp4"}.get(a.element, "mx")
        return "nvfp4" if a.block == "nvfp4" else short if a.element == b.element else "mx"
    kind = "int8" if a.element == "int8" else "fp8"
    return f"{kind} {a.block}" if a.block == b.block and a.in_epilogue else f"{kind} {a.block} x {b.block}"


class Used(NamedTuple):
    """Record of a product that ran: engine, pair of formats and sizes."""

    engine: str
    pair: str  # of formats
    m: int
    n: int
    k: int


def _forms(a: MatmulArgs) -> tuple[Form, Form]:
    return Form.of(a.a.dtype, a.a_codes.format), Form.of(a.b.dtype, a.b_codes.format)


def choose_engine(a: MatmulArgs, target: Capabilities) -> str:
    """Choose the engine of a call on a target, and record it for `record_engines`."""
    engine, left, right = a.engine, a.a, a.b
    pair, engines = _by_table(
        left.dtype, a.a_codes.format, right.dtype, a.b_codes.format, "", left.shape[-2] <= FEW, target.target
    )
    if engine == "auto":
        engine = next((name for name in engines if obstacle(a, pair, name, target.target) is None), "weft")
    if is_recorded():
        note_engine(Used(engine, pair, left.shape[-2], right.shape[-1], left.shape[-1]))
    return engine


def choose_grouped_engine(a: GroupedArgs | WgradArgs, target: Capabilities) -> str:
    """Choose the engine of a grouped product on a target, and record it for `record_engines`."""
    engine, (left, right) = a.engine, _grouped_operands(a)
    specs = _grouped_specs(a)
    pair, engines = _by_table(
        left.dtype, specs[0], right.dtype, specs[1], "grouped ", left.shape[0] <= FEW, target.target
    )
    if engine == "auto":
        engine = next((name for name in engines if grouped_obstacle(a, name) is None), "weft")
    if is_recorded():
        note_engine(Used(engine, pair, left.shape[0], right.shape[-2], right.shape[-1]))
    return engine


@remembered
def _by_table(
    a: torch.dtype, a_spec: str | None, b: torch.dtype, b_spec: str | None, prefix: str, few: bool, target: str
) -> tuple[str, tuple[str, ...]]:  # fmt: skip
    """Return a pair's name, and the table's engines for it."""
    pair = prefix + pair_of(Form.of(a, a_spec), Form.of(b, b_spec))
    return pair, by_table(pair, few, target)


def by_table(pair: str, few: bool, target: str) -> tuple[str, ...]:
    """Return the table's engines for few or many rows of this pair on a target, best first; empty if only Weft's kernel
    applies. Whether an engine supports the call is not checked."""
    return tuple(
        rule.engine
        for rule in TABLE
        if target in rule.targets and pair in rule.pairs and (rule.few or not few)
    )


def obstacle(a: MatmulArgs, pair: str, engine: str, target: str | None = None) -> str | None:
    """Return why an engine cannot compute a call (on `target`, if known), or None if it can."""
    if a.bias is not None or a.residual is not None or a.alpha is not None or a.factor != 1.0:
        return "bias, residual and alpha"
    if a.activation is not None:
        return "an activation"
    if a.result.format is not None or a.result.dtype != a.a.dtype:
        return "a result that is quantized or has another dtype than a"
    if a.batch_invariant or a.precision is not None:
        return "batch_invariant and precision"
    if engine == "deep_gemm":
        return _obstacle_of_deep_gemm(a.a_codes, a.b_codes, pair, a.result.dtype, target)
    if pair in ("bf16", "fp16", "fp32"):
        # PyTorch's fp32 products depend on its own settings, and their bits on the number of threads.
        return "products of fp32" if pair == "fp32" else None
    on_cpu, (m, k), n = a.a.device.type == "cpu", a.a.shape[-2:], a.b.shape[-1]
    if pair in ("int8 tensor", "int8 row"):
        if not k or (not on_cpu and (m <= 16 or k % 8 or n % 8)):
            return "int8 products with at most 16 rows, or with a K or N that is not a multiple of 8"
        if k > INT32_DEPTH:
            return f"int8 products with a K above {INT32_DEPTH}, whose sums may exceed int32"
        return None if _contiguous_along_k(a.a_codes, a.b_codes) else "codes that are not contiguous along K"
    if on_cpu:
        return "quantized operands other than int8 on a CPU"
    if pair not in ("fp8 tensor", "fp8 row", "fp8 1x128 x 128x128", "mxfp8", "nvfp4"):
        return f"operands {pair}"
    if all(form.element == "e5m2" for form in _forms(a)):
        return "products of e5m2 with e5m2"
    if pair == "fp8 1x128 x 128x128" and m % 4:
        return "1x128 scales for a number of rows that is not a multiple of 4"
    multiple = 32 if pair == "nvfp4" else 16
    if not k or k % multiple or n % 16 or a.result.dtype is not torch.bfloat16:
        return f"quantized operands whose K is not a multiple of {multiple} or N of 16, or results other than bf16"
    return None if _contiguous_along_k(a.a_codes, a.b_codes) else "codes that are not contiguous along K"


def _contiguous_along_k(*codes: Codes) -> bool:
    """Return whether codes are contiguous along K. Unknown codes, of a QTensor in a graph, count as contiguous."""
    return all(operand.data is None or operand.data.stride(-1) == 1 for operand in codes)


def _obstacle_of_deep_gemm(
    left: Codes, right: Codes, pair: str, dtype: torch.dtype, target: str | None
) -> str | None:
    """Return why DeepGEMM cannot multiply these rows and weights, or None if it can."""
    if not INSTALLED["deep_gemm"]:
        return "an installation (pip finds it as deep_gemm)"
    formats = [Format.of(operand.format) for operand in (left, right) if operand.format is not None]
    if pair.removeprefix("grouped ") != "fp8 1x128 x 128x128" or any(f.element != "e4m3" for f in formats):
        return f"operands {pair}, only e4m3 1x128 x 128x128"
    if target in _BLACKWELL and not all(f.power_of_two for f in formats):
        return "scales that are not powers of two"
    if left.data is not None and left.data.device.type == "cpu":
        return "CPU support"
    for operand, multiple in ((left, 1), (right, 64)):
        if operand.data is not None and (
            operand.data.shape[-1] % 128 or not operand.data.numel() or operand.data.shape[-2] % multiple
        ):
            return "a K that is not a multiple of 128, or an N that is not a multiple of 64"
    if dtype is not torch.bfloat16:
        return "results other than bf16"
    return None if _contiguous_along_k(left, right) else "codes that are not contiguous along K"


def _grouped_operands(a: GroupedArgs | WgradArgs) -> tuple[Tensor, Tensor]:
    return (a.x, a.w) if isinstance(a, GroupedArgs) else (a.dy, a.x)


def _grouped_specs(a: GroupedArgs | WgradArgs) -> tuple[str | None, str | None]:
    left, right = (a.x_codes, a.w_codes) if isinstance(a, GroupedArgs) else (a.dy_codes, a.x_codes)
    return left.format, right.format


def _grouped_forms(a: GroupedArgs | WgradArgs) -> tuple[Form, Form]:
    (left, right), specs = _grouped_operands(a), _grouped_specs(a)
    return Form.of(left.dtype, specs[0]), Form.of(right.dtype, specs[1])


def grouped_obstacle(a: GroupedArgs | WgradArgs, engine: str) -> str | None:
    """Return why an engine cannot compute a grouped product, or None if it can."""
    left, right = _grouped_operands(a)
    if isinstance(a, GroupedArgs):
        if a.bias is not None or a.activation is not None or a.slot_of_row is not None:
            return "bias, activation and gather"
    elif a.addend is not None:
        return "accumulate"
    if a.precision is not None:
        return "precision"
    if engine == "deep_gemm":
        if isinstance(a, WgradArgs):
            return "gradients of weights"
        if a.align % 128 or len(a.x) % 128:
            return "groups and rows that are not multiples of 128"
        pair, result = pair_of(*_grouped_forms(a)), a.result.dtype if a.result.format is None else torch.uint8
        return _obstacle_of_deep_gemm(a.x_codes, a.w_codes, pair, result, None)
    if any(form.block is not None for form in _grouped_forms(a)):
        return "quantized operands in groups"
    if a.result.format is not None or not left.dtype == right.dtype == a.result.dtype:
        return "a result that is quantized or has another dtype than the operands"
    if left.device.type == "cpu":
        return None
    if isinstance(a, WgradArgs) or left.dtype is not torch.bfloat16:
        return "grouped weight gradients, and dtypes other than bf16, on a GPU"
    return None if _aligned_for_bulk_copies(left, right) else "rows that are not 16-byte aligned, on a GPU"


def _aligned_for_bulk_copies(x: Tensor, w: Tensor) -> bool:
    """Return whether PyTorch's grouped product can copy tiles of x [rows, K] and w [groups, N, K] in bulk."""
    contiguous_dim = -1 if w.stride(-1) == 1 else -2
    strides = (
        x.stride(0),
        w.stride(0),
        w.stride(-3 - contiguous_dim),
        x.storage_offset(),
        w.storage_offset(),
        *w.shape[1:],
    )
    return (
        x.numel() > 0
        and x.stride(1) == 1
        and w.stride(contiguous_dim) == 1
        and not any(n % 8 for n in strides)
    )


def check_engine(a: MatmulArgs) -> None:
    """Raise ValueError unless the engine that a call requests can compute it."""
    require_engine(a.engine, ENGINES, lambda: obstacle(a, pair_of(*_forms(a)), a.engine))


def check_grouped_engine(a: GroupedArgs | WgradArgs) -> None:
    """Raise ValueError unless the engine that a grouped call requests can compute it."""
    require_engine(a.engine, ENGINES, lambda: grouped_obstacle(a, a.engine))


def products_on(target: str) -> str:
    """Describe which engine computes which products on a target."""
    rules = [rule for rule in TABLE if target in rule.targets]
    few = {True: "", False: f" (more than {FEW} rows)"}
    absent = {True: "", False: " if it were installed"}
    listed = [
        f"{rule.engine}{absent[INSTALLED[rule.engine]]}: {', '.join(rule.pairs)}{few[rule.few]}"
        for rule in rules
    ]
    return "; ".join([*listed, "weft: the others" if rules else "weft"])

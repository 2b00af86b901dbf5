"""Who multiplies: Weft's own kernel, or other libraries where they are as good: those of PyTorch (cuBLASLt, hipBLASLt,
CUTLASS, oneDNN), and DeepGEMM where it is installed.

One table decides. `weft doctor` prints it for the devices of a machine, `engine=` overrides it for a call, and
`record_engines()` tells what ran. Its reasons for GPUs are public figures; none was measured by this project.
`libraries` calls the others.

They take a call that is a product and nothing else: no bias, activation, residual or alpha, a plain result of a's
dtype, and no `batch_invariant`. On GPUs PyTorch also takes quantised operands, whose sizes then have to be multiples
of 16. Its settings hold for its products: `torch.backends.cuda.matmul` lets cuBLAS add parts of a bf16 sum in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ...quant import Codes, Format
from ...runtime import Capabilities, remembered
from ..common.engines import insist, note_engine
from .arguments import GroupedArgs, MatmulArgs, WgradArgs
from .configs import FEW
from .libraries import INSTALLED
from .operands import INT32_DEPTH, Form

Engine = Literal["auto", "weft", "torch", "deep_gemm"]
ENGINES = get_args(Engine)


class Rule(NamedTuple):
    """An entry of the table: products of these pairs on these targets, of more than 64 rows unless `few`. Of several
    for a product, the first holds whose engine is installed and can compute it."""

    targets: tuple[str, ...]
    pairs: tuple[str, ...]  # as `pair_of` names them
    few: bool
    engine: str
    why: str


_NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
_BLACKWELL = ("sm_100", "sm_103")

TABLE: tuple[Rule, ...] = (
    Rule(("cpu",), ("bf16",), True, "torch", "oneDNN has the processor's matrix unit; measured, 2 to 5 times as fast"),
    Rule(("cpu",), ("grouped bf16",), True, "torch", "the same, one product for each group"),
    Rule((*_NVIDIA, "gfx942", "gfx950"), ("bf16", "fp16"), False, "torch", "cuBLAS and hipBLASLt, by public figures"),
    Rule(
        ("sm_89", "sm_90", *_BLACKWELL, "sm_120"), ("fp8 tensor", "fp8 row"), False, "torch",
        "cuBLASLt, 1009 TFLOPS on an H100 where a Triton kernel has 399 (pytorch/ao#2784)",
    ),
    Rule(
        ("sm_90",), ("fp8 1x128 x 128x128", "grouped fp8 1x128 x 128x128"), False, "deep_gemm",
        "1550 TFLOPS on an H800 by its README; 715 beside 292 of a Triton kernel on an H200 (sgl-project/sglang#3893)",
    ),
    Rule(("sm_90",), ("fp8 1x128 x 128x128",), False, "torch", "cuBLASLt 12.9 has these scales on sm_90 alone"),
    Rule(_BLACKWELL, ("fp8 1x128 x 128x128",), False, "deep_gemm", "cuBLASLt has not these scales there"),
    Rule(
        _BLACKWELL, ("mxfp8", "nvfp4", "grouped bf16"), False, "torch",
        "cuBLASLt and CUTLASS use two multiprocessors for a tile, which Triton cannot",
    ),
    Rule(_BLACKWELL, ("int8 row", "int8 tensor"), False, "torch", "Triton has no int8 on the unit that has it there"),
)  # fmt: skip


@remembered
def pair_of(a: Form, b: Form) -> str:
    """The name of a pair of operands in the table."""
    if a.block is None and b.block is None:
        return a.element
    if a.block is None or b.block is None:
        return "weight-only"
    if a.in_groups:
        short = {"e4m3": "mxfp8", "e2m1": "mxfp4"}.get(a.element, "mx")
        return "nvfp4" if a.block == "nvfp4" else short if a.element == b.element else "mx"
    kind = "int8" if a.element == "int8" else "fp8"
    return f"{kind} {a.block}" if a.block == b.block and a.at_last else f"{kind} {a.block} x {b.block}"


class Used(NamedTuple):
    """A product that ran."""

    engine: str
    pair: str  # of formats
    m: int
    n: int
    k: int


def _forms(a: MatmulArgs) -> tuple[Form, Form]:
    return Form.of(a.a.dtype, a.a_codes.format), Form.of(a.b.dtype, a.b_codes.format)


def choose_engine(a: MatmulArgs, target: Capabilities) -> str:
    """The engine of a call on a target, and a note of it for those who record."""
    pair = pair_of(*_forms(a))
    used = Used(a.engine, pair, a.a.shape[-2], a.b.shape[-1], a.a.shape[-1])
    return _chosen(used, target, lambda engine: obstacle(a, pair, engine, target.target))


def choose_grouped_engine(a: GroupedArgs | WgradArgs, target: Capabilities) -> str:
    """The same for products of groups."""
    left, right = _grouped_operands(a)
    pair = f"grouped {pair_of(*_grouped_forms(a))}"
    used = Used(a.engine, pair, left.shape[0], right.shape[-2], right.shape[-1])
    return _chosen(used, target, lambda engine: grouped_obstacle(a, engine))


def _chosen(wanted: Used, target: Capabilities, speaks_against: Callable[[str], str | None]) -> str:
    engine = wanted.engine
    if engine == "auto":
        able = (one for one in by_table(wanted.pair, wanted.m, target.target) if speaks_against(one) is None)
        engine = next(able, "weft")
    note_engine(wanted._replace(engine=engine))
    return engine


@remembered
def by_table(pair: str, m: int, target: str) -> tuple[str, ...]:
    """Who multiplies m rows of this pair on a target, if nothing speaks against it; the best first, and none but Weft
    where the table has no entry."""
    return tuple(
        rule.engine
        for rule in TABLE
        if target in rule.targets and pair in rule.pairs and (rule.few or m > FEW)
    )


def obstacle(a: MatmulArgs, pair: str, engine: str, target: str | None = None) -> str | None:
    """Why an engine cannot compute a call (on a target, if it is known), or None."""
    if a.bias is not None or a.residual is not None or a.alpha is not None or a.factor != 1.0:
        return "bias, residual and alpha"
    if a.activation is not None:
        return "an activation"
    if a.result.format is not None or a.result.dtype != a.a.dtype:
        return "a result that is quantised or has another dtype than a"
    if a.batch_invariant or a.precision is not None:
        return "batch_invariant and precision"
    if engine == "deep_gemm":
        return _obstacle_of_deep_gemm(a.a_codes, a.b_codes, pair, a.result.dtype, target)
    if pair in ("bf16", "fp16", "fp32"):
        # PyTorch's products of fp32 depend on its own settings, and their bits on the number of threads.
        return "products of fp32" if pair == "fp32" else None
    on_cpu, (m, k), n = a.a.device.type == "cpu", a.a.shape[-2:], a.b.shape[-1]
    if pair in ("int8 tensor", "int8 row"):
        if not k or (not on_cpu and (m <= 16 or k % 8 or n % 8)):
            return "products of int8 with 16 rows or fewer, or with a K or N that is no multiple of 8"
        if k > INT32_DEPTH:
            return f"products of int8 with a K above {INT32_DEPTH}, whose sums may exceed int32"
        return None if _along_k(a.a_codes, a.b_codes) else "codes that are not contiguous along K"
    if on_cpu:
        return "quantised operands on a CPU, but for int8"
    if pair not in ("fp8 tensor", "fp8 row", "fp8 1x128 x 128x128", "mxfp8", "nvfp4"):
        return f"operands {pair}"
    if all(form.element == "e5m2" for form in _forms(a)):
        return "products of e5m2 with e5m2"
    if pair == "fp8 1x128 x 128x128" and m % 4:
        return "scales of 1x128 for a number of rows that is no multiple of 4"
    multiple = 32 if pair == "nvfp4" else 16
    if not k or k % multiple or n % 16 or a.result.dtype is not torch.bfloat16:
        return (
            f"quantised operands whose K is no multiple of {multiple} or N of 16, or another result than bf16"
        )
    return None if _along_k(a.a_codes, a.b_codes) else "codes that are not contiguous along K"


def _along_k(*codes: Codes) -> bool:
    """Whether codes are contiguous along K. Those of a QTensor in a graph are not known, and may be."""
    return all(one.data is None or one.data.stride(-1) == 1 for one in codes)


def _obstacle_of_deep_gemm(
    left: Codes, right: Codes, pair: str, dtype: torch.dtype, target: str | None
) -> str | None:
    """Why DeepGEMM cannot multiply these rows and weights, or None."""
    if not INSTALLED["deep_gemm"]:
        return "an installation (pip finds it as deep_gemm)"
    formats = [Format.of(one.format) for one in (left, right) if one.format is not None]
    if pair.removeprefix("grouped ") != "fp8 1x128 x 128x128" or any(f.element != "e4m3" for f in formats):
        return f"operands {pair} but e4m3 1x128 x 128x128"
    if target in _BLACKWELL and not all(f.power_of_two for f in formats):
        return "scales that are no powers of two"
    if left.data is not None and left.data.device.type == "cpu":
        return "a CPU"
    for one, multiple in ((left, 1), (right, 64)):
        if one.data is not None and (
            one.data.shape[-1] % 128 or not one.data.numel() or one.data.shape[-2] % multiple
        ):
            return "a K that is no multiple of 128, or an N that is none of 64"
    if dtype is not torch.bfloat16:
        return "another result than bf16"
    return None if _along_k(left, right) else "codes that are not contiguous along K"


def _grouped_operands(a: GroupedArgs | WgradArgs) -> tuple[Tensor, Tensor]:
    return (a.x, a.w) if isinstance(a, GroupedArgs) else (a.dy, a.x)


def _grouped_forms(a: GroupedArgs | WgradArgs) -> tuple[Form, Form]:
    left, right = _grouped_operands(a)
    codes = (a.x_codes, a.w_codes) if isinstance(a, GroupedArgs) else (a.dy_codes, a.x_codes)
    return Form.of(left.dtype, codes[0].format), Form.of(right.dtype, codes[1].format)


def grouped_obstacle(a: GroupedArgs | WgradArgs, engine: str) -> str | None:
    """Why an engine cannot compute a product of groups, or None."""
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
            return "groups and rows that are no multiples of 128"
        pair, result = pair_of(*_grouped_forms(a)), a.result.dtype if a.result.format is None else torch.uint8
        return _obstacle_of_deep_gemm(a.x_codes, a.w_codes, pair, result, None)
    if any(form.block is not None for form in _grouped_forms(a)):
        return "quantised operands in groups"
    if a.result.format is not None or not left.dtype == right.dtype == a.result.dtype:
        return "a result that is quantised or has another dtype than the operands"
    if left.device.type == "cpu":
        return None
    if isinstance(a, WgradArgs) or left.dtype is not torch.bfloat16:
        return "gradients of weights in groups, and other dtypes than bf16, on a GPU"
    return None if _lie_well(left, right) else "rows that do not begin at multiples of 16 bytes, on a GPU"


def _lie_well(x: Tensor, w: Tensor) -> bool:
    """Whether PyTorch's product of groups can copy tiles of x [rows, K] and w [groups, N, K] in bulk."""
    along = -1 if w.stride(-1) == 1 else -2
    steps = (
        x.stride(0),
        w.stride(0),
        w.stride(-3 - along),
        x.storage_offset(),
        w.storage_offset(),
        *w.shape[1:],
    )
    return x.numel() > 0 and x.stride(1) == 1 and w.stride(along) == 1 and not any(n % 8 for n in steps)


def check_engine(a: MatmulArgs) -> None:
    """Raise an error unless the engine that a call insists on can compute it."""
    _check(a.engine, lambda: obstacle(a, pair_of(*_forms(a)), a.engine))


def check_grouped_engine(a: GroupedArgs | WgradArgs) -> None:
    """The same for products of groups."""
    _check(a.engine, lambda: grouped_obstacle(a, a.engine))


def _check(engine: str, speaks_against: Callable[[], str | None]) -> None:
    insist(engine, ENGINES, speaks_against)


def products_on(target: str) -> str:
    """Who multiplies what on a target, in words."""
    rules = [rule for rule in TABLE if target in rule.targets]
    few = {True: "", False: f" (more than {FEW} rows)"}
    absent = {True: "", False: " if it were installed"}
    listed = [
        f"{rule.engine}{absent[INSTALLED[rule.engine]]}: {', '.join(rule.pairs)}{few[rule.few]}"
        for rule in rules
    ]
    return "; ".join([*listed, "weft: the others" if rules else "weft"])

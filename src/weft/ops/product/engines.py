"""Who multiplies: Weft's own kernel, or PyTorch's libraries (cuBLASLt, hipBLASLt, oneDNN) where they are as good.

One table decides. `weft doctor` prints it for the devices of a machine, `engine=` overrides it for a call, and
`record_engines()` tells what ran. Its reasons for GPUs are public figures; none was measured by this project.

PyTorch takes a call that is a product and nothing else: no bias, activation, residual or alpha, a plain result of a's
dtype, and no `batch_invariant`. On GPUs it also takes scaled operands, whose sizes then have to be multiples of 16. Its
settings hold for its products: `torch.backends.cuda.matmul` lets cuBLAS add parts of a bf16 sum in bf16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ...quant import Copy
from ...quant.layouts import Buffers, to_layout
from ...runtime import Capabilities
from ..common.engines import insist, note_engine
from ..common.groups import group_spans
from .arguments import GroupedArgs, MatmulArgs, OperandCodes, ProductOutputs, WgradArgs
from .configs import FEW
from .operands import Form

Engine = Literal["auto", "weft", "torch"]
ENGINES = get_args(Engine)


class Rule(NamedTuple):
    """An entry of the table: products of these pairs on these targets, of more than 64 rows unless `few`."""

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
    Rule(("sm_90",), ("fp8 1x128 x 128x128",), False, "torch", "cuBLASLt 12.9 has these scales on sm_90 alone"),
    Rule(_BLACKWELL, ("mxfp8",), False, "torch", "cuBLASLt uses two multiprocessors for a tile, which Triton cannot"),
)  # fmt: skip


@functools.lru_cache(maxsize=1024)
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
    return _chosen(used, target, lambda: obstacle(a, pair))


def choose_grouped_engine(a: GroupedArgs | WgradArgs, target: Capabilities) -> str:
    """The same for products of groups."""
    left, right = _grouped_operands(a)
    pair = f"grouped {pair_of(*_grouped_forms(a))}"
    used = Used(a.engine, pair, left.shape[0], right.shape[-2], right.shape[-1])
    return _chosen(used, target, lambda: grouped_obstacle(a))


def _chosen(wanted: Used, target: Capabilities, speaks_against: Callable[[], str | None]) -> str:
    engine = wanted.engine
    if engine == "auto":
        engine = by_table(wanted.pair, wanted.m, target.target)
        if engine != "weft" and speaks_against() is not None:
            engine = "weft"
    note_engine(wanted._replace(engine=engine))
    return engine


@functools.lru_cache(maxsize=1024)
def by_table(pair: str, m: int, target: str) -> str:
    """Who multiplies m rows of this pair on a target, if nothing speaks against it."""
    for rule in TABLE:
        if target in rule.targets and pair in rule.pairs and (rule.few or m > FEW):
            return rule.engine
    return "weft"


def obstacle(a: MatmulArgs, pair: str) -> str | None:
    """Why PyTorch cannot compute a call, or None."""
    if a.bias is not None or a.residual is not None or a.alpha is not None or a.factor != 1.0:
        return "bias, residual and alpha"
    if a.activation is not None:
        return "an activation"
    if a.result.format is not None or a.result.dtype != a.a.dtype:
        return "a result that is quantised or has another dtype than a"
    if a.batch_invariant or a.precision is not None:
        return "batch_invariant and precision"
    if pair in ("bf16", "fp16", "fp32"):
        # PyTorch's products of fp32 depend on its own settings, and their bits on the number of threads.
        return "products of fp32" if pair == "fp32" else None
    if a.a.device.type == "cpu":
        return "quantised operands on a CPU"
    if pair not in ("fp8 tensor", "fp8 row", "fp8 1x128 x 128x128", "mxfp8"):
        return f"operands {pair}"
    if a.a.shape[-1] % 16 or a.b.shape[-1] % 16 or a.result.dtype is not torch.bfloat16:
        return "quantised operands whose K or N is no multiple of 16, or another result than bf16"
    codes = (a.a_codes.data, a.b_codes.data)
    if any(data is None or data.stride(1) != 1 for data in codes):
        return "codes that are not contiguous along K"
    return None


def _grouped_operands(a: GroupedArgs | WgradArgs) -> tuple[Tensor, Tensor]:
    return (a.x, a.w) if isinstance(a, GroupedArgs) else (a.dy, a.x)


def _grouped_forms(a: GroupedArgs | WgradArgs) -> tuple[Form, Form]:
    left, right = _grouped_operands(a)
    codes = (a.x_codes, a.w_codes) if isinstance(a, GroupedArgs) else (a.dy_codes, a.x_codes)
    return Form.of(left.dtype, codes[0].format), Form.of(right.dtype, codes[1].format)


def grouped_obstacle(a: GroupedArgs | WgradArgs) -> str | None:
    """Why PyTorch cannot compute a product of groups, or None. Its own product of groups for GPUs leaves pads as they
    are, and takes bf16 alone."""
    left, right = _grouped_operands(a)
    if left.device.type != "cpu":
        return "products of groups with zeros in pads on a GPU"
    if isinstance(a, GroupedArgs):
        if a.bias is not None or a.activation is not None or a.slot_of_row is not None:
            return "bias, activation and gather"
    elif a.addend is not None:
        return "accumulate"
    if any(form.block is not None for form in _grouped_forms(a)):
        return "quantised operands on a CPU"
    if a.result.format is not None or not left.dtype == right.dtype == a.result.dtype:
        return "a result that is quantised or has another dtype than the operands"
    return "precision" if a.precision is not None else None


def check_engine(a: MatmulArgs) -> None:
    """Raise an error unless the engine that a call insists on can compute it."""
    _check(a.engine, lambda: obstacle(a, pair_of(*_forms(a))))


def check_grouped_engine(a: GroupedArgs | WgradArgs) -> None:
    """The same for products of groups."""
    _check(a.engine, lambda: grouped_obstacle(a))


def _check(engine: str, speaks_against: Callable[[], str | None]) -> None:
    insist(engine, ENGINES, speaks_against)


def multiply_by_torch(o: ProductOutputs, a: MatmulArgs) -> None:
    """Fill the result by PyTorch's product."""
    y = o.result.y
    if a.a_codes.data is None and a.b_codes.data is None:
        (torch.mm if a.a.dim() == 2 else torch.bmm)(a.a, a.b, out=y)
        return
    torch._scaled_mm(*scaled_operands(a), out_dtype=y.dtype, out=y)


def multiply_groups_by_torch(o: ProductOutputs, a: GroupedArgs | WgradArgs) -> None:
    """Fill the result by one of PyTorch's products for each group, on a CPU, where `ends` can be read at once."""
    y, rows, written = o.result.y, len(_grouped_operands(a)[0]), 0
    for group, begin, end in group_spans(a.ends, rows, a.align):
        if isinstance(a, GroupedArgs):
            y[written:begin] = 0  # pads of the group before
            torch.mm(a.x[begin:end], a.w[group].t(), out=y[begin:end])
            written = end
        else:
            y[written:group] = 0  # groups without rows
            torch.mm(a.dy[begin:end].t(), a.x[begin:end], out=y[group])
            written = group + 1
    y[written:] = 0


def scaled_operands(a: MatmulArgs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The codes of a and b, and their scales, as `torch._scaled_mm` takes them."""
    left, right = _buffers(a.a_codes, "a"), _buffers(a.b_codes, "b")
    return left.data, right.data, left.scale, right.scale


def _buffers(codes: OperandCodes, operand: Literal["a", "b"]) -> Buffers:
    assert codes.data is not None
    assert codes.scale is not None
    assert codes.format is not None
    return to_layout(Copy(codes.data, codes.scale), codes.format, "torch_v1", operand=operand)


def products_on(target: str) -> str:
    """Who multiplies what on a target, in words."""
    rules = [rule for rule in TABLE if target in rule.targets]
    few = {True: "", False: f" (more than {FEW} rows)"}
    listed = [f"{rule.engine}: {', '.join(rule.pairs)}{few[rule.few]}" for rule in rules]
    return "; ".join([*listed, "weft: the others" if rules else "weft"])

"""Liger's kernels, as installed from PyPI, on CPU tensors: forward and backward against plain PyTorch.

Liger knows nothing of the CPU. It asks torch for the accelerator, gets "none", and takes its generic paths;
only one op then checks the device again, see `let_through`.

Every case is a Liger call and the same mathematics in PyTorch. The PyTorch side runs twice: in float64, as the
truth, and in the dtype under test, to show the error of that dtype. Outputs and gradients must be within twice
that error and a few roundings (if a case allows more, it says why); `accuracy.check` proves for each of them
that damage would be noticed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from triton_loom.testing import assert_not_worse

# Read by Liger at import: its MoE kernels otherwise try dozens of tile sizes before their first result.
os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")

pytest.importorskip("liger_kernel")
import liger_kernel.ops as liger
import liger_kernel.ops.dyt

Tensors = tuple[torch.Tensor, ...]
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make DyT's backward believe that this is an npu, for which it uses 20 programs: it sets that number only for
    cuda, xpu and npu, and fails on the unset variable otherwise."""
    monkeypatch.setattr(liger_kernel.ops.dyt, "infer_device", lambda: "npu")


@pytest.fixture(autouse=True)
def fewer_configs_to_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce DyT's autotuner to two configurations: it would compile 18 variants of each kernel."""
    for kernel in (liger_kernel.ops.dyt._dyt_fwd_kernel, liger_kernel.ops.dyt._dyt_bwd_kernel):
        monkeypatch.setattr(kernel, "configs", kernel.configs[::9])


@dataclass(frozen=True)
class Case:
    name: str
    inputs: Callable[[], Tensors]
    wrt: tuple[int, ...]  # which inputs get a gradient
    liger: Callable[..., Any]
    torch: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...] = (FP32, BF16)
    factor: float = 2  # by how much the error may exceed that of eager PyTorch


CASES: list[Case] = []


def compare(
    name: str, inputs: Callable[[], Tensors], wrt: tuple[int, ...], liger: Callable[..., Any], **options: Any
):
    """Decorate the PyTorch side of a comparison with its inputs and the Liger side."""

    def register(reference: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append(Case(name, inputs, wrt, liger, reference, **options))
        return reference

    return register


def upcast(x: torch.Tensor) -> torch.Tensor:
    """Convert to float32, the arithmetic of the kernels; the truth stays in float64."""
    return x if x.dtype == torch.float64 else x.float()


# ---- norms ---------------------------------------------------------------------------------------------


def norm_inputs(*shape: int) -> Tensors:
    return torch.randn(shape) * 1.5 + 0.5, torch.rand(shape[-1]) + 0.5, torch.randn(shape[-1])


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    x = upcast(x)
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


@compare(
    "rms_norm",
    lambda: norm_inputs(3, 11, 257)[:2],
    (0, 1),
    lambda x, w: liger.LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", True),
)
def rms_norm_llama(x, w):
    return rms(x, 1e-6).to(x.dtype) * w


@compare(
    "rms_norm_gemma",
    lambda: norm_inputs(35, 1024)[:2],
    (0, 1),
    lambda x, w: liger.LigerRMSNormFunction.apply(x, w, 1e-5, 1.0, "gemma", False),
)
def rms_norm_gemma(x, w):
    return (rms(x, 1e-5) * (1 + upcast(w))).to(x.dtype)


@compare(
    "fused_add_rms_norm",
    lambda: (torch.randn(2, 13, 300), torch.randn(2, 13, 300), torch.rand(300) + 0.5),
    (0, 1, 2),
    lambda x, r, w: liger.LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6, 0.0, "llama", False),
)
def fused_add_rms_norm(x, r, w):
    s = x + r
    return rms(s, 1e-6).to(s.dtype) * w, s


@compare(
    "modulated_rms_norm",
    lambda: (torch.randn(2, 9, 200), torch.rand(200) + 0.5, torch.randn(2, 200), torch.randn(2, 200)),
    (0, 1, 2, 3),
    lambda x, w, scale, shift: liger.LigerModulatedRMSNormFunction.apply(x, w, scale, shift, 1e-6),
)
def modulated_rms_norm(x, w, scale, shift):
    y = rms(x, 1e-6).to(x.dtype) * w
    return (1 + scale[:, None]) * y + shift[:, None]


@compare(
    "layer_norm",
    lambda: norm_inputs(4, 9, 519),
    (0, 1, 2),
    lambda x, w, b: liger.LigerLayerNormFunction.apply(x, w, b, 1e-5),
)
def layer_norm(x, w, b):
    return F.layer_norm(x, (x.shape[-1],), w, b, 1e-5)


@compare(
    "group_norm",
    lambda: (torch.randn(5, 12, 50) + 0.5, torch.rand(12) + 0.5, torch.randn(12)),
    (0, 1, 2),
    lambda x, w, b: liger.LigerGroupNormFunction.apply(x, w, b, 12, 4, 1e-5),
    dtypes=(FP32,),  # from bf16, Liger's backward does everything, sums included, in bf16
)
def group_norm(x, w, b):
    return F.group_norm(x, 4, w, b, 1e-5)


@compare(
    "poly_norm",
    lambda: (torch.randn(30, 200), torch.rand(3) + 0.2, torch.randn(())),
    (0, 1, 2),
    lambda x, w, b: liger.LigerPolyNormFunction.apply(x, w, b, 1e-6, False),
)
def poly_norm(x, w, b):
    x32, w32, b32 = upcast(x), upcast(w), upcast(b)
    return (w32[0] * rms(x32**3, 1e-6) + w32[1] * rms(x32**2, 1e-6) + w32[2] * rms(x32, 1e-6) + b32).to(
        x.dtype
    )


@compare(
    "dyt",
    lambda: (torch.randn(40, 515), torch.tensor([0.7]), torch.rand(515) + 0.5, torch.randn(515)),
    (0, 1, 2, 3),
    lambda x, alpha, gamma, beta: liger.LigerDyTFunction.apply(x, alpha, gamma, beta),
)
def dyt(x, alpha, gamma, beta):
    return (torch.tanh(upcast(alpha) * upcast(x)) * upcast(gamma) + upcast(beta)).to(x.dtype)


@compare(
    "attn_res",
    lambda: (torch.randn(5, 2, 7, 96), torch.randn(96) * 0.3, torch.rand(96) + 0.5),
    (0, 1, 2),
    lambda v, query, norm: liger.LigerAttnResFunction.apply(v, query, norm, 1e-6),
)
def attn_res(v, query, norm):
    keys = rms(v, 1e-6).to(norm.dtype) * norm
    alpha = torch.softmax((upcast(keys) * upcast(query)).sum(-1), dim=0)
    return (alpha[..., None] * upcast(v)).sum(0).to(v.dtype)


# ---- activations and gates -----------------------------------------------------------------------------


@compare(
    "swiglu",
    lambda: (torch.randn(2, 17, 351) * 2, torch.randn(2, 17, 351)),
    (0, 1),
    lambda a, b: liger.LigerSiLUMulFunction.apply(a, b),
)
def swiglu(a, b):
    return F.silu(upcast(a)).to(b.dtype) * b


@compare(
    "swiglu_gate_up",
    lambda: (torch.randn(31, 2 * 190) * 2,),
    (0,),
    lambda y: liger.LigerFusedGateUpSiLUMulFunction.apply(y, False),
)
def swiglu_gate_up(y):
    return swiglu(*y.chunk(2, dim=-1))


@compare(
    "geglu",
    lambda: (torch.randn(2, 17, 351) * 2, torch.randn(2, 17, 351)),
    (0, 1),
    lambda a, b: liger.LigerGELUMulFunction.apply(a, b),
)
def geglu(a, b):
    return F.gelu(upcast(a), approximate="tanh").to(b.dtype) * b


@compare(
    "relu_squared",
    lambda: (torch.randn(23, 333),),
    (0,),
    lambda x: liger.LigerReLUSquaredFunction.apply(x),
)
def relu_squared(x):
    return F.relu(x).square()


@compare(
    "softmax",
    lambda: (torch.randn(4, 5, 1031) * 3,),
    (0,),
    lambda x: liger.LigerSoftmaxFunction.apply(x),
    factor=16,  # from bf16, its backward multiplies and adds up in bf16
)
def softmax(x):
    return torch.softmax(x, dim=-1)


@compare(
    "sparsemax",
    lambda: (torch.randn(37, 130) * 2,),
    (0,),
    lambda x: liger.LigerSparsemaxFunction.apply(x, -1),
)
def sparsemax(x):
    z = upcast(x).sort(dim=-1, descending=True).values
    count = torch.arange(1, x.shape[-1] + 1)
    support = (z * count > z.cumsum(-1) - 1).sum(-1, keepdim=True)
    tau = (z.cumsum(-1).gather(-1, support - 1) - 1) / support
    return F.relu(upcast(x) - tau).to(x.dtype)


# ---- positions, attention, lookup ----------------------------------------------------------------------


def angles(*shape: int) -> Tensors:
    theta = torch.rand(*shape[:-1], shape[-1] // 2) * 6.28
    return torch.cat([theta, theta], -1).cos(), torch.cat([theta, theta], -1).sin()


def rotate(x, cos, sin):
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], -1) * sin


@compare(
    "rope",
    lambda: (torch.randn(2, 6, 19, 64), torch.randn(2, 2, 19, 64), *angles(1, 19, 64)),
    (0, 1),
    lambda q, k, cos, sin: liger.LigerRopeFunction.apply(q, k, cos, sin),
)
def rope(q, k, cos, sin):
    return rotate(q, cos[:, None], sin[:, None]), rotate(k, cos[:, None], sin[:, None])


@compare(
    "qwen2vl_mrope",
    lambda: (torch.randn(2, 4, 11, 64), torch.randn(2, 2, 11, 64), *angles(3, 2, 11, 64)),
    (0, 1),
    lambda q, k, cos, sin: liger.LigerQwen2VLMRopeFunction.apply(q, k, cos, sin, [8, 12, 12]),
)
def qwen2vl_mrope(q, k, cos, sin):
    def sections(table):
        parts = table.split([8, 12, 12] * 2, dim=-1)
        return torch.cat([part[i % 3] for i, part in enumerate(parts)], -1)[:, None]

    return rotate(q, sections(cos), sections(sin)), rotate(k, sections(cos), sections(sin))


@compare(
    "llama4_rope",
    lambda: (torch.randn(2, 13, 4, 48), torch.randn(2, 13, 2, 48), torch.randn(13, 24, 2)),
    (0, 1),
    lambda q, k, freqs: liger.LigerLlama4RopeFunction.apply(q, k, torch.view_as_complex(freqs)),
    dtypes=(FP32,),
)
def llama4_rope(q, k, freqs):
    def turn(x):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.view_as_complex(freqs)[:, None]).flatten(-2)

    return turn(q), turn(k)


@compare(
    "multi_token_attention",
    lambda: (torch.randn(2, 4, 33, 33), torch.randn(4, 4, 3, 3) * 0.3, torch.randn(4)),
    (0, 1, 2),
    lambda scores, w, b: liger.LigerMultiTokenAttentionFunction.apply(scores, w, b, 1, 1),
    factor=8,  # its softmax backward rounds the products to bf16 before it adds them up
)
def multi_token_attention(scores, w, b):
    future = torch.ones(scores.shape[-2:]).triu(1).bool()
    probs = torch.softmax(scores.masked_fill(future, -1e9), dim=-1)
    return F.conv2d(probs, w, b, padding=1).masked_fill(future, 0)


@compare(
    "neighborhood_attention",
    lambda: tuple(torch.randn(3, 2, 2, 45, 32)),
    (0, 1, 2),
    lambda q, k, v: liger.LigerFusedNeighborhoodAttentionFunction.apply(q, k, v, 7, 2),
    factor=8,  # it uses the softmax above
)
def neighborhood_attention(q, k, v):
    distance = torch.arange(q.shape[-2])[:, None] - torch.arange(q.shape[-2])
    near = (distance.abs() <= 6) & (distance % 2 == 0)
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~near, -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


@compare(
    "embedding",
    lambda: (torch.randn(29, 70), torch.randint(0, 29, (4, 50))),
    (0,),
    lambda table, ids: liger.LigerEmbeddingFunction.apply(table, ids),
)
def embedding(table, ids):
    return F.embedding(ids, table)


@compare(
    "fused_moe",
    lambda: (
        torch.randn(50, 64),
        torch.randn(6, 2 * 32, 64) * 0.2,
        torch.randn(6, 64, 32) * 0.2,
        torch.rand(50, 6).topk(2).indices.int(),
        torch.rand(50, 2),
    ),
    (0, 1, 2, 4),
    lambda x, up, down, index, weight: liger.LigerFusedMoEFunction.apply(x, up, down, index, weight),
    factor=8,  # a routing weight's gradient is a long sum that cancels, and is added up in its own dtype
)
def fused_moe(x, up, down, index, weight):
    out = torch.zeros_like(x)
    for expert in range(up.shape[0]):
        token, slot = (index == expert).nonzero(as_tuple=True)
        hidden = swiglu_gate_up(x[token] @ up[expert].T)
        out = out.index_add(0, token, weight[token, slot, None] * (hidden @ down[expert].T))
    return out


# ---- losses --------------------------------------------------------------------------------------------


def labels(rows: int, classes: int) -> torch.Tensor:
    y = torch.randint(0, classes, (rows,))
    y[1::5] = -100
    return y


def logits_and_labels() -> Tensors:
    return torch.randn(37, 1031) * 3, labels(37, 1031)


@compare(
    "cross_entropy",
    logits_and_labels,
    (0,),
    lambda x, y: liger.LigerCrossEntropyFunction.apply(x, y, None)[0],
)
def cross_entropy(x, y):
    return F.cross_entropy(upcast(x), y).to(x.dtype)


@compare(
    "cross_entropy_per_token",
    logits_and_labels,
    (0,),
    lambda x, y: liger.LigerCrossEntropyFunction.apply(x, y, None, -100, 0.0, 0.0, "none")[0],
)
def cross_entropy_per_token(x, y):
    return F.cross_entropy(upcast(x), y, reduction="none").to(x.dtype)


@compare(
    "cross_entropy_weighted_smoothed_capped",
    lambda: (*logits_and_labels(), torch.rand(1031) + 0.5),
    (0,),
    lambda x, y, w: liger.LigerCrossEntropyFunction.apply(x, y, w, -100, 1e-3, 0.1, "mean", 20.0)[0],
)
def cross_entropy_weighted_smoothed_capped(x, y, w):
    capped = 20 * torch.tanh(upcast(x) / 20)
    loss = F.cross_entropy(capped, y, upcast(w), label_smoothing=0.1)
    valid = y != -100
    z_loss = 1e-3 * capped.logsumexp(-1)[valid].square().mean()
    return (loss + z_loss).to(x.dtype)


@compare(
    "fused_linear_cross_entropy",
    lambda: (torch.randn(37, 64), torch.randn(519, 64) * 0.3, labels(37, 519), torch.randn(519)),
    (0, 1, 3),
    # Chunks add to dw in float32, as the last argument says: by default each of the ten rounds it.
    lambda x, w, y, b: liger.LigerFusedLinearCrossEntropyFunction.apply(
        x, w, y, b, None, -100, 0.0, 0.0, "mean", None, False, torch.float32
    )[0],
)
def fused_linear_cross_entropy(x, w, y, b):
    return F.cross_entropy(upcast(x @ w.T + b), y).to(x.dtype)


def two_distributions() -> Tensors:
    return torch.randn(21, 515).log_softmax(-1), (torch.randn(21, 515) * 2).log_softmax(-1)


@compare(
    "kl_div",
    lambda: (two_distributions()[0], two_distributions()[1].exp()),
    (0,),
    lambda x, p: liger.LigerKLDivLossFunction.apply(x, p, "batchmean", False),
)
def kl_div(x, p):
    return F.kl_div(upcast(x), upcast(p), reduction="batchmean")


@compare(
    "kl_div_log_target_elementwise",
    two_distributions,
    (0,),
    lambda x, p: liger.LigerKLDivLossFunction.apply(x, p, "none", True),
)
def kl_div_log_target_elementwise(x, p):
    return F.kl_div(upcast(x), upcast(p), reduction="none", log_target=True)


def generalized_jsd(x, y, beta):
    x, y = upcast(x), upcast(y)
    if beta == 0:
        return F.kl_div(x, y, reduction="batchmean", log_target=True)
    if beta == 1:
        return F.kl_div(y, x, reduction="batchmean", log_target=True)
    m = (beta * y.exp() + (1 - beta) * x.exp()).log()
    to_y, to_x = (F.kl_div(m, side, reduction="batchmean", log_target=True) for side in (y, x))
    return beta * to_y + (1 - beta) * to_x


for beta in (0.0, 0.3, 0.5, 1.0):
    compare(
        f"jsd_{beta}",
        two_distributions,
        (0,),
        lambda x, y, beta=beta: liger.LigerJSDFunction.apply(x, y, None, beta, -100, None, None),
    )(lambda x, y, beta=beta: generalized_jsd(x, y, beta).to(x.dtype))


@compare(
    "fused_linear_jsd",
    lambda: (
        torch.randn(21, 64),
        torch.randn(515, 64) * 0.2,
        torch.randn(21, 48),
        torch.randn(515, 48) * 0.2,
    ),
    (0, 1),
    lambda x, w, tx, tw: liger.LigerFusedLinearJSDFunction.apply(x, w, tx, tw, None, 0.4, -100, 1.5),
)
def fused_linear_jsd(x, w, tx, tw):
    student, teacher = ((upcast(a @ b.T) / 1.5).log_softmax(-1) for a, b in ((x, w), (tx, tw)))
    return generalized_jsd(student, teacher, 0.4)


@compare(
    "fused_linear_kl_div",
    lambda: (torch.randn(21, 64), torch.randn(515, 64) * 0.2, torch.randn(21, 515).softmax(-1)),
    (0, 1),
    lambda x, w, p: liger.LigerFusedLinearKLDivFunction.apply(x, w, p, None, "batchmean", -100, 1.5),
)
def fused_linear_kl_div(x, w, p):
    return kl_div((upcast(x @ w.T) / 1.5).log_softmax(-1), p)


@compare(
    "tvd",
    lambda: tuple(side.exp() for side in two_distributions()),
    (0,),
    lambda p, q: liger.LigerTVDLossFunction.apply(p, q, None, "batchmean"),
    dtypes=(FP32,),  # from bf16, Liger adds the row up in bf16
)
def tvd(p, q):
    return (p - q).abs().sum() / (2 * p.shape[0])


@compare(
    "fused_ce_tvd",
    lambda: (torch.randn(21, 515) * 2, torch.randn(21, 515) * 2, labels(21, 515)),
    (0,),
    lambda x, t, y: liger.LigerFusedCETVDFunction.apply(x, t, y),
)
def fused_ce_tvd(x, t, y):
    x, t = upcast(x), upcast(t)
    total_variation = (x.softmax(-1) - t.softmax(-1)).abs().sum(-1) / 2
    return F.cross_entropy(x, y, reduction="none"), total_variation * (y != -100)


def grpo_inputs() -> Tensors:
    logits = torch.randn(3, 12, 519)
    ids = torch.randint(0, 519, (3, 11))
    logp = (logits[:, :-1] / 0.9).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    mask = (torch.arange(11) < torch.tensor([[11], [6], [9]])).int()
    # Some distance apart: where they agree, the gradient is a difference of nearly equal numbers.
    drift = torch.rand(2, 3, 11) * 0.4 + 0.2
    old, ref = logp + drift[0] * torch.randn(3, 11).sign(), logp + drift[1] * torch.randn(3, 11).sign()
    return logits, old, ref, ids, torch.randn(3), mask


@compare(
    "grpo_loss",
    grpo_inputs,
    (0,),
    lambda x, old, ref, ids, adv, mask: liger.GrpoLossFunction.apply(
        x, old, ref, ids, adv, mask, 0.9, 0.04, 0.2, 0.3, False
    )[0],
    factor=4,  # differences of log-probabilities are exponentiated: their last bits count
)
def grpo_loss(x, old, ref, ids, adv, mask):
    old, ref, adv = upcast(old), upcast(ref), upcast(adv)[:, None]
    logp = (upcast(x[:, :-1]) / 0.9).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    ratio = (logp - old).exp()
    surrogate = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.3) * adv)
    kl = (ref - logp).exp() - (ref - logp) - 1
    per_token = (0.04 * kl - surrogate) * mask
    return (per_token.sum(-1) / mask.sum(-1)).mean()


# ---- the comparison ------------------------------------------------------------------------------------


def as_tuple(outputs: Any) -> Tensors:
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


def outputs_and_gradients(
    function: Callable[..., Any], inputs: Tensors, wrt: tuple[int, ...], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Run `function` on copies of the inputs in `dtype`, and backward from random upstream gradients."""
    leaves = [x.to(dtype, copy=True) if x.is_floating_point() else x.clone() for x in inputs]
    for i in wrt:
        leaves[i].requires_grad_()
    outputs = as_tuple(function(*leaves))
    generator = torch.Generator().manual_seed(5)
    # Values that bfloat16 represents, so that every dtype has the same upstream gradients.
    upstream = [torch.randn(y.shape, generator=generator).to(BF16).to(y.dtype) for y in outputs]
    results = {f"output {i}": y.detach().clone() for i, y in enumerate(outputs)}
    gradients = torch.autograd.grad(outputs, [leaves[i] for i in wrt], upstream)
    return results | {f"gradient {i}": gradient for i, gradient in zip(wrt, gradients, strict=True)}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(
            case,
            dtype,
            id=f"{case.name}-{str(dtype).removeprefix('torch.')}",
            marks=[pytest.mark.slow] if dtype == FP32 and BF16 in case.dtypes else [],
        )
        for case in CASES
        for dtype in case.dtypes
    ],
)
def test_liger(case: Case, dtype: torch.dtype) -> None:
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in case.inputs())
    got = outputs_and_gradients(case.liger, inputs, case.wrt, dtype)
    eager = outputs_and_gradients(case.torch, inputs, case.wrt, dtype)
    truth = outputs_and_gradients(case.torch, inputs, case.wrt, torch.float64)
    assert got.keys() == truth.keys()
    failures = []
    for name in truth:
        try:
            assert_not_worse(got[name], truth[name], eager[name], case.factor)
        except AssertionError as error:
            failures.append(f"{name}: {error}")
    assert not failures, "\n".join(failures)

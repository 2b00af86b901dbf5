"""Mistakes of new users: each is refused with what was wrong and what to do, or works as intended."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import weft
import weft.nn
from weft.cli.names import public_ops

torch.manual_seed(0)
X, W = torch.randn(8, 64), torch.ones(64)
HEAD, LABELS = torch.randn(100, 64), torch.arange(8)
EXPERTS = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]] * 2)
ROWS = weft.row_map(EXPERTS, 4)
Q, K = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 2, 16)
ANGLES = torch.randn(8, 8)
COS, SIN = ANGLES.cos(), ANGLES.sin()
TWICE, PAIRED = torch.cat([ANGLES, ANGLES], -1), ANGLES.repeat_interleave(2, -1)
OTHER = torch.device("meta")


def rope(x: Tensor, cos: Any, sin: Any, *, positions: Any = None, **options: Any) -> Tensor:
    return weft.rope(x, weft.Rotation(cos=cos, sin=sin, **options), positions=positions)


Mistake = tuple[Callable[[], Any], type[Exception], tuple[str, ...]]

# The call, the exception, and parts of its message.
MISTAKES: dict[str, Mistake] = {
    # ---- keywords
    "epsilon": (
        lambda: weft.rms_norm(X, W, epsilon=1e-6), TypeError, ("rms_norm() got", "'epsilon'", "Did you mean 'eps'?"),
    ),
    "a misspelt weight": (lambda: weft.layer_norm(X, weigth=W), TypeError, ("layer_norm() got", "mean 'weight'?")),
    "no keyword at all": (
        lambda: weft.layer_norm(X, zzz=W), TypeError, ("layer_norm() got", "'zzz'; it takes x, weight, bias, eps"),
    ),
    "a loss of a module": (
        lambda: weft.nn.LinearCrossEntropy(64, 100, label_smooth=0.1), TypeError,
        ("LinearCrossEntropy() got", "Did you mean 'label_smoothing'?"),
    ),
    # ---- modules
    "no model to convert": (
        lambda: weft.nn.convert(X, "fp8_block"), TypeError, ("model must be a torch.nn.Module", "got a Tensor"),
    ),
    "a shape for a norm": (
        lambda: weft.nn.RMSNorm((4, 64)), TypeError, ("hidden_size must be an integer", "(4, 64)"),
    ),
    "a shape for another norm": (lambda: weft.nn.LayerNorm((64,)), TypeError, ("hidden_size must be an integer",)),
    # ---- numbers
    "a norm in words": (
        lambda: weft.clip_grads_([X.clone()], "1.0"), TypeError, ("max_norm must be a number", "the str '1.0'"),
    ),
    "no norm": (lambda: weft.clip_grads_([X.clone()], None), TypeError, ("max_norm must be a number; got None",)),
    # ---- labels
    "a pad that is not ignored": (
        lambda: weft.cross_entropy(X, torch.full((8,), -1)), IndexError,
        ("target[0] is -1", "64 classes", "ignore_index, which is -100"),
    ),
    # ---- other libraries' arguments and their order
    "torch's rms_norm": (lambda: weft.rms_norm(X, (64,), W), TypeError, ("weight", "(x, weight, bias)", "last dim")),
    "torch's layer_norm": (lambda: weft.layer_norm(X, [64], W), TypeError, ("weight", "a list", "last dimension")),
    "a size for a weight": (lambda: weft.rms_norm(X, 64), TypeError, ("weight", "the int 64", "no shape is given")),
    "Liger's rms_norm": (lambda: weft.rms_norm(X, W, 1e-6), TypeError, ("bias", "the float 1e-06", "eps=")),
    "eps of layer_norm": (lambda: weft.layer_norm(X, eps=None), TypeError, ("eps must be a number", "None")),
    "Liger's fused linear loss": (
        lambda: weft.linear_cross_entropy(HEAD, X, LABELS), ValueError,
        ("(100, 64), (8, 64)", "hidden states come first"),
    ),
    "Liger's, of log-probabilities": (
        lambda: weft.linear_logprobs(HEAD, X, LABELS), ValueError, ("hidden states come first",),
    ),
    "a head with the vocabulary last": (
        lambda: weft.linear_cross_entropy(X, HEAD.t(), LABELS), ValueError, ("[V, H]", "weight.t()"),
    ),
    "q and k to rope": (
        lambda: rope(Q, K, COS), ValueError, ("(2, 8, 2, 16)", "call it for each", "qkv_prepare"),
    ),
    "torch's layout of logits": (
        lambda: weft.cross_entropy(torch.randn(2, 10, 5), torch.zeros(2, 5).long()), ValueError,
        ("logits.movedim(1, -1)",),
    ),
    "soft targets": (
        lambda: weft.cross_entropy(X, X.softmax(-1)), ValueError,
        ("Soft and one-hot", "argmax(-1)", "torch.nn.functional"),
    ),
    "one-hot targets": (lambda: weft.cross_entropy(X, F.one_hot(LABELS, 64)), ValueError, ("target.argmax(-1)",)),
    "soft targets of a head": (
        lambda: weft.linear_cross_entropy(X, HEAD, torch.rand(8, 100)), ValueError, ("Soft and one-hot",),
    ),
    "flat targets": (
        lambda: weft.cross_entropy(X.view(2, 4, 64), LABELS), ValueError, ("(2, 4)", "target.reshape(2, 4)"),
    ),
    "targets in float": (
        lambda: weft.cross_entropy(X, LABELS.float()), ValueError, ("int32 or int64", "target.long()"),
    ),
    "targets in bytes": (lambda: weft.cross_entropy(X, LABELS.byte()), ValueError, ("int32 or int64", "target.long()")),
    "reciprocal temperature": (lambda: weft.cross_entropy(X, LABELS, scale=2.0), TypeError, ("'scale'",)),
    "a temperature of nothing": (
        lambda: weft.cross_entropy(X, LABELS, temperature=0), ValueError,
        ("temperature must be above 0 and finite", "0"),
    ),
    "no temperature is infinite": (
        lambda: weft.linear_logprobs(X, HEAD, LABELS, temperature=math.inf), ValueError, ("above 0 and finite", "inf"),
    ),
    "NaN for a temperature": (
        lambda: weft.linear_cross_entropy(X, HEAD, LABELS, temperature=math.nan), ValueError, ("temperature", "nan"),
    ),
    "a temperature on the device": (
        lambda: weft.cross_entropy(X, LABELS, temperature=torch.tensor(0.7)), TypeError, ("temperature", ".item()"),
    ),
    # ---- tables of angles
    "neighbors equal": (
        lambda: rope(Q, PAIRED.cos(), PAIRED.sin()), ValueError, ("halves are not equal", "cos[..., ::2]"),
    ),
    "neighbors equal, interleaved": (
        lambda: rope(Q, PAIRED.cos(), PAIRED.sin(), style="interleaved"), ValueError, ("cos[..., ::2]",),
    ),
    "halves equal, interleaved": (
        lambda: rope(Q, TWICE.cos(), TWICE.sin(), style="interleaved"), ValueError, ("each angle once",),
    ),
    "halves of sin not equal": (
        lambda: rope(Q, TWICE.cos(), PAIRED.sin()), ValueError, ("halves are not equal",),
    ),
    "few angles": (
        lambda: rope(Q, COS[:, :4], SIN[:, :4]), ValueError, ("dim=8", "dim=4"),
    ),
    "complex angles": (
        lambda: rope(Q, torch.polar(COS, SIN), SIN), ValueError, ("cos must be", "complex64", "Rotation.from_complex"),
    ),
    "real angles for complex ones": (
        lambda: weft.Rotation.from_complex(COS), TypeError, ("complex numbers, cos + i sin", "float32"),
    ),
    "a style of results": (
        lambda: weft.Rotation(1e4, out_style="halves"), ValueError, ("out_style must be 'neox' or 'interleaved'",),
    ),
    "tables of two dtypes": (lambda: rope(Q, COS, SIN.bfloat16()), ValueError, ("sin must be float32 like",)),
    "too few rows": (lambda: rope(Q, COS[:5], SIN[:5]), ValueError, ("[8 or more, 8]", "(5, 8)")),
    "float positions": (
        lambda: rope(Q, COS, SIN, positions=torch.arange(8.0)), ValueError, ("positions must be int32 or int64",),
    ),
    # ---- images
    "a part of a patch": (
        lambda: weft.patchify(X.view(1, 8, 8, 8), 3), ValueError, ("height 8", "patches of 3", "pad or crop"),
    ),
    "a part of a block": (
        lambda: weft.patchify(X.view(1, 8, 8, 8), 4, merge=4), ValueError, ("patches of 4 in blocks of 4",),
    ),
    "tokens for an image": (
        lambda: weft.patchify(X[None], 2), ValueError, ("four dimensions", "x.unflatten(1, (H, W))"),
    ),
    "a layout of torch": (
        lambda: weft.patchify(X.view(1, 8, 8, 8), 2, layout="NCHW"), ValueError, ("'nhwc' or 'nchw'", "'NCHW'"),
    ),
    "no patch": (lambda: weft.patchify(X.view(1, 8, 8, 8), 0), ValueError, ("patch must be at least 1",)),
    "a mean of other channels": (
        lambda: weft.patchify(X.view(1, 8, 8, 8), 2, mean=(0.5, 0.5, 0.5)), ValueError, ("8 channels; got 3",),
    ),
    "a mean on the device": (
        lambda: weft.patchify(X.view(1, 8, 8, 8), 2, mean=W), TypeError, ("mean must be a number", ".item()"),
    ),
    "no deviation": (lambda: weft.patchify(X.view(1, 8, 8, 8), 2, std=0), ValueError, ("std must not be 0",)),
    # ---- sums
    "terms in a list": (
        lambda: weft.axpby(X, [(0.5, X)]), TypeError, ("terms[0] must be a tensor", "axpby(x, (a, y), z)"),
    ),
    "five terms": (lambda: weft.axpby(X, X, X, X, X), ValueError, ("up to 4 terms; got 5",)),
    "a coefficient for each column": (
        lambda: weft.axpby(X, (W, X)), ValueError, ("the coefficient of terms[0]", "first dimensions", "(64,)"),
    ),
    "a coefficient in words": (lambda: weft.axpby(("2", X)), TypeError, ("x must be a number", "'2'")),
    "a table without a step": (
        lambda: weft.axpby(X, X, coefficients=torch.ones(5, 2)), ValueError, ("pass step=",),
    ),
    "a step of the host": (
        lambda: weft.axpby(X, X, coefficients=torch.ones(5, 2), step=3), TypeError, ("step must be a tensor",),
    ),
    "a step without a table": (lambda: weft.axpby(X, X, step=LABELS[0]), ValueError, ("pass coefficients=",)),
    "a coefficient too few": (
        lambda: weft.axpby(X, X, coefficients=torch.ones(5, 1), step=LABELS[0]), ValueError, ("[steps, 2]",),
    ),
    "a state that overlaps": (
        lambda: weft.axpby(X[1:], X[1:], out=X[:-1]), ValueError, ("out shares memory with t0",),
    ),
    # ---- heads
    "heads of a packed qkv": (
        lambda: weft.Heads(q=4, kv=3, dim=16), ValueError, ("q must be a multiple of kv", "4 and 3"),
    ),
    "heads of q and k": (
        lambda: weft.qkv_prepare(Q[:, :, :3], K, K), ValueError, ("multiple of that of k", "3 and 2"),
    ),
    "k in another dtype": (lambda: weft.qkv_prepare(Q, K.half(), K), ValueError, ("k must be float32 like",)),
    "heads by number": (
        lambda: weft.qkv_prepare(torch.randn(2, 8, 128), heads=4), TypeError, ("weft.Heads(q=32, kv=8, dim=128)",),
    ),
    "tables for a rotation": (
        lambda: weft.rope(Q, COS), TypeError, ("rotation must be a weft.Rotation", "Tensor"),
    ),
    "a tensor for a cache": (
        lambda: weft.qkv_prepare(Q, K, K, cache=torch.zeros(4, 2, 16), slots=torch.arange(16)), TypeError,
        ("cache must be a weft.KVCache", "Tensor"),
    ),
    "slots in a list": (
        lambda: weft.qkv_prepare(Q, K, K, cache=weft.KVCache(*torch.zeros(2, 16, 2, 16)), slots=[*range(16)]),
        TypeError, ("slots must be a tensor", "torch.tensor"),
    ),
    "a list in a cache": (lambda: weft.KVCache([1, 2]), TypeError, ("k must be a tensor",)),
    "a module in a norm of heads": (
        lambda: weft.HeadNorm("rms", nn.RMSNorm(16)), TypeError, ("q_weight", "the module RMSNorm", ".weight"),
    ),
    # ---- modules, lists, arrays, and results of other ops
    "a norm for its weight": (lambda: weft.rms_norm(X, nn.RMSNorm(64)), TypeError, ("the module RMSNorm", ".weight")),
    "a layer for its weight": (
        lambda: weft.linear_cross_entropy(X, nn.Linear(64, 100), LABELS), TypeError, ("the module Linear", ".weight"),
    ),
    "a layer for the router's": (
        lambda: weft.router_linear(X, nn.Linear(64, 8)), TypeError, ("the module Linear", ".weight"),
    ),
    "a module without a weight": (
        lambda: weft.rms_norm(X, nn.Sequential()), TypeError, ("the module Sequential", "one of its tensors"),
    ),
    "ends in a list": (lambda: weft.glu(X, ends=[3, 8]), TypeError, ("ends must be a tensor", "torch.tensor")),
    "targets in a list": (
        lambda: weft.cross_entropy(X, [1] * 8), TypeError, ("target must be a tensor", "torch.tensor"),
    ),
    "an array": (lambda: weft.quantize(X.numpy()), TypeError, ("x must be a tensor", "torch.from_numpy")),
    "experts for rows": (
        lambda: weft.permute(X, EXPERTS), TypeError, ("weft.RowMap", "weft.row_map(indices, experts)"),
    ),
    "experts for rows, back": (lambda: weft.unpermute(X, EXPERTS), TypeError, ("weft.RowMap", "weft.row_map")),
    "all of a routing": (
        lambda: weft.row_map(weft.route(torch.randn(4, 8), 2), 8), TypeError, ("got a Routing", ".indices"),
    ),
    "a group for a shard": (
        lambda: weft.cross_entropy(X, LABELS, shard=object()), TypeError, ("weft.VocabShard", "VocabShard.of"),
    ),
    "a scale on the host": (
        lambda: weft.rms_norm(X, quantize="tensor", quant_scale=0.1), TypeError, ("quant_scale must be a tensor",),
    ),
    "formats in a list": (lambda: weft.quantize(X, ["mx"]), TypeError, ("a format is a weft.Format or its name",)),
    "an amax on the host": (lambda: weft.scale_from_amax(3.0), TypeError, ("amax must be a tensor",)),
    # ---- dtypes, devices, layouts
    "codes without a format": (
        lambda: weft.rms_norm(X, out_dtype=torch.int8), ValueError, ("out_dtype", "torch.int8", "quantize="),
    ),
    "a dtype by its name": (lambda: weft.glu(X, out_dtype="bf16"), ValueError, ("out_dtype", "'bf16'")),
    "another device": (lambda: weft.rms_norm(X, W.to(OTHER)), ValueError, ("weight must be on cpu", "on meta")),
    "carried on another device": (
        lambda: weft.unpermute(weft.permute(X, ROWS), ROWS, carried=torch.rand(16, device=OTHER)), ValueError,
        ("carried must be on cpu", "on meta"),
    ),
    "out on another device": (
        lambda: weft.rms_norm(X, out=torch.empty(8, 64, device=OTHER)), ValueError, ("out must be on cpu", "on meta"),
    ),
    "a residual in float64": (
        lambda: weft.rms_norm(X, W, residual=X.double()), ValueError, ("must be bfloat16, float16 or float32",),
    ),
    "a plain one beside a float64": (
        lambda: weft.rms_norm(X.double(), W, residual=X), ValueError, ("residual must be float64 like",),
    ),
    "no sum to leave unrounded": (
        lambda: weft.rms_norm(X, W, unrounded_sum=True), ValueError, ("unrounded_sum= needs residual=",),
    ),
    "complex numbers": (lambda: weft.glu(X.to(torch.complex64)), ValueError, ("x must be", "complex64")),
    "raw FP8": (lambda: weft.rms_norm(X.to(torch.float8_e4m3fn)), ValueError, ("x must be", "float8_e4m3fn")),
    "one number": (lambda: weft.glu(torch.tensor(1.0)), ValueError, ("x must have at least one dimension",)),
    "a sparse tensor": (lambda: weft.rms_norm(X.to_sparse(), W), TypeError, ("dense", "sparse_coo", ".to_dense()")),
    "a nested tensor": (
        lambda: weft.rms_norm(torch.nested.nested_tensor([X, X], layout=torch.jagged), W), TypeError,
        ("dense", "jagged", "pads"),
    ),
    # ---- numbers
    "a negative eps": (lambda: weft.rms_norm(X, eps=-1e-6), ValueError, ("eps must be at least 0",)),
    "eps in words": (lambda: weft.rms_norm(X, eps="1e-6"), TypeError, ("eps must be a number", "'1e-6'")),
    "eps on the device": (lambda: weft.gated_norm(X, X, eps=torch.tensor(1e-6)), TypeError, ("eps", ".item()")),
    "half a row": (lambda: weft.row_map(EXPERTS, 4, align=1.5), TypeError, ("align must be an integer", "1.5")),
    "half an expert": (lambda: weft.route(X, 2.5), TypeError, ("k must be an integer", "2.5")),
    "no number of groups": (
        lambda: weft.gated_norm(X, X, groups=None), TypeError, ("groups must be an integer", "None"),
    ),
    "no index to ignore": (
        lambda: weft.cross_entropy(X, LABELS, ignore_index=None), TypeError, ("ignore_index must be an integer",),
    ),
    "a limit in words": (lambda: weft.glu(X, limit="7"), TypeError, ("limit must be a number", "'7'")),
    "a scale of NaN": (lambda: weft.route(X, 2, scale=math.nan), ValueError, ("scale must be a number", "nan")),
    "three parts of a modulation": (
        lambda: weft.layer_norm(X, modulation=(W, W, W)), TypeError, ("modulation must be (scale, shift)",),
    ),
    "a routing of no kind": (
        lambda: weft.route(X, 2, convention="llama4"), ValueError,
        ("megatron", "sglang", "qwen3", "deepseek_v3", "'llama4'"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake(mistake: str) -> None:
    call, exception, words = MISTAKES[mistake]
    with pytest.raises(exception) as raised:
        call()
    assert raised.type is exception
    for word in words:
        assert word in str(raised.value), word


# ---- other objects in place of every tensor ----------------------------------------------------------------

Y = weft.permute(X, ROWS)
HEADS, PAGES = torch.randn(1, 2, 8, 64), torch.randn(3, 4, 1, 64)  # of attention
CALLS: dict[str, dict[str, Any]] = {
    "rms_norm": {"x": X, "weight": W, "bias": W, "residual": X, "pre_bias": W, "residual_gate": W},
    "layer_norm": {"x": X, "weight": W, "bias": W, "modulation": torch.randn(8, 128)},
    "gated_norm": {"x": X, "gate": X, "weight": W},
    "glu": {"x": X, "probs": torch.rand(8), "ends": torch.tensor([3, 8])},
    "glu_backward": {"dy": X, "x": X, "up": X, "probs": torch.rand(8), "ends": torch.tensor([3, 8])},
    "axpby": {
        "x": X, "coefficients": torch.ones(3, 1), "step": torch.tensor(0), "out": torch.zeros(8, 64),
    },
    "patchify": {"x": torch.randn(2, 4, 6, 3), "patch": 2, "quantize": "tensor", "quant_scale": torch.ones(())},
    "quantize": {"x": X, "format": "tensor", "scale": torch.ones(())},
    "dequantize": {"q": weft.quantize(X)},
    "route": {"logits": X, "k": 2, "convention": "vllm", "bias": W},
    "linear": {"x": X, "weight": HEAD, "bias": torch.randn(100)},
    "experts": {
        "x": X, "up": torch.randn(4, 32, 64), "down": torch.randn(4, 64, 16), "routing": weft.route(X[:, :4], 2),
    },
    "grouped_matmul": {"x": X, "w": torch.randn(2, 10, 64), "ends": torch.tensor([3, 8]), "bias": torch.randn(2, 10)},
    "attention": {
        "query": HEADS, "key": HEADS, "value": HEADS, "sinks": torch.randn(2), "kv_lengths": torch.tensor([5]),
    },
    "attention_decode": {
        "query": HEADS[0].transpose(0, 1)[:1], "cache": weft.KVCache(PAGES, PAGES),
        "page_table": torch.zeros(1, 2, dtype=torch.int32), "lengths": torch.tensor([5]), "sinks": torch.randn(2),
    },
    "mla_decode": {
        "query": torch.randn(1, 2, 576), "cache": weft.KVCache(torch.randn(3, 4, 1, 576)), "scale": 1.0,
        "page_table": torch.zeros(1, 2, dtype=torch.int32), "lengths": torch.tensor([5]),
    },
    "grouped_wgrad": {"dy": X, "x": X, "ends": torch.tensor([3, 8])},
    "matmul": {
        "a": X, "b": HEAD.t(), "bias": torch.zeros(100), "residual": torch.zeros(8, 100), "out": torch.zeros(8, 100),
    },
    "router_linear": {"x": X, "weight": HEAD, "bias": torch.zeros(100)},
    "row_map": {"routing": EXPERTS, "experts": 4},
    "permute": {"x": X, "rows": ROWS, "probs": torch.rand(8, 2)},
    "unpermute": {"y": Y, "rows": ROWS, "probs": torch.rand(8, 2), "carried": torch.rand(len(Y))},
    "process_logits": {
        "logits": X, "counts": torch.ones(8, 64, dtype=torch.int32), "prompt": X > 0, "bias": W,
        "allowed": torch.ones(8, 2, dtype=torch.int32), "out": torch.zeros(8, 64),
    },
    "rope": {"x": Q, "rotation": weft.Rotation(1e4), "positions": torch.arange(8)},
    "qkv_prepare": {
        "qkv": Q, "k": K, "v": K, "rotation": weft.Rotation(1e4), "positions": torch.arange(8),
        "cache": weft.KVCache(*torch.zeros(2, 16, 2, 16)), "slots": torch.arange(16),
    },
    "cross_entropy": {"logits": X, "target": LABELS, "class_weight": W},
    "linear_cross_entropy": {
        "hidden": X, "weight": HEAD, "target": LABELS, "bias": torch.zeros(100), "class_weight": torch.ones(100),
    },
    "embedding": {"ids": LABELS, "weight": HEAD, "main_grad": torch.zeros(100, 64)},
    "gather_rows": {"x": X, "index": LABELS},
    "index_add_": {"out": torch.zeros(100, 64), "index": LABELS, "x": X},
    "segment_sum": {"x": X, "ends": torch.tensor([3, 8])},
    "linear_logprobs": {"hidden": X, "weight": HEAD, "target": LABELS, "bias": torch.zeros(100)},
    "verify": {
        "logits": X.view(2, 4, 64), "drafts": LABELS[:6].view(2, 3), "draft_probs": torch.rand(2, 3, 64),
        "seed": 0, "step": 0,
    },
    "sample": {"logits": X, "seed": 0, "step": 0},
    "top_k": {"x": X, "k": 3, "ends": LABELS},
    "linear_sample": {
        "hidden": X, "weight": HEAD, "bias": torch.zeros(100), "seed": LABELS, "step": torch.tensor([3]),
    },
    "softmax": {"x": X},
    "log_softmax": {"x": X},
    "logsumexp": {"x": X},
    "cumsum": {"x": X},
    "l2_normalize": {"x": X},
    "xielu": {"x": X, "alpha_p": torch.zeros(1), "alpha_n": torch.zeros(1)},
    "group_norm": {"x": X, "groups": 4, "weight": W, "bias": W},
    "scale_from_amax": {"amax": torch.tensor(3.0), "format": "tensor"},
}  # fmt: skip
OF_LISTS = (
    "any_nonfinite",
    "clip_grads_",
    "count_zeros",
    "grad_norm",
    "merge_attention",
)  # functions that take lists of tensors
NO_TENSORS: dict[str, Any] = {
    "nothing": None, "a number": 1.0, "a list": [1, 2], "a tuple": (64,), "a string": "x", "a module": nn.Linear(4, 4),
    "an array": torch.ones(3).numpy(), "a row map": ROWS, "a dictionary": {},
}  # fmt: skip


@pytest.mark.parametrize("name", public_ops())
def test_an_unknown_keyword_is_refused_by_the_public_name(name: str) -> None:
    """Regression: a norm passed its options on, and the error named a private function."""
    function = public_ops()[name]
    with pytest.raises(TypeError, match=rf"^{name}\(\) (got an unexpected keyword argument|missing)"):
        function(no_such_keyword=1)
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'no_such_keyword'"):
        function(*([X] * len(_needed(function))), no_such_keyword=1)


def _needed(function: Callable[..., Any]) -> list[str]:
    """Return the positional arguments without a default."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]


def test_a_misspelt_op_is_suggested_by_python() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rmsnorm'") as raised:
        weft.rmsnorm  # noqa: B018
    assert (raised.value.name, raised.value.obj) == ("rmsnorm", weft)


def test_every_function_of_tensors_is_tested() -> None:
    functions = {name for name in weft.__all__ if inspect.isfunction(getattr(weft, name))}
    of_tensors = {name for name in functions if "Tensor" in str(inspect.signature(getattr(weft, name)))}
    assert of_tensors - {"capture"} == CALLS.keys() | set(
        OF_LISTS
    )  # capture is tested in tests/runtime/test_graphs.py


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_that_is_not_a_tensor_is_named(name: str) -> None:
    """Other objects in place of a tensor are refused with a TypeError that names the argument."""
    function, call = getattr(weft, name), CALLS[name]
    optional = {p.name for p in inspect.signature(function).parameters.values() if p.default is None}
    function(**call)
    for argument, value in call.items():
        if not isinstance(value, Tensor):
            continue
        named = {"q": "QTensor"}.get(argument, argument)
        for what, wrong in NO_TENSORS.items():
            if wrong is None and argument in optional:
                continue
            with pytest.raises(TypeError) as raised:
                function(**{**call, argument: wrong})
            assert named in str(raised.value), f"{argument} is {what}: {raised.value}"
        if name not in ("dequantize", "scale_from_amax"):
            with pytest.raises((TypeError, ValueError), match=argument):
                function(**{**call, argument: value.to_sparse()})


# ---- calls that work as intended ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_eps_none_means_the_eps_of_torch(dtype: torch.dtype) -> None:
    """Use rows so small that eps decides, and bf16's own eps would differ."""
    x = (X * 1e-4).to(dtype)
    truth = x.double() / (x.double().square().mean(-1, keepdim=True) + torch.finfo(_wide(dtype)).eps).sqrt()
    for got in (
        weft.rms_norm(x, eps=None),
        F.rms_norm(x, (64,)),
        weft.gated_norm(x, torch.full_like(x, 100.0), eps=None),
        weft.qkv_prepare(x.view(8, 1, 64), x.view(8, 1, 64), norm=weft.HeadNorm(eps=None)).q.view(8, 64),
    ):
        torch.testing.assert_close(got.double(), truth, rtol=2 * torch.finfo(dtype).eps, atol=0.0)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


@pytest.mark.parametrize("rotated", [16, 8])
def test_tables_as_transformers_makes_them(rotated: int) -> None:
    """Tables [S, D], [1, S, D] and [B, S, D] give the bits of tables with each angle once. So it is for a whole head or
    part of it, with gradients, and under torch.compile."""
    angles = torch.randn(2, 8, rotated // 2)
    once, twice = (angles.cos(), angles.sin()), [torch.cat([t, t], -1) for t in (angles.cos(), angles.sin())]
    part: dict[str, Any] = {} if rotated == 16 else {"dim": rotated}
    for index in (slice(None), slice(1), 0):
        tables, doubled = [t[index] for t in once], [t[index] for t in twice]
        leaf = Q.clone().requires_grad_()
        wanted, got = rope(leaf, *tables, **part), rope(leaf, *doubled, **part)
        assert torch.equal(got, wanted)
        assert torch.equal(*(torch.autograd.grad(y, leaf, Q.flip(0))[0] for y in (got, wanted)))
        rotations = [weft.Rotation(cos=cos, sin=sin, **part) for cos, sin in (tables, doubled)]
        both = [weft.qkv_prepare(Q, K, K, rotation=rotation)[:3] for rotation in rotations]
        assert all(map(torch.equal, *both))
        compiled = torch.compile(lambda *args: rope(*args, **part), fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(Q, *doubled), wanted)


def test_tables_on_a_device_or_traced_are_not_inspected() -> None:
    """No element is read there, so wrong tables are not refused."""
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (Q, PAIRED, PAIRED)]
        assert rope(*fake).shape == Q.shape
    assert rope(*(t.to(OTHER) for t in (Q, PAIRED, PAIRED))).shape == Q.shape


def test_liger_s_swiglu_has_the_same_arguments() -> None:
    torch.testing.assert_close(weft.glu(X, X.flip(0)), F.silu(X) * X.flip(0))


def test_square_logits_are_read_as_documented() -> None:
    """If classes and tokens are equally many, shapes cannot reveal torch's layout: the documented one applies."""
    logits, target = torch.randn(2, 5, 5), torch.randint(0, 5, (2, 5))
    wanted = F.cross_entropy(logits.movedim(-1, 1), target)
    torch.testing.assert_close(weft.cross_entropy(logits, target), wanted)
    torch.testing.assert_close(
        weft.cross_entropy(logits.movedim(1, -1), target), F.cross_entropy(logits, target)
    )


def test_a_scalar_may_be_an_integer_or_from_numpy() -> None:
    """Integers and NumPy scalars, as found in configurations, and varying scalars under torch.compile."""
    wanted = weft.cross_entropy(X, LABELS, temperature=2.0, softcap=30.0)
    array = torch.tensor([2.0, 30.0], dtype=torch.float32).numpy()
    assert torch.equal(weft.cross_entropy(X, LABELS, temperature=array[0], softcap=array[1]), wanted)
    assert torch.equal(weft.cross_entropy(X, LABELS, temperature=2, softcap=30), wanted)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def f(x: Tensor, eps: float, temperature: float, groups: int) -> Tensor:
        y = weft.gated_norm(weft.rms_norm(x, W, eps=eps), x, groups=groups)
        return weft.cross_entropy(y, LABELS, temperature=temperature)

    for eps, temperature, groups in ((1e-5, 0.7, 2), (1e-3, 1.5, 4)):
        y = weft.gated_norm(weft.rms_norm(X, W, eps=eps), X, groups=groups)
        wanted = weft.cross_entropy(y, LABELS, temperature=temperature)
        torch.testing.assert_close(f(X, eps, temperature, groups), wanted)


# ---- one vocabulary ----------------------------------------------------------------------------------------


def test_losses_share_names_and_defaults() -> None:
    """Arguments that two of the three losses have in common have equal names and defaults."""
    functions = (weft.cross_entropy, weft.linear_cross_entropy, weft.linear_logprobs)
    names = [dict(inspect.signature(f).parameters) for f in functions]
    for name in ("temperature", "softcap", "ignore_index", "return_lse", "return_entropy", "shard"):
        assert len({str(parameters[name]) for parameters in names}) == 1, name
    for name in ("class_weight", "label_smoothing", "z_loss", "reduction", "all_ignored", "return_accuracy"):
        assert len({str(parameters[name]) for parameters in names[:2]}) == 1, name
    assert not {"scale", "entropy", "lse"} & set().union(*names)


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 3])
def test_temperature_divides_the_logits_of_all_losses(temperature: float) -> None:
    """Division follows the softcap; powers of two change only the exponents."""
    logits = X @ HEAD.t()
    capped = 20.0 * torch.tanh(logits.double() / 20.0) / temperature
    wanted = torch.log_softmax(capped, -1).gather(1, LABELS[:, None])[:, 0]
    options: dict[str, Any] = {"softcap": 20.0, "temperature": temperature}
    every: dict[str, Any] = {**options, "reduction": "none", "return_lse": True, "return_entropy": True}
    losses = [
        weft.cross_entropy(logits, LABELS, **every),
        weft.linear_cross_entropy(X, HEAD, LABELS, **every),
    ]
    logprobs_result = weft.linear_logprobs(X, HEAD, LABELS, return_lse=True, return_entropy=True, **options)
    assert logprobs_result._fields[1:3] == losses[0]._fields[1:3] == ("lse", "entropy")
    for logprobs, lse, entropy in (
        logprobs_result[:3],
        *((-loss.loss, loss.lse, loss.entropy) for loss in losses),
    ):
        torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), torch.logsumexp(capped, -1), rtol=1e-5, atol=1e-5)
        entropy_of_softmax = torch.distributions.Categorical(logits=capped).entropy()
        torch.testing.assert_close(entropy.double(), entropy_of_softmax, rtol=1e-5, atol=1e-5)
    if temperature in (0.5, 1.0):
        assert torch.equal(
            weft.cross_entropy(logits, LABELS, temperature=temperature),
            weft.cross_entropy(logits / temperature, LABELS),
        )

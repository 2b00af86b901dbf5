"""Weft: fused kernels for training and serving large language models, proven before they meet a GPU."""

import importlib
import re
import sys
import warnings
from typing import TYPE_CHECKING

# Importing torch without NumPy installed raises a warning. Weft does not need NumPy, so it hides that warning; a NumPy
# that is installed but broken is still reported. The filter stays: `catch_warnings` would undo torch's own filters.
if "torch" not in sys.modules:
    warnings.filterwarnings("ignore", "Failed to initialize NumPy: No module named 'numpy'", UserWarning)

import torch

from .language import OLDEST_TORCH

if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < OLDEST_TORCH:
    raise ImportError(
        f"Weft needs PyTorch {'.'.join(map(str, OLDEST_TORCH))} or later, the first release with Triton 3.7; found "
        f"{torch.__version__}: pip install --upgrade torch"
    )

from . import interop
from .graphs import capture
from .ops import (
    QKV,
    Attention,
    DelayedScaling,
    HeadNorm,
    Heads,
    KVCache,
    Recipe,
    Relaxed,
    Rotation,
    RowMap,
    Shards,
    Verified,
    VocabShard,
    any_nonfinite,
    attention,
    attention_decode,
    axpby,
    clip_grads_,
    count_zeros,
    cross_entropy,
    cumsum,
    dequantize,
    embedding,
    experts,
    gated_norm,
    gather_rows,
    glu,
    glu_backward,
    grad_norm,
    group_norm,
    grouped_matmul,
    grouped_wgrad,
    index_add_,
    l2_normalize,
    layer_norm,
    linear,
    linear_cross_entropy,
    linear_logprobs,
    linear_sample,
    log_softmax,
    logsumexp,
    matmul,
    merge_attention,
    mla_decode,
    patchify,
    permute,
    pointwise,
    process_logits,
    qkv_prepare,
    quantize,
    record_engines,
    reuse_weights,
    rms_norm,
    rope,
    route,
    router_linear,
    row_map,
    rowwise,
    sample,
    segment_sum,
    softmax,
    top_k,
    unpermute,
    verify,
    xielu,
)
from .quant import Format, QTensor, layouts, scale_from_amax
from .runtime import Capabilities, backend, catalogue, set_backend, workspace

if TYPE_CHECKING:
    from . import nn
    from .integrations.fusion import compile_pass
    from .nn.calibrate import calibrate

__version__ = "0.1.0"

__all__ = [
    "QKV",
    "Attention",
    "Capabilities",
    "DelayedScaling",
    "Format",
    "HeadNorm",
    "Heads",
    "KVCache",
    "QTensor",
    "Recipe",
    "Relaxed",
    "Rotation",
    "RowMap",
    "Shards",
    "Verified",
    "VocabShard",
    "any_nonfinite",
    "attention",
    "attention_decode",
    "axpby",
    "backend",
    "calibrate",
    "capture",
    "catalogue",
    "clip_grads_",
    "compile_pass",
    "count_zeros",
    "cross_entropy",
    "cumsum",
    "dequantize",
    "embedding",
    "experts",
    "gated_norm",
    "gather_rows",
    "glu",
    "glu_backward",
    "grad_norm",
    "group_norm",
    "grouped_matmul",
    "grouped_wgrad",
    "index_add_",
    "interop",
    "l2_normalize",
    "layer_norm",
    "layouts",
    "linear",
    "linear_cross_entropy",
    "linear_logprobs",
    "linear_sample",
    "log_softmax",
    "logsumexp",
    "matmul",
    "merge_attention",
    "mla_decode",
    "nn",
    "patchify",
    "permute",
    "pointwise",
    "process_logits",
    "qkv_prepare",
    "quantize",
    "record_engines",
    "reuse_weights",
    "rms_norm",
    "rope",
    "route",
    "router_linear",
    "row_map",
    "rowwise",
    "sample",
    "scale_from_amax",
    "segment_sum",
    "set_backend",
    "softmax",
    "top_k",
    "unpermute",
    "verify",
    "workspace",
    "xielu",
]


def __getattr__(name: str) -> object:
    """Import `weft.nn`, `weft.aot`, `weft.calibrate` and `weft.compile_pass` on first use."""
    if name in ("nn", "aot"):
        return importlib.import_module(f".{name}", __name__)
    if name == "calibrate":
        return importlib.import_module(".nn", __name__).calibrate
    if name == "compile_pass":
        return importlib.import_module(".integrations.fusion", __name__).compile_pass
    # Given the name and this module, Python itself adds "Did you mean".
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__]
    )

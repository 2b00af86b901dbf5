"""Weft: fused kernels for training and serving large language models, proven before they meet a GPU."""

from .ops import (
    RowMap,
    Shards,
    any_nonfinite,
    clip_grads_,
    count_zeros,
    dequantize,
    gated_norm,
    glu,
    glu_backward,
    grad_norm,
    layer_norm,
    permute,
    qkv_prepare,
    quantize,
    rms_norm,
    rope,
    route,
    router_linear,
    row_map,
    unpermute,
)
from .quant import Format, QTensor, layouts, scale_from_amax
from .runtime import Capabilities, backend, catalogue

__version__ = "0.1.0"

__all__ = [
    "Capabilities",
    "Format",
    "QTensor",
    "RowMap",
    "Shards",
    "any_nonfinite",
    "backend",
    "catalogue",
    "clip_grads_",
    "count_zeros",
    "dequantize",
    "gated_norm",
    "glu",
    "glu_backward",
    "grad_norm",
    "layer_norm",
    "layouts",
    "permute",
    "qkv_prepare",
    "quantize",
    "rms_norm",
    "rope",
    "route",
    "router_linear",
    "row_map",
    "scale_from_amax",
    "unpermute",
]

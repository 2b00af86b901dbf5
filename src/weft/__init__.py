"""Weft: fused kernels for training and serving large language models, proven before they meet a GPU."""

from .ops import (
    RowMap,
    dequantize,
    glu,
    glu_backward,
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
    "backend",
    "catalogue",
    "dequantize",
    "glu",
    "glu_backward",
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

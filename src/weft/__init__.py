"""Weft: fused kernels for training and serving large language models, proven before they meet a GPU."""

from .ops import (
    RowMap,
    cross_entropy,
    dequantize,
    glu,
    glu_backward,
    layer_norm,
    linear_cross_entropy,
    linear_logprobs,
    permute,
    quantize,
    rms_norm,
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
    "cross_entropy",
    "dequantize",
    "glu",
    "glu_backward",
    "layer_norm",
    "layouts",
    "linear_cross_entropy",
    "linear_logprobs",
    "permute",
    "quantize",
    "rms_norm",
    "route",
    "router_linear",
    "row_map",
    "scale_from_amax",
    "unpermute",
]

"""Weft: fused kernels for training and serving large language models, proven before they meet a GPU."""

from .ops import dequantize, layer_norm, quantize, rms_norm, route, router_linear
from .quant import Format, QTensor, layouts, scale_from_amax
from .runtime import Capabilities, backend, catalogue

__version__ = "0.1.0"

__all__ = [
    "Capabilities",
    "Format",
    "QTensor",
    "backend",
    "catalogue",
    "dequantize",
    "layer_norm",
    "layouts",
    "quantize",
    "rms_norm",
    "route",
    "router_linear",
    "scale_from_amax",
]

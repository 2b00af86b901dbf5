"""The ops, one file a family. Importing this package fills the catalogue."""

from .norm import layer_norm, rms_norm
from .quantize import dequantize, quantize
from .route import CONVENTIONS, Convention, Routing, route
from .router_linear import router_linear

__all__ = [
    "CONVENTIONS",
    "Convention",
    "Routing",
    "dequantize",
    "layer_norm",
    "quantize",
    "rms_norm",
    "route",
    "router_linear",
]

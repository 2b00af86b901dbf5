"""The ops, one file a family. Importing this package fills the catalogue."""

from .glu import glu, glu_backward
from .norm import layer_norm, rms_norm
from .permute import RowMap, permute, row_map, unpermute
from .quantize import dequantize, quantize
from .rope import qkv_prepare, rope
from .route import CONVENTIONS, Convention, Routing, route
from .router_linear import router_linear

__all__ = [
    "CONVENTIONS",
    "Convention",
    "Routing",
    "RowMap",
    "dequantize",
    "glu",
    "glu_backward",
    "layer_norm",
    "permute",
    "qkv_prepare",
    "quantize",
    "rms_norm",
    "rope",
    "route",
    "router_linear",
    "row_map",
    "unpermute",
]

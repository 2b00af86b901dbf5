"""The ops, one file a family. Importing this package fills the catalogue."""

from .cross_entropy import CrossEntropy, cross_entropy
from .glu import glu, glu_backward
from .linear_cross_entropy import linear_cross_entropy
from .linear_logprobs import LogProbs, linear_logprobs
from .norm import layer_norm, rms_norm
from .permute import RowMap, permute, row_map, unpermute
from .quantize import dequantize, quantize
from .route import CONVENTIONS, Convention, Routing, route
from .router_linear import router_linear

__all__ = [
    "CONVENTIONS",
    "Convention",
    "CrossEntropy",
    "LogProbs",
    "Routing",
    "RowMap",
    "cross_entropy",
    "dequantize",
    "glu",
    "glu_backward",
    "layer_norm",
    "linear_cross_entropy",
    "linear_logprobs",
    "permute",
    "quantize",
    "rms_norm",
    "route",
    "router_linear",
    "row_map",
    "unpermute",
]

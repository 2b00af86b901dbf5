"""The ops, one file a family. Importing this package fills the catalogue."""

from .glu import glu, glu_backward
from .norm import layer_norm, rms_norm
from .permute import RowMap, permute, row_map, unpermute
from .quantize import dequantize, quantize

__all__ = [
    "RowMap",
    "dequantize",
    "glu",
    "glu_backward",
    "layer_norm",
    "permute",
    "quantize",
    "rms_norm",
    "row_map",
    "unpermute",
]

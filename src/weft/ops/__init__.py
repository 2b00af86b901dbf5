"""The ops, one file a family. Importing this package fills the catalogue."""

from .glu import glu, glu_backward
from .norm import layer_norm, rms_norm
from .quantize import dequantize, quantize

__all__ = ["dequantize", "glu", "glu_backward", "layer_norm", "quantize", "rms_norm"]

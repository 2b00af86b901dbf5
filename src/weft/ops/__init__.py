"""The ops, one file a family. Importing this package fills the catalogue."""

from .cross_entropy import cross_entropy
from .gated_norm import gated_norm
from .glu import glu, glu_backward
from .gradients import Shards
from .linear_cross_entropy import linear_cross_entropy
from .linear_logprobs import LogProbs, linear_logprobs
from .losses import CrossEntropy
from .multi_tensor import any_nonfinite, clip_grads_, count_zeros, grad_norm
from .norm import layer_norm, rms_norm
from .permute import RowMap, permute, row_map, unpermute
from .quantize import dequantize, quantize
from .rope import qkv_prepare, rope
from .route import CONVENTIONS, Convention, Routing, route
from .router_linear import router_linear
from .vocabulary import VocabShard

__all__ = [
    "CONVENTIONS",
    "Convention",
    "CrossEntropy",
    "LogProbs",
    "Routing",
    "RowMap",
    "Shards",
    "VocabShard",
    "any_nonfinite",
    "clip_grads_",
    "count_zeros",
    "cross_entropy",
    "dequantize",
    "gated_norm",
    "glu",
    "glu_backward",
    "grad_norm",
    "layer_norm",
    "linear_cross_entropy",
    "linear_logprobs",
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

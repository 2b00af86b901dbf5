"""The ops, one file a family. Importing this package fills the catalogue."""

from .glu.glu import glu, glu_backward
from .gradients import Shards
from .loss.cross_entropy import cross_entropy
from .loss.linear_cross_entropy import linear_cross_entropy
from .loss.linear_logprobs import LogProbs, linear_logprobs
from .loss.losses import CrossEntropy
from .loss.vocabulary import VocabShard
from .moe.permute import permute, unpermute
from .moe.route import CONVENTIONS, Convention, Routing, route
from .moe.router_linear import router_linear
from .moe.row_map import RowMap, row_map
from .multi_tensor import any_nonfinite, clip_grads_, count_zeros, grad_norm
from .norm.gated import gated_norm
from .norm.norm import layer_norm, rms_norm
from .quantize import dequantize, quantize
from .rope import qkv_prepare, rope

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

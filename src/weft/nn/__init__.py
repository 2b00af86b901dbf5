"""Modules built on Weft's functions, with the checkpoint names of Llama, Qwen3 and DeepSeek in transformers, and
the conversion of models that have modules of their own.

Each `forward` is a few calls of public functions. A `recipe=` sets the format in which products are computed; a norm,
gated unit or attention before a layer with a quantized recipe writes the codes itself.
"""

from ..report import Report
from .attention import Attention, LatentAttention, Pages, Rotary
from .calibrate import calibrate
from .convert import convert
from .decoder import DecoderLayer
from .fold import fold_norm
from .gather import gather_quantized
from .head import LinearCrossEntropy
from .linear import GroupedLinear, Linear, Numbers, numbers_for
from .mlp import GLU
from .moe import Experts, MoE, Router
from .norm import LayerNorm, RMSNorm
from .scales import Calibration

__all__ = [
    "GLU",
    "Attention",
    "Calibration",
    "DecoderLayer",
    "Experts",
    "GroupedLinear",
    "LatentAttention",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropy",
    "MoE",
    "Numbers",
    "Pages",
    "RMSNorm",
    "Report",
    "Rotary",
    "Router",
    "calibrate",
    "convert",
    "fold_norm",
    "gather_quantized",
    "numbers_for",
]

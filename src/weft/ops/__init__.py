"""All ops, one folder per family. Importing this package fills the catalogue and lets QTensors call ops. Kernels are
imported by the first call that launches one."""

import importlib
import pkgutil

from ..quant.qtensor import Ops, connect
from .attention.attention import Attention, attention
from .attention.decode.decode import attention_decode, mla_decode
from .attention.merge import merge_attention
from .common.engines import record_engines
from .common.heads import Heads
from .common.kv_cache import KVCache
from .common.quantized import run
from .diffusion.axpby import axpby
from .embedding.embedding import embedding
from .embedding.indexed import gather_rows, index_add_, segment_sum
from .generated.pointwise import pointwise
from .generated.rowwise import rowwise
from .glu.glu import glu, glu_backward
from .heads.angles import Rotation
from .heads.arguments import QKV
from .heads.norm import HeadNorm
from .heads.qkv import qkv_prepare
from .heads.rope import rope
from .loss.cross_entropy.cross_entropy import cross_entropy
from .loss.linear_cross_entropy import linear_cross_entropy
from .loss.linear_logprobs.linear_logprobs import LogProbs, linear_logprobs
from .loss.reduction import CrossEntropy
from .loss.sharding import VocabShard
from .moe.experts import experts
from .moe.permute.permute import permute, unpermute
from .moe.route.route import CONVENTIONS, Convention, Routing, route
from .moe.router_linear.router_linear import router_linear
from .moe.row_map.arguments import RowMap
from .moe.row_map.row_map import row_map
from .multi_tensor.gradients import Shards
from .multi_tensor.multi_tensor import any_nonfinite, clip_grads_, count_zeros, grad_norm
from .norm.gated.gated import gated_norm
from .norm.norm import layer_norm, rms_norm
from .product.delayed import DelayedScaling
from .product.grouped import grouped_matmul, grouped_wgrad
from .product.linear import linear, reuse_weights
from .product.matmul import matmul
from .product.recipes import Recipe
from .quantize.quantize import dequantize, dequantize_codes, quantize
from .rows.cumsum import cumsum
from .rows.normalize import group_norm, l2_normalize
from .rows.softmax import log_softmax, logsumexp, softmax
from .rows.xielu import xielu
from .sampling.arguments import Sampled, TopK
from .sampling.linear_sample.linear_sample import linear_sample
from .sampling.process.process import process_logits
from .sampling.sample import sample
from .sampling.top_k import top_k
from .sampling.verify.arguments import Relaxed, Verified
from .sampling.verify.verify import verify
from .vision.patchify import patchify

connect(Ops(dequantize_codes, run))


def import_kernels() -> None:
    """Import the kernels and tile choices of all ops, for tools that inspect all of them."""
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        if module.name.endswith(".launch"):
            importlib.import_module(module.name)


__all__ = [
    "CONVENTIONS",
    "QKV",
    "Attention",
    "Convention",
    "CrossEntropy",
    "DelayedScaling",
    "HeadNorm",
    "Heads",
    "KVCache",
    "LogProbs",
    "Recipe",
    "Relaxed",
    "Rotation",
    "Routing",
    "RowMap",
    "Sampled",
    "Shards",
    "TopK",
    "Verified",
    "VocabShard",
    "any_nonfinite",
    "attention",
    "attention_decode",
    "axpby",
    "clip_grads_",
    "count_zeros",
    "cross_entropy",
    "cumsum",
    "dequantize",
    "embedding",
    "experts",
    "gated_norm",
    "gather_rows",
    "glu",
    "glu_backward",
    "grad_norm",
    "group_norm",
    "grouped_matmul",
    "grouped_wgrad",
    "index_add_",
    "l2_normalize",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_logprobs",
    "linear_sample",
    "log_softmax",
    "logsumexp",
    "matmul",
    "merge_attention",
    "mla_decode",
    "patchify",
    "permute",
    "pointwise",
    "process_logits",
    "qkv_prepare",
    "quantize",
    "record_engines",
    "reuse_weights",
    "rms_norm",
    "rope",
    "route",
    "router_linear",
    "row_map",
    "rowwise",
    "sample",
    "segment_sum",
    "softmax",
    "top_k",
    "unpermute",
    "verify",
    "xielu",
]

"""Seventeen timings that linghe has published for an H800, with the workloads that compute the same.

The published times are from linghe's README (2025, Hopper, 8192 tokens, hidden size 2048, 256 experts, 8 per token);
the shapes that its table leaves open are those of its benchmark scripts. A workload's `least_bytes`, divided by the
memory bandwidth of an H800, give the shortest possible time. Both are computed, not measured.
"""

from __future__ import annotations

from typing import NamedTuple

from .problem import Workload

BANDWIDTH = 3.35e12  # bytes per second of an H800's memory


class Published(NamedTuple):
    number: int
    title: str
    workload: str
    microseconds: float  # as published
    megabytes: float  # minimum to move, computed from the row's own shapes

    def find(self) -> Workload:
        from .families import WORKLOADS

        return next(workload for workload in WORKLOADS if str(workload) == self.workload)


PUBLISHED: tuple[Published, ...] = (
    Published(1, "RMSNorm + quantize", "norm:linghe/hidden:1x128-both:8192", 72.4, 68.19),
    Published(2, "split, qk-norm, RoPE, transpose", "qkv_prepare:linghe/qkv:groups-half:4096", 59.1, 101.7),
    Published(
        3,
        "split, qk-norm, RoPE, transpose, backward",
        "qkv_prepare_backward:linghe/qkv:groups-half:4096",
        107.5,
        143.7,
    ),
    Published(4, "router product", "router_linear:linghe/router:bf16-weight:8192", 61.6, 43.0),
    Published(5, "router product, backward", "router_linear_backward:linghe/router:dgrad:8192", 78.1, 43.0),
    Published(6, "permute and pad", "permute:linghe/hidden:probs:8192", 229.4, 327.4),
    Published(7, "unpermute", "unpermute:linghe/hidden:carried:8192", 806.9, 319.0),
    Published(8, "SiLU + quantize, experts", "glu:linghe/experts:1x128-both-experts:131072", 1181.7, 814.2),
    Published(
        9,
        "SiLU + quantize, experts, backward",
        "glu_backward:linghe/experts:1x128-both-experts:131072",
        2317.9,
        1360.0,
    ),
    Published(10, "SiLU + quantize", "glu:linghe/shared-expert:1x128-both:16384", 58.2, 50.9),
    Published(
        11, "SiLU + quantize, backward", "glu_backward:linghe/shared-expert:1x128-both:16384", 74.2, 84.9
    ),
    Published(12, "group norm and gate", "gated_norm:linghe/attention:groups:4096", 46.9, 100.7),
    Published(
        13, "group norm and gate, backward", "gated_norm_backward:linghe/attention:groups:4096", 81.1, 167.8
    ),
    Published(14, "cross entropy", "cross_entropy:linghe/vocabulary:plain:8192", 818.2, 2575.5),
    Published(
        15, "cross entropy, backward", "cross_entropy_backward:linghe/vocabulary:plain:8192", 1781.0, 5150.8
    ),
    Published(16, "norm of gradients", "multi_tensor_reduce:linghe/gradients:norm2:4096", 1413.7, 4295.0),
    Published(17, "zeros of gradients", "multi_tensor_reduce:linghe/gradients:zeros:4096", 746.8, 4295.0),
)

"""Seventeen rows that linghe has published for an H800, and the workloads that compute the same.

The published times are from linghe's README (2025, Hopper, 8192 tokens, hidden size 2048, 256 experts, 8 to a token);
the shapes that the table leaves open are those of its own benchmark scripts. `least_bytes` of a workload says what has
to move; at the memory bandwidth of an H800 that is the shortest time there can be. Both are computed, not measured.
"""

from __future__ import annotations

from typing import NamedTuple

from . import WORKLOADS
from .problem import Workload

BANDWIDTH = 3.35e12  # bytes a second, of an H800's memory


class Published(NamedTuple):
    number: int
    title: str
    workload: str
    microseconds: float  # as published
    megabytes: float  # that have to move, computed from the row's own shapes

    def find(self) -> Workload:
        return next(workload for workload in WORKLOADS if str(workload) == self.workload)


PUBLISHED: tuple[Published, ...] = (
    Published(1, "RMSNorm + quantise", "norm:linghe/hidden:1x128-both:8192", 72.4, 68.19),
    Published(4, "router product", "router_linear:linghe/router:bf16-weight:8192", 61.6, 43.0),
    Published(5, "router product, backward", "router_linear_backward:linghe/router:dgrad:8192", 78.1, 43.0),
    Published(6, "permute and pad", "permute:linghe/hidden:probs:8192", 229.4, 327.4),
    Published(7, "unpermute", "unpermute:linghe/hidden:carried:8192", 806.9, 319.0),
    Published(8, "SiLU + quantise, experts", "glu:linghe/experts:1x128-both-experts:131072", 1181.7, 814.2),
    Published(
        9,
        "SiLU + quantise, experts, backward",
        "glu_backward:linghe/experts:1x128-both-experts:131072",
        2317.9,
        1360.0,
    ),
    Published(10, "SiLU + quantise", "glu:linghe/shared-expert:1x128-both:16384", 58.2, 50.9),
    Published(
        11, "SiLU + quantise, backward", "glu_backward:linghe/shared-expert:1x128-both:16384", 74.2, 84.9
    ),
)

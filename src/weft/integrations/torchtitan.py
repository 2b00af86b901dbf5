"""torchtitan: its configurations with Weft's kernels, through `--override.imports` and without a line of code.

    torchrun --nproc-per-node 8 -m torchtitan.train --module qwen3 --config qwen3_moe_debug --override.imports \\
        weft.integrations.torchtitan.rms_norm \\
        weft.integrations.torchtitan.router \\
        'weft.integrations.torchtitan.experts={"recipe": "fp8_block"}' \\
        'weft.integrations.torchtitan.attention_linear={"recipe": "fp8_block"}' \\
        weft.integrations.torchtitan.linear_loss

| override           | replaces                                        | arguments |
|--------------------|-------------------------------------------------|-----------|
| `rms_norm`         | `RMSNorm`, including that of heads              |           |
| `feed_forward`     | `FeedForward`: the gated unit                   | `recipe`  |
| `attention_linear` | `Linear` in attention                           | `recipe`  |
| `experts`          | `GroupedExperts`                                | `recipe`  |
| `router`           | `TokenChoiceTopKRouter`                         |           |
| `rope`             | `CosSinRoPE`, `ComplexRoPE`                     |           |
| `linear_loss`      | `ChunkedLossWrapper` around `CrossEntropyLoss`  |           |

An override takes a module's configuration and returns that of a subclass with another `forward`: parameters, their
names, initial values and checkpoints are torchtitan's. A model's own subclasses of these modules are left alone. If a
model is split over tensor-parallel ranks, torchtitan's code still computes the router, the rotation of DTensors and
the loss, where Weft's kernels would need to know the split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import ops
from ..ops import Recipe, Rotation
from .common import experts_of_sorted_rows, needs

VERSIONS = ">=0.3,<0.4"
try:
    from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.config import derive, override
    from torchtitan.distributed.spmd_types import spmd_mesh_size
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, TokenChoiceTopKRouter
    from torchtitan.models.common.nn_modules import RMSNorm
    from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE, RoPE
except ImportError as error:
    raise needs("torchtitan", VERSIONS, error) from error

# Parameters of a `forward` below keep torchtitan's names, by which it looks up how inputs are sharded.


class WeftRMSNorm(RMSNorm):
    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, eps=self.eps)


@override(target=RMSNorm.Config, exact=True, description="weft.rms_norm")
def rms_norm(config: RMSNorm.Config) -> WeftRMSNorm.Config:
    return derive(config, WeftRMSNorm.Config)


# ---- products -------------------------------------------------------------------------------------------


class WeftLinear(Linear):
    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        recipe: str | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.recipe = config.recipe

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(input, self.weight, self.bias, recipe=self.recipe)


def _linear(config: Linear.Config, recipe: str | None) -> Linear.Config:
    """Return the layer with its products in the format of a recipe. Without one, torchtitan's own layer stays."""
    Recipe.of(recipe)  # an invalid name fails here, not in the first step
    return config if recipe is None else derive(config, WeftLinear.Config, recipe=recipe)


@override(target=Linear.Config, exact=True, fqns=["*attention.*"], description="weft.linear")
def attention_linear(config: Linear.Config, recipe: str | None = None) -> Linear.Config:
    return _linear(config, recipe)


class WeftFeedForward(FeedForward):
    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(ops.glu(self.w1(x), self.w3(x)))


@override(target=FeedForward.Config, exact=True, description="weft.glu")
def feed_forward(config: FeedForward.Config, recipe: str | None = None) -> WeftFeedForward.Config:
    w1, w2, w3 = (_linear(part, recipe) for part in (config.w1, config.w2, config.w3))
    return derive(config, WeftFeedForward.Config, w1=w1, w2=w2, w3=w3)


# ---- mixtures of experts --------------------------------------------------------------------------------


class WeftExperts(GroupedExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        recipe: str | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.recipe = config.recipe

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        weights = (self.w1_EFD, self.w3_EFD, self.w2_EDF)
        gate, up, down = (w.to_local() if isinstance(w, DTensor) else w for w in weights)
        if self.recipe is not None:
            both = torch.cat([gate, up], dim=1)
            return experts_of_sorted_rows(x_RD, both, down, num_tokens_per_expert_E, recipe=self.recipe)
        # Products in bf16, like torchtitan's.
        ends = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
        x = x_RD.bfloat16()
        z = ops.grouped_matmul(x, gate.bfloat16(), ends)
        h = ops.glu(z, ops.grouped_matmul(x, up.bfloat16(), ends), ends=ends)
        return ops.grouped_matmul(h, down.bfloat16(), ends).type_as(x_RD)


@override(target=GroupedExperts.Config, exact=True, description="weft.grouped_matmul and weft.glu")
def experts(config: GroupedExperts.Config, recipe: str | None = None) -> WeftExperts.Config:
    Recipe.of(recipe)
    return derive(config, WeftExperts.Config, recipe=recipe)


class WeftRouter(TokenChoiceTopKRouter):
    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def forward(self, x_BLD: Tensor, expert_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        if self._debug_force_load_balance or isinstance(x_BLD, DTensor) or spmd_mesh_size("tp") > 1:
            return super().forward(x_BLD, expert_bias_E)
        logits = ops.router_linear(x_BLD, self.gate.weight, self.gate.bias)
        chosen = ops.route(
            logits,
            self.top_k,
            convention="torchtitan",
            score=self.score_func,
            bias=expert_bias_E,
            groups=self.num_expert_groups or 1,
            group_topk=self.num_limited_groups if self.num_expert_groups else None,
            renormalize=self.route_norm,
            scale=self.route_scale,
            index_dtype=torch.int64,
        )
        scores = logits.sigmoid() if self.score_func == "sigmoid" else logits.softmax(-1)
        return chosen.weights, chosen.indices, scores


@override(target=TokenChoiceTopKRouter.Config, exact=True, description="weft.router_linear and weft.route")
def router(config: TokenChoiceTopKRouter.Config) -> WeftRouter.Config:
    return derive(config, WeftRouter.Config)


# ---- rotations ------------------------------------------------------------------------------------------


class WeftCosSinRoPE(CosSinRoPE):
    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if isinstance(query, DTensor):
            return super().forward(query, key, positions)
        dim = query.shape[-1]  # the table has cosines of all angles twice, then sines
        cos, sin = self.cache[:, : dim // 2], self.cache[:, dim : dim + dim // 2]
        return _rotated(query, key, Rotation(cos=cos, sin=sin, dim=dim), positions)


class WeftComplexRoPE(ComplexRoPE):
    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        pass

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if isinstance(query, DTensor):
            return super().forward(query, key, positions)
        rotation = Rotation(
            cos=self.cache.real, sin=self.cache.imag, dim=query.shape[-1], style="interleaved"
        )
        return _rotated(query, key, rotation, positions)


def _rotated(
    query: Tensor, key: Tensor, rotation: Rotation, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    if positions is not None and positions.shape[0] == 1:
        positions = positions.expand(query.shape[0], -1)
    return ops.rope(query, rotation, positions=positions), ops.rope(key, rotation, positions=positions)


@override(target=RoPE.Config, description="weft.rope")
def rope(config: RoPE.Config) -> RoPE.Config:
    replacements: dict[type, type] = {
        CosSinRoPE.Config: WeftCosSinRoPE.Config,
        ComplexRoPE.Config: WeftComplexRoPE.Config,
    }
    replacement = replacements.get(type(config))
    return config if replacement is None else derive(config, replacement)


# ---- the loss -------------------------------------------------------------------------------------------


class LinearLoss(ChunkedLossWrapper):
    """Cross entropy of hidden states and the model's head, without logits: there is nothing to split into chunks."""

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        pass

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **loss_inputs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        head = self.lm_head
        if isinstance(pred, DTensor) or spmd_mesh_size("tp") > 1:
            return super().__call__(pred, labels, global_valid_tokens, **loss_inputs)

        def loss_of(hidden: Tensor) -> Tensor:
            return ops.linear_cross_entropy(
                hidden,
                head.weight,
                labels,
                bias=head.bias,
                ignore_index=IGNORE_INDEX,
                reduction="sum",
            )

        # FSDP gathers the head's weight around a call of the head, and detects by that call when the head's group of
        # modules has run. So call the head, with another forward.
        own = head.__dict__.get("forward")
        head.forward = loss_of
        try:
            loss = head(pred)
        finally:
            if own is None:
                del head.forward
            else:
                head.forward = own
        return (loss if global_valid_tokens is None else loss / global_valid_tokens), {}


@override(target=ChunkedLossWrapper.Config, exact=True, description="weft.linear_cross_entropy")
def linear_loss(config: ChunkedLossWrapper.Config) -> LinearLoss.Config:
    if type(config.loss_fn) is not CrossEntropyLoss.Config:
        raise ValueError(
            "weft.integrations.torchtitan.linear_loss replaces a chunked cross entropy; this loss is "
            f"{type(config.loss_fn).__qualname__} in chunks: remove the override"
        )
    return derive(config, LinearLoss.Config)

"""Launches of the log-probabilities of a linear head, forward and backward."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ....runtime import (
    BoundLaunch,
    Capabilities,
    Launch,
    capabilities_of,
    choice,
    contiguous_copy,
    remembered,
    scratch,
)
from ...common.rows import align_of, contiguous, flat_rows, scan_config
from ..join import CAPPED, DRAWN, join_config, launch_join
from ..statistics import Softmax, Statistics, TokenResults, Wanted
from .arguments import (
    HeadGradients,
    LinearBackwardArgs,
    LinearLogprobsArgs,
    LinearLogprobsOutputs,
    LinearStatisticsArgs,
    order_shape,
)
from .draws import Listed
from .kernels import (
    linear_dhidden_kernel,
    linear_dlogits_kernel,
    linear_dweight_kernel,
    linear_factors_kernel,
    linear_logprobs_kernel,
    linear_order_kernel,
)

# Bytes for the gradient of one block's logits. GPU blocks are large enough that reading and writing the fp32 sums of
# dhidden between them is a small part of the traffic.
CPU_BUDGET, GPU_BUDGET = 64 << 20, 256 << 20

Role = Literal["logits", "dlogits", "dweight", "dhidden"]


class HeadConfig(NamedTuple):
    """Tiling of a product: tiles of `m` x `n`, summed `k` at a time."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int
    split: bool = True  # multiply bf16 parts of fp32 operands


@choice("linear_logprobs", m=(16, 256), n=(16, 256), k=(16, 256), num_warps=(1, 16), num_stages=(1, 5))
def head_config(role: Role, whole: bool, rich: bool, squares: bool, target: Capabilities) -> HeadConfig:
    """Return the tiling of a kernel with this role. `whole`: both operands have one 16-bit dtype, and rows that are
    multiples of 8. `rich`: the logits are used for more than a plain softmax, which takes registers; `squares`: that
    includes the sum of squares."""
    name = target.family
    if target.is_cpu:
        return HeadConfig(128, 128, 64, 4, 1, split=False)
    # Operands are split into up to six products or loaded element by element; either takes registers.
    if not whole:
        return HeadConfig(64, 64, 32, 4, 2)
    # Compiled for sm_90: 128 x 256 logits take 255 registers per thread; with entropy and smoothing they would
    # spill 1680 bytes, and so would their gradient. On sm_100, dhidden would spill 456 bytes when it adds to sums.
    if name in ("sm_90", "sm_100"):
        wide = role == "dweight" or (role == "logits" and not rich) or (role == "dhidden" and name == "sm_90")
        if role == "logits" and rich and name != "sm_90":
            # 192 registers with entropy; 8 warps would spill 32 bytes. With all results, including squares, 64
            # columns would spill 400 bytes.
            return HeadConfig(128, 32 if squares else 64, 64, 4, 3)
        return HeadConfig(128, 256 if wide else 128, 64, 8, 3)
    if target.warp_size == 64:
        return HeadConfig(128, 128, 32, 8, 2)
    return HeadConfig(64 if role == "logits" and rich else 128, 128, 32, 8, 3)


class Operands:
    """Hidden states, weight and bias in the layout that kernels read."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.device = capabilities_of(hidden.device)
        self.dtype = torch.promote_types(hidden.dtype, weight.dtype)  # dtype of dlogits
        # Matrix units multiply operands of one 16-bit dtype natively.
        self.whole = hidden.dtype == weight.dtype and self.dtype != torch.float32
        self.hidden, self.weight, self.bias = flat_rows(hidden), flat_rows(weight), contiguous(bias)
        self.rows, self.cols = self.hidden.shape
        self.columns = self.weight.shape[0]
        least = 4 if hidden.dtype is torch.float32 else 8
        weight_stride = self.weight.stride(0)
        of_weight = align_of(self.cols, weight_stride, least=least)
        # The tile, and so the bits of a token's results, must not depend on the layout of the hidden states.
        if self.whole and of_weight > 1 and align_of(self.hidden.stride(0), least=least) == 1:
            self.hidden = contiguous_copy(self.hidden)
        self.strides = self.hidden.stride(0), weight_stride
        self.align = align_of(of_weight, self.strides[0], least=least)

    def config(self, role: Role, rich: bool, squares: bool = False) -> HeadConfig:
        return head_config(role, self.whole and self.align > 1, rich, squares, self.device)

    def descriptors(self, *tensors: Tensor) -> bool:
        """Return whether tiles of these tensors can be loaded by TMA: the target has it, and rows are multiples of 16
        bytes."""
        supported = self.device.descriptors and self.whole and self.align >= 8
        return supported and all(t.data_ptr() % 16 == 0 for t in tensors)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return scratch(shape, dtype, self.hidden.device)


def _span(vocab: int, tile: int, target: Capabilities) -> tuple[int, int]:
    """Return (splits, span), the number of vocabulary splits and the columns of each: one tile of tokens keeps all
    multiprocessors busy. More tokens have the same splits, since those decide the order of sums: a token's results have
    the same bits in any batch."""
    tiles = max(1, -(-vocab // tile))
    span = -(-tiles // target.multiprocessors)
    return -(-tiles // span), span * tile


@remembered
def _order_launch(rows: int, vocab: int, ignore_index: int, target: Capabilities) -> BoundLaunch:
    tile, num_warps = scan_config("order", target)
    launch = Launch.of(linear_order_kernel, num_warps=num_warps, TILE=tile)
    return launch.bind((1, 1, 1), rows=rows, vocab=vocab, ignore_index=ignore_index)


def _launch_order(order: Tensor, target: Tensor, softmax: Softmax) -> None:
    device = capabilities_of(target.device)
    _order_launch(target.numel(), softmax.vocab, softmax.ignore_index, device)(
        *linear_order_kernel.tensors(target_ptr=target, order_ptr=order)
    )


@remembered
def _product_launch(
    sizes: tuple[int, int, int], strides: tuple[int, int], noise_strides: tuple[int, int], start: int, kind: int,
    aligned: bool, listed: int, wanted: Wanted, whole: bool, align: int, tma: bool, target: Capabilities,
) -> BoundLaunch:  # fmt: skip
    """Bind the forward product of (rows, cols, vocab)."""
    rows, cols, vocab = sizes
    config = head_config(
        "logits", whole and align > 1, kind == CAPPED.value or True in wanted, wanted.squares, target
    )
    launch = Launch.of(
        linear_logprobs_kernel,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        KIND=kind,
        ENTROPY=wanted.entropy,
        SPREAD=wanted.spread,
        ACCURACY=wanted.accuracy,
        SQUARES=wanted.squares,
        SPLIT=config.split,
        ROWS=config.m,
        VOCAB=config.n,
        TILE=config.k,
        ALIGN=align,
        COLS_MASKED=cols % config.k != 0,
        TMA=tma,
        ALIGNED=aligned,
        LISTED=listed,
    )
    splits, span = _span(vocab, config.n, target)
    return launch.bind(
        (-(-rows // config.m), splits, 1),
        rows=rows,
        cols=cols,
        vocab=vocab,
        hidden_stride=strides[0],
        weight_stride=strides[1],
        start_col=start,
        span=span,
        seed_stride=noise_strides[0],
        step_stride=noise_strides[1],
    )


class Choice(NamedTuple):
    """Choice of the token whose log-probability is computed in each row: the target, or if there is none, the one with
    the largest score."""

    target: Tensor | None = None  # [T]
    order: Tensor | None = None  # int32 [T + 1]
    classes: Tensor | None = None
    # Of the noise, int64 with one element or T; None for scores without noise.
    seed: Tensor | None = None
    step: Tensor | None = None
    listed: int = 0  # a power of two: list as many of the largest logits of each tile, and choose none

    @property
    def noise_strides(self) -> tuple[int, int]:
        seed, step = (0 if t is None or t.numel() == 1 else 1 for t in (self.seed, self.step))
        return seed, step


class Splits(NamedTuple):
    """Statistics of the splits of a vocabulary, and what was listed."""

    stats: Tensor  # [splits, STATS, T]
    listed: Listed  # values and tokens [T, tiles, listed]


def launch_splits(x: Operands, choice: Choice, softmax: Softmax, wanted: Wanted) -> Splits:
    """Compute the statistics of each split of the vocabulary."""
    launch = _product_launch(
        (x.rows, x.cols, x.columns),
        x.strides,
        choice.noise_strides,
        softmax.start,
        softmax.kind,
        choice.seed is None or softmax.start % 4 == 0,
        choice.listed,
        wanted,
        x.whole,
        x.align,
        x.descriptors(x.weight),
        x.device,
    )
    stats = x.empty(launch.grid[1], wanted.statistics + DRAWN.value * (choice.target is None), x.rows)
    listed = Listed(None, None)
    if choice.listed:
        config = x.config("logits", softmax.kind == CAPPED.value)
        shape = x.rows, -(-x.columns // config.n), choice.listed
        listed = Listed(x.empty(*shape), x.empty(*shape, dtype=torch.int32))
    launch(
        *linear_logprobs_kernel.tensors(
            hidden_ptr=x.hidden,
            weight_ptr=x.weight,
            bias_ptr=x.bias,
            target_ptr=choice.target,
            order_ptr=choice.order,
            classes_ptr=choice.classes,
            seed_ptr=choice.seed,
            step_ptr=choice.step,
            stats_ptr=stats,
            listed=listed,
            softcap=softmax.cap,
            scale=softmax.scale,
        )
    )
    return Splits(stats, listed)


def _launch_labeled(
    o: TokenResults | Statistics, order: Tensor, a: LinearStatisticsArgs | LinearLogprobsArgs
) -> None:
    """Order the tokens, and launch the products of those with a target."""
    target = contiguous(a.target)
    _launch_order(order, target, a.softmax)
    choice = Choice(target, order, contiguous(a.classes))
    stats, _ = launch_splits(Operands(a.hidden, a.weight, a.bias), choice, a.softmax, a.wanted)
    launch_join(o, stats, target, order, a.softmax, a.wanted)


class _Backward:
    """State of one backward call: the blocks of the vocabulary, and the products of each block."""

    def __init__(self, o: HeadGradients, a: LinearBackwardArgs) -> None:
        self.o, self.a = o, a
        self.x = x = Operands(a.hidden, a.weight, a.bias)
        self.rich = a.dentropy is not None or a.dspread is not None or a.softmax.softcap is not None
        self.config = config = x.config("dlogits", self.rich)
        self.tiles = -(-x.rows // config.m)
        budget = CPU_BUDGET if x.device.is_cpu else GPU_BUDGET
        vocab_tiles = -(-x.columns // config.n)
        fitting = max(1, budget // (self.tiles * config.m * x.dtype.itemsize * config.n))
        self.block_tiles = -(
            -vocab_tiles // -(-vocab_tiles // min(fitting, vocab_tiles))
            # Balance the tiles over the blocks.
        )
        self.block = self.block_tiles * config.n
        self.kept = None if a.skip_below is None else x.empty(self.tiles, self.block_tiles, dtype=torch.int8)
        self.dlogits = x.empty(self.tiles * config.m, self.block, dtype=x.dtype)
        self.sums = None
        if o.hidden is not None and self.block < x.columns:
            self.sums = x.empty(x.rows, x.cols)
        self.compute_factors()

    def compute_factors(self) -> None:
        """Compute the per-token factors from which `linear_dlogits_kernel` computes the gradient of the logits."""
        a, x = self.a, self.x
        self.factors, self.labels = x.empty(5, x.rows), x.empty(x.rows, dtype=torch.int32)
        upstream = [None if g is None else g.reshape(-1) for g in (a.dlogprob, a.dlse, a.dentropy, a.dspread)]
        dlogprob, dlse, dentropy, dspread = upstream
        strides = (0 if g is None else g.stride(0) for g in upstream)
        dlogprob_stride, dlse_stride, dentropy_stride, dspread_stride = strides
        rows, num_warps = join_config("factors", x.device)
        launch = Launch.of(linear_factors_kernel, num_warps=num_warps, ROWS=rows)
        launch(
            (-(-x.rows // rows), 1, 1),
            *linear_factors_kernel.arguments(
                target_ptr=contiguous(a.target),
                order_ptr=a.order,
                largest_ptr=a.largest,
                total_ptr=a.total,
                entropy_ptr=None if a.dentropy is None else a.entropy,
                shares_ptr=None if a.dspread is None else a.shares,
                dlogprob_ptr=dlogprob,
                dlse_ptr=dlse,
                dentropy_ptr=dentropy,
                dspread_ptr=dspread,
                factors_ptr=self.factors,
                labels_ptr=self.labels,
                rows=x.rows,
                vocab=x.columns,
                start_col=a.softmax.start,
                dlogprob_stride=dlogprob_stride,
                dlse_stride=dlse_stride,
                dentropy_stride=dentropy_stride,
                dspread_stride=dspread_stride,
            ),
        )
        self.unit = None
        if x.dtype is torch.float16:
            # A power of two that brings the largest factor to about 1, after multiplication with the logits' scale.
            size = self.factors[1:].abs().amax().clamp(1e-30, 1e30)
            power = torch.exp2(-torch.ceil(torch.log2(size * a.softmax.scale)))
            self.factors[1:] *= power
            self.unit = 1.0 / power

    def run(self) -> None:
        x, o = self.x, self.o
        for begin in range(0, x.columns, self.block):
            self.compute_dlogits(begin)
            if o.weight is not None or o.bias is not None:
                self.add_dweight(begin)
            if o.hidden is not None:
                self.add_dhidden(begin)

    def tiles_from(self, begin: int) -> int:
        """Return the number of vocabulary tiles of the block that begins at column `begin`."""
        return min(self.block_tiles, -(-(self.x.columns - begin) // self.config.n))

    def compute_dlogits(self, begin: int) -> None:
        a, x, config = self.a, self.x, self.config
        launch = Launch.of(
            linear_dlogits_kernel,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            KIND=a.softmax.kind,
            SPREAD=a.dspread is not None,
            ENTROPY=a.dentropy is not None,
            SPLIT=config.split,
            ROWS=config.m,
            VOCAB=config.n,
            TILE=config.k,
            ALIGN=x.align,
            COLS_MASKED=x.cols % config.k != 0,
            TMA=x.descriptors(x.weight),
        )
        launch(
            (self.tiles * self.tiles_from(begin), 1, 1),
            *linear_dlogits_kernel.arguments(
                hidden_ptr=x.hidden,
                weight_ptr=x.weight,
                bias_ptr=x.bias,
                order_ptr=a.order,
                classes_ptr=None if a.dspread is None else contiguous(a.classes),
                total_ptr=None if self.kept is None else a.total,
                factors_ptr=self.factors,
                labels_ptr=self.labels,
                kept_ptr=self.kept,
                dlogits_ptr=self.dlogits,
                rows=x.rows,
                cols=x.cols,
                vocab=x.columns,
                hidden_stride=x.strides[0],
                weight_stride=x.strides[1],
                begin=begin,
                block=self.block,
                softcap=a.softmax.cap,
                scale=a.softmax.scale,
                skip_below=a.skip_below or 0.0,
            ),
        )

    def add_dweight(self, begin: int) -> None:
        x, o, config = self.x, self.o, self.x.config("dweight", self.rich)
        launch = Launch.of(
            linear_dweight_kernel,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            SPLIT=self.config.split,
            VOCAB=config.m,
            COLS=config.n,
            TILE=config.k,
            KEPT_ROWS=self.config.m,
            KEPT_VOCAB=self.config.n,
            ALIGN=x.align,
            COLS_MASKED=x.cols % config.n != 0,
            TMA=x.descriptors(self.dlogits),
        )
        across = 1 if o.weight is None else -(-x.cols // config.n)
        hidden_stride, _ = x.strides
        launch(
            (-(-self.tiles_from(begin) * self.config.n // config.m) * across, 1, 1),
            *linear_dweight_kernel.arguments(
                hidden_ptr=x.hidden,
                dlogits_ptr=self.dlogits,
                order_ptr=self.a.order,
                unit_ptr=self.unit,
                kept_ptr=self.kept,
                dweight_ptr=o.weight,
                dbias_ptr=o.bias,
                rows=x.rows,
                cols=x.cols,
                vocab=x.columns,
                hidden_stride=hidden_stride,
                begin=begin,
                block=self.block,
            ),
        )

    def add_dhidden(self, begin: int) -> None:
        x, config = self.x, self.x.config("dhidden", self.rich)
        launch = Launch.of(
            linear_dhidden_kernel,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            SPLIT=self.config.split,
            ROWS=config.m,
            COLS=config.n,
            TILE=config.k,
            KEPT_ROWS=self.config.m,
            KEPT_VOCAB=self.config.n,
            FIRST=begin == 0,
            ALIGN=x.align,
            COLS_MASKED=x.cols % config.n != 0,
            TMA=x.descriptors(x.weight, self.dlogits),
        )
        last = begin + self.block >= x.columns
        _, weight_stride = x.strides
        launch(
            (-(-x.rows // config.m) * -(-x.cols // config.n), 1, 1),
            *linear_dhidden_kernel.arguments(
                dlogits_ptr=self.dlogits,
                weight_ptr=x.weight,
                order_ptr=self.a.order,
                unit_ptr=self.unit if last else None,
                kept_ptr=self.kept,
                sums_ptr=self.sums,
                dhidden_ptr=self.o.hidden if last else None,
                rows=x.rows,
                cols=x.cols,
                vocab=x.columns,
                weight_stride=weight_stride,
                begin=begin,
                block=self.block,
            ),
        )


def launch_linear_logprobs_backward(o: HeadGradients, a: LinearBackwardArgs) -> None:
    if a.weight.shape[0]:
        _Backward(o, a).run()
    elif o.hidden is not None:
        o.hidden.zero_()


def launch_linear_statistics(o: Statistics, a: LinearStatisticsArgs) -> None:
    order = scratch(order_shape(a.target), torch.int32, a.target.device)
    _launch_labeled(o, order, a)


def launch_linear_logprobs(o: LinearLogprobsOutputs, a: LinearLogprobsArgs) -> None:
    if a.stats is None:
        _launch_labeled(o.tokens, o.order, a)
    else:
        target = contiguous(a.target)
        _launch_order(o.order, target, a.softmax)
        launch_join(o.tokens, contiguous(a.stats), target, None, a.softmax, a.wanted)

"""The loss head: log-probabilities of tokens from hidden states, without their logits ever being in memory.

    x = hidden @ weight^T + bias               [T, V], fp32 sums, a tile at a time
    z = cap(logit_scale * x) / temperature     cap(x) = softcap * tanh(x / softcap), or x
    m = max(z)    d = sum(exp(z - m))          lse = m + log(d)      p = exp(z - m) / d
    logprob = (z_y - m) - log(d)
    entropy = log(d) - sum(exp(z - m) * (z - m)) / d
    spread = sum_c(w_c * (lse - z_c)) / V      what label smoothing adds, with class weights w (1 without)
    mean_logits = lse - spread                 without class weights
    log_sum_squares = log(sum(p^2))            without a gradient

V counts the columns that are not minus infinity (a bias of minus infinity pads a vocabulary). Kernels are given
softcap / logit_scale and scale = logit_scale / temperature, with which z is scale * cap(x). Backward needs m and d of
each token. With a, h, e, s the gradients of a token's logprob, lse, entropy H and spread:

    dz_j = p_j * (h - a + s * sum(w) / V - e * (log(p_j) + H)) + a * [j = y] - s * w_j / V
    dx_j = dz_j * scale * (1 - tanh(logit_scale * x_j / softcap)^2)
    dhidden = dx @ weight        dweight = dx^T @ hidden        dbias = sum_t dx

Forward, a program multiplies a tile of tokens with the tiles of one split of the vocabulary and joins each product's
statistics to those before it; a second kernel joins the splits in order (`statistics`). If the vocabulary is sharded
over ranks, an op of its own gives the statistics of a shard, and the same kernel joins those of all ranks.

Backward goes through the vocabulary in blocks. It computes a block's logits again and writes their gradient dx [T,
block] once, rounded to the dtype of the operands. Its product with hidden is the block's rows of dweight, complete and
rounded once; its product with weight is added to dhidden in fp32, which is rounded once after the last block. dbias
adds up the rounded dx. So the only memory that grows with V is dweight itself. Sums have a fixed order: every run gives
the same bits.

dx is rounded as in a chain of ops that stores logits in the operands' dtype: in bf16 to 2^-9 of its size. In fp16,
where small numbers would be lost, dx is multiplied by a power of two that brings the largest gradient of a token to
about 1, and the products are divided by it.

Tokens without a target are skipped: tokens with one are numbered first (`order`), and kernels take tokens by that
number. The others are neither read nor multiplied; their results and their gradient are zeros.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from ...runtime import (
    Backward,
    Capabilities,
    Gradients,
    Launch,
    Op,
    autocasted,
    capabilities_of,
    choice,
    is_distributed,
)
from ..common.checks import FLOATS, check_input, check_tensor, check_tensors, real
from ..common.rows import align_of, compute_dtype, contiguous, count_rows, flat_rows, scan_config
from .linear_logprobs_kernels import (
    linear_dhidden_kernel,
    linear_dlogits_kernel,
    linear_dweight_kernel,
    linear_factors_kernel,
    linear_logprobs_kernel,
    linear_order_kernel,
)
from .reduction import check_target
from .sharding import Local, VocabShard, check_shard, localize
from .statistics import (
    DIFFERENTIABLE,
    Softmax,
    Statistics,
    Targets,
    TokenResults,
    Wanted,
    capped_reference,
    check_labels,
    join_config,
    joined_reference,
    launch_join,
    softmax_of,
    statistics_reference,
)

# ---- arguments and outputs ------------------------------------------------------------------------------


class LinearStatisticsArgs(NamedTuple):
    hidden: Tensor  # [..., H]
    weight: Tensor  # [columns, H]: the whole vocabulary, or a shard of it
    bias: Tensor | None  # [columns]
    target: Tensor  # [...], columns of the whole vocabulary
    classes: Tensor | None  # [columns], weights of classes for the spread
    softmax: Softmax
    wanted: Wanted


class LinearLogprobsArgs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    classes: Tensor | None
    stats: Tensor | None  # [ranks, STATS, T] if the vocabulary is sharded: then the op only joins them
    softmax: Softmax
    wanted: Wanted
    skip_below: float | None


class LinearLogprobsOutputs(NamedTuple):
    tokens: TokenResults
    order: Tensor  # int32 [T + 1]: the tokens with a target, the others, and how many have a target


class HeadNeeds(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


class HeadGradients(NamedTuple):
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class LinearBackwardArgs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    classes: Tensor | None
    largest: Tensor
    total: Tensor
    entropy: Tensor | None
    shares: Tensor | None
    order: Tensor
    # The gradients of the results, [...] each; None for a result that was not used.
    dlogprob: Tensor | None
    dlse: Tensor | None
    dentropy: Tensor | None
    dspread: Tensor | None
    softmax: Softmax
    skip_below: float | None
    needs: HeadNeeds


# ---- reference ------------------------------------------------------------------------------------------

_Head = LinearStatisticsArgs | LinearLogprobsArgs | LinearBackwardArgs


def _logits(a: _Head, targets: Targets) -> tuple[Tensor, Tensor, Tensor | float]:
    """(hidden, z, slope): the hidden states [T, H], zero for tokens without a target; z [T, V]; dz/dx."""
    dtype = compute_dtype(a.hidden)
    hidden = a.hidden.reshape(count_rows(a.hidden), a.hidden.shape[-1])
    hidden = torch.where(targets.valid[:, None], hidden, 0.0).to(dtype)
    x = hidden @ a.weight.to(dtype).t()
    if a.bias is not None:
        x = x + a.bias.to(dtype)
    return hidden, *capped_reference(x, a.softmax)


def linear_statistics_reference(a: LinearStatisticsArgs | LinearLogprobsArgs) -> Statistics:
    targets = Targets.of(a.target, a.softmax)
    _, z, _ = _logits(a, targets)
    return Statistics(statistics_reference(z, targets, a.classes, a.softmax.start, a.wanted))


# ---- launch ---------------------------------------------------------------------------------------------


Role = Literal["logits", "dlogits", "dweight", "dhidden"]


class HeadConfig(NamedTuple):
    """How a product is cut: tiles of `m` x `n`, summed `k` at a time."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int
    split: bool = True  # multiply bf16 parts of fp32 operands


@choice("linear_logprobs", m=(16, 256), n=(16, 256), k=(16, 256), num_warps=(1, 16), num_stages=(1, 5))
def head_config(role: Role, whole: bool, rich: bool, squares: bool, target: Capabilities) -> HeadConfig:
    """The tile of a kernel with this role on this target. `whole`: both operands have the same 16-bit dtype, and rows
    that are multiples of 8. `rich`: more than a plain softmax is computed from the logits, which takes registers;
    `squares`: the sum of squares is part of it."""
    name = target.target
    if target.is_cpu:
        return HeadConfig(128, 128, 64, 4, 1, split=False)
    # Operands are split into up to six products, or loaded element by element: both take registers.
    if not whole:
        return HeadConfig(64, 64, 32, 4, 2)
    # Compiled for sm_90: 128 x 256 logits take 255 registers of a thread; with entropy and smoothing they would
    # spill 1680 bytes, and their gradient as many. On sm_100, dhidden would spill 456 bytes where it adds to sums.
    if name in ("sm_90", "sm_100", "sm_103"):
        wide = role == "dweight" or (role == "logits" and not rich) or (role == "dhidden" and name == "sm_90")
        if role == "logits" and rich and name != "sm_90":
            # 192 registers with entropy; 8 warps would spill 32 bytes. With all results, squares among them, 64
            # columns would spill 400.
            return HeadConfig(128, 32 if squares else 64, 64, 4, 3)
        return HeadConfig(128, 256 if wide else 128, 64, 8, 3)
    if target.warp_size == 64:
        return HeadConfig(128, 128, 32, 8, 2)
    return HeadConfig(64 if role == "logits" and rich else 128, 128, 32, 8, 3)


# Bytes for the gradient of one block's logits. On a GPU blocks are so large that reading and writing the fp32 sums of
# dhidden between them is a small part of the traffic.
CPU_BUDGET, GPU_BUDGET = 64 << 20, 256 << 20


class _Operands:
    """Hidden states and weight in the form that kernels read."""

    def __init__(self, a: _Head) -> None:
        self.device = capabilities_of(a.hidden.device)
        self.dtype = torch.promote_types(a.hidden.dtype, a.weight.dtype)  # what dlogits are stored in
        # Matrix units multiply them as they are if both have the same 16-bit dtype.
        self.whole = a.hidden.dtype == a.weight.dtype and self.dtype != torch.float32
        self.hidden, self.weight = flat_rows(a.hidden), flat_rows(a.weight)
        self.target, self.bias, self.classes = (
            a.target.contiguous(),
            contiguous(a.bias),
            contiguous(a.classes),
        )
        self.rows, self.cols = self.hidden.shape
        self.columns = self.weight.shape[0]
        self.strides = self.hidden.stride(0), self.weight.stride(0)
        least = 4 if a.hidden.dtype is torch.float32 else 8
        self.align = align_of(self.cols, *self.strides, least=least)

    def config(self, role: Role, rich: bool, squares: bool = False) -> HeadConfig:
        return head_config(role, self.whole and self.align > 1, rich, squares, self.device)

    def descriptors(self, *tensors: Tensor) -> bool:
        """Whether tiles of these tensors can be loaded by bulk copies (TMA): the target has them, and rows are
        multiples of 16 bytes."""
        possible = self.device.descriptors and self.whole and self.align >= 8
        return possible and all(t.data_ptr() % 16 == 0 for t in tensors)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.hidden.device)


def _span(vocab: int, tiles: int, tile: int, target: Capabilities) -> tuple[int, int]:
    """(splits, span): into how many splits the vocabulary is cut and how many columns each has, so that there are
    enough programs to keep all multiprocessors busy."""
    pieces = max(1, -(-vocab // tile))
    splits = min(pieces, max(1, -(-4 * target.multiprocessors // tiles)))
    span = -(-pieces // splits)
    return -(-pieces // span), span * tile


def _new_order(target: Tensor) -> Tensor:
    return torch.empty(target.numel() + 1, dtype=torch.int32, device=target.device)


def _launch_order(order: Tensor, target: Tensor, softmax: Softmax) -> None:
    tile, num_warps = scan_config("order", capabilities_of(target.device))
    Launch.of(linear_order_kernel, num_warps=num_warps, TILE=tile)(
        (1, 1, 1), (target, order), (target.numel(), softmax.vocab, softmax.ignore_index)
    )


class _ProductConstants(NamedTuple):
    """What decides the code of the forward product."""

    config: HeadConfig
    kind: int
    wanted: Wanted
    align: int
    cols_masked: bool
    tma: bool


@functools.cache
def _product_launch(c: _ProductConstants) -> Launch:
    return Launch.of(
        linear_logprobs_kernel,
        num_warps=c.config.num_warps,
        num_stages=c.config.num_stages,
        KIND=c.kind,
        ENTROPY=c.wanted.entropy,
        SPREAD=c.wanted.spread,
        ACCURACY=c.wanted.accuracy,
        SQUARES=c.wanted.squares,
        SPLIT=c.config.split,
        ROWS=c.config.m,
        VOCAB=c.config.n,
        TILE=c.config.k,
        ALIGN=c.align,
        COLS_MASKED=c.cols_masked,
        TMA=c.tma,
    )


def _launch_products(
    o: TokenResults | Statistics, order: Tensor, a: LinearStatisticsArgs | LinearLogprobsArgs
) -> None:
    """Number the tokens, compute the statistics of each split of the vocabulary, and join those of all splits: into the
    statistics of a shard, or into results."""
    x, softmax, wanted = _Operands(a), a.softmax, a.wanted
    config = x.config("logits", softmax.softcap is not None or True in wanted, wanted.squares)
    _launch_order(order, x.target, softmax)
    tiles = -(-x.rows // config.m)
    splits, span = _span(x.columns, tiles, config.n, x.device)
    stats = x.empty(splits, wanted.statistics, x.rows)
    constants = _ProductConstants(
        config, softmax.kind, wanted, x.align, x.cols % config.k != 0, x.descriptors(x.weight)
    )
    _product_launch(constants)(
        (tiles, splits, 1),
        (x.hidden, x.weight, x.bias, x.target, order, x.classes, stats),
        (x.rows, x.cols, x.columns, *x.strides, softmax.start, span),
        softmax.floats,
    )
    launch_join(o, stats, x.target, order, softmax, wanted)


class _Backward:
    """One call: the blocks that the vocabulary is cut into, and the products of a block."""

    def __init__(self, o: HeadGradients, a: LinearBackwardArgs) -> None:
        self.o, self.a = o, a
        self.x = x = _Operands(a)
        self.rich = a.dentropy is not None or a.dspread is not None or a.softmax.softcap is not None
        self.config = config = x.config("dlogits", self.rich)
        self.tiles = -(-x.rows // config.m)
        budget = CPU_BUDGET if x.device.is_cpu else GPU_BUDGET
        pieces = -(-x.columns // config.n)
        held = max(1, budget // (self.tiles * config.m * x.dtype.itemsize * config.n))
        self.held = -(-pieces // -(-pieces // min(held, pieces)))  # tiles of a block, evened out
        self.block = self.held * config.n
        self.kept = None if a.skip_below is None else x.empty(self.tiles, self.held, dtype=torch.int8)
        self.dlogits = x.empty(self.tiles * config.m, self.block, dtype=x.dtype)
        self.sums = None
        if o.hidden is not None and self.block < x.columns:
            self.sums = x.empty(x.rows, x.cols)
        self.make_factors()

    def make_factors(self) -> None:
        """Compute the factors of each token from which `linear_dlogits_kernel` makes the gradient of its logits."""
        a, x = self.a, self.x
        self.factors, self.labels = x.empty(5, x.rows), x.empty(x.rows, dtype=torch.int32)
        upstream = [None if g is None else g.reshape(-1) for g in (a.dlogprob, a.dlse, a.dentropy, a.dspread)]
        rows, num_warps = join_config("factors", x.device)
        launch = Launch.of(linear_factors_kernel, num_warps=num_warps, ROWS=rows)
        launch(
            (-(-x.rows // rows), 1, 1),
            (
                x.target,
                a.order,
                a.largest,
                a.total,
                None if a.dentropy is None else a.entropy,
                None if a.dspread is None else a.shares,
                *upstream,
                self.factors,
                self.labels,
            ),
            (x.rows, x.columns, a.softmax.start, *(0 if g is None else g.stride(0) for g in upstream)),
        )
        self.unit = None
        if x.dtype is torch.float16:
            # A power of two that brings the largest factor to about 1, once the logits' scale has been multiplied.
            size = self.factors[1:].abs().amax().clamp(1e-30, 1e30)
            power = torch.exp2(-torch.ceil(torch.log2(size * a.softmax.scale)))
            self.factors[1:] *= power
            self.unit = 1.0 / power

    def run(self) -> None:
        x, o = self.x, self.o
        for begin in range(0, x.columns, self.block):
            self.make_dlogits(begin)
            if o.weight is not None or o.bias is not None:
                self.add_dweight(begin)
            if o.hidden is not None:
                self.add_dhidden(begin)

    def pieces_from(self, begin: int) -> int:
        """How many tiles of the vocabulary the block has that begins at column `begin`."""
        return min(self.held, -(-(self.x.columns - begin) // self.config.n))

    def make_dlogits(self, begin: int) -> None:
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
            (self.tiles * self.pieces_from(begin), 1, 1),
            (
                x.hidden,
                x.weight,
                x.bias,
                a.order,
                None if a.dspread is None else x.classes,
                None if self.kept is None else a.total,
                self.factors,
                self.labels,
                self.kept,
                self.dlogits,
            ),
            (x.rows, x.cols, x.columns, *x.strides, begin, self.block),
            (*a.softmax.floats, a.skip_below or 0.0),
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
            (-(-self.pieces_from(begin) * self.config.n // config.m) * across, 1, 1),
            (x.hidden, self.dlogits, self.a.order, self.unit, self.kept, o.weight, o.bias),
            (x.rows, x.cols, x.columns, hidden_stride, begin, self.block),
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
            (
                self.dlogits,
                x.weight,
                self.a.order,
                self.unit if last else None,
                self.kept,
                self.sums,
                self.o.hidden if last else None,
            ),
            (x.rows, x.cols, x.columns, weight_stride, begin, self.block),
        )


# ---- registration ---------------------------------------------------------------------------------------


class LinearLogprobsBackwardOp(
    Op[LinearBackwardArgs, HeadGradients], name="linear_logprobs_backward", variants=96
):
    def allocate(self, a: LinearBackwardArgs) -> HeadGradients:
        like = HeadGradients(a.hidden, a.weight, a.bias)
        return HeadGradients(
            *(
                torch.empty(t.shape, dtype=t.dtype, device=a.hidden.device)
                if needed and t is not None
                else None
                for t, needed in zip(like, a.needs, strict=True)
            )
        )

    def present(self, a: LinearBackwardArgs) -> Any:
        return a.needs

    def launch(self, o: HeadGradients, a: LinearBackwardArgs) -> None:
        if a.weight.shape[0]:
            _Backward(o, a).run()
        elif o.hidden is not None:
            o.hidden.zero_()

    def reference(self, a: LinearBackwardArgs) -> HeadGradients:
        """The definition; it ignores `skip_below` and computes every tile."""
        targets, start = Targets.of(a.target, a.softmax), a.softmax.start
        hidden, z, slope = _logits(a, targets)
        dtype = z.dtype
        t = z - a.largest.to(dtype)[:, None]
        log_total = torch.log(a.total.to(dtype))
        p = torch.exp(t) / a.total.to(dtype)[:, None]

        def column(gradient: Tensor) -> Tensor:
            return gradient.reshape(-1, 1).to(dtype)

        factor = torch.zeros_like(z[:, :1])
        dz = torch.zeros_like(z)
        if a.dlogprob is not None:
            factor = factor - column(a.dlogprob)
            at_target = torch.arange(start, start + len(a.weight), device=z.device) == targets.column[:, None]
            dz = dz + torch.where(at_target, column(a.dlogprob), 0.0)
        if a.dlse is not None:
            factor = factor + column(a.dlse)
        if a.dspread is not None:
            assert a.shares is not None
            of_mass, of_column = a.shares.unbind()
            factor = factor + column(a.dspread) * column(of_mass)
            w = torch.ones_like(z) if a.classes is None else a.classes.to(dtype)
            dz = dz - torch.where(z > -torch.inf, column(a.dspread) * column(of_column) * w, 0.0)
        if a.dentropy is not None:
            assert a.entropy is not None
            factor = factor - column(a.dentropy) * (t - log_total[:, None] + column(a.entropy))
        dz = dz + torch.where(p > 0, p * factor, p)
        dx = torch.where(targets.valid[:, None], dz * slope, 0.0)
        dhidden = dweight = dbias = None
        if a.needs.hidden:
            dhidden = (dx @ a.weight.to(dtype)).to(a.hidden.dtype).view(a.hidden.shape)
        if a.needs.weight:
            dweight = (dx.t() @ hidden).to(a.weight.dtype)
        if a.needs.bias and a.bias is not None:
            dbias = dx.sum(0).to(a.bias.dtype)
        return HeadGradients(dhidden, dweight, dbias)


linear_logprobs_backward_op = LinearLogprobsBackwardOp()


class LinearStatisticsOp(Op[LinearStatisticsArgs, Statistics], name="linear_statistics", variants=32):
    def validate(self, a: LinearStatisticsArgs) -> None:
        return check_labels(a.target, a.softmax)

    def allocate(self, a: LinearStatisticsArgs) -> Statistics:
        return Statistics.allocate(a.target, compute_dtype(a.hidden), a.wanted)

    def launch(self, o: Statistics, a: LinearStatisticsArgs) -> None:
        _launch_products(o, _new_order(a.target), a)

    def reference(self, a: LinearStatisticsArgs) -> Statistics:
        return linear_statistics_reference(a)


linear_statistics_op = LinearStatisticsOp()


class LinearLogprobsOp(
    Op[LinearLogprobsArgs, LinearLogprobsOutputs],
    name="linear_logprobs",
    variants=32,
    differentiable=tuple(f"tokens_{name}" for name in DIFFERENTIABLE),
):
    def validate(self, a: LinearLogprobsArgs) -> None:
        return check_labels(a.target, a.softmax)

    def allocate(self, a: LinearLogprobsArgs) -> LinearLogprobsOutputs:
        tokens = TokenResults.allocate(a.target, compute_dtype(a.hidden), a.wanted)
        return LinearLogprobsOutputs(tokens, _new_order(a.target))

    def present(self, a: LinearLogprobsArgs) -> Any:
        return LinearLogprobsOutputs(TokenResults.present(a.wanted), True)  # type: ignore[arg-type]

    def launch(self, o: LinearLogprobsOutputs, a: LinearLogprobsArgs) -> None:
        if a.stats is None:
            _launch_products(o.tokens, o.order, a)
        else:
            target = a.target.contiguous()
            _launch_order(o.order, target, a.softmax)
            launch_join(o.tokens, a.stats.contiguous(), target, None, a.softmax, a.wanted)

    def reference(self, a: LinearLogprobsArgs) -> LinearLogprobsOutputs:
        """The definition."""
        stats = linear_statistics_reference(a).stats[None] if a.stats is None else a.stats
        valid = Targets.of(a.target, a.softmax).valid
        order = torch.argsort((~valid).int(), stable=True).int()
        return LinearLogprobsOutputs(
            joined_reference(stats, a.target, a.softmax, a.wanted),
            torch.cat([order, valid.sum(dtype=torch.int32)[None]]),
        )

    def keep(self, a: LinearLogprobsArgs, o: LinearLogprobsOutputs) -> LinearBackwardArgs:
        found = o.tokens
        return LinearBackwardArgs(
            hidden=a.hidden,
            weight=a.weight,
            bias=a.bias,
            target=a.target,
            classes=a.classes,
            largest=found.largest,
            total=found.total,
            entropy=found.entropy,
            shares=found.shares,
            order=o.order,
            dlogprob=None,
            dlse=None,
            dentropy=None,
            dspread=None,
            softmax=a.softmax,
            skip_below=a.skip_below,
            needs=HeadNeeds(False, False, False),
        )

    def backward(self, b: Backward) -> Gradients:
        needs = HeadNeeds(b.needs.hidden, b.needs.weight, b.needs.bias)
        if True not in needs:
            return {}
        grads: TokenResults = b.grads.tokens
        found = linear_logprobs_backward_op(
            b.kept._replace(
                dlogprob=grads.logprobs,
                dlse=grads.lse,
                dentropy=grads.entropy,
                dspread=grads.spread,
                needs=needs,
            )
        )
        return found._asdict()


linear_logprobs_op = LinearLogprobsOp()


# ---- public functions -----------------------------------------------------------------------------------


class LogProbs(NamedTuple):
    """What `linear_logprobs` returns if more than the log-probabilities is asked for; what was not asked for is
    None."""

    logprobs: Tensor
    lse: Tensor | None = None
    entropy: Tensor | None = None
    accuracy: Tensor | None = None
    mean_logits: Tensor | None = None
    log_sum_squares: Tensor | None = None


class Head(NamedTuple):
    """The operands of this rank, checked."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    shard: VocabShard | None

    @staticmethod
    def of_mesh(local: Local) -> Head:
        return Head(
            local.tensor("hidden"), local.tensor("weight"), local.tensors["bias"], local.target, local.shard
        )

    def softmax(
        self, ignore_index: int, logit_scale: float, softcap: float | None, temperature: float
    ) -> Softmax:
        shard = self.shard
        start, vocab = (0, self.weight.shape[0]) if shard is None else (shard.start, shard.size)
        return softmax_of(start, vocab, ignore_index, logit_scale, softcap, temperature)

    def results(
        self, classes: Tensor | None, softmax: Softmax, wanted: Wanted, skip_below: float | None
    ) -> TokenResults:
        """All results of the loss head for each token. `classes` are the weights of the whole vocabulary's classes."""
        if wanted.spread and skip_below is not None:
            raise ValueError(
                "skip_below cannot be combined with label_smoothing or mean_logits, whose gradients are not small in "
                "any tile: give one of the two"
            )
        hidden, weight, bias, target, shard = self
        hidden, weight = autocasted(hidden), autocasted(weight)
        stats = None
        if shard is not None:
            hidden = shard.sum_gradient(hidden)
            if classes is not None:
                classes = classes[shard.start : shard.stop]
            with torch.no_grad():
                own = linear_statistics_op(
                    LinearStatisticsArgs(hidden, weight, bias, target, classes, softmax, wanted)
                )
                stats = shard.gather(own.stats)
        a = LinearLogprobsArgs(hidden, weight, bias, target, classes, stats, softmax, wanted, skip_below)
        return linear_logprobs_op(a).tokens

    def check(self, skip_below: float | None) -> None:
        hidden, weight, bias, target, shard = self
        check_tensors("hidden weight target", hidden, weight, target)
        check_input("hidden", hidden)
        check_tensor("weight", weight, FLOATS, hidden.device)
        if (
            weight.dim() != 2
            or weight.shape[1] != hidden.shape[-1]
            or (weight.numel() == 0 and shard is None)
            or (target.shape != hidden.shape[:-1] and target.shape == weight.shape[:-1])
        ):
            raise _wrong_head(hidden, weight, target)
        check_shard(shard, weight.shape[0])
        if bias is not None:
            check_tensor("bias", bias, FLOATS, hidden.device, weight.shape[:1])
        check_target(target, hidden, "hidden")
        if skip_below is not None and not 0.0 <= real("skip_below", skip_below) < 1.0:
            raise ValueError(f"skip_below must be a probability below 1; got {skip_below}")


def localize_head(head: Head, class_weight: Tensor | None = None) -> Local | None:
    """This rank's part of distributed operands; None if they are plain tensors."""
    hidden, weight, bias, target, _ = head
    if not is_distributed(hidden, weight, bias, target, class_weight):
        return None
    tensors = {"weight": weight, "hidden": hidden, "bias": bias, "class_weight": class_weight}
    return localize(tensors, target, {"weight": 0, "bias": 0}, "hidden")


def _wrong_head(hidden: Tensor, weight: Tensor, target: Tensor) -> ValueError:
    """The error for hidden states, a weight and targets whose shapes do not match."""
    note = ""
    if hidden.dim() == 2 and weight.shape[-1:] == hidden.shape[-1:] and target.shape == weight.shape[:-1]:
        note = ". The hidden states come first, then the weight"
    elif weight.dim() == 2 and weight.shape[0] == hidden.shape[-1]:
        note = ". Give weight.t(), if its columns are the vocabulary"
    return ValueError(
        "hidden must be [..., H] and weight [V, H] with one H and at least one row, and target one class to each "
        f"row of hidden; got {tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(target.shape)}{note}"
    )


@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    return_accuracy: Literal[False] = False,
    return_mean_logits: Literal[False] = False,
    return_log_sum_squares: Literal[False] = False,
    skip_below: float | None = None,
    shard: VocabShard | None = None,
) -> Tensor: ...


@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_accuracy: bool = False,
    return_mean_logits: bool = False,
    return_log_sum_squares: bool = False,
    skip_below: float | None = None,
    shard: VocabShard | None = None,
) -> LogProbs: ...


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_accuracy: bool = False,
    return_mean_logits: bool = False,
    return_log_sum_squares: bool = False,
    skip_below: float | None = None,
    shard: VocabShard | None = None,
) -> Tensor | LogProbs:
    """log(softmax(hidden @ weight^T + bias)) of the target of each token, fp32 [...], without logits in memory.

    hidden: [..., H], weight: [V, H] and bias: [V] in bf16, fp16 or fp32, of any strides (a weight whose rows are not
    contiguous is copied). An FP8 `QTensor` as weight is dequantised first, as a whole, and its gradient passes straight
    through to what it was quantised from. target: [...] in int32 or int64. Each result of each
    token has its own gradient, so that any loss can be made of log-probabilities, entropies and lse.

    - `logit_scale`: logits are multiplied by it first (Cohere, Granite, Falcon-H1). `softcap`: then they become
      softcap * tanh(logits / softcap) (Gemma). Last they are divided by `temperature`.
    - `ignore_index`: a token with this target is skipped: its results and its gradient are 0, its hidden state is not
      read. Any other target that is no row of weight is an IndexError on the CPU; on a GPU, where nothing waits to find
      out, it makes the token's results NaN and its gradient 0.
    - `return_lse`, `return_entropy`, …: more results for each token, with which the result is a `LogProbs`:

      | name              |                                                                                         |
      |-------------------|-----------------------------------------------------------------------------------------|
      | `lse`             | log(sum(exp(logits)))                                                                   |
      | `entropy`         | of the softmax                                                                          |
      | `accuracy`        | 1 if the target has the largest logit (of equal ones, the lowest), else 0; no gradient  |
      | `mean_logits`     | over the vocabulary, of the logits as the softmax has them                              |
      | `log_sum_squares` | log(sum(p^2)), for weights such as WPO's; no gradient                                   |

    - `skip_below`: backward treats a tile of the gradient of the logits, 64 or 128 tokens by as many columns, as zero
      if all its probabilities are below this threshold and it has no target's column. That saves the tile's share of
      two of the three products. A token's gradient loses less than V * skip_below of its size, usually far less. Off by
      default.
    - `shard`: weight and bias are this rank's shard of the vocabulary; hidden and target are the same on all ranks. The
      results are the same on all ranks, bit for bit. The gradient of hidden is the sum over the ranks.

    Operands may be DTensors: weight and bias replicated or Shard(0), hidden replicated or sharded along tokens. The
    results are DTensors, sharded as the tokens are.

    Extra memory of forward and backward does not grow with V, except for the gradient of weight.

    >>> import torch, weft
    >>> hidden = torch.randn(6, 64, dtype=torch.bfloat16, requires_grad=True)
    >>> weight = torch.randn(1000, 64, dtype=torch.bfloat16, requires_grad=True)
    >>> target = torch.tensor([1, 2, 3, -100, 5, 999])
    >>> found = weft.linear_logprobs(hidden, weight, target, temperature=0.7, return_entropy=True)
    >>> (-found.logprobs.sum() - 0.01 * found.entropy.sum()).backward()
    >>> found.logprobs.dtype, found.logprobs[3].item(), weight.grad.dtype
    (torch.float32, 0.0, torch.bfloat16)
    """
    head = Head(hidden, weight, bias, target, shard)
    local = localize_head(head)
    if local is not None:
        head = Head.of_mesh(local)
    head.check(skip_below)
    softmax = head.softmax(ignore_index, logit_scale, softcap, temperature)
    wanted = Wanted(return_entropy, return_mean_logits, return_accuracy, return_log_sum_squares)
    found = head.results(None, softmax, wanted, skip_below)
    results = LogProbs(
        logprobs=found.logprobs,
        lse=found.lse if return_lse else None,
        entropy=found.entropy,
        accuracy=found.hits,
        mean_logits=None if found.spread is None else found.lse - found.spread,
        log_sum_squares=found.log_sum_squares,
    )
    if local is not None:
        results = LogProbs(*(None if value is None else local.placed(value) for value in results))  # type: ignore[arg-type]
    return results if return_lse or True in wanted else results.logprobs

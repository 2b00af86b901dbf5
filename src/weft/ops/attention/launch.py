"""Launches of the attention kernels: strides of heads, and tiles of queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...quant import Format
from ...runtime import BoundLaunch, Capabilities, Launch, capabilities_of, remembered, scratch
from ..common.copies import cast_mode, copy_arguments
from ..common.heads import LAYOUTS, NO_STRIDES, Strides, contiguous_heads
from ..common.results import ResultOptions
from ..common.rows import align_of, contiguous
from ..common.sums import sum_partials
from ..quantize.launch import quantize_into
from .arguments import (
    AttentionArgs,
    AttentionBackwardArgs,
    AttentionGradients,
    AttentionOutputs,
    Mask,
    coded_heads,
    value_format,
)
from .configs import VALUE_COLUMNS, AttentionConfig, AttentionTile, BlocksTile, Width, attention_config
from .engines import choose_library
from .kernels import attention_kernel, delta_kernel, key_gradient_kernel, query_gradient_kernel
from .libraries import attend, attend_backward
from .masks import blocks_kernel
from .pair_terms import NO_LISTS, Lists, TermForms, TermTensors, pair_form, score_gradients, sum_pairs
from .pieces import Heads
from .reference import memory_layout
from .sequences import Band
from .values import ValueCodes, value_block_kernel, value_kernel

Sizes = tuple[int, ...]


class Forms(NamedTuple):
    """Shapes and strides that determine the integers of a launch. Strides are in the axis order of `layout`."""

    layout: str
    shape: Sizes  # of the query
    key_shape: Sizes
    v_dim: int
    query: Sizes
    key: Sizes
    value: Sizes
    sequences: int  # number of packed sequences; 0 if none
    mask: Mask
    capped: bool
    limited: bool
    dtype: torch.dtype
    query_scale: Sizes | None = None  # strides
    key_scale: Sizes | None = None
    values: str | None = None  # element in which values are multiplied
    grouped: bool = False  # each scale of query and key covers GROUP elements
    terms: TermForms = TermForms()

    @staticmethod
    def of(
        a: AttentionArgs | AttentionBackwardArgs,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        terms: TermTensors,
    ) -> Forms:
        return Forms(
            a.layout,
            query.shape,
            key.shape,
            value.shape[-1],
            query.stride(),
            key.stride(),
            value.stride(),
            0 if a.packed.q_starts is None else a.packed.q_starts.shape[0] - 1,
            a.mask,
            a.softcap != 0,
            a.packed.limited,
            query.dtype,
            terms=TermForms.of(terms, a.packed),
        )

    @property
    def counts(self) -> Counts:
        batch, sequence, heads, _ = LAYOUTS[self.layout]
        return Counts(
            1 if self.layout == "thd" else self.shape[batch],
            self.shape[sequence],
            self.key_shape[sequence],
            self.shape[heads],
            self.key_shape[heads],
        )

    @property
    def forward_kernel(self) -> str:
        """Name of the forward kernel in `choices.json`."""
        values = self.values if self.grouped or self.values == "int8" else None
        return "_".join(filter(None, ("forward", "mx" if self.grouped else "", values)))

    def tiles(self, tokens: int, rows: int) -> int:
        """Count the tiles of `rows` tokens of a head. With packed sequences, tiles start at sequence starts and also
        cover the tokens before the first sequence and after the last."""
        return -(-tokens // rows) + (self.sequences + 1 if self.sequences else 0)

    def inputs(self) -> list[Strides]:
        """Return the strides of query, key and value; none for value codes, whose layout is fixed."""
        query, key, value = (_at(strides, self.layout) for strides in (self.query, self.key, self.value))
        return [query, key, value if self.values is None else NO_STRIDES]

    @property
    def value_columns(self) -> int:
        """Number of columns of the value codes; 0 if values are not quantized."""
        if self.values is None:
            return 0
        counts, unit = self.counts, VALUE_COLUMNS[self.values]
        return (counts.batch * counts.k // unit + (self.sequences or counts.batch)) * unit


class Counts(NamedTuple):
    """Sizes of a call. Packed sequences are one batch."""

    batch: int
    q: int
    k: int
    heads: int
    key_heads: int

    def lengths(self, sequences: int) -> tuple[int, int, int]:
        """Return the integers of `Lengths`."""
        return sequences or self.batch, self.q, self.k

    def grouped(self) -> Heads:
        return Heads(self.heads, self.heads // self.key_heads)

    def band(self, mask: Mask) -> Band:
        """Return the mask as kernels take it, with missing bounds replaced by one that no pair of tokens reaches."""
        far = self.q + self.k
        left, right = (far if bound is None else min(bound, far) for bound in mask[:2])
        return Band(left, right, int(mask.lower_right))


def _at(strides: Sizes | None, layout: str) -> Strides:
    """Return the strides of heads; packed sequences have no batch stride."""
    return Strides.of(strides, layout, 0)


NO_VALUE_CODES = ValueCodes(None, None, 0)


class ResultForm(NamedTuple):
    """Properties of the stored result that the kernel depends on."""

    dtype: torch.dtype
    format: str | None
    rowwise_only: bool  # only the rowwise copy is requested
    y: Sizes | None  # strides of a plain result, in the query's layout


class Bound(NamedTuple):
    """Launch shared by all calls with the same shapes and strides."""

    launch: BoundLaunch
    tiles: int  # partial results that it writes per head
    fused: bool = False  # the kernel quantizes its result itself


def _config(kernel: str, forms: Forms, target: Capabilities) -> AttentionConfig:
    """Return the tile of a kernel. With a bias, a step of its loop takes half a block, because a bias takes registers,
    and shared memory where loads are pipelined. Slopes take registers, too, which only AMD has left."""
    name = forms.forward_kernel if kernel == "forward" else kernel
    config = attention_config(name, forms.shape[-1], forms.v_dim, forms.dtype.itemsize, target)
    sloped = forms.terms.sloped and target.backend != "hip"
    if kernel == "value" or (forms.terms.bias is None and not sloped):
        return config
    if kernel == "key":
        return config._replace(m=max(config.m // 2, 16))
    return config._replace(n=max(config.n // 2, 16))


def _tile(
    kernel: str, forms: Forms, target: Capabilities, *places: Strides
) -> tuple[AttentionTile, dict[str, Any]]:
    """Return the tile of a kernel and the options of its launch."""
    dim, itemsize = forms.shape[-1], forms.dtype.itemsize
    config = _config(kernel, forms, target)
    strides = (stride for at in places for stride in at)
    align = align_of(dim, forms.v_dim, *strides, least=8 if itemsize == 1 else 16 // itemsize)
    # A step of the dot takes 32 bytes.
    widths = (Width.of(dim, 16 if itemsize > 1 else 32), Width.of(forms.v_dim))
    n = config.n if forms.values != "int8" else min(config.n, VALUE_COLUMNS["int8"])
    pairs = forms.terms.in_tile(forms.counts.k)
    tile = AttentionTile(config.m, n, *widths, forms.mask.banded, forms.capped, forms.limited, align, **pairs)
    if kernel == "forward":
        tile = replace(tile, values=forms.values, groups=widths[0].groups if forms.grouped else None)
    return tile, {"num_warps": config.num_warps, "num_stages": config.num_stages}


@remembered
def _lists(kernel: str, forms: Forms, target: Capabilities) -> tuple[Lists, BoundLaunch]:
    """Return the sizes of the lists of blocks for a kernel with a mask, and bind the kernel that writes them."""
    counts, strides = forms.counts, forms.terms.mask
    assert strides is not None
    config = _config(kernel, forms, target)
    lists = Lists.of(kernel == "key", forms.terms, counts.batch, counts.q, counts.k, counts.grouped(), config)
    tile = BlocksTile(config.m, config.n, forms.mask.banded, forms.limited, pair_form(strides, counts.k, 1))
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    launch = Launch.of(blocks_kernel, TILE=tile, OF_KEYS=kernel == "key", **options).bind(
        (lists.tiles, 1, 1),
        mask=strides[:3],
        blocks=lists.integers(),
        lengths=counts.lengths(0),
        heads=counts.grouped(),
        band=counts.band(forms.mask),
    )
    return lists, launch


def _term_integers(kernel: str, forms: Forms, target: Capabilities) -> tuple[Any, ...]:
    """Return the integers of `Terms` for a kernel."""
    lists = NO_LISTS if forms.terms.mask is None else _lists(kernel, forms, target)[0]
    return forms.terms.integers(lists)


def _term_tensors(
    kernel: str, forms: Forms, terms: TermTensors, starts: tuple[Tensor | None, ...], target: Capabilities
) -> tuple[Any, ...]:
    """Return the tensors of `Terms` for a kernel; with a mask, list its visited blocks."""
    blocks: tuple[Tensor | None, ...] = (None, None, None)
    if terms.mask is not None:
        lists, launch = _lists(kernel, forms, target)
        blocks = lists.allocate(terms.mask.device)
        launch(*blocks_kernel.tensors(mask=terms.mask, blocks=blocks, lengths=starts))
    return terms.mask, blocks, terms.bias, terms.slopes


@remembered
def _forward(forms: Forms, to: ResultForm, codes: tuple[int, int, int], target: Capabilities) -> Bound:
    """Bind the forward kernel; `codes` are the strides of the rowwise copy."""
    counts, inputs = forms.counts, forms.inputs()
    width = counts.heads * forms.v_dim
    if to.y is not None:
        y = _at(to.y, forms.layout)
    else:  # a quantized result has all heads of a token in one row
        token = width * counts.batch if forms.layout == "sbhd" else width
        y = Strides(0, width if forms.layout == "sbhd" else counts.q * width, token, forms.v_dim)
    tile, options = _tile("forward", forms, target, *inputs, y)
    f = None if to.format is None else Format.of(to.format)
    fused = (
        f is not None
        and to.rowwise_only
        and f.block in ("1x128", "mx")
        and tile.v.first == forms.v_dim
        and forms.v_dim % f.group == 0
    )
    tiles = forms.tiles(counts.q, tile.m)
    launch = Launch.of(
        attention_kernel,
        TILE=tile,
        FORMAT=f if fused else None,
        CAST=cast_mode(target),
        INPUT_MAX=torch.finfo(to.dtype).max,
        **options,
    )
    query, key, value = inputs
    bound = launch.bind(
        (tiles * counts.heads * counts.batch, 1, 1),
        query=query,
        key=key,
        value=value,
        query_scale=_at(forms.query_scale, forms.layout),
        key_scale=_at(forms.key_scale, forms.layout),
        value_codes=forms.value_columns,
        y=y,
        copy=codes if fused else (0, 0, 0),
        lengths=counts.lengths(forms.sequences),
        heads=counts.grouped(),
        band=counts.band(forms.mask),
        terms=_term_integers("forward", forms, target),
    )
    return Bound(bound, tiles * counts.batch, fused)


@remembered
def _value(forms: Forms, target: Capabilities) -> BoundLaunch:
    """Bind the kernel that encodes values."""
    assert forms.values is not None
    counts, value = forms.counts, _at(forms.value, forms.layout)
    tile, options = _tile("value", forms, target, value)
    kernel, format = value_kernel, value_format(forms.values)
    programs = -(-forms.v_dim // tile.m) * counts.key_heads
    if forms.values == "int8":
        kernel, blocks = value_block_kernel, forms.tiles(counts.k, VALUE_COLUMNS["int8"])
        programs *= blocks * counts.batch
    else:
        programs *= forms.sequences or counts.batch
    launch = Launch.of(kernel, TILE=tile, FORMAT=format, CAST=cast_mode(target), **options)
    return launch.bind(
        (programs, 1, 1),
        value=value,
        codes=forms.value_columns,
        lengths=counts.lengths(forms.sequences),
        heads=counts.grouped(),
        band=counts.band(forms.mask),
    )


def _coded_values(
    value: Tensor, starts: tuple[Tensor | None, ...], forms: Forms, target: Capabilities
) -> ValueCodes:
    counts, device, columns = forms.counts, value.device, forms.value_columns
    shape, int8 = (counts.key_heads, forms.v_dim), forms.values == "int8"
    codes = scratch((*shape, columns), torch.int8 if int8 else torch.uint8, device)
    scales = columns // VALUE_COLUMNS["int8"] if int8 else forms.sequences or counts.batch
    scale = scratch((scales, *shape), torch.float32, device)
    kernel = value_block_kernel if int8 else value_kernel
    _value(forms, target)(*kernel.tensors(value=value, codes=(codes, scale), lengths=starts))
    return ValueCodes(codes, scale, columns)


def launch_attention(o: AttentionOutputs, a: AttentionArgs) -> None:
    """Compute the outputs with the engine chosen for the call."""
    library = choose_library(a, capabilities_of(a.query.device))
    if library is not None:
        attend(library, o, a)
        return
    (query, query_scale), (key, key_scale) = coded_heads(a)
    query, key, value = map(contiguous_heads, (query, key, a.value))
    to, result = a.result, o.result
    terms = TermTensors.of(a)
    forms = Forms.of(a, query, key, value, terms)
    if query_scale is not None and key_scale is not None:
        forms = forms._replace(
            query_scale=_scale_strides(query_scale, query),
            key_scale=_scale_strides(key_scale, key),
            values=a.values,
            grouped=query_scale.dtype == torch.uint8,
        )
    starts, target = tuple(map(contiguous, a.packed)), capabilities_of(query.device)
    y: Tensor | None = result.y
    copy = copy_arguments(result.copies(to.format)[0])
    strides = None if to.format is not None else result.y.stride()
    result_form = ResultForm(to.dtype, to.format, _rowwise_only(to), strides)
    bound = _forward(forms, result_form, copy[2:], target)
    if to.format is not None and not to.return_plain:
        # If the kernel quantizes the result itself, it reads only y's dtype.
        y = scratch((1,) if bound.fused else result.y.shape, to.dtype, query.device)
    tile_max = None
    if o.max is not None:
        tile_max = scratch((bound.tiles, o.max.shape[0]), torch.float32, query.device)
    codes, scales = (copy.data, copy.scale) if bound.fused else (None, None)
    values = NO_VALUE_CODES if a.values is None else _coded_values(value, starts, forms, target)
    bound.launch(
        *attention_kernel.tensors(
            query=query,
            key=key,
            value=value if a.values is None else None,
            query_scale=query_scale,
            key_scale=key_scale,
            value_codes=(values.ptr, values.scale),
            y=y,
            copy=(codes, scales),
            lse_ptr=o.lse,
            max_ptr=tile_max,
            sinks_ptr=contiguous(a.sinks),
            lengths=starts,
            scores=(a.scale, a.softcap),
            terms=_term_tensors("forward", forms, terms, starts, target),
        )
    )
    if tile_max is not None:
        torch.amax(tile_max, 0, out=o.max)
    if to.format is not None and not bound.fused:
        assert y is not None
        quantize_into(result, to, y.view(-1, y.shape[-1]))


def _scale_strides(scale: Tensor, heads: Tensor) -> Sizes:
    """Return the strides of the scales of heads, with one for the last dimension of heads."""
    return scale.stride() if scale.dim() == heads.dim() else (*scale.stride(), 1)


def _rowwise_only(to: ResultOptions) -> bool:
    return not (to.columnwise or to.return_amax or to.return_plain)


# ---- backward -------------------------------------------------------------------------------------------


class Upstream(NamedTuple):
    """Strides of the result and its gradient, in `memory_layout`, and of the gradients to compute."""

    y: Sizes
    dy: Sizes
    query: Sizes | None
    key: Sizes | None
    value: Sizes | None
    bias: Sizes | None = None  # strides of the gradients of scores that the gradient of the bias sums
    bias_itemsize: int = 0


@remembered
def _delta(forms: Forms, up: Upstream, target: Capabilities) -> Bound:
    counts, layout = forms.counts, memory_layout(forms.layout)
    y, dy = _at(up.y, layout), _at(up.dy, layout)
    tile, options = _tile("delta", forms, target, y, dy)
    tiles = -(-counts.q // tile.m)
    bound = Launch.of(delta_kernel, TILE=tile, **options).bind(
        (tiles * counts.heads * counts.batch, 1, 1),
        y=y,
        dy=dy,
        lengths=counts.lengths(0),
        heads=counts.grouped(),
    )
    return Bound(bound, tiles * counts.batch)


@remembered
def _gradient(kernel: str, forms: Forms, up: Upstream, target: Capabilities) -> BoundLaunch:
    """Bind the kernel for the gradient of queries, or the one for the gradients of keys and values."""
    counts = forms.counts
    dy = _at(up.dy, memory_layout(forms.layout))
    strides_by_name = {"dquery": up.query} if kernel == "query" else {"dkey": up.key, "dvalue": up.value}
    into = {
        name: _at(strides, forms.layout) for name, strides in strides_by_name.items() if strides is not None
    }
    inputs = forms.inputs()
    tile, options = _tile(kernel, forms, target, *inputs, dy, *into.values())
    if kernel == "query":
        tiles, kernel_function = forms.tiles(counts.q, tile.m) * counts.heads, query_gradient_kernel
    else:
        tiles, kernel_function = forms.tiles(counts.k, tile.n) * counts.key_heads, key_gradient_kernel
    query, key, value = inputs
    dbias: dict[str, Sizes] = {} if kernel == "key" else {"dbias": (0, 0, 0)}
    if up.bias is not None:
        dbias = {"dbias": up.bias[:3]}
        tile = replace(tile, dbias=pair_form(up.bias, counts.k, up.bias_itemsize))
    return Launch.of(kernel_function, TILE=tile, **options).bind(
        (tiles * counts.batch, 1, 1),
        query=query,
        key=key,
        value=value,
        dy=dy,
        lengths=counts.lengths(forms.sequences),
        heads=counts.grouped(),
        band=counts.band(forms.mask),
        terms=_term_integers(kernel, forms, target),
        **into,
        **dbias,
    )


def launch_attention_backward(o: AttentionGradients, a: AttentionBackwardArgs) -> None:
    """Compute the requested gradients with the engine chosen for them."""
    library = choose_library(a, capabilities_of(a.query.device))
    if library is not None:
        attend_backward(library, o, a)
        return
    query, key, value, y, dy = map(contiguous_heads, (a.query, a.key, a.value, a.y, a.dy))
    terms = TermTensors.of(a)
    forms, target = Forms.of(a, query, key, value, terms), capabilities_of(query.device)
    dq_strides, dk_strides, dv_strides = (None if t is None else t.stride() for t in o[:3])
    up = Upstream(y.stride(), dy.stride(), dq_strides, dk_strides, dv_strides)
    lse, dlse, sinks = contiguous(a.lse), contiguous(a.dlse), contiguous(a.sinks)
    delta = scratch(lse.shape, lse.dtype, lse.device)
    bound = _delta(forms, up, target)
    sums = None
    if o.sinks is not None:
        sums = scratch((bound.tiles, o.sinks.shape[0]), torch.float32, lse.device)
    bound.launch(
        *delta_kernel.tensors(
            y=y, dy=dy, lse_ptr=lse, dlse_ptr=dlse, delta_ptr=delta, sinks_ptr=sinks, sink_sums_ptr=sums
        )
    )
    if o.sinks is not None and sums is not None:
        sum_partials(sums, o.sinks)
    starts = tuple(map(contiguous, a.packed))
    tensors: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": value,
        "dy": dy,
        "lse_ptr": lse,
        "delta_ptr": delta,
        "lengths": starts,
        "scores": (a.scale, a.softcap),
    }
    dquery, dbias, slope_sums = o.query, None, None
    if o.alibi is not None:
        tile, _ = _tile("query", forms, target)
        tiles = forms.tiles(forms.counts.q, tile.m) * forms.counts.batch
        slope_sums = scratch((tiles, o.alibi.numel()), torch.float32, query.device)
    if o.bias is not None:
        counts = forms.counts
        visits_all = not (forms.mask.banded or forms.terms.own_bounds or terms.mask is not None)
        dbias = score_gradients(o.bias, (counts.batch, counts.heads, counts.q, counts.k), visits_all)
        up = up._replace(bias=dbias.stride(), bias_itemsize=dbias.itemsize)
    if dquery is None and (dbias is not None or slope_sums is not None):
        # The kernel that writes the gradients of scores also computes this one.
        dquery = scratch(query.shape, query.dtype, query.device)
        up = up._replace(query=dquery.stride())
    if dquery is not None:
        launch = _gradient("query", forms, up._replace(key=None, value=None), target)
        terms_of_query = _term_tensors("query", forms, terms, starts, target)
        results = {"dquery": dquery, "dbias": dbias, "slope_sums_ptr": slope_sums}
        launch(*query_gradient_kernel.tensors(**tensors, terms=terms_of_query, **results))
    if o.bias is not None and dbias is not None:
        sum_pairs(dbias, o.bias)
    if o.alibi is not None and slope_sums is not None:
        sum_partials(slope_sums, o.alibi)
    if o.key is not None and o.key.numel():
        launch = _gradient("key", forms, up._replace(query=None, bias=None), target)
        terms_of_key = _term_tensors("key", forms, terms, starts, target)
        launch(*key_gradient_kernel.tensors(**tensors, terms=terms_of_key, dkey=o.key, dvalue=o.value))

"""Weights that FSDP2 gathers as codes: each rank quantises its shard, and a quarter of fp32's bytes travel.

The optimizer has plain numbers, as before. Around every all-gather `fully_shard` calls two methods of the tensor that
it shards: `fsdp_pre_all_gather` quantises this rank's rows to the format of the layer's recipe, and
`fsdp_post_all_gather` puts the codes of all ranks together to a `QTensor`, which `weft.linear` and `weft.experts` take
as it is. Since no block has rows of two ranks, these are the codes that the layer would make of the whole weight, and
nothing else changes: gradients are plain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..ops import Recipe, quantize
from ..ops.product.matmul import EITHER_COPY
from ..quant import Format, QTensor
from ..report import Entry, Report
from ..runtime import is_distributed, local_of

aten = torch.ops.aten
Filter = Callable[[str, nn.Module], bool]  # of a module's name and the module: whether it is meant


class GatheredWeight(Tensor):
    """A plain weight, `plain`, that FSDP2 gathers in the format `spec`. Everything else that is done to it is done to
    `plain`; views and copies that FSDP and `Module.to` make of it are gathered likewise."""

    plain: Tensor
    spec: str

    @staticmethod
    def __new__(cls, plain: Tensor, spec: str) -> GatheredWeight:
        self: GatheredWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            plain.shape,
            strides=plain.stride(),
            storage_offset=plain.storage_offset(),
            dtype=plain.dtype,
            device=plain.device,
        )
        self.plain, self.spec = plain, spec
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight({self.plain!r}, {self.spec})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved, it is a plain tensor."""
        return self.plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> GatheredWeight:
        made = GatheredWeight(self.plain.detach().clone(), self.spec)
        if isinstance(self, nn.Parameter):
            made = nn.Parameter(made, self.requires_grad)  # type: ignore[assignment]
        memo[id(self)] = made
        return made

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["plain"], self.spec

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], spec: str, outer_size: Any, outer_stride: Any
    ) -> GatheredWeight:
        return GatheredWeight(inner["plain"], spec)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        result = func(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))
        if not isinstance(first, GatheredWeight):
            return result
        if result is first.plain:
            return first  # it was changed in place
        if func not in _ALIKE:
            return result
        return tree_map(lambda made: GatheredWeight(made, first.spec), result)

    # ---- what FSDP2 calls around its all-gather -----------------------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        format, ranks = Format.of(self.spec), mesh.size()
        inner = outer_size[1:-1].numel()
        unit = max(format.block_rows, format.group)
        if outer_size[0] % ranks or (outer_size[0] // ranks * inner) % unit:
            raise ValueError(
                f"FSDP would cut blocks of {unit} rows: a weight {tuple(outer_size)} on {ranks} ranks cannot be "
                f"gathered as {self.spec}. Leave its layer out: weft.nn.gather_quantized(model, filter=...)"
            )
        q = quantize(self.plain, format, columnwise=format.block not in EITHER_COPY)
        return q.fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: QTensor | None = None,
    ) -> tuple[QTensor, list[Tensor]] | None:
        shard: QTensor = metadata[0]
        return shard.fsdp_post_all_gather(all_gather_outputs, metadata, param_dtype, out=out)


# The results of these are gathered as their first argument is: copies, and views of it or of its rows.
_ALIKE = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten._to_copy.default,
    aten._pin_memory.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.view.default,
    aten.as_strided.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
}


def _plain(value: Any) -> Any:
    return value.plain if isinstance(value, GatheredWeight) else value


def is_gathered_quantized(parameter: Tensor) -> bool:
    """Whether FSDP gathers a parameter, or the whole one that this is a shard of, as codes."""
    own = local_of(parameter.detach()) if is_distributed(parameter) else parameter
    return isinstance(own, GatheredWeight)


# ---- for a model ----------------------------------------------------------------------------------------


def gather_quantized(model: nn.Module, *, filter: Filter | None = None) -> Report:
    """Let `fully_shard` (FSDP2) gather the weights of Weft's layers in the numbers of their recipes. Call it after
    `convert` or on Weft's own modules, before `fully_shard` and before the optimizer is made: parameters are replaced.

    It is for formats whose blocks have rows of one rank alone, 128x128 ("fp8_block") and mx; the others are left alone
    and gathered plain. `filter(name, module)` says of which modules weights are meant. A weight that is also a
    parameter of another kind of module, such as an embedding, is left alone.

    >>> import weft.nn
    >>> layer = weft.nn.Linear(256, 512, recipe="fp8_block")
    >>> print(weft.nn.gather_quantized(layer))
    kind    modules  class              weft
    weight  weight   Linear [512, 256]  gathered as e4m3:128x128:te:pow2
    """
    users: dict[int, set[str | None]] = {}  # in which formats the modules that have a parameter take it
    for module in model.modules():
        for own, parameter in module.named_parameters(recurse=False):
            quantised = own in getattr(module, "quantized_parameters", ())
            spec = Recipe.of(module.recipe).weight if quantised else None  # type: ignore[arg-type]
            users.setdefault(id(parameter), set()).add(spec)
    made: dict[int, nn.Parameter] = {}
    report = Report()
    for prefix, module in model.named_modules():
        for own in getattr(module, "quantized_parameters", ()):
            parameter = getattr(module, own)
            name, reason = f"{prefix}.{own}".lstrip("."), _kept_plain(parameter, users[id(parameter)])
            if filter is not None and not filter(prefix, module):
                reason = "left out by the filter"
            title = f"{type(module).__name__} {list(parameter.shape)}"
            if reason is not None:
                report.entries.append(Entry("weight", name, title, changed=False, what=reason))
                continue
            (spec,) = users[id(parameter)]
            assert spec is not None
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(
                    GatheredWeight(parameter.detach(), spec), parameter.requires_grad
                )
            setattr(module, own, made[id(parameter)])
            report.entries.append(Entry("weight", name, title, changed=True, what=f"gathered as {spec}"))
    return report


def _kept_plain(parameter: Tensor, formats: set[str | None]) -> str | None:
    """Why a parameter is gathered as it is; None if it is quantised."""
    if isinstance(parameter, (GatheredWeight, QTensor)):
        return "quantised already"
    if formats == {None}:
        return "its recipe has plain numbers"
    if len(formats) > 1:
        return "modules that take it otherwise have it as well"
    (spec,) = formats
    format = Format.of(spec)  # type: ignore[arg-type]
    if not format.block_rows or not format.group or format.stored.block == "nvfp4":
        return f"{spec} has scales of rows on all ranks"
    return None

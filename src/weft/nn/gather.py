"""Quantized FSDP2 all-gathers: each rank quantizes its shard, and a quarter of fp32's bytes travel.

The optimizer sees plain weights, as before. `fully_shard` calls two methods of a sharded tensor around every
all-gather: `fsdp_pre_all_gather` quantizes this rank's rows to the format of the layer's recipe, and
`fsdp_post_all_gather` joins the codes of all ranks into a `QTensor`, which `weft.linear` and `weft.experts` accept
directly. Since no block spans two ranks, these equal the codes the layer would compute from the full weight. Nothing
else changes: gradients are plain.
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
Filter = Callable[[str, nn.Module], bool]  # (module name, module) -> whether to include it


class GatheredWeight(Tensor):
    """Plain weight, `plain`, that FSDP2 gathers in the format `spec`. All other operations act on `plain`; the views
    and copies that FSDP and `Module.to` make of it are gathered likewise."""

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
        """Pickle as a plain tensor."""
        return self.plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> GatheredWeight:
        copy = GatheredWeight(self.plain.detach().clone(), self.spec)
        if isinstance(self, nn.Parameter):
            copy = nn.Parameter(copy, self.requires_grad)  # type: ignore[assignment]
        memo[id(self)] = copy
        return copy

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
            return first  # changed in place
        if func not in _ALIKE:
            return result
        return tree_map(lambda tensor: GatheredWeight(tensor, first.spec), result)

    # ---- called by FSDP2 around its all-gather ------------------------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        format, ranks = Format.of(self.spec), mesh.size()
        inner = outer_size[1:-1].numel()
        unit = max(format.block_rows, format.group)
        if outer_size[0] % ranks or (outer_size[0] // ranks * inner) % unit:
            raise ValueError(
                f"FSDP would split blocks of {unit} rows: a weight {tuple(outer_size)} on {ranks} ranks cannot be "
                f"gathered as {self.spec}. Exclude its layer: weft.nn.gather_quantized(model, filter=...)"
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


# Operations whose results are gathered like their first argument: copies, and views of it or of its rows.
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
    """Return whether FSDP gathers a parameter, or the full parameter that this is a shard of, as codes."""
    own = local_of(parameter.detach()) if is_distributed(parameter) else parameter
    return isinstance(own, GatheredWeight)


# ---- for a model ----------------------------------------------------------------------------------------


def gather_quantized(model: nn.Module, *, filter: Filter | None = None) -> Report:
    """Let `fully_shard` (FSDP2) gather the weights of Weft's layers in the formats of their recipes. Call it after
    `convert` or on Weft's own modules, before `fully_shard` and before creating the optimizer: it replaces parameters.

    It supports formats whose blocks never span ranks, 128x128 ("fp8_block") and mx; others are left alone and gathered
    plain. `filter(name, module)` selects the modules. A weight that is also a parameter of another kind of module, such
    as an embedding, is left alone.

    >>> import weft.nn
    >>> layer = weft.nn.Linear(256, 512, recipe="fp8_block")
    >>> print(weft.nn.gather_quantized(layer))
    kind    modules  class              weft
    weight  weight   Linear [512, 256]  gathered as e4m3:128x128:te:pow2
    """
    users: dict[int, set[str | None]] = {}  # formats in which the modules that share a parameter use it
    for module in model.modules():
        for own, parameter in module.named_parameters(recurse=False):
            quantized = own in getattr(module, "quantized_parameters", ())
            spec = Recipe.of(module.recipe).weight if quantized else None  # type: ignore[arg-type]
            users.setdefault(id(parameter), set()).add(spec)
    replacements: dict[int, nn.Parameter] = {}
    report = Report()
    for prefix, module in model.named_modules():
        for own in getattr(module, "quantized_parameters", ()):
            parameter = getattr(module, own)
            name, reason = f"{prefix}.{own}".lstrip("."), _reason_plain(parameter, users[id(parameter)])
            if filter is not None and not filter(prefix, module):
                reason = "left out by the filter"
            title = f"{type(module).__name__} {list(parameter.shape)}"
            if reason is not None:
                report.entries.append(Entry("weight", name, title, changed=False, what=reason))
                continue
            (spec,) = users[id(parameter)]
            assert spec is not None
            if id(parameter) not in replacements:
                replacements[id(parameter)] = nn.Parameter(
                    GatheredWeight(parameter.detach(), spec), parameter.requires_grad
                )
            setattr(module, own, replacements[id(parameter)])
            report.entries.append(Entry("weight", name, title, changed=True, what=f"gathered as {spec}"))
    return report


def _reason_plain(parameter: Tensor, formats: set[str | None]) -> str | None:
    """Return the reason a parameter is gathered plain, or None if it is quantized."""
    if isinstance(parameter, (GatheredWeight, QTensor)):
        return "already quantized"
    if formats == {None}:
        return "its recipe does not quantize it"
    if len(formats) > 1:
        return "it is shared with modules that use another format"
    (spec,) = formats
    format = Format.of(spec)  # type: ignore[arg-type]
    if not format.block_rows or not format.group or format.stored.block == "nvfp4":
        return f"{spec} has scales that span ranks"
    return None

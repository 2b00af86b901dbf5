"""Folding of a norm's weight into the layers that read it.

    n(x) * (offset + g) + beta  ->  n(x)         x normalized, without weight and bias
    W, b  ->  W diag(offset + g), b + W beta     y = x W^T + b

The products are equal in exact arithmetic. New weights and biases are computed in fp64 and rounded to the dtype of the
parameters, in bf16 by up to 2^-8 of each element. The norm no longer reads a weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.common.checks import FLOATS
from .convert import ConvertedLinear
from .head import LinearCrossEntropy
from .linear import Linear
from .norm import LayerNorm, RMSNorm
from .scales import check_plain

_NORMS = (nn.RMSNorm, nn.LayerNorm, RMSNorm, LayerNorm)
_LAYERS = (nn.Linear, Linear, ConvertedLinear, LinearCrossEntropy)


@torch.no_grad()
def fold_norm(norm: nn.Module, *layers: nn.Module, weight_offset: float | None = None) -> None:
    """Multiply a norm's weight, and add its bias, into the linear layers that read its result, in place and for
    inference. Afterwards the norm has neither.

    - `layers`: all consumers of the norm's result, which must read nothing else and share their weights with no other
      module. `fold_norm` cannot check this: a consumer that is not passed, such as a router or a residual, would read
      other values than before.
    - `weight_offset`: what a norm of another class than `RMSNorm` and `LayerNorm` adds to its weight: 1 in Gemma, 0 in
      Llama. The caller vouches that it computes n(x) * (weight_offset + weight) + bias. Its weight
      becomes 1 - weight_offset and its bias 0.

    The parameters must not require gradients. Those of `RMSNorm` and `LayerNorm` leave the state dict, and a layer
    without bias gets one if the norm's bias is not zero. Fold before `weft.calibrate`: the inputs of the layers change.

    >>> import torch, weft.nn
    >>> norm, up = weft.nn.LayerNorm(64).requires_grad_(False), torch.nn.Linear(64, 128).requires_grad_(False)
    >>> x = torch.randn(3, 64)
    >>> y = up(norm(x))
    >>> weft.nn.fold_norm(norm, up)
    >>> print(norm.weight, bool((up(norm(x)) - y).abs().max() < 1e-4))
    None True
    """
    _check_norm(norm, weight_offset)
    if not layers:
        raise ValueError("fold_norm needs the layers that read the norm's result: fold_norm(norm, q, k, v)")
    changed: Any = norm
    weight: Tensor | None = changed.weight
    bias: Tensor | None = getattr(norm, "bias", None)
    size = None if weight is None else len(weight)
    for index, layer in enumerate(layers):
        _check_layer(f"layer {index}", layer, size)
    shared = {id(layer.weight) for layer in layers}
    if len(shared) < len(layers):
        raise ValueError(
            "two of the layers are the same or share their weight, which would be multiplied twice: pass each once, "
            "and do not fold into tied weights"
        )
    if weight is None:
        return
    offset = weight_offset or 0.0
    factor: Tensor = weight.double() + offset
    for layer in layers:
        _fold(layer, factor, None if bias is None else bias.double())
    if type(norm) in _NORMS:
        changed.weight = None
        if bias is not None:
            changed.bias = None
        changed.elementwise_affine = False
    else:
        weight.fill_(1.0 - offset)
        if bias is not None:
            bias.zero_()


def _fold(layer: Any, factor: Tensor, shift: Tensor | None) -> None:
    """Fold a norm's weight and bias, in fp64, into a layer."""
    weight: Tensor = layer.weight
    wide = weight.double()
    if shift is not None and bool(shift.any()):
        added = wide @ shift.to(wide.device)
        if layer.bias is None:
            layer.bias = nn.Parameter(added.to(weight.dtype), requires_grad=False)
        else:
            layer.bias.copy_(layer.bias.double() + added)
    weight.copy_(wide * factor.to(wide.device))


def _check_norm(norm: nn.Module, weight_offset: float | None) -> None:
    """Raise an error unless a norm can lose its weight."""
    kind, known = type(norm).__name__, type(norm) in _NORMS
    if not known and weight_offset is None:
        raise TypeError(
            f"fold_norm knows RMSNorm and LayerNorm of torch.nn and weft.nn; got a {kind}. If it computes "
            "n(x) * (offset + weight) + bias, say so with weight_offset=offset"
        )
    if known and weight_offset:
        raise ValueError(f"a {kind} adds nothing to its weight: leave out weight_offset={weight_offset}")
    weight = getattr(norm, "weight", None)
    if weight is None and known:
        return
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        raise ValueError(f"the norm must have a weight of one dimension; this {kind} has {weight!r}")
    for name in ("weight", "bias"):
        parameter = getattr(norm, name, None)
        if parameter is not None:
            _check_parameter(f"the norm's {name}", parameter)


def _check_layer(name: str, layer: nn.Module, size: int | None) -> None:
    """Raise an error unless a norm over `size` elements can be folded into a layer."""
    if type(layer) not in _LAYERS:
        raise TypeError(
            f"{name} must be a torch.nn.Linear or weft.nn.Linear; got a {type(layer).__name__}, which may compute "
            "something else. Fold before conversion to fp8_static, sharding and adapters"
        )
    if size is not None and layer.in_features != size:
        raise ValueError(f"{name} takes {layer.in_features} elements, but the norm gives {size}")
    if "weight" not in layer._parameters:
        raise ValueError(
            f"the weight of {name} is computed anew in every call: remove its parametrization first"
        )
    for kind, parameter in layer.named_parameters(recurse=False):
        _check_parameter(f"the {kind} of {name}", parameter)


def _check_parameter(name: str, parameter: Tensor) -> None:
    check_plain(name, parameter, "fold before that")
    if parameter.dtype not in FLOATS:
        raise ValueError(f"{name} is in {parameter.dtype}: fold into bf16, fp16, fp32 or fp64 parameters")
    if parameter.requires_grad:
        raise ValueError(
            f"{name} requires gradients, but a folded norm is for inference: call model.requires_grad_(False)"
        )

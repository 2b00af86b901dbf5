"""Linear layers that serve in FP8 with frozen scales.

    y = round(alpha * (q(x) q(w)^T) + bias)        alpha = x_scale * w_scale, in fp32

q(x) rounds x / x_scale to e4m3 and saturates at ±448. x_scale comes from a calibration, so x is read once and nothing
waits for its amax; q(w) is computed once, at conversion.

Both operands have one scale per tensor. Scales per row of w would make alpha a vector and leave the product to Weft's
own kernel: cuBLASLt multiplies tensor by tensor or row by row, not a mixture. They would gain little, because the
relative error of e4m3 is the same at every magnitude down to 2^-14 of the amax; only a row whose elements are all
smaller than that needs a scale of its own.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops import linear, quantize
from ..quant import Format, QTensor, scale_from_amax
from ..runtime import autocasted
from .linear import Linear, Numbers, in_numbers
from .scales import LayerScale, hash_of, title

STATIC = "fp8_static"
FORMAT = Format("tensor").spec
_PRODUCT = "fp8_tensor"  # the recipe whose forward product this is


class Frozen(NamedTuple):
    """State of a converted layer on the host."""

    name: str  # in the model, for errors
    weight_hash: str
    scale: float  # the value of `x_scale`
    original: type[nn.Linear]  # the layer's class before conversion


class StaticLinear(Linear):
    """Linear layer converted by `weft.nn.convert(model, "fp8_static", scales=...)`: forward only, with frozen scales.

    Its parameters stay what they were. `x_scale`, an fp32 scalar, and `weight_codes`, a `QTensor`, follow from the
    calibration and the weight, so neither is in the state dict; nor are they buffers, which DDP would broadcast. They
    move with the module. Loading a weight of other values is refused.
    """

    frozen: Frozen
    x_scale: Tensor
    weight_codes: QTensor
    quantized_parameters = ()  # FSDP must not gather them as codes

    @property
    def recipe(self) -> str:
        return STATIC

    @recipe.setter
    def recipe(self, recipe: Any) -> None:
        raise AttributeError(
            f"{title(self.frozen.name)} has frozen scales: change its recipe with weft.nn.convert(model, recipe)"
        )

    def input_key(self) -> tuple[str | None, float | None]:
        return FORMAT, self.frozen.scale

    def input_scale(self) -> Tensor | None:
        return self.x_scale

    def forward(self, input: Tensor) -> Tensor:
        self._check(input)
        x = in_numbers(autocasted(input), Numbers(FORMAT, scale=self.x_scale))
        return linear(x, self.weight_codes, self.bias, recipe=_PRODUCT)

    def _check(self, x: Tensor) -> None:
        """Raise an error for a call that needs gradients, or after a change of the weight."""
        if torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (x, self.weight, self.bias)
        ):
            raise RuntimeError(
                f"{title(self.frozen.name)} is converted to {STATIC!r}, which has no gradients: call the model under "
                "torch.no_grad() or torch.inference_mode(), or undo it with weft.nn.convert(model, None)"
            )
        if not torch.compiler.is_compiling() and not self._is_unchanged():
            self._recheck()

    # ---- weights that stay as they were -------------------------------------------------------------------

    def note_weight(self) -> None:
        """Accept the present weight: later changes that PyTorch counts are refused."""
        self._noted = self.weight, _version(self.weight)

    def _is_unchanged(self) -> bool:
        weight, version = self._noted
        return weight is self.weight and version == _version(weight)

    def _recheck(self) -> None:
        """Raise RuntimeError unless a weight that was written still has its values. This reads it on the host, once
        after such a write, as DDP makes when it synchronizes parameters."""
        name = self.frozen.name
        undo = f"undo {STATIC!r} with weft.nn.convert(model, None), then calibrate and convert again"
        try:
            same = hash_of(name, self.weight, undo) == self.frozen.weight_hash
        except ValueError as error:
            raise RuntimeError(str(error)) from error
        if not same:
            raise RuntimeError(f"the weight of {title(name)} changed after the layer was converted: {undo}")
        self.note_weight()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        unchanged = self._is_unchanged()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name in ("x_scale", "weight_codes"):
            old = getattr(self, name)
            new = fn(old)
            setattr(self, name, new if new.dtype == old.dtype else old.to(new.device))
        if unchanged:
            self.note_weight()
        return self

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.note_weight()  # copies count their changes from zero

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if f"{prefix}weight" not in state_dict:
            return
        try:
            self._recheck()
        except RuntimeError as error:
            error_msgs.append(str(error))
            return
        # Neither has values yet after `to_empty`.
        self.x_scale.fill_(self.frozen.scale)
        self.weight_codes = weight_codes(self.weight)


def _version(weight: Tensor) -> int | None:
    return None if weight.is_inference() else weight._version


# ---- conversion of a layer ------------------------------------------------------------------------------


def check_unwrapped(model: nn.Module) -> None:
    """Raise ValueError for a model that is wrapped, or has wrapped parts: its layers have other names and, on FSDP,
    parts of weights."""
    wrappers: list[type[nn.Module]] = [nn.parallel.DistributedDataParallel, nn.DataParallel]
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        wrappers.append(fsdp.FullyShardedDataParallel)
    for name, module in model.named_modules():
        if isinstance(module, tuple(wrappers)):
            raise ValueError(
                f"{title(name)} is a {type(module).__name__}: calibrate and convert the model before it is wrapped"
            )


def weight_codes(weight: Tensor) -> QTensor:
    """Return the codes of a weight [N, K] that products read."""
    with torch.no_grad():
        return quantize(weight.detach(), FORMAT)


def freeze(layer: nn.Linear, name: str, calibrated: LayerScale, codes: QTensor) -> None:
    """Make a linear layer a `StaticLinear`, in place."""
    assert calibrated.amax is not None
    scale = scale_from_amax(torch.tensor(calibrated.amax, dtype=torch.float32), FORMAT).reshape(())
    original = type(layer)
    layer.__class__ = StaticLinear
    assert isinstance(layer, StaticLinear)
    layer.frozen = Frozen(name, calibrated.weight, float(scale), original)
    layer.x_scale, layer.weight_codes = scale.to(layer.weight.device), codes
    layer.note_weight()


def unfreeze(layer: StaticLinear) -> None:
    """Undo `freeze`."""
    original = layer.frozen.original
    del layer.x_scale, layer.weight_codes, layer.frozen, layer._noted
    layer.__class__ = original  # type: ignore[assignment]

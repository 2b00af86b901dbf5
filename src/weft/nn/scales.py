"""Calibrations: the largest inputs of a model's layers, and the file that keeps them.

The file is JSON. It identifies each layer's weight by a hash, so that a calibration is never used with other weights,
and has its amax as the shortest decimal that reads back exactly. Equal calibrations have equal bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import __version__
from ..quant import QTensor
from ..runtime import is_distributed
from .gather import is_gathered_quantized

KIND, SCHEMA = "weft calibration", 1


@dataclass(frozen=True)
class LayerScale:
    """Calibration of one layer: the hash of its weight, and the amax of its input, None if it was never called."""

    weight: str
    amax: float | None


@dataclass(frozen=True)
class Calibration:
    """Result of `weft.calibrate`: the percentile over the batches of each layer's input amax, by layer name."""

    format: str
    percentile: float
    batches: int
    layers: dict[str, LayerScale]
    weft: str = __version__

    @property
    def uncalled(self) -> list[str]:
        """Names of the layers that no batch called."""
        return [name for name, layer in self.layers.items() if layer.amax is None]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration to a file. Readers see the old file or the new one, never a part."""
        content = {
            "file": KIND,
            "schema": SCHEMA,
            "weft": self.weft,
            "format": self.format,
            "percentile": self.percentile,
            "batches": self.batches,
            "layers": {name: vars(layer) for name, layer in self.layers.items()},
        }
        target = Path(path)
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        # A new file, unlike a temporary one, has the permissions that the user's umask gives.
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Calibration:
        """Read a calibration. Raise ValueError if the file is not one that this Weft understands."""
        try:
            return _parsed(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = str(error) if isinstance(error, _Unusable) else f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{os.fspath(path)} is not a calibration that this Weft can read: {reason}. Calibrate again with "
                "weft.calibrate(model, batches, out=...)"
            ) from error

    def __str__(self) -> str:
        called = len(self.layers) - len(self.uncalled)
        text = f"{called} layers calibrated over {self.batches} batches, at percentile {self.percentile:g}"
        return f"{text}; never called: {', '.join(self.uncalled)}" if self.uncalled else text


class _Unusable(ValueError):
    """Reason a file cannot be used, in words."""


def _parsed(content: Any) -> Calibration:
    if not isinstance(content, dict) or content.get("file") != KIND:
        raise _Unusable(f"it does not say that it is a {KIND}")
    if content["schema"] != SCHEMA:
        raise _Unusable(f"its schema is {content['schema']!r}, and this Weft {__version__} reads {SCHEMA}")
    layers = {name: _layer(name, entry) for name, entry in content["layers"].items()}
    percentile, batches = float(content["percentile"]), int(content["batches"])
    return Calibration(str(content["format"]), percentile, batches, layers, str(content["weft"]))


def _layer(name: str, entry: Any) -> LayerScale:
    weight, amax = entry["weight"], entry["amax"]
    if not isinstance(weight, str):
        raise _Unusable(f"the hash of {title(name)} is {weight!r}")
    if amax is None:
        return LayerScale(weight, None)
    if isinstance(amax, bool) or not isinstance(amax, (int, float)) or not 0 <= amax < math.inf:
        raise _Unusable(f"the amax of {title(name)} is {amax!r}")
    return LayerScale(weight, float(amax))


def title(name: str) -> str:
    """Return a module's name for messages; the model itself has none."""
    return name or "the model itself"


# ---- identity of weights --------------------------------------------------------------------------------


def check_plain(name: str, parameter: Tensor, advice: str) -> None:
    """Raise ValueError unless a parameter is a whole, dense tensor with values."""
    problem = None
    if is_gathered_quantized(parameter):
        problem = "is gathered as codes, by weft.nn.gather_quantized"
    elif is_distributed(parameter):
        problem = "is sharded, so this rank has only a part of it"
    elif isinstance(parameter, QTensor):
        problem = f"is quantized, as {parameter.spec}"
    elif type(parameter) not in (Tensor, nn.Parameter):
        problem = f"is a {type(parameter).__name__}"
    elif parameter.layout is not torch.strided:
        problem = f"is stored as {parameter.layout}"
    elif parameter.is_meta:
        problem = "has no values on the device meta"
    if problem is not None:
        raise ValueError(f"{name} {problem}: {advice}")


def hash_of(name: str, weight: Tensor, advice: str = "calibrate and convert the model before that") -> str:
    """Return the hash of a weight's dtype, shape and values, wherever and with whatever strides it is stored. It reads
    the values on the host. `name`, the layer's, and `advice` are for errors."""
    check_plain(f"the weight of {title(name)}", weight, advice)
    values = weight.detach().cpu().resolve_neg().contiguous()
    digest = hashlib.sha256(f"{values.dtype} {list(values.shape)}:".encode())
    size = values.numel() * values.element_size()
    if size:
        digest.update((ctypes.c_char * size).from_address(values.data_ptr()))
    return f"sha256:{digest.hexdigest()}"

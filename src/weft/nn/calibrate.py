"""Calibration: observe the largest inputs of a model's layers over sample batches, for recipes with frozen scales."""

from __future__ import annotations

import math
import operator
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import Recipe, quantize
from ..ops.common.checks import real
from ..quant import QTensor
from ..runtime import autocasted
from ..runtime.notice import is_quiet
from .convert import static_layers
from .gather import Filter
from .linear import Linear
from .scales import Calibration, LayerScale, hash_of, title
from .static import FORMAT, STATIC, StaticLinear, check_unwrapped

OUTLIER = 20.0  # times the median


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    percentile: float = 99.9,
    out: str | os.PathLike[str] | None = None,
    filter: Filter | None = None,
) -> Calibration:
    """Run a model over sample batches and choose the scale of every layer's input, for
    `weft.nn.convert(model, "fp8_static", scales=...)`.

    - `batches`: each is a tensor, a tuple or list of positional arguments, or a dict of keyword arguments of the model,
      on its device.
    - `percentile`: of a layer's amaxes, one per batch, interpolated linearly; values above it will saturate. 100 is the
      maximum.
    - `out`: the file to write, JSON. Equal weights and batches give equal bytes.
    - `filter(name, module)`: the layers, as in `convert`, which also explains the default.

    The amax of a batch is the largest |x| over all calls of the layer in it. The model runs in eval mode, without
    gradients; afterwards its modes and PyTorch's random state are as before. Amaxes stay on the device until the last
    batch. A NaN or Inf is an error; a layer whose largest amax is more than 20 times its median causes a warning.

    Calibrate the model that will be converted, before `torch.compile`, DDP or `fully_shard`, and in the precision in
    which it will be called (`torch.autocast` included).

    >>> import torch, weft
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
    >>> scales = weft.calibrate(model, torch.randn(4, 8, 64))
    >>> print(scales)
    2 layers calibrated over 4 batches, at percentile 99.9
    >>> weft.nn.convert(model, "fp8_static", scales=scales).changed
    ['0', '2']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got a {type(model).__name__}")
    if not 0.0 <= real("percentile", percentile) <= 100.0:
        raise ValueError(f"percentile must be from 0 to 100; got {percentile}")
    if out is not None and not Path(out).absolute().parent.is_dir():
        raise FileNotFoundError(
            f"out={os.fspath(out)!r} is in a directory that does not exist: create it first"
        )
    check_unwrapped(model)
    observers = {name: _Observer(name, layer) for name, layer in static_layers(model, filter).items()}
    if not observers:
        raise ValueError(
            f"the model has no layer that {STATIC!r} converts: print(weft.nn.convert(model, 'fp8_tensor')) shows why"
        )
    observed = []
    with _observed(model, observers.values()):
        for batch in _shown(batches):
            _call(model, batch)
            observed.append(_end_batch(observers.values()))
    if not observed:
        raise ValueError("batches is empty: calibrate needs at least one batch")
    amaxes = _read(observed, observers)
    layers = {
        name: LayerScale(observers[name].weight_hash, _percentile(values, percentile))
        for name, values in amaxes.items()
    }
    _warn_of_outliers(amaxes)
    result = Calibration(FORMAT, float(percentile), len(observed), layers)
    if out is not None:
        result.save(out)
    return result


# ---- observation ----------------------------------------------------------------------------------------


class _Observer:
    """Amax of one layer's input, on the device."""

    def __init__(self, name: str, layer: nn.Linear) -> None:
        if isinstance(layer, StaticLinear) or (
            isinstance(layer, Linear) and Recipe.of(layer.recipe).is_quantized
        ):
            raise ValueError(
                f"{title(name)} computes with the recipe {layer.recipe!r}: calibrate the model without one, after "
                "weft.nn.convert(model, None)"
            )
        self.name, self.layer = name, layer
        self.weight_hash = hash_of(name, layer.weight)
        self.amax: Tensor | None = None  # fp32 scalar, of the present batch; None before the first call in it

    def observe(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the amax of a call's input; a forward pre-hook."""
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, Tensor) or x.numel() == 0:
            return
        x = autocasted(x.detach())
        if isinstance(x, QTensor) or not x.is_floating_point() or x.dtype is torch.float64:
            kind = x.spec if isinstance(x, QTensor) else x.dtype
            raise ValueError(
                f"{title(self.name)} takes an input in {kind}; calibrate needs bf16, fp16 or fp32"
            )
        one = torch.ones((), dtype=torch.float32, device=x.device)
        _, amax = quantize(x, FORMAT, scale=one, return_amax=True)  # with a scale, x is read once
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)


@contextmanager
def _observed(model: nn.Module, observers: Iterable[_Observer]) -> Iterator[None]:
    """Observe a model in eval mode, without gradients; leave it and the random state as they were."""
    devices = {t.device for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}
    modes = {module: module.training for module in model.modules()}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=sorted(devices, key=str)))
        stack.callback(_restore_modes, model, modes)
        if "torch._dynamo" in sys.modules:  # code compiled earlier does not see new hooks
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.no_grad())
        for observer in observers:
            # The last hook observes what the layer takes, after all changes by others.
            hook = observer.layer.register_forward_pre_hook(observer.observe, with_kwargs=True)
            stack.callback(hook.remove)
        model.eval()
        yield


def _restore_modes(model: nn.Module, modes: dict[nn.Module, bool]) -> None:
    model.train(modes[model])
    for module, training in modes.items():
        module.training = training


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Tensor):
        model(batch)
    elif isinstance(batch, (tuple, list)):
        model(*batch)
    elif isinstance(batch, Mapping):
        model(**batch)
    else:
        raise TypeError(
            "a batch must be a tensor, a tuple or list of positional arguments, or a dict of keyword arguments; got "
            f"{type(batch).__name__}"
        )


def _shown(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches, with a progress bar on a terminal."""
    if is_quiet():
        yield from batches
        return
    from rich.console import Console
    from rich.progress import track

    total = operator.length_hint(batches) or None
    yield from track(batches, "calibrating", total, console=Console(stderr=True), transient=True)


# ---- statistics -----------------------------------------------------------------------------------------


def _end_batch(observers: Iterable[_Observer]) -> list[tuple[list[str], Tensor]]:
    """Return the names and amaxes of the layers that the batch called, as one tensor per device."""
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for observer in observers:
        if observer.amax is not None:
            by_device.setdefault(observer.amax.device, {})[observer.name] = observer.amax
        observer.amax = None
    return [(list(amaxes), torch.stack(list(amaxes.values()))) for amaxes in by_device.values()]


def _read(observed: list[list[tuple[list[str], Tensor]]], names: Iterable[str]) -> dict[str, Tensor]:
    """Return every layer's amaxes in fp64 on the host, one for each batch that called it. Raise ValueError for NaN and
    Inf."""
    amaxes: dict[str, list[float]] = {name: [] for name in names}
    for number, batch in enumerate(observed):
        for called, values in batch:
            for name, amax in zip(called, values.tolist(), strict=True):
                if not math.isfinite(amax):
                    kind = "a NaN" if math.isnan(amax) else "an Inf"
                    raise ValueError(
                        f"the input of {title(name)} has {kind} in batch {number}, so it has no scale: mend or drop "
                        "the batch, or leave the layer out with filter="
                    )
                amaxes[name].append(amax)
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in amaxes.items()}


def _percentile(amaxes: Tensor, percentile: float) -> float | None:
    return float(amaxes.quantile(percentile / 100.0)) if len(amaxes) else None


def _warn_of_outliers(amaxes: dict[str, Tensor]) -> None:
    """Warn once of the layers whose largest amax is far above their median."""
    found = []
    for name, values in amaxes.items():
        if not len(values):
            continue
        largest, median = float(values.max()), float(values.quantile(0.5))
        if largest > OUTLIER * median:
            ratio = f"{largest / median:.0f} times" if median else "infinitely above"
            found.append(f"{title(name)} ({largest:.4g}, {ratio} its median)")
    if found:
        warnings.warn(
            f"outliers: the largest input of some layers is more than {OUTLIER:.0f} times the median over the batches, "
            "so that ordinary inputs may be rounded coarsely. Look at these batches, or calibrate with a lower "
            f"percentile: {'; '.join(found)}",
            stacklevel=3,
        )

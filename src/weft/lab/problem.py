"""Workloads: one op, one real shape, one set of options, and a builder of inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..quant import QTensor
from ..runtime import Capabilities, catalogue, recording

Size = int | Literal["rows"]


@dataclass(frozen=True)
class Call:
    """A function with its arguments; calling it runs it."""

    function: Callable[..., Any]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.function(**self.kwargs)

    def __getitem__(self, name: str) -> Any:
        return self.kwargs.get(name)

    def tensors(self) -> dict[str, Tensor]:
        """Return the plain tensors among the arguments."""
        return {
            name: value
            for name, value in self.kwargs.items()
            if isinstance(value, Tensor) and not isinstance(value, QTensor)
        }

    @property
    def device(self) -> torch.device:
        """Device of its first tensor."""
        return next(_leaves(list(self.kwargs.values()))).device

    def to(self, device: torch.device | str) -> Call:
        """Return the call with its tensors on a device, such that gradients flow back to the originals."""
        return replace(self, kwargs=moved(self.kwargs, torch.device(device)))

    def with_(self, **changed: Any) -> Call:
        """Return the call with some arguments changed or added."""
        return replace(self, kwargs={**self.kwargs, **changed})

    def requiring_grad(self) -> Call:
        """Return the call with new leaves in place of its floating-point tensors."""
        leaves = {
            name: tensor.detach().requires_grad_()
            for name, tensor in self.tensors().items()
            if tensor.is_floating_point() and name not in ("quant_scale", "out", "residual_out")
        }
        return self.with_(**leaves)


def run_op(name: str, **arguments: Any) -> list[Tensor]:
    """Call an op of the catalogue with arguments by name; return the outputs that are not None."""
    op = catalogue[name]
    outputs = op(op.arguments.cls(**arguments))
    return [output for output in op.outputs.flatten(outputs) if output is not None]


PERIOD = 2**20 - 3  # a prime, so that rows of any length differ


class Inputs:
    """Source of a builder's tensors: seeded normal values, or nothing on the meta device."""

    def __init__(self, device: torch.device | str, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self._generator = torch.Generator().manual_seed(seed)

    def normal(
        self, *shape: int, mean: float = 0.0, std: float = 1.0, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Large tensors reuse one block of random values; drawing every element would take longer than most ops."""
        output = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        if self.device.type == "meta":
            return output
        drawn = torch.randn(min(output.numel(), PERIOD), generator=self._generator) * std + mean
        drawn = drawn.to(output)
        for part in torch.split(output.view(-1), PERIOD):
            part.copy_(drawn[: part.numel()])
        return output

    def activation(self, *shape: int) -> Tensor:
        """Return a tensor like a hidden state: about one channel in a thousand has outliers."""
        drawn = self.normal(*shape)
        if drawn.device.type != "meta":
            drawn[..., :: 997 if shape[-1] > 997 else 97] *= 30
        return drawn


Build = Callable[["Workload", Inputs, tuple[int, ...]], Call]


@dataclass(frozen=True)
class Workload:
    """A named problem of an op.

    - `op`: its name in `weft.catalogue`; `options`: the name of its set of options.
    - `name`: the model and the place in it that the shape comes from.
    - `shape`: shape of the main input; "rows" in it stands for the number of tokens, which is `rows`.
    - `tags`: `training`, `inference`, and `backward` for ops that autograd calls rather than a person.
    - `fp8_dot`: it needs a target that multiplies e4m3.
    - `unread`: arguments of which only shape and dtype are read.
    - `rereads`: why more than `least_bytes` must move, and `moves`: the maximum as a multiple of `least_bytes`.
    """

    op: str
    name: str
    options: str
    shape: tuple[Size, ...]
    rows: int
    build: Build = field(repr=False)
    tags: frozenset[str] = frozenset({"training"})
    dtype: torch.dtype = torch.bfloat16
    settings: tuple[tuple[str, Any], ...] = ()
    fp8_dot: bool = False
    unread: tuple[str, ...] = ()
    rereads: str = ""
    moves: float = 1.02

    def __post_init__(self) -> None:
        if (self.moves > 1.02) != bool(self.rereads):
            raise ValueError(
                f"{self}: `moves` above 1 needs a reason in `rereads`, and `rereads` needs `moves` above 1"
            )

    def __str__(self) -> str:
        return f"{self.op}:{self.name}:{self.options}:{self.rows}"

    def runs_on(self, target: str) -> bool:
        return Capabilities.of(target).fp8_dot or not self.fp8_dot

    @property
    def cols(self) -> int:
        last = self.shape[-1]
        assert isinstance(last, int)
        return last

    def sized(self, rows: int) -> tuple[int, ...]:
        """Return the shape with that many rows."""
        return tuple(rows if size == "rows" else size for size in self.shape)

    def make(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        rows: int | None = None,
        seed: int = 0,
    ) -> Call:
        """Return the call, with inputs on `device` and optionally another number of rows or another dtype."""
        inputs = Inputs(device, dtype or self.dtype, seed)
        return self.build(self, inputs, self.sized(self.rows if rows is None else rows))

    def least_bytes(self, rows: int | None = None, dtype: torch.dtype | None = None) -> int:
        """Return the minimum of bytes to move: every input is read once and every output written once. An output that
        is a view of an input (the gate of a modulation) counts as neither."""
        call = self.make("meta", dtype, rows)
        with recording("sm_90"):
            result = call()
        inputs = list(_leaves([value for name, value in call.kwargs.items() if name not in self.unread]))
        input_storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        moved = sum(map(_bytes, inputs))
        for tensor in _leaves(result):
            moved += -_bytes(tensor) if tensor.untyped_storage()._cdata in input_storages else _bytes(tensor)
        return moved


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of distinct elements: an expanded dimension counts once."""
    distinct = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        distinct *= size if stride or size == 0 else 1
    return distinct * tensor.element_size()


def _leaves(value: Any) -> Iterator[Tensor]:
    """Yield the plain tensors inside results or arguments."""
    if isinstance(value, QTensor):
        for copy in (value.rowwise, value.columnwise):
            yield from _leaves(copy)
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)


def moved(value: Any, device: torch.device) -> Any:
    """Return arguments or results with all tensors on a device; tensors that are there already are not copied."""
    if isinstance(value, Tensor):
        return value if value.device == device else value.to(device)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    if hasattr(value, "_fields"):
        return type(value)(*(moved(item, device) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(moved(item, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{f.name: moved(getattr(value, f.name), device) for f in fields(value) if f.init}
        )
    return value

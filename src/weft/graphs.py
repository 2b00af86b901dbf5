"""`weft.capture`: record a function of tensors once, then replay it without its Python.

On a GPU the recording is a CUDA graph. On the CPU it is a tape of everything the function did to memory: kernel
launches with their pointers, and PyTorch's operations. A replay runs the same work on the same memory.

Anything a replay would get wrong is refused, on the CPU as CUDA graphs refuse it on a GPU: values that Python reads,
shapes that depend on values, inputs changed in place, seeds, and launches that are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from .runtime import Launch, observing
from .runtime.ops import seen_through

R = TypeVar("R")


def capture(fn: Callable[..., R], *examples: Tensor, sizes: Sequence[int] = ()) -> Captured[R]:
    """Record `fn(*examples)` and return a function that replays it on other values.

    `fn` takes tensors and returns tensors; whatever varies between calls must be in tensors on the device. The result
    of a replay is valid until the next one. A replay on a GPU allocates nothing. Gradients are not recorded.

    A replay runs no Python: `fn` must not read values (`.item()`, `.tolist()`, `.numpy()`, `if x > 0`), make tensors
    whose shapes depend on values (`nonzero`, `x[mask]`, `unique`), change its inputs, or draw from a generator other
    than PyTorch's own. All of these are refused. Tensors that `fn` writes to, such as a cache, belong in its closure.

    `sizes` makes one recording per size: inputs whose first dimension equals the first example's may then have any
    number of rows up to the largest size. They are copied into the smallest recording that fits, and every dimension of
    a result that follows the number of rows is cut to it; `fn` runs once more with another number of rows to tell which
    do. The padding rows hold values of earlier calls. A result that depends on them, such as a sum over rows, or that
    has another number of rows, serves only calls with exactly as many rows as a recording; others are refused.

    >>> import torch, weft
    >>> step = weft.capture(lambda x: weft.rms_norm(x), torch.randn(4, 64), sizes=(4, 16))
    >>> tuple(step(torch.randn(9, 64)).shape)
    (9, 64)
    """
    if not examples:
        raise TypeError("weft.capture needs an example of each input: weft.capture(fn, x, ...)")
    for number, example in enumerate(examples):
        if not isinstance(example, Tensor):
            kind = type(example).__name__
            raise TypeError(
                f"input {number} is a {kind}; whatever varies must be a tensor, the rest belongs in fn"
            )
    devices = {example.device for example in examples}
    if len(devices) > 1:
        raise ValueError(f"the inputs are on several devices: {', '.join(sorted(map(str, devices)))}")
    if sizes and examples[0].dim() == 0:
        raise ValueError("sizes are numbers of rows, but the first example is a scalar")
    return Captured(fn, examples, tuple(sorted(set(sizes))))


class Captured(Generic[R]):
    """Function that replays recordings, made by `weft.capture`."""

    def __init__(self, fn: Callable[..., R], examples: tuple[Tensor, ...], sizes: tuple[int, ...]) -> None:
        self.examples = tuple(example.detach() for example in examples)
        self.rows = len(examples[0]) if sizes else None
        self.recordings = {size: _Recording(fn, self._inputs(size)) for size in sizes or (None,)}
        with torch.random.fork_rng(devices=[]):
            self.cuts = self._find_cuts(fn, sizes) if sizes else []

    @property
    def operations(self) -> int | None:
        """Number of kernel launches and PyTorch operations that a replay runs (of the largest size, if there are
        several); None on a GPU, whose graphs do not tell."""
        return self.recordings[max(self.recordings, key=lambda size: size or 0)].operations

    def _inputs(self, size: int | None) -> list[Tensor]:
        """Return memory for inputs with `size` rows, filled by repeating the examples."""
        inputs = []
        for example in self.examples:
            if size is not None and self._varies(example):
                repeats = (-(-size // max(1, len(example))),) + (1,) * (example.dim() - 1)
                inputs.append(example.repeat(repeats)[:size].clone())
            else:
                inputs.append(example.clone(memory_format=torch.preserve_format))
        return inputs

    def _varies(self, example: Tensor) -> bool:
        return self.rows is not None and example.dim() > 0 and len(example) == self.rows

    def _find_cuts(self, fn: Callable[..., R], sizes: tuple[int, ...]) -> list[_Cut]:
        """Determine how each result depends on the number of rows: its shape, from runs with several numbers of rows,
        and its values, from replays of one recording with other rows beyond the first half."""
        largest = sizes[-1]
        runs = {size: tree_flatten(self.recordings[size].result)[0] for size in sizes}
        if largest > 1 and largest - 1 not in runs:
            with torch.no_grad():
                runs[largest - 1] = tree_flatten(fn(*self._inputs(largest - 1)))[0]
        if len({len(leaves) for leaves in runs.values()}) > 1:
            raise TypeError(
                "the captured function returns a different number of tensors for different numbers of rows"
            )
        cuts = [
            _Cut.of({size: tuple(leaf.shape) for size, leaf in zip(runs, leaves, strict=True)})
            for leaves in zip(*runs.values(), strict=True)
        ]
        return cuts if largest == 1 else self._with_mixed_rows(self.recordings[largest], largest, cuts)

    def _with_mixed_rows(self, recording: _Recording, size: int, cuts: list[_Cut]) -> list[_Cut]:
        """Return the cuts, marking results whose first rows depend on the rows beyond them."""
        rows = size // 2
        varying = [
            x for x, example in zip(recording.inputs, self.examples, strict=True) if self._varies(example)
        ]
        originals = [x.clone() for x in varying]

        def replay() -> list[Tensor]:
            recording.replay()
            leaves = tree_flatten(recording.result)[0]
            return [cut(leaf, rows).clone() for leaf, cut in zip(leaves, cuts, strict=True)]

        with torch.no_grad():
            baseline, repeat = replay(), replay()
            for x in varying:
                beyond = x[rows:]
                # Float rows may take any value; indices must stay among those of the example.
                beyond.copy_(
                    beyond * -0.5 + 1 if x.is_floating_point() else beyond.flatten().flip(0).view_as(beyond)
                )
            changed = replay()
            for x, original in zip(varying, originals, strict=True):
                x.copy_(original)
            recording.replay()
        # If two replays on the same values differ, as with random numbers, the comparison says nothing.
        return [
            cut._replace(mixed=_same(one, two) and not _same(one, three))
            for cut, one, two, three in zip(cuts, baseline, repeat, changed, strict=True)
        ]

    def __call__(self, *inputs: Tensor) -> R:
        rows = self._check(inputs)
        size = next(
            (size for size in self.recordings if size is not None and rows is not None and size >= rows), None
        )
        if rows is not None and size is not None and rows < size:
            for number, cut in enumerate(self.cuts):
                if reason := cut.unsuitable():
                    raise ValueError(
                        f"{rows} rows would be padded to {size}, and result {number} {reason}: capture with sizes that "
                        f"have {rows}"
                    )
        recording = self.recordings[size]
        with torch.no_grad():
            for memory, value, example in zip(recording.inputs, inputs, self.examples, strict=True):
                (memory[:rows] if self._varies(example) else memory).copy_(value)
        recording.replay()
        if rows is None or rows == size:
            full_result: R = recording.result
            return full_result
        leaves, structure = tree_flatten(recording.result)
        cut_leaves = [cut(leaf, rows) for leaf, cut in zip(leaves, self.cuts, strict=True)]
        cut_result: R = tree_unflatten(cut_leaves, structure)
        return cut_result

    def _check(self, inputs: Sequence[Tensor]) -> int | None:
        """Return the number of rows of the inputs; raise if they differ from the examples in anything else."""
        if len(inputs) != len(self.examples):
            raise TypeError(f"{len(self.examples)} inputs were captured, but {len(inputs)} were passed")
        for number, value in enumerate(inputs):
            if not isinstance(value, Tensor):
                raise TypeError(f"input {number} is a {type(value).__name__}: pass a tensor, as was captured")
        rows = len(inputs[0]) if self.rows is not None and inputs[0].dim() else None
        for number, (value, example) in enumerate(zip(inputs, self.examples, strict=True)):
            shape = tuple(example.shape)
            if rows is not None and self._varies(example):
                shape = (rows, *shape[1:])
            for property_name, actual, expected in (
                ("shape", tuple(value.shape), shape),
                ("dtype", value.dtype, example.dtype),
                ("device", value.device, example.device),
            ):
                if actual != expected:
                    raise ValueError(
                        f"input {number} has {property_name} {actual}, but {expected} was captured: capture again"
                    )
        if rows is not None and rows > max(size for size in self.recordings if size is not None):
            raise ValueError(f"{rows} rows are more than the largest of sizes={tuple(self.recordings)}")
        return rows


class _Cut(NamedTuple):
    """Dependence of one result on the number of rows."""

    dims: tuple[int, ...]  # their length is the number of rows
    others: str  # dimensions that depend on it in another way, in words
    mixed: bool  # its values depend on the rows that are cut off

    @staticmethod
    def of(shapes: dict[int, tuple[int, ...]]) -> _Cut:
        """Build a cut from the shapes of a result for several numbers of rows."""
        if len({len(shape) for shape in shapes.values()}) > 1:
            return _Cut((), f"has the shapes {_listed(shapes)}", mixed=False)
        dims, others = [], ""
        for dim, lengths in enumerate(zip(*shapes.values(), strict=True)):
            if lengths == tuple(shapes) and len(shapes) > 1:
                dims.append(dim)
            elif len(set(lengths)) > 1:
                others = f"has the shapes {_listed(shapes)}"
        return _Cut(tuple(dims), others, mixed=False)

    def unsuitable(self) -> str:
        """Return the reason a padded result cannot be cut, or an empty string."""
        return self.others or ("depends on the padding, as a sum over rows does" if self.mixed else "")

    def __call__(self, x: Tensor, rows: int) -> Tensor:
        for dim in self.dims:
            x = x.narrow(dim, 0, rows)
        return x


def _listed(shapes: dict[int, tuple[int, ...]]) -> str:
    return ", ".join(f"{shape} for {rows} rows" for rows, shape in sorted(shapes.items()))


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())


class _Recording:
    """Recording of one size, with the memory it reads and writes."""

    def __init__(self, fn: Callable[..., Any], inputs: list[Tensor]) -> None:
        self.inputs = inputs
        versions = [x._version for x in inputs]
        self.operations: int | None = None
        if inputs[0].device.type == "cuda":
            self.result, self.replay = _record_graph(fn, inputs)
        else:
            self.result, tape = _record_tape(fn, inputs)
            self.replay, self.operations = tape.replay, len(tape.steps)
        for number, (x, version) in enumerate(zip(inputs, versions, strict=True)):
            if x._version != version:
                raise RuntimeError(
                    f"the captured function changes input {number} in place, which a replay would do to a copy: "
                    "change a clone, or a tensor of its closure, instead"
                )
        for leaf in tree_flatten(self.result)[0]:
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"the captured function returns a {type(leaf).__name__}; it must return tensors"
                )


def _record_graph(fn: Callable[..., Any], inputs: list[Tensor]) -> tuple[Any, Callable[[], None]]:
    device = inputs[0].device
    side_stream = torch.cuda.Stream(
        device
    )  # warms up: compiles kernels and initializes libraries, apart from other work
    side_stream.wait_stream(torch.cuda.current_stream(device))
    with torch.no_grad(), torch.cuda.stream(side_stream):
        fn(*inputs)
    torch.cuda.current_stream(device).wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        result = fn(*inputs)
    return result, graph.replay


# ---- on the CPU -------------------------------------------------------------------------------------------

# Operations that allocate memory or return another view of it: the tape keeps their results.
_ALLOCATING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
# PyTorch's operations that read values on the host; operations of other libraries do if they return non-tensors.
_SYNCHRONIZING = ("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose")
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
# Ways for Python to read a tensor's values that bypass the dispatcher.
_HOST_READS = {
    Tensor.numpy: ".numpy()",
    Tensor.tolist: ".tolist()",
    Tensor.__array__: "NumPy",
    Tensor.__dlpack__: "DLPack",
    torch.tensor_split: "torch.tensor_split by a tensor",
    Tensor.tensor_split: "torch.tensor_split by a tensor",
}


def _refuse(what: str, why: str) -> NoReturn:
    raise RuntimeError(f"{what} {why}, so it can't be captured")


class _HostReadGuard(TorchFunctionMode):
    """Guard that refuses host reads which bypass the dispatcher, and so the tape."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        what = _HOST_READS.get(func)
        if what is not None and (
            "tensor_split" not in what
            or any(isinstance(x, Tensor) for x in (*args[1:], *(kwargs or {}).values()))
        ):
            _refuse(what, "reads values on the host, which a replay would not read again")
        return func(*args, **kwargs or {})


class _Tape(TorchDispatchMode):
    """Record of what is done to memory, in order, while it is done."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Callable[[], object]] = []
        self.saved: list[Any] = []
        self.random = torch.get_rng_state()  # after the last random operation
        self.inside = False  # an operation, which a replay runs as a unit
        self.announced = 0  # launches that are recorded but have not begun
        self.foreign: list[str] = []  # kernels whose launches are not recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._check(func, args, kwargs)
        self.inside = True
        try:
            result = func(*args, **kwargs)
        finally:
            self.inside = False
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random = torch.get_rng_state()
        self.saved.append((args, kwargs, result))
        if func.overloadpacket.__name__ in _ALLOCATING or func.is_view:
            return result
        if func._schema.is_mutable:
            self.steps.append(lambda: func(*args, **kwargs))
        else:
            self.steps.append(lambda: _put(func, func(*args, **kwargs), result))
        return result

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        name, schema = func.overloadpacket.__name__, func._schema
        foreign = func.namespace != "aten" and any("Tensor" not in str(each.type) for each in schema.returns)
        if name in _SYNCHRONIZING or foreign or torch.Tag.data_dependent_output in func.tags:
            _refuse(str(func), "reads values on the host, which would have to wait for a GPU")
        masked = name in _INDEXING and any(
            isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        filled = masked and "put" in name and args[2].numel() == 1  # torch computes this one with a mask
        if masked and not filled:
            _refuse(f"{func} by a mask", "has a shape that depends on values (torch.where has not)")
        if torch.Tag.dynamic_output_shape in func.tags and name not in _INDEXING:
            _refuse(str(func), "has a shape that depends on values")
        if kwargs.get("generator") is not None:
            _refuse(
                f"{func} with a generator",
                "would keep drawing from it; draw from PyTorch's default generator",
            )
        if torch.Tag.nondeterministic_seeded in func.tags and not torch.equal(
            self.random, torch.get_rng_state()
        ):
            _refuse("setting a seed", "happens in Python, which a replay does not run")

    def replay(self) -> None:
        with torch.no_grad():
            for step in self.steps:
                step()

    def note_launch(self, launch: Launch, grid: Any, pointers: Any, integers: Any, floats: Any) -> None:
        if self.inside:
            return
        self.announced += 1
        self.saved.append(pointers)
        self.steps.append(lambda: launch(grid, pointers, integers, floats))

    def begin_launch(self, launched: Any) -> None:
        """Count the launch; Triton calls this before any kernel."""
        if self.announced:
            self.announced -= 1
        elif not self.inside:
            self.foreign.append((launched if isinstance(launched, dict) else launched.get())["name"])


def _put(func: Any, result: Any, destination: Any) -> None:
    for source, target in zip(tree_flatten(result)[0], tree_flatten(destination)[0], strict=True):
        if isinstance(target, Tensor):
            if source.shape != target.shape:
                raise RuntimeError(
                    f"{func} returned {tuple(source.shape)} in this replay but {tuple(target.shape)} when captured: "
                    "its shape depends on values, so it can't be captured"
                )
            target.copy_(source)


@contextmanager
def _taping() -> Iterator[_Tape]:
    from triton import knobs

    tape = _Tape()
    launches = knobs.runtime.launch_enter_hook
    launches.add(tape.begin_launch)
    try:
        with seen_through(), observing(tape.note_launch), tape, _HostReadGuard():
            yield tape
    finally:
        launches.remove(tape.begin_launch)
    if tape.foreign:
        raise RuntimeError(
            f"the kernel {tape.foreign[0]} was launched directly by Triton, which is not recorded on a CPU: it can't "
            "be captured, unless it is part of an op of torch.library"
        )


def _record_tape(fn: Callable[..., Any], inputs: list[Tensor]) -> tuple[Any, _Tape]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.seed()  # a state that no seed in `fn` can produce
        with torch.no_grad(), _taping() as tape:
            result = fn(*inputs)
    return result, tape

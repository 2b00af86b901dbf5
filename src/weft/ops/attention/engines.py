"""Choice of engine for attention: Weft's own kernels, or another library's where those are better.

One table decides. `weft doctor` prints it for the devices of a machine, `engine=` overrides it for a call, and
`record_engines()` reports what ran. Its reasons for GPUs are public figures; this project measured none of them.

A library serves a call only if it supports all of it: no mask, bias or ALiBi, no sinks, no `kv_lengths`, `kv_limits` or
`prefix_lengths`, no largest scores, a plain result, a visible key for every query, and whatever else its entry in
`libraries.LIBRARIES` requires. Otherwise Weft's own kernels do, silently under "auto". Backward is chosen separately:
it needs only y, lse and the inputs; Weft's backward may follow a library's forward, for example for a gradient of lse,
which no library takes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch

from ...runtime import Capabilities, capabilities_of
from ..common.engines import is_recorded, note_engine, require_engine
from ..common.heads import LAYOUTS
from .arguments import AttentionArgs, AttentionBackwardArgs, Mask
from .libraries import HALVES, LIBRARIES, Library

Engine = Literal["auto", "weft", "torch", "fa2", "fa3", "fa4", "aiter"]
ENGINES = get_args(Engine)

Args = AttentionArgs | AttentionBackwardArgs


class Rule(NamedTuple):
    """Table entry: on these targets a library is preferred to Weft's own kernels for bf16 and fp16, if it supports
    the whole call."""

    targets: tuple[str, ...]
    library: str
    backward: bool  # its backward is preferred, too
    why: str


# The first rule whose library is installed and supports the call applies; without one, Weft's kernels run.
TABLE: tuple[Rule, ...] = (
    Rule(
        ("cpu",), "PyTorch on CPUs", False,
        "measured: Weft's own has 0.33 to 0.43 of its speed, backward 0.63; but its backward adds blocks of queries to "
        "gradients of keys and values in their dtype: 1.6 to 4.3 times the error, more for more queries to a key",
    ),
    Rule(("sm_90",), "FlashAttention-3", True, "648 TFLOPS on an H100, a Triton kernel 465 to 487 (its paper)"),
    Rule(("sm_100", "sm_103"), "FlashAttention-4", True, "2.1 to 2.7 times a Triton kernel (arXiv 2603.05451)"),
    Rule(("sm_90", "sm_100", "sm_103"), "cuDNN", False, "595 to 617 TFLOPS on an H100; 1 / 1.3 of FlashAttention-4"),
)  # fmt: skip

_BY_NAME = {library.name: library for library in LIBRARIES}


class Attended(NamedTuple):
    """Record of an attention that ran, forward or backward."""

    engine: str
    library: str  # name of the library whose kernels ran
    backward: bool
    queries: int  # tokens of a sequence, or of all packed sequences
    keys: int
    heads: int
    dim: int


def choose_library(a: Args, target: Capabilities) -> Library | None:
    """Return the library whose kernels serve a call on a target, None for Weft's own; note the choice for
    `record_engines`."""
    chosen = None
    if a.engine != "weft":
        for library in _candidates(a, target):
            if obstacle(library, a, target) is None:
                chosen = library
                break
        else:
            if isinstance(a, AttentionArgs) and not a.query.is_meta:
                require_engine(a.engine, ENGINES, lambda: _missing_feature(a, target))
    if is_recorded():
        engine, name = ("weft", "Weft") if chosen is None else (chosen.engine, chosen.name)
        _, sequence, heads, _ = LAYOUTS[a.layout]
        shape, keys = a.query.shape, a.key.shape[sequence]
        backward = isinstance(a, AttentionBackwardArgs)
        note_engine(Attended(engine, name, backward, shape[sequence], keys, shape[heads], shape[-1]))
    return chosen


def _candidates(a: Args, target: Capabilities) -> list[Library]:
    """Return the libraries to try for a call, best first."""
    if a.engine != "auto":
        return [each for each in LIBRARIES if each.engine == a.engine and target.target in each.targets]
    if a.query.dtype not in HALVES:
        return []
    return _preferred(target.target, isinstance(a, AttentionBackwardArgs))


def _preferred(target: str, backward: bool) -> list[Library]:
    """Return the libraries that the table prefers on a target."""
    rules = [rule for rule in TABLE if target in rule.targets and rule.backward >= backward]
    return [_BY_NAME[rule.library] for rule in rules]


def check_engine(a: AttentionArgs) -> None:
    """Raise ValueError unless the engine that a call requires can compute it."""

    def unsupported_reason() -> str | None:
        # A compiled graph checks when it runs: here the libraries' size checks would become guards of the graph.
        # Recording kernels on meta tensors always uses Weft's own.
        deferred = torch.compiler.is_compiling() or a.query.is_meta
        return None if deferred else _missing_feature(a, capabilities_of(a.query.device))

    require_engine(a.engine, ENGINES, unsupported_reason)


def _missing_feature(a: AttentionArgs, target: Capabilities) -> str | None:
    """Return what the required engine lacks for a call, or None."""
    missing: str | None = f"kernels for {target.target}"
    for library in _candidates(a, target):
        missing = obstacle(library, a, target)
        if missing is None:
            break
    return missing


def obstacle(library: Library, a: Args, target: Capabilities) -> str | None:
    """Return the reason why a library cannot compute a call on one of its targets, or None."""
    if a.query.device.type != ("cpu" if target.is_cpu else "cuda"):
        return f"kernels for tensors on {a.query.device}"
    if a.query.dtype not in library.dtypes:
        return f"kernels for {a.query.dtype}"
    return _missing_option(library, a) or _missing_mask(library, a) or _missing_sizes(library, a)


def _missing_option(library: Library, a: Args) -> str | None:
    if a.sinks is not None:
        return "sinks"
    for name, tensor in (("mask", a.seen), ("bias", a.bias), ("alibi", a.alibi)):
        if tensor is not None:
            return name
    if a.softcap and "softcap" not in library.options:
        return "softcap"
    if isinstance(a, AttentionArgs):
        if a.query_codes.format is not None:
            return "scores in eight bits"
        if a.return_max:
            return "the largest scores (return_max)"
        if a.result.format is not None:
            return "a quantized result"
        return None
    if library.backward is None:
        return "a backward with the same bits in every run"
    if a.dlse is not None:
        return "gradients of lse"
    return library.backward_lacks(a.query.shape[-1], a.value.shape[-1])


def _missing_mask(library: Library, a: Args) -> str | None:
    if a.packed.kv_lengths is not None:
        return "kv_lengths, which may leave queries without a key"
    if a.packed.limited:
        return "kv_limits and prefix_lengths"
    mask = a.mask
    if mask.banded and (mask.left is not None or mask.right != 0) and "window" not in library.options:
        return "window"
    sequence = LAYOUTS[a.layout][1]
    queries, keys = a.query.shape[sequence], a.key.shape[sequence]
    if keys < library.keys:
        return f"calls with {keys} keys"
    if a.packed.q_starts is not None:
        if "packed" not in library.options:
            return "packed sequences"
        if a.packed.k_starts is not a.packed.q_starts:
            return "packed sequences with keys of their own, which may leave queries without a key"
        return None if queries == keys else "packed sequences with different numbers of query and key tokens"
    if not mask.banded or queries == keys:
        return None
    if library.align != ("lower_right" if mask.lower_right else "upper_left"):
        return "this causal_align for different numbers of keys and queries"
    return None if all_see(mask, queries, keys) else "queries that see no key"


def all_see(mask: Mask, queries: int, keys: int) -> bool:
    """Return whether each query sees a key."""
    if mask.lower_right:  # only the first query's own key may lie before all keys
        return mask.right is None or keys - queries + mask.right >= 0
    return mask.left is None or queries - 1 - mask.left <= keys - 1


def _missing_sizes(library: Library, a: Args) -> str | None:
    dim, v_dim = a.query.shape[-1], a.value.shape[-1]
    if not library.widths(dim, v_dim):
        return f"heads of {dim} and {v_dim} elements"
    return library.missing()


def attention_on(target: str) -> str:
    """Describe the engines that serve attention on a target."""
    listed = []
    for library in _preferred(target, backward=False):
        missing, coverage = library.missing(), "bf16, fp16"
        if library not in _preferred(target, backward=True):
            coverage += " forward"
        serves = coverage if missing is None else f"not without {missing}"
        listed.append(f"{library.engine} ({library.name}): {serves}")
    return "; ".join([*listed, "weft: the others" if listed else "weft"])

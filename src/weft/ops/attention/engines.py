"""Who attends: Weft's own kernels, or those of other libraries where they are better.

One table decides. `weft doctor` prints it for the devices of a machine, `engine=` overrides it for a call, and
`record_engines()` tells what ran. Its reasons for GPUs are public figures; none was measured by this project.

A library takes a call if it has all of it: no sinks, no `kv_lengths`, no largest scores, a plain result, every query
with a key to see, and whatever else its entry in `libraries.LIBRARIES` says. Otherwise Weft's own kernels
do, without a word under "auto". Backward is chosen for itself: it needs y, lse and the inputs, whoever made them, so
that Weft's own may follow another's forward, as for a gradient of lse, which no library takes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch

from ...runtime import Capabilities, capabilities_of
from ..common.engines import insist, is_recorded, note_engine
from ..common.heads import LAYOUTS
from .arguments import AttentionArgs, AttentionBackwardArgs, Mask
from .libraries import HALVES, LIBRARIES, Library

Engine = Literal["auto", "weft", "torch", "fa2", "fa3", "fa4", "aiter"]
ENGINES = get_args(Engine)

Args = AttentionArgs | AttentionBackwardArgs


class Rule(NamedTuple):
    """An entry of the table: on these targets a library is preferred to Weft's own kernels for bf16 and fp16, if it
    has all of a call."""

    targets: tuple[str, ...]
    library: str
    backward: bool  # its backward is, too
    why: str


# The first rule whose library is there and has the call holds; on other targets Weft attends.
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
    """An attention that ran, forward or backward."""

    engine: str
    library: str  # whose kernels
    backward: bool
    queries: int  # tokens of a sequence, or of all packed ones
    keys: int
    heads: int
    dim: int


def choose_library(a: Args, target: Capabilities) -> Library | None:
    """The library whose kernels a call takes on a target, None for Weft's own; and a note of it for those who
    record."""
    chosen = None
    if a.engine != "weft":
        for library in _candidates(a, target):
            if obstacle(library, a, target) is None:
                chosen = library
                break
        else:
            if isinstance(a, AttentionArgs) and not a.query.is_meta:
                insist(a.engine, ENGINES, lambda: _lacks(a, target))
    if is_recorded():
        engine, name = ("weft", "Weft") if chosen is None else (chosen.engine, chosen.name)
        _, sequence, heads, _ = LAYOUTS[a.layout]
        shape, keys = a.query.shape, a.key.shape[sequence]
        backward = isinstance(a, AttentionBackwardArgs)
        note_engine(Attended(engine, name, backward, shape[sequence], keys, shape[heads], shape[-1]))
    return chosen


def _candidates(a: Args, target: Capabilities) -> list[Library]:
    """The libraries to ask for a call, the best first."""
    if a.engine != "auto":
        return [each for each in LIBRARIES if each.engine == a.engine and target.target in each.targets]
    if a.query.dtype not in HALVES:
        return []
    return _preferred(target.target, isinstance(a, AttentionBackwardArgs))


def _preferred(target: str, backward: bool) -> list[Library]:
    """The libraries that the table prefers on a target."""
    rules = [rule for rule in TABLE if target in rule.targets and rule.backward >= backward]
    return [_BY_NAME[rule.library] for rule in rules]


def check_engine(a: AttentionArgs) -> None:
    """Raise an error unless the engine that a call insists on can compute it."""

    def speaks_against() -> str | None:
        # A graph says so when it runs: the compiler would take what libraries ask of sizes for conditions of the graph.
        # Kernels are recorded on meta tensors, and those are Weft's own.
        later = torch.compiler.is_compiling() or a.query.is_meta
        return None if later else _lacks(a, capabilities_of(a.query.device))

    insist(a.engine, ENGINES, speaks_against)


def _lacks(a: AttentionArgs, target: Capabilities) -> str | None:
    """What the engine that a call insists on lacks, or None."""
    missing: str | None = f"kernels for {target.target}"
    for library in _candidates(a, target):
        missing = obstacle(library, a, target)
        if missing is None:
            break
    return missing


def obstacle(library: Library, a: Args, target: Capabilities) -> str | None:
    """Why a library cannot compute a call on one of its targets, or None."""
    if a.query.device.type != ("cpu" if target.is_cpu else "cuda"):
        return f"kernels for tensors on {a.query.device}"
    if a.query.dtype not in library.dtypes:
        return f"kernels for {a.query.dtype}"
    return _lacks_options(library, a) or _lacks_mask(library, a) or _lacks_sizes(library, a)


def _lacks_options(library: Library, a: Args) -> str | None:
    if a.sinks is not None:
        return "sinks"
    if a.softcap and "softcap" not in library.options:
        return "softcap"
    if isinstance(a, AttentionArgs):
        if a.query_codes.format is not None:
            return "scores in eight bits"
        if a.return_max:
            return "the largest scores (return_max)"
        if a.result.format is not None:
            return "a quantised result"
        return None
    if library.backward is None:
        return "a backward with the same bits in every run"
    if a.dlse is not None:
        return "gradients of lse"
    return library.backward_lacks(a.query.shape[-1], a.value.shape[-1])


def _lacks_mask(library: Library, a: Args) -> str | None:
    if a.packed.kv_lengths is not None:
        return "kv_lengths, which may leave queries without a key"
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
        return None if queries == keys else "packed sequences with another number of tokens of keys"
    if not mask.banded or queries == keys:
        return None
    if library.align != ("lower_right" if mask.lower_right else "upper_left"):
        return "this causal_align for another number of keys than of queries"
    return None if all_see(mask, queries, keys) else "queries that see no key"


def all_see(mask: Mask, queries: int, keys: int) -> bool:
    """Whether each query sees a key."""
    if mask.lower_right:  # the first query's own key is the one that may be before all
        return mask.right is None or keys - queries + mask.right >= 0
    return mask.left is None or queries - 1 - mask.left <= keys - 1


def _lacks_sizes(library: Library, a: Args) -> str | None:
    dim, v_dim = a.query.shape[-1], a.value.shape[-1]
    if not library.widths(dim, v_dim):
        return f"heads of {dim} and {v_dim} numbers"
    return library.missing()


def attention_on(target: str) -> str:
    """Who attends on a target, in words."""
    listed = []
    for library in _preferred(target, backward=False):
        missing, ways = library.missing(), "bf16, fp16"
        if library not in _preferred(target, backward=True):
            ways += " forward"
        serves = ways if missing is None else f"not without {missing}"
        listed.append(f"{library.engine} ({library.name}): {serves}")
    return "; ".join([*listed, "weft: the others" if listed else "weft"])

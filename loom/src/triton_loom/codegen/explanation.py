"""Record of a kernel's loop nests and buffered tiles, made while its C++ is generated.

A nest is identified by the kernel's line that it comes from and by what it does there. Where a nest begins, the C++
takes the time (`lap`, of include/explain.h); the time until the next lap belongs to the nest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ..ir.ttir import Op, Value

# Description of an operation's own nest. Operations that are not listed take negligible time, or consist of others.
_DOES = {
    "tt.load": "load of one element",
    "tt.store": "store",
    "tt.atomic_rmw": "atomic update",
    "tt.atomic_cas": "atomic exchange",
    "tt.reduce": "reduction",
    "tt.scan": "scan",
    "tt.dot": "product of tiles",
    "tt.dot_scaled": "product of scaled tiles",
    "tt.histogram": "histogram",
    "tt.join": "join",
    "tt.cat": "concatenation",
    "tt.map_elementwise": "function per element",
    "tt.elementwise_inline_asm": "assembly",
    "tt.print": "print",
    "tt.assert": "assertion",
    "tt.unsplat": "the one element",
}
_BETWEEN = "scalars, and what no other row has"


@dataclass
class Explanation:
    """Nests in the order of their first line in the C++, and buffers in allocation order."""

    nests: list[dict[str, str]] = field(default_factory=lambda: [{"location": "", "does": _BETWEEN}])
    kept: list[dict[str, Any]] = field(default_factory=list)

    def lap(self, op: Op, does: str = "") -> list[str]:
        """Return the statement that begins a nest; nothing for an operation without a nest of its own."""
        if not (does := does or _DOES.get(op.name, "")):
            return []
        nest = {"location": op.location, "does": does}
        if nest not in self.nests:
            self.nests.append(nest)
        return [f"loom::lap({self.nests.index(nest)});"]

    def keep(self, name: str, tile: str, size: int, value: Value | None) -> None:
        """Record a buffer of `size` bytes, for a value or for a copy."""
        own = re.sub(r"_\d+$", "", name)  # as in Python: MLIR tells values of one name apart by numbers
        own = own if own.isidentifier() else ""
        self.kept.append({"name": own, "tile": tile, "bytes": size, "why": _why(value)})

    def about(self, location: str) -> dict[str, Any]:
        """Return the record for the metadata of a compiled kernel."""
        return {"location": location, "nests": self.nests, "kept": self.kept}


def _why(value: Value | None) -> str:
    if value is None:
        return "a copy, laid out or typed as its reader wants it"
    if value.producer is None or value.producer.name.startswith("scf."):
        return "carried by a loop or out of a branch"
    if value.producer.name == "tt.load":
        return "a load with several readers"
    return {
        "tt.reduce": "the result of a reduction",
        "tt.dot": "the sum of products",
        "tt.dot_scaled": "the sum of products",
        "tt.scan": "the result of a scan",
    }.get(value.producer.name, "computed once for several readers")

"""Sharding of heads: by batch, by sequence, or by heads."""

from __future__ import annotations

from ...runtime import Sharding
from .angles import Turning
from .arguments import Prepare, Rope

WHOLE = {
    "d": "a head is normalized and rotated as a whole",
    "f": "a head needs all of its angles",
    "p": "positions are looked up in the whole table",
    "three": "a token has three positions",
}


def _dimensions(layout: str) -> str:
    return " ".join(layout.replace("t", "s"))


def _rotation_dimensions(turning: Turning) -> tuple[dict[str, str], dict[str, str]]:
    """Return (inputs, counted) of `Sharding` for a rotation: the dimensions of its tables and positions, and without
    positions the dimension along which they count from 0."""
    inputs = {}
    if turning.positions is not None:
        lead = ["three"] if turning.sections else []
        named = ["b", "s"] if turning.positions.dim() - len(lead) == 2 else ["s"]
        if len(named) == 2 and turning.positions.shape[-2] == 1:
            named[0] = "_"
        inputs["turning_positions"] = " ".join([*lead, *named])
    if turning.cos is not None:
        by_token = turning.cos.dim() == 3
        table = f"{'_' if turning.cos.shape[0] == 1 else 'b'} s f" if by_token else "p f"
        inputs["turning_cos"] = inputs["turning_sin"] = table
        if by_token:
            return inputs, {}
    return inputs, {"turning_positions": "s"} if turning.dim else {}


def shard_rope(a: Rope) -> Sharding:
    inputs, counted = _rotation_dimensions(a.turning)
    return Sharding(
        {"x": _dimensions(a.layout), **inputs}, {"y": _dimensions(a.out_layout)}, WHOLE, counted=counted
    )


def shard_prepare(a: Prepare) -> Sharding:
    inputs, counted = _rotation_dimensions(a.turning)
    cut, of_x, unsplit = a.cut, _dimensions(a.cut.layout), dict(WHOLE)
    columns = "h" if cut.packing == "groups" else "w"
    if cut.packing != "apart":
        of_x = of_x.replace("h d", columns)
        unsplit["w"] = "it holds q, k and v one after another. Pass them separately, or with packing='groups'"
    if cut.layout != "thd" and cut.out_layout == "thd":
        unsplit |= dict.fromkeys("bs", "out_layout='thd' joins batch and sequence")
    vectors = ("norm_q_weight", "norm_k_weight", "norm_q_bias", "norm_k_bias")
    return Sharding(
        {"x": of_x, "k": of_x, "v": of_x, "bias": columns, **dict.fromkeys(vectors, "d"), **inputs},
        dict.fromkeys(("q", "k", "v", "gate"), _dimensions(cut.out_layout)),
        unsplit,
        counted=counted,
        sizes={"cut_q": "h", "cut_kv": "h"},
    )

"""The bar chart of the home page: `python -m website.chart` draws docs/speed.svg from docs/runs/bench.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from weft.lab.bench.showing import means, read

ROOT = Path(__file__).parents[1]
RUN, PICTURE = ROOT / "docs/runs/bench.json", ROOT / "docs/speed.svg"

# Colors that keep their contrast on white and on the dark page, since one file serves both.
COLORS = {"eager": "#8b95a1", "compile": "#5c6bc0", "liger": "#e08214"}
LABELS = {"eager": "PyTorch eager", "compile": "torch.compile", "liger": "Liger-Kernel on Loom"}
TEXT = "#7d8590"
OPS = {
    "quantize": "quantize, both copies",
    "norm": "RMSNorm + FP8",
    "glu": "SwiGLU",
    "cross_entropy": "cross entropy",
    "attention_backward": "attention, backward",
    "qkv_prepare": "QKV prepare",
    "permute": "permute",
}
LEFT, SCALE, BAR, GAP = 190, 40, 9, 10  # pixels; SCALE is one "times as fast"
WIDTH, MOST = 760, 13.0


def groups(report: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    """(label, ratio by contender) of each group of bars, the geometric means first."""
    ratios = means(report["rows"])
    yield f"geometric mean, {len(report['rows'])} ops", ratios["all"]
    for op, label in OPS.items():
        yield label, {name: ratio for name, ratio in ratios["by_op"][op].items() if ratio is not None}


def picture(report: Mapping[str, Any]) -> str:
    """Return the chart as SVG."""
    parts, y = [], 46
    for label, values in groups(report):
        middle = y + BAR * len(values) / 2
        parts.append(_text(LEFT - 10, middle + 4, label, "end", 13))
        for name, value in values.items():
            width = SCALE * min(value, MOST)
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 1}" fill="{COLORS[name]}"/>'
            )
            parts.append(_text(LEFT + width + 5, y + BAR - 1, f"{value:.2f}", "start", 10))
            y += BAR
        y += GAP
    x = LEFT + SCALE
    one = f'<line x1="{x}" y1="38" x2="{x}" y2="{y - GAP + 4}" stroke="{TEXT}" stroke-dasharray="3 3"/>'
    legend, x = [], LEFT
    for name, label in LABELS.items():
        legend.append(f'<rect x="{x}" y="12" width="10" height="10" fill="{COLORS[name]}"/>')
        legend.append(_text(x + 15, 21, label, "start", 12))
        x += 40 + 7 * len(label)
    machine = report["machine"].partition(",")[0]
    foot = f"Times as fast; right of the dashed line Weft wins. Measured on a CPU: {machine}, {report['date'][:10]}"
    body = "\n".join([*legend, one, *parts, _text(10, y + 12, foot, "start", 11)])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 22}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="Speed of Weft on a CPU">\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, anchor: str, size: int) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-size="{size}" fill="{TEXT}">'
        f"{escape(text)}</text>"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(read(RUN)))

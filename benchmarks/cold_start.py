"""Measure how long processes started together take to the first result of an MoE layer: compiling at scale.

python benchmarks/cold_start.py [--processes 1 8 64] [--out FILE]

There are three variants, each with N concurrent processes on this machine: one empty Triton cache that all share, an
empty one for each, and a bundle (`weft aot`) with `WEFT_NO_JIT=1`. *Measured* on this machine's CPU, through Loom. For
each: the time until the first and the last process have their result (without imports), the total number of compiled
kernels, and the bytes of the bundle or of the caches.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 64, 256, 128, 8, 2

LAYER = f"""
import json, os, sys, time
import torch, triton, weft

compiled = 0
build = triton.compile
def counting(*args, **kwargs):
    global compiled
    compiled += 1
    return build(*args, **kwargs)
triton.compile = counting

torch.set_num_threads(1)
x = torch.randn({TOKENS}, {HIDDEN}, dtype=torch.bfloat16)
router = torch.randn({EXPERTS}, {HIDDEN}, dtype=torch.bfloat16)
up = torch.randn({EXPERTS}, {2 * FFN}, {HIDDEN}, dtype=torch.bfloat16) / 16
down = torch.randn({EXPERTS}, {HIDDEN}, {FFN}, dtype=torch.bfloat16) / 11
norm = torch.ones({HIDDEN}, dtype=torch.bfloat16)

def layer(x, router, up, down, norm):
    y = weft.rms_norm(x, norm)
    routing = weft.route(weft.router_linear(y, router), {TOP_K})
    return weft.experts(y, up, down, routing, recipe="fp8_block")
"""
RUN = """
print("ready", flush=True)
sys.stdin.readline()  # all begin at once
begin = time.perf_counter()
layer(x, router, up, down, norm)
print(json.dumps([time.perf_counter() - begin, compiled]))
"""
BUILD = """
meta = [tensor.to("meta") for tensor in (x, router, up, down, norm)]
variants = weft.aot.variants_of([lambda: layer(*meta)], "cpu")
weft.aot.build(sys.argv[1], "cpu", variants)
"""


def start(environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LAYER + RUN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def measure(count: int, way: str, bundle: Path) -> dict[str, float | int | str]:
    with tempfile.TemporaryDirectory() as folder:
        caches = [Path(folder, "shared" if way == "shared cache" else str(rank)) for rank in range(count)]
        bundled = {"WEFT_BUNDLE": str(bundle), "WEFT_NO_JIT": "1"} if way == "bundle" else {}
        processes = [start({"TRITON_CACHE_DIR": str(cache), **bundled}) for cache in caches]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", "a process did not start"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        answers = [json.loads(process.communicate()[0]) for process in processes]
        written = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return {
        "way": way,
        "processes": count,
        "first": round(min(answer[0] for answer in answers), 2),
        "median": round(statistics.median(answer[0] for answer in answers), 2),
        "last": round(max(answer[0] for answer in answers), 2),
        "compiled": sum(answer[1] for answer in answers),
        "written_mb": round(written / 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--ways", nargs="+", default=["shared cache", "private caches", "bundle"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    bundle = folder / "layer.weft"
    subprocess.run([sys.executable, "-c", LAYER + BUILD, str(bundle)], check=True)
    print(f"bundle: {bundle.stat().st_size / 1e6:.2f} MB\n")
    print("| at once | way | first, s | median, s | last, s | compiled | written, MB |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    rows = []
    for count in args.processes:
        for way in args.ways:
            row = measure(count, way, bundle)
            rows.append(row)
            cells = [row[name] for name in ("first", "median", "last", "compiled", "written_mb")]
            print(f"| {count} | {way} | {' | '.join(map(str, cells))} |", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"report": "cold start", "rows": rows}, indent=1) + "\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()

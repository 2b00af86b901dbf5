"""Ahead-of-time compilation: `weft aot build` on any machine, `weft.aot.load` where the kernels run.

    weft aot build --target sm_90 --workload deepseek-v3 --out deepseek.weft     # needs no GPU
    WEFT_BUNDLE=deepseek.weft WEFT_NO_JIT=1 python serve.py

With `WEFT_NO_JIT=1` nothing is compiled at run time: a kernel missing from every bundle is an error that says how to
add it.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import __version__
from .runtime import Variant, recording
from .runtime.bundle import SCHEMA, Bundle, BundleError, key_of, load, platform_of, sources, unload
from .runtime.capabilities import TABLE
from .runtime.variant import build_variant, triton_target

__all__ = ["Bundle", "BundleError", "build", "load", "unload", "variants_of"]


def variants_of(calls: Iterable[Callable[[], Any]], target: str) -> list[Variant]:
    """Return the variants that the calls would launch on a target, without duplicates and without launching. Tensors
    may be on `meta`."""
    with recording(target) as variants:
        for call in calls:
            call()
    return list(dict.fromkeys(variants))


def build(
    path: str | os.PathLike[str],
    target: str,
    variants: Iterable[Variant],
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> Bundle:
    """Compile variants for a target and write them to a bundle, which replaces an older one atomically.

    `progress` is called with the number of variants done. Variants in Triton's cache are not compiled again.
    """
    import triton

    if target not in TABLE:
        raise ValueError(f"unknown target {target!r}; known: {', '.join(TABLE)}")
    chosen = list(variants)
    gpu = triton_target(target)
    kernels: dict[str, Any] = {}
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as file:
            for number, variant in enumerate(chosen, 1):
                compiled = build_variant(variant, gpu)
                progress(number)
                key = key_of(variant)
                files = {f"{key[:16]}/{name}": content for name, content in _files(compiled).items()}
                for name, content in files.items():
                    file.writestr(name, content)
                kernels[key] = {
                    "kernel": variant.kernel,
                    "variant": repr(variant),
                    "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
                }
            manifest = {
                "schema": SCHEMA,
                "weft": __version__,
                "triton": triton.__version__,
                "target": target,
                "platform": platform_of(gpu),
                "sources": sources(),
                "kernels": kernels,
            }
            file.writestr("manifest.json", json.dumps(manifest, indent=1))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return Bundle.open(path)


def _files(compiled: Any) -> dict[str, bytes]:
    """Return the binary of a compiled kernel and its metadata, keyed by Triton's file names."""
    from triton.compiler import make_backend

    extensions = ("json", make_backend(compiled.metadata.target).binary_ext)
    files = {Path(path).name: Path(path).read_bytes() for path in compiled.metadata_group.values()}
    return {
        name: content
        for name, content in files.items()
        if name.endswith(extensions) and "__grp__" not in name
    }

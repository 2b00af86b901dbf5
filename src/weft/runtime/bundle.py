"""Ahead-of-time compiled kernels in a file that processes read and never write.

A bundle is a zip file: `manifest.json`, and for each kernel its binary and Triton's metadata. Kernels are looked up by
a hash of everything that determines their code. `weft.aot` makes bundles.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .variant import Variant, source_of

SCHEMA = 1
VARIABLE = "WEFT_BUNDLE"  # bundles to load, separated as in PATH


class BundleError(RuntimeError):
    """Error about a bundle that cannot be used here."""


@functools.cache
def sources() -> str:
    """Return a hash of Weft's own code and tables: binaries of another version do not match this one."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted((*package.rglob("*.py"), *package.rglob("*.json"))):
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def name_of(target: Any) -> str:
    """Return Weft's name for Triton's target: sm_90, gfx942, cpu."""
    if target.backend == "cpu":
        return "cpu"
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


def key_of(variant: Variant) -> str:
    """Return the key under which a variant is stored."""
    text = repr(variant)
    if " at 0x" in text:
        raise BundleError(f"a constant of {variant.kernel} has no stable text representation: {text}")
    return hashlib.sha256(text.encode()).hexdigest()


def platform_of(target: Any) -> str:
    """Return what a binary depends on besides Weft, Triton and the target: on the CPU, the CPU's and compiler's
    features."""
    from triton.compiler import make_backend

    return str(make_backend(target).hash()) if target.backend == "cpu" else ""


@dataclass
class Bundle:
    """Open bundle. `served` counts the kernels taken from it in this process."""

    path: Path
    manifest: dict[str, Any] = field(repr=False)
    served: int = 0

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Bundle:
        import triton

        path = Path(path)
        try:
            with zipfile.ZipFile(path) as file:
                manifest = json.loads(file.read("manifest.json"))
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise BundleError(f"{path} is not a bundle of Weft: {error}") from error
        if manifest.get("schema") != SCHEMA:
            raise BundleError(f"{path} has format {manifest.get('schema')}; this Weft reads format {SCHEMA}")
        again = f"build it again: weft aot build --target {manifest['target']} --out {path}"
        if manifest["triton"] != triton.__version__:
            raise BundleError(
                f"{path} was built with Triton {manifest['triton']}, but {triton.__version__} is installed; {again}"
            )
        if manifest["sources"] != sources():
            raise BundleError(f"{path} was built by another Weft ({manifest['weft']}); {again}")
        return cls(path, manifest)

    def find(self, kernel: Any, variant: Variant, target: Any) -> Any:
        """Return Triton's compiled kernel, or None if the bundle does not have it."""
        if self.manifest["target"] != name_of(target):
            return None
        entry = self.manifest["kernels"].get(key_of(variant))
        if entry is None:
            return None
        if self.manifest["platform"] != platform_of(target):
            raise BundleError(
                f"{self.path} was built for another processor or by another compiler than this machine has"
            )
        with zipfile.ZipFile(self.path) as file:
            files = {name: file.read(name) for name in entry["files"]}
        for name, content in files.items():
            if hashlib.sha256(content).hexdigest() != entry["files"][name]:
                raise BundleError(f"{name} in {self.path} is damaged: build the bundle again")
        self.served += 1
        return _compiled(kernel, variant, target, files, key_of(variant))


def _compiled(kernel: Any, variant: Variant, target: Any, files: dict[str, bytes], digest: str) -> Any:
    """Build Triton's object for a kernel; its constructor reads files."""
    from triton.compiler import CompiledKernel

    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for name, content in files.items():
            path = Path(folder, Path(name).name)
            path.write_bytes(content)
            paths[path.name] = str(path)
        return CompiledKernel(source_of(kernel, variant, target), paths, digest)


_loaded: list[Bundle] = []


def load(path: str | os.PathLike[str]) -> Bundle:
    """Take kernels from a bundle from now on; bundles loaded later take precedence."""
    bundle = Bundle.open(path)
    _loaded.insert(0, bundle)
    return bundle


def unload(bundle: Bundle) -> None:
    """Stop taking kernels from a bundle. Kernels already taken stay."""
    _loaded.remove(bundle)


@functools.cache
def _load_named() -> None:
    """Load the bundles that the environment names, once."""
    for path in reversed(os.environ.get(VARIABLE, "").split(os.pathsep)):
        if path:
            load(path)


def find(kernel: Any, variant: Variant, target: Any) -> Any:
    """Return a compiled kernel from the first bundle that has it, or None."""
    _load_named()
    matches = (bundle.find(kernel, variant, target) for bundle in _loaded)
    return next((compiled for compiled in matches if compiled is not None), None)

"""Triton's compiler interface: TTIR by stock Triton's passes, C++ by `codegen`, a library by `device.toolchain`."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from triton import knobs
from triton._C.libtriton import ir, passes
from triton.backends.compiler import BaseBackend, GPUTarget, Language

from . import __version__
from .features import EXPLAIN, HARDWARE_DOT, SANITIZE, seconds, switched_on
from .ir.provenance import MAKES_DESCRIPTOR

if TYPE_CHECKING:
    from .options import LoomOptions


class LoomBackend(BaseBackend):
    """Triton's compiler backend for the CPU."""

    binary_ext = "so"

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        from .device import toolchain

        return f"loom {__version__} {self.target.arch} {_hash_of_sources()} {toolchain.identity()}"

    def parse_options(self, options: dict[str, Any]) -> LoomOptions:
        from .options import LoomOptions

        arch, *features = str(self.target.arch or "native").split("+")  # "native+sanitize": see driver.py
        defaults = {
            "arch": knobs.runtime.override_arch or arch,
            "witness": tuple(name for name in features if name not in (EXPLAIN, HARDWARE_DOT)),
            "explain": EXPLAIN in features,
            "hardware_dot": HARDWARE_DOT in features,
            "quick_build": switched_on("TRITON_LOOM_QUICK_BUILD"),
            "spin_limit": seconds("TRITON_LOOM_SPIN_LIMIT", default=120),
        }
        return LoomOptions.of({**defaults, **options})

    def get_codegen_implementation(self, options: LoomOptions) -> dict[str, Any]:
        return {"min_dot_size": lambda lhs, rhs: (1, 1, 1)}

    def get_module_map(self) -> dict[str, ModuleType]:
        from . import libdevice

        vendors = ("", "cuda.", "hip.")
        return {f"triton.language.extra.{vendor}libdevice": libdevice for vendor in vendors}

    def load_dialects(self, context: Any) -> None:
        pass

    def pack_metadata(self, metadata: Any) -> tuple[int, ...]:
        return metadata.num_warps, metadata.num_ctas, metadata.shared

    def add_stages(self, stages: dict[str, Any], options: LoomOptions, language: Language) -> None:
        if language != Language.TRITON:
            raise NotImplementedError("Gluon kernels lay out a GPU's registers; only Triton kernels run here")
        if knobs.compilation.store_binary_only:
            raise RuntimeError(
                "TRITON_STORE_BINARY_ONLY keeps GPU binaries only: unset it to compile for the CPU"
            )
        stages["ttir"] = lambda module, metadata: make_ttir(
            module, metadata, described=SANITIZE in options.witness
        )
        stages["c"] = lambda module, metadata: make_c(module, metadata, options)
        stages["so"] = lambda source, metadata: make_so(source, options)
        if knobs.runtime.add_stages_inspection_hook is not None:
            knobs.runtime.add_stages_inspection_hook(self, stages, options, language, None)


# Block pointers and tensor descriptors become plain pointers here; newer releases have no block pointers.
TTIR_PASSES = [
    (passes.common, "inliner"),
    (passes.ttir, "rewrite_tensor_pointer"),
    (passes.ttir, "rewrite_tensor_descriptor_to_pointer"),
    (passes.common, "canonicalizer"),
    (passes.ttir, "combine"),
    (passes.ttir, "reorder_broadcast"),
    (passes.common, "cse"),
    (passes.common, "symbol_dce"),
    (passes.ttir, "loop_unroll"),
]


_TO_POINTERS = ("rewrite_tensor_descriptor_to_pointer", "canonicalizer", "cse")


def make_ttir(
    module: Any, metadata: dict[str, Any], *, without: Collection[str] = (), described: bool = False
) -> Any:
    """Run the stage that Triton calls `ttir`: its own target-independent passes, except those in `without`.

    With `described`, store the text from before descriptors become pointers in the metadata, if there are any.
    """
    first, *rest = TTIR_PASSES
    _run([first], module)
    text = str(module.str()) if described else ""
    metadata["described"] = text if MAKES_DESCRIPTOR in text else ""
    _run([(family, name) for family, name in rest if name not in without], module)
    return module


def _run(selected: Sequence[tuple[Any, str]], module: Any) -> None:
    manager = ir.pass_manager(module.context)
    manager.enable_debug()
    for family, name in selected:
        if add := getattr(family, f"add_{name}", None):
            add(manager)
    manager.run(module, "make_ttir")


def without_descriptors(file: Path) -> str:
    """Return the TTIR of a file with pointers in place of descriptors."""
    context = ir.context()
    ir.load_dialects(context)
    module = ir.parse_mlir_module(str(file), context)
    module.context = context
    _run([step for step in TTIR_PASSES if step[1] in _TO_POINTERS], module)
    return str(module.str())


def make_c(module: Any, metadata: dict[str, Any], options: LoomOptions) -> str:
    """Translate TTIR to C++; store what the launcher needs in the metadata."""
    from .codegen import emit

    kernel = emit.generate(
        module.str(),
        frozenset(options.witness),
        hardware_dot=options.hardware_dot,
        explain=options.explain,
    )
    metadata["name"] = kernel.name
    metadata["serial"] = kernel.serial
    metadata["spins"] = kernel.spins
    metadata["witnessed"] = kernel.witness
    metadata["explained"] = kernel.explained
    metadata["scratch_bytes"] = kernel.scratch_bytes
    metadata["shared"] = max(kernel.scratch_bytes, 1)  # callers divide by it to guess how many programs fit
    return kernel.source


def make_so(source: str, options: LoomOptions) -> bytes:
    """Compile C++ to a shared object."""
    from .device import toolchain

    # An instrumented kernel spends its time at its accesses, whatever the optimization level.
    return toolchain.build(source, options.arch, quick=options.quick_build or bool(options.witness))


# Files that determine the compiled code: a change elsewhere, in the prover or the emulator, keeps cached kernels valid.
_COMPILES = (
    "compiler.py",
    "features.py",
    "libdevice.py",
    "options.py",
    "codegen/*.py",
    "ir/*.py",
    "device/*.py",
)


def sources() -> list[Path]:
    """Return the files of this package that a compiled kernel depends on."""
    package = Path(__file__).parent
    return sorted(file for pattern in (*_COMPILES, "include/*.h") for file in package.glob(pattern))


@functools.lru_cache
def _hash_of_sources() -> str:
    """Return a hash that changes when the compiler does, so that kernels are recompiled."""
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in sources())).hexdigest()

"""Stand-ins for what frameworks request from a GPU at import or run time, for machines without one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

import torch


class TorchOfCPUs:
    """The module torch, except that every device is the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, name: str) -> torch.device:
        return torch.device("cpu")


def for_megatron(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Replace CUDA's device, streams and random states."""
    tensor_parallel = import_module("megatron.core.tensor_parallel")
    dispatcher = import_module("megatron.core.transformer.moe.token_dispatcher")
    stream = MagicMock()
    replace(torch.cuda, "current_device", lambda: "cpu")
    replace(torch.cuda, "Stream", lambda: stream)
    replace(torch.cuda, "current_stream", lambda: stream)
    replace(torch.cuda, "stream", contextlib.nullcontext)
    replace(dispatcher, "torch", TorchOfCPUs())
    replace(tensor_parallel, "model_parallel_cuda_manual_seed", lambda seed: None)
    states = tensor_parallel.random.CudaRNGStatesTracker
    replace(states, "fork", lambda self, name=None: contextlib.nullcontext())


def for_sglang() -> None:
    """Replace torchvision, which SGLang imports for image inputs, and whose wheels are made for GPUs. Transformers
    looks for it at import and must not find the stand-in."""
    import_module("transformers.utils.import_utils")
    if find_spec("torchvision") is None:
        for name in ("", ".io", ".transforms", ".transforms.functional"):
            sys.modules[f"torchvision{name}"] = MagicMock(__spec__=ModuleSpec(f"torchvision{name}", None))

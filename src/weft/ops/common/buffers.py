"""Modules whose buffers are no weights."""

from __future__ import annotations

from typing import Any

import torch


class KeepsBufferDtypes(torch.nn.Module):
    """A module whose own buffers keep their dtype: `Module.to` and its kin move them to another device, as they move
    parameters, but another dtype is meant for parameters alone."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            now = self._buffers[name]
            if old is not None and now is not None and now.dtype != old.dtype:
                self._buffers[name] = old.to(now.device)
        return self

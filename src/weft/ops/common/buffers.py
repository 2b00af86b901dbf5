"""Modules with buffers that must keep their dtype."""

from __future__ import annotations

from typing import Any

import torch


class KeepsBufferDtypes(torch.nn.Module):
    """A module whose own buffers keep their dtype: `Module.to` and related methods move them to another device but
    change the dtype of parameters only."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            now = self._buffers[name]
            if old is not None and now is not None and now.dtype != old.dtype:
                self._buffers[name] = old.to(now.device)
        return self

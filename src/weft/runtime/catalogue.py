"""Catalogue of every op of Weft by name. Tests, benchmarks, audits and the docs iterate over it."""

from __future__ import annotations

from typing import Any

catalogue: dict[str, Any] = {}

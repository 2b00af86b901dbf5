"""Weft in other people's models and frameworks: `apply` for any model, and one module per framework."""

from ..report import Report
from .adopt import apply, unapply

__all__ = ["Report", "apply", "unapply"]

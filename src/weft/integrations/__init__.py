"""Weft in other people's models and frameworks: `apply` for any model, and one module for each framework."""

from .adopt import Report, apply, unapply

__all__ = ["Report", "apply", "unapply"]

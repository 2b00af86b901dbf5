"""Quantized formats: how scales are made, and how codes lie in memory."""

from . import layouts
from .copies import PLAIN, Codes
from .formats import CONVENTIONS, ELEMENTS, Format
from .qtensor import QTensor
from .reference import scale_from_amax

__all__ = ["CONVENTIONS", "ELEMENTS", "PLAIN", "Codes", "Format", "QTensor", "layouts", "scale_from_amax"]

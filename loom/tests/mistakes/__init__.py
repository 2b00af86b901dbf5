"""Mistakes that shipped in kernel libraries, each in a few lines with its correction."""

from mistakes import bounds, initialization, overflow, promises, races
from mistakes.catalogue import MISTAKES, ORIGINS, Mistake

__all__ = ["MISTAKES", "ORIGINS", "Mistake", "bounds", "initialization", "overflow", "promises", "races"]

"""Mistakes that shipped in kernel libraries, each in a few lines beside its correction."""

from mistakes import bounds, initialisation, overflow, promises, races
from mistakes.catalogue import MISTAKES, ORIGINS, Mistake

__all__ = ["MISTAKES", "ORIGINS", "Mistake", "bounds", "initialisation", "overflow", "promises", "races"]

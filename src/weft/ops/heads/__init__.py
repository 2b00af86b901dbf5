"""Preparation of heads for attention: split, norm, rotation, transposition and caching in one pass."""

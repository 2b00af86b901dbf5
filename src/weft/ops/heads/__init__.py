"""Heads made ready for attention: split, normed, rotated, transposed and cached in one pass."""

"""Attention of new tokens over a cache."""

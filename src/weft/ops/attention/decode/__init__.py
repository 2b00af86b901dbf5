"""Attention of new tokens over a key-value cache."""

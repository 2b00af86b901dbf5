"""Attention for training and prefill, attention over caches, and merging of partial results."""

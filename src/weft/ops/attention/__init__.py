"""Attention: for training and prefill, over caches, and merging of parts."""

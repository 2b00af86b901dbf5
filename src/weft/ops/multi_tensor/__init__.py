"""Norms and other statistics of many tensors at once, and gradient clipping."""

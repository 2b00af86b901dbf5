"""Draws from a linear head, without logits in memory."""

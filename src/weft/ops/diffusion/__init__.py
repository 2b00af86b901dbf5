"""Ops of the loop that denoises a state."""

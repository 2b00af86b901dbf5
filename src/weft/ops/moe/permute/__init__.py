"""Permute and unpermute: rows moved to the experts and back."""

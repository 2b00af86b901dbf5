"""Rows moved to the experts and back."""

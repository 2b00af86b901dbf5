"""Ops of vision encoders."""

"""Ops of scalar functions."""

"""Mixture of experts: the router's projection, top-k routing, and moving tokens to their experts and back."""

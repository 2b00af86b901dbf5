"""Mixture of experts: the router's products, the choice of experts, and moving tokens to them and back."""

"""Proofs for all sizes: host code run with symbols, the contracts of its launches, and what a solver says of them."""

"""Proofs for all sizes: symbolic runs of host code, contracts of its launches, and a solver's answers about them."""

"""Losses and log-probabilities over a vocabulary, on one rank or sharded over several."""

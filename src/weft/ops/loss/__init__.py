"""Losses and log-probabilities over a vocabulary, whole or sharded."""

"""Logits as requests want them: penalties, biases, allowed tokens, temperatures."""

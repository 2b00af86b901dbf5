"""Cross entropy of logits."""

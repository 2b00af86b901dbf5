"""The router's projection from hidden states to logits."""

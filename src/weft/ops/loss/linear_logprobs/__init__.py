"""Log-probabilities of targets under a linear head, without its logits in memory."""

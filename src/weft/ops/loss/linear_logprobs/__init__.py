"""Log-probabilities of targets under a linear head, without materializing its logits."""

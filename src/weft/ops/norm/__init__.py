"""RMSNorm, LayerNorm, and the RMSNorm of an attention's output times a gate."""

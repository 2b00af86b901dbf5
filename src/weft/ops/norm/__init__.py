"""RMSNorm, LayerNorm, and the gated RMSNorm of an attention output."""

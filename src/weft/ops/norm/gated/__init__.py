"""The RMSNorm of an attention's output times a gate."""

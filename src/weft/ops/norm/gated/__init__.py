"""Gated RMSNorm of an attention output."""

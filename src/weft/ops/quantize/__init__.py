"""Quantize and dequantize."""

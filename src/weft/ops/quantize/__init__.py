"""The quantize and dequantize ops."""

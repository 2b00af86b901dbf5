"""Weft: fused kernels for training and serving large language models, written once in Triton.

This release reserves the package and its layout; it has no kernels yet.
"""

__version__ = "0.0.1"

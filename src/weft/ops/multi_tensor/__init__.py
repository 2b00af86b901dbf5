"""Statistics of many tensors at once, and clipping them by their norm."""

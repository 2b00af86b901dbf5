"""Rows by index: embeddings, gathered rows, and sums of rows."""

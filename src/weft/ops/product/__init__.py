"""Matrix products in every number format."""

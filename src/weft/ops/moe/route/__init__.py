"""Top-k routing of tokens to experts, with weights."""

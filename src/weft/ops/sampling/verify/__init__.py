"""Verification of drafts: which tokens of a drafter the target model accepts, and the token after them."""

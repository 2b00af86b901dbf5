"""Weft in other people's frameworks, through the hooks that they offer. Nothing is imported or registered unasked."""

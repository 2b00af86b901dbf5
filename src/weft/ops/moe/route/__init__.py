"""Which experts a token goes to, and with what weights."""

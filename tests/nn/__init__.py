"""`weft.nn`: modules, conversion, and weights gathered as codes."""

"""`weft.nn`: modules, conversion, and weights that are gathered as codes."""

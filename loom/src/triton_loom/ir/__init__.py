"""Loom's view of TTIR.

`ttir` has the classes, `scanner` and `reader` parse the text, `rewrite` and `sorting` prepare for code generation,
and `provenance` traces pointers and offsets to their origins.
"""

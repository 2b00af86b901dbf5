"""TTIR as Loom sees it: `ttir` (the classes), `scanner` and `reader` (from text), `rewrite` and
`sorting` (before code is generated), `provenance` (where pointers and offsets come from)."""

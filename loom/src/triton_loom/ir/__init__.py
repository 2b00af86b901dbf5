"""TTIR as Loom sees it: `ttir` (the classes), `scanner` and `reader` (from text), `rewrite` (before code is generated),
`provenance` (where pointers and offsets come from)."""

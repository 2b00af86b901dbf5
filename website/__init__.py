"""How the site is made: `mkdocs build` calls `hooks`, which adds to docs/ what is generated or lies elsewhere.

- `links`: where a file of the repository is on the site, and links between the two.
- `ops`: a page for each public op, made of docstrings, the catalogue, the workloads and the tables of docs/.
- `versions`: the table of supported versions.
"""

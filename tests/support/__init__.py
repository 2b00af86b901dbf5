"""Code that the tests of several families share."""

# Modules already imported in forked scripts (`triton_loom.testing.Forks`).
IMPORTED = ("torch._dynamo", "triton_loom.testing", "weft.cli", "weft.lab.families")

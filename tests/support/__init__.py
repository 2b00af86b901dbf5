"""What the tests of several families share."""

# What scripts find imported that are forked (`triton_loom.testing.Forks`).
IMPORTED = ("torch._dynamo", "triton_loom.testing", "weft.cli", "weft.lab.families")

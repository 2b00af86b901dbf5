"""Functions of rows: softmax, sums and norms, each a `@weft.rowwise` op."""

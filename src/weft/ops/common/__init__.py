"""Code shared by several families of ops."""

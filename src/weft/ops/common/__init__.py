"""What several families of ops share."""

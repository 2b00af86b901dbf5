"""Where the rows of each token lie among those of the experts."""

"""The row map: positions of each token's rows among the rows of the experts."""

"""The product that routing begins with."""

"""Rows of results become matplotlib figures, those of the paper among them."""

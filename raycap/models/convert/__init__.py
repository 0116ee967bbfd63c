"""Weights and graphs in the forms of other programs."""

"""Exported captioners: their graphs, a description for other programs, and the comparison with the model."""

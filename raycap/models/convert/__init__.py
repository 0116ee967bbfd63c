"""Conversion of weights from other programs' checkpoints, and of models to graphs for export."""

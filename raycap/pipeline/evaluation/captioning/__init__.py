"""Captions from a trained model: bundles, beam search over a split, constraints, the served model."""

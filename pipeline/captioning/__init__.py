"""From a trained model to captions: bundles, beam search over a split, constraints, the served model."""

"""Sequence-level distillation: the bundle that teaches a run, its stored captions, and those that a run learns."""

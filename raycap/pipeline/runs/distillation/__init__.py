"""Sequence-level distillation: the teacher bundle, its stored captions, and the captions that a run trains on."""

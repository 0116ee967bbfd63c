"""Evaluation: captions of a split, their scores, comparisons, confidence and reports."""

"""The probability that a caption is good: its fit on a validation split, its use, and its quality."""

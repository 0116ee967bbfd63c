"""One run: its folder, preparation, checkpoints, journal, evaluation and bundle."""

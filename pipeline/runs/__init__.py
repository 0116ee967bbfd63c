"""The parts of a training run: its folder, preparation, checkpoints, journal, evaluation and bundle."""

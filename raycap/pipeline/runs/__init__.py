"""The parts of a training run: its folder, preparation, journal, evaluation and bundle."""

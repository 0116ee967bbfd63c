"""The parts of a training run: data checks, identity, folder, preparation, journal and results."""

"""Image features: extraction with Ray Data, region files, computation in training, and model inputs."""

"""Image features: extraction with Ray Data, region files, the feature store."""

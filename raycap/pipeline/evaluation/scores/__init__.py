"""Caption metrics, and the files that hold captions and results."""

"""Caption metrics, published scores, and the files that hold captions and results."""

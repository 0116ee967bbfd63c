"""Caption metrics, and the words and encoders with which they are computed."""

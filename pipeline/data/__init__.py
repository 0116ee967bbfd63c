"""Images, captions and vocabularies: annotation files, content keys, the synthetic data set."""

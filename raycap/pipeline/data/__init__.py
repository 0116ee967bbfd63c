"""Images, captions and vocabularies: content keys, decoding, the synthetic data set."""

"""The rewards of SCST: CIDEr-D over an index, rewards computed from words, and their weighted sum."""

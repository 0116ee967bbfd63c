"""Which scores can be compared: protocols, published scores, and confidence intervals of differences."""

"""`raycap tune`: a search with Ray Tune."""

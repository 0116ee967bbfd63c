"""`raycap serve`: serves captions over HTTP with Ray Serve."""

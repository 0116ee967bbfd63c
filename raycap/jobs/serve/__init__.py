"""`raycap serve`: captions over HTTP with Ray Serve."""

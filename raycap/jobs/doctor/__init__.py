"""`raycap doctor`: what this machine or a cluster can run."""

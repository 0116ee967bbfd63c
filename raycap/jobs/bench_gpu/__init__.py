"""`raycap bench gpu`: speed and memory of training, extraction and decoding on one GPU, without data or network."""

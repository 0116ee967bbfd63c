"""Training: the loop over the stages of a run, its batches, objectives, optimizer and checkpoints."""

"""Training: the loop over the stages of a run, its batches, objectives, reward, optimizer and checkpoints."""

"""The training loop: batches, objectives, reward, optimizer."""

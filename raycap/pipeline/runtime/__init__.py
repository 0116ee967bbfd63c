"""Services for one process: training context, processor settings, batches, log, signals, names and secrets."""

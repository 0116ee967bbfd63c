"""Services for one process: training context, processor settings, log, signals, names and secrets."""

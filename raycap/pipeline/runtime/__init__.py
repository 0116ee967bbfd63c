"""Services of the process and the machine: training context, CPU settings, batches, metrics, log and progress."""

"""Services of the process and the machine: training context, CPU settings, batches, system metrics, log and progress."""

"""Services of the process and the machine: training context, CPU settings, system metrics, log and progress."""

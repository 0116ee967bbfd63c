"""The process and the machine: training context, CPU settings, memory, weights files."""

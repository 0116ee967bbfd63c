"""Benchmarks of what grows with the data set: measured parts, and a model of a cluster."""

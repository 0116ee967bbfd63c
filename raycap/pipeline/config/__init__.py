"""The configuration of a run: its sections, and the functions that read, override and check a YAML file."""

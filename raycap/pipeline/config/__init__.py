"""The configuration of a run: its sections, and reading, overriding and checking a YAML file."""

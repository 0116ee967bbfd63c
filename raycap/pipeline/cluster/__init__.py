"""Ray clusters from outside: diagnosis, packaging and job submission."""

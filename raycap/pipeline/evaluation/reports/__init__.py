"""Pages, charts and pictures that people look at."""

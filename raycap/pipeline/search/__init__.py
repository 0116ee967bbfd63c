"""A search over configuration keys: its space, trials, results and page."""

"""Serves captions to other programs over HTTP: addresses of models, requests, limits, answers and the page."""

"""Captions for other programs: models by address, requests, limits, answers, the followed champion and the page."""

"""Explanations of captions: attention maps and attributions."""

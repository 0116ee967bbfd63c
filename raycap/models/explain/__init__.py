"""Explanations of captions: attention maps, attributions, alignment and clusters."""

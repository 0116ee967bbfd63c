"""Encoders: backbones with their transforms and views, and the encoders that metrics use."""

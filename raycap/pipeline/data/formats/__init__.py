"""Annotation files: the forms in which captioned images are exchanged, and where each image is."""

"""Readers of annotation files: tables, WebDataset archives, and what all formats share."""

"""Reads files and names that strangers may have written, with limits on size, depth and memory."""

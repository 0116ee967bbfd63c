"""Decoding: beam search, sampling, the cache of decoded steps, rules and constraints."""

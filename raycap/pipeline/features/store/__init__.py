"""Stored image features: shards, their manifests and keys, and reading them in advance."""

"""What a storage contains, and what can be removed from it: runs, searches, bundles, champions and features."""

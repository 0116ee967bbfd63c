"""The synthetic data set: scenes, their captions and their regions."""

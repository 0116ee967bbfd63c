"""Visual backbones, with the transform and the augmentation of the images that they read."""

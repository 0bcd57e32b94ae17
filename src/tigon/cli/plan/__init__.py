"""`tigon plan`: the memory of a training step at each level, computed from the model's config alone."""

"""`tigon plan`: what a training step needs of a GPU at each level of memory, from the model's config alone."""

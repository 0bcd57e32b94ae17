"""`tigon inspect`: show what `tigon.patch` would replace in a model, without its weights."""

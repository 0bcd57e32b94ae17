"""`tigon inspect`: what `tigon.patch` would replace in a model, found without its weights."""

"""Training calls of few shapes: lengths are padded to buckets."""

"""Token mixers: the parts of a layer, besides attention, in which a token reads earlier tokens."""

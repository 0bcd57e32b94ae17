"""Find statements of a forward that one op computes together, and rewrite its source."""

"""Find statements and functions of a forward that an op computes, and rewrite its source."""

"""Less memory for backward: what is made again there, and what waits in the memory of the host."""

"""Check in every call that a replaced module or function is still what was recognised."""

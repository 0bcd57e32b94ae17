"""The code that all other packages of tigon use. It imports none of these packages."""

"""The ops, in one folder for each family. The code that all of them use is in `tigon.runtime`."""

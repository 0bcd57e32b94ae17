"""The ops, a folder for each family; what all of them stand on is in `tigon.runtime`."""

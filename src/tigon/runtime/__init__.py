"""What every other package stands on. Nothing here imports another package of tigon."""

"""The other setups of models that torch shards, which `make test-thorough` runs."""

from hf.ways_sharded import MORE_SETUPS as SETUPS

__all__ = ["SETUPS"]

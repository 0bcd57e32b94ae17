"""Copies of patched models. A patch of a tiny model takes 0.2 s, and a copy of a patched model 0.005 s.

test_lifecycle.py shows that a copy of a patched model is patched and uses its own parameters. Tests that examine the
patch itself, its report or its undoing patch their models themselves.
"""

import copy
from collections.abc import Callable

from torch import nn

import tigon

_patched_models: dict[tuple, nn.Module] = {}


def copy_of_patched(build: Callable[..., nn.Module], *arguments, memory: str = "default", **config) -> nn.Module:
    """Return a copy of the model that `build(*arguments, **config)` returns, patched with a level of memory.

    The first call for these arguments patches the model. `build` must return an equal model in every call.
    """
    key = (build.__module__, build.__qualname__, arguments, memory, repr(sorted(config.items())))
    if key not in _patched_models:
        model = build(*arguments, **config)
        tigon.patch(model, memory=memory)
        _patched_models[key] = model
    return copy.deepcopy(_patched_models[key])

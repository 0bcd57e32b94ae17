"""Recognise equal norms, MLPs and activations of transformers once in a process.

Half of the time of a patch of a tiny model goes into the probes of these modules, and many tests patch models of the
same few classes. With the fixture `remembers_probes`, `tigon.patch` gets the result of an earlier patch for a module
that has the same state by value: the same class, settings, shapes and children, and the same fingerprint of everything
that its forward reads, which is what a guard compares. The functions of torch are not part of this state, so a test
that may patch them, because it uses `monkeypatch`, recognises every model anew. So does a test with the mark `probes`.
The tests of recognition do not use the fixture.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from tigon.hf.parts import PARTS
from tigon.recognition.probing.standin import own_tensors
from tigon.recognition.probing.trials import Trials, current_trials, recording
from tigon.recognition.replacement import is_changed
from tigon.runtime.engines import full_shape
from tigon.runtime.reach.explore import explore
from tigon.runtime.reach.holders import MODULE_STATE
from tigon.runtime.reach.places import is_simple

# The results of these recognisers hold no module.
REMEMBERED = ("rms_norm", "glu", "mlp", "relu2", "gelu")

_results: dict[tuple, tuple[Any, Trials]] = {}


def _state_of(module: nn.Module) -> tuple:
    """Return the state of a module, by value. The type of a value is included, because 1 and True are equal."""
    state: list[Any] = []
    for name, each in module.named_modules():
        settings = [(key, value) for key, value in vars(each).items() if key not in MODULE_STATE]
        values = tuple((key, type(value), repr(value) if is_simple(value) else "") for key, value in settings)
        shapes = tuple((key, t if t is None else (type(t), full_shape(t))) for key, t in own_tensors(each).items())
        state.append((name, type(each), values, shapes, is_changed(each)))
    reach = explore(module)
    return *state, reach.fingerprint, reach.reason


def remembering(recognise: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    """Return a recogniser that compares modules of one state once. A class of a test is not kept in memory."""

    def recognise_once(module: nn.Module) -> Any:
        packages = {type(each).__module__.partition(".")[0] for each in module.modules()}
        # A recogniser refuses other modules without a probe, and it takes longer to read their state.
        layers = sum(isinstance(child, nn.Linear) for child in module.children())
        is_probed = layers in (0, 2, 3) and not any(child._modules for child in module.children())
        if not is_probed or isinstance(module, (nn.Linear, nn.Embedding)) or packages - {"transformers", "torch"}:
            return recognise(module)
        try:
            key = (recognise, _state_of(module))
        except Exception:
            # The recogniser reports a state that cannot be read.
            return recognise(module)
        if key not in _results:
            with recording() as trials:
                _results[key] = recognise(module), trials
        result, trials = _results[key]
        if (current := current_trials()) is not None:
            for field in dataclasses.fields(Trials):
                setattr(current, field.name, copy.copy(getattr(trials, field.name)))
        return result

    return recognise_once


REMEMBERING = {part: remembering(PARTS[part].recognise) for part in REMEMBERED}
# One function recognises both kinds of norms, and the search calls each function once.
REMEMBERING["layer_norm"] = REMEMBERING["rms_norm"]


@pytest.fixture(autouse=True)
def remembers_probes(request):
    """Let patches of this test use the results of earlier probes."""
    before = dict(PARTS)
    if not request.node.get_closest_marker("probes") and "monkeypatch" not in request.fixturenames:
        PARTS.update({part: dataclasses.replace(PARTS[part], recognise=f) for part, f in REMEMBERING.items()})
    yield
    PARTS.update(before)

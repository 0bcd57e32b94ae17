"""Recognise equal norms, MLPs and activations of transformers, and equal losses, once in a process.

Half of the time of a patch of a tiny model goes into the probes of these modules, and many tests patch models of the
same few classes. With the fixture `remembers_probes`, `tigon.patch` gets the result of an earlier patch for a module
that has the same state by value: the same class, settings, shapes and children, and the same fingerprint of everything
that its forward reads, which is what a guard compares. The functions of torch are not part of this state, so while
`monkeypatch` replaces anything but the names of `UNRELATED`, every model is recognised anew. So it is in a test with
the mark `probes`. The tests of recognition do not use the fixture.
"""

import copy
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from torch import nn

from tigon.hf import learn
from tigon.hf.linear_heads import head_size
from tigon.hf.parts import PARTS
from tigon.hf.search import Search
from tigon.hf.spec import Spec
from tigon.recognition.probing.standin import own_tensors
from tigon.recognition.probing.trials import Trials, current_trials, recording
from tigon.recognition.replacement import is_changed
from tigon.runtime import device
from tigon.runtime.engines import full_shape
from tigon.runtime.reach.explore import explore
from tigon.runtime.reach.holders import MODULE_STATE
from tigon.runtime.reach.places import Reach, is_simple

# The results of these recognisers hold no module.
REMEMBERED = ("rms_norm", "glu", "mlp", "relu2", "gelu")

# The recognisers above and the probes of a loss do not call these files, except those in `RELATED`.
UNRELATED = (
    "tigon.graphs.", "tigon.hf.", "tigon.integrations.", "tigon.memory.", "tigon.ops.fp8.",
    "tigon.recognition.parts.experts", "tigon.recognition.parts.fp8", "tigon.recognition.parts.mixers",
)  # fmt: skip
RELATED = (
    "tigon.hf.head", "tigon.hf.learn", "tigon.hf.linear_heads", "tigon.hf.logits", "tigon.hf.loss",
    "tigon.hf.parts", "tigon.hf.search", "tigon.hf.spec",
)  # fmt: skip

_results: dict[tuple, tuple[Any, Trials]] = {}
# The states of the modules that the current search has read.
_states: weakref.WeakKeyDictionary[nn.Module, tuple] = weakref.WeakKeyDictionary()
# Stand-ins whose fused loss was compared with the stock loss, by everything that the comparison depends on.
_verified_losses: set[tuple] = set()


def _changes_results(patch: pytest.MonkeyPatch | None) -> bool:
    """Return True if a test has replaced something that recognition may call."""
    for target, *_ in [] if patch is None else [*patch._setattr, *patch._setitem]:
        name = target.__name__ if isinstance(target, types.ModuleType) else getattr(target, "__module__", "")
        if not name.startswith(UNRELATED) or name.startswith(RELATED):
            return True
    return False


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
            if module not in _states:
                _states[module] = _state_of(module)
            key = (recognise, _states[module])
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


def _verify_once(
    verify: Callable, reaches: dict[nn.Module, Reach], model: nn.Module, head: nn.Module, spec: Spec
) -> None:
    """Compare the fused loss of models of one state with their stock loss once."""
    if type(model).__module__.partition(".")[0] != "transformers" or type(head) is not nn.Linear:
        return verify(model, head, spec)
    state = head_size(head), head.bias is None, model.loss_function, is_changed(model), is_changed(head)
    key = type(model), spec, *state, reaches[model].fingerprint, reaches[model].reason
    if key not in _verified_losses:
        verify(model, head, spec)
        _verified_losses.add(key)


_find = Search._find


def find_without_kernels(search: Search, names: Iterable[str]) -> list:
    """Search without kernels in the interpreter, which is slow. Probes are on the CPU, so a GPU runs none for them."""
    with pytest.MonkeyPatch.context() as context:
        context.setattr(device, "INTERPRETED", False)
        return _find(search, names)


@pytest.fixture(autouse=True)
def remembers_probes(request):
    """Let patches of this test use the results of earlier probes."""
    parts, verify = dict(PARTS), learn._verify
    find = find_without_kernels if device.INTERPRETED else _find
    patch = request.getfixturevalue("monkeypatch") if "monkeypatch" in request.fixturenames else None

    def find_with_memory(search: Search, names: Iterable[str]) -> list:
        if _changes_results(patch):
            return find(search, names)
        reaches: dict[nn.Module, Reach] = {}
        _states.clear()
        PARTS.update({part: dataclasses.replace(PARTS[part], recognise=f) for part, f in REMEMBERING.items()})
        learn.explore = lambda model: reaches.setdefault(model, explore(model))
        learn._verify = functools.partial(_verify_once, verify, reaches)
        try:
            return find(search, names)
        finally:
            PARTS.update(parts)
            learn.explore, learn._verify = explore, verify

    if not request.node.get_closest_marker("probes"):
        Search._find = find_with_memory
    yield
    Search._find = _find

"""Remember what the forward of a layer with adapters computes, as long as nothing that it reads has changed.

A run of such a forward on a tensor without values (`Deferred`) takes the host about 80 us (PEFT's linear layer on one
core of a server), and a model of 8 billion parameters has 224 adapted layers. Most calls find the same settings as the
call before. The same code that reads the same state computes the same expression, so the result of an earlier run holds
as long as all of this state is the same:

- the code that the earlier run has executed, and the settings, containers and globals that this code reads. One run is
  observed to find this code, and `tigon.runtime.state.reach` searches what it reads. Code that the observed run did not
  execute, such as PEFT's merge of adapters, does not run as long as this state is the same. So what only such code
  reads is ignored. A place is one attribute, item or global that is compared.
- the modules with weights in the layer: which they are, their mode, hooks and forwards, and their parameters with
  dtypes and shapes.
- the dtype, device and width of the input, and the modes of autograd and autocast.

One expression compares all of this by identity in every call (about 10 us there). If anything differs, the forward runs
again.

An observed run must not do more than read this state: a forward that reads the values of a tensor or the shape of its
input, assigns an attribute, draws a random number or writes a log entry runs at every call. So does one whose code
writes to a container, if the container is different after the run. A run is remembered only after two runs in the same
state have executed the same code, have computed the same layer, and have left the state unchanged.

A run whose code can reach a cache (`functools.lru_cache`) is not remembered, because the code in the cache may not have
run. One change is not noticed: `register` of an abstract base class changes the result of `isinstance`, and leaves no
sign that can be compared.
"""

import logging
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tigon.ops.adapters.projection import flatten
from tigon.recognition.guards.code_facts import codes_of
from tigon.recognition.parts.recorded_layers import RecordedLayer, read_layer
from tigon.recognition.probing.deferred import Computed, Deferred, TensorLike, modes_of
from tigon.recognition.replacement import Replacement
from tigon.runtime.compat.modules import HOOK_TABLES, INSTANCE_CALLS
from tigon.runtime.compat.operators import function_modes
from tigon.runtime.device import PLAIN
from tigon.runtime.state.known_names import TRUSTED
from tigon.runtime.state.objects import holds_tensors, package_of
from tigon.runtime.state.places import Place, Reach, build_check
from tigon.runtime.state.reach import explore
from tigon.runtime.stock import linears_are_stock

LOGGER = logging.getLogger("tigon")

# Reading the code that a run has executed takes 2 ms, as long as 25 runs, and 8 ms for the first layer of a class
# (measured with PEFT's linear layer on one core). So it is read only if the layer has been run some times, and a layer
# whose state changes again and again, as under FSDP, is read a few times and then never again.
RUNS_BEFORE_EXPLORATION = 3
MOST_EXPLORATIONS = 8
# The states that a layer alternates between: in training and evaluation, with and without its adapters.
MOST_ENTRIES = 4
# Comparing this number of places takes about as long as a quarter of a run.
MOST_PLACES = 512

# Modules of these classes run no code but torch's own, which reads their parameters, children, mode and hooks.
CLASSES_WITH_TENSORS = (nn.Linear, nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList)

# Code outside of Tigon may read these properties of a tensor, because they are compared in every call.
_WATCHED_PROPERTIES = tuple(getattr(Tensor, name).__get__ for name in ("dtype", "device", "shape"))
# The code that reads the shape of a tensor without values.
_SHAPE_READERS = frozenset(
    getattr(getattr(Deferred, name), "fget", getattr(Deferred, name)).__code__
    for name in ("shape", "ndim", "dim", "size")
)


class CallKey(NamedTuple):
    """The properties of a call that the forward may read without leaving a trace."""

    dtype: torch.dtype
    device: torch.device
    # The last dimension of the input, or nothing for a tensor without dimensions.
    features: torch.Size
    # The modes of autograd and autocast.
    modes: tuple


def key_of(x: Tensor | TensorLike) -> CallKey | None:
    """Return the key of a call with the input x; None if code of others may see each call of a function of torch."""
    device = x.device
    if function_modes() or not linears_are_stock():
        return None
    return CallKey(x.dtype, device, x.shape[-1:], modes_of(device.type))


# --- one observed run ------------------------------------------------------------------------------


class _Observation(TorchFunctionMode):
    """Observes a run in the block: the code that it executes, and whether it reads more than a memo compares."""

    def __init__(self) -> None:
        super().__init__()
        self.codes: set[types.CodeType] = set()
        # The executed code that is not of a package whose functions depend on their arguments alone.
        self.foreign_codes: set[types.CodeType] = set()
        # True if code outside of Tigon reads the shape of the input, or computes with a tensor that has values.
        self.reads_more = False

    def __enter__(self) -> "_Observation":
        super().__enter__()
        sys.setprofile(self._see_call)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)
        super().__exit__(*error)

    def _see_call(self, frame: types.FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or (code in self.codes and code not in _SHAPE_READERS):
            return
        self.codes.add(code)
        package = package_of(frame.f_globals.get("__name__"))
        # The constructor of a NamedTuple has globals of its own.
        if package not in TRUSTED and not package.startswith("namedtuple_"):
            self.foreign_codes.add(code)
        self.reads_more |= code in _SHAPE_READERS and not _is_of_tigon(frame.f_back)

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Operations of a tensor without values are recorded.
        is_recorded = bool(args) and type(args[0]) is Deferred
        if not is_recorded and function not in _WATCHED_PROPERTIES and not _is_of_tigon(sys._getframe(1)):
            self.reads_more = True
        return function(*args, **(kwargs or {}))


def _is_of_tigon(frame: types.FrameType | None) -> bool:
    return frame is not None and package_of(frame.f_globals.get("__name__")) == "tigon"


# --- what is compared in every call ----------------------------------------------------------------


def _places_of(
    layer: nn.Module, base: nn.Module | None, base_recipes: tuple[type, ...], names: frozenset[str]
) -> list[Place] | None:
    """Return the places that `explore` does not find: modes, children with tensors, and parameters.

    The result is None if a child with tensors may have run other code than torch's, or if a parameter is no plain
    tensor. `base` is the base layer that was called as a module. Its code has not run, because its recipe has returned
    a tensor without values. `names` are the attributes that the code loads from any object.
    """
    places: list[Place] = []
    for path, module in layer.named_modules():
        attributes = vars(module)
        # A place must not refer to the layer itself, which would then never be freed.
        owner = None if module is layer else attributes
        places.append(Place(owner, "item", "training", module.training, f"{path}.training"))
        if module is not layer and not holds_tensors(module):
            continue
        for table in ("_parameters", "_modules"):
            entries = attributes[table]
            if type(entries) is not dict:
                return None
            places.append(Place(owner, "item", table, entries, path))
            places.append(Place(entries, "length", None, len(entries), path))
            places += [Place(entries, "item", name, entry, f"{path}.{name}") for name, entry in entries.items()]
        if module is not layer:
            if not (module is base or _runs_code_of_torch(module)):
                return None
            places += _places_of_call(module, path)
        if module is base:
            replacement = attributes.get("forward")
            if type(replacement) is not Replacement or type(replacement.recipe) not in base_recipes:
                return None
            places.append(Place(replacement, "attribute", "recipe", replacement.recipe, path))
            places.append(Place(attributes, "item", "out_features", attributes.get("out_features"), path))
            continue
        for tensor in (each for each in module._parameters.values() if each is not None):
            if type(tensor) not in PLAIN or names & vars(tensor).keys():
                return None
            places.append(Place(tensor, "attribute", "dtype", tensor.dtype, path))
            places.append(Place(tensor, "shape", None, tensor.shape, path))
            # The code may look for an attribute that the tensor does not have.
            places.append(Place(vars(tensor), "length", None, len(vars(tensor)), path))
    return places


def _runs_code_of_torch(module: nn.Module) -> bool:
    """Return True if a child with tensors runs no code but torch's, and has no other tensors than parameters."""
    has_others = bool(module._buffers) or any(isinstance(value, Tensor) for value in vars(module).values())
    return type(module) in CLASSES_WITH_TENSORS and "forward" not in vars(module) and not has_others


def _places_of_call(module: nn.Module, path: str) -> list[Place]:
    """Return the places that change which code a call of a child runs."""
    attributes = vars(module)
    places = [Place(module, "type", None, type(module), path)]
    if "forward" in attributes:
        places.append(Place(attributes, "item", "forward", attributes["forward"], path))
    else:
        places.append(Place(attributes, "absent", "forward", None, path))
    places += [Place(attributes, "absent", name, None, path) for name in INSTANCE_CALLS]
    return places + [Place(attributes[table], "length", None, 0, path) for table in HOOK_TABLES]


def _only_reads(reach: Reach) -> bool:
    """Return True if the code only reads state that can be compared, or writes to containers that can be compared."""
    return (
        reach.is_understood
        and len(reach.writes) == len(reach.container_writes)
        and not (reach.unwatchable or reach.unprobed_reads)
    )


def _same_layer(a: RecordedLayer | None, b: RecordedLayer) -> bool:
    """Return True if two runs have computed the same layer. Tensors are compared by identity."""
    if a is None or a.base is not b.base or a.dtype != b.dtype:
        return False
    (tensors_a, constants_a), (tensors_b, constants_b) = flatten([a.projection]), flatten([b.projection])
    is_same = len(tensors_a) == len(tensors_b) and constants_a == constants_b
    return is_same and all(x is y for x, y in zip(tensors_a, tensors_b, strict=True))


# --- the memo --------------------------------------------------------------------------------------


# Two entries are compared by identity, because `==` of their tensors is a tensor.
@dataclass(eq=False)
class _Entry:
    """The layer that a run has computed, and the state in which it computes this layer."""

    key: CallKey
    layer: RecordedLayer
    check: Callable[[dict[str, Any], type], bool]
    codes: set[types.CodeType]
    # The descendants and the parameters of the module, to which `check` refers.
    parts: tuple[nn.Module | nn.Parameter, ...]
    # True after a second run in the same state.
    is_confirmed: bool = False

    def holds(self, module: nn.Module) -> bool:
        """Return True if the state of the layer is that of the run."""
        try:
            return self.check(module.__dict__, type(module))
        except (KeyError, IndexError, AttributeError):
            return False


class LayerMemo:
    """The layers that the runs of one forward have computed, by the state in which they ran."""

    def __init__(self, base_recipes: tuple[type, ...]) -> None:
        # Recipes of base layers that return a tensor without values for one.
        self.base_recipes = base_recipes
        # The newest entry comes first.
        self.entries: list[_Entry] = []
        self.explorations = 0
        self.runs = 0

    def find(self, module: nn.Module, key: CallKey) -> RecordedLayer | None:
        """Return the layer that a run in the current state computes; None if the forward has to run."""
        for entry in self.entries:
            if entry.is_confirmed and entry.key == key and entry.holds(module):
                return entry.layer
        return None

    def run(
        self, module: nn.Module, key: CallKey, x: Tensor | TensorLike, run: Callable[[], Computed | None]
    ) -> Computed | None:
        """Return the result of `run`, which runs the forward without values, and remember the result if possible."""
        entry = next((each for each in self.entries if each.key == key and each.holds(module)), None)
        if entry is not None and entry.is_confirmed:
            # The caller could not use the result of `find`.
            return run()
        if entry is None and self.entries:
            self._free_removed_parts(module)
        self.runs += 1
        is_due = self.runs > RUNS_BEFORE_EXPLORATION and self.explorations < MOST_EXPLORATIONS
        # Only one profiler can observe a thread.
        if sys.getprofile() is not None or (entry is None and not is_due):
            return run()
        with _Observation() as observation:
            computed = run()
        layer = None if computed is None or observation.reads_more else read_layer(computed, x)
        if entry is not None:
            is_same = layer is not None and _same_layer(layer, entry.layer) and observation.foreign_codes == entry.codes
            if is_same and entry.holds(module):
                entry.is_confirmed = True
            else:
                # Another thread may have removed the entry.
                self.entries = [each for each in self.entries if each is not entry]
                self._count_failure()
        elif layer is None or not layer.projection.adapters:
            # A call without adapters is no reason to read the code.
            self.runs = 0
        else:
            self.explorations, self.runs = self.explorations + 1, 0
            if (entry := _make_entry(module, key, layer, observation, self.base_recipes)) is None:
                self._count_failure()
            else:
                self.entries = [entry, *self.entries][:MOST_ENTRIES]
        return computed

    def _free_removed_parts(self, module: nn.Module) -> None:
        """Forget the entries that keep a module or a parameter in memory which the layer no longer has."""
        present = {id(part) for part in _parts_of(module)}
        self.entries = [entry for entry in self.entries if all(id(part) in present for part in entry.parts)]

    def _count_failure(self) -> None:
        """Give up after the second failure. One may be an accident: a destructor may run while a run is observed."""
        self.explorations += MOST_EXPLORATIONS // 2


def _parts_of(module: nn.Module) -> tuple[nn.Module | nn.Parameter, ...]:
    """Return the descendants and the parameters of a module, without the module itself."""
    return *(each for each in module.modules() if each is not module), *module.parameters()


def _make_entry(
    module: nn.Module, key: CallKey, layer: RecordedLayer, observation: _Observation, base_recipes: tuple[type, ...]
) -> _Entry | None:
    """Return an entry for the result of an observed run; None if the run may have read more than can be compared."""
    tensors = [tensor for tensor in flatten([layer.projection])[0] if tensor is not None]
    parameters = {id(parameter) for parameter in module.parameters()}
    if not all(id(tensor) in parameters for tensor in tensors):
        return None
    try:
        reach = explore(module, inputs=1, executed=frozenset(observation.foreign_codes))
    except Exception:
        LOGGER.debug("the state that %s reads cannot be searched", type(module).__name__, exc_info=True)
        return None
    places = _places_of(module, layer.base, base_recipes, reach.names)
    if places is None or not _only_reads(reach) or not observation.foreign_codes <= {*codes_of(reach)}:
        return None
    places += reach.places
    fits = len(places) <= MOST_PLACES
    parts = _parts_of(module)
    return _Entry(key, layer, build_check(places), observation.foreign_codes, parts) if fits else None

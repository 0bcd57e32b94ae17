"""Search what containers, tensors, Python modules and objects of torch reach."""

import collections
import types
from typing import Any

import torch
from torch import Tensor

from tigon.runtime.compat.operators import NAMESPACE_TYPES, OPERATOR_TYPES, operator_namespaces
from tigon.runtime.state.classes import ClassSearch
from tigon.runtime.state.known_names import IMPURE, TRUSTED
from tigon.runtime.state.objects import (
    find_impure_statement,
    is_table_of_functions,
    is_trusted_function,
    package_of,
    stable_repr,
)
from tigon.runtime.state.places import MAX_PLACES, Place, bits_of, is_simple

CONTAINERS = (list, dict, set, collections.deque)
# The namespaces of torch's own operators.
TORCH_NAMESPACES = {"aten", "prims"}
# Objects of these types of torch hold nothing that a call changes.
CONSTANTS_OF_TORCH: tuple[type, ...] = (
    torch.finfo,
    torch.iinfo,
    torch.no_grad,
    torch.enable_grad,
    torch.inference_mode,
    torch.autocast,
    torch.set_grad_enabled,
    torch.qscheme,
    *OPERATOR_TYPES,
)


def _may_be_setting(value: Any) -> bool:
    """Return True if an attribute of a trusted Python module is a value of the user, or a module that may hold one.

    An object that torch or Python itself put there does not count, because its name may be that of another attribute.
    """
    if isinstance(value, types.ModuleType):
        # `torch.classes` has an attribute of every name.
        return package_of(value.__name__) in TRUSTED and value is not torch.classes
    if is_simple(value) or isinstance(value, (*CONTAINERS, tuple)):
        return True
    return package_of(type(value).__module__) not in TRUSTED | IMPURE


def _is_function_of_user(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and not is_trusted_function(value)


def _has_flag(module: types.ModuleType, name: str) -> bool:
    """Return True if a trusted Python module computes the value of an attribute, and it is no function or class.

    Examples are `torch.backends.cudnn.benchmark` and the attributes of `torch._dynamo.config`.
    """
    if name in vars(module) or hasattr(types.ModuleType, name):
        return False
    try:
        value = getattr(module, name)
    except AttributeError:
        return False
    except Exception:
        # Some flags of torch raise an error if they contradict each other.
        return True
    return not isinstance(value, (types.ModuleType, type)) and not callable(value)


class ContainerSearch(ClassSearch):
    """The part of the search that visits containers, tensors, Python modules and objects of torch."""

    def visit_container(self, container: Any, path: str) -> None:
        """Watch the elements of a list, a dict, a set or a deque.

        If a dict is a table of functions, watch only the entries that the code may select.
        """
        if type(container) not in CONTAINERS:
            names = sorted(self.names | {"__getitem__", "__missing__", "__iter__", "__contains__", "__call__"})
            self.visit_class_attributes(type(container), names, path, container)
        if isinstance(container, dict) and is_table_of_functions(container):
            # A forward selects an entry by a key, which comes from an attribute or a constant.
            if keys := sorted(self.choices & dict.keys(container)):
                # These entries are not searched, because the caller that passes `choices` knows what they compute.
                for key in keys:
                    value = dict.__getitem__(container, key)
                    self.reach.places.append(Place(container, "entry", key, value, f"{path}[{key!r}]"))
                    self.entries.append((path, key, self.identify(value)))
                return
            if keys := sorted(self.strings & dict.keys(container)):
                for key in keys:
                    self.watch_entry(container, key, path)
                return
        self.reach.containers.append(container)
        self.container_paths.append((path, container))
        self.reach.places.append(Place(container, "length", None, len(container), path))
        self.entries.append((path, "length", len(container)))
        if len(container) > MAX_PLACES:
            self.reach.unwatchable.append(f"reads {path}, which holds {len(container)} elements, too many to check")
        elif isinstance(container, set):
            self.reach.places.append(Place(container, "members", None, frozenset(container), path))
            self.entries.append((path, "members", tuple(sorted(map(repr, container)))))
        elif isinstance(container, dict):
            for key in list(dict.keys(container)):
                self.watch_entry(container, key, path)
        else:
            for i, value in enumerate(container):
                self.watch(container, "element", i, value, f"{path}[{i}]")

    def watch_entry(self, table: dict, key: Any, path: str) -> None:
        """Watch an entry as it is stored, because a subclass of dict may return something else from `[]`."""
        how = "item" if type(table) is dict else "entry"
        self.watch(table, how, key, dict.__getitem__(table, key), f"{path}[{key!r}]")

    def visit_tensor(self, tensor: Tensor, path: str) -> None:
        """Watch the values of a small tensor that is no parameter or buffer of the module."""
        self.reach.tensors.append((tensor, path))
        bits = bits_of(tensor)
        if bits is None:
            self.reach.unwatchable.append(f"reads {path}, a tensor that is no parameter or buffer of the module")
            return
        self.reach.places.append(Place(tensor, "bits", None, bits, path))
        self.entries.append((path, str(tensor.dtype), tuple(tensor.shape), bits[2]))

    def visit_python_module(self, module: types.ModuleType, path: str) -> None:
        """Watch the names of a Python module that the code loads.

        If its package only computes, its functions and classes count only where a chain of names leads to them.
        """
        if package_of(module.__name__) in IMPURE or module.__name__.startswith("numpy.random"):
            self.reach.unwatchable.append(f"uses {module.__name__}, which does more than compute from its inputs")
            return
        if isinstance(module, NAMESPACE_TYPES):
            self.visit_operators(module, path)
            return
        is_trusted = package_of(module.__name__) in TRUSTED
        if is_trusted and type(module) is not types.ModuleType:
            flags = sorted(name for name in self.names if _has_flag(module, name))
            self.reach.unwatchable += [f"reads {path}.{name}, a flag that cannot be watched" for name in flags]
        attributes = vars(module)
        optional = self.known_uses.optional
        for name in sorted(self.names & attributes.keys()):
            if not is_trusted:
                self.watch(attributes, "item", name, attributes[name], f"{path}.{name}")
            elif _may_be_setting(attributes[name]) or (name in optional and _is_function_of_user(attributes[name])):
                self.watch_link(attributes, name, f"{path}.{name}")
        for name in sorted(optional - attributes.keys()):
            self.watch_missing_link(attributes, name, f"{path}.{name}")

    def visit_operators(self, operators: Any, path: str) -> None:
        """Refuse `torch.ops` with a namespace that is not torch's own."""
        if operators is not torch.ops:
            namespaces = frozenset((operators.name,))
        elif (registered := operator_namespaces()) is not None:
            namespaces = registered & self.names
        else:
            self.reach.unwatchable.append(f"uses {path}, whose namespaces this torch does not list")
            return
        for namespace in sorted(namespaces - TORCH_NAMESPACES):
            self.refuse_foreign_namespace(namespace, f"{path}.{namespace}")

    def visit_object_of_torch(self, value: Any, path: str) -> None:
        """Accept objects of torch that are constants, and scripted functions that only compute."""
        self.entries.append((path, "opaque", stable_repr(value)))
        if isinstance(value, torch.jit.ScriptFunction):
            if statement := find_impure_statement(value):
                self.reach.unwatchable.append(f"calls {path}, a scripted function with {statement}")
        elif isinstance(value, OPERATOR_TYPES):
            self.refuse_foreign_namespace(str(value), path)
        elif not isinstance(value, CONSTANTS_OF_TORCH):
            self.reach.unwatchable.append(
                f"uses {path}, a {type(value).__module__}.{type(value).__name__}, whose state cannot be watched"
            )

    def refuse_foreign_namespace(self, name: str, path: str) -> None:
        """Refuse an operator whose namespace is not torch's own, because its code is not read."""
        if package_of(name) not in TORCH_NAMESPACES:
            self.reach.unwatchable.append(f"calls {path}, an operator of {package_of(name)}, whose code is not read")

"""A fixture that imports a part of `compat` again, as if torch lacked some names."""

import importlib.util
from collections.abc import Callable
from types import ModuleType

import pytest

from tigon.runtime.compat import names


@pytest.fixture
def import_again(monkeypatch) -> Callable[[ModuleType], ModuleType]:
    """Return a function that imports a part again. The names that torch lacks now are missing until the test ends."""

    def run(part: ModuleType) -> ModuleType:
        monkeypatch.setattr(names, "missing", {})
        spec = importlib.util.spec_from_file_location(f"{part.__name__}_again", part.__file__)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return run

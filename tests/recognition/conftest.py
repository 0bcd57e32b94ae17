"""Fixtures for the tests of recognition."""

import pytest
import torch
import torch.nn.functional as F

from recognition import changes, modules
from recognition.modules import MLP
from remembered import find_without_kernels
from tigon.hf.search import Search
from tigon.recognition.probing import probes
from tigon.runtime import device


@pytest.fixture
def no_symbolic_runs(monkeypatch):
    """Leave out runs with symbolic sizes, which take half of a patch, and find decisions before the patch only.

    In the interpreter, recognition runs no kernels.
    """
    monkeypatch.setattr(probes, "find_size_use", lambda *args, **options: None)
    if device.INTERPRETED:
        monkeypatch.setattr(Search, "_find", find_without_kernels)


@pytest.fixture
def undo_changes(monkeypatch):
    """Undo the changes that a test makes to `changes.py`, to torch and to the class."""
    monkeypatch.setattr(changes, "SCALE", 1.0)
    monkeypatch.setattr(changes, "activation", changes.activation)
    monkeypatch.setattr(F, "silu", F.silu)
    monkeypatch.setattr(MLP, "finish", MLP.finish)
    code = changes.ACTIVATION.__code__
    yield
    changes.ACTIVATION.__code__ = code
    for owner, name in ((changes, "max"), (torch, "gain"), (modules, "gain"), (changes.GIVEN, "gain")):
        vars(owner).pop(name, None)

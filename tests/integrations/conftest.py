"""The fixtures of the tests of the alias for Liger and of the trainers of TRL."""

import pytest
import torch

import tigon
from remembered import remembers_probes  # noqa: F401
from tigon.integrations.liger import uninstall


@pytest.fixture
def alias():
    """Install the alias during a test."""
    torch.manual_seed(0)
    tigon.install_as_liger_kernel(force=True)
    yield
    uninstall()


@pytest.fixture
def clean_trl(one_thread):
    """Give TRL its own functions back after a test, and accelerate its first state."""
    import accelerate

    yield
    tigon.integrations.trl.disable()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    """Return the folder of a tiny Llama."""
    from integrations.trainers import save_model

    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def counts(monkeypatch):
    """Count how often the ops of the head run."""
    from integrations.trainers import Counts

    return Counts(monkeypatch)

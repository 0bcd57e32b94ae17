"""The fixture of all tests of the alias for Liger."""

import pytest
import torch

import tigon
from tigon.integrations.liger import uninstall


@pytest.fixture
def alias():
    """Install the alias during a test."""
    torch.manual_seed(0)
    tigon.install_as_liger_kernel(force=True)
    yield
    uninstall()

import gc

import pytest
import torch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "/gpu/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="The test needs a GPU."))


@pytest.fixture(autouse=True)
def _free_cached_memory():
    """Give the memory of a large test back to the GPU, because several workers of pytest share it."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2**32:
        gc.collect()
        torch.cuda.empty_cache()

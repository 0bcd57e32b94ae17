import pytest
import torch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "/gpu/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="The test needs a GPU."))

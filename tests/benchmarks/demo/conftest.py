import os
from pathlib import Path

import pytest

for package in ("transformers", "tokenizers", "matplotlib", "psutil", "typer", "rich"):
    pytest.importorskip(package)


@pytest.fixture
def child_environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "COLUMNS": "200"}

"""The Makefile chooses tests by files and names that exist."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.no_interpreter("It launches no kernel.")

TESTS = Path(__file__).parent
NAMES = set(
    re.findall(r"^def (test_\w+)\(", "\n".join(path.read_text("utf-8") for path in TESTS.rglob("test_*.py")), re.M)
)


def test_the_files_and_tests_of_the_makefile_exist():
    makefile = (TESTS.parent / "Makefile").read_text("utf-8")
    for path, name in re.findall(r"(tests/[\w/.]+\w)(?:::(\w+))?", makefile):
        assert (TESTS.parent / path).exists(), path
        assert not name or name in NAMES, name

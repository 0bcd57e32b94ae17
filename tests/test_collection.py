"""The names by which tests are chosen are names of tests: renaming one would silently move it to another run."""

import re
from pathlib import Path

import pytest

from conftest import SAMPLED, SAMPLED_IN_INTERPRETER, THOROUGH, THOROUGH_IN_INTERPRETER

pytestmark = pytest.mark.no_interpreter("It launches no kernel.")

TESTS = Path(__file__).parent
NAMES = set(
    re.findall(r"^def (test_\w+)\(", "\n".join(path.read_text("utf-8") for path in TESTS.rglob("test_*.py")), re.M)
)


@pytest.mark.parametrize("name", THOROUGH)
def test_a_thorough_test_exists(name):
    assert name in NAMES


@pytest.mark.parametrize("name", [*SAMPLED, *SAMPLED_IN_INTERPRETER, *THOROUGH_IN_INTERPRETER])
def test_a_sampled_test_exists(name):
    path, _, test = name.partition("::")
    assert re.search(rf"^def {test}\(", (TESTS / path).read_text("utf-8"), re.M)


def test_the_files_and_tests_of_the_makefile_exist():
    makefile = (TESTS.parent / "Makefile").read_text("utf-8")
    for path, name in re.findall(r"(tests/[\w/.]+\w)(?:::(\w+))?", makefile):
        assert (TESTS.parent / path).exists(), path
        assert not name or name in NAMES, name

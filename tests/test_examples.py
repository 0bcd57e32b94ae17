"""Every example in a docstring of the public functions and modules runs and prints what it shows."""

import doctest

import pytest
import torch

import tigon
from tigon.testing import assert_accurate

OPS = [name for name in tigon.__all__ if name not in ("AutoModelForCausalLM", "patch", "patched", "LossOutput")]
OBJECTS = [getattr(tigon, name) for name in OPS] + [assert_accurate]


@pytest.mark.parametrize("thing", OBJECTS, ids=lambda thing: thing.__name__)
def test_an_example_prints_what_it_shows(thing):
    finder = doctest.DocTestFinder(recurse=False)
    names = {"torch": torch, "tigon": tigon, "assert_accurate": assert_accurate}
    (test,) = finder.find(thing, thing.__name__, globs=names)
    assert test.examples
    result = doctest.DocTestRunner().run(test)
    assert result.failed == 0


def test_importing_tigon_imports_no_optional_package():
    import subprocess
    import sys

    code = "import sys, torch, tigon; print({'transformers', 'typer', 'rich', 'matplotlib'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"

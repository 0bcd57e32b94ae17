"""Every example in a docstring of the public functions and modules runs and prints the result that it shows."""

import doctest

import pytest
import torch

import tigon
from tigon.hf import Report
from tigon.testing import assert_accurate

NAMES = [name for name in tigon.__all__ if name not in ("LogProbOutput", "LossOutput")]
OBJECTS = [
    *(getattr(tigon, name) for name in NAMES), assert_accurate, Report, Report.why, tigon.integrations.trl.enable,
]  # fmt: skip


@pytest.mark.parametrize("public", OBJECTS, ids=lambda public: public.__qualname__)
def test_example_prints_its_result(public):
    if public in (tigon.patch, tigon.patched) or public.__name__.startswith("AutoModel"):
        pytest.importorskip("transformers")
    if public is tigon.integrations.trl.enable:
        pytest.importorskip("trl")
    finder = doctest.DocTestFinder(recurse=False)
    names = {"torch": torch, "tigon": tigon, "assert_accurate": assert_accurate}
    (test,) = finder.find(public, public.__name__, globs=names)
    assert test.examples
    result = doctest.DocTestRunner().run(test)
    assert result.failed == 0

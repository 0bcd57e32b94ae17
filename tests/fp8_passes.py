"""Record the separate passes of a quantisation, for the tests of FP8."""

import pytest

from tigon.ops.fp8 import quantisation

__all__ = ["FIND_MAXIMA", "WRITE_COPIES", "record_passes"]

# The names of the functions in `tigon.ops.fp8.quantisation` that launch a pass.
FIND_MAXIMA, WRITE_COPIES = "_find_maxima", "write_part"


def record_passes(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[int, ...]]:
    """Return a list to which each pass of a function of this name adds the shape of its matrix.

    Passes that other kernels do while they read the matrix are not recorded.
    """
    shapes, run_pass = [], getattr(quantisation, name)

    def recorded(part, *args, **options):
        shapes.append(tuple(part.x.shape))
        return run_pass(part, *args, **options)

    monkeypatch.setattr(quantisation, name, recorded)
    return shapes

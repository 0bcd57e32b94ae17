"""Functions that compute the state space dual of Mamba-2 are found by what they compute."""

import pytest
import torch

from recognition.modules import define
from tigon.ops.mixers.ssd import ssd_reference
from tigon.recognition.parts.mixer_functions import recognise_function

pytestmark = pytest.mark.no_interpreter("It compares functions on the CPU.")

SCAN = (
    "x, dt, A, B, C, chunk_size, D=None, dt_bias=None, initial_states=None, dt_softplus=False, "
    "dt_limit=(0.0, float('inf')), return_final_states=False"
)


def scan(x, dt, A, B, C, D=None, dt_bias=None, states=None, softplus=False, limit=(0.0, torch.inf), returns=False):
    """Compute the state space dual token by token."""
    return ssd_reference(
        x, dt, A, B, C, D=D, dt_bias=dt_bias, initial_states=states, dt_softplus=softplus, dt_limit=limit,
        return_final_states=returns,
    )  # fmt: skip


PASSED = "x, dt, A, B, C, D, dt_bias, initial_states, dt_softplus, dt_limit, return_final_states"
# Functions with the arguments of a scan that compute something else.
OTHERS = {
    "no D": PASSED.replace("C, D,", "C, None,"),
    "no bias": PASSED.replace("dt_bias", "None"),
    "no initial states": PASSED.replace("initial_states", "None"),
    "no limits": PASSED.replace("dt_limit", "(0.0, float('inf'))"),
    "always a softplus": PASSED.replace("dt_softplus", "True"),
    "another decay": PASSED.replace(" A,", " 2 * A,"),
    "no gradient of A": PASSED.replace(" A,", " A.detach(),"),
    "B and C exchanged": PASSED.replace("B, C", "C, B"),
    "heads read other groups": PASSED.replace("B, C", "B.flip(2), C.flip(2)"),
    "no gradient of the states": PASSED.replace("initial_states", "None if initial_states is None else "
                                               "initial_states.detach()"),
    "a bias only beside D": PASSED.replace("dt_bias", "None if D is None else dt_bias"),
}  # fmt: skip
# Statements that change the results of the scan.
CHANGES = {
    "no gradient through the last states": "return (y[0], y[1].detach()) if return_final_states else y",
    "no last states without initial ones": (
        "return (y[0], 0 * y[1]) if return_final_states and initial_states is None else y"
    ),
    "y alone": "return y[0] if return_final_states else y",
    "long sequences": "return y if x.shape[1] < 100 else 2 * y",
}


@pytest.mark.parametrize("statement", CHANGES.values(), ids=CHANGES)
def test_a_function_with_other_results_is_not_replaced(statement):
    function = define(f"y = scan({PASSED})\n{statement}", globals(), SCAN)
    assert isinstance(recognise_function(function), str)


def test_a_function_with_the_results_of_the_op_is_found():
    function = define(f"return scan({PASSED})", globals(), SCAN)
    assert str(recognise_function(function)) == "state space dual"


@pytest.mark.parametrize("passed", OTHERS.values(), ids=OTHERS)
def test_anything_else_keeps_its_function(passed):
    assert isinstance(recognise_function(define(f"return scan({passed})", globals(), SCAN)), str)


def test_functions_with_other_arguments_are_not_compared():
    assert recognise_function(define(f"return scan({PASSED})", globals(), f"{SCAN}, z=None")) is None

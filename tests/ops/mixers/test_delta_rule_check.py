"""The self-check of the kernels of the delta rules, and what computes a rule whose kernels are wrong."""

from typing import Any

import pytest
import torch

import tigon
from delta_rule_cases import GATED, make_inputs, results_of
from op_cases import DEVICE, DTYPES
from tigon.ops.mixers import delta_rule_launchers, delta_rule_steps
from tigon.ops.mixers.delta_rule_chunks import DeltaInputs
from tigon.ops.mixers.delta_rule_config import DeltaConfig, DeltaProblem, choose_config
from tigon.ops.mixers.delta_rule_launchers import DeltaVariant
from tigon.runtime.device import device_of

STATES = {"groups": 2, "has_initial_state": True, "has_last_state": True}
# The properties in which the calls differ from a training step.
VARIANTS: dict[str, dict[str, Any]] = {
    "training": {"groups": 2},
    "states": STATES,
    "packed": {"normalises": False, "bounds_dtype": torch.int32},
    "packed states": {**STATES, "bounds_dtype": torch.int64},
    "kda": {"has_feature_decay": True},
    "kda, packed states": {**STATES, "bounds_dtype": torch.int64, "has_feature_decay": True},
}


def check_kernels(properties: dict[str, Any]) -> bool:
    """Run the self-check with the launch parameters of a small problem."""
    like = torch.empty(1, 1, 1, 32, dtype=DTYPES[-1], device=DEVICE)
    problem = DeltaProblem(32, 16, False, properties.get("has_feature_decay", False))
    training = DeltaVariant(
        size=32, value_size=16, groups=1, normalises=True, has_initial_state=False, has_last_state=False,
        bounds_dtype=None, config=DeltaConfig.choose(problem, device_of(like)),
    )  # fmt: skip
    return delta_rule_launchers.check_kernels(like, training._replace(**properties))


@pytest.mark.kernels
@pytest.mark.parametrize(("variant", "is_broken"), [("states", True), ("kda", True), ("kda, packed states", False)])
def test_the_self_check_finds_a_wrong_kernel(variant, is_broken, monkeypatch):
    """A wrong kernel is replaced by PyTorch code, with one warning. The default device does not matter."""
    if is_broken:
        launch = delta_rule_steps.launch

        def launch_twice_the_scores(kernel, grid, *arguments, **constants):
            launch(kernel, grid, *arguments, **constants)
            if kernel in (delta_rule_steps.chunk_pairs_kernel, delta_rule_steps.kda_pairs_kernel):
                arguments[kernel.arg_names.index("scores_ptr")].mul_(2)

        monkeypatch.setattr(delta_rule_steps, "launch", launch_twice_the_scores)
    with torch.device("meta"):
        assert check_kernels(VARIANTS[variant]) is not is_broken


@pytest.mark.kernels
def test_the_self_check_of_a_variant_launches_the_kernels_of_this_variant(monkeypatch):
    """Training passes neither states nor bounds, and Triton compiles other code for that."""
    launch, optional = delta_rule_steps.launch, {}

    def record(kernel, grid, *arguments, **constants):
        values = dict(zip(kernel.arg_names, arguments, strict=False))
        names = ("initial_ptr", "last_ptr", "dlast_ptr", "bounds_ptr")
        optional.update({name: values[name] for name in names if values.get(name) is not None})
        launch(kernel, grid, *arguments, **constants)

    monkeypatch.setattr(delta_rule_steps, "launch", record)
    assert check_kernels(VARIANTS["training"])
    assert not optional
    assert check_kernels(VARIANTS["packed"])
    assert list(optional) == ["bounds_ptr"]
    assert check_kernels(VARIANTS["packed states"])
    assert len(optional) == 4


@pytest.mark.kernels
def test_torch_computes_what_wrong_kernels_would(monkeypatch):
    inputs = make_inputs(tokens=70)
    monkeypatch.setattr(delta_rule_launchers, "checked_config", lambda *arguments: None)
    monkeypatch.setattr(delta_rule_steps, "launch", None)
    expected, actual = (results_of(f, inputs) for f in (GATED.reference, tigon.gated_delta_rule))
    for name, x in actual.items():
        torch.testing.assert_close(x, expected[name], rtol=1e-4, atol=1e-5)


def test_numbers_of_samples_share_launch_parameters():
    """Otherwise each number of packed samples would run the self-check."""
    inputs = [
        DeltaInputs(**{name: x.detach() for name, x in make_inputs(samples=n).items() if name != "initial_state"},
                    initial_state=None, cu_seqlens=torch.arange(n + 1))
        for n in (5, 6)
    ]  # fmt: skip
    assert choose_config(inputs[0]) is choose_config(inputs[1])

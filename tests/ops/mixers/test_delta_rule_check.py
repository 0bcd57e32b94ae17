"""The self-check of the kernels of the delta rules, and what computes a rule whose kernels are wrong."""

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

# Training, decoding with a state, and packed samples.
VARIANTS = {
    "training": DeltaVariant(16, 2, True, False, False, None), "states": DeltaVariant(16, 2, True, True, True, None),
    "packed": DeltaVariant(16, 1, False, False, False, torch.int32),
    "packed states": DeltaVariant(16, 2, True, True, True, torch.int64),
    "kda": DeltaVariant(16, 1, True, False, False, None, has_feature_decay=True),
    "kda, packed states": DeltaVariant(16, 2, True, True, True, torch.int64, has_feature_decay=True),
}  # fmt: skip


def check_kernels(variant: DeltaVariant) -> bool:
    """Run the self-check with the launch parameters of a small problem."""
    like = torch.empty(1, 1, 1, 32, dtype=DTYPES[-1], device=DEVICE)
    problem = DeltaProblem(32, variant.value_size, False, variant.has_feature_decay)
    return delta_rule_launchers.check_kernels(like, variant, DeltaConfig.choose(problem, device_of(like)))


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


def test_a_self_check_without_memory_has_no_verdict(monkeypatch):
    def lack_memory(*arguments):
        raise torch.OutOfMemoryError

    inputs = DeltaInputs(**{name: x.detach() for name, x in make_inputs(tokens=3).items()}, cu_seqlens=None)
    monkeypatch.setattr(delta_rule_launchers, "launch_forward", lack_memory)
    monkeypatch.setattr(delta_rule_launchers, "choose_config", lambda inputs: None)
    monkeypatch.setattr(delta_rule_launchers, "may_wait", lambda: True)
    monkeypatch.setattr(delta_rule_launchers, "_verdicts", {})
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 0)
    with pytest.raises(torch.OutOfMemoryError):
        delta_rule_launchers.checked_config(inputs, True, True)
    assert not delta_rule_launchers._verdicts


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

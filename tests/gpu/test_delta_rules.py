"""Launch parameters of the gated delta rule that differ between calls."""

import torch

import tigon
from delta_rule_cases import GATED, make_inputs, results_of
from tigon.ops.mixers.delta_rule_config import DeltaConfig
from tigon.runtime.tuning import tuned


def test_the_width_of_the_blocks_of_a_state_does_not_change_bits():
    """The width depends on the number of sequences, so packed samples and the same samples alone may differ in it."""
    inputs = make_inputs(GATED, tokens=300, sizes=(128, 128), dtype=torch.bfloat16)
    results = []
    for block in (32, 64):
        with tuned(DeltaConfig, scan_block_v=block):
            results.append(results_of(tigon.gated_delta_rule, inputs))
    for name, x in results[0].items():
        assert torch.equal(x, results[1][name]), name

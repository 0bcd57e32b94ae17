"""32 steps of AdamW in fp32 on the kernels: the distance to stock is that of a change by one unit in the last place.

TIGON_CURVES=curves.jsonl appends a line of JSON for every type: the distances, their ratios to the limits, and flips.
"""

import dataclasses
import json
import os

import pytest
import torch

import tigon

transformers = pytest.importorskip("transformers")
from hf.curves import compare  # noqa: E402
from hf.same_step import make_batch  # noqa: E402
from hf.tiny import TYPES, VOCABULARY, WITHOUT, tiny_model  # noqa: E402

BUILT = [name for name in TYPES if name not in WITHOUT]
# A flip in the first steps would leave too few steps to compare.
LEAST_STEPS = 8


@pytest.fixture(autouse=True)
def _deterministic():
    """Compute products without TF32, and sums in a fixed order where torch has one."""
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


@pytest.mark.filterwarnings("ignore:.*deterministic.*")
@pytest.mark.parametrize("model_type", BUILT)
def test_a_patched_model_trains_as_stock_in_fp32(model_type):
    reports = []
    model, batch = tiny_model(model_type).cuda(), make_batch(VOCABULARY, device="cuda")
    comparison = compare(model, lambda variant: reports.append(tigon.patch(variant)), batch)
    if path := os.environ.get("TIGON_CURVES"):
        row = {"type": model_type, **dataclasses.asdict(comparison), "failures": comparison.failures()}
        # Each line is one write, so that lines of several workers do not mix.
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")
    assert comparison.failures() == [], reports[0]
    assert comparison.steps >= LEAST_STEPS, comparison

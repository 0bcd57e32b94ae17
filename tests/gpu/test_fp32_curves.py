"""32 steps of AdamW in fp32 on the kernels: as near to stock as stock that is moved by one unit in the last place.

TIGON_CURVES=curves.jsonl appends a line of JSON for every type: the distances, the limits' shares, and the flips.
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
LEAST_STEPS = 8  # A flip in the first steps would leave nothing to compare.


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
def test_curve_is_stock(model_type):
    reports = []
    model, batch = tiny_model(model_type).cuda(), make_batch(VOCABULARY, device="cuda")
    comparison = compare(model, lambda variant: reports.append(tigon.patch(variant)), batch)
    if path := os.environ.get("TIGON_CURVES"):
        row = {"type": model_type, **dataclasses.asdict(comparison), "failures": comparison.failures()}
        with open(path, "a") as file:  # One write per line, so that lines of several workers do not mix.
            file.write(json.dumps(row) + "\n")
    assert comparison.failures() == [], reports[0]
    assert comparison.steps >= LEAST_STEPS, comparison

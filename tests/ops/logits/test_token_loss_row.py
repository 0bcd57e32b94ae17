"""The choice of the kernel that reads logits once. Only tests/gpu/test_token_loss_row.py runs the kernel itself."""

import pytest
import torch

from tigon.ops.logits.token.row import RowConfig, can_read_once
from tigon.ops.logits.token.scan import ScanProblem
from tigon.ops.logits.token.types import LOSS_ALONE, Options, Wants
from tigon.runtime.compat.triton import gluon
from tigon.runtime.device import Device

HOPPER = Device(132, 32, 227 * 1024, async_copy=True)
AMPERE = Device(108, 32, 163 * 1024, async_copy=True)
CONSUMER = Device(82, 32, 99 * 1024, async_copy=True)

pytestmark = [
    pytest.mark.skipif(gluon is None, reason="this Triton has no Gluon"),
    pytest.mark.no_interpreter("It launches no kernel."),
]


@pytest.mark.parametrize("device", [HOPPER, AMPERE, CONSUMER], ids=["hopper", "ampere", "consumer"])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("v", [4096, 32000, 50304, 65536, 128256, 151936, 256000])
def test_slots_fit_in_shared_memory_and_hold_enough_of_a_row(v, itemsize, device):
    config = RowConfig.heuristic(ScanProblem(v, itemsize), device)
    if config is None:
        assert v * itemsize > 2 * device.shared_memory
        return
    elements_in_slots = config.slots * config.block
    assert config.programs_per_multiprocessor * (elements_in_slots * itemsize + 1024) <= device.shared_memory
    assert config.programs_per_multiprocessor * config.num_warps <= 64
    assert elements_in_slots >= 0.4 * v
    assert config.block % (config.num_warps * 32 * config.lane) == 0
    assert config.lane * itemsize == 16


def test_heuristic_declines_short_rows_and_devices_without_async_copies():
    assert RowConfig.heuristic(ScanProblem(2048, 2), HOPPER) is None
    assert RowConfig.heuristic(ScanProblem(600_000, 2), HOPPER) is None
    assert RowConfig.heuristic(ScanProblem(32000, 2), Device(304, 64, 65536)) is None


def test_kernel_reads_rows_of_whole_vectors_for_the_plain_loss():
    logits, target = torch.zeros(4, 160), torch.zeros(4, dtype=torch.int64)
    assert can_read_once(logits, target, Options(z_loss=0.1, logit_scale=2.0), LOSS_ALONE)
    assert can_read_once(logits, target, Options(token_scaling=True), Wants(z_loss=True, log_probs=True))
    assert not can_read_once(logits, target, Options(), Wants(entropy=True))
    assert not can_read_once(logits, target, Options(), Wants(predicted=True))
    assert not can_read_once(logits, target, Options(softcap=30.0), LOSS_ALONE)
    assert not can_read_once(logits, target, Options(label_smoothing=0.1), LOSS_ALONE)
    assert not can_read_once(logits[:, :150], target, Options(), LOSS_ALONE)
    assert not can_read_once(logits[:, 2:146], target, Options(), LOSS_ALONE)
    assert not can_read_once(torch.zeros(4, 170)[:, :160], target, Options(), LOSS_ALONE)


def test_dtype_of_the_targets_must_hold_ignore_index():
    logits, target = torch.zeros(4, 160), torch.zeros(4, dtype=torch.int32)
    assert can_read_once(logits, target, Options(), LOSS_ALONE)
    assert not can_read_once(logits, target, Options(ignore_index=2**40), LOSS_ALONE)

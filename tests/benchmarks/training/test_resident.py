"""Tests of the peak memory of a process."""

import torch

from benchmarks.training.resident import ResidentMemory


def test_resident_memory_is_the_peak_above_the_memory_before(one_thread):
    before = torch.ones(2**23)  # 32 MiB
    memory = ResidentMemory()
    # 64 MiB, freed at once.
    torch.ones(2**24)
    assert 60 * 2**20 < memory.peak_bytes() < 80 * 2**20
    del before

"""Peak memory of a process."""

import torch

from tigon.tools.training.resident import ResidentMemory


def test_resident_memory_keeps_the_peak_and_not_what_was_there(one_thread):
    there = torch.ones(2**23)  # 32 MiB
    memory = ResidentMemory()
    torch.ones(2**24)  # 64 MiB, freed at once
    assert 60 * 2**20 < memory.peak_bytes() < 80 * 2**20
    del there

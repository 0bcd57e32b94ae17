"""The launch parameters of norms fit the registers, the shared memory and the workgroups of every device."""

import itertools

import pytest

from tigon.ops.norms.gated_rms_norm_kernels import GatedNormConfig
from tigon.ops.norms.norm_config import NormConfig
from tigon.ops.rotary.qk_norm_rope_config import QKNormRopeConfig
from tigon.runtime.device import Device

pytestmark = pytest.mark.no_interpreter("It launches no kernel.")

DEVICES = {"nvidia": Device(132, 32, 232448), "amd": Device(304, 64, 65536), "small": Device(4, 32, 49152)}


def assert_fits(config, device: Device, tile_bytes: int) -> None:
    """Check the warps, and the tiles that the backward's pipeline holds for each stage but the last."""
    for warps in (config.num_warps, config.backward_warps):
        assert 1 <= warps <= device.max_warps
        assert warps * device.warp_size <= 1024
    assert (config.num_stages - 1) * tile_bytes <= device.shared_memory


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_heuristics_fit_the_device(device):
    for n, (loads, sums) in itertools.product((1, 100, 4096, 5120, 16384, 32768), ((2, 0), (2, 1), (3, 1), (2, 2))):
        config = NormConfig.heuristic((n, 2, loads, sums), device)
        assert config.block_n >= n
        assert_fits(config, device, loads * config.block_m * config.block_n * 2)
    for size, itemsize in itertools.product((2, 128, 1024, 5000, 8192), (2, 4)):
        config = GatedNormConfig.heuristic((size, itemsize), device)
        assert config.block_n >= size
        assert_fits(config, device, 3 * config.backward_block_m * config.block_n * itemsize)
    sizes = (1, 2), (32, 128), (14, 64), (40, 128), (8, 1024), (128, 256)
    for (heads, size), together in itertools.product(sizes, (False, True)):
        config = QKNormRopeConfig.heuristic((heads, size, together, 2), device)
        for block_h in (config.block_h, config.backward_block_h):
            assert block_h >= heads if together else block_h < 2 * heads
        assert_fits(config, device, 2 * config.backward_block_h * size * 2)


def test_programs_of_the_backward_get_equal_numbers_of_tiles():
    config = NormConfig.heuristic((4096, 2, 2, 1), DEVICES["nvidia"])
    assert (config.programs, config.block_m) == (132, 2)
    # 8192 pairs of rows are 63 pairs for each of 131 programs. With 132 programs one of them would also get 63 pairs.
    assert [config.count_programs(m) for m in (0, 1, 4, 5, 64, 528, 529, 16384)] == [0, 1, 1, 2, 16, 132, 89, 131]
    assert config.count_programs(16384, blocks=8) <= 132 // 8

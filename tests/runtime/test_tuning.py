"""How launch parameters are chosen, and how a block overrides the choice."""

import importlib
import pkgutil
from dataclasses import dataclass, is_dataclass
from typing import NamedTuple

import pytest

import tigon.ops
from benchmarks.compile.targets import CHIPS
from tigon.runtime.device import EMULATED, Device
from tigon.runtime.tuning import LaunchConfig, rung, tuned

pytestmark = pytest.mark.no_interpreter("It launches no kernel.")


class Problem(NamedTuple):
    n: int


@dataclass(frozen=True)
class Config(LaunchConfig):
    block: int
    num_warps: int = 4

    @staticmethod
    def heuristic(problem: Problem, device: Device) -> "Config | None":
        return Config(problem.n) if problem.n else None


def test_block_replaces_the_fields_that_it_names():
    with tuned(Config, num_warps=2):
        assert Config.choose(Problem(8), EMULATED) == Config(8, 2)
        with tuned(Config, block=1):
            assert Config.choose(Problem(8), EMULATED) == Config(1, 2)
        assert Config.choose(Problem(8), EMULATED) == Config(8, 2)
    assert Config.choose(Problem(8), EMULATED) == Config(8, 4)


def test_block_that_raises_leaves_no_override():
    with pytest.raises(RuntimeError), tuned(Config, block=1):
        raise RuntimeError
    assert Config.choose(Problem(8), EMULATED) == Config(8, 4)


def test_complete_override_replaces_a_heuristic_that_returns_none():
    with tuned(Config, block=16, num_warps=1):
        assert Config.choose(Problem(0), EMULATED) == Config(16, 1)


def test_unknown_field_is_refused():
    with (
        pytest.raises(TypeError, match="tuned: Config has the fields block, num_warps, got 'blocks'"),
        tuned(Config, blocks=1),
    ):
        pass


def test_rung_is_that_of_the_first_limit_that_is_not_smaller():
    ladder = [(1024, 4), (4096, 8), (8192, 16)]
    assert [rung(ladder, n) for n in (1, 1024, 1025, 4096, 8192, 8193)] == [4, 4, 8, 8, 16, 16]


def _configs() -> list[type[LaunchConfig]]:
    for module in pkgutil.walk_packages(tigon.ops.__path__, "tigon.ops."):
        importlib.import_module(module.name)
    return [cls for cls in LaunchConfig.__subclasses__() if cls.__module__.startswith("tigon.")]


@pytest.mark.parametrize("cls", _configs(), ids=lambda cls: cls.__name__)
def test_every_config_is_a_frozen_value_with_one_form_of_heuristic(cls):
    assert is_dataclass(cls)
    assert cls.__dataclass_params__.frozen
    code = cls.heuristic.__code__
    assert code.co_varnames[: code.co_argcount] == ("problem", "device")


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_device_of_a_chip_has_its_architecture(chip):
    assert chip.device.arch == chip.name

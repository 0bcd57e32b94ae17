"""Choose the launch parameters of kernels, and override the choice in a block of a test or of a tuning script.

Each family of kernels has one frozen dataclass of launch parameters, derived from `LaunchConfig`. Its `heuristic` is a
pure function of the problem (a NamedTuple of sizes) and the device, so tests call it without a GPU. Launchers call
`choose`, which returns what `heuristic` returns unless a `tuned` block overrides it. docs/performance.md shows both.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self, TypeVar

from tigon.runtime.device import Device

Value = TypeVar("Value")

# Fields that replace those of the heuristic's choice, by the class of the config.
_overrides: dict[type, dict[str, Any]] = {}


class LaunchConfig:
    """The base class of all launch parameters. A subclass is a frozen dataclass with a `heuristic`."""

    # The choices of earlier calls. They are cached, because small models wait for the host, and a heuristic takes
    # microseconds.
    _choices: ClassVar[dict[tuple[tuple, Device], Any]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._choices = {}
        # A hash of all fields takes longer than that of the identity, by which a cache may hold two equal configs.
        cls.__hash__ = object.__hash__  # type: ignore[method-assign]

    @staticmethod
    def heuristic(problem: Any, device: Device) -> Any:
        """Return the launch parameters for a problem on a device. This must be a pure function. None means that the
        kernel cannot run there, or that another kernel is faster. Launchers of such a kernel call `find` instead of
        `choose`."""
        raise NotImplementedError

    @classmethod
    def find(cls, problem: tuple, device: Device) -> Self | None:
        """Return the heuristic's choice, with the fields that an enclosing `tuned` block overrides."""
        try:
            return cls._choices[problem, device]
        except KeyError:
            pass
        # If a `tuned` block begins or ends in another thread meanwhile, it replaces `cls._choices`. The assignment
        # below then goes to the old dictionary, so no later call returns an outdated choice.
        choices, fields = cls._choices, _overrides.get(cls)
        config = cls.heuristic(problem, device)
        if fields is not None:
            config = cls(**fields) if config is None else dataclasses.replace(config, **fields)
        choices[problem, device] = config
        return config

    @classmethod
    def choose(cls, problem: tuple, device: Device) -> Self:
        """Return what `find` returns, for a kernel that runs everywhere."""
        try:
            return cls._choices[problem, device]
        except KeyError:
            config = cls.find(problem, device)
        assert config is not None, f"{cls.__name__}.heuristic returns no parameters for {problem}"
        return config


@contextlib.contextmanager
def tuned(cls: type[LaunchConfig], **fields: Any) -> Iterator[None]:
    """Replace fields of every choice of one config class in the block, in every thread.

    Autograd runs the backward of CUDA tensors in a thread of its own, so the override holds there too. Where the
    heuristic returns None, `fields` must be complete. An inner block adds its fields to those of an outer one.

    Raises:
        TypeError: The class has no such field.

    Example:
        >>> from tigon.ops.logits.softmax import SoftmaxConfig
        >>> with tuned(SoftmaxConfig, num_warps=8):
        ...     tigon.softmax(torch.randn(3, 64)).shape
        torch.Size([3, 64])
    """
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name in fields:
        if name not in names:
            raise TypeError(f"tuned: {cls.__name__} has the fields {', '.join(names)}, got {name!r}")
    previous = _overrides.get(cls)
    _overrides[cls] = {**(previous or {}), **fields}
    cls._choices = {}
    try:
        yield
    finally:
        if previous is None:
            del _overrides[cls]
        else:
            _overrides[cls] = previous
        cls._choices = {}


def rung(ladder: Sequence[tuple[int, Value]], size: int) -> Value:
    """Return the value of the first pair (limit, value) whose limit is at least `size`, or else the last value.

    The limits ascend.

    Example:
        >>> rung([(1024, 4), (4096, 8), (8192, 16)], 3000)
        8
    """
    for limit, value in ladder:
        if size <= limit:
            return value
    return ladder[-1][1]

"""The levels of memory of `tigon.patch`, as values: what a model saves for backward, and where."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from tigon.runtime import checks

MemoryLevel = Literal[
    "default", "lean", "lean+mlp", "checkpoint", "checkpoint+attention", "checkpoint+offload",
    "checkpoint+attention+offload", "offload",
]  # fmt: skip
# Other names of levels.
_SYNONYMS = {"offload": "checkpoint+attention+offload"}
MEMORY: tuple[str, ...] = tuple(name for name in get_args(MemoryLevel) if name not in _SYNONYMS)
LEVEL_NAMES = (
    ", ".join(map(repr, MEMORY))
    + ", or a tigon.Memory; a number of layers may follow mlp, attention and offload ('lean+mlp:4')"
)
# The options of a level, with the level that each of them belongs to.
_OPTIONS = {"mlp": "lean", "attention": "checkpoint", "offload": "checkpoint"}


@dataclass(frozen=True, eq=False)
class Memory:
    """A level of memory: what a model saves for backward. `str` returns the name that `tigon.patch(memory=...)` takes.

    Each option is False, True (for all layers) or a number of layers.

    Args:
        level: "default"; "lean", where backward recomputes the outputs of norms and gates; or "checkpoint", where the
            layers save only their input, and backward runs them again.
        mlp: With "lean": backward also recomputes the gate and up projections of MLPs and experts. A number counts from
            the first layer.
        attention: With "checkpoint": the layers also save the outputs of attention. A number counts from the last
            checkpointed layer.
        offload: With "checkpoint": what the layers save is in pinned host memory until backward. A number counts from
            the first layer. With True, the tensors of the last layers stay on the device if the peak memory does not
            grow.

    Raises:
        ValueError: The level is unknown, an option does not belong to it, or a number is below 1.
        TypeError: An option is neither a bool nor an int.

    Example:
        >>> str(tigon.Memory("checkpoint", attention=20, offload=True))
        'checkpoint+attention:20+offload'
        >>> tigon.patch(torch.nn.Sequential(tigon.RMSNorm(8)), memory=tigon.Memory("lean", mlp=True)).restore()
    """

    level: str = "default"
    mlp: bool | int = False
    attention: bool | int = False
    offload: bool | int = False

    def __post_init__(self) -> None:
        checks.choice("Memory", "level", self.level, ("default", "lean", "checkpoint"))
        for name, level in _OPTIONS.items():
            value = getattr(self, name)
            if not isinstance(value, int):
                raise TypeError(f"Memory: {name} must be True, False or a number of layers, got {value!r}")
            if value is not False and value < 1:
                raise ValueError(f"Memory: {name} must be at least 1 layer, got {value}")
            if value and level != self.level:
                raise ValueError(f"Memory: {name} needs level={level!r}, got level={self.level!r}")

    def __str__(self) -> str:
        options = {name: getattr(self, name) for name in _OPTIONS}
        return self.level + "".join(f"+{k}" + f":{v}" * (v is not True) for k, v in options.items() if v)

    # True == 1, but all layers are not one layer, so values are compared by their names.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Memory) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def counts(self) -> dict[str, int | None]:
        """The number of layers of each option that is on; None for all layers."""
        options = {name: getattr(self, name) for name in _OPTIONS}
        return {name: None if value is True else value for name, value in options.items() if value}

    def describe(self, excludes_last: bool = False) -> str:
        """Return what the layers save, as the report says it. `excludes_last` says that the last layer runs once."""
        if self.level == "default":
            return ""
        if self.level == "lean":
            text, projections = "backward recomputes the outputs of norms and gates", "the gate and up projections"
            if self.mlp is True:
                return f"{text}, and of {projections} of MLPs and experts"
            in_layers = f", and in the first {self.mlp} layers also those of {projections} of MLPs and experts"
            return text + in_layers * bool(self.mlp)
        saved = f"layers{' except the last' * excludes_last} save only their input"
        again, verb = "runs them again", "is"
        if self.attention:
            number = "" if self.attention is True else f", in {self.attention} of them,"
            saved, again, verb = f"{saved} and{number} the outputs of attention", "runs the rest of them again", "are"
        if not self.offload:
            return f"{saved}, and backward {again}"
        number = "" if self.offload is True else f" in the first {self.offload} layers"
        return f"{saved}, which{number} {verb} copied to pinned host memory until backward {again}"


def parse_memory(name: Any) -> Memory | None:
    """Return the level with a name, or a level itself; None for anything else."""
    if isinstance(name, Memory):
        return name
    if not isinstance(name, str):
        return None
    name = _SYNONYMS.get(name, name)
    level, *words = name.split("+")
    try:
        pairs = [word.partition(":") for word in words]
        memory = Memory(level, **{option: int(number) if colon else True for option, colon, number in pairs})
    except (TypeError, ValueError):
        return None
    # Other orders, signs, zeros and spaces are no names.
    return memory if str(memory) == name else None


def check_memory(op: str, memory: Any) -> Memory:
    """Return the level that a caller of `op` requests by its name or as a value, or raise a ValueError."""
    level = parse_memory(memory)
    if level is None:
        raise ValueError(f"{op}: memory must be one of {LEVEL_NAMES}, got {memory!r}")
    return level

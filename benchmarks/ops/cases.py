"""The cases of `benchmarks.ops`: the workloads at the shapes of real models, and the least work that each must do."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.workloads import WORKLOADS, Inputs, Workload

# The ops that are measured. An op is measured if its workload has shapes for the benchmark.
OPS: dict[str, Workload] = {name: workload for name, workload in WORKLOADS.items() if workload.bench_shapes}


@dataclass(frozen=True)
class Case:
    """One row of the table: an op at the shape of a model.

    `options` are the op's keyword arguments; `ignored` is the share of targets that are -100; `frozen` names inputs
    that get no gradient. With `no_grad` no input gets one, and the forward pass alone is measured. `skewed` is the
    exponent of Zipf's law by which tokens choose experts.
    """

    op: str
    model: str
    shape: tuple[int, ...]
    tags: tuple[str, ...] = ("first-light",)
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    ignored: float = 0.0
    frozen: tuple[str, ...] = ()
    no_grad: bool = False
    skewed: float = 0.0
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """Return `op/model/shape`, followed by what is unusual; no other case has this name."""
        return "/".join([self.op, self.model, "x".join(map(str, self.shape)), *self.extras])

    @property
    def extras(self) -> tuple[str, ...]:
        """Return words for the options that differ from the usual case."""
        words = [f"{key}={_as_word(value)}" for key, value in self.options.items()]
        words += [f"ignored={self.ignored:g}"] if self.ignored else []
        words += [f"frozen={name}" for name in self.frozen]
        words += [f"skewed={self.skewed:g}"] if self.skewed else []
        return (*words, *(["no_grad"] if self.no_grad else []))

    @property
    def workload(self) -> Workload:
        return OPS[self.op]

    @property
    def family(self) -> str:
        """Return the name of the picture that has the case."""
        return self.workload.family or self.op

    @property
    def bytes(self) -> int | None:
        """Return the fewest bytes that memory must move, forward and backward; None where products are the bound."""
        count = self.workload.elements
        return None if count is None else count(*self.shape) * self.dtype.itemsize

    @property
    def flops(self) -> int | None:
        """Return the fewest operations of matrix products, forward and backward; None where memory is the bound."""
        count = self.workload.flops
        return None if count is None else count(self)

    def make(self, device: torch.device, seed: int = 0) -> Inputs:
        """Make fresh inputs, the same for the same seed."""
        inputs = self.workload.make_inputs(
            self.shape,
            self.dtype,
            device,
            seed=seed,
            options=self.options,
            form={"ignored": self.ignored, "skewed": self.skewed},
        )
        for name in inputs.grad_names if self.no_grad else self.frozen:
            inputs.tensors[name].requires_grad_(False)
        return inputs

    def smaller(self) -> "Case":
        """Return the case with half the rows, tokens or sequence, for checks that do not fit into memory."""
        axis = self.workload.rows_axis
        shape = tuple(max(1, size // 2) if i == axis else size for i, size in enumerate(self.shape))
        return replace(self, shape=shape)


def _as_word(value: object) -> str:
    return "+".join(map(_as_word, value)) if isinstance(value, tuple) else str(value).removeprefix("torch.")


def _cases() -> tuple[Case, ...]:
    """Return all cases: first those of models, then small ones for a CPU, then those that vary one size."""
    cases = [
        Case(
            op,
            shape.model,
            shape.sizes,
            shape.tags,
            shape.options,
            shape.ignored,
            shape.frozen,
            shape.no_grad,
            shape.skewed,
        )
        for op, workload in OPS.items()
        for shape in workload.bench_shapes
    ]
    return tuple(sorted(cases, key=lambda case: ("small" in case.tags) + 2 * ("sweep" in case.tags)))


CASES: tuple[Case, ...] = _cases()


def select(ops: str | None, cases: str) -> list[Case]:
    """Return the cases of `ops` (None: all) that match `cases` (tags or parts of a name); commas separate both.

    A word that is a tag selects by tag, and "all" selects all cases. Any other word selects the names it is a part of.

    Raises:
        ValueError: `ops` contains an unknown op, or no case matches.

    Example:
        >>> [case.name for case in select("rope", "small")]
        ['rope/small/1x256x8x2x64']
    """
    requested_ops = split_words(ops) if ops else list(OPS)
    for op in requested_ops:
        if op not in OPS:
            raise ValueError(f"bench: ops must be among {', '.join(OPS)}, got {op!r}")
    tags = {tag for case in CASES for tag in case.tags}
    words = split_words(cases)

    def matches(case: Case) -> bool:
        return any(word == "all" or (word in case.tags if word in tags else word in case.name) for word in words)

    matching_cases = [case for case in CASES if case.op in requested_ops and matches(case)]
    if not matching_cases:
        raise ValueError(
            f"bench: cases must match a tag ({', '.join(sorted(tags))}) or a part of a name (--list shows them), "
            f"got {cases!r} within ops {', '.join(requested_ops)}"
        )
    return matching_cases


def split_words(text: str | None) -> list[str]:
    """Return the words of a comma-separated option."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]

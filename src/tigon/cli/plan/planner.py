"""Compare the memory levels: the memory of a step, the largest batch that fits, and the estimated speed."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

import tigon
from tigon.cli.inspect.build import build, one_line, quietly
from tigon.cli.plan.adapters import add_adapters
from tigon.cli.plan.engines import OPTIMIZERS, STRATEGIES, OptimizerCosts, Replicated, Sharded, optimizer_costs
from tigon.cli.plan.ledger import Work
from tigon.cli.plan.positions import find_position_table
from tigon.cli.plan.step import Step, count_step
from tigon.hf.report import Report
from tigon.memory.levels import MEMORY, MemoryLevel

GIB = 2**30
# The model without Tigon is planned like a further level.
STOCK = "stock"
# The largest batch of one GPU that the search tries.
MAX_BATCH = 2**16
# The largest factor from one batch that fits to the next batch that the search tries.
MAX_GROWTH = 32

# The dtype of the arithmetic, and the dtype of the parameters, gradients and states between steps.
DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "mixed": (torch.bfloat16, torch.float32),
}


class NotPlanned(ValueError):
    """The model cannot be planned; the message says why."""


class TooLong(NotPlanned):
    """The sequence has more tokens than the model has positions."""


@dataclass(frozen=True)
class Rates:
    """The work that a GPU does in a second of a long step. The defaults were measured on an H200 of 700 W in bf16."""

    # Multiplications and additions of matrix products, in fp32 without TF32, and of attention.
    products: float = 660e12
    products_fp32: float = 50e12
    attention: float = 420e12
    # Bytes read and written, sent to other GPUs of the host, and copied to the host.
    traffic: float = 3.4e12
    link: float = 350e9
    host: float = 50e9

    def seconds(self, work: Work, dtype: torch.dtype) -> float:
        """Return the seconds of one stage of a step, in which the GPU computes while bytes are transferred."""
        products = self.products_fp32 if dtype == torch.float32 else self.products
        compute = work.products / products + work.attention / self.attention + work.traffic / self.traffic
        return max(compute, work.exchanged / self.link, work.to_host / self.host)


@dataclass(frozen=True)
class PlanSettings:
    """The settings of a plan. `batch`, `seq` and the memories, in GiB, are those of one GPU. `reserve` is the part of
    `gpu_memory` that tensors do not get. `lora` is the rank of the adapters if only adapters are trained. With `qlora`,
    the weights of the layers with adapters take 4 bits."""

    seq: int
    batch: int = 1
    gpus: int = 1
    gpu_memory: float = 139.8
    host_memory: float = 128.0
    reserve: float | None = None
    optimizer: str = "adamw"
    dtype: str = "bf16"
    strategy: str | None = None
    lora: int | None = None
    qlora: bool = False
    rates: Rates = Rates()

    def __post_init__(self) -> None:
        counts = {
            "seq": self.seq,
            "batch": self.batch,
            "gpus": self.gpus,
            "lora": 1 if self.lora is None else self.lora,
        }
        for name, value in counts.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value}")
        for name in ("gpu_memory", "host_memory"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a positive number of GiB, got {getattr(self, name)}")
        for name, choices in (("optimizer", OPTIMIZERS), ("dtype", DTYPES), ("strategy", (None, *STRATEGIES))):
            if getattr(self, name) not in choices:
                allowed = ", ".join(choice for choice in choices if choice)
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if self.reserve is not None and not 0 <= self.reserve < self.gpu_memory:
            raise ValueError(f"reserve must be from 0 to less than gpu_memory {self.gpu_memory}, got {self.reserve}")
        if (self.engine == "single") != (self.gpus == 1) and self.engine != "fsdp":
            number = "one GPU" if self.engine == "single" else "at least two GPUs"
            raise ValueError(f"strategy {self.engine} needs {number}, got {self.gpus}")
        if self.dtype == "mixed" and self.engine != "fsdp":
            raise ValueError(f"dtype mixed needs strategy fsdp, which keeps fp32 shards, got strategy {self.engine}")
        if self.qlora and self.lora is None:
            raise ValueError("qlora needs the rank of the adapters that are trained (lora), got None")
        if self.budget <= 0:
            raise ValueError(f"gpu_memory must leave memory for tensors, got {self.gpu_memory} GiB")

    @property
    def engine(self) -> str:
        """Return the strategy. If it is None, the number of GPUs decides."""
        return self.strategy or ("single" if self.gpus == 1 else "fsdp")

    @property
    def adapter_dtype(self) -> torch.dtype:
        """Return the dtype of adapters in the forward pass: fp32, or with dtype mixed that of the arithmetic."""
        return DTYPES[self.dtype][0] if self.dtype == "mixed" else torch.float32

    @property
    def reserved_gib(self) -> float:
        """Return the GiB that tensors do not get: CUDA's context, NCCL's buffers, and gaps of the allocator."""
        if self.reserve is not None:
            return self.reserve
        return 0.05 * self.gpu_memory + (1.0 if self.gpus == 1 else 2.0)

    @property
    def budget(self) -> int:
        """Return the bytes of GPU memory for tensors."""
        return int((self.gpu_memory - self.reserved_gib) * GIB)

    @property
    def host_budget(self) -> int:
        return int(self.host_memory * GIB)

    def load(self, step: Step) -> float:
        """Return the share of the memory that a step needs, on the GPU or the host; above 1 it does not fit."""
        return max(step.peak / self.budget, step.host / self.host_budget)


@dataclass(frozen=True)
class LevelPlan:
    """The plan of one level: a step at the batch of the settings, and a step at the largest batch that fits."""

    # The name of a memory level, or STOCK; the steps are None if the model cannot have it for a `reason`, or if not
    # even one sequence fits.
    level: str
    step: Step | None = None
    largest: Step | None = None
    reason: str = ""
    # Tokens a second at both batches, relative to the first planned level at the batch of the settings.
    speed: float = 0.0
    largest_speed: float = 0.0
    # Steps at the batch of the settings and at other lengths of sequences.
    by_length: tuple[Step, ...] = ()

    def fits(self, settings: PlanSettings) -> bool:
        return self.step is not None and settings.load(self.step) <= 1.0


def seconds(step: Step, settings: PlanSettings) -> float:
    """Return the estimated seconds of a step."""
    return sum(settings.rates.seconds(work, DTYPES[settings.dtype][0]) for work in step.work)


def _tokens_a_second(step: Step, settings: PlanSettings) -> float:
    """Return the estimated tokens of one GPU in a second."""
    return step.batch * step.seq / seconds(step, settings)


def _largest(count: Callable[[int], Step], first: int, settings: PlanSettings) -> Step | None:
    """Return the step of the largest batch that fits. The search begins at `first`; memory must grow with the batch."""
    # The batch `low` fits, and the batch `high` does not.
    low, high = 0, MAX_BATCH + 1
    steps: dict[int, Step] = {}
    guess = min(first, MAX_BATCH)
    while high - low > 1:
        steps[guess] = step = count(guess)
        low, high = (guess, high) if settings.load(step) <= 1.0 else (low, guess)
        nearest = sorted(steps.values(), key=lambda step: abs(settings.load(step) - 1.0))[:2]
        if len(nearest) < 2:
            guess = 2 * low if low else high // 2
        elif high > MAX_BATCH or (len(steps) % 6 and steps[high].host <= settings.host_budget):
            guess = _crossing(nearest[0], nearest[1], settings)
        else:
            # Memory is not linear: some buffers grow in steps, and buffers of the host double.
            guess = (low + high) // 2
        guess = min(max(guess, low + 1), high - 1, max(MAX_GROWTH * low, 1) if high > MAX_BATCH else high)
    return steps.get(low)


def _crossing(a: Step, b: Step, settings: PlanSettings) -> int:
    """Return the largest batch that fits if the memory of each stage is a line through two steps. The peak of a small
    batch is in the optimizer's step, which does not grow with the batch."""
    batch = float(MAX_BATCH)
    lines = [(*peaks, settings.budget) for peaks in zip(a.peaks, b.peaks, strict=True)]
    for at_a, at_b, limit in (*lines, (a.host, b.host, settings.host_budget)):
        slope = (at_b - at_a) / (b.batch - a.batch)
        if slope > 0:
            batch = min(batch, a.batch + (limit - at_a) / slope)
        elif at_a > limit:
            return 0
    return int(max(batch, 0.0))


def _build(
    config: Any, settings: PlanSettings, trust_remote_code: bool, lengths: tuple[int, ...]
) -> tuple[Any, str, tuple[int, ...]]:
    """Return the model on meta in training mode, the class that built it, and the lengths that it has positions for."""
    try:
        model, auto = build(config, trust_remote_code=trust_remote_code, attention=None)
    except ValueError as error:
        raise NotPlanned(str(error)) from error
    arithmetic_dtype, _ = DTYPES[settings.dtype]
    for p in model.parameters():
        if p.is_floating_point():
            p.data = p.data.to(arithmetic_dtype)
    model_config: Any = model.config
    if getattr(model_config, "use_cache", False):
        model_config.use_cache = False
    if settings.lora is not None:
        try:
            with quietly():
                add_adapters(model, settings.lora, settings.adapter_dtype, settings.qlora)
        except ValueError as error:
            raise NotPlanned(f"{type(model).__name__} cannot get adapters ({one_line(error)})") from error
    model.train()
    table = find_position_table(model, max(settings.seq, *lengths, 1))
    if table is not None:
        if table.positions < settings.seq:
            raise TooLong(f"must be at most {table.positions} ({table.name} has no more positions), got {settings.seq}")
        lengths = lengths and (tuple(seq for seq in lengths if seq <= table.positions) or (settings.seq,))
    return model, auto, lengths


def _costs(model: Any, settings: PlanSettings) -> tuple[Replicated | Sharded, OptimizerCosts]:
    """Return the engine that holds the parameters, and the costs of the optimizer."""
    _, stored_dtype = DTYPES[settings.dtype]
    # Adapters are fp32 between steps, whatever the dtype of the arithmetic is.
    trained_dtype = stored_dtype if settings.lora is None else torch.float32
    is_sharded, gpus = settings.engine == "fsdp", settings.gpus
    sizes = [-(-p.numel() // (gpus if is_sharded else 1)) for p in model.parameters() if p.requires_grad]
    engine = Sharded(model, gpus, stored_dtype) if is_sharded else Replicated(model, gpus)
    return engine, optimizer_costs(settings.optimizer, sizes, trained_dtype)


def plan(
    config: Any,
    settings: PlanSettings,
    *,
    trust_remote_code: bool = False,
    levels: tuple[str, ...] = (STOCK, *MEMORY),
    lengths: tuple[int, ...] = (),
    search: bool = True,
    show: Callable[[str], None] = lambda stage: None,
) -> Iterator[LevelPlan]:
    """Yield the plan of each of the `levels`. The model is built on meta, without weights and without a GPU. A step is
    also counted at each of `lengths` that the model has positions for. With `search`, the largest batch is searched.
    `show` is called with a text about each stage before the stage begins."""
    model, auto, lengths = _build(config, settings, trust_remote_code, lengths)
    engine, optimizer = _costs(model, settings)

    def plan_level(level: str) -> LevelPlan:
        steps: dict[tuple[int, int], Step] = {}

        def count(batch: int, seq: int = settings.seq) -> Step:
            if (batch, seq) not in steps:
                with quietly():
                    steps[batch, seq] = count_step(model, engine, optimizer, batch, seq)
            return steps[batch, seq]

        try:
            step = count(settings.batch)
            by_length = tuple(count(settings.batch, seq) for seq in lengths)
        # The code of the model may raise anything on tensors without values.
        except Exception as error:
            name = type(model).__name__
            raise NotPlanned(f"a step of {name} ({auto}) on meta fails at level {level}: {one_line(error)}") from error
        largest = _largest(count, settings.batch, settings) if search else None
        return LevelPlan(level, step, largest, by_length=by_length)

    # The tokens a second of the first planned level. The speeds of all levels are relative to it.
    reference: float | None = None
    patch_report: Report | None = None
    if set(levels) != {STOCK}:
        show("Patching the model, to find its parts")
        with quietly():
            patch_report = tigon.patch(model)
    # The default level is first, because the others are compared with it. Stock is last, so that the parts of the model
    # are recognised once and stay patched for all levels.
    order = sorted(levels, key=lambda level: (level == STOCK, level != "default"))
    for number, level in enumerate(order, start=1):
        what = "stock model" if level == STOCK else f"level {level}"
        show(f"Counting the memory of steps: {what} ({number} of {len(levels)})")
        if level == STOCK:
            if patch_report is not None:
                patch_report.restore()
            level_plan = plan_level(level)
        else:
            try:
                with quietly():
                    report = tigon.patch(model, memory=cast(MemoryLevel, level))
            except ValueError as error:
                yield LevelPlan(level, reason=str(error))
                continue
            try:
                level_plan = plan_level(level)
            finally:
                report.restore()
        assert level_plan.step is not None
        tokens_a_second = _tokens_a_second(level_plan.step, settings)
        reference = reference or tokens_a_second
        largest = level_plan.largest
        largest_speed = _tokens_a_second(largest, settings) / reference if largest else 0.0
        yield dataclasses.replace(level_plan, speed=tokens_a_second / reference, largest_speed=largest_speed)


def recommend(plans: list[LevelPlan], settings: PlanSettings, has_batch: bool) -> LevelPlan | None:
    """Return the plan of the fastest level that fits; None if none fits. Without a batch from the user, each level is
    judged at its largest one."""
    plans = [level_plan for level_plan in plans if level_plan.level != STOCK]
    if has_batch:
        fitting = [level_plan for level_plan in plans if level_plan.fits(settings)]
        return max(fitting, key=lambda level_plan: level_plan.speed, default=None)
    fitting = [level_plan for level_plan in plans if level_plan.largest]
    return max(fitting, key=lambda level_plan: level_plan.largest_speed, default=None)

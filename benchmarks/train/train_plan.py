"""Turn the options into runs. All bad options are refused here, before anything runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.train.train_options import TrainOptions
from benchmarks.training.fp8_providers import add_fp8
from benchmarks.training.job import Job
from benchmarks.training.lora import missing_packages
from benchmarks.training.measurement import STOCK_REVERSED
from benchmarks.training.model_providers import FROZEN, ModelProvider, select
from benchmarks.training.models import config_fields
from benchmarks.training.search import Search
from benchmarks.training.text import MIN_VOCAB, Tokens, read_text, tokenise
from tigon.runtime.requirements import unmet

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SWEEPS = ("seq", "batch")
DTYPES = ("bfloat16", "float32")
# The largest number of entries of the BPE. More would take long to train, and a model's speed does not depend on them.
MAX_ENTRIES = 32_000
# The longest sequence that a sweep tries if memory does not run out before.
MAX_TOKENS = 2**21


@dataclass(frozen=True)
class ProviderRun:
    """The training of one provider. With `reverse`, the sequences of each batch come in reverse order."""

    name: str
    provider: ModelProvider
    reverse: bool = False


@dataclass(frozen=True)
class TrainPlan:
    """Runs that differ in their provider alone."""

    options: TrainOptions
    config: "PretrainedConfig"
    tokens: Tokens
    text: str
    dtype: str
    steps: int
    warmup: int
    runs: Sequence[ProviderRun]
    sizes: Sequence[int] = field(default=())

    def search(self) -> Search:
        """Return the sizes of one run in the first round."""
        options = self.options
        if options.sweep is None:
            return Search([options.seq])
        start, other = (options.seq, options.batch) if options.sweep == "seq" else (options.batch, options.seq)
        longest = min(self.tokens.count, MAX_TOKENS)
        limit = longest if options.sweep == "seq" else max(1, self.tokens.count // other)
        return Search(self.sizes or [start], not self.sizes, options.resolution, limit)

    def shape(self, size: int) -> tuple[int, int]:
        """Return the batch and the length of a size."""
        return (size, self.options.seq) if self.options.sweep == "batch" else (self.options.batch, size)

    def job(self, run: ProviderRun) -> Job:
        options = self.options
        return Job(
            run.provider.name, config_fields(self.config), str(self.tokens.path), self.dtype, options.device,
            options.gpus, options.seed, options.lr, options.checkpointing, run.reverse,
            lora=options.lora, qlora=options.qlora,
        )  # fmt: skip


# --- the model -----------------------------------------------------------------------------------


def model_config(model: str, layers: int | None = None) -> "PretrainedConfig":
    """Return the config that `find_config` finds for a name, with only the first `layers` layers.

    Raises:
        ValueError: there is no such model, transformers has no causal language model for it, or it has fewer layers.

    >>> model_config("Llama-3-8B", layers=2).num_hidden_layers
    2
    """
    from tigon.cli.inspect.build import NotInspected, find_config
    from tigon.hf.transformers_private import auto_class_has

    try:
        config = find_config(model)
    except NotInspected as reason:
        raise ValueError(f"bench train: model: {reason}") from reason
    except ValueError as reason:
        raise ValueError(f"bench train: model {reason}") from reason
    if not auto_class_has("AutoModelForCausalLM", type(config)):
        raise ValueError(f"bench train: model must be a causal language model, got {model!r} ({config.model_type})")
    return config if layers is None else _shorten(config, layers)


def _shorten(config: "PretrainedConfig", layers: int) -> "PretrainedConfig":
    """Return the config of the first `layers` layers. Lists with an entry for each layer are cut too."""
    from transformers import AutoConfig

    all_layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(all_layers, int) or not 1 <= layers <= all_layers:
        raise ValueError(
            f"bench train: layers must be between 1 and {all_layers}, the number of the model's layers, got {layers}"
        )
    fields: dict[str, Any] = config.to_dict()
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == all_layers:
            fields[name] = value[:layers]
    return AutoConfig.for_model(**{**fields, "num_hidden_layers": layers})


# --- the options ---------------------------------------------------------------------------------


def _parse_sizes(options: TrainOptions) -> list[int]:
    """Return the sizes in the option, in ascending order."""
    if options.sizes is None:
        return []
    words = [word.strip() for word in options.sizes.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"bench train: sizes must be positive integers, separated by commas, got {options.sizes!r}")
    return sorted({int(word) for word in words})


def _check(options: TrainOptions, sizes: list[int]) -> None:
    """Refuse numbers out of range, and options that contradict each other."""
    at_least = {"seq": 2, "warmup": 0}
    at_least |= dict.fromkeys(("lora", "batch", "steps", "rounds", "gpus", "layers", "resolution"), 1)
    for name, least in at_least.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"bench train: {name} must be at least {least}, got {value}")
    if options.sweep is not None and options.sweep not in SWEEPS:
        raise ValueError(f"bench train: sweep must be one of {', '.join(SWEEPS)}, got {options.sweep!r}")
    for name in ("sizes", "resolution"):
        if getattr(options, name) is not None and options.sweep is None:
            raise ValueError(
                f"bench train: {name} needs a sweep: name one of {', '.join(SWEEPS)} with --sweep, got none"
            )
    if options.sweep == "seq" and sizes and sizes[0] < 2:
        raise ValueError(f"bench train: sizes of a sweep over seq must be at least 2, got {sizes[0]}")
    if options.dtype is not None and options.dtype not in DTYPES:
        raise ValueError(f"bench train: dtype must be one of {', '.join(DTYPES)}, got {options.dtype!r}")
    if not 0 < options.lr < math.inf:
        raise ValueError(f"bench train: lr must be positive and finite, got {options.lr}")
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"bench train: seed must be at least 0 and below 2**63, got {options.seed}")
    if options.budget is not None and not options.budget > 0:
        raise ValueError(f"bench train: budget must be a positive number of seconds, got {options.budget}")
    if options.gpus > 1:
        gpu_count = torch.cuda.device_count()
        if options.device != "cpu" and options.gpus > gpu_count:
            raise ValueError(
                f"bench train: gpus must be at most those that torch sees, {gpu_count}, got {options.gpus}"
            )
        if options.device not in ("cpu", "cuda"):
            raise ValueError(
                "bench train: with several gpus, device must be cpu or cuda (the first ones are used), "
                f"got {options.device!r}"
            )
        if message := unmet("accelerate"):
            raise ValueError(f"bench train: a run on several gpus {message}")
    if options.qlora and options.lora is None:
        raise ValueError("bench train: qlora needs the rank of its adapters: name it with --lora, got none")
    if options.lora is not None:
        if options.gpus > 1:
            raise ValueError(f"bench train: gpus must be 1 with lora, whose model is not sharded, got {options.gpus}")
        if message := missing_packages(options.qlora):
            raise ValueError(f"bench train: lora {message}")
    if options.curves and options.sweep is not None:
        raise ValueError("bench train: curves are compared at one size: leave out --sweep or --curves")
    if options.curves and options.batch < 2:
        raise ValueError(f"bench train: curves need a batch of at least 2 to reverse, got {options.batch}")


def make_plan(options: TrainOptions) -> TrainPlan:
    """Check the options, read the config and tokenise the text.

    Raises:
        ValueError: the message names the option, the rule and the value.
    """
    sizes = _parse_sizes(options)
    _check(options, sizes)
    names = [name.strip() for name in options.providers.split(",") if name.strip()]
    names = names if options.fp8 is None else add_fp8(names, options.fp8, options.fp8_dw)
    providers = select(names, options.checkpointing)
    for provider in providers:
        if options.lora is None and provider.needs_adapters:
            reason = "is compared with adapters" if provider.name == FROZEN else "trains only adapters"
            raise ValueError(f"bench train: the provider {provider.name} {reason}: it needs --lora, got none")
    runs = [ProviderRun(provider.name, provider) for provider in providers]
    if options.curves:
        stock = next((run for run in runs if run.name == "stock"), None)
        if stock is None:
            raise ValueError("bench train: curves are compared with stock's: name it among the providers")
        runs.insert(1 + runs.index(stock), replace(stock, name=STOCK_REVERSED, reverse=True))
    config = model_config(options.model, options.layers)
    try:
        corpus = read_text(options.text)
    except (ValueError, OSError) as reason:
        raise ValueError(f"bench train: text {reason}") from reason
    tokens = tokenise(corpus, max(MIN_VOCAB, min(MAX_ENTRIES, config.vocab_size)))
    if tokens.entries > config.vocab_size:
        raise ValueError(
            f"bench train: the model's vocabulary must have {tokens.entries} entries, got {config.vocab_size}"
        )
    longest = max([options.seq, *(sizes if options.sweep == "seq" else [])])
    if tokens.count < longest:
        raise ValueError(f"bench train: text must hold a sequence of {longest} tokens, got {tokens.count} tokens")
    in_sweep = options.sweep is not None
    return TrainPlan(
        options, config, tokens, corpus.name,
        dtype=options.dtype or ("float32" if options.device == "cpu" else "bfloat16"),
        steps=options.steps or (4 if in_sweep else 50 if options.curves else 10),
        warmup=options.warmup if options.warmup is not None else (2 if in_sweep else 3),
        runs=runs, sizes=sizes,
    )  # fmt: skip

"""Turn options into runs. All bad options are refused here, before anything runs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from benchmarks.ops.against import Revision, find_revision
from benchmarks.ops.cases import split_words
from benchmarks.train.cases import NAMES, use_case
from benchmarks.train.measurement import STOCK_REVERSED
from benchmarks.train.models import config_fields
from benchmarks.train.providers import FROZEN, KNOWN, ModelProvider, select
from benchmarks.train.text import (
    MIN_VOCAB,
    SEED,
    Corpus,
    Tokens,
    cache_folder,
    draw_documents,
    read_text,
    split_paragraphs,
    tokenise,
)
from benchmarks.train.worker import Job
from tigon.cli.presets import MODEL_HELP
from tigon.runtime.requirements import unmet

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SWEEPS = ("seq", "batch")
LENGTH_COUNT = 40
# The largest number of entries of the BPE. More would take long to train, and a model's speed does not depend on them.
MAX_ENTRIES = 32_000
# The longest sequence that a sweep tries if memory does not run out before.
MAX_TOKENS = 2**21


@dataclass(frozen=True)
class TrainOptions:
    """The options of the benchmark. None stands for a default that depends on other options."""

    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "Llama-3.2-1B"
    providers: Annotated[str, typer.Option(help=f"Separated by commas: {KNOWN}.")] = "stock,liger,tigon"
    against: Annotated[
        str | None,
        typer.Option(metavar="GIT_REF", help="Also train each provider of Tigon with the Tigon of this commit."),
    ] = None
    batch: Annotated[int, typer.Option(help="Sequences of each GPU in a step; the first size of a sweep over it.")] = 1
    seq: Annotated[int, typer.Option(help="Tokens of a sequence; the first size of a sweep over the length.")] = 2048
    steps: Annotated[
        int | None, typer.Option(help="Timed steps.", show_default="10; 4 in a sweep; 50 with --curves")
    ] = None
    warmup: Annotated[
        int | None, typer.Option(help="Steps before them, which are not timed.", show_default="3; 2 in a sweep")
    ] = None
    rounds: Annotated[int, typer.Option(help="Rounds over all providers, every second one in reverse order.")] = 1
    lora: Annotated[
        int | None, typer.Option(help="Train only low-rank adapters of this rank, on all linear layers but the head.")
    ] = None
    qlora: Annotated[
        bool, typer.Option("--qlora", help="Hold the layers that have adapters in 4 bits (nf4, double quantisation).")
    ] = False
    gpus: Annotated[
        int, typer.Option(help="Number of GPUs, or of ranks on a CPU. Several shard the model by FSDP2.")
    ] = 1
    sweep: Annotated[str | None, typer.Option(help="seq or batch: doubles the size until memory runs out.")] = None
    sizes: Annotated[
        str | None, typer.Option(help="Sizes of the sweep, separated by commas.", show_default="doublings")
    ] = None
    resolution: Annotated[
        int | None, typer.Option(help="Search the largest size of the sweep that fits, to within this number.")
    ] = None
    layers: Annotated[
        int | None, typer.Option(help="Number of the model's first layers to train.", show_default="all")
    ] = None
    curves: Annotated[
        bool,
        typer.Option(
            "--curves",
            help="Compare the losses with those of stock, and of stock-fp32 if it is a provider. Their noise is the "
            "difference that reversed batches make.",
        ),
    ] = False
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="LOW-HIGH",
            help=f"Then also train a step at each of {LENGTH_COUNT} lengths below HIGH, and again at each of them.",
        ),
    ] = None
    trl: Annotated[
        bool,
        typer.Option("--trl", help="Train by the SFTTrainer of TRL, on paragraphs of the text of at most SEQ tokens."),
    ] = False
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", is_eager=True)] = "auto"
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-4
    out: Annotated[Path | None, typer.Option(help="Folder for the report.", show_default="runs/train_<time>")] = None
    case: Annotated[
        str | None,
        typer.Option(
            help=f"A case, which sets the defaults of the options above: {', '.join(NAMES)}.",
            is_eager=True,
            callback=use_case,
        ),
    ] = None


@dataclass(frozen=True)
class ProviderRun:
    """The training of one provider. With `reverse`, the sequences of each batch come in reverse order. With a
    `revision`, the process imports the Tigon of that commit."""

    name: str
    provider: ModelProvider
    reverse: bool = False
    revision: Revision | None = None


@dataclass(frozen=True)
class TrainPlan:
    options: TrainOptions
    config: "PretrainedConfig"
    tokens: Tokens
    corpus: Corpus
    dtype: str
    steps: int
    warmup: int
    runs: Sequence[ProviderRun]
    sizes: Sequence[int] = ()
    lengths: Sequence[int] = ()

    def search(self, attempt: Callable[[int], bool | None]) -> list[int]:
        """Call `attempt` with the sizes of a run in the first round, and return those that fitted."""
        options = self.options
        if options.sweep is None:
            return search_sizes(attempt, [options.seq])
        start, other = (options.seq, options.batch) if options.sweep == "seq" else (options.batch, options.seq)
        longest = min(self.tokens.count, MAX_TOKENS)
        limit = longest if options.sweep == "seq" else max(1, self.tokens.count // other)
        return search_sizes(attempt, self.sizes or [start], None if self.sizes else limit, options.resolution)

    def shape(self, size: int) -> tuple[int, int]:
        return (size, self.options.seq) if self.options.sweep == "batch" else (self.options.batch, size)

    def job(self, run: ProviderRun, size: int) -> Job:
        options, (batch, seq) = self.options, self.shape(size)
        return Job(
            run.provider.name, config_fields(self.config), str(self.tokens.path), batch, seq, self.steps, self.warmup,
            self.dtype, options.device, options.gpus, options.lr, run.reverse, options.lora, options.qlora,
            self.lengths, options.trl,
        )  # fmt: skip


def search_sizes(
    attempt: Callable[[int], bool | None], sizes: Sequence[int], limit: int | None = None, resolution: int | None = None
) -> list[int]:
    """Call `attempt` with sizes until it returns False, and return the sizes for which it returned True.

    The search ends if `attempt` returns None, because other sizes would then fail in the same way.

    With a `limit`, doublings up to it follow after `sizes`. With a `resolution`, the gap between the largest size that
    fitted and the first one that did not is then halved, by multiples of the resolution, until it is at most as wide.

    >>> search_sizes(lambda size: size <= 21, [4], limit=100, resolution=2)
    [4, 8, 16, 20]
    """
    fitting_sizes: list[int] = []
    pending, too_large = list(sizes), None
    while pending and too_large is None:
        size = pending.pop(0)
        if (fits := attempt(size)) is None:
            return fitting_sizes
        if not fits:
            too_large = size
            continue
        fitting_sizes.append(size)
        if limit is not None and not pending and 2 * size <= limit:
            pending.append(2 * size)
    while too_large is not None and resolution is not None:
        below = max(fitting_sizes, default=0)
        middle = (below + too_large) // 2 // resolution * resolution
        if middle <= below:
            middle += resolution
        if too_large - below <= resolution or not below < middle < too_large:
            break
        if (fits := attempt(middle)) is None:
            break
        if fits:
            fitting_sizes.append(middle)
        else:
            too_large = middle
    return fitting_sizes


def model_config(model: str, layers: int | None = None) -> "PretrainedConfig":
    """Return the config of a causal language model that `find_config` finds, with only the first `layers` layers.

    >>> model_config("Llama-3-8B", layers=2).num_hidden_layers
    2
    """
    from transformers import AutoConfig

    from tigon.cli.inspect.build import find_config
    from tigon.hf.transformers_private import auto_class_has

    try:
        config = find_config(model)
    except ValueError as reason:
        raise ValueError(f"train: model {reason}") from reason
    if not auto_class_has("AutoModelForCausalLM", type(config)):
        raise ValueError(f"train: model must be a causal language model, got {model!r} ({config.model_type})")
    if layers is None:
        return config
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int) or not 1 <= layers <= count:
        raise ValueError(f"train: layers must be between 1 and {count}, the number of the model's layers, got {layers}")
    # Lists with an entry for each layer are cut too.
    is_cut = lambda value: isinstance(value, list) and len(value) == count
    values = {name: value[:layers] if is_cut(value) else value for name, value in config.to_dict().items()}
    return AutoConfig.for_model(**values | {"num_hidden_layers": layers})


def read_tokens(config: "PretrainedConfig", longest: int, by_paragraph: bool) -> tuple[Corpus, Tokens]:
    """Read and tokenise the text, which must hold a sequence of `longest` tokens."""
    corpus = split_paragraphs(read_text()) if by_paragraph else read_text()
    try:
        tokens = tokenise(corpus, max(MIN_VOCAB, min(MAX_ENTRIES, config.vocab_size)))
    except OSError as error:
        rule = f"must be a folder that can be written, got {str(cache_folder())!r} ({error.strerror})"
        raise ValueError(f"train: the cache {rule}: set the environment variable XDG_CACHE_HOME") from error
    if tokens.entries > config.vocab_size:
        raise ValueError(f"train: the model's vocabulary must have {tokens.entries} entries, got {config.vocab_size}")
    if tokens.count < longest:
        raise ValueError(f"train: text must hold a sequence of {longest} tokens, got {tokens.count} tokens")
    return corpus, tokens


def _parse_sizes(options: TrainOptions) -> list[int]:
    words = split_words(options.sizes)
    if options.sizes is not None and not (words and all(word.isdecimal() and int(word) > 0 for word in words)):
        raise ValueError(f"train: sizes must be positive integers, separated by commas, got {options.sizes!r}")
    return sorted({int(word) for word in words})


def draw_lengths(options: TrainOptions) -> list[int]:
    """Return distinct lengths of the range of the option, in random order. `seq` is not among them, because the steps
    before have had this length."""
    if options.lengths is None:
        return []
    low, _, high = options.lengths.partition("-")
    if not low.isdecimal() or not high.isdecimal() or not 2 <= int(low) < int(high) <= options.seq or options.sweep:
        raise ValueError(
            "train: lengths must be a range such as 128-512 from 2 to at most seq, without a sweep, got "
            f"{options.lengths!r}"
        )
    generator = torch.Generator().manual_seed(SEED)
    order = torch.randperm(int(high) - int(low), generator=generator)[:LENGTH_COUNT]
    return (int(low) + order).tolist()


def check_options(options: TrainOptions, sizes: list[int]) -> None:
    """Refuse numbers out of range, and options that contradict each other."""
    # The first token of a sequence is never a target, so a sequence of one token would have no loss.
    at_least = {"seq": 2, "warmup": 0}
    at_least |= dict.fromkeys(("lora", "batch", "steps", "rounds", "gpus", "layers", "resolution"), 1)
    values = {name: getattr(options, name) for name in at_least}
    low = [name for name, value in values.items() if value is not None and value < at_least[name]]
    gpu_count = torch.cuda.device_count()
    needs_sweep = [name for name in ("sizes", "resolution") if getattr(options, name) is not None]
    # Each rule has a condition that breaks it and the message.
    rules: list[tuple[Any, str]] = [
        (low, f"{low and low[0]} must be at least {low and at_least[low[0]]}, got {low and values[low[0]]}"),
        (options.sweep not in (None, *SWEEPS), f"sweep must be one of {', '.join(SWEEPS)}, got {options.sweep!r}"),
        (needs_sweep and not options.sweep, f"{needs_sweep and needs_sweep[0]} needs a sweep: --sweep, got none"),
        (options.sweep == "seq" and sizes and sizes[0] < 2, "sizes of a sweep over seq must be at least 2"),
        (not 0 < options.lr < math.inf, f"lr must be positive and finite, got {options.lr}"),
        (options.qlora and options.lora is None, "qlora needs the rank of its adapters: --lora, got none"),
        (options.curves and options.sweep, "curves are compared at one size: leave out --sweep or --curves"),
        (options.curves and options.batch < 2, f"curves need a batch of at least 2, got {options.batch}"),
    ]
    if options.gpus > 1:
        rules += [
            (options.lora, f"gpus must be 1 with lora, whose model is not sharded, got {options.gpus}"),
            (options.device not in ("cpu", "cuda"), f"gpus need the device cpu or cuda, got {options.device!r}"),
            (
                options.device != "cpu" and options.gpus > gpu_count,
                f"gpus must be at most those that torch sees, {gpu_count}, got {options.gpus}",
            ),
            (message := unmet("accelerate"), f"a run on several gpus {message}"),
        ]
    if options.trl:
        other = next((name for name in ("sweep", "lengths") if getattr(options, name)), None)
        rules += [
            (options.gpus > 1, f"gpus must be 1 with trl, got {options.gpus}"),
            (other, f"{other} cannot be combined with trl, whose lengths are those of its texts"),
            (message := unmet("trl"), f"trl {message}"),
        ]
    if options.lora is not None:
        packages = ["peft", *(["bitsandbytes"] if options.qlora else [])]
        rules.append((message := unmet(*packages), f"lora {message}"))
    for is_broken, message in rules:
        if is_broken:
            raise ValueError(f"train: {message}")


def make_plan(options: TrainOptions) -> TrainPlan:
    """Check the options, read the config and tokenise the text. A wrong option raises a ValueError that names it."""
    sizes = _parse_sizes(options)
    check_options(options, sizes)
    lengths = draw_lengths(options)
    providers = select(options.providers)
    for provider in providers:
        if options.trl and provider.base not in ("stock", "tigon"):
            raise ValueError(f"train: trl needs providers of stock and tigon, got {provider.name!r}")
        if options.lora is None and (provider.loads or not provider.trains):
            reason = "is compared with adapters" if provider.name == FROZEN else "trains only adapters"
            raise ValueError(f"train: the provider {provider.name} {reason}: it needs --lora, got none")
    runs = [ProviderRun(provider.name, provider) for provider in providers]
    if options.against is not None:
        revision = find_revision(options.against)
        own_runs = [run for run in runs if run.provider.is_tigon]
        runs += [replace(run, name=f"{run.name}@{revision.short}", revision=revision) for run in own_runs]
    if options.curves:
        stock = next((run for run in runs if run.name == "stock"), None)
        if stock is None:
            raise ValueError("train: curves are compared with stock's: name it among the providers")
        runs.insert(1 + runs.index(stock), replace(stock, name=STOCK_REVERSED, reverse=True))
    config = model_config(options.model, options.layers)
    longest = max([options.seq, *(sizes if options.sweep == "seq" else [])])
    corpus, tokens = read_tokens(config, longest, options.trl)
    steps = options.steps or (4 if options.sweep else 50 if options.curves else 10)
    warmup = options.warmup if options.warmup is not None else (2 if options.sweep else 3)
    if options.trl:
        # Refuse a text that has too few paragraphs.
        draw_documents(tokens.path, (warmup + steps) * options.batch, options.seq, SEED)
    return TrainPlan(
        options, config, tokens, corpus,
        dtype="float32" if options.device == "cpu" else "bfloat16",
        steps=steps, warmup=warmup, runs=runs, sizes=sizes, lengths=lengths,
    )  # fmt: skip

"""`benchmarks.train` without a process: providers, options, plans and reports."""

import json
import math
import sys
import types
from dataclasses import replace

import pytest
import torch
import transformers

import tigon
from benchmarks.train import train_report as report
from benchmarks.train.train_options import TrainOptions
from benchmarks.train.train_plan import make_plan, model_config
from benchmarks.training import fp8_providers
from benchmarks.training import model_providers as providers
from benchmarks.training.child import worker_command
from benchmarks.training.job import Job
from benchmarks.training.measurement import Measurement, compare_with_stock
from benchmarks.training.models import config_fields, read_config
from benchmarks.training.search import Search
from tigon.cli.presets import PRESETS

# --- providers -----------------------------------------------------------------------------------


def test_every_level_is_a_provider():
    levels = providers.levels()
    peers = ["stock", "liger", "compile", "unsloth"]
    names = [*peers, "tigon", *(f"tigon-{level}" for level in levels if level != "default")]
    assert [p.level for p in providers.select(names)] == [None, None, None, None, *levels]
    assert [p.name for p in providers.select(names) if p.loads] == ["unsloth"]
    with_checkpoints = providers.select("stock,tigon", checkpointing=True)
    assert [p.level for p in with_checkpoints] == [None, "checkpoint"]
    assert [p.base for p in providers.select("stock-checkpoint,liger-checkpoint,tigon-lean")][:2] == ["stock", "liger"]


@pytest.mark.parametrize(
    ("names", "checkpointing", "message"),
    [
        ("stock,tigon-leen", False, "must be among stock, liger, .*, got 'tigon-leen' .did you mean tigon-lean"),
        ("stock,stock", False, "must be named once, got 'stock' again"),
        ("unsloth,unsloth-checkpoint", True, "must be named once, got 'unsloth-checkpoint' again"),
        ("unslot", False, "got 'unslot' .did you mean unsloth"),
        ("stock,stock-checkpoint", True, "must be named once, got 'stock-checkpoint' again"),
        ("tigon,tigon-checkpoint", True, "must be named once, got 'tigon-checkpoint' again"),
        ("stock,tigon-lean", True, "tigon-lean does not: name tigon or tigon-checkpoint"),
        (",", False, "must name at least one"),
    ],
)
def test_wrong_providers_are_refused(names, checkpointing, message):
    with pytest.raises(ValueError, match=message):
        providers.select(names, checkpointing)


@pytest.fixture
def liger(monkeypatch):
    """Install a Liger Kernel that knows llama alone; return the list of models that it was applied to."""
    models = []
    package = types.ModuleType("liger_kernel.transformers")
    package._apply_liger_kernel_to_instance = lambda model: models.append(model)
    table = types.ModuleType("liger_kernel.transformers.monkey_patch")
    table.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}
    for module in (types.ModuleType("liger_kernel"), package, table):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return models


def make_model(model_type: str) -> types.SimpleNamespace:
    calls = []
    config = types.SimpleNamespace(model_type=model_type)
    return types.SimpleNamespace(config=config, gradient_checkpointing_enable=calls.append, checkpointing_calls=calls)


def test_liger_is_applied_with_its_defaults_and_with_checkpointing(liger, monkeypatch):
    (provider,) = providers.select("liger")
    model = make_model("llama")
    provider.apply(model, False, "cuda")
    assert (liger, model.checkpointing_calls) == ([model], [])
    provider.apply(model, True, "cuda")
    assert model.checkpointing_calls == [{"use_reentrant": False}]
    with pytest.raises(providers.UnsupportedModel, match="does not know gpt2"):
        provider.apply(make_model("gpt2"), False, "cuda")
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(providers.Missing, match="not installed"):
        provider.apply(model, False, "cuda")


# --- products in FP8 -----------------------------------------------------------------------------


def test_the_recipes_are_those_of_the_op():
    from tigon.ops.fp8.formats import RECIPES

    assert fp8_providers.FP8_RECIPES == RECIPES


def test_the_name_of_a_provider_in_fp8_holds_its_level_and_its_recipe():
    names = "tigon-fp8-tensorwise,tigon-lean-fp8-rowwise-bf16-dw,tigon-lean+mlp:4-fp8-rowwise"
    names += ",torchao-float8-rowwise-bf16-dw"
    read = [(p.level, p.fp8, p.fp8_dw, p.compiles) for p in providers.select(names)]
    assert read == [
        ("default", "tensorwise", True, False), ("lean", "rowwise", False, False),
        ("lean+mlp:4", "rowwise", True, False), (None, "rowwise", False, True),
    ]  # fmt: skip
    (provider,) = providers.select("tigon-fp8-rowwise", checkpointing=True)
    assert provider.level == "checkpoint"
    (peer,) = providers.select("torchao-float8-tensorwise-checkpoint")
    assert (peer.fp8, peer.checkpoints(False)) == ("tensorwise", True)


def test_the_suffix_of_the_optimizer_changes_only_the_optimizer():
    names = ["tigon", "tigon-adamw8bit", "tigon-lean-adamw8bit", "tigon-lean-fp8-rowwise-adamw8bit"]
    chosen = providers.select(names)
    assert [(p.name, p.level, p.fp8, p.adamw_8bit) for p in chosen] == [
        (names[0], "default", None, False), (names[1], "default", None, True),
        (names[2], "lean", None, True), (names[3], "lean", "rowwise", True),
    ]  # fmt: skip
    weight = torch.nn.Parameter(torch.zeros(128, 64))
    weight.grad = torch.ones_like(weight)
    plain, small = (p.make_optimizer([weight], 0.1) for p in chosen[:2])
    assert (type(plain), type(small)) == (torch.optim.AdamW, tigon.AdamW)
    for provider, optimizer in zip(chosen, (plain, small), strict=False):
        optimizer.step()
        moments = [x for x in optimizer.state[weight].values() if torch.is_tensor(x) and x.numel() >= weight.numel()]
        assert sum(x.nbytes for x in moments) == provider.moment_bytes(weight)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ("stock,tigon", "Optimizer: torch's AdamW, fused."),
        ("tigon-adamw8bit", "Optimizer: tigon.AdamW with moments in 8 bits."),
        (
            "tigon-adamw8bit,stock",
            "Optimizer: torch's AdamW, fused; tigon.AdamW with moments in 8 bits for providers with the suffix "
            "-adamw8bit.",
        ),
    ],
)
def test_the_report_names_the_optimizers(names, sentence):
    assert report.name_optimizers(providers.select(names)) == sentence


@pytest.mark.parametrize("name", ["stock-adamw8bit", "tigon-leen-adamw8bit", "tigon-adamw4bit"])
def test_other_optimizers_are_refused(name):
    with pytest.raises(ValueError, match="must be among"):
        providers.select(name)


@pytest.mark.parametrize(
    "name",
    [
        "tigon-fp8",
        "tigon-fp8-blockwise",
        "tigon-leen-fp8-rowwise",
        "tigon-rowwise",
        "torchao-float8-tensorwise-bf16-dw",
    ],
)
def test_other_names_in_fp8_are_refused(name):
    with pytest.raises(ValueError, match=f"must be among .*, got '{name}'"):
        providers.select(name)


def test_fp8_adds_a_provider_beside_each_of_tigon(monkeypatch):
    monkeypatch.setattr(fp8_providers.importlib.util, "find_spec", lambda name: None)
    add = fp8_providers.add_fp8
    assert add(["stock", "tigon", "tigon-lean"], "rowwise", True) == [
        "stock", "tigon", "tigon-fp8-rowwise", "tigon-lean", "tigon-lean-fp8-rowwise",
    ]  # fmt: skip
    monkeypatch.setattr(fp8_providers.importlib.util, "find_spec", lambda name: name)
    assert add(["tigon"], "tensorwise, rowwise", False) == [
        "tigon", "tigon-fp8-tensorwise-bf16-dw", "tigon-fp8-rowwise-bf16-dw", "torchao-float8-rowwise-bf16-dw",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="bench train: fp8 must be one or both of tensorwise, rowwise, got 'e4m3'"):
        add(["tigon"], "e4m3", True)
    with pytest.raises(ValueError, match="bench train: fp8 needs a provider of Tigon"):
        add(["stock"], "rowwise", True)


def test_the_patch_gets_the_options(monkeypatch):
    import tigon

    calls = []
    monkeypatch.setattr(tigon, "patch", lambda model, **options: calls.append(options))
    for provider in providers.select("tigon,tigon-lean-fp8-rowwise-bf16-dw"):
        provider.apply(object(), False, "cuda")
    assert calls == [{"memory": "default"}, {"memory": "lean", "fp8": "rowwise", "fp8_dw": False}]


def test_torchao_converts_all_layers_but_the_head(monkeypatch):
    def convert(model, *, module_filter_fn, config):
        for name, module in list(model.named_modules()):
            if module_filter_fn(module, name):
                module.__class__ = type("Float8Linear", (torch.nn.Linear,), {})
        model.recipe = config

    package, module = types.ModuleType("torchao"), types.ModuleType("torchao.float8")
    package.__version__ = "0.99"
    module.convert_to_float8_training = convert
    module.Float8LinearConfig = types.SimpleNamespace(from_recipe_name=lambda name: name)
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.float8", module)
    model = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(32, 16), "b": torch.nn.Linear(8, 16), "head": torch.nn.Linear(16, 64)}
    )
    model.get_output_embeddings = lambda: model["head"]
    (provider,) = providers.select("torchao-float8-rowwise-bf16-dw")
    description = provider.apply(model, False, "cuda")
    assert description == "torchao 0.99, 1 linear layers in FP8, rowwise, dW in bf16; torch.compile"
    assert model.recipe == "rowwise_with_gw_hp"
    with pytest.raises(providers.Missing, match="needs a GPU"):
        provider.apply(model, False, "cpu")
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(providers.Missing, match="not installed"):
        provider.apply(model, False, "cuda")


# --- the plan ------------------------------------------------------------------------------------


@pytest.fixture
def options(tmp_path, monkeypatch) -> TrainOptions:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text.py"
    text.write_text("".join(f"def function_{i}(x, y):\n    return x * {i} + y\n\n" for i in range(400)))
    return TrainOptions("tiny", "stock,tigon", batch=2, seq=32, device="cpu", text=text)


def test_a_plan_has_a_run_for_each_provider_and_the_reversed_one(options):
    plan = make_plan(replace(options, curves=True))
    assert [(run.name, run.provider.name, run.reverse) for run in plan.runs] == [
        ("stock", "stock", False), ("stock-reversed", "stock", True), ("tigon", "tigon", False),
    ]  # fmt: skip
    assert (plan.dtype, plan.steps, plan.warmup) == ("float32", 50, 3)
    assert sizes_of(plan.search()) == [32]
    jobs = [plan.job(run) for run in plan.runs]
    assert jobs[1] == replace(jobs[0], reverse=True)
    assert jobs[2] == replace(jobs[0], provider="tigon")
    plan = make_plan(replace(options, providers="frozen", lora=4))
    (job,) = (plan.job(run) for run in plan.runs)
    assert (job.provider, job.lora, job.qlora) == ("frozen", 4, False)


def test_a_plan_with_fp8_has_its_providers_in_the_jobs(options, monkeypatch):
    monkeypatch.setattr(fp8_providers.importlib.util, "find_spec", lambda name: None)
    plan = make_plan(replace(options, fp8="tensorwise", fp8_dw=False))
    names = ["stock", "tigon", "tigon-fp8-tensorwise-bf16-dw"]
    assert [plan.job(run).provider for run in plan.runs] == names
    assert [provider.name for name in names for provider in providers.select([name])] == names


def sizes_of(search: Search) -> list[int]:
    """Return the sizes of a search if all of them fit."""
    sizes = []
    while (size := search.next()) is not None:
        sizes.append(size)
        search.record(size, fits=True)
    return sizes


def test_a_sweep_ends_where_the_text_ends(options):
    over_length = make_plan(replace(options, sweep="seq"))
    sizes = sizes_of(over_length.search())
    assert sizes[:3] == [32, 64, 128]
    assert sizes[-1] <= over_length.tokens.count < 2 * sizes[-1]
    assert over_length.shape(64) == (2, 64)
    over_batch = make_plan(replace(options, sweep="batch", sizes="8,1"))
    assert sizes_of(over_batch.search()) == [1, 8]
    assert over_batch.shape(8) == (8, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "llame"}, "model must be a preset .Llama-3-8B, .* got 'llame'"),
        ({"model": "t5"}, "must be a causal language model, got 't5'"),
        ({"layers": 3}, "layers must be between 1 and 2, the number of the model's layers, got 3"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"seq": 1}, "seq must be at least 2, got 1"),
        ({"seq": 10**6}, "text must hold a sequence of 1000000 tokens"),
        ({"sweep": "width"}, "sweep must be one of seq, batch, got 'width'"),
        ({"sizes": "1,2"}, "sizes needs a sweep"),
        ({"sweep": "seq", "sizes": "64,x"}, "sizes must be positive integers, separated by commas, got '64,x'"),
        ({"sweep": "seq", "curves": True}, "curves are compared at one size"),
        ({"curves": True, "batch": 1}, "curves need a batch of at least 2"),
        ({"curves": True, "providers": "tigon"}, "curves are compared with stock's"),
        ({"device": "cuda", "gpus": 99}, "gpus must be at most those that torch sees"),
        ({"device": "cuda:1", "gpus": 1, "dtype": "float16"}, "dtype must be one of bfloat16, float32"),
        ({"budget": 0.0}, "budget must be a positive number of seconds, got 0.0"),
        ({"lr": 0.0}, "lr must be positive and finite, got 0.0"),
        ({"lr": float("inf")}, "lr must be positive and finite, got inf"),
        ({"lora": 0}, "lora must be at least 1, got 0"),
        ({"qlora": True}, "qlora needs the rank of its adapters: name it with --lora, got none"),
        ({"lora": 4, "gpus": 2, "device": "cpu"}, "gpus must be 1 with lora, whose model is not sharded, got 2"),
        ({"providers": "stock,frozen"}, "the provider frozen is compared with adapters: it needs --lora, got none"),
        ({"providers": "unsloth-checkpoint"}, "the provider unsloth-checkpoint trains only adapters: it needs --lora"),
        ({"model": "./nowhere"}, "bench train: model: must be a file or folder that exists, got './nowhere'"),
    ],
    ids=lambda value: ",".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_bad_options_are_refused(options, change, message):
    with pytest.raises(ValueError, match=message):
        make_plan(replace(options, **change))


def test_a_model_with_fewer_layers_keeps_its_other_settings():
    config = model_config("gemma-2-2b", layers=3)
    assert (config.num_hidden_layers, len(config.layer_types), config.hidden_size) == (3, 3, 2304)
    assert config.to_dict()["attn_logit_softcapping"] == 50.0


# A file of a config has these fields too.
FILE_FIELDS = ("transformers_version", "_name_or_path")


@pytest.mark.parametrize("name", PRESETS)
def test_a_process_and_a_reader_of_the_report_get_the_same_config(name, tmp_path):
    config = model_config(name, layers=2)
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    job = Job.from_json(Job("stock", config_fields(config), "tokens.npy").to_json())
    fields = {name: value for name, value in config.to_dict().items() if name not in FILE_FIELDS}
    for read in (transformers.AutoConfig.from_pretrained(str(tmp_path / "config.json")), read_config(job.config)):
        assert type(read) is type(config)
        assert {name: read.to_dict()[name] for name in fields} == fields


def test_a_group_is_started_by_torchrun():
    command = worker_command(4)
    assert "torch.distributed.run" in command
    assert command[command.index("--nproc-per-node") + 1] == "4"
    assert "torch.distributed.run" not in worker_command(1)


# --- the report ----------------------------------------------------------------------------------


def make_row(
    provider: str, seconds: list[float], losses: list[float], status: str = "ok", seq: int = 512
) -> Measurement:
    row = Measurement(provider, 2, seq, gpus=4, status=status)
    if seconds:
        row.add({
            "seconds": seconds, "host_seconds": [0.01] * len(seconds), "losses": losses, "allocated": 3 * 2**30,
            "reserved": 4 * 2**30,
        })  # fmt: skip
    return row


def test_a_row_is_the_median_of_all_rounds():
    row = make_row("tigon", [0.1, 0.2, 0.4], [3.0, 2.0])
    row.add({"seconds": [0.3, 0.5], "host_seconds": [0.1], "losses": [], "allocated": 5 * 2**30, "reserved": None})
    assert row.step_seconds == 0.3
    assert row.tokens_per_second == pytest.approx(2 * 512 * 4 / 0.3)
    assert row.spread == pytest.approx((0.2, 0.4))
    assert (row.losses, row.allocated, row.reserved) == ([3.0, 2.0], 5 * 2**30, 4 * 2**30)


def test_losses_agree_if_their_differences_are_those_of_the_noise():
    stock, reversed_stock = (
        make_row("stock", [1.0], [3.0, 2.0, 1.0]),
        make_row("stock-reversed", [1.0], [3.0, 2.01, 1.0]),
    )
    near, far = make_row("tigon", [1.0], [3.0, 2.0, 1.02]), make_row("tigon-lean", [1.0], [3.0, 2.0, 1.06])
    curves = compare_with_stock([reversed_stock, stock, near, far])
    assert {name: curve.agrees for name, curve in curves.items()} == {
        "stock-reversed": True, "tigon": True, "tigon-lean": False,
    }  # fmt: skip
    assert curves["tigon"].largest == pytest.approx(0.02)
    assert curves["tigon"].noise == pytest.approx(0.01)
    # Without the noise there is no verdict.
    assert compare_with_stock([stock, near])["tigon"].agrees is None
    assert compare_with_stock([near]) == {}
    broken = make_row("tigon", [1.0], [3.0, math.nan, 1.0])
    assert compare_with_stock([stock, reversed_stock, broken])["tigon"].agrees is False
    assert report.sentence(broken).endswith("  losses that are not finite")
    assert "finite" not in report.sentence(near)


def test_losses_agree_if_they_are_as_near_to_fp32_as_those_of_stock():
    """Stock rounds, so a run that rounds less may be further from stock than the noise."""
    losses = {
        "stock": [3.0, 2.0, 1.0], "stock-reversed": [3.0, 2.0, 1.0], "stock-fp32": [3.0, 2.0, 0.9],
        "tigon": [3.0, 2.0, 0.85], "tigon-lean": [3.0, 2.0, 0.7],
    }  # fmt: skip
    rows = {name: make_row(name, [1.0], values) for name, values in losses.items()}
    curves = compare_with_stock(rows.values())
    assert curves["tigon"].agrees is True
    assert curves["tigon"].error == pytest.approx(0.05 / 3**0.5)
    assert curves["tigon-lean"].agrees is False
    settings = {"title": "a model", "sweep": None, "interrupted": False, "optimizers": "Optimizer: one."}
    text = report.markdown(list(rows.values()), {"type": "cpu", "name": "a CPU"}, settings)
    assert "rms from fp32" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| tigon-lean") and line.endswith("no |")]
    assert "1.2e-01 | 5.8e-02" in line
    broken = {**rows, "tigon": make_row("tigon", [1.0], [3.0, math.nan, 1.0])}
    assert compare_with_stock(broken.values())["tigon"].agrees is False


def test_losses_that_are_not_finite_are_drawn(tmp_path):
    rows = [make_row("stock", [1.0], [3.0]), make_row("tigon", [1.0], [math.nan])]
    pictures = report.plot(rows, tmp_path, None, "a model", {"type": "cpu", "name": "a CPU"})
    assert [picture.name for picture in pictures] == ["throughput.png", "memory.png", "loss.png"]
    assert report.plot([make_row("stock-reversed", [1.0], [3.0])], tmp_path, None, "a model", {})


def test_the_report_of_a_sweep_has_all_rows_and_the_largest_sizes(tmp_path):
    rows = [
        make_row("stock", [0.4, 0.4], [3.0]), make_row("stock", [], [], "out of memory", 1024),
        make_row("tigon", [0.2, 0.2], [3.0]), make_row("tigon", [0.5], [3.0], seq=1024),
        make_row("liger", [], [], "missing"),
    ]  # fmt: skip
    machine = {"type": "cuda", "name": "a GPU", "memory_gib": 4.5}
    settings = {"title": "a model", "sweep": "seq", "interrupted": False, "optimizers": "Optimizer: one."}
    text = report.markdown(rows, machine, settings)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert lines[2][:3] == ["stock", "2", "512"]
    assert lines[2][5:] == ["10,240", "1.000", "3.0", "4.0", ""]
    assert lines[3][5:8] == ["20,480", "2.000", "3.0"]
    assert lines[5][:3] + lines[5][-1:] == ["stock", "2", "1,024", "out of memory"]
    assert ["stock", "512", "1,024"] in lines
    assert ["tigon", "1,024", "-"] in lines
    report.write_report(tmp_path / "train.json", rows, machine, settings)
    document = json.loads((tmp_path / "train.json").read_text())
    assert document["rows"][1]["status"] == "out of memory"
    assert document["rows"][2]["samples"]["seconds"] == [0.2, 0.2]
    pictures = report.plot(rows, tmp_path, "seq", "a model", machine)
    assert [picture.name for picture in pictures] == ["throughput.png", "memory.png"]
    assert report.plot([rows[1]], tmp_path, "seq", "a model", machine) == []

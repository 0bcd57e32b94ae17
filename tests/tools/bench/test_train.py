"""`tigon bench train` without a process: which sizes are tried, what is refused, what the report says."""

import json
import math
import sys
import types
from dataclasses import replace

import pytest
import transformers
from tigon.tools.bench.train.search import Search

from tigon.tools.bench.train import plots, report
from tigon.tools.bench.train.plan import Options, make_plan, model_config
from tigon.tools.bench.train.report import Row, compare_curves
from tigon.tools.presets import PRESETS
from tigon.tools.training import providers
from tigon.tools.training.child import worker_command
from tigon.tools.training.job import Job
from tigon.tools.training.models import config_fields, read_config

# --- sizes ---------------------------------------------------------------------------------------


def tried(search: Search, room: int) -> list[int]:
    """The sizes that a search asks for where those above `room` do not fit."""
    sizes = []
    while (size := search.next()) is not None and len(sizes) < 30:
        sizes.append(size)
        search.record(size, fits=size <= room)
    return sizes


@pytest.mark.parametrize(
    ("search", "room", "sizes"),
    [
        (Search([512]), 100, [512]),
        (Search([512], doubling=True), 3000, [512, 1024, 2048, 4096]),
        (Search([512], doubling=True, limit=2048), 9999, [512, 1024, 2048]),
        (Search([1, 3, 5, 9], limit=4), 4, [1, 3, 5]),
        (Search([1024], doubling=True, resolution=256), 3000, [1024, 2048, 4096, 3072, 2560, 2816]),
        (Search([8], doubling=True, resolution=1), 3, [8, 4, 2, 3]),
        (Search([100], doubling=True, resolution=64), 150, [100, 200, 128, 192]),
        (Search([8], doubling=True, resolution=4), 0, [8, 4]),
        (Search([]), 100, []),
    ],
    ids=["one", "doubling", "limit", "given", "resolution", "first too large", "odd start", "nothing fits", "none"],
)
def test_a_search_tries(search, room, sizes):
    assert tried(search, room) == sizes
    assert search.largest == max((size for size in sizes if size <= room), default=None)


# --- providers -----------------------------------------------------------------------------------


def test_every_level_is_a_provider():
    levels = providers.levels()
    names = ["stock", "liger", "compile", "tigon", *(f"tigon-{level}" for level in levels if level != "default")]
    assert [p.level for p in providers.select(names)] == [None, None, None, *levels]
    with_checkpoints = providers.select("stock,tigon", checkpointing=True)
    assert [p.level for p in with_checkpoints] == [None, "checkpoint"]
    assert [p.base for p in providers.select("stock-checkpoint,liger-checkpoint,tigon-lean")][:2] == ["stock", "liger"]


@pytest.mark.parametrize(
    ("names", "checkpointing", "message"),
    [
        ("stock,tigon-leen", False, "must be among stock, liger, .*, got 'tigon-leen' .did you mean tigon-lean"),
        ("stock,stock", False, "must be named once, got 'stock' again"),
        ("stock,stock-checkpoint", True, "must be named once, got 'stock-checkpoint' again"),
        ("tigon,tigon-checkpoint", True, "must be named once, got 'tigon-checkpoint' again"),
        ("stock,tigon-lean", True, "tigon-lean does not: name tigon or tigon-checkpoint"),
        (",", False, "must name at least one"),
    ],
)
def test_providers_refused(names, checkpointing, message):
    with pytest.raises(ValueError, match=message):
        providers.select(names, checkpointing)


@pytest.fixture
def liger(monkeypatch):
    """A Liger Kernel that knows llama alone, and notes what it was applied to."""
    applied = []
    package = types.ModuleType("liger_kernel.transformers")
    package._apply_liger_kernel_to_instance = lambda model: applied.append(model)
    table = types.ModuleType("liger_kernel.transformers.monkey_patch")
    table.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}
    for module in (types.ModuleType("liger_kernel"), package, table):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return applied


def model_of(model_type: str) -> types.SimpleNamespace:
    switched = []
    return types.SimpleNamespace(
        config=types.SimpleNamespace(model_type=model_type),
        gradient_checkpointing_enable=switched.append, switched=switched,
    )  # fmt: skip


def test_liger_has_its_defaults_and_the_checkpoints_of_others(liger, monkeypatch):
    (provider,) = providers.select("liger")
    model = model_of("llama")
    provider.apply(model, False, "cuda")
    assert (liger, model.switched) == ([model], [])
    provider.apply(model, True, "cuda")
    assert model.switched == [{"use_reentrant": False}]
    with pytest.raises(providers.Unsupported, match="does not know gpt2"):
        provider.apply(model_of("gpt2"), False, "cuda")
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(providers.Missing, match="not installed"):
        provider.apply(model, False, "cuda")


# --- the plan ------------------------------------------------------------------------------------


@pytest.fixture
def options(tmp_path, monkeypatch) -> Options:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text.py"
    text.write_text("".join(f"def function_{i}(x, y):\n    return x * {i} + y\n\n" for i in range(400)))
    return Options("tiny", "stock,tigon", batch=2, seq=32, device="cpu", text=text)


def test_a_plan_says_what_runs(options):
    plan = make_plan(replace(options, curves=True))
    assert [(run.name, run.provider.name, run.reverse) for run in plan.runs] == [
        ("stock", "stock", False), ("stock-reversed", "stock", True), ("tigon", "tigon", False),
    ]  # fmt: skip
    assert (plan.dtype, plan.steps, plan.warmup) == ("float32", 50, 3)
    assert tried(plan.search(), 10**9) == [32]
    jobs = [plan.job(run) for run in plan.runs]
    assert jobs[1] == replace(jobs[0], reverse=True)
    assert jobs[2] == replace(jobs[0], provider="tigon")


def test_a_sweep_ends_with_the_text(options):
    over_length = make_plan(replace(options, sweep="seq"))
    sizes = tried(over_length.search(), 10**9)
    assert sizes[:3] == [32, 64, 128]
    assert sizes[-1] <= over_length.tokens.count < 2 * sizes[-1]
    assert over_length.shape(64) == (2, 64)
    over_batch = make_plan(replace(options, sweep="batch", sizes="8,1"))
    assert tried(over_batch.search(), 10**9) == [1, 8]
    assert over_batch.shape(8) == (8, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "llame"}, "model must be tiny, Llama-3-8B, .* got 'llame'"),
        ({"model": "t5"}, "must be a causal language model, got 't5'"),
        ({"layers": 3}, "layers must be between 1 and 2, the model's own, got 3"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"seq": 1}, "seq must be at least 2, got 1"),
        ({"seq": 10**6}, "text must hold a sequence of 1000000 tokens"),
        ({"sweep": "width"}, "sweep must be one of seq, batch, got 'width'"),
        ({"sizes": "1,2"}, "sizes belongs to a sweep"),
        ({"sweep": "seq", "sizes": "64,x"}, "sizes must be positive integers, separated by commas, got '64,x'"),
        ({"sweep": "seq", "curves": True}, "curves are compared at one size"),
        ({"curves": True, "batch": 1}, "curves need a batch of at least 2"),
        ({"curves": True, "providers": "tigon"}, "curves are compared with stock's"),
        ({"device": "cuda", "gpus": 99}, "gpus must be at most those that torch sees"),
        ({"device": "cuda:1", "gpus": 1, "dtype": "float16"}, "dtype must be one of bfloat16, float32"),
        ({"budget": 0.0}, "budget must be a positive number of seconds, got 0.0"),
        ({"lr": 0.0}, "lr must be positive and finite, got 0.0"),
        ({"lr": float("inf")}, "lr must be positive and finite, got inf"),
        ({"model": "./nowhere"}, "bench train: model: must be a file or folder that exists, got './nowhere'"),
    ],
    ids=lambda value: ",".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_bad_options_are_refused(options, change, message):
    with pytest.raises(ValueError, match=message):
        make_plan(replace(options, **change))


def test_fewer_layers_are_the_same_model():
    config = model_config("gemma-2-2b", layers=3)
    assert (config.num_hidden_layers, len(config.layer_types), config.hidden_size) == (3, 3, 2304)
    assert config.to_dict()["attn_logit_softcapping"] == 50.0


EXTRA = ("transformers_version", "_name_or_path")  # what a file adds


@pytest.mark.parametrize("name", PRESETS)
def test_a_process_and_a_reader_of_the_report_get_the_same_config(name, tmp_path):
    config = model_config(name, layers=2)
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    job = Job.from_json(Job("stock", config_fields(config), "tokens.npy").to_json())
    fields = {name: value for name, value in config.to_dict().items() if name not in EXTRA}
    for read in (transformers.AutoConfig.from_pretrained(str(tmp_path / "config.json")), read_config(job.config)):
        assert type(read) is type(config)
        assert {name: read.to_dict()[name] for name in fields} == fields


def test_a_group_is_started_by_torchrun():
    command = worker_command(4)
    assert "torch.distributed.run" in command
    assert command[command.index("--nproc-per-node") + 1] == "4"
    assert "torch.distributed.run" not in worker_command(1)


# --- the report ----------------------------------------------------------------------------------


def row(provider: str, seconds: list[float], losses: list[float], status: str = "ok", seq: int = 512) -> Row:
    made = Row(provider, 2, seq, gpus=4, status=status)
    if seconds:
        made.add({
            "seconds": seconds, "host_seconds": [0.01] * len(seconds), "losses": losses, "allocated": 3 * 2**30,
            "reserved": 4 * 2**30,
        })  # fmt: skip
    return made


def test_a_row_is_the_median_of_all_rounds():
    ours = row("tigon", [0.1, 0.2, 0.4], [3.0, 2.0])
    ours.add({"seconds": [0.3, 0.5], "host_seconds": [0.1], "losses": [9.0], "allocated": 5 * 2**30, "reserved": None})
    assert ours.step_seconds == 0.3
    assert ours.tokens_per_second == pytest.approx(2 * 512 * 4 / 0.3)
    assert ours.spread == pytest.approx((0.2, 0.4))
    assert (ours.losses, ours.allocated, ours.reserved) == ([3.0, 2.0], 5 * 2**30, 4 * 2**30)


def test_curves_are_held_against_the_noise():
    stock, mirror = row("stock", [1.0], [3.0, 2.0, 1.0]), row("stock-reversed", [1.0], [3.0, 2.01, 1.0])
    near, far = row("tigon", [1.0], [3.0, 2.0, 1.02]), row("tigon-lean", [1.0], [3.0, 2.0, 1.06])
    curves = compare_curves([mirror, stock, near, far])
    assert {name: curve.agrees for name, curve in curves.items()} == {
        "stock-reversed": True, "tigon": True, "tigon-lean": False,
    }  # fmt: skip
    assert curves["tigon"].largest == pytest.approx(0.02)
    assert curves["tigon"].noise == pytest.approx(0.01)
    assert compare_curves([stock, near])["tigon"].agrees is None  # no noise, no verdict
    assert compare_curves([near]) == {}
    broken = row("tigon", [1.0], [3.0, math.nan, 1.0])
    assert compare_curves([stock, mirror, broken])["tigon"].agrees is False
    assert report.sentence(broken).endswith("  losses that are not finite")
    assert "finite" not in report.sentence(near)


def test_the_report_of_a_sweep(tmp_path):
    rows = [
        row("stock", [0.4, 0.4], [3.0]), row("stock", [], [], "out of memory", 1024),
        row("tigon", [0.2, 0.2], [3.0]), row("tigon", [0.5], [3.0], seq=1024), row("liger", [], [], "missing"),
    ]  # fmt: skip
    machine = {"type": "cuda", "name": "a GPU", "memory_gib": 4.5}
    settings = {"title": "a model", "sweep": "seq", "interrupted": False}
    text = report.markdown(rows, machine, settings)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert lines[2][:3] == ["stock", "2", "512"]
    assert lines[2][5:] == ["10,240", "1.000", "3.0", "4.0", ""]
    assert lines[3][5:8] == ["20,480", "2.000", "3.0"]
    assert lines[5][:3] + lines[5][-1:] == ["stock", "2", "1,024", "out of memory"]
    assert ["stock", "512", "1,024"] in lines
    assert ["tigon", "1,024", "-"] in lines
    report.write_json(tmp_path / "train.json", rows, machine, settings)
    document = json.loads((tmp_path / "train.json").read_text())
    assert document["rows"][1]["status"] == "out of memory"
    assert document["rows"][2]["samples"]["seconds"] == [0.2, 0.2]
    pictures = plots.draw(rows, tmp_path, "seq", "a model", machine)
    assert [picture.name for picture in pictures] == ["throughput.png", "memory.png"]
    assert plots.draw([rows[1]], tmp_path, "seq", "a model", machine) == []

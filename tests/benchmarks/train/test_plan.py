"""The plans of the training benchmark: runs, jobs, configs, and options that are refused."""

import json
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import transformers

from benchmarks.ops import against
from benchmarks.train import plan as plan_module
from benchmarks.train.cases import CASES
from benchmarks.train.models import config_fields, read_config
from benchmarks.train.plan import TrainOptions, make_plan, model_config, search_sizes
from benchmarks.train.process import worker_command
from benchmarks.train.text import Corpus
from benchmarks.train.worker import Job
from tigon.cli.presets import PRESETS


@pytest.fixture
def options(tmp_path, monkeypatch) -> TrainOptions:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    use_text(monkeypatch, [f"def function_{i}(x, y):\n    return x * {i} + y\n\n" for i in range(400)])
    return TrainOptions("tiny", "stock,tigon", None, batch=2, seq=32, device="cpu")


def use_text(monkeypatch, documents: list[str]) -> None:
    monkeypatch.setattr(plan_module, "read_text", lambda: Corpus("functions", documents))


def test_a_plan_has_a_run_for_each_provider_and_the_reversed_one(options):
    plan = make_plan(replace(options, curves=True))
    assert [(run.name, run.provider.name, run.reverse) for run in plan.runs] == [
        ("stock", "stock", False), ("stock-reversed", "stock", True), ("tigon", "tigon", False),
    ]  # fmt: skip
    assert (plan.dtype, plan.steps, plan.warmup) == ("float32", 50, 3)
    jobs = [plan.job(run, 32) for run in plan.runs]
    assert jobs[1] == replace(jobs[0], reverse=True)
    assert jobs[2] == replace(jobs[0], provider="tigon")
    assert (jobs[0].batch, jobs[0].seq) == (2, 32)
    plan = make_plan(replace(options, providers="frozen", lora=4))
    (job,) = (plan.job(run, 32) for run in plan.runs)
    assert (job.provider, job.lora, job.qlora) == ("frozen", 4, False)


def test_lengths_are_distinct_and_the_same_in_each_run(options):
    draw = lambda **changes: make_plan(replace(options, seq=64, lengths="8-64", **changes))
    plan = draw()
    assert len(set(plan.lengths)) == 40
    assert min(plan.lengths) >= 8
    assert max(plan.lengths) < 64
    assert plan.lengths != sorted(plan.lengths)
    assert draw(providers="tigon-graphs").job(plan.runs[0], 64).lengths == plan.lengths
    assert make_plan(options).lengths == []


@pytest.mark.parametrize("name", CASES)
def test_each_case_is_a_plan_that_make_trains(options, name, monkeypatch):
    functions = [f"def f{i}(x):\n" + f"    return x * {i} + x\n" * (8 + i) for i in range(40)]
    use_text(monkeypatch, ["\n".join(functions)])
    settings = CASES[name] | ({"steps": 8} if CASES[name].get("trl") else {})
    plan = make_plan(replace(options, **settings))
    assert plan.runs[0].name == "stock"
    assert any(run.provider.graphs for run in plan.runs)
    assert len(plan.lengths) == (0 if name == "trl" else 40)
    assert plan.job(plan.runs[0], plan.options.seq).trl == (name == "trl")
    makefile = Path(__file__).parents[3] / "Makefile"
    assert f"TRAINING_CASES := {' '.join(CASES)}\n" in makefile.read_text()


def test_a_sweep_ends_where_the_text_ends(options):
    every_size_fits = lambda size: True
    assert make_plan(options).search(every_size_fits) == [32]
    over_length = make_plan(replace(options, sweep="seq"))
    tokens = over_length.tokens.count
    assert over_length.search(every_size_fits) == [size for size in (32 * 2**k for k in range(20)) if size <= tokens]
    over_batch = make_plan(replace(options, sweep="batch", sizes="8,1"))
    assert over_batch.search(every_size_fits) == [1, 8]
    assert over_batch.shape(8) == (8, 32)


@pytest.mark.parametrize(
    ("sizes", "limit", "resolution", "room", "tried"),
    [
        ([512], None, None, 100, [512]), ([512], 10**6, None, 3000, [512, 1024, 2048, 4096]),
        ([512], 2048, None, 9999, [512, 1024, 2048]), ([1, 3, 5, 9], None, None, 4, [1, 3, 5]),
        ([1024], 10**6, 256, 3000, [1024, 2048, 4096, 3072, 2560, 2816]), ([8], 10**6, 1, 3, [8, 4, 2, 3]),
        ([100], 10**6, 64, 150, [100, 200, 128, 192]), ([8], 10**6, 4, 0, [8, 4]), ([], None, None, 100, []),
    ],
    ids=["one", "doubling", "limit", "sizes", "resolution", "first too large", "odd start", "nothing fits", "none"],
)  # fmt: skip
def test_a_search_doubles_and_then_halves_the_gap(sizes, limit, resolution, room, tried):
    calls = []
    fitting_sizes = search_sizes(lambda size: calls.append(size) or size <= room, sizes, limit, resolution)
    assert calls == tried
    assert fitting_sizes == [size for size in tried if size <= room]


@pytest.mark.parametrize(("change", "message"), [
    ({"model": "llame"}, "model must be a preset .Llama-3-8B, .* got 'llame'"),
    ({"model": "t5"}, "must be a causal language model, got 't5'"),
    ({"layers": 3}, "layers must be between 1 and 2, the number of the model's layers, got 3"),
    ({"batch": 0}, "batch must be at least 1, got 0"), ({"seq": 1}, "seq must be at least 2, got 1"),
    ({"seq": 10**6}, "text must hold a sequence of 1000000 tokens"),
    ({"sweep": "width"}, "sweep must be one of seq, batch, got 'width'"), ({"sizes": "1,2"}, "sizes needs a sweep"),
    ({"sweep": "seq", "sizes": "64,x"}, "sizes must be positive integers, separated by commas, got '64,x'"),
    ({"sweep": "seq", "curves": True}, "curves are compared at one size"),
    ({"curves": True, "batch": 1}, "curves need a batch of at least 2"),
    ({"curves": True, "providers": "tigon"}, "curves are compared with stock's"),
    ({"device": "cuda", "gpus": 99}, "gpus must be at most those that torch sees"),
    *(
        ({"lengths": text}, f"lengths must be a range such as .*, got '{text}'")
        for text in ("8-33", "9", "1-8", "9-9")
    ),
    ({"trl": True, "lengths": "8-32"}, "lengths cannot be combined with trl"),
    ({"trl": True}, "text must have 26 paragraphs of at least 32 tokens, got 0"),
    ({"trl": True, "providers": "stock,liger"}, "trl needs providers of stock and tigon, got 'liger'"),
    ({"lr": 0.0}, "lr must be positive and finite, got 0.0"),
    ({"lr": float("inf")}, "lr must be positive and finite, got inf"),
    ({"lora": 0}, "lora must be at least 1, got 0"),
    ({"qlora": True}, "qlora needs the rank of its adapters: --lora, got none"),
    ({"lora": 4, "gpus": 2, "device": "cpu"}, "gpus must be 1 with lora, whose model is not sharded, got 2"),
    ({"providers": "stock,frozen"}, "the provider frozen is compared with adapters: it needs --lora, got none"),
    ({"providers": "unsloth-checkpoint"}, "the provider unsloth-checkpoint trains only adapters: it needs --lora"),
    ({"model": "./nowhere"}, "train: model must be a file or folder that exists, got './nowhere'"),
], ids=lambda value: ",".join(map(str, value)) if isinstance(value, dict) else "")  # fmt: skip
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
    job = Job(**json.loads(json.dumps(asdict(Job("stock", config_fields(config), "tokens.npy", 1, 8)))))
    fields = {name: value for name, value in config.to_dict().items() if name not in FILE_FIELDS}
    for read in (transformers.AutoConfig.from_pretrained(str(tmp_path / "config.json")), read_config(job.config)):
        assert type(read) is type(config)
        assert {name: read.to_dict()[name] for name in fields} == fields


def test_a_group_is_started_by_torchrun():
    command = worker_command(4)
    assert "torch.distributed.run" in command
    assert command[command.index("--nproc-per-node") + 1] == "4"
    assert "torch.distributed.run" not in worker_command(1)


def test_each_provider_of_tigon_is_trained_with_another_commit(options, monkeypatch, tmp_path):
    package = tmp_path / "src" / "tigon"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=A", "-c", "user.email=a@b", "commit", "-qm", "One"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    monkeypatch.setattr(against, "PACKAGE", package)
    plan = make_plan(replace(options, against="HEAD"))
    assert [run.name for run in plan.runs] == ["stock", "tigon", "tigon@HEAD"]
    with plan.runs[-1].revision.files() as folder:
        assert (folder / "__init__.py").exists()
    with pytest.raises(ValueError, match="--against must name a commit of .*, got 'nowhere'"):
        make_plan(replace(options, against="nowhere"))


def test_a_cache_that_cannot_be_written_is_refused(options, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="the cache must be a folder that can be written"):
        make_plan(options)

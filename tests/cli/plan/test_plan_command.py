"""The command `tigon plan`: its presets, tables, files and exit codes."""

import dataclasses
import importlib.util
import io
import json

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("typer")

from rich.console import Console  # noqa: E402

from cli.plan.small_llama import SIZES  # noqa: E402
from command_work import run_tigon  # noqa: E402
from tigon.cli.inspect.build import build, find_config  # noqa: E402
from tigon.cli.plan.ledger import Work  # noqa: E402
from tigon.cli.plan.plan_table import print_plan  # noqa: E402
from tigon.cli.plan.planner import LevelPlan, PlanSettings, plan  # noqa: E402
from tigon.cli.plan.step import Step  # noqa: E402
from tigon.cli.presets import PRESETS  # noqa: E402
from tigon.memory.levels import MEMORY  # noqa: E402


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-3-8B", 8.030),
        ("Llama-3.2-1B", 1.236),
        ("Qwen2-7B", 7.616),
        ("Qwen3-4B", 4.022),
        ("Mistral-7B", 7.242),
        ("Gemma-7B", 8.538),
        ("Gemma-2-2B", 2.614),
        ("Qwen3-30B-A3B", 30.532),
    ],
)
def test_presets_have_the_public_sizes(name, billions):
    assert name in PRESETS
    model, _ = build(find_config(name.lower()))
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 3) == billions


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    transformers.LlamaConfig(**SIZES).save_pretrained(tmp_path)
    return lambda *arguments: run_tigon("plan", tmp_path, *arguments)


def test_the_command_writes_the_plan_of_every_level(run, tmp_path):
    # The name is longer than the terminal, and must not be read as markup.
    file = tmp_path / ("long" * 40 + "[bold]" + ".json")
    arguments = ["--seq", "256", "--batch", "4", "--gpu-memory", "2", "--json", str(file)]
    if importlib.util.find_spec("matplotlib"):
        arguments += ["--plot", str(tmp_path / "x.svg")]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == f"Wrote {file}"
    data = json.loads(file.read_text())
    assert set(data["levels"]) == {"stock", *MEMORY}
    assert f"memory='{data['recommended']}'" in result.output
    lean = data["levels"]["lean"]
    assert lean["at_batch"]["fits"]
    assert lean["largest"]["batch"] > 4
    assert lean["largest"]["peak_bytes"] <= data["settings"]["budget_bytes"]
    assert data["levels"]["stock"]["relative_speed"] < data["levels"]["default"]["relative_speed"] == 1.0


@pytest.mark.parametrize("arguments", [(), ("--batch", "64")], ids=["one sequence", "a batch"])
@pytest.mark.sampled(2)
def test_the_exit_code_is_1_if_no_level_fits(run, tmp_path, arguments):
    """The results are written nevertheless."""
    file = tmp_path / "plan.json"
    memory = ("--gpu-memory", "0.02" if not arguments else "0.1", "--reserve", "0")
    result = run("--seq", "2048", *arguments, *memory, "--json", str(file))
    assert result.exit_code == 1, result.output
    assert "No level fits" in result.output
    assert json.loads(file.read_text())["recommended"] is None


def test_a_note_says_that_the_sequence_is_longer_than_the_config_names(run, tmp_path):
    file = tmp_path / "plan.json"
    # Llama has 2048 positions by default.
    result = run("--seq", "4096", "--batch", "1", "--gpu-memory", "3", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "The config names 2,048 positions." in result.output
    assert json.loads(file.read_text())["notes"][0].startswith("The config names 2,048 positions.")


def test_the_command_refuses_a_sequence_beyond_the_positions(tmp_path):
    transformers.GPT2Config(n_layer=1, n_positions=64).save_pretrained(tmp_path)
    result = run_tigon("plan", tmp_path, "--seq", 65)
    assert result.exit_code == 2
    output = " ".join(result.output.split())
    assert "--seq: must be at most 64 (transformer.wpe has no more positions), got 65" in output


def _plans(fits):
    """Return plans of all levels, and of a level that the model cannot have."""
    small = Step(1, 512, 0, 2**30, 0, (2**30, 2**33, 2**32), (Work(traffic=1),) * 3)
    big = dataclasses.replace(small, batch=65536, peaks=(2**40, 0, 0)) if fits else None
    plans = [LevelPlan(level, small, big, speed=1.0, largest_speed=1.0) for level in ("stock", *MEMORY)]
    return [*plans, LevelPlan("lean", reason="the model has no such level")]


@pytest.mark.parametrize("fits", [True, False], ids=["fits", "does not fit"])
@pytest.mark.parametrize("width", [40, 66, 100])
def test_names_of_levels_are_whole_at_every_width(width, fits):
    """A user copies them into `memory=`. From 66 columns on, headings and numbers are whole too."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    settings = PlanSettings(131072, gpus=8, batch=1)
    print_plan(console, "Llama-3-8B", _plans(fits), settings, has_batch=False, notes=[])
    output = console.file.getvalue()
    # A paragraph with a rule is a table: its headings, the rule, and a line for each level.
    tables = [paragraph.split("\n") for paragraph in output.split("\n\n") if "\n──" in paragraph]
    rules = [next(i for i, line in enumerate(table) if line.startswith("──")) for table in tables]
    names = {line.split()[0] for table, rule in zip(tables, rules, strict=True) for line in table[rule + 1 :]}
    assert names == {"stock", *MEMORY}
    if width >= 66:
        assert "…" not in output
        assert max(map(len, output.splitlines())) <= width
        headings = " ".join(line for table, rule in zip(tables, rules, strict=True) for line in table[:rule]).split()
        assert {"memory=", "backward", "fits", "largest", "tokens", "step", "speed"} <= set(headings)


@pytest.mark.parametrize("host_memory", [1.0, 200.0])
def test_the_output_names_the_memory_of_the_host(host_memory):
    console = Console(width=120, file=io.StringIO(), color_system=None)
    step = Step(1, 512, 0, 2**30, 96 * 2**30, (2**30, 2**33, 2**32), (Work(traffic=1),) * 3)
    plans = [LevelPlan("checkpoint+offload", step, step, speed=1.0, largest_speed=1.0)]
    print_plan(console, "Llama-3-8B", plans, PlanSettings(4096, host_memory=host_memory), has_batch=True, notes=[])
    output = console.file.getvalue()
    assert "checkpoint+offload: 96 GiB of pinned memory per GPU at batch 1" in output
    assert ("but the host has 1 GiB for each GPU (--host-memory)" in output) == (host_memory == 1.0)


def test_plot_has_a_line_for_each_level(tmp_path):
    pytest.importorskip("matplotlib")
    from tigon.cli.plan.plan_table import draw, lengths

    assert lengths(1024) == (128, 256, 512, 1024, 2048, 4096)
    assert lengths(64) == (128, 256)
    settings, levels = PlanSettings(256), ("stock", "lean")
    plans = list(plan(transformers.LlamaConfig(**SIZES), settings, levels=levels, lengths=(128, 256), search=False))
    draw(tmp_path / "plan.svg", "tiny", plans, settings)
    plot = (tmp_path / "plan.svg").read_text()
    assert all(f"<!-- {name} -->" in plot for name in (*levels, "memory for tensors"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--plot", "x.doc"), "--plot: must end in .png"),
        (("--gpu-memory", "-1"), "--gpu-memory: must be a positive number"),
        (("--qlora",), "--qlora: needs the rank of the adapters that are trained (lora), got None"),
    ],
    ids=lambda x: x[0] if isinstance(x, tuple) else "",
)
def test_the_command_refuses_bad_options(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())

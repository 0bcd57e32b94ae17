"""`tigon inspect` prints a table, JSON and errors without a download, and docs/models.md is up to date."""

import json
import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("typer")

from command_work import run_tigon  # noqa: E402
from hf.models_page import causal_lm_types, make_row, models_page, table  # noqa: E402
from hf.tiny import TYPES, WITHOUT  # noqa: E402
from tigon.cli.inspect.build import build, default_config, find_config  # noqa: E402
from tigon.cli.inspect.inspection import GROUPS, OCCASIONAL, inspect_config  # noqa: E402
from tigon.hf.parts import PARTS  # noqa: E402

PAGE = Path(__file__).parents[3] / "docs" / "models.md"

SIZE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 131}


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    """Raise an error when the network is used."""
    import socket

    def refuse(*args, **kwargs):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def run():
    return lambda *arguments: run_tigon("inspect", *arguments)


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the config of a tiny Gemma 2, and no weights."""
    transformers.Gemma2Config(**SIZE, num_key_value_heads=2, head_dim=16, final_logit_softcapping=7.0).save_pretrained(
        tmp_path
    )
    return tmp_path


def cells(output: str) -> list[list[str]]:
    """Return the rows of the printed table."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if line[:1] == "│"]


# --- the table -----------------------------------------------------------------------------------


def test_a_model_type_stands_for_its_default_config(run):
    result = run("llama")
    assert result.exit_code == 0, result.output
    assert "LlamaForCausalLM (llama), 6.7B parameters" in result.output
    rows = cells(result.output)
    assert ["rms_norm", "LlamaRMSNorm", "65", "rms_norm, offset 0, rounded before the weight"] in rows
    assert ["", "Linear", "225", ""] in rows
    assert result.output.count("Blank: no op of Tigon computes this class.") == 1
    assert (
        "norms 65 of 65, MLPs and experts 32 of 32, rope 32 of 32, fused statements 64 of 64, loss 1 of 1"
        in result.output
    )
    assert "Head: lm_head, Linear, 4,096 to 32,000, its own weights" in result.output


@pytest.mark.parametrize("source", ["folder", "file", "other name"])
def test_a_folder_or_file_is_inspected(run, folder, source):
    other = folder / "mine.json"
    other.write_text((folder / "config.json").read_text())
    result = run({"folder": folder, "file": folder / "config.json", "other name": other}[source])
    assert result.exit_code == 0, result.output
    assert "Gemma2ForCausalLM (gemma2)" in result.output
    assert re.search(r"Head: lm_head, Linear, 64 to 131, tied to the embeddings, .*softcap 7", result.output)
    assert ["glu", "Gemma2MLP", "2", "geglu (tanh)"] in cells(result.output)


def test_a_folder_takes_precedence_over_a_type_of_the_same_name(run, folder, monkeypatch):
    folder.rename(folder.parent / "llama")
    monkeypatch.chdir(folder.parent)
    assert "Gemma2ForCausalLM" in run("llama").output


def test_a_module_that_keeps_its_code_is_listed_with_its_reason(run):
    # The MLP of this type has dropout.
    result = run("seed_oss")
    assert result.exit_code == 0
    row = next(row for row in cells(result.output) if row[1] == "SeedOssMLP")
    assert row[0] == "glu"
    assert row[3].startswith("left alone: ")


def test_every_module_is_counted_once(run, folder):
    assert run(folder, "--json", folder / "out.json").exit_code == 0
    result = json.loads((folder / "out.json").read_text())
    model, _ = build(find_config(str(folder)))
    names = {name for part in result["parts"] for name in part["names"]}
    assert len(names) + sum(result["others"].values()) == len(list(model.modules()))


@pytest.mark.parametrize(
    ("model_type", "model_class"),
    [
        # This type is only in the mapping of image-text models.
        ("llava", "LlavaForConditionalGeneration"),
        # This type is only in the mapping of sequence-to-sequence models.
        ("t5", "T5ForConditionalGeneration"),
        ("gemma3", "Gemma3ForConditionalGeneration"),
    ],
)
def test_the_class_that_trains_the_whole_model_is_chosen(model_type, model_class):
    assert type(build(default_config(model_type))[0]).__name__ == model_class


def test_a_model_without_a_head_is_reported(run):
    result = run("siglip")
    assert result.exit_code == 0
    assert "no class with a language head for siglip" in result.output
    assert "loss none recognised" in result.output
    assert "Head:" not in result.output


def test_every_part_of_a_model_without_adapters_is_in_a_group():
    assert sorted(part for parts in GROUPS.values() for part in parts) == sorted(PARTS.keys() - {"adapters"})


def test_json_has_the_whole_result(run, folder):
    target = folder / "out.json"
    assert run(folder, "--json", target).exit_code == 0
    result = json.loads(target.read_text())
    assert result["model"] == "Gemma2ForCausalLM"
    assert result["model_type"] == "gemma2"
    assert result["coverage"]["loss"] == {"replaced": 1, "found": 1}
    assert set(result["coverage"]) == set(GROUPS)
    glu = next(part for part in result["parts"] if part["part"] == "glu")
    assert glu["names"] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert glu["replaced"] is True
    assert result["parameters"] == sum(
        p.numel() for p in transformers.Gemma2ForCausalLM(find_config(str(folder))).parameters()
    )


# --- no side effects -----------------------------------------------------------------------------


def test_inspection_allocates_no_weights_and_keeps_the_random_state(folder):
    torch.manual_seed(0)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    config = find_config(str(folder))
    model, _ = build(config)
    inspect_config(config)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_a_model_that_is_too_large_for_any_machine_is_inspected():
    """One projection of the attention takes 64 GiB."""
    config = transformers.LlamaConfig(hidden_size=8192 * 16, num_attention_heads=64, num_hidden_layers=2)
    assert inspect_config(config).coverage()["norms"] == (5, 5)


# --- bad input -----------------------------------------------------------------------------------


def message_of(result) -> str:
    """Return the message of a command that refused its arguments, in one line."""
    assert result.exit_code == 2, result.output
    return re.sub(r"[│╭╮╰╯─\s]+", " ", result.output)


def test_an_unknown_type_is_refused_with_the_nearest_types(run):
    message = message_of(run("lama"))
    assert "), a model type, owner/name on the hub, or a file or folder that exists, got 'lama'" in message
    assert f"; nearest types of transformers {transformers.__version__}: llama" in message


@pytest.mark.parametrize(("name", "nearest"), [("Lama-3-8B", "Llama-3-8B"), ("qwen2-8b", "Qwen2-7B"), ("tine", "tiny")])
def test_an_unknown_name_is_refused_with_the_nearest_presets(run, name, nearest):
    assert re.search(rf"got '{name}'; nearest types .*; nearest presets: {nearest}", message_of(run(name)))


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "a/b/c", "config.json"])
def test_a_path_that_does_not_exist_is_refused(run, model):
    assert f"must be a file or folder that exists, got '{model}'" in message_of(run(model))


def test_a_folder_without_a_config_is_refused(run, tmp_path):
    assert "must have a config.json if it is a folder" in message_of(run(tmp_path))


def test_a_repository_is_refused_without_a_network(run):
    message = message_of(run("nobody/no-such-model"))
    assert "the config of 'nobody/no-such-model' cannot be read (OSError:" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("{}", "cannot be read .*model_type"),
        (
            '{"model_type": "lama"}',
            "the model_type of .* must be one of transformers, got 'lama'; nearest types of .*: llama",
        ),
        ('{"model_type": "lama", "auto_map": {"AutoConfig": "a.B"}}', "--trust-remote-code allows this code"),
    ],
    ids=["no JSON", "no type", "unknown type", "its own code"],
)
def test_a_config_that_cannot_be_read_is_refused(run, tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    assert re.search(message, message_of(run(tmp_path)))


def test_a_config_that_builds_no_model_is_refused(run, tmp_path):
    transformers.LlamaConfig(**SIZE).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "nonsense"}))
    assert "no llama can be built from this LlamaConfig" in message_of(run(tmp_path))


def test_a_type_that_is_only_a_part_of_others_is_refused(run):
    assert "transformers has no model that is built from a CsmDepthDecoderConfig alone" in message_of(
        run("csm_depth_decoder_model")
    )


def test_code_of_a_repository_runs_if_it_is_allowed(run, tmp_path):
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine", "AutoModelForCausalLM": "code.MineLM"}}
    (tmp_path / "config.json").write_text(json.dumps(config | SIZE))
    (tmp_path / "code.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Mine(LlamaConfig):\n    model_type = 'mine'\n"
        "class MineLM(LlamaForCausalLM):\n    config_class = Mine\n"
    )
    result = run(tmp_path, "--trust-remote-code")
    assert result.exit_code == 0, result.output
    assert "MineLM (mine)" in result.output
    assert "loss 1 of 1" in result.output


# --- the page ------------------------------------------------------------------------------------


def test_the_page_lists_replaced_modules_reasons_and_types_that_were_not_built(monkeypatch):
    from hf import models_page as module

    monkeypatch.setattr(module, "causal_lm_types", lambda: ["llama", "qwen3_moe", "reformer", "seed_oss"])
    page = models_page()
    assert "Of 4 types, 3 can be built" in page
    assert "|llama|✓|✓|||✓||✓|✓|" in page
    assert "|qwen3_moe|✓||✓||✓||✓|✓|" in page
    assert "|seed_oss|✓|1|||✓||✓|✓|" in page
    assert "\n1. its forward draws random numbers: SeedOssMLP of seed\\_oss\n" in page
    assert "`tests/hf/tiny.py`:\nreformer.\n" in page


def rows_of(text: str) -> dict[str, list[str]]:
    """Return the cells of a page by type. The reasons stand in place of their numbers."""
    reasons = dict(re.findall(r"^(\d+)\. (.*): .*$", text, flags=re.M))
    rows = [line[1:-1].split("|") for line in text.splitlines() if line.startswith("|")]
    return {name: [re.sub(r"\d+", lambda m: reasons[m[0]], cell) for cell in cells] for name, *cells in rows}


def page_text() -> str:
    """Return the page. Skip the test if the page is of another version of transformers, or missing."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if f"transformers {transformers.__version__};" not in text:
        pytest.skip("no page of this version of transformers")
    return text


# An encoder, decoders with all parts, types whose modules keep their code, hybrids, and unusual types. The test of all
# types compares the parts of every decoder with a record that `make models` writes too.
TYPES_TO_COMPARE = "bert cohere gpt2 gpt_neox kimi_linear mamba2 mixtral qwen3_next olmo zamba"


@pytest.mark.parametrize("model_type", TYPES_TO_COMPARE.split())
@pytest.mark.sampled(8)
def test_the_page_is_up_to_date(model_type):
    assert rows_of(page_text())[model_type] == rows_of(table([make_row(model_type)]))[model_type]


def test_the_totals_of_the_page_agree_with_its_rows():
    text = page_text()
    words, rows = " ".join(text.split()), rows_of(text)
    del rows["type"], rows["---"]
    failures = set(words.rpartition("`tests/hf/tiny.py`: ")[2].replace("\\", "").rstrip(".").split(", "))
    assert f"Of {len(causal_lm_types())} types, {len(rows)} can be built" in words
    assert rows.keys() | failures == set(causal_lm_types())
    is_replaced = [["✓" in cell for cell in cells] for cells in rows.values()]
    # The columns of MLPs and of experts are one group.
    groups = [[norms, mlps or experts, *others] for norms, mlps, experts, *others in is_replaced]
    counts = [f"{group} in {sum(column)}" for group, column in zip(GROUPS, zip(*groups, strict=True), strict=True)]
    assert f"Replaced are {', '.join(counts)}." in words
    has_all = [all(x for x, group in zip(row, GROUPS, strict=True) if group not in OCCASIONAL) for row in groups]
    assert f"are replaced in {sum(has_all)} types, at least one in {sum(map(any, groups))}." in words
    assert f"the {len(TYPES)} decoders among these types" in words
    assert f"the tests train the {len(TYPES) - len(WITHOUT)} that can be built small" in words
    assert len(failures & set(TYPES) - set(WITHOUT)) == 6
    assert "The tests build six of these" in words

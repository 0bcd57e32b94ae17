"""The training scripts of examples/ on two CPU ranks: their losses are those of the stock model in one process."""

import contextlib
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RANKS, STEPS, BATCH, SEQ, LR = 2, 3, 2, 48, 1e-3
TIME_LIMIT_SECONDS = 200

# Each launcher finds a free port by itself.
TORCHRUN = ["torch.distributed.run", "--standalone", "--local-addr=localhost", f"--nproc-per-node={RANKS}"]
RANK = str(Path(__file__).with_name("rank.py"))
ACCELERATE = ["accelerate.commands.launch", f"--config_file={EXAMPLES / 'fsdp2.yaml'}", f"--num_processes={RANKS}"]
ACCELERATE += ["--main_process_port=0", "--mixed_precision=no"]
SHARD_ON_CPU = str(Path(__file__).with_name("shard_on_cpu.py"))
ZERO_ON_CPU = str(Path(__file__).with_name("zero_on_cpu.py"))

# Name: the launcher, the script with its options, and the required library.
RUNS = {
    "Trainer": ([*TORCHRUN, RANK], ["trainer.py"], "accelerate"),
    "Trainer with ZeRO-3": (
        [*TORCHRUN, ZERO_ON_CPU],
        ["trainer.py", "--deepspeed", str(EXAMPLES / "zero3.json")],
        "deepspeed",
    ),
    "FSDP2 by accelerate": ([*ACCELERATE, SHARD_ON_CPU], ["fsdp2.py"], "accelerate"),
    "ZeRO-3": ([*TORCHRUN, RANK], ["zero3.py"], "deepspeed"),
    "sequence parallel": ([*TORCHRUN, ZERO_ON_CPU], ["sequence_parallel.py", "--memory", "checkpoint"], "deepspeed"),
    "a loop": ([*TORCHRUN, RANK], ["torchrun_loop.py"], "torch"),
}
# Two ranks take many seconds. tests/hf/test_two_ranks.py trains on two ranks in `make test`.
MARKS = {"deepspeed": pytest.mark.deepspeed, "accelerate": pytest.mark.thorough, "torch": pytest.mark.thorough}


@pytest.fixture(scope="module")
def model_and_text():
    """Return the module examples/model_and_text.py."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("model_and_text", EXAMPLES / "model_and_text.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model_and_text):
    """Return a folder with a model in `model` and the cache of the tokens."""
    folder = tmp_path_factory.mktemp("engines")
    small = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "vocab_size": 600}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**model_and_text.TINY | small)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def stock(folder, model_and_text):
    """Return the losses of the stock model, which trains on the batches of all ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        arguments = Namespace(text=ROOT / "LICENSE", steps=STEPS, batch=BATCH, seq=SEQ)
        model = model_and_text.build_model(str(folder / "model")).train()
        rows = model_and_text.token_rows(arguments, model.config.vocab_size, RANKS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for ids in rows.view(STEPS, RANKS * BATCH, SEQ):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    # The losses depend on the updates, not only on the initial weights.
    assert losses[2] < losses[0] - 0.01
    return losses


def end(launcher: subprocess.Popen) -> None:
    """Terminate a launcher, which ends its ranks within 30 seconds. If it is killed, its ranks go on."""
    launcher.terminate()
    try:
        launcher.wait(45)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def run(launcher: list[str], command: list[str], folder: Path) -> str:
    script, *more = command
    options = {"model": folder / "model", "text": ROOT / "LICENSE", "steps": STEPS, "batch": BATCH}
    options |= {"seq": SEQ, "lr": LR}
    arguments = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    module, *settings = launcher
    command = [sys.executable, "-m", module, *settings, str(EXAMPLES / script), *arguments, *more]
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder), "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    # Use files and not pipes, because a rank that outlives its launcher would hold a pipe open.
    files = [folder / "output", folder / "errors"]
    with files[0].open("w", encoding="utf-8") as output, files[1].open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=errors)
    try:
        # After a timeout the exit code is not 0.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TIME_LIMIT_SECONDS)
    finally:
        end(process)
    output, errors = (file.read_text(encoding="utf-8", errors="replace") for file in files)
    assert process.returncode == 0, output + errors
    return output


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS[run[2]]) for name, run in RUNS.items()])
def test_two_ranks(name, folder, stock):
    launcher, command, library = RUNS[name]
    pytest.importorskip(library)
    output = run(launcher, command, folder)
    # Rank 0 alone prints the report of the patch.
    assert output.count("linear_cross_entropy in the head") == 1
    steps = re.findall(r"^step (\d+)  loss (\S+)  (\S+) tokens/s  peak (\S+) GiB$", output, re.MULTILINE)
    assert [int(step[0]) for step in steps] == list(range(1, STEPS + 1)), output
    assert [float(step[1]) for step in steps] == pytest.approx(stock, abs=1e-4)
    assert all(float(step[2].replace(",", "")) > 0 and float(step[3]) > 0 for step in steps)


def test_the_loop_in_plain_torch_is_short():
    """Users copy this file."""
    assert len((EXAMPLES / "torchrun_loop.py").read_text(encoding="utf-8").splitlines()) < 80

"""Medusa: with Tigon, losses and gradients equal stock's in both stages, and the report has all results."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
import tigon  # noqa: E402

FOLDER = Path(__file__).parents[2] / "examples" / "medusa"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    """Let tests import the modules of the example as its scripts do."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in ("model", "measure", "report", "compare"):
        sys.modules.pop(name, None)


def build(stage: int, fused: bool, heads: int = 3) -> torch.nn.Module:
    """Return a small model with random blocks. Blocks begin as the identity, which would hide errors."""
    from model import Medusa

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97,
    )  # fmt: skip
    torch.manual_seed(0)
    trunk = transformers.AutoModel.from_config(config, attn_implementation="eager").train()
    model = Medusa(trunk, heads, stage, fused)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    if fused:
        tigon.patch(trunk, memory="lean")
    return model


@pytest.mark.parametrize("stage", [1, 2])
def test_losses_and_gradients_are_those_of_stock(stage):
    ids = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(1))
    losses, gradients = [], []
    for fused in (False, True):
        model = build(stage, fused)
        loss = model(ids)
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    stock, patched_gradients = gradients
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert {name for name, g in patched_gradients.items() if g is None} == {
        name for name, g in stock.items() if g is None
    }
    stock_gradients = {name: g for name, g in stock.items() if g is not None}
    if stage == 1:
        assert {name.split(".")[1] for name in stock_gradients} == {"1", "2", "3"}
    else:
        assert len(stock_gradients) == len(stock)
    for name, g in stock_gradients.items():
        torch.testing.assert_close(patched_gradients[name], g, rtol=0, atol=2e-5 * float(g.abs().max()), msg=name)


@pytest.mark.parametrize("stage", [1, 2])
def test_the_loss_is_that_of_the_paper(stage):
    """Head k predicts the token k + 1 positions later; the expected loss is written out for each position."""
    ids = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
    model = build(stage, fused=True)
    with torch.no_grad():
        hidden = model.trunk(input_ids=ids).last_hidden_state
        expected = 0.0
        for k, head in enumerate(model.heads):
            h = hidden if k == 0 else hidden + torch.nn.functional.silu(head.block(hidden))
            log_probs = (h @ head.output.weight.T).log_softmax(-1)
            target_losses = [-log_probs[b, t, ids[b, t + k + 1]] for b in range(2) for t in range(12 - k - 1)]
            weight = (0.0 if stage == 1 else 1.0) if k == 0 else 0.8**k * (1.0 if stage == 1 else 0.2)
            expected += weight * torch.stack(target_losses).mean().item()
        assert model(ids).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.thorough
def test_two_ranks_have_the_mean_loss_of_stock_on_the_text_of_both(tmp_path, monkeypatch):
    import compare
    import measure

    for name, value in {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    options = ["--device=cpu", "--layers=1", "--hidden=32", "--vocabulary=300", "--gpus=2", f"--out={tmp_path}"]
    options += ["--stages", "2", "--heads", "3", "--first=32", "--longest=64", "--steps=1", "--warmup=0"]
    assert compare.main([*options, "--variants", "tigon:lean"]) == 0
    (run,) = json.loads((tmp_path / "medusa.json").read_text())["runs"]
    assert [result["length"] for result in run["results"]] == [32, 64]
    stock = measure.Trainer(measure.MedusaJob("stock", 2, 3, 1, 32, 112, 300, 1, "adamw", 0, 1, 1.0, "cpu"))
    with torch.no_grad():
        starts = 0, len(stock.text) // 2
        losses = [stock.model(stock.text[start : start + 32].long()[None]).item() for start in starts]
    assert run["results"][0]["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert run["results"][1]["loss"] == pytest.approx(sum(losses) / 2, rel=0.05)


def test_the_first_step_is_not_timed(monkeypatch):
    """This holds for any number of seconds, because the first step includes work that is done once."""
    import measure

    class SlowTrainer(measure.Trainer):
        def __init__(self, seconds: float) -> None:
            self.job = measure.MedusaJob("stock", 1, 3, 1, 32, 112, 300, 1, "adamw", 2, 3, seconds, "cpu")
            self.device, self.now, self.count = torch.device("cpu"), 0.0, 0
            monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)

        def step(self, length: int) -> tuple[float, float]:
            self.count += 1
            seconds = 100.0 if self.count == 1 else 1.0
            self.now += seconds
            return float(self.count), seconds

        def state_bytes(self) -> int:
            return 0

    for seconds, timed_steps, count in ((0.5, 1, 2), (2.5, 2, 4), (9.0, 3, 5)):
        trainer = SlowTrainer(seconds)
        result = trainer.measure(64)
        assert result["seconds"] == [1.0] * timed_steps
        assert (result["losses"][0], trainer.count) == (1.0, count)


class LimitedWorker:
    """Stands in for a worker whose memory holds `tokens` tokens. It records the lengths that it gets."""

    device: str | None = "CPU"

    def __init__(self, tokens: int) -> None:
        self.tokens, self.lengths = tokens, []

    def __enter__(self) -> "LimitedWorker":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def train(self, point: str) -> dict[str, Any]:
        length = int(point)
        self.lengths.append(length)
        if length > self.tokens:
            return {"event": "out of memory", "reason": "out of memory"}
        seconds = [self.tokens * length / 1e6]
        return {"event": "point", "seconds": seconds, "losses": [1.0], "peak_bytes": length, "state_bytes": 0}


@pytest.fixture
def workers(monkeypatch):
    """Return a table in which a test enters the worker of each variant by its name."""
    import compare

    table: dict[str, LimitedWorker] = {}
    monkeypatch.setattr(compare.VariantRun, "make_worker", lambda run: table[run.name])
    return table


OPTIONS = ["--stages", "1", "--heads", "3", "--device=cpu", "--hidden=32", "--vocabulary=300", "--layers=1"]


def run_compare(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and medusa.json."""
    import compare

    code = compare.main([*OPTIONS, f"--out={folder}", *options])
    return code, json.loads((folder / "medusa.json").read_text())


def test_lengths_grow_until_memory_runs_out(workers, tmp_path):
    from report import compare_variants

    stock, tigon_worker = LimitedWorker(1600), LimitedWorker(20000)
    workers.update({"stock": stock, "tigon": tigon_worker})
    multiples = ["--multiples", "2", "4", "8", "16"]
    code, report = run_compare(tmp_path, "--first=256", "--longest=1000000", *multiples, "--variants", "stock", "tigon")
    assert code == 0
    assert stock.lengths == [256, 512, 1024, 2048, 1536, 1792]
    assert tigon_worker.lengths == [256, 512, 1024, 1536, 3072, 6144, 12288, 24576]
    (row,) = compare_variants(report)
    assert (row["length"], row["longest"], row["peak"], row["speed"]) == (1536, 8.0, 1.0, pytest.approx(0.08))
    text = (tmp_path / "medusa.md").read_text()
    assert "| 1 | 3 | tigon | stock | 1,536 | 0.08x | 1.00x |" in text
    assert "| 1 | 3 | stock | 2,048 | out of memory |" in text
    assert (tmp_path / "medusa_stage1_heads3.png").stat().st_size > 0


def test_failures_decide_the_exit_code_and_an_interrupted_run_keeps_its_lengths(workers, tmp_path):
    class BrokenWorker(LimitedWorker):
        def train(self, point: str) -> dict[str, Any]:
            return {"event": "failed", "reason": "broken", "log": ""}

    class InterruptedWorker(LimitedWorker):
        def train(self, point: str) -> dict[str, Any]:
            if self.lengths:
                raise KeyboardInterrupt
            return super().train(point)

    workers.update({"stock": LimitedWorker(100), "stock:checkpoint": LimitedWorker(100)})
    workers.update({"tigon": BrokenWorker(100), "tigon:lean": InterruptedWorker(100)})
    one_length = ("--first=64", "--longest=64", "--variants", "stock")
    assert run_compare(tmp_path, *one_length, "stock:checkpoint")[0] == 0
    assert run_compare(tmp_path, *one_length, "tigon")[0] == 1
    with pytest.raises(KeyboardInterrupt):
        run_compare(tmp_path, "--first=64", "--longest=128", "--variants", "tigon:lean")
    (run,) = json.loads((tmp_path / "medusa.json").read_text())["runs"]
    assert [result["length"] for result in run["results"]] == [64]
    assert "| 1 | 3 | tigon:lean | 64 |" in (tmp_path / "medusa.md").read_text()


def test_variants_are_compared_with_the_first_one_that_fits(workers, tmp_path):
    """If the first length does not fit for stock, the next variant takes its place."""
    from report import compare_variants

    workers.update({"stock": LimitedWorker(10), "stock:checkpoint": LimitedWorker(100), "tigon": LimitedWorker(200)})
    variants = ("--variants", "stock", "stock:checkpoint", "tigon")
    _, report = run_compare(tmp_path, "--first=64", "--longest=64", *variants)
    (row,) = compare_variants(report)
    assert (row["base"], row["variant"], row["length"]) == ("stock:checkpoint", "tigon", 64)


def test_a_rank_that_runs_out_of_memory_continues_with_the_next_length():
    """It answers "out of memory" and frees the memory of the step."""
    import measure

    class SmallTrainer(measure.Trainer):
        model = torch.nn.Linear(2, 2)

        def __init__(self, job, rank, write_event) -> None:
            measure.Rank.__init__(self, job.device, rank, job.ranks)
            self.free_calls = 0
            write_event("ready")

        def train(self, line: str) -> dict:
            if int(line) > 100:
                raise torch.OutOfMemoryError("too long")
            self.steps += 1
            return {"length": int(line), "free_calls": self.free_calls}

        def free(self) -> None:
            self.free_calls += 1

    job = measure.MedusaJob("stock", 1, 3, 1, 32, 112, 300, 1, "adamw", 0, 1, 1.0, "cpu")
    assert measure.MedusaJob.from_json(job.to_json()) == job
    events, lines = [], iter(["50\n", "500\n", "70\n", ""])
    write_event = lambda event, **fields: events.append((event, fields))
    assert measure.answer_points(
        lambda write_group_event: SmallTrainer(job, 0, write_group_event), 0, lines, write_event
    )
    assert [(event, fields.get("length")) for event, fields in events[1:]] == [
        ("point", 50), ("out of memory", None), ("point", 70),
    ]  # fmt: skip
    assert events[2][1]["reason"] == "out of memory: too long"
    assert events[3][1]["free_calls"] == 1


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--variants", "liger"], "--variants must be"),
        (["--variants", "stock:lean"], "--variants must be"),
        (["--variants", "tigon:leen"], "--variants must be"),
        (["--heads", "0"], "--heads must be"),
        (["--first", "4"], "--heads must be"),
        (["--steps", "0"], "--steps must be"),
        (["--longest", "1024"], "--longest must be at least 2048"),
        (["--multiples", "2", "1"], "--multiples must be at least 2"),
        (["--hidden", "8"], "--hidden must be"),
        (["--warmup", "-1"], "--warmup must be"),
        (["--seconds", "nan"], "--seconds must be"),
        (["--device", "cuda", "--gpus", "1000"], "--gpus must be at most"),
    ],
)
def test_bad_options_are_refused(option, message, capsys):
    from compare import parse

    with pytest.raises(SystemExit):
        parse(option)
    assert message in capsys.readouterr().err

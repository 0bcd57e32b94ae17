"""Medusa: Tigon's losses and gradients are stock's in both stages, and the comparison says what happened."""

import json
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
import tigon  # noqa: E402

FOLDER = Path(__file__).parents[2] / "examples" / "medusa"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    """The modules beside the script, as it imports them."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in ("model", "measure", "worker", "report", "compare"):
        sys.modules.pop(name, None)


def build(stage: int, fused: bool, heads: int = 3):
    from model import Medusa

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97,
    )  # fmt: skip
    torch.manual_seed(0)
    trunk = transformers.AutoModel.from_config(config, attn_implementation="eager").train()
    model = Medusa(trunk, heads, stage, fused)
    with torch.no_grad():  # blocks begin as the identity, where much could be wrong unseen
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
    stock, given = gradients
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert {name for name, g in given.items() if g is None} == {name for name, g in stock.items() if g is None}
    trained = {name: g for name, g in stock.items() if g is not None}
    if stage == 1:
        assert {name.split(".")[1] for name in trained} == {"1", "2", "3"}
    else:
        assert len(trained) == len(stock)
    for name, g in trained.items():
        torch.testing.assert_close(given[name], g, rtol=0, atol=2e-5 * float(g.abs().max()), msg=name)


@pytest.mark.parametrize("stage", [1, 2])
def test_the_loss_is_the_papers(stage):
    """Head k, against the token k + 1 places on, written out for each place."""
    ids = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
    model = build(stage, fused=True)
    with torch.no_grad():
        hidden = model.trunk(input_ids=ids).last_hidden_state
        expected = 0.0
        for k, head in enumerate(model.heads):
            h = hidden if k == 0 else hidden + torch.nn.functional.silu(head.block(hidden))
            log_probs = (h @ head.output.weight.T).log_softmax(-1)
            picked = [-log_probs[b, t, ids[b, t + k + 1]] for b in range(2) for t in range(12 - k - 1)]
            weight = (0.0 if stage == 1 else 1.0) if k == 0 else 0.8**k * (1.0 if stage == 1 else 0.2)
            expected += weight * torch.stack(picked).mean().item()
        assert model(ids).item() == pytest.approx(expected, rel=1e-5)


def test_compare(tmp_path, monkeypatch):
    """Small, on two ranks: each length has the loss of the stock model, the mean of what both ranks read."""
    import compare
    import measure

    for name, value in {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    options = ["--device=cpu", "--layers=1", "--hidden=32", "--vocabulary=300", "--gpus=2", f"--out={tmp_path}"]
    options += ["--stages", "2", "--heads", "3", "--first=32", "--longest=64", "--steps=1", "--warmup=0"]
    assert compare.main([*options, "--variants", "tigon:lean"]) == 0
    (run,) = json.loads((tmp_path / "medusa.json").read_text())["runs"]
    assert [result["length"] for result in run["results"]] == [32, 64]
    stock = measure.Trainer(measure.Job("stock", 2, 3, 1, 32, 112, 300, 1, "adamw", 0, 1, 1.0, "cpu"))
    with torch.no_grad():
        places = 0, len(stock.text) // 2
        losses = [stock.model(stock.text[place : place + 32].long()[None]).item() for place in places]
    assert run["results"][0]["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert run["results"][1]["loss"] == pytest.approx(sum(losses) / 2, rel=0.05)


def test_the_first_step_is_not_timed(monkeypatch):
    """Whatever the time that is given: it would count what is done once."""
    import measure

    class Slow(measure.Trainer):
        def __init__(self, seconds: float) -> None:
            self.job = measure.Job("stock", 1, 3, 1, 32, 112, 300, 1, "adamw", 2, 3, seconds, "cpu")
            self.device, self.now, self.done = torch.device("cpu"), 0.0, 0
            monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)

        def step(self, length: int) -> tuple[float, float]:
            self.done += 1
            seconds = 100.0 if self.done == 1 else 1.0
            self.now += seconds
            return float(self.done), seconds

        def state_bytes(self) -> int:
            return 0

    for seconds, timed, done in ((0.5, 1, 2), (2.5, 2, 4), (9.0, 3, 5)):
        trainer = Slow(seconds)
        result = trainer.measure(64)
        assert result["seconds"] == [1.0] * timed
        assert (result["loss"], trainer.done) == (1.0, done)


class Limited:
    """A worker that has memory for some tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.asked = tokens, []

    def measure(self, length: int) -> dict:
        self.asked.append(length)
        if length > self.tokens:
            return {"length": length, "out_of_memory": True, "reason": "out of memory"}
        done = {"tokens_per_second": 1e6 / self.tokens, "peak_bytes": length, "state_bytes": 0, "loss": 1.0}
        return {"length": length, "seconds": [1.0], **done}


def test_lengths_until_memory_ends(tmp_path):
    from compare import sweep_first, sweep_others
    from report import comparisons, write

    stock, given = Limited(1600), Limited(20000)
    reference = list(sweep_first(stock, 256, 10**6, bisections=2))
    assert stock.asked == [256, 512, 1024, 2048, 1536, 1792]
    others = list(sweep_others(given, reference, [2, 4, 8, 16], 10**6))
    assert given.asked == [256, 512, 1024, 1536, 3072, 6144, 12288, 24576]
    runs = [
        {"stage": 1, "heads": 3, "variant": name, "device": "CPU", "results": results}
        for name, results in (("stock", reference), ("tigon", others))
    ]
    shape = {"gpus": 1, "layers": 1, "hidden": 32, "vocabulary": 300, "batch": 1, "optimizer": "adamw"}
    report = {"options": shape, "runs": runs}
    (row,) = comparisons(report)
    assert (row["length"], row["longest"], row["peak"], row["speed"]) == (1536, 8.0, 1.0, pytest.approx(0.08))
    write(report, tmp_path)
    text = (tmp_path / "medusa.md").read_text()
    assert "| 1 | 3 | tigon | stock | 1,536 | 0.08x | 1.00x |" in text
    assert "| 1 | 3 | stock | 2,048 | out of memory |" in text
    assert (tmp_path / "medusa_stage1_heads3.png").stat().st_size > 0


def test_a_run_that_is_stopped_leaves_its_lengths(tmp_path, monkeypatch):
    """And what fails for another reason than memory is the exit code's."""
    import compare

    class Stopped(Limited):
        device, memory_bytes = "CPU", None

        def __init__(self, job) -> None:
            super().__init__(100)
            self.variant = job.variant

        def __enter__(self) -> "Stopped":
            return self

        def __exit__(self, *_) -> None:
            pass

        def measure(self, length: int) -> dict:
            if self.variant == "tigon:lean" and self.asked:
                raise KeyboardInterrupt
            result = super().measure(length)
            return {"length": length, "out_of_memory": False, "reason": "broken"} if self.variant == "tigon" else result

    monkeypatch.setattr(compare, "Worker", Stopped)
    options = ["--stages", "1", "--heads", "3", "--first=64", "--longest=64", "--device=cpu", f"--out={tmp_path}"]
    assert compare.main([*options, "--variants", "stock", "stock:checkpoint"]) == 0
    assert compare.main([*options, "--variants", "stock", "tigon"]) == 1
    with pytest.raises(KeyboardInterrupt):
        compare.main([*options[:-2], "--longest=128", *options[-2:], "--variants", "tigon:lean"])
    (run,) = json.loads((tmp_path / "medusa.json").read_text())["runs"]
    assert [result["length"] for result in run["results"]] == [64]
    assert "| 1 | 3 | tigon:lean | 64 |" in (tmp_path / "medusa.md").read_text()


def test_compared_with_the_first_that_could(tmp_path):
    """Where stock cannot do its first length, the next variant takes its place."""
    from report import comparisons

    runs = []
    for name, tokens in (("stock", 10), ("stock:checkpoint", 100), ("tigon", 200)):
        result = Limited(tokens).measure(64)
        runs.append({"stage": 1, "heads": 3, "variant": name, "device": "CPU", "results": [result]})
    (row,) = comparisons({"runs": runs})
    assert (row["base"], row["variant"], row["length"]) == ("stock:checkpoint", "tigon", 64)


def test_out_of_memory_is_an_answer():
    """A rank that runs out of memory says so, clears what is left of the step, and takes the next length."""
    import measure

    class Small(measure.Trainer):
        model = torch.nn.Linear(2, 2)

        def __init__(self, job, rank, say) -> None:
            measure.Rank.__init__(self, job.device, rank, job.ranks)
            self.cleared = 0
            say("ready")

        def train(self, line: str) -> dict:
            if int(line) > 100:
                raise torch.OutOfMemoryError("too long")
            self.steps += 1
            return {"length": int(line), "cleared": self.cleared}

        def free(self) -> None:
            self.cleared += 1

    job = measure.Job("stock", 1, 3, 1, 32, 112, 300, 1, "adamw", 0, 1, 1.0, "cpu")
    assert measure.Job.from_json(job.to_json()) == job
    said, lines = [], iter(["50\n", "500\n", "70\n", ""])
    say = lambda event, **fields: said.append((event, fields))
    assert measure.answer_points(lambda speak: Small(job, 0, speak), 0, lines, say)
    assert [(event, fields.get("length")) for event, fields in said[1:]] == [
        ("length", 50), ("out of memory", None), ("length", 70),
    ]  # fmt: skip
    assert said[2][1]["reason"] == "out of memory: too long"
    assert said[3][1]["cleared"] == 1


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
def test_bad_options(option, message, capsys):
    from compare import parse

    with pytest.raises(SystemExit):
        parse(option)
    assert message in capsys.readouterr().err

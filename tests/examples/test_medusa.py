"""Medusa: with Tigon, losses and gradients equal stock's in both stages, and the report has all results."""

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
    """Let tests import the modules of the example as its scripts do."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in ("model", "measure", "compare"):
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
def test_two_ranks_have_the_mean_loss_of_stock_on_the_text_of_both(tmp_path):
    import compare
    import measure

    options = ["--device=cpu", "--layers=1", "--hidden=32", "--vocabulary=300", "--gpus=2", f"--out={tmp_path}"]
    options += ["--stages", "2", "--heads", "3", "--lengths", "32", "--steps=1", "--warmup=0"]
    assert compare.main([*options, "--variants", "tigon:lean"]) == 0
    (result,) = json.loads((tmp_path / "medusa.json").read_text())["results"]
    job = measure.MedusaJob("stock", 2, 3, 1, 32, 300, 1, 32, "adamw", 0, 1, "cpu")
    stock, text = measure.build(job, torch.device("cpu")), measure.read_bytes(job)
    with torch.no_grad():
        losses = [stock(text[start : start + 32].long()[None]).item() for start in (0, len(text) // 2)]
    assert result["losses"][0] == pytest.approx(sum(losses) / 2, rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_variant_trains_and_reports_its_state(optimizer):
    import measure

    losses = []
    for variant in ("stock:checkpoint", "tigon:lean"):
        job = measure.MedusaJob(variant, 1, 2, 1, 32, 300, 1, 24, optimizer, 1, 2, "cpu")
        fields = measure.train(job)
        assert (len(fields["seconds"]), len(fields["losses"])) == (2, 3)
        losses.append(fields["losses"])
        parameters = sum(p.numel() for p in measure.build(job, torch.device("cpu")).parameters())
        assert 4 * parameters < fields["state_bytes"] < 4 * 4 * parameters
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--variants", "liger"], "--variants must be"),
        (["--variants", "tigon:leen"], "--variants must be"),
        (["--heads", "0"], "--heads must be"),
        (["--lengths", "6"], "--lengths must be at least 7"),
        (["--steps", "0"], "--steps must be"),
        (["--hidden", "8"], "--hidden must be"),
        (["--warmup", "-1"], "--warmup must be"),
        (["--device", "cuda", "--gpus", "1000"], "--gpus must be at most"),
    ],
)
def test_bad_options_are_refused(option, message, capsys):
    from compare import parse

    with pytest.raises(SystemExit):
        parse(option)
    assert message in capsys.readouterr().err

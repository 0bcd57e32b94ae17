"""The forward that `tigon.integrations.trl` gives a model has TRL's outputs and gradients; enable and disable."""

import sys
import types
from importlib import metadata
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import transformers
from trl.kernels import ChunkedLogProbFunction
from trl.trainer import utils

from integrations import trainers
from integrations.trainers import load_model
from ranks import run_ranks
from tigon.integrations import trl, trl_head

pytestmark = [pytest.mark.usefixtures("clean_trl"), pytest.mark.no_interpreter("It launches no kernel.")]


def test_the_forward_has_the_outputs_and_gradients_of_trl(path):
    outputs = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, 97, (3, 9), generator=generator)
    labels = tokens.masked_fill(torch.rand(3, 9, generator=generator) < 0.3, -100)
    cases = [
        {"input_ids": tokens, "labels": labels},
        {"input_ids": tokens, "labels": labels, "num_items_in_batch": torch.tensor(11)},
        {"input_ids": tokens, "shift_labels": labels.roll(-1, 1)},
        {"input_ids": tokens, "labels": torch.full_like(labels, -100)},
    ]
    stock = load_model(path)
    # Every second label is the most probable token, so that `is_top1` has both values.
    labels[:, 1::2] = stock(input_ids=tokens).logits.argmax(-1)[:, :-1:2]

    def results() -> list:
        """Return the outputs of each case, the gradients of all parameters, and the logits of a plain call."""
        model = load_model(path)
        utils.add_fused_lm_head(model, temperature=0.7, outputs=outputs)
        outcomes = [model(input_ids=tokens).logits]
        for case in cases:
            model.zero_grad()
            result = model(**case, fused_lm_head=True)
            (result.loss + (result.entropy * 0.1).sum()).backward()
            outcomes.append(({**result}, {name: p.grad for name, p in model.named_parameters()}))
        return outcomes

    # TRL's own function must not run after `enable`, which replaces it for all models.
    expected = results()
    trl.enable()
    assert utils._ChunkedLogProbFunction is trl_head.ChunkedLogProbs
    actual = results()
    assert torch.equal(actual[0], expected[0])
    for (ours, our_grads), (theirs, their_grads) in zip(actual[1:], expected[1:], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        for name, grad in their_grads.items():
            torch.testing.assert_close(our_grads[name], grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_the_function_takes_other_dtypes_as_trl_does(dtypes):
    """Without autocast, TRL computes the products in the dtype of the hidden states."""
    results = []
    for function in (trl_head.ChunkedLogProbs, ChunkedLogProbFunction):
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(7, 16, generator=generator).to(dtypes[0]).requires_grad_()
        weight = torch.randn(50, 16, generator=generator).to(dtypes[1]).requires_grad_()
        targets = torch.randint(50, (7,), generator=generator)
        log_probs, entropy, *rest = function.apply(hidden, weight, None, targets, 1.0, 32, None, 1.0, ("log_probs",))
        assert [entropy, *rest] == [None] * 4
        log_probs.sum().backward()
        assert weight.grad.dtype == dtypes[1]
        results.append((log_probs, hidden.grad, weight.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=5e-2, check_dtype=False)


@pytest.mark.parametrize(("kind", "gathers"), [(None, 2), ("nll", 1)], ids=["four products", "three products"])
def test_a_head_of_zero3_is_gathered_where_it_is_read(kind, gathers, path, monkeypatch):
    """ZeRO-3 is simulated: outside of TRL's context the weight of the head is empty."""
    trl.enable()
    model = load_model(path)
    utils.add_fused_lm_head(model)
    stock = load_model(path)
    weight = model.lm_head.weight
    full, contexts = weight.data.clone(), []
    weight.ds_status = "NOT_AVAILABLE"

    class Gathered:
        def __enter__(self):
            contexts.append(self)
            weight.data = full.clone()

        def __exit__(self, *_):
            weight.data = torch.empty(0)

    monkeypatch.setattr(utils, "maybe_gather_lm_head_ctx", lambda *parameters: Gathered())
    weight.data = torch.empty(0)
    batch = {"input_ids": torch.arange(4, 16).view(2, 6)}
    with trl_head.loss_is_sum(kind):
        log_probs = model(**batch, labels=batch["input_ids"], fused_lm_head=True).log_probs
    assert len(contexts) == 1
    assert weight.numel() == 0
    grads = torch.autograd.grad(log_probs.sum(), [weight, model.model.norm.weight])
    assert len(contexts) == gathers
    logits = stock(**batch).logits[:, :-1].log_softmax(-1)
    expected = logits.gather(-1, batch["input_ids"][:, 1:, None]).sum()
    expected_grads = torch.autograd.grad(expected, [stock.lm_head.weight, stock.model.norm.weight])
    torch.testing.assert_close(grads, expected_grads, rtol=1e-3, atol=1e-4)


def test_the_gradient_of_the_head_stays_on_the_device(path):
    """`activation_offloading=True` of TRL copies each saved tensor that is no parameter to the host."""
    trl.enable()
    model = load_model(path)
    utils.add_fused_lm_head(model)
    weight, tokens, saved = model.lm_head.weight, torch.arange(4, 16).view(2, 6), []

    def pack(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), trl_head.loss_is_sum("nll"):
        log_probs = model(input_ids=tokens, labels=tokens, fused_lm_head=True).log_probs
    assert saved
    parameters = {p.data_ptr() for p in model.parameters()}
    assert not [t for t in saved if t.shape == weight.shape and t.data_ptr() not in parameters]
    log_probs.sum().backward()
    assert weight.grad is not None


@pytest.mark.thorough
def test_a_head_that_fsdp2_shards_is_gathered():
    run_ranks(Path(__file__).with_name("sharded_trl.py"))


def test_a_mixture_with_a_router_loss_runs_trls_forward_on_tigon(counts):
    config = transformers.MixtralConfig(**trainers.SIZES, num_local_experts=2, num_experts_per_tok=1)
    torch.manual_seed(0)
    stock, batch = transformers.MixtralForCausalLM(config), {"input_ids": torch.arange(4, 16).view(2, 6)}
    ours = transformers.MixtralForCausalLM(config)
    ours.load_state_dict(stock.state_dict())
    utils.add_fused_lm_head(stock)
    batch |= {"labels": batch["input_ids"], "output_router_logits": True, "fused_lm_head": True}
    expected = stock(**batch)
    trl.enable()
    utils.add_fused_lm_head(ours)
    outputs = ours(**batch)
    assert counts.log_probs == 1
    assert outputs.aux_loss.item() == pytest.approx(expected.aux_loss.item())
    assert outputs.loss.item() == pytest.approx(expected.loss.item(), rel=1e-4)


def snapshot() -> dict:
    """Return all objects of TRL's modules, and the attributes of its trainer classes."""
    names = [name for name in sys.modules if name.partition(".")[0] == "trl"]
    objects = {(name, key): value for name in names for key, value in vars(sys.modules[name]).items()}
    for cls in (trainers.TRAINERS["sft"][0], *trainers.TRAINERS["sft"][0].__mro__):
        objects |= {(cls, key): value for key, value in vars(cls).items()}
    return objects


def test_disable_restores_exactly():
    before = snapshot()
    trl.enable()
    trl.enable(memory="lean")
    changes = {key for key, value in snapshot().items() if before.get(key) is not value}
    names = {f"trl.trainer.{name}_trainer" for name in trainers.TRAINERS if name != "distillation"}
    assert {module for module, name in changes if name == "add_fused_lm_head"} >= {"trl.trainer.utils", *names}
    assert trl.is_enabled()
    trl.disable()
    trl.disable()
    assert not trl.is_enabled()
    assert all(before[key] is value for key, value in snapshot().items() if key in before)
    assert before.keys() == snapshot().keys()


def test_disable_restores_modules_that_imported_the_name_and_models_that_were_built_while_it_was_enabled(
    monkeypatch, path, counts
):
    trl.enable()
    later = types.ModuleType("trl.later_trainer")
    later.add_fused_lm_head = utils.add_fused_lm_head
    monkeypatch.setitem(sys.modules, "trl.later_trainer", later)
    model = load_model(path)
    utils.add_fused_lm_head(model)
    trl.disable()
    assert later.add_fused_lm_head is utils.add_fused_lm_head
    assert later.add_fused_lm_head.__module__ == "trl.trainer.utils"
    tokens = torch.arange(4, 16).view(2, 6)
    model(input_ids=tokens, labels=tokens, fused_lm_head=True)
    assert counts.log_probs == counts.losses == 0


@pytest.mark.parametrize(
    ("installed", "message"),
    [("1.17.2", r"knows trl 1\.16\.0, but trl 1\.17\.2 is installed"), (None, r"needs trl 1\.16\.0, but trl is not")],
)
def test_another_version_of_trl_is_refused(installed, message, monkeypatch):
    def version(name):
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ImportError, match=f"enable {message}"):
        trl.enable()
    assert not trl.is_enabled()


@pytest.mark.parametrize("memory", ["leaner", 1])
def test_an_unknown_level_is_refused(memory):
    with pytest.raises(ValueError, match=r"enable: memory must be None or one of 'default', 'lean', .* got "):
        trl.enable(memory=memory)
    assert not trl.is_enabled()

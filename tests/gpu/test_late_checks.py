"""After a failed check or a wrong index of the caller, results are NaN, and the process can still use the GPU."""

import math

import pytest
import torch

import tigon
from gpu.steps import no_waits
from tigon.integrations.liger import layers
from tigon.losses import grpo_loss
from tigon.runtime.late_checks import check_later, raise_earlier

LATE = r"the rule \(an earlier call on a GPU found this"
V, H, T = 50, 16, 6


@pytest.fixture(autouse=True)
def _no_check_remains():
    yield
    torch.cuda.synchronize()
    raise_earlier()


def _check(holds: bool) -> torch.Tensor:
    return check_later(torch.full((), holds, device="cuda"), "ValueError", "the rule")


def test_a_busy_gpu_loses_no_check_and_the_host_does_not_wait():
    with no_waits():
        torch.cuda._sleep(200_000_000)
        results = [_check(i != 1) for i in range(4)]
    assert [x.isnan().item() for x in results] == [False, True, False, False]
    with pytest.raises(ValueError, match=LATE):
        raise_earlier()


def test_a_captured_check_is_nan_in_each_replay():
    holds = torch.ones((), dtype=torch.bool, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = check_later(holds, "ValueError", "the rule")
    for value in (True, False, True):
        holds.fill_(value)
        graph.replay()
        assert result.isnan() == (not value)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_check_is_nan(mode):
    torch._dynamo.reset()
    function = torch.compile(lambda x: 2 * check_later((x > 0).all(), "ValueError", "the rule"), mode=mode)
    for _ in range(3):
        assert function(torch.ones(3, device="cuda")) == 2
    result = function(-torch.ones(3, device="cuda")).clone()
    assert result.isnan()
    torch.cuda.synchronize()
    # A replayed graph does not call the function, so its check raises no error.
    if mode == "default":
        with pytest.raises(ValueError, match=LATE):
            raise_earlier()


@pytest.mark.parametrize("scale", [1.004, 2.0])
def test_a_model_whose_logits_are_changed_has_a_loss_of_nan_and_works_after_restore(scale):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=H, intermediate_size=H, num_hidden_layers=1, num_attention_heads=1
    )
    factors = {"scale": 1.0}

    class Scaled(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels=None, **kwargs):
            logits = self.lm_head(self.model(input_ids).last_hidden_state) * factors["scale"]
            loss = None if labels is None else self.loss_function(logits, labels, V, **kwargs)
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    model, tokens = Scaled(config).cuda().train(), torch.arange(T, device="cuda").view(1, T)
    report = tigon.patch(model)
    step = lambda: model(input_ids=tokens, labels=tokens).loss
    assert step().isfinite()
    factors["scale"] = scale
    loss = step()
    loss.backward()
    assert loss.isnan()
    assert model.lm_head.weight.grad.isnan().all()
    with pytest.raises(RuntimeError, match="does not change the logits as it did when the model was patched"):
        step()
    report.restore()
    assert step().isfinite()


def test_a_sum_of_log_probs_with_other_weights_has_gradients_of_nan():
    trl_head = pytest.importorskip("tigon.integrations.trl_head")
    hidden = torch.randn(1, T, H, device="cuda", requires_grad=True)
    head = trl_head.Head(torch.randn(V, H, device="cuda"), None)
    targets, options = torch.arange(T, device="cuda").view(1, T), trl_head.LogitOptions(1.0, None, 1.0)
    call = lambda: trl_head._summed_log_probs(hidden, head, targets, options, "nll", True, None, None)["log_probs"]
    (-call() * torch.arange(T, device="cuda")).sum().backward()
    assert hidden.grad.isnan().all()
    with pytest.raises(RuntimeError, match=r"SFTTrainer\.compute_loss did not sum the log-probabilities"):
        call()
    hidden.grad = None
    (-call()).sum().backward()
    assert hidden.grad.isfinite().all()


def _grpo(x, weight, targets):
    log_probs = tigon.linear_log_probs(x, weight, targets).view(2, -1)
    return grpo_loss(log_probs, torch.ones(2, device=x.device), torch.ones_like(log_probs, dtype=torch.bool))[0]


LOSSES = {
    "cross_entropy": lambda x, weight, targets: tigon.cross_entropy(x @ weight.T, targets),
    "smoothing": lambda x, weight, targets: tigon.cross_entropy(
        x @ weight.T, targets, weight=torch.ones(V, device="cuda"), label_smoothing=0.1
    ),
    "linear_cross_entropy": lambda x, weight, targets: tigon.linear_cross_entropy(x, weight, targets),
    "linear_log_probs": lambda x, weight, targets: tigon.linear_log_probs(x, weight, targets).sum(),
    "linear_loss": lambda x, weight, targets: tigon.linear_loss(x, weight, targets, lambda log_p: log_p.sum()),
    "linear_distillation": lambda x, weight, targets: tigon.linear_distillation(
        x, weight, targets, teacher_hidden=x.detach(), teacher_weight=weight.detach(), hard_weight=0.5
    ),
    "grpo": _grpo,
    "the alias": lambda x, weight, targets: layers.LigerFusedCETVDLoss()(
        x @ weight.T, (x @ weight.T).detach(), targets
    )[0].sum(),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("target", [-1, V, 2**31 - 1])
@pytest.mark.parametrize("name", LOSSES)
def test_a_target_outside_of_the_vocabulary_makes_the_loss_nan(name, target, dtype):
    """Losses of fp64 tensors run torch's `gather` and `scatter`, which assert on a GPU that their indices are valid."""
    x = torch.randn(T, H, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(V, H, device="cuda", dtype=dtype, requires_grad=True)
    targets = torch.arange(T, device="cuda")
    targets[3] = target
    loss = LOSSES[name](x, weight, targets)
    loss.backward()
    torch.cuda.synchronize()
    assert loss.isnan()
    targets[3] = 3
    assert LOSSES[name](x, weight, targets).isfinite()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_sparsemax_of_a_row_without_a_nearest_point_is_nan(value):
    x = torch.tensor([[1.0, 0.5], [0.0, value]], device="cuda")
    assert layers.LigerSparsemax()(x).isnan().any(-1).tolist() == [False, True]
    torch.cuda.synchronize()


def test_packed_positions_warn_without_a_host_synchronisation():
    from tigon.hf.packing import PackingWarning

    hook, module = PackingWarning("packed"), torch.nn.Identity().train()
    positions = torch.tensor([[0, 1, 2, 0, 1]], device="cuda")
    with no_waits():
        torch.cuda._sleep(200_000_000)
        for _ in range(3):
            hook(module, (), {"position_ids": positions})
    torch.cuda.synchronize()
    with pytest.warns(UserWarning, match="packed"):
        hook(module, (), {"position_ids": positions})

"""Frameworks with layers of their own run Tigon's ops: Megatron-Core, DeepSpeed's loss and torchtitan.

Stand-ins have exactly the names that a plug-in uses, as they are in the version named beside them. As a script, this
file runs one rank with the framework itself: python test_layer_plugins.py megatron | deepspeed STORE
"""

import contextlib
import importlib
import os
import sys
import types
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks import LIMIT, leave, run_ranks
from tigon.integrations import deepspeed, frameworks, megatron

pytestmark = pytest.mark.no_interpreter("The tests show which code runs.")


def require_framework(distribution: str, version: str, module: str) -> None:
    """Skip a test unless the framework is installed in the minor version that the plug-in was written for."""
    pytest.importorskip(module)
    if metadata.version(distribution).split(".")[:2] != version.split(".")[:2]:
        pytest.skip(f"the plug-in was written for {distribution} {version}")


@pytest.fixture
def install(monkeypatch):
    """Return a function that installs a stand-in: a version and modules with their attributes."""
    real_version = metadata.version

    def install(distribution: str, version: str, **modules: dict[str, Any]) -> None:
        monkeypatch.setattr(metadata, "version", lambda name: version if name == distribution else real_version(name))
        monkeypatch.setattr(frameworks, "_warned", set())
        for name, attributes in modules.items():
            module: Any = types.ModuleType(name.replace("__", "."))
            vars(module).update(attributes)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, module.__name__, module)

    return install


# --- Megatron-Core 0.16.1 --------------------------------------------------------------------------


def _megatron_config(**options: Any) -> Any:
    defaults = {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": False, "sequence_parallel": False}
    return types.SimpleNamespace(**defaults | options)


def test_the_norm_of_megatron():
    norm = megatron.TigonRMSNorm(_megatron_config(layernorm_zero_centered_gamma=True, sequence_parallel=True), 8)
    x = torch.randn(4, 2, 8)
    # The weight of a zero-centred norm starts at zero, and the norm multiplies by 1 + weight.
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (8,), eps=1e-5))
    assert not norm.weight.any()
    assert norm.weight.sequence_parallel  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="TigonRMSNorm: config.normalization must be 'RMSNorm', got 'LayerNorm'"):
        megatron.TigonRMSNorm(_megatron_config(normalization="LayerNorm"), 8)


def test_a_specification_of_megatron_gets_the_norm(install):
    identity, l2_norm, norm = (type(name, (), {}) for name in ("IdentityOp", "L2Norm", "WrappedTorchNorm"))
    install("megatron-core", "0.16.1", megatron={}, megatron__core={}, megatron__core__transformer={},
            megatron__core__transformer__identity_op={"IdentityOp": identity},
            megatron__core__transformer__torch_norm={"L2Norm": l2_norm})  # fmt: skip
    attention = types.SimpleNamespace(q_layernorm=norm, k_layernorm=l2_norm)
    layer = types.SimpleNamespace(
        input_layernorm=norm, pre_cross_attn_layernorm=identity, pre_mlp_layernorm=norm,
        self_attention=types.SimpleNamespace(submodules=attention),
    )  # fmt: skip
    megatron.use_rms_norm(types.SimpleNamespace(submodules=layer))
    assert layer.input_layernorm is layer.pre_mlp_layernorm is attention.q_layernorm is megatron.TigonRMSNorm
    assert layer.pre_cross_attn_layernorm is identity
    assert attention.k_layernorm is l2_norm


def test_the_swiglu_of_megatron(install):
    stock = lambda *arguments: "stock"
    fusion, mlp, shared = ({"bias_swiglu_impl": stock} for _ in range(3))
    install("megatron-core", "0.16.1", megatron={}, megatron__core={}, megatron__core__fusions={},
            megatron__core__fusions__fused_bias_swiglu=fusion, megatron__core__transformer={},
            megatron__core__transformer__mlp=mlp, megatron__core__transformer__moe__shared_experts=shared)  # fmt: skip
    undo = megatron.enable_swiglu()
    module = sys.modules["megatron.core.transformer.mlp"]
    x, bias = torch.randn(4, 2, 8), torch.randn(8)
    gate, up = (x + bias).chunk(2, -1)
    torch.testing.assert_close(module.bias_swiglu_impl(x, bias), torch.nn.functional.silu(gate) * up)
    torch.testing.assert_close(module.bias_swiglu_impl(x + bias, None), torch.nn.functional.silu(gate) * up)
    # Tigon's op stores no FP8 input, so the code of Megatron-Core runs.
    assert module.bias_swiglu_impl(x, None, True, False) == "stock"
    assert sys.modules["megatron.core.transformer.moe.shared_experts"].bias_swiglu_impl is module.bias_swiglu_impl
    # A second call changes nothing, and its result undoes nothing.
    megatron.enable_swiglu()()
    assert module.bias_swiglu_impl is not stock
    undo()
    assert module.bias_swiglu_impl is stock


def test_the_losses_of_megatron(install):
    stock = lambda *arguments: "stock"
    name, fused_name = "vocab_parallel_cross_entropy", "fused_vocab_parallel_cross_entropy"
    install("megatron-core", "0.16.1", megatron={}, megatron__core={}, megatron__core__fusions={},
            megatron__core__fusions__fused_cross_entropy={fused_name: stock},
            megatron__core__parallel_state={"get_tensor_model_parallel_group": lambda: None},
            megatron__core__tensor_parallel={name: stock},
            megatron__core__tensor_parallel__cross_entropy={name: stock})  # fmt: skip
    undo = megatron.enable_cross_entropy()
    parallel = sys.modules["megatron.core.tensor_parallel"]
    fused = sys.modules["megatron.core.fusions.fused_cross_entropy"]
    logits, target = torch.randn(3, 2, 10), torch.tensor([[1, 2], [-1, 9], [0, -100]])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten().clamp(-1), ignore_index=-1,
                                                 reduction="none").view(3, 2)  # fmt: skip
    torch.testing.assert_close(getattr(parallel, name)(logits, target), expected)
    torch.testing.assert_close(getattr(fused, fused_name)(logits, target, None), expected)
    assert getattr(parallel, name)(logits, target, 0.1) == "stock"
    undo()
    assert getattr(parallel, name) is getattr(fused, fused_name) is stock


def test_another_version_of_megatron_stays_as_it_is(install):
    install("megatron-core", "0.15.0")
    for call in (megatron.enable_swiglu, megatron.enable_cross_entropy, lambda: megatron.use_rms_norm(None)):
        with pytest.warns(UserWarning, match=r"written for megatron-core 0.16.1, but megatron-core 0.15.0 is"):
            call()


# --- DeepSpeed 0.19.8 ------------------------------------------------------------------------------


def test_the_loss_of_deepspeed(install):
    def loss(
        vocab_parallel_logits, target, tp_group=None, sp_group=None, vocab_start_index=None, vocab_end_index=None,
        global_vocab_size=None, ignore_index=-100, reduction="mean", gather_sequence_loss=False, backend="torch",
    ):  # fmt: skip
        owner = sys.modules["deepspeed.sequence.cross_entropy"]
        size = vocab_parallel_logits.shape[-1]
        if backend != "liger" or not owner._liger_can_run(vocab_parallel_logits, target, size, 10, tp_group):
            return "stock"
        return owner._liger_vocab_cross_entropy(vocab_parallel_logits, target, tp_group, ignore_index).sum()

    names = {"_liger_can_run": lambda *a: False, "_liger_vocab_cross_entropy": lambda *a: "Liger"}
    install("deepspeed", "0.19.8", deepspeed={}, deepspeed__sequence={"vocab_parallel_cross_entropy": loss},
            deepspeed__sequence__cross_entropy={"vocab_parallel_cross_entropy": loss, **names})  # fmt: skip
    undo = deepspeed.enable_cross_entropy()
    sequence = sys.modules["deepspeed.sequence"]
    logits, target = torch.randn(3, 2, 10), torch.tensor([[1, 2], [-100, 9], [0, 7]])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
    torch.testing.assert_close(sequence.vocab_parallel_cross_entropy(logits, target), expected)
    torch.testing.assert_close(sequence.vocab_parallel_cross_entropy(logits, target, backend="torch"), expected)
    # The ranks have different numbers of columns.
    assert sequence.vocab_parallel_cross_entropy(logits[..., :9], target) == "stock"
    undo()
    assert sequence.vocab_parallel_cross_entropy is loss


# --- torchtitan 0.3.0 ------------------------------------------------------------------------------


def _titan_configs() -> dict[str, Any]:
    """Return a config of torchtitan for each override."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.nn_modules import RMSNorm
    from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE

    linear = lambda inputs, outputs: Linear.Config(in_features=inputs, out_features=outputs)
    return {
        "rms_norm": RMSNorm.Config(normalized_shape=8),
        "feed_forward": FeedForward.Config(w1=linear(8, 12), w3=linear(8, 12), w2=linear(12, 8)),
        "complex_rope": ComplexRoPE.Config(dim=8, max_seq_len=16),
        "cos_sin_rope": CosSinRoPE.Config(dim=8, max_seq_len=16),
        "cross_entropy": CrossEntropyLoss.Config(),
    }


def _titan_results(name: str, component: Any, dtype: torch.dtype) -> list[Tensor]:
    """Return the outputs of a component and the gradients of its inputs and parameters."""
    torch.manual_seed(0)
    parameters = list(component.parameters()) if isinstance(component, torch.nn.Module) else []
    for parameter in parameters:
        torch.nn.init.normal_(parameter.data)
        parameter.data = parameter.data.to(dtype)
    inputs = [torch.randn(2, 5, *shape, dtype=dtype, requires_grad=True)
              for shape in (((3, 8), (2, 8)) if name.endswith("rope") else ((8,),))]  # fmt: skip
    if name == "cross_entropy":
        outputs = [component(*inputs, torch.tensor([[1, 2, -100, 4, 7], [0, -100, 3, 3, 1]]), torch.tensor(8.0))[0]]
    elif name.endswith("rope"):
        # One call with the positions 0, 1, 2 ..., and one with positions of each sequence.
        outputs = [*component(*inputs), *component(*inputs, torch.randint(16, (2, 5)))]
    else:
        outputs = [component(*inputs)]
    sum(x.float().sin().sum() for x in outputs).backward()
    return [*outputs, *(x.grad for x in (*inputs, *parameters))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["rms_norm", "feed_forward", "complex_rope", "cos_sin_rope", "cross_entropy"])
def test_torchtitan(name, dtype):
    require_framework("torchtitan", "0.3.0", "torchtitan.models.common.rope")
    plugin = importlib.import_module("tigon.integrations.torchtitan")
    stock = _titan_configs()[name]
    config = getattr(plugin, name)(stock)
    assert type(config).__qualname__.startswith("Tigon")
    results = [_titan_results(name, c.build(), dtype) for c in (config, stock)]
    tolerances = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(*results, **tolerances)


def test_another_version_of_torchtitan_keeps_its_configs(monkeypatch):
    require_framework("torchtitan", "0.3.0", "torchtitan.models.common.rope")
    plugin = importlib.import_module("tigon.integrations.torchtitan")
    monkeypatch.setattr(frameworks, "_warned", set())
    monkeypatch.setattr(metadata, "version", lambda name: "0.9.0")
    config = _titan_configs()["rms_norm"]
    with pytest.warns(UserWarning, match=r"written for torchtitan 0.3.0, but torchtitan 0.9.0 is installed"):
        assert plugin.rms_norm(config) is config


# --- the frameworks themselves, on ranks -----------------------------------------------------------


@pytest.mark.parametrize(
    ("framework", "distribution", "version"),
    [
        pytest.param("megatron", "megatron-core", "0.16.1", marks=pytest.mark.thorough),
        pytest.param("deepspeed", "deepspeed", "0.19.8", marks=pytest.mark.deepspeed),
    ],
    ids=["megatron", "deepspeed"],
)
def test_two_ranks_of_the_framework(framework, distribution, version):
    require_framework(distribution, version, framework)
    for output in run_ranks(__file__, framework, ranks=2):
        assert "equal" in output.splitlines()[-1], output


def _train_megatron(model: Any) -> list[Tensor]:
    tokens = torch.arange(12).view(2, 6)
    mask = torch.ones(1, 1, 6, 6).tril() < 0.5
    losses = model(tokens, torch.arange(6).expand(2, 6), mask, labels=tokens.roll(-1, 1))
    losses.sum().backward()
    return [losses, *(p.grad for p in model.parameters())]


def _run_megatron(count: Callable[[str], Any]) -> None:
    """Train a GPT model of Megatron-Core, with and without Tigon."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    # Two functions of Megatron-Core that need a GPU: the current device, and the random states for dropout.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    tracker = types.SimpleNamespace(fork=lambda *a: contextlib.nullcontext(), is_initialized=lambda: True)
    for module in list(sys.modules.values()):
        if module.__name__.startswith("megatron") and hasattr(module, "get_cuda_rng_tracker"):
            module.get_cuda_rng_tracker = lambda *a, **k: tracker

    def build(adapt: Callable[[Any], Any]) -> Any:
        torch.manual_seed(0)
        config = TransformerConfig(
            num_layers=1, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, normalization="RMSNorm",
            gated_linear_unit=True, activation_func=torch.nn.functional.silu, bias_activation_fusion=True,
            add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, masked_softmax_fusion=False,
            bias_dropout_fusion=False, gradient_accumulation_fusion=False, use_cpu_initialization=True,
            tensor_model_parallel_size=dist.get_world_size(),
        )  # fmt: skip
        spec = adapt(get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True))
        return GPTModel(config, spec, vocab_size=64, max_sequence_length=16)

    stock, model = build(lambda spec: spec), build(megatron.use_rms_norm)
    model.load_state_dict(stock.state_dict())
    assert type(model.decoder.layers[0].input_layernorm) is megatron.TigonRMSNorm
    expected = _train_megatron(stock)
    megatron.enable_swiglu()
    megatron.enable_cross_entropy()
    for name in ("swiglu", "token_losses", "rms_norm"):
        setattr(megatron, name, count(getattr(megatron, name)))
    torch.testing.assert_close(_train_megatron(model), expected, rtol=1e-4, atol=1e-5)


def _run_deepspeed(count: Callable[[str], Any]) -> None:
    """Compute the vocabulary-parallel losses of DeepSpeed, with and without Tigon."""
    import deepspeed.comm
    from deepspeed import sequence

    deepspeed.comm.init_distributed("gloo", dist_init_required=False)
    group, width = dist.group.WORLD, 16 // dist.get_world_size()
    torch.manual_seed(0)
    logits, target = torch.randn(3, 5, 16), torch.randint(16, (3, 5))
    target[0, 1] = -100
    shard = logits[..., dist.get_rank() * width :][..., :width]

    def train(x: Tensor, group: Any, **options: Any) -> list[Any]:
        x = x.clone().requires_grad_()
        loss = sequence.vocab_parallel_cross_entropy(x, target, tp_group=group, **options)
        (loss * torch.linspace(1, 2, loss.numel()).view_as(loss)).sum().backward()
        return [loss, x.grad]

    cases: list[tuple] = [(shard, group, {}), (shard, group, {"reduction": "none"}), (logits, None, {})]
    expected = [train(x, group, **options) for x, group, options in cases]
    from tigon.integrations import deepspeed as plugin

    plugin.enable_cross_entropy()
    vars(plugin)["token_losses"] = count(plugin.token_losses)
    torch.testing.assert_close([train(x, group, **options) for x, group, options in cases], expected)
    module = sequence.cross_entropy.VocabParallelCausalLMLoss(tp_group=group)
    expected_loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())
    torch.testing.assert_close(module(shard, labels=target), expected_loss)


def main() -> None:
    framework, store = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=LIMIT)
    counts: dict[str, int] = {}

    def count(function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[function.__name__] = counts.get(function.__name__, 0) + 1
            return function(*args, **kwargs)

        return counted

    {"megatron": _run_megatron, "deepspeed": _run_deepspeed}[framework](count)
    expected = {"megatron": {"rms_norm": 4, "swiglu": 1, "token_losses": 1}, "deepspeed": {"token_losses": 4}}
    assert counts == expected[framework], counts
    print("equal")
    leave()


if __name__ == "__main__":
    main()

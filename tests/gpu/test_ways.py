"""Ways of training that need a GPU: a patched model in fp16 or bf16 is as accurate as the stock one."""

import pytest
import torch
from torch import nn

import tigon
from gpu.steps import capture
from tigon.hf.logits import SKIPPED_LOGITS

transformers = pytest.importorskip("transformers")
from hf.same_step import step as take_step  # noqa: E402
from hf.test_two_ranks import assert_same_on_two, every_launch  # noqa: E402
from hf.ways import PARTS  # noqa: E402

SIZE = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 512, "vocab_size": 32000, "pad_token_id": 0,
    "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
# The loss, and every gradient by name.
Step = dict[str, torch.Tensor]


@pytest.fixture(params=["llama", "qwen3", "gemma2"])
def model_type(request) -> str:
    return request.param


def make_model(model_type: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a model whose parameters, with those of norms, are random numbers in bf16 for every dtype."""
    config = transformers.AutoConfig.for_model(model_type, **SIZE)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return model.to(torch.bfloat16).to(dtype).cuda()


def make_batch(seed: int = 1) -> Step:
    tokens = torch.randint(3, SIZE["vocab_size"], (2, 256), generator=torch.Generator().manual_seed(seed)).cuda()
    labels = tokens.clone()
    labels[:, : 5 + seed] = -100
    return {"input_ids": tokens, "labels": labels, "use_cache": False}


def gradients(model: nn.Module) -> Step:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def patch(model: nn.Module, more_parts: frozenset[str] = frozenset()) -> nn.Module:
    report = tigon.patch(model)
    assert {entry.part for entry in report.replaced} == PARTS | more_parts, report
    return model


def assert_as_accurate(actual: Step, stock: Step, exact: Step) -> None:
    """Assert that the relative error of every result is at most twice that of stock."""
    assert actual.keys() == stock.keys() == exact.keys()
    assert len(exact) > 2
    for name, value in exact.items():
        error = lambda x, value=value: float((x.double() - value.double()).norm() / value.double().norm())
        # A single number of stock may be exact by chance.
        limit = 2 * error(stock[name]) + (2e-3 if value.numel() == 1 else 2e-4)
        assert error(actual[name]) <= limit, f"{name}: {error(actual[name]):.2e}, stock {error(stock[name]):.2e}"


def compare(run, model_type: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Compare `run(model, batch)` of a patched and a stock model in `dtype` with a step of a stock model in fp32."""
    batch = make_batch()
    exact = take_step(make_model(model_type, torch.float32), batch)
    stock = run(make_model(model_type, dtype), batch)
    actual = run(patch(make_model(model_type, dtype)), batch)
    assert_as_accurate(actual, stock, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_patched_model_is_accurate_under_autocast(model_type, dtype):
    """The loss in fp16 is scaled."""

    def run(model, batch):
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, enabled=dtype == torch.float16)
        with torch.autocast("cuda", dtype):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(torch.optim.SGD(model.parameters(), 0.1))
        return {"loss": loss.detach(), **gradients(model)}

    compare(run, model_type, torch.float32)


def test_a_captured_step_is_replayed_on_another_batch(model_type):
    """One CUDA graph holds the forward and the backward. The other batch has another number of labels."""

    def capture_and_replay(model, batch):
        static = make_batch(seed=9)

        def step() -> torch.Tensor:
            model.zero_grad(set_to_none=True)
            loss = model(**static).loss
            loss.backward()
            return loss

        graph, loss = capture(step, warm_ups=3)
        for name in ("input_ids", "labels"):
            static[name].copy_(batch[name])
        results = []
        # A replay writes the gradients and does not add to them.
        for _ in range(2):
            graph.replay()
            torch.cuda.synchronize()
            results.append({"loss": loss.detach().clone(), **gradients(model)})
        torch.testing.assert_close(results[0]["loss"], results[1]["loss"])
        return results[1]

    batch = make_batch()
    exact = take_step(make_model(model_type, torch.float32), batch)
    stock = take_step(make_model(model_type), batch)
    actual = capture_and_replay(patch(make_model(model_type)), batch)
    assert_as_accurate(actual, stock, exact)


def to_4bit(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Replace every linear layer but the head by one with 4-bit weights that computes in `dtype`."""
    bnb = pytest.importorskip("bitsandbytes")
    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                layer = bnb.nn.Linear4bit(child.in_features, child.out_features, bias=False, compute_dtype=dtype)
                # The quantised weights are the same for every dtype.
                weight = child.weight.data.to("cpu", torch.float32)
                layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=layer)
                setattr(module, name, layer.cuda())
    model.enable_input_require_grads()
    return model


def with_lora(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # The values are in bf16 for every dtype.
            if "lora_" in name:
                values = 0.02 * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(values.bfloat16())
    return model.train()


@pytest.mark.parametrize("order", ["patch first", "layers first"])
@pytest.mark.parametrize("layers", ["4 bit", "adapters", "adapters on 4 bit"])
def test_a_patched_model_is_accurate_with_quantised_layers_and_adapters(model_type, layers, order):
    def build(dtype: torch.dtype, patched: bool) -> nn.Module:
        model = make_model(model_type, dtype)
        if patched and order == "patch first":
            patch(model)
        model = to_4bit(model, dtype) if "4 bit" in layers else model
        model = with_lora(model) if "adapters" in layers else model
        if patched and order == "layers first":
            patch(model, frozenset({"adapters"} if "adapters" in layers else ()))
        return model

    batch = make_batch()
    exact = take_step(build(torch.float32, False), batch)
    stock = take_step(build(torch.bfloat16, False), batch)
    model = build(torch.bfloat16, True)
    assert model(**batch).logits is SKIPPED_LOGITS
    assert_as_accurate(take_step(model, batch), stock, exact)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="The test needs two GPUs.")
@every_launch
def test_a_patched_model_agrees_with_stock_on_two_gpus(launch):
    """The launches are DDP and FSDP, tensor and context parallelism, and ZeRO-3, in fp32 over NCCL."""
    assert_same_on_two("cuda", launch)

"""Adapters in fp32 on a base in fp16, which an op computes, in a data-parallel or sharded model.

The kernels run on GPUs, or in Triton's interpreter. It is slow, so the models have one layer, and the parts that have
nothing to do with adapters stay stock.
"""

import contextlib
import functools
from collections.abc import Callable

import peft
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tigon
from hf.ways import Step, batch, build, recorded, step
from hf.ways_sharded import ddp
from tigon.hf import fp8
from tigon.ops.adapters.lora import _LoRALinears
from tigon.ops.adapters.lora_mlp import _LoRAGLUMLP

# The layers of the test are narrower than those that FP8 pays for.
fp8.NARROWEST = 1
FP16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)}
# One node computes query, key and value, one computes the output projection, and one the MLP.
NODES = {_LoRALinears: 2, _LoRAGLUMLP: 1}


def build_adapted(dtype: torch.dtype, patched: bool = False) -> nn.Module:
    """Return a model in `dtype` with adapters in fp32 on its layers. The base weights are numbers of fp16."""
    torch.manual_seed(0)
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
    model = build(num_hidden_layers=1).half().to(dtype)
    model = peft.get_peft_model(model, peft.LoraConfig(**options, task_type="CAUSAL_LM"))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    if patched:
        report = tigon.patch(model, rms_norm=False, rope=False, loss=False)
        assert {"adapters", "glu"} <= {entry.part for entry in report.replaced}, report
    return model


def fsdp2(model: nn.Module, own_units: tuple[str, ...] = (), **options) -> nn.Module:
    """Shard each layer as a unit of FSDP2. Modules whose names end with one of `own_units` are units of their own."""
    for layer in model.base_model.model.model.layers:
        for name, module in layer.named_modules():
            if own_units and name.endswith(own_units):
                fully_shard(module, **options)
        fully_shard(layer, **options)
    return fully_shard(model, **options)


@functools.cache
def whole_step(dtype: torch.dtype, rank: int) -> Step:
    """Return the loss of a rank and the mean gradients of both ranks, which a stock model computes on one process."""
    steps = [step(build_adapted(dtype), False, **batch(each)) for each in range(2)]
    return {name: (a + b) / 2 for (name, a), b in zip(steps[0].items(), steps[1].values(), strict=True)} | {
        "loss": steps[rank]["loss"]
    }


def make_setup(
    distribute: Callable, dtype: torch.dtype = torch.float16, is_op_used: bool = True
) -> Callable[[int], None]:
    """Return a setup that compares the errors of a patched distributed model with those of one process in fp16."""

    def setup(rank: int) -> None:
        model = distribute(build_adapted(dtype, patched=True))
        # State that remains after the first step must not change the second one.
        step(model, False, **batch(rank, seed=1))
        model.zero_grad()
        with contextlib.ExitStack() as stack:
            calls = {node: stack.enter_context(recorded(node, "apply")) for node in NODES}
            actual = step(model, False, **batch(rank))
        assert {node: len(each) for node, each in calls.items()} == {n: c * is_op_used for n, c in NODES.items()}
        actual = {name.removeprefix("module."): value for name, value in actual.items()}
        exact, stock = whole_step(torch.float32, rank), whole_step(torch.float16, rank)
        assert actual.keys() == stock.keys() == exact.keys()
        for name, value in exact.items():
            error = lambda x, value=value: float((x.double() - value.double()).norm() / value.double().norm())
            assert error(actual[name]) <= 2 * error(stock[name]) + 2**-11, (
                f"{name}: {error(actual[name]):.2e}, stock {error(stock[name]):.2e}"
            )

    return setup


SETUPS = {
    "DDP": make_setup(ddp),
    "FSDP2": make_setup(fsdp2),
    "FSDP2, fp32 shards and fp16 parameters": make_setup(functools.partial(fsdp2, **FP16), dtype=torch.float32),
    # Units have hooks, so the layers run the code of PEFT.
    "FSDP2, each adapter a unit": make_setup(
        functools.partial(fsdp2, own_units=("lora_A.default", "lora_B.default")), is_op_used=False
    ),
}

"""ZeRO-3 of DeepSpeed: parameters are empty except during the forward and the backward of their module."""

from collections.abc import Callable

import deepspeed
import peft
import torch
from deepspeed.utils import safe_get_full_grad
from torch import nn
from transformers.integrations import HfDeepSpeedConfig

import tigon.ops.mlps.glu as glu
from hf.ways import DEVICE, Step, assert_same, batch, build, patch, randomise
from tigon.hf.logits import SKIPPED_LOGITS


def with_adapters(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(**options, task_type="CAUSAL_LM"))
    assert not any(p.requires_grad for name, p in model.named_parameters() if "lora_" not in name)
    return model


def zero3(
    patch_after: bool = False, memory: str = "default", has_adapters: bool = False, **config
) -> Callable[[int], None]:
    """Return a setup that takes a step with the engine of DeepSpeed."""

    def run(rank: int, patched: bool) -> Step:
        # DeepSpeed would compile this op.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("nccl" if DEVICE == "cuda" else "gloo")
        options = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        # As long as this object exists, models are built with empty parameters.
        hf_config = HfDeepSpeedConfig(options)
        model = build(**config)
        assert model.lm_head.weight.numel() == 0
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            randomise(model)
        del hf_config
        if patched and not patch_after:
            patch(model, memory=memory)
        model = with_adapters(model) if has_adapters else model
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = torch.optim.SGD(trained.values(), lr=0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=options)
        if patched and patch_after:
            patch(model, memory=memory)
        result, calls, runs_kernels = {}, [], glu.runs_kernels
        glu.runs_kernels = lambda *x: calls.append(x) or runs_kernels(*x)
        for i in range(2):
            outputs = engine(**batch(rank, seed=i))
            assert (outputs.logits is SKIPPED_LOGITS) == patched
            engine.backward(outputs.loss)
            result[f"loss {i}"] = outputs.loss.detach()
            result |= {f"{name} {i}": safe_get_full_grad(p).clone() for name, p in trained.items()}
            engine.step()
        glu.runs_kernels = runs_kernels
        # The other levels compute the products twice.
        times = 1 if memory == "default" else 2
        assert len(calls) == (4 * times if patched else 0), (
            "hooks of DeepSpeed on activations must not turn off gated MLPs"
        )
        # The code of PEFT reads the dtype of an adapter outside of the adapter, in the stock model too.
        modules = [(name, m) for name, m in model.named_modules() if not hasattr(m, "lora_A")]
        external = [name for name, m in modules if getattr(m, "_external_params", None)]
        assert not external, f"{external} read parameters of other modules"
        engine.destroy()
        return result

    def setup(rank: int) -> None:
        assert_same(run(rank, True), run(rank, False))

    return setup


SETUPS = {
    "ZeRO-3": zero3(),
    "ZeRO-3, patched after": zero3(patch_after=True),
    "ZeRO-3, tied embeddings": zero3(tie_word_embeddings=True),
    # DeepSpeed replaces the function of linear layers, so layers with adapters run the code of PEFT.
    "ZeRO-3, adapters": zero3(has_adapters=True),
    "ZeRO-3, lean": zero3(memory="lean"),
    "ZeRO-3, lean+mlp": zero3(memory="lean+mlp"),
}

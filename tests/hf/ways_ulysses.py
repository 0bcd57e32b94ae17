"""A sequence on both ranks, by the Ulysses attention of DeepSpeed, alone and in accelerate with ZeRO-3.

Before attention, the ranks exchange parts of the sequence for heads. Each rank computes its heads for all tokens.
"""

import contextlib
import os
from collections.abc import Callable, Iterator

import deepspeed
import deepspeed.runtime.sequence_parallel.parallel_state_sp as groups
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.utils import safe_get_full_grad
from torch.utils.data import DataLoader
from transformers.integrations.deepspeed import deepspeed_sp_compute_loss
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tigon
from hf.ways import DEVICE, Step, assert_same, batch, build, randomise, step
from hf.ways_sequence import TOKENS, offloading, one_process, whole_batch
from tigon.hf.logits import SKIPPED_LOGITS

STOCK_ATTENTION = ALL_ATTENTION_FUNCTIONS["sdpa"]


@contextlib.contextmanager
def ulysses_ended() -> Iterator[None]:
    """Give back the groups and the attention of Ulysses, which are global."""
    # DeepSpeed would compile this op.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if DEVICE == "cuda" else "gloo")
    try:
        yield
    finally:
        groups._SEQUENCE_PARALLEL_GROUP = groups._SEQUENCE_DATA_PARALLEL_GROUP = None
        ALL_ATTENTION_FUNCTIONS["sdpa"] = STOCK_ATTENTION


def attention_alone(level: str, valid: int = TOKENS) -> Callable[[int], None]:
    """Return a setup in which only the attention is that of DeepSpeed. One process has the same results."""

    def setup(rank: int) -> None:
        with ulysses_ended(), offloading():
            model = build("llama", num_hidden_layers=3)
            tigon.patch(model, memory=level)
            model.set_attn_implementation("sdpa")
            UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, micro_batch_size=2)
            whole = whole_batch(valid)
            items = (whole["shift_labels"] != -100).sum()
            part = {name: value.chunk(2, 1)[rank] for name, value in whole.items()}
            results = step(model, True, **part, num_items_in_batch=items)
            for value in results.values():
                dist.all_reduce(value)
            function = model.model.layers[0]._gradient_checkpointing_func if "checkpoint" in level else None
            if level == "checkpoint+offload":
                assert function.place.inputs.pages.capacity == 2 * 3 * 1024
            if level == "checkpoint+attention+offload":
                # The output of attention has as many bytes as the input, and its log-sum-exp is small.
                assert function.place.inputs.pages.capacity == 2 * 2 * 3 * 1024
        assert_same(results, one_process(valid))

    return setup


def accelerate_with_zero3(level: str) -> Callable[[int], None]:
    """Return a setup with the sequence parallelism of accelerate. It has the results of the stock model there."""

    def run(patched: bool) -> Step:
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
        # `accelerate launch` sets this variable.
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        parallelism = ParallelismConfig(sp_size=2, sp_backend="deepspeed", sp_handler=handler)
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), parallelism_config=parallelism)
        model = build("llama")
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            randomise(model)
        model.set_attn_implementation("sdpa")
        if patched:
            tigon.patch(model, memory=level)
        rows = []
        for seed in range(2):
            for ids in batch(0, seed)["input_ids"].cpu():
                labels = ids.clone()
                # The second rank has labels for a half of its tokens.
                labels[9:] = -100
                rows.append({"input_ids": ids, "labels": labels, "position_ids": torch.arange(TOKENS)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))
        results = {}
        for i, part in enumerate(loader):
            assert part["input_ids"].shape == (2, TOKENS // 2)
            # On a CPU, the parts are views, which the stock loss refuses.
            part = {
                name: value.to(DEVICE) if patched else value.to(DEVICE).contiguous() for name, value in part.items()
            }
            loss, outputs = deepspeed_sp_compute_loss(accelerator, engine, part, True, parallelism)
            assert (outputs.logits is SKIPPED_LOGITS) == patched
            accelerator.backward(loss)
            results[f"loss {i}"] = loss.detach()
            results |= {f"{name} {i}": safe_get_full_grad(p).clone() for name, p in model.named_parameters()}
            optimizer.step()
        engine.destroy()
        accelerator.free_memory()
        AcceleratorState._reset_state()
        del os.environ["ACCELERATE_USE_DEEPSPEED"]
        return results

    def setup(rank: int) -> None:
        steps = []
        for patched in (True, False):
            with ulysses_ended():
                steps.append(run(patched))
        assert_same(*steps)

    return setup


SETUPS = {
    "Ulysses": attention_alone("default"),
    "Ulysses, a rank without labels": attention_alone("lean+mlp", valid=5),
    "Ulysses, checkpoint+offload": attention_alone("checkpoint+offload"),
    "Ulysses, checkpoint+attention+offload": attention_alone("checkpoint+attention+offload"),
    "Ulysses in accelerate": accelerate_with_zero3("default"),
    "Ulysses in accelerate, checkpoint": accelerate_with_zero3("checkpoint"),
}

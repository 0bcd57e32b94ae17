"""A model of random weights, its adapters, its shards under FSDP2, and the memory of a process without a GPU."""

import ctypes
import gc
import json
import math
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def config_fields(config: "PretrainedConfig") -> dict[str, Any]:
    return json.loads(json.dumps(config.to_dict()))


def read_config(fields: dict[str, Any]) -> "PretrainedConfig":
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[fields["model_type"]].from_dict(fields)


def random_model(config: "PretrainedConfig", dtype: str, device: str | torch.device) -> "PreTrainedModel":
    """Return a model of random weights in training mode on `device`. Set the seed before the call. Attention is `sdpa`,
    or `eager` for a model type without `sdpa`."""
    from transformers import AutoModelForCausalLM

    # Build on the device: a CPU needs half a minute to draw 1.2 billion random numbers.
    with torch.device(device):
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="eager")
    return model.to(device).train()


def shard(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shard `model` and `optimizer` over the ranks of this process's group, by FSDP2 of accelerate. Each layer is a
    unit that frees its gathered parameters after its forward pass. Parameters, gradients and messages between ranks
    have the dtype of the model."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True,
        cpu_ram_efficient_loading=False, state_dict_type="SHARDED_STATE_DICT",
    )  # fmt: skip
    on_cpu = next(model.parameters()).device.type == "cpu"
    # Mixed precision would hold the weights in fp32.
    accelerator = Accelerator(cpu=on_cpu, fsdp_plugin=plugin, mixed_precision="no")
    if on_cpu:
        # Accelerate accepts the plugin on accelerators alone, but FSDP2 works over gloo too.
        from accelerate.utils import DistributedType

        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = DistributedType.FSDP
    return accelerator.prepare(model, optimizer)


def add_adapters(model: Any, rank: int) -> Any:
    """Return a model of transformers with adapters on all linear layers but the head, and on the weights of experts.
    They have the defaults of PEFT: fp32 if the model is in half precision, a scaling of 2, and no dropout."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", target_parameters=expert_parameters(model) or None,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return get_peft_model(model, config).train()


def expert_parameters(model: nn.Module) -> list[str]:
    """Return the names of the weights [E, out, in] or [E, in, out] of all experts in a model."""
    from tigon.recognition.parts.experts import is_experts, parameter_names

    return [
        f"{name}.{parameter}"
        for name, module in model.named_modules()
        if is_experts(module)
        for parameter in parameter_names(module)[:2]
    ]


def draw_adapters(model: Any, seed: int) -> None:
    """Draw the matrix A of every adapter from `seed`, with the distribution of PEFT; B is zero. The libraries that make
    adapters draw them in different orders, and some of them on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            bound = 1 / math.sqrt(parameter.shape[1])
            values = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
            with torch.no_grad():
                parameter.copy_(values)


def freeze(model: Any) -> None:
    """Freeze all weights. Backward still computes the gradients of the embeddings' output and of each layer's input."""
    model.requires_grad_(False)
    model.enable_input_require_grads()


def quantise(model: Any) -> None:
    """Convert the linear layers of a model to 4 bits (nf4 with double quantisation), except the head."""
    import bitsandbytes as bnb

    head, kind = model.get_output_embeddings(), {"quant_type": "nf4", "compress_statistics": True}
    layers = {
        name: module for name, module in model.named_modules() if type(module) is nn.Linear and module is not head
    }
    for name, old in layers.items():
        options = {"compute_dtype": old.weight.dtype, "device": "meta", **kind}
        layer = bnb.nn.Linear4bit(old.in_features, old.out_features, old.bias is not None, **options)
        layer.weight = bnb.nn.Params4bit(old.weight.data, requires_grad=False, module=layer, **kind)
        layer.bias = old.bias
        # The move to the device quantises the weight.
        model.set_submodule(name, layer.to(old.weight.device))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _status_bytes(field: str) -> int | None:
    """Return a size that Linux reports for this process, or None on other systems."""
    status = Path("/proc/self/status")
    match = re.search(rf"^{field}:\s+(\d+) kB$", status.read_text(), re.MULTILINE) if status.exists() else None
    return int(match[1]) * 1024 if match else None


class ResidentMemory:
    """Peak resident memory of this process above the memory that it had when this object was created."""

    def __init__(self) -> None:
        gc.collect()
        # Return freed memory from the C library to the system, and reset the peak. Not every system can do both.
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
        self._baseline = _status_bytes("VmRSS")

    def growth(self) -> int | None:
        """Return the peak above the memory at the start, or None if the system does not report it."""
        peak = _status_bytes("VmHWM")
        return None if peak is None or self._baseline is None else max(0, peak - self._baseline)

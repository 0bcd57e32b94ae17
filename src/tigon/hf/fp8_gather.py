"""`tigon.gather_in_fp8`: let FSDP2 gather the weights of layers in FP8 as FP8 values."""

import functools
import weakref
from collections.abc import Mapping, Sequence, Set
from typing import Any

from torch import nn

from tigon.hf.report import Report
from tigon.recognition.adapters import AdapterRecipe
from tigon.recognition.fp8 import FP8Recipe, end_gather
from tigon.recognition.fp8_gather import GatheredUnit, find_refusal
from tigon.recognition.fp8_groups import find_groups
from tigon.recognition.replacement import installed_recipe
from tigon.recognition.standin import is_linear
from tigon.runtime.torch_private import fsdp

PART = "fp8_gather"
COUNTED = "weights gathered in FP8"
READ = "the adapters around it may read its values, because no op computes them"


def gather_in_fp8(model: nn.Module) -> Report:
    """Let FSDP2 gather the weights of the layers in FP8 as FP8 values: one byte for each value in place of two.

    Each rank rounds its shard to e4m3 before the all-gather, with the scale of the whole weight, which takes one small
    all-reduce for each unit of FSDP2. The products of forward and of the gradient of the input read the gathered
    values. Losses and gradients of eager training have the same bits as without this function; docs/fp8.md names the
    exceptions. (Without it, FSDP2 gathers the weights in bf16, and every rank rounds them in the same way.) Parameters,
    gradients, optimizer states and checkpoints keep their dtype.

    Call it after `tigon.patch(model, fp8="tensorwise")` and after `fully_shard`, in any order of these two. It changes
    the sharded tensors that `fully_shard` makes, so it cannot be an option of `patch`, which usually comes first. All
    ranks must call it. Call it again if the model is patched or sharded again.

    The gathered weights exist in FP8 only. So a layer in FP8 uses them for every call, also for a short one without
    gradients, and any other code that reads such a weight during forward or backward gets the rounded values.

    Args:
        model: A model whose layers, or some of them, are sharded by `torch.distributed.fsdp.fully_shard`.

    Returns:
        A report. `print(report)` shows which weights are gathered in FP8, and why the others are not. Weights keep
        their dtype if they are offloaded to the host, shared by several modules or distributed by tensor parallelism,
        if `reshard_after_forward` is a number, if they would be gathered in fp32, and if they are the base of adapters
        that no op computes, such as DoRA, which reads the values of its base. `report.restore()` undoes this
        function, and so does `restore` of the report of `patch`; call it between two steps.

    Raises:
        TypeError: `model` is no `torch.nn.Module`.
        ValueError: No module of the model is sharded by FSDP2, no layer runs in FP8, a layer has the recipe "rowwise",
            or no weight can be gathered in FP8. The scales of "rowwise" for the gradient of the input belong to
            columns, so the values that were rounded for the forward cannot serve it.
        RuntimeError: A forward or a backward is running, or this torch lacks one of the private names of FSDP2 that
            this function reads. The error contains the missing name, such as `FSDPParamGroup._all_gather_result`.

    Example:
        >>> import tempfile
        >>> import torch.distributed as dist
        >>> from torch.distributed.fsdp import fully_shard
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> store = dist.FileStore(tempfile.mktemp(), 1)
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> config = LlamaConfig(
        ...     vocab_size=64, hidden_size=768, intermediate_size=768, num_hidden_layers=1, num_attention_heads=12
        ... )
        >>> model = LlamaForCausalLM(config).bfloat16()
        >>> report = tigon.patch(model, fp8="tensorwise")
        >>> for layer in model.model.layers:
        ...     _ = fully_shard(layer)
        >>> _ = fully_shard(model)
        >>> print(tigon.gather_in_fp8(model))
        FSDPLlamaForCausalLM: 7 weights gathered in FP8
        part        module  count  now
        ----------  ------  -----  -----------------------------------
        fp8_gather  Linear  7      gathered in e4m3, 1 byte each value
        >>> tokens = torch.tensor([[1, 2, 3, 4]])
        >>> model(input_ids=tokens, labels=tokens).loss.backward()
        >>> report.restore()
        >>> dist.destroy_process_group()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"gather_in_fp8: model must be a torch.nn.Module, got {type(model).__name__}")
    names = {m: name for name, m in model.named_modules() if isinstance(installed_recipe(m), FP8Recipe)}
    if not names:
        raise ValueError(
            'gather_in_fp8: no layer of the model runs in FP8; call tigon.patch(model, fp8="tensorwise") before'
        )
    if recipes := {installed_recipe(layer).settings.recipe for layer in names} - {"tensorwise"}:
        raise ValueError(
            f'gather_in_fp8: the model must be patched with fp8="tensorwise", got {recipes.pop()!r}: the gradient of '
            "the input needs scales of columns, and the gathered values have those of rows"
        )
    units = fsdp.find_units(model)
    if not units:
        raise ValueError(
            "gather_in_fp8: no module of the model is sharded by torch.distributed.fsdp.fully_shard (FSDP2); call it "
            "after fully_shard. FSDP1, ZeRO-3 and DDP have no all-gather in FP8"
        )
    for layer in names:
        end_gather(layer)
    report = Report(type(model).__name__, empty=f"0 {COUNTED}", patched=weakref.ref(model), counted=COUNTED)
    gathered_units = _plan(units, names, _find_read_weights(model), find_groups(model), report)
    if not report:
        reasons = "; ".join(f"{entry.detail} ({entry.count:,} weights)" for entry in report.left_alone)
        raise ValueError(f"gather_in_fp8: no weight can be gathered in FP8: {reasons}")
    for unit in gathered_units:
        unit.start()
    report.undo += [functools.partial(end_gather, layer) for layer in names]
    return report


def _find_read_weights(model: nn.Module) -> set[nn.Module]:
    """Return the bases of adapters that no op computes. The code of such adapters may read the values of the base."""
    bases = set()
    parent: Any
    for parent in model.modules():
        sizes = getattr(parent, "in_features", None), getattr(parent, "out_features", None)
        if None not in sizes and not isinstance(installed_recipe(parent), (AdapterRecipe, FP8Recipe)):
            bases |= {m for m in parent.modules() if is_linear(m) and (m.in_features, m.out_features) == sizes}
    return bases


def _plan(
    units: Sequence[fsdp.Unit], names: Mapping[nn.Module, str], read_weights: Set[nn.Module],
    groups: Sequence[Sequence[nn.Module]], report: Report,
) -> list[GatheredUnit]:  # fmt: skip
    """Choose the weights that are gathered in FP8, and add all to the report.

    Args:
        units: The units of FSDP2 in the model.
        names: The names of the layers in FP8.
        read_weights: Layers whose weights other code may read.
        groups: The layers whose weights share a scale.
        report: The report.
    """
    group_of: dict[nn.Module, int] = {layer: index for index, group in enumerate(groups) for layer in group}
    reasons = dict.fromkeys(names, "FSDP2 does not shard it")
    gathered_units = []
    for unit in units:
        # The weights of the unit, by their group, or by themselves.
        members: dict[Any, list[tuple[nn.Module, Any]]] = {}
        for layer, name, parameter in fsdp.find_parameters(unit):
            if layer in names and name == "weight":
                reasons[layer] = READ if layer in read_weights else find_refusal(unit, parameter) or ""
                if not reasons[layer]:
                    members.setdefault(group_of.get(layer, layer), []).append((layer, parameter))
        if members:
            gathered_units.append(GatheredUnit(unit, [*members.values()]))
    for layer, reason in reasons.items():
        detail = reason or "gathered in e4m3, 1 byte each value"
        report.add(PART, type(layer).__name__, not reason, detail, names[layer])
    return gathered_units

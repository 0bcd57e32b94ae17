"""`tigon.patch`: recognise the modules of a model that compute what an op computes, and replace them."""

import contextlib
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Never, ParamSpec

import torch
from torch import nn

from tigon.graphs.padding import Buckets
from tigon.hf.body_watch import watch_body
from tigon.hf.by_type import patch_type
from tigon.hf.fp8 import check_fp8, plan_fp8
from tigon.hf.graphs import forget_graphs, install_graphs
from tigon.hf.head import find_resized_heads
from tigon.hf.levels import describe_level, plan_level
from tigon.hf.loss_options import LOSS_OPTIONS, LossOptions, record_options
from tigon.hf.packing import add_notes
from tigon.hf.padded_calls import pad_calls
from tigon.hf.parts import PARTS
from tigon.hf.report import Report
from tigon.hf.search import Search
from tigon.memory.levels import Memory, MemoryLevel, check_memory
from tigon.recognition.parts.fp8 import FP8Settings
from tigon.runtime import checks

FP8Scales = Literal["rowwise", "tensorwise"]
P = ParamSpec("P")
Context = contextlib.AbstractContextManager[Report]


def patch(
    model: nn.Module | str,
    *,
    rms_norm: bool = True,
    layer_norm: bool = True,
    glu: bool = True,
    mlp: bool = True,
    experts: bool = True,
    relu2: bool = True,
    gelu: bool = True,
    adapters: bool = True,
    rope: bool = True,
    mixers: bool = True,
    fused_statements: bool = True,
    loss: bool = True,
    memory: Memory | MemoryLevel | str = "default",
    graphs: bool = False,
    pad_to: int | None = None,
    fp8: FP8Scales | str | None = None,
    fp8_dw: bool = True,
    token_scaling: bool = False,
    acc_dtype: torch.dtype | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **unknown: Never,
) -> Report:
    """Replace the modules of this instance that compute, bit for bit, what an op of Tigon computes.

    Modules are recognised by running small copies of them, so the model may be of any class, and on any device or on
    meta. It can be moved, trained, compiled, copied and saved afterwards as before. A module that computes anything
    else keeps its own code. At every call, a replaced module compares the settings that its own forward reads with
    those at the time of the patch. If one of them has changed, the module runs its own code.

    Args:
        model: Any module; a causal language model of transformers profits most. Or a model type such as "llama": from
            now on, until the report's `restore()`, every model of that type is patched when it is built. Models that
            were built before stay stock, and models that were built in between stay patched.
        rms_norm: Replace RMS norms, also gated ones.
        layer_norm: Replace layer norms.
        glu: Replace gated MLPs.
        mlp: Replace MLPs of two linear layers with a GELU or a squared ReLU in between.
        experts: Replace the experts of a mixture whose weights are one tensor.
        relu2: Replace other squared ReLUs.
        gelu: Replace other GELUs. If torch computes one with a single kernel, it changes only in `tigon.lean`, which
            recomputes it.
        adapters: Replace linear layers with low-rank adapters (LoRA). Which of them are active, their scaling and their
            dropout are read at every call. Merged, disabled and other kinds of adapters run as before.
        rope: Replace the rotary embeddings of attention layers.
        mixers: Replace the gated delta rule of recurrent layers and the causal convolution before it. Packed samples
            then stay apart in these layers. Decoding with a cache stays stock.
        fused_statements: Replace statements of a layer's forward that one op computes together: a residual sum and the
            norm of this sum, a norm whose input is also the residual, and linear layers that have the same input. The
            source of the forward is rewritten for this. The stock statements run if the norm or the linear layers do
            more than the op.
        loss: Replace the head and the loss of a causal language model, and the auxiliary loss that balances the experts
            of a mixture (`load_balancing_loss`). In training mode with labels, the loss is computed in the head without
            holding the logits, and `logits` of the output raises `LogitsSkippedError` when it is used.
            `skip_logits=True` in a call of the model requests this in any mode, also with `shift_labels` in place of
            `labels`; `skip_logits=False` returns logits in any mode. Evaluation, generation, and calls without labels
            or with `logits_to_keep` stay stock. A LoRA adapter on the head is part of the fused loss. Another adapter
            or a hook on the head, or a changed setting that scales or caps the logits, brings the stock loss back, with
            a warning. Any other change of the logits raises a `RuntimeError`; on a GPU, the loss and its gradients are
            NaN, and a later fused call raises it.
        memory: The level that decides what is saved for backward: "default", "lean", "lean+mlp", "checkpoint",
            "checkpoint+attention", "checkpoint+offload" or "checkpoint+attention+offload", or a `tigon.Memory`, which
            describes each of them. Results have the same bits at every level. Modules that must not be called twice run
            once. The body of a language model (`model.base_model`) has the level too, for trainers that call the body.
        graphs: Run the forward and the backward of a training call as two CUDA graphs, which takes the host almost no
            time: for small batches, LoRA and uneven lengths. A signature (shapes, dtypes, options) is captured at its
            third use, and needs memory of its own. Calls are padded to a few lengths, or as `pad_to` says. Calls that
            cannot be captured run eagerly, and `report.graphs` says why. `docs/small_batches.md` has the details.
        pad_to: Pad each call of a causal language model in training on the right to a multiple of this number, and cut
            the output to the true length. A new length costs time, because attention kernels make a plan for each new
            shape. Loss and gradients are those without padding up to rounding, and dropout draws other numbers. A
            padded call returns no cache. A call with a cache, a mask of more than two dimensions or an unknown value
            for each token is not padded; the report says why. None pads nothing.
        fp8: Compute the products of the linear layers inside the repeated decoder layers in FP8, forward and backward,
            also in evaluation. Unlike every other option, this one approximates: the factors of the products are
            rounded to 8 bits. "tensorwise" has one scale for each tensor, and is the fastest. "rowwise" has one for
            each row, and is more accurate. Experts of a mixture always have one for each row. The head, routers,
            adapters, narrow layers and experts with few rows keep their dtype; the report names them and the reasons.
            None is no FP8. `docs/fp8.md` has the details.
        fp8_dw: The gradients of the weights are products in FP8 too. With False they have the dtype of the weights, as
            those of experts always do.
        token_scaling: The loss in the head scales the loss of each token by the detached probability of its target.
            A call of the model may also set this option and the next three. They have no effect on a call that computes
            logits; `token_scaling=True` in such a call is an error.
        acc_dtype: torch.float32 sums the gradient of the head's weight in fp32, as in `linear_cross_entropy`.
        return_token_accuracy: The output of the model has the field `token_accuracy`, an fp32 scalar: the share of
            valid tokens whose largest logit is that of the target.
        return_predicted_tokens: The output of the model has the field `predicted_tokens` [B, S]: the token of the
            largest logit at each position, and -1 where the target is ignored.

    Returns:
        A report: `print(report)` shows what was replaced, what was left alone and why; `report.why(name)` says for any
        module what was tried and where it differs from the nearest candidate; `report.restore()` undoes the patch.
        A model in which nothing is recognised is not changed, and a warning says so. Modules that are patched already
        stay as they are.

    Raises:
        TypeError: `model` is no `torch.nn.Module`, or an option is unknown or of the wrong type.
        ImportError: The model comes from a transformers that is too old.
        ValueError: `memory` is none of its choices or is not possible here, `fp8` is no recipe or the device has no FP8
            products, `pad_to` is below 1, or `model` is a string but no model type.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = LlamaForCausalLM(config)
        >>> report = tigon.patch(model, fused_statements=False)
        >>> print(report)
        LlamaForCausalLM: 6 modules patched
        part      module            count  now
        --------  ----------------  -----  ---------------------------------------------
        rms_norm  LlamaRMSNorm      3      rms_norm, offset 0, rounded before the weight
        glu       LlamaMLP          1      swiglu
        rope      LlamaAttention    1      rope, split half
        loss      LlamaForCausalLM  1      linear_cross_entropy in the head
        >>> report.restore()
    """
    # This is the first statement, so that the only local variables are the arguments.
    options = {name: value for name, value in locals().items() if name not in ("model", "unknown")}
    if not isinstance(model, (nn.Module, str)):
        raise TypeError(f"patch: model must be a torch.nn.Module or a model type, got {type(model).__name__}")
    request = make_request("patch", options | unknown)
    if isinstance(model, str):
        return patch_type(model, functools.partial(patch_instance, request=request))
    return patch_instance(model, request, stacklevel=3)


@dataclass(frozen=True)
class Request:
    """The checked options of a call of `patch`."""

    parts: list[str]
    memory: Memory
    fp8: FP8Settings | None
    loss: LossOptions
    graphs: bool
    pad_to: int | None


OPTIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(patch).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


def make_request(op: str, options: dict[str, Any]) -> Request:
    """Check some options of `patch`; the others have their defaults. The messages of errors begin with `op`."""
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"{op}: unknown option {name!r}; choose from {', '.join(OPTIONS)}")
    values = OPTIONS | options
    for name in (*PARTS, "graphs", "fp8_dw"):
        if not isinstance(values[name], bool):
            raise TypeError(f"{op}: {name} must be True or False, got {values[name]!r}")
    memory = check_memory(op, values["memory"])
    loss_options = LossOptions(**{name: values[name] for name in LOSS_OPTIONS})
    loss_options.check(op)
    if values["pad_to"] is not None:
        checks.size(op, "pad_to", values["pad_to"])
    fp8 = check_fp8(op, values["fp8"], values["fp8_dw"], memory)
    parts = [part for part in PARTS if values[part]]
    return Request(parts, memory, fp8, loss_options, values["graphs"], values["pad_to"])


def patch_instance(model: nn.Module, request: Request, stacklevel: int = 2) -> Report:
    """Find, decide and apply. Every error that this function raises on purpose comes before the first change."""
    search = Search(model, request.parts)
    search.decide()
    fp8_plan = plan_fp8(search.names, request.fp8, search.recipes)
    patched_modules = {module for module, recipe in search.installed.items() if recipe is not None}
    earlier_count = len(patched_modules - search.new_recipes.keys() - fp8_plan.changed.keys())
    has_modules_of_tigon = any(type(module).__module__.startswith("tigon.") for module in search.names)
    has_ops = bool(earlier_count or search.new_recipes or fp8_plan.changed) or has_modules_of_tigon
    # A level that only recomputes results of Tigon's ops has no effect in a model without such ops.
    level = request.memory if has_ops or request.memory.level == "checkpoint" else Memory()
    apply_level = plan_level(model, level)

    forget_graphs(model)
    report = Report(type(model).__name__, patched=weakref.ref(model))
    search.write(report)
    report.undo = search.install() + fp8_plan.apply(report)
    losses = {finding.module: request.loss for finding in search.findings if finding.part == "loss" and finding.recipe}
    names = search.names if "adapters" in request.parts and report else None
    report.undo += [watch_body(each, losses.get(each), names, report) for each in losses or [model]]
    report.undo.append(record_options(search.names, request.loss))
    find_resized_heads(search.installed)
    report.undo += apply_level()
    if request.graphs:
        report.undo += install_graphs(model, report)
    report.undo.append(add_notes(model, report.notes))
    report.undo.append(functools.partial(forget_graphs, model))
    if request.pad_to is not None or request.graphs:
        report.undo += pad_calls(model, Buckets(request.pad_to), report.notes)
    if earlier_count:
        report.notes.append(f"{earlier_count} places were patched already and stay as they are")
    elif not report and level == Memory() and request.pad_to is None and not request.graphs:
        result = "nothing was replaced, see the report for why" if report.entries else "nothing was recognised"
        report.notes.append(f"{result} (requested parts: {', '.join(request.parts)}); the model was not changed")
        warnings.warn(f"tigon.patch({report.model}): {result}", stacklevel=stacklevel)
    report.describe_level = functools.partial(describe_level, weakref.ref(model), level)
    return report


def _takes_the_arguments_of(patch: Callable[P, Report]) -> Callable[[Callable[..., Context]], Callable[P, Context]]:
    """Return a decorator that gives the signature of `patch` to a function that passes all its arguments to `patch`."""

    def decorate(function: Callable[..., Context]) -> Callable[P, Context]:
        signature = inspect.signature(patch).replace(return_annotation=Context)
        vars(function)["__signature__"] = signature
        return function

    return decorate


@_takes_the_arguments_of(patch)
@contextlib.contextmanager
def patched(*args: Any, **kwargs: Any) -> Iterator[Report]:
    """Patch a model for the length of a `with` block. The arguments are those of `patch`.

    With a model type, every model that is built in the block is patched, and stays patched after it.

    Returns:
        A context manager. It yields the report, and calls `report.restore()` at the end of the block.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> with tigon.patched("llama", loss=False):
        ...     model = LlamaForCausalLM(config)
        >>> tokens = torch.tensor([[1, 2, 3, 4]])
        >>> with tigon.patched(model) as report:
        ...     model(input_ids=tokens, labels=tokens).loss.backward()
        ...     print([(entry.part, entry.module) for entry in report.replaced])
        [('loss', 'LlamaForCausalLM')]
    """
    report = patch(*args, **kwargs)
    try:
        yield report
    finally:
        report.restore()

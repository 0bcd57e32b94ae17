"""The head of a language model in TRL's trainers: log-probabilities and the loss of fine-tuning without logits.

    log p_t = z_t - log sum_j exp(z_j)      z = cap(s (x W^T + b)) / tau     four products with gradients

The loss of supervised fine-tuning is a sum over all tokens, L = - c sum_t w_t log p_t, with w_t = 1 ("nll"), or with
the detached probability w_t = p_t of "dft" (Wu et al., arXiv:2508.05629). All upstream gradients are then known up to
the factor c in the forward pass, so three products are enough: `linear_cross_entropy` computes the gradients of the
sum, and `_SumOfLogProbs` reads c from the upstream gradient of the log-probabilities.

Shapes: B sequences of S tokens, hidden size H, vocabulary V.
"""

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tigon.hf.loss_options import recorded_options
from tigon.hf.padded_calls import leave_out_mask
from tigon.ops.head.computed_rows import find_rows
from tigon.ops.head.linear_cross_entropy import linear_cross_entropy
from tigon.ops.head.linear_log_probs import LogProbOutput, linear_log_probs
from tigon.ops.logits.valid_rows import ValidRows
from tigon.runtime.autograd import without_autocast, without_saved_tensor_hooks
from tigon.runtime.late_checks import check_later, raise_earlier
from tigon.runtime.stock import written_in

IGNORE_INDEX = -100
# `report.why` shows this reason for the loss of a model that a trainer of TRL trains.
REASON_TO_KEEP = "the trainer of TRL computes the loss by tigon.integrations.trl"
FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# The fields that `linear_cross_entropy` computes beside the loss.
LOSS_FIELDS = {"log_probs", "entropy", "is_top1"}
# The relative difference from which the upstream gradient counts as another loss.
TOLERANCE = 1e-4
NOT_A_SUM = (
    "tigon: SFTTrainer.compute_loss did not sum the log-probabilities over all tokens as TRL's own code does, but "
    "their gradients were computed for this sum; call tigon.integrations.trl.disable()"
)
ENTROPY_HAS_NO_GRADIENT = (
    "tigon: SFTTrainer.compute_loss differentiates the entropy, which TRL's own code does not do, so that its gradient "
    "was not computed; call tigon.integrations.trl.disable()"
)

SummedLoss = Literal["nll", "dft"]


class _TrainerLoss(threading.local):
    """The loss that a trainer computes from the log-probabilities of this thread's calls, if it is a known sum."""

    kind: SummedLoss | None = None


_trainer_loss = _TrainerLoss()


@contextlib.contextmanager
def loss_is_sum(kind: SummedLoss | None) -> Iterator[None]:
    """Declare that the caller's loss is proportional to the sum of the log-probabilities, weighted as `kind` says. None
    declares nothing: the log-probabilities of calls in the block have any upstream gradient."""
    outer_kind, _trainer_loss.kind = _trainer_loss.kind, kind
    try:
        yield
    finally:
        _trainer_loss.kind = outer_kind


class _SumOfLogProbs(torch.autograd.Function):
    """Return log-probabilities whose upstream gradient reaches the loss that they belong to, and their entropy. The
    loss of N valid tokens is L = -1/N sum_t w_t log p_t. The upstream gradient must be c w_t for each token, so dL =
    -cN. The mean, unlike a sum, keeps the gradients of fp16 models in the range of fp16. The entropy is no part of L.
    It is differentiable in TRL, so backward refuses its upstream gradient."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, log_probs: Tensor, entropy: Tensor, valid: Tensor, kind: SummedLoss
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(log_probs, valid)
        ctx.kind = kind
        return log_probs.clone(), entropy.clone()

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dlog_probs: Tensor | None, dentropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dentropy is not None:
            raise RuntimeError(ENTROPY_HAS_NO_GRADIENT)
        if dlog_probs is None:
            return (None,) * 5
        log_probs, valid = ctx.saved_tensors
        weights = (log_probs.exp() if ctx.kind == "dft" else torch.ones_like(log_probs)).masked_fill(~valid, 0.0)
        if weights.numel() == 0:
            return dlog_probs.new_zeros(()), None, None, None, None
        # The token with the largest weight has the most accurate quotient.
        largest = weights.argmax()
        weight = weights.flatten()[largest]
        factor = (dlog_probs.flatten()[largest] / weight).where(weight > 0, 0.0)
        is_sum = (dlog_probs - factor * weights).abs() <= TOLERANCE * (factor * weights).abs()
        # Infinite and NaN gradients, which a trainer with a loss scale expects, are passed on as they are.
        is_sum = (is_sum | ~valid | ~dlog_probs.isfinite()).all()
        factor = factor * check_later(is_sum, "RuntimeError", NOT_A_SUM).to(factor.dtype)
        return -factor * valid.sum(), None, None, None, None


class Head(NamedTuple):
    """The weight and the bias of a head, which are read without a call of the layer, as TRL does."""

    weight: Tensor
    bias: Tensor | None

    def whole(self) -> "Head":
        """Return the head, gathered if FSDP2 has sharded it."""
        weight, bias = self
        if not hasattr(weight, "placements"):
            return self
        return Head(weight.full_tensor(), None if bias is None else bias.full_tensor())  # type: ignore[attr-defined]


def gather(*parameters: Tensor | None) -> AbstractContextManager:
    """Return TRL's context in which the parameters of ZeRO-3 are whole. Without ZeRO-3 it does nothing."""
    from trl.trainer import utils

    return utils.maybe_gather_lm_head_ctx(*parameters)


def is_partitioned(parameter: Tensor | None) -> bool:
    """Return whether a parameter belongs to ZeRO-3, which empties it outside of the context that gathers it."""
    return parameter is not None and hasattr(parameter, "ds_status")


@contextlib.contextmanager
def gathered(head: Head) -> Iterator[None]:
    """Gather the parameters of a head for the block, and again when backward reads the tensors that the block saves."""

    def pack(t: Tensor) -> tuple[Tensor, bool]:
        # A tensor that is no leaf is detached: its graph may contain the node that saves it.
        return t if t.is_leaf else t.detach(), is_partitioned(t) and (t is head.weight or t is head.bias)

    def unpack(saved: tuple[Tensor, bool]) -> Tensor:
        t, was_partitioned = saved
        if not was_partitioned:
            return t
        with gather(t):
            # The copy outlives the context.
            return t.detach().clone()

    has_partitions = is_partitioned(head.weight) or is_partitioned(head.bias)
    hooks = saved_tensors_hooks(pack, unpack) if has_partitions else contextlib.nullcontext()
    with gather(head.weight, head.bias), hooks:
        yield


class LogitOptions(NamedTuple):
    """What happens to the logits before the softmax, in this order."""

    logit_scale: float
    softcap: float | None
    temperature: float


def _products_context(hidden: Tensor, weight: Tensor) -> tuple[AbstractContextManager, bool]:
    """Return the context in which products have the dtype of the hidden states, and whether it is fp32. Without
    autocast, TRL casts the weight to this dtype."""
    if hidden.dtype == weight.dtype or torch.is_autocast_enabled(hidden.device.type):
        return contextlib.nullcontext(), False
    if hidden.dtype in (torch.bfloat16, torch.float16):
        return torch.autocast(hidden.device.type, hidden.dtype), False
    return contextlib.nullcontext(), True


def _log_probs(
    hidden: Tensor, head: Head, targets: Tensor, options: LogitOptions, outputs: tuple[str, ...], fp32_products: bool,
    valid_rows: ValidRows | Literal[False] | None,
) -> dict[str, Tensor | None]:  # fmt: skip
    """Compute the requested fields of TRL's output by `linear_log_probs`. All are differentiable as there."""
    context, in_fp32 = _products_context(hidden, head.weight)
    with context:
        result = linear_log_probs(
            hidden, head.weight, targets,
            bias=head.bias, temperature=options.temperature, softcap=options.softcap, logit_scale=options.logit_scale,
            ignore_index=IGNORE_INDEX, fp32_products=fp32_products or in_fp32, valid_rows=valid_rows,
            return_entropy="entropy" in outputs, return_top1="is_top1" in outputs,
            return_mean_logits="mean_logits" in outputs, return_sum_sq_probs="log_sum_sq_probs" in outputs,
        )  # fmt: skip
    result = result if isinstance(result, LogProbOutput) else LogProbOutput(result)
    return {name: getattr(result, name) for name in FIELDS}


def _summed_log_probs(
    hidden: Tensor, head: Head, targets: Tensor, options: LogitOptions, kind: SummedLoss, is_shifted: bool,
    valid_rows: ValidRows | None, acc_dtype: torch.dtype | None,
) -> dict[str, Tensor | None]:  # fmt: skip
    """Compute TRL's outputs for a loss that is a sum of log-probabilities, with three products. Only the
    log-probabilities are differentiable. Without `is_shifted`, the last position of each sequence predicts nothing and
    is left out. `acc_dtype` is that of `linear_cross_entropy`."""
    if not torch.compiler.is_compiling():
        raise_earlier()
    scale, softcap, temperature = options
    context, _ = _products_context(hidden, head.weight)
    # The loss saves the gradient of the head's weight, of one GiB for a large vocabulary, and backward reads it first.
    # The hooks of TRL's `activation_offloading=True` would copy it to the host and back.
    with context, without_saved_tensor_hooks():
        result: Any = linear_cross_entropy(
            hidden, head.weight, targets,
            linear_bias=head.bias, reduction="mean", ignore_index=IGNORE_INDEX, token_scaling=kind == "dft",
            logit_scale=scale / temperature, softcap=None if softcap is None else softcap / temperature,
            valid_rows=valid_rows, acc_dtype=acc_dtype, return_log_probs=True, return_entropy=True,
            return_predicted_tokens=True,
        )  # fmt: skip
    cut = (lambda x: x) if is_shifted else (lambda x: x[:, :-1])
    log_probs, valid = cut(result.log_probs.detach()), cut(targets != IGNORE_INDEX)
    log_probs, entropy = _SumOfLogProbs.apply(result.loss, log_probs, cut(result.entropy.detach()), valid, kind)
    return dict.fromkeys(FIELDS) | {
        "log_probs": log_probs,
        "entropy": entropy,
        # Ignored tokens have a prediction of -1.
        "is_top1": cut(result.predicted_tokens == targets),
    }


class ChunkedLogProbs:
    """The function that takes the place of TRL's `_ChunkedLogProbFunction`, which TRL's own forward calls."""

    @staticmethod
    def apply(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk_size: int,
        final_logit_softcapping: float | None = None, logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("log_probs", "entropy"),
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Return log-probabilities, entropy, log sum of squared probabilities, mean logits and top-1 hits. Results that
        `outputs` does not name are None. `chunk_size`, the width of TRL's slabs of the vocabulary, has no effect."""
        options = LogitOptions(logit_scale, final_logit_softcapping, temperature)
        head = Head(weight, bias)
        with gathered(head):
            results = _log_probs(hidden, head, targets, options, outputs, False, False)
        return tuple(results[name] for name in FIELDS)


@dataclass(frozen=True)
class TrlForward:
    """The forward that TRL gave a model, and the options that it was built with."""

    function: Callable
    options: LogitOptions
    outputs: tuple[str, ...]
    fp32_products: bool
    text_config: Any
    backbone_attribute: str

    @staticmethod
    def read(method: types.MethodType) -> "TrlForward":
        """Read the options from the variables that TRL's function closes over."""
        function = method.__func__
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        variables = {name: cell.cell_contents for name, cell in cells}
        return TrlForward(
            function,
            LogitOptions(
                float(variables["logit_scale"]), variables["final_logit_softcapping"], float(variables["temperature"])
            ),
            variables["outputs"],
            variables["cast_lm_head_to_fp32"],
            variables["text_config"],
            variables["backbone_attr"],
        )


def has_trl_forward(module: nn.Module) -> bool:
    """Return whether the forward of a module is the one that TRL's `add_fused_lm_head` assigns."""
    function: Any = getattr(vars(module).get("forward"), "__func__", None)
    code = getattr(function, "__code__", None)
    return code is not None and code.co_name == "_fused_forward" and written_in(function).partition(".")[0] == "trl"


def has_tigon_forward(module: nn.Module) -> bool:
    """Return whether the forward of a module is the one that `install_forward` assigns, or accelerate's around it."""
    return getattr(vars(module).get("forward"), "reason_to_keep", None) == REASON_TO_KEEP


def install_forward(model: Any, is_enabled: Callable[[], bool]) -> None:
    """Replace the forward that TRL has just given a model. A call runs TRL's forward while `is_enabled()` is false,
    without `fused_lm_head=True`, and for the load-balancing loss of a mixture. The last one still calls
    `ChunkedLogProbs`."""
    trl_forward = TrlForward.read(model.forward)

    # The signature is that of the model's class, because `generate` compares its arguments with it.
    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        config = trl_forward.text_config
        uses_router = kwargs.get("output_router_logits", getattr(config, "output_router_logits", False))
        if not fused_lm_head or not is_enabled() or uses_router:
            return trl_forward.function(self, *args, fused_lm_head=fused_lm_head, **kwargs)
        return _fused_forward(self, trl_forward, args, kwargs)

    # The check of `tigon.patch` for a replaced forward counts this function as Tigon's own.
    vars(forward)["is_replacement"] = True
    vars(forward)["reason_to_keep"] = REASON_TO_KEEP
    model.forward = types.MethodType(forward, model)


def _fused_forward(model: Any, trl_forward: TrlForward, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run the body and the head of a model, and return TRL's output."""
    from trl.trainer.utils import FusedCausalLMOutput

    labels, targets = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
    num_items = kwargs.pop("num_items_in_batch", None)
    is_shifted = targets is not None
    if targets is None:
        # [B, S]: each label is at the position that predicts it.
        targets = F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:].contiguous()
    # The search for the valid rows runs on the device while the host launches the layers.
    sizes = (getattr(trl_forward.text_config, name, 1) for name in ("vocab_size", "hidden_size"))
    valid_rows = find_rows(targets, IGNORE_INDEX, functools.reduce(lambda a, b: a * b, sizes, targets.numel()))
    backbone = getattr(model, trl_forward.backbone_attribute)
    arguments = leave_out_mask(backbone, {**kwargs, "use_cache": False}, targets)
    hidden = backbone(*args, **arguments).last_hidden_state
    module = model.get_output_embeddings()
    device = module.weight.device
    if targets.device != device:
        # A model may be split over several devices.
        targets, valid_rows = targets.to(device), None
    hidden, head = hidden.to(device), Head(module.weight, module.bias).whole()
    # `linear_log_probs` sums dW in fp32 anyway.
    acc_dtype = recorded_options(model).acc_dtype
    results = _compute(hidden, head, targets, trl_forward, is_shifted, valid_rows, acc_dtype)
    log_probs, mask = results["log_probs"], targets != IGNORE_INDEX
    mask = mask if is_shifted else mask[:, :-1]
    assert log_probs is not None
    loss = -log_probs.sum() / (mask.sum().clamp(min=1) if num_items is None else num_items)
    return FusedCausalLMOutput(loss=loss, label_mask=mask, **results)


def _compute(
    hidden: Tensor, head: Head, targets: Tensor, trl_forward: TrlForward, is_shifted: bool,
    valid_rows: ValidRows | None, acc_dtype: torch.dtype | None,
) -> dict[str, Tensor | None]:  # fmt: skip
    """Compute the fields of TRL's output, by three products where the trainer's loss is a known sum."""
    kind, options, outputs = _trainer_loss.kind, trl_forward.options, trl_forward.outputs
    has_gradients = torch.is_grad_enabled() and (hidden.requires_grad or head.weight.requires_grad)
    is_summed = kind is not None and has_gradients and LOSS_FIELDS.issuperset(outputs)
    # The gradients of the sum are computed in the forward pass, so backward does not read the weight.
    if kind is not None and is_summed and not trl_forward.fp32_products:
        with gather(head.weight, head.bias):
            _, in_fp32 = _products_context(hidden, head.weight)
            if not in_fp32:
                return _summed_log_probs(hidden, head, targets, options, kind, is_shifted, valid_rows, acc_dtype)
    with gathered(head):
        results = _log_probs(hidden, head, targets, options, outputs, trl_forward.fp32_products, valid_rows)
    return results if is_shifted else {name: None if x is None else x[:, :-1] for name, x in results.items()}

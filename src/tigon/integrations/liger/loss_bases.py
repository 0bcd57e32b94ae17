"""The base classes of `liger_kernel.chunked_loss`, which compute a subclass's own loss function, on Tigon's ops.

A subclass calls `forward` of its base by name: `super().forward(cls=cls, ctx=ctx, ...)`. The forward computes the
gradients too, as Liger's does, and `backward` scales them. Liger sums the losses and the values without dimensions over
chunks of `chunk_size` sequences, so a subclass's function is called with these chunks here too.

Shapes: N sequences, of which the first half are the chosen ones if they are pairs, L tokens each, T tokens, H features,
V vocabulary.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.integrations.liger.pairs import pair_loss, reference_log_probs, sum_logits
from tigon.integrations.liger.policy import compute_dapo_normalizer, ratio_of_tokens
from tigon.losses import sequence_log_probs
from tigon.losses.sequences import half
from tigon.ops.head.linear_log_probs import linear_log_probs
from tigon.ops.head.linear_loss import linear_loss

# More arguments than any `forward` of a subclass has. torch ignores surplus gradients that are None.
ARGUMENTS = 48


class _LossBase(torch.autograd.Function):
    """What the bases share: gradients in the forward, which `backward` returns at the places of their arguments."""

    # the places of the hidden states, the weight and the bias among the arguments of `forward`
    places: tuple[int, int, int]

    @staticmethod
    def backward(ctx: Any, *grad_output: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients. Subclasses pass the upstream gradients of all outputs, also as one tuple."""
        upstream: Any = grad_output
        while isinstance(upstream, tuple):
            upstream = upstream[0]
        gradients: list[Tensor | None] = [None] * ARGUMENTS
        for place, gradient in zip(ctx.places, ctx.saved_tensors, strict=True):
            gradients[place] = None if gradient is None else (gradient * upstream).to(gradient.dtype)
        return tuple(gradients)


def _with_gradients(
    cls: type[_LossBase], ctx: Any, tensors: tuple[Tensor | None, ...], compute: Callable[..., tuple[Tensor, Any]]
) -> tuple[Tensor, Any]:
    """Return the loss and the further outputs of `compute(*tensors)`, and save the gradients of the tensors."""
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in tensors]
        loss, outputs = compute(*leaves)
        needed = [x for x in leaves if x is not None and x.requires_grad]
        gradients = iter(torch.autograd.grad(loss, needed, allow_unused=True) if needed else ())
    ctx.places = cls.places
    ctx.save_for_backward(*(next(gradients) if x is not None and x.requires_grad else None for x in leaves))
    return loss.detach(), outputs


def _chunks(count: int, chunk_size: int) -> Iterator[slice]:
    """Yield the parts into which `torch.chunk` cuts `count` items, in Liger's number of parts."""
    size = -(-count // max(1, count // chunk_size))
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _sum_of_chunks(results: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return the sum of the losses. Further values are summed too, or joined if they have dimensions."""
    rows = [(x, ()) if isinstance(x, Tensor) else (x[0], _flat(x[1:])) for x in results]
    values = [
        torch.cat([v.detach() for v in column]) if column[0].dim() else torch.stack([v.detach() for v in column]).sum()
        for column in zip(*(row[1] for row in rows), strict=True)
    ]
    return torch.stack([row[0].reshape(()) for row in rows]).sum(), *values


def _flat(values: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return the further outputs of a loss function, which may be one list of them."""
    return tuple(values[0]) if len(values) == 1 and isinstance(values[0], (list, tuple)) else tuple(values)


def _missing(cls: str, name: str) -> NotImplementedError:
    return NotImplementedError(f"{cls}: {name} must be defined by the subclass; tigon.losses has Tigon's own losses")


class LigerFusedLinearPreferenceBase(_LossBase):
    """The base of losses of pairs: a subclass defines `preference_loss_fn`."""

    places = (0, 1, 3)

    @staticmethod
    def preference_loss_fn(*args: Any, **kwargs: Any) -> Any:
        """Return the loss of chosen and rejected log-probabilities, or a tuple of it and further values."""
        raise _missing("LigerFusedLinearPreferenceBase", "preference_loss_fn")

    @staticmethod
    def forward(
        cls: Any, ctx: Any, _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
        chunk_size: int = 1, ignore_index: int = -100, alpha: float = 1.0, beta: float = 0.1,
        compute_nll_loss: bool = True, nll_target: Tensor | None = None, compiled: bool = True,
        use_ref_model: bool = False, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, average_log_prob: bool = True, **loss_kwargs: Any,
    ) -> tuple[Tensor, tuple]:  # fmt: skip
        """Return the loss, and the log-probabilities, mean logits, NLL and further values."""
        reference = None
        if use_ref_model:
            reference = reference_log_probs(
                cls.__name__, ref_input, ref_weight, ref_bias, target, ignore_index, average_log_prob
            )

        mask = target != ignore_index

        def loss(log_probs: Tensor) -> tuple[Tensor, ...]:
            chosen, rejected = half(sequence_log_probs(log_probs, mask, average=average_log_prob))
            references = (None, None) if reference is None else half(reference)
            results = []
            for part in _chunks(len(chosen), chunk_size):
                names = ("ref_chosen_logps", "ref_rejected_logps")
                named = {n: r[part] for n, r in zip(names, references, strict=True) if r is not None}
                results.append(
                    cls.preference_loss_fn(chosen[part], rejected[part], target, beta=beta, **loss_kwargs, **named)
                )
            return _sum_of_chunks(results)

        def compute(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple]:
            total, (*metrics, _, values) = pair_loss(
                cls.__name__, hidden, weight, target, bias, loss, ignore_index=ignore_index, averages=average_log_prob,
                beta=beta, reference=reference, nll_target=nll_target, alpha=alpha, with_nll=compute_nll_loss,
                adds_up=chunk_size == 1,
            )  # fmt: skip
            return total, (*metrics, *values)

        return _with_gradients(cls, ctx, (_input, weight, bias), compute)


class LigerFusedLinearUnpairedPreferenceBase(_LossBase):
    """The base of losses of labelled sequences: a subclass defines `preference_loss_fn`."""

    places = (0, 1, 4)

    @staticmethod
    def preference_loss_fn(*args: Any, **kwargs: Any) -> Any:
        """Return the loss of log-probabilities and their labels, or a tuple of it and further values."""
        raise _missing("LigerFusedLinearUnpairedPreferenceBase", "preference_loss_fn")

    @staticmethod
    def forward(
        cls: Any, ctx: Any, _input: Tensor, weight: Tensor, target: Tensor, preference_labels: Tensor,
        bias: Tensor | None = None, chunk_size: int = 1, ignore_index: int = -100, compiled: bool = True,
        use_ref_model: bool = False, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, average_log_prob: bool = False, **loss_kwargs: Any,
    ) -> tuple[Tensor, tuple]:  # fmt: skip
        """Return the loss, and the sums of log-probabilities, logits and further values of both kinds of sequences."""
        reference = None
        if use_ref_model:
            reference = reference_log_probs(
                cls.__name__, ref_input, ref_weight, ref_bias, target, ignore_index, average_log_prob
            )

        mask, labels = target != ignore_index, preference_labels

        def loss_of_batch(log_probs: Tensor) -> tuple[Tensor, tuple]:
            values = sequence_log_probs(log_probs, mask, average=average_log_prob)
            results = []
            for part in _chunks(len(values), chunk_size):
                named = {} if reference is None else {"ref_log_prob_chunk": reference[part]}
                results.append(cls.preference_loss_fn(values[part], labels[part], target, **loss_kwargs, **named))
            total, *further = _sum_of_chunks(results)
            return total, (values.detach(), *further)

        def compute(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple]:
            total, (values, *further) = linear_loss(
                hidden, weight, target, loss_of_batch, group="sequence" if chunk_size == 1 else "batch", bias=bias,
                ignore_index=ignore_index,
            )  # fmt: skip
            kinds = preference_labels.bool(), ~preference_labels.bool()
            return total, (
                *((values * kind).sum() for kind in kinds),
                *(sum_logits(hidden.detach()[kind], weight, bias) for kind in kinds), *further,
            )  # fmt: skip

        return _with_gradients(cls, ctx, (_input, weight, bias), compute)


class _ChunkedSelectiveLogProbFunction(torch.autograd.Function):
    """Log-probabilities [T] of the targets by `tigon.linear_log_probs`. Backward calls Liger's function by its name."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, temperature: float,
        vocab_chunk_size: int,
    ) -> Tensor:  # fmt: skip
        """Return the log-probabilities. `vocab_chunk_size` has no effect."""
        ctx.save_for_backward(hidden, weight, targets, bias)
        ctx.temperature, ctx.vocab_chunk_size = temperature, vocab_chunk_size
        return LigerFusedLinearPPOBase.chunk_forward(hidden, weight, targets, bias, temperature)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the hidden states, and those that are needed of the weight and the bias."""
        hidden, weight, targets, bias = ctx.saved_tensors
        # A program may have put a function of its own into Liger's module.
        functions = sys.modules.get("liger_kernel.chunked_loss.fused_linear_ppo") or sys.modules[__name__]
        dhidden, dweight, dbias = functions._selective_logprob_backward(
            hidden=hidden, weight=weight, targets=targets, bias=bias, log_z=None, grad_logprobs=grad_output[0],
            temperature=ctx.temperature, vocab_chunk_size=ctx.vocab_chunk_size,
            compute_grad_weight=ctx.needs_input_grad[1], compute_grad_bias=ctx.needs_input_grad[3],
        )  # fmt: skip
        return dhidden, dweight, None, dbias, None, None


def _selective_logprob_backward(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, log_z: Tensor | None, grad_logprobs: Tensor,
    temperature: float, vocab_chunk_size: int, compute_grad_weight: bool = True, compute_grad_bias: bool = True,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of the hidden states, the weight and the bias; None for those that are not computed.

    `log_z` and `vocab_chunk_size` have no effect: `tigon.linear_log_probs` computes the log-probabilities again.
    """
    needed = True, compute_grad_weight, compute_grad_bias and bias is not None
    with torch.enable_grad():
        leaves = [
            None if x is None else x.detach().requires_grad_(is_needed)
            for x, is_needed in zip((hidden, weight, bias), needed, strict=True)
        ]
        log_probs = LigerFusedLinearPPOBase.chunk_forward(
            cast(Tensor, leaves[0]), cast(Tensor, leaves[1]), targets, leaves[2], temperature
        )
        computed = [x for x in leaves if x is not None and x.requires_grad]
        gradients = iter(torch.autograd.grad(log_probs, computed, grad_logprobs))
    return tuple(next(gradients) if is_needed else None for is_needed in needed)


class LigerFusedLinearPPOBase(_LossBase):
    """The base of losses of policies: a subclass defines `ppo_loss_fn`."""

    places = (0, 1, 5)
    _compute_dapo_normalizer = staticmethod(compute_dapo_normalizer)

    @staticmethod
    def ppo_loss_fn(*args: Any, **kwargs: Any) -> Any:
        """Return the loss of log-probabilities [N, L], and a list of metrics."""
        raise _missing("LigerFusedLinearPPOBase", "ppo_loss_fn")

    @staticmethod
    def chunk_forward(
        input_chunk: Tensor, weight: Tensor, selected_token_ids: Tensor, bias: Tensor | None = None,
        temperature: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """Return the log-probabilities [N, L] of the tokens by `tigon.linear_log_probs`."""
        log_probs = linear_log_probs(input_chunk, weight, selected_token_ids, bias=bias, temperature=temperature)
        assert isinstance(log_probs, Tensor)
        return log_probs

    @staticmethod
    def forward(
        cls: Any, ctx: Any, _input: Tensor, weight: Tensor, selected_token_ids: Tensor, attention_mask: Tensor,
        advantages: Tensor, bias: Tensor | None = None, ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, epsilon_low: float = 0.2, epsilon_high: float = 0.2, beta: float = 0.04,
        loss_type: str = "dapo", max_completion_length: int | None = None, importance_sampling_level: str = "token",
        temperature: float = 1.0, compiled: bool = True, use_ref_model: bool = False, chunk_size: int = 1,
        sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, vllm_is_ratio: Tensor | None = None,
        delta: float | None = None, use_bias_correction_kl: bool = False, vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple]:  # fmt: skip
        """Return the loss and the metrics of `ppo_loss_fn`, which gets all options of this function by name."""
        options = {
            "epsilon_low": epsilon_low, "epsilon_high": epsilon_high, "beta": beta, "loss_type": loss_type,
            "max_completion_length": max_completion_length, "importance_sampling_level": importance_sampling_level,
            "sapo_temperature_pos": sapo_temperature_pos, "sapo_temperature_neg": sapo_temperature_neg,
            "delta": delta, "use_bias_correction_kl": use_bias_correction_kl, "vespo_k_pos": vespo_k_pos,
            "vespo_lambda_pos": vespo_lambda_pos, "vespo_k_neg": vespo_k_neg, "vespo_lambda_neg": vespo_lambda_neg,
            "num_items_in_batch": num_items_in_batch,
        }  # fmt: skip
        ref = ref_per_token_logps if use_ref_model else None
        if use_ref_model and ref is None:
            if ref_input is None or ref_weight is None:
                raise ValueError(
                    f"{cls.__name__}: use_ref_model=True needs ref_per_token_logps, or ref_input and ref_weight"
                )
            with torch.no_grad():
                ref = cls.chunk_forward(ref_input, ref_weight, selected_token_ids, ref_bias, temperature)
        ratio = vllm_is_ratio
        if ratio is not None:
            ratio_of_tokens(cls.__name__, ratio, attention_mask != 0, loss_type)
            ratio = ratio[:, None] if ratio.dim() == 1 else ratio

        tensors = {
            "attention_mask": attention_mask, "advantages": advantages, "vllm_is_ratio": ratio,
            "ref_per_token_logps": None if ref is None else ref.float(),
            "old_per_token_logps": None if old_per_token_logps is None else old_per_token_logps.float(),
        }  # fmt: skip

        def loss_of_batch(log_probs: Tensor) -> tuple[Tensor, tuple]:
            results = []
            for part in _chunks(len(log_probs), chunk_size):
                named = {name: None if x is None else x[part] for name, x in tensors.items()}
                results.append(
                    cls.ppo_loss_fn(
                        per_token_logps=log_probs[part], full_attention_mask=attention_mask, **named, **options
                    )
                )
            total, *metrics = _sum_of_chunks(results)
            return total, tuple(metrics)

        def compute(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple]:
            # The function of a subclass decides which tokens count, so all of them have log-probabilities.
            return linear_loss(
                hidden, weight, selected_token_ids, loss_of_batch, group="sequence" if chunk_size == 1 else "batch",
                bias=bias, temperature=temperature,
            )  # fmt: skip

        return _with_gradients(cls, ctx, (_input, weight, bias), compute)


class LigerFusedLinearDistillationBase(_LossBase):
    """The base of losses of student's and teacher's logits: a subclass defines `distillation_loss_fn`."""

    places = (0, 1, 5)

    @staticmethod
    def distillation_loss_fn(*args: Any, **kwargs: Any) -> Any:
        """Return the sum over the tokens of the loss of student's and teacher's logits [T, V]."""
        raise _missing("LigerFusedLinearDistillationBase", "distillation_loss_fn")

    @staticmethod
    def forward(
        cls: Any, ctx: Any, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor,
        teacher_weight: Tensor, target: Tensor, student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
        chunk_size: int = 1024, ignore_index: int = -100, weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5,
        beta: float = 0.5, compute_ce_loss: bool = True, temperature: float = 1.0, compiled: bool = True,
        return_soft_hard_loss: bool = False, **loss_kwargs: Any,
    ) -> Any:  # fmt: skip
        """Return the loss, or the loss, the divergence and the cross entropy, each a mean over the valid tokens."""
        with_hard = compute_ce_loss and (weight_hard_loss != 0 or return_soft_hard_loss)
        count = (target != ignore_index).sum().clamp(min=1)
        tensors = student_input, student_weight, student_bias
        gradients = [None if x is None or not x.requires_grad else torch.zeros_like(x) for x in tensors]
        losses = torch.zeros(3, dtype=torch.float32, device=student_input.device)
        for part in _chunks(len(student_input), chunk_size):
            with torch.no_grad():
                teacher = F.linear(teacher_input[part], teacher_weight, teacher_bias) / temperature
            with torch.enable_grad():
                chunk = student_input[part], student_weight, student_bias
                leaves = [
                    None if x is None else x.detach().requires_grad_(total is not None)
                    for x, total in zip(chunk, gradients, strict=True)
                ]
                hidden, weight, bias = leaves
                assert hidden is not None
                assert weight is not None
                logits = F.linear(hidden, weight, bias)
                student = logits / temperature
                # A larger, padded vocabulary of the teacher has logits of zero in the student.
                student = F.pad(student, (0, max(0, teacher.shape[-1] - student.shape[-1])))
                soft = (
                    cls.distillation_loss_fn(
                        student, teacher, target=target[part], ignore_index=ignore_index, beta=beta, **loss_kwargs
                    )
                    / count
                )
                hard = soft.new_zeros(())
                if with_hard:
                    hard = F.cross_entropy(
                        logits.float(), target[part], ignore_index=ignore_index, reduction="sum"
                    ) / count  # fmt: skip
                loss = weight_hard_loss * hard + weight_soft_loss * soft
                needed = [x for x in leaves if x is not None and x.requires_grad]
                parts = iter(torch.autograd.grad(loss, needed, allow_unused=True) if needed else ())
            for x, total, rows in zip(leaves, gradients, (part, slice(None), slice(None)), strict=True):
                gradient = next(parts) if x is not None and x.requires_grad else None
                if total is not None and gradient is not None:
                    total[rows] += gradient
            losses += torch.stack([loss, soft, hard]).detach().float()
        ctx.places = cls.places
        ctx.save_for_backward(*gradients)
        return tuple(losses.unbind()) if return_soft_hard_loss else losses[0]

"""The base classes of `liger_kernel.chunked_loss`, which compute a subclass's own loss function, on Tigon's ops.

A subclass calls `forward` of its base by name: `super().forward(cls=cls, ctx=ctx, ...)`. The forward computes the
gradients too, as Liger's does, and `backward` scales them. Liger sums the losses and the values without dimensions over
chunks of `chunk_size` sequences, so a subclass's function is called with these chunks here too.

Shapes: N sequences, of which the first half are the chosen ones if they are pairs, L tokens each, T tokens, H features,
V vocabulary.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.integrations.liger.pairs import pair_loss, reference_log_probs
from tigon.integrations.liger.policy import compute_dapo_normalizer, ratio_of_tokens
from tigon.losses import sequence_log_probs
from tigon.losses.sequences import half
from tigon.ops.head.linear_log_probs import linear_log_probs
from tigon.ops.head.linear_loss import linear_loss

# More arguments than any `forward` of a subclass has. torch ignores surplus gradients that are None.
ARGUMENTS = 48

Tensors = Sequence[Tensor | None]


class _LossBase(torch.autograd.Function):
    """What the bases share: gradients in the forward, which `backward` returns at the places of their arguments."""

    # The parameters of `forward` after `cls` and `ctx`, and the names of those that get gradients.
    signature: inspect.Signature
    differentiable = ("_input", "weight", "bias")
    # The name of the function that a subclass defines.
    loss_function: str

    @staticmethod
    def forward(cls: Any, ctx: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss and the further outputs for the arguments of `signature`, and save the gradients."""
        bound = cls.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = SimpleNamespace(**bound.arguments)
        if not hasattr(cls, cls.loss_function):
            base = next(c.__name__ for c in cls.__mro__ if "loss_function" in vars(c))
            raise NotImplementedError(
                f"{base}: {cls.loss_function} must be defined by the subclass; tigon.losses has Tigon's own losses"
            )
        outputs, gradients = cls.compute(arguments, [getattr(arguments, name) for name in cls.differentiable])
        names = list(cls.signature.parameters)
        ctx.places = [names.index(name) for name in cls.differentiable]
        ctx.save_for_backward(*gradients)
        return outputs

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


def _signature(parameters: str) -> inspect.Signature:
    return inspect.signature(eval(f"lambda {parameters}: None"))


def _differentiate(
    tensors: Tensors, compute: Callable[..., tuple[Tensor, Any]], rows: slice = slice(None)
) -> tuple[Any, list[Tensor | None]]:
    """Return the loss and the further outputs of `compute(*tensors)`, and the gradients of the tensors. `rows` selects
    a part of the first tensor, the hidden states."""
    parts = (rows, slice(None), slice(None))
    with torch.enable_grad():
        leaves = [
            None if x is None else x.detach()[part].requires_grad_(x.requires_grad)
            for x, part in zip(tensors, parts, strict=True)
        ]
        loss, outputs = compute(*leaves)
        needed = [x for x in leaves if x is not None and x.requires_grad]
        gradients = iter(torch.autograd.grad(loss, needed, allow_unused=True) if needed else ())
    leaf_gradients = [next(gradients) if x is not None and x.requires_grad else None for x in leaves]
    return (loss.detach(), outputs), leaf_gradients


def _chunks(count: int, chunk_size: int) -> Iterator[slice]:
    """Yield the parts into which `torch.chunk` cuts `count` items, in Liger's number of parts."""
    size = -(-count // max(1, count // chunk_size))
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _sum_of_chunks(results: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return the sum of the losses. Further values are summed too, or joined if they have dimensions."""
    # The further outputs may be one list of them.
    is_list = lambda x: len(x) == 2 and isinstance(x[1], (list, tuple))
    rows = [(x, ()) if isinstance(x, Tensor) else (x[0], tuple(x[1] if is_list(x) else x[1:])) for x in results]
    values = [
        torch.cat([v.detach() for v in column]) if column[0].dim() else torch.stack([v.detach() for v in column]).sum()
        for column in zip(*(row[1] for row in rows), strict=True)
    ]
    return torch.stack([row[0].reshape(()) for row in rows]).sum(), *values


def _reference(name: str, a: SimpleNamespace) -> Tensor | None:
    """Return the log-probabilities [N] of the reference model, if the loss has one."""
    if not a.use_ref_model:
        return None
    model = a.ref_input, a.ref_weight, a.ref_bias
    return reference_log_probs(name, model, a.target, a.ignore_index, a.average_log_prob)


class LigerFusedLinearPreferenceBase(_LossBase):
    """The base of losses of pairs: a subclass defines `preference_loss_fn`. Its forward returns the loss, and the
    log-probabilities, mean logits, NLL and further values."""

    loss_function = "preference_loss_fn"
    signature = _signature(
        "_input, weight, target, bias=None, chunk_size=1, ignore_index=-100, alpha=1.0, beta=0.1, "
        "compute_nll_loss=True, nll_target=None, compiled=True, use_ref_model=False, ref_input=None, ref_weight=None, "
        "ref_bias=None, average_log_prob=True, **loss_kwargs"
    )

    @classmethod
    def compute(cls, a: SimpleNamespace, tensors: Tensors) -> tuple[Any, list[Tensor | None]]:
        reference, mask = _reference(cls.__name__, a), a.target != a.ignore_index
        names = ("ref_chosen_logps", "ref_rejected_logps")

        def loss(log_probs: Tensor) -> tuple[Tensor, ...]:
            chosen, rejected = half(sequence_log_probs(log_probs, mask, average=a.average_log_prob))
            references = {} if reference is None else dict(zip(names, half(reference), strict=True))
            results = []
            for part in _chunks(len(chosen), a.chunk_size):
                named = {name: values[part] for name, values in references.items()}
                results.append(
                    cls.preference_loss_fn(  # type: ignore[attr-defined]
                        chosen[part], rejected[part], a.target, beta=a.beta, **a.loss_kwargs, **named
                    )
                )
            return _sum_of_chunks(results)

        def compute(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple]:
            total, (*metrics, _, values) = pair_loss(
                cls.__name__, hidden, weight, a.target, bias, loss, ignore_index=a.ignore_index,
                averages=a.average_log_prob, beta=a.beta, reference=reference, nll_target=a.nll_target, alpha=a.alpha,
                with_nll=a.compute_nll_loss, adds_up=a.chunk_size == 1,
            )  # fmt: skip
            return total, (*metrics, *values)

        return _differentiate(tensors, compute)


class LigerFusedLinearPPOBase(_LossBase):
    """The base of losses of policies: a subclass defines `ppo_loss_fn`, which gets all options by name. Its forward
    returns the loss and the metrics of `ppo_loss_fn`."""

    loss_function = "ppo_loss_fn"
    signature = _signature(
        "_input, weight, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None, "
        "old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, epsilon_low=0.2, epsilon_high=0.2, "
        "beta=0.04, loss_type='dapo', max_completion_length=None, importance_sampling_level='token', temperature=1.0, "
        "compiled=True, use_ref_model=False, chunk_size=1, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, "
        "vllm_is_ratio=None, delta=None, use_bias_correction_kl=False, vespo_k_pos=2.0, vespo_lambda_pos=3.0, "
        "vespo_k_neg=3.0, vespo_lambda_neg=2.0, num_items_in_batch=None"
    )
    options = (
        "epsilon_low", "epsilon_high", "beta", "loss_type", "max_completion_length", "importance_sampling_level",
        "sapo_temperature_pos", "sapo_temperature_neg", "delta", "use_bias_correction_kl", "vespo_k_pos",
        "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "num_items_in_batch",
    )  # fmt: skip
    _compute_dapo_normalizer = staticmethod(compute_dapo_normalizer)

    @staticmethod
    def chunk_forward(
        input_chunk: Tensor, weight: Tensor, selected_token_ids: Tensor, bias: Tensor | None = None,
        temperature: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """Return the log-probabilities [N, L] of the tokens by `tigon.linear_log_probs`."""
        log_probs = linear_log_probs(input_chunk, weight, selected_token_ids, bias=bias, temperature=temperature)
        assert isinstance(log_probs, Tensor)
        return log_probs

    @classmethod
    def _reference_log_probs(cls, a: SimpleNamespace) -> Tensor | None:
        if not a.use_ref_model or a.ref_per_token_logps is not None:
            return a.ref_per_token_logps if a.use_ref_model else None
        if a.ref_input is None or a.ref_weight is None:
            raise ValueError(
                f"{cls.__name__}: use_ref_model=True needs ref_per_token_logps, or ref_input and ref_weight"
            )
        with torch.no_grad():
            return cls.chunk_forward(a.ref_input, a.ref_weight, a.selected_token_ids, a.ref_bias, a.temperature)

    @classmethod
    def compute(cls, a: SimpleNamespace, tensors: Tensors) -> tuple[Any, list[Tensor | None]]:
        ref, old, ratio = cls._reference_log_probs(a), a.old_per_token_logps, a.vllm_is_ratio
        if ratio is not None:
            ratio_of_tokens(cls.__name__, ratio, a.attention_mask != 0, a.loss_type)
            ratio = ratio[:, None] if ratio.dim() == 1 else ratio
        of_sequences = {
            "attention_mask": a.attention_mask, "advantages": a.advantages, "vllm_is_ratio": ratio,
            "ref_per_token_logps": None if ref is None else ref.float(),
            "old_per_token_logps": None if old is None else old.float(),
        }  # fmt: skip
        options = {name: getattr(a, name) for name in cls.options} | {"full_attention_mask": a.attention_mask}

        def loss_of_batch(log_probs: Tensor) -> tuple[Tensor, tuple]:
            results = []
            for part in _chunks(len(log_probs), a.chunk_size):
                named = {name: None if x is None else x[part] for name, x in of_sequences.items()}
                results.append(cls.ppo_loss_fn(per_token_logps=log_probs[part], **named, **options))  # type: ignore[attr-defined]
            total, *metrics = _sum_of_chunks(results)
            return total, tuple(metrics)

        def compute(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple]:
            # The function of a subclass decides which tokens count, so all of them have log-probabilities.
            return linear_loss(
                hidden, weight, a.selected_token_ids, loss_of_batch, bias=bias, temperature=a.temperature,
                group="sequence" if a.chunk_size == 1 else "batch",
            )  # fmt: skip

        return _differentiate(tensors, compute)


class LigerFusedLinearDistillationBase(_LossBase):
    """The base of losses of student's and teacher's logits: a subclass defines `distillation_loss_fn`. The function
    returns the sum over the tokens of the loss of student's and teacher's logits [T, V]. The forward returns the loss,
    or the loss, the divergence and the cross entropy, each a mean over the valid tokens."""

    loss_function = "distillation_loss_fn"
    differentiable = ("student_input", "student_weight", "student_bias")
    signature = _signature(
        "student_input, student_weight, teacher_input, teacher_weight, target, student_bias=None, teacher_bias=None, "
        "chunk_size=1024, ignore_index=-100, weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, "
        "compute_ce_loss=True, temperature=1.0, compiled=True, return_soft_hard_loss=False, **loss_kwargs"
    )

    @classmethod
    def compute(cls, a: SimpleNamespace, tensors: Tensors) -> tuple[Any, list[Tensor | None]]:
        with_hard = a.compute_ce_loss and (a.weight_hard_loss != 0 or a.return_soft_hard_loss)
        count = (a.target != a.ignore_index).sum().clamp(min=1)
        gradients = [None if x is None or not x.requires_grad else torch.zeros_like(x) for x in tensors]
        losses = torch.zeros(3, dtype=torch.float32, device=a.student_input.device)
        for part in _chunks(len(a.student_input), a.chunk_size):
            target = a.target[part]
            with torch.no_grad():
                teacher = F.linear(a.teacher_input[part], a.teacher_weight, a.teacher_bias) / a.temperature

            def compute(
                hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor = target, teacher: Tensor = teacher
            ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
                logits = F.linear(hidden, weight, bias)
                # A larger, padded vocabulary of the teacher has logits of zero in the student.
                student = F.pad(logits / a.temperature, (0, max(0, teacher.shape[-1] - logits.shape[-1])))
                options = {"target": target, "ignore_index": a.ignore_index, "beta": a.beta}
                soft = cls.distillation_loss_fn(student, teacher, **options, **a.loss_kwargs) / count  # type: ignore[attr-defined]
                hard = soft.new_zeros(())
                if with_hard:
                    hard = F.cross_entropy(logits.float(), target, ignore_index=a.ignore_index, reduction="sum") / count
                return a.weight_hard_loss * hard + a.weight_soft_loss * soft, (soft.detach(), hard.detach())

            (loss, terms), chunk_gradients = _differentiate(tensors, compute, part)
            rows = (part, slice(None), slice(None))
            for total, gradient, places in zip(gradients, chunk_gradients, rows, strict=True):
                if total is not None and gradient is not None:
                    total[places] += gradient
            losses += torch.stack([loss, *terms]).float()
        return (tuple(losses.unbind()) if a.return_soft_hard_loss else losses[0]), gradients

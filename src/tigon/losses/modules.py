"""The losses of this package as modules that take hidden states and the weight of a head, and never hold the logits.

Each module passes the log-probabilities of the head to the function of the same loss by `tigon.linear_loss`. A loss
that is the mean (or the sum) over its sequences or pairs takes three products with the head, and every other loss four.
The docstring of each module says which options need four. Packed sequences (`cu_seqlens`) need four products too,
unless the logits of the whole batch fit into the budget.

A reference model takes one more product: pass its hidden states, or its log-probabilities if you have them.

Shapes: N sequences, L tokens of a padded row, T packed tokens, H hidden, V vocabulary. "Tokens" in a shape means
[N, L], or [T] with `cu_seqlens`.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tigon.losses.kto import kto_loss
from tigon.losses.policy import grpo_loss, ppo_loss, rloo_loss
from tigon.losses.preference import dpo_loss
from tigon.losses.reference_free import cpo_loss, orpo_loss, simpo_loss
from tigon.losses.sequences import Metrics
from tigon.ops.head.linear_log_probs import LogProbOutput, linear_log_probs
from tigon.ops.head.linear_loss import linear_loss
from tigon.runtime import checks

__all__ = [
    "CPOLoss",
    "DPOLoss",
    "GRPOLoss",
    "KTOLoss",
    "ORPOLoss",
    "PPOLoss",
    "RLOOLoss",
    "SimPOLoss",
]

# The options of the head, which each constructor takes.
_HEAD_OPTIONS = ("temperature", "softcap", "logit_scale", "ignore_index")
_SUM_OPTIONS = ("max_logits_mib", "acc_dtype")
# The keyword arguments of the functions that are tensors, so that each call has others.
_TENSORS = (
    "log_sum_sq_probs", "ref_sequence_log_probs", "nll_mask", "entropy", "top_entropy_threshold",
    "importance_sampling_ratio", "sampling_log_probs", "num_items_in_batch", "cu_seqlens",
)  # fmt: skip


class _Division(NamedTuple):
    """How the loss of a batch follows from the losses of its parts: the arguments of `linear_loss`."""

    group: Literal["sequence", "pair", "batch"]
    reduction: Literal["mean", "sum"] = "mean"


WHOLE = _Division("batch")


class _HeadLoss(nn.Module):
    """A loss of log-probabilities, with its options and those of the head."""

    # A function of log-probabilities, of `mask` and of further tensors by name.
    function: Callable[..., tuple[Tensor, Metrics]]

    def __init__(self, **options: Any) -> None:
        super().__init__()
        name = type(self).__name__
        parameters = inspect.signature(self.function).parameters.values()
        keywords = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.name not in _TENSORS]
        for option in options:
            checks.choice(name, "an option", option, (*_HEAD_OPTIONS, *_SUM_OPTIONS, *keywords))
        self.head_options = {key: options.pop(key) for key in _HEAD_OPTIONS if key in options}
        self.sum_options = {key: options.pop(key) for key in _SUM_OPTIONS if key in options}
        defaults = {each.name: each.default for each in parameters if each.name in keywords}
        self.options = defaults | options

    def extra_repr(self) -> str:
        options = self.head_options | self.sum_options | self.options
        return ", ".join(f"{key}={value!r}" for key, value in options.items())

    def _targets(self, targets: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return targets in which tokens that do not count are ignored, and the mask of the tokens that count."""
        name = type(self).__name__
        checks.tensor(name, targets=targets)
        ignore_index = checks.ignore_index(name, self.head_options.get("ignore_index", -100))
        if mask is None:
            return targets, targets != ignore_index
        checks.tensor(name, mask=mask)
        if mask.dtype != torch.bool:
            raise TypeError(f"{name}: mask must be a bool tensor, got {mask.dtype}")
        checks.shape(name, "mask", mask, targets.shape)
        checks.same(name, "device", targets=targets, mask=mask)
        return targets.masked_fill(~mask, ignore_index), mask & (targets != ignore_index)

    def _reference(
        self, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None, targets: Tensor,
        log_probs: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        """Return the log-probabilities of a reference model: those of the caller, or those of its hidden states."""
        name = type(self).__name__
        if hidden is None:
            if weight is not None or bias is not None:
                raise ValueError(f"{name}: ref_hidden must be a tensor if ref_weight or ref_bias is one, got None")
            return log_probs
        if log_probs is not None:
            raise ValueError(f"{name}: only one of ref_hidden and ref_log_probs can be given, got both")
        if weight is None:
            raise ValueError(f"{name}: ref_weight must be a tensor if ref_hidden is one, got None")
        with torch.no_grad():
            result = linear_log_probs(hidden, weight, targets, bias=bias, **self.head_options)
        assert isinstance(result, Tensor)
        return result

    def _compute(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, division: _Division,
        tensors: dict[str, Tensor | None], with_entropy: bool = False, with_sum_sq_probs: bool = False,
    ) -> tuple[Tensor, Metrics]:  # fmt: skip
        """Return the loss and its metrics. `tensors` are the arguments of the function beside its options."""
        tensors = {name: value for name, value in tensors.items() if value is not None}
        division = WHOLE if "cu_seqlens" in tensors else division
        if with_sum_sq_probs:
            result = linear_log_probs(
                hidden, weight, targets, bias=bias, return_entropy=with_entropy, return_sum_sq_probs=True,
                **self.head_options,
            )  # fmt: skip
            assert isinstance(result, LogProbOutput)
            tensors["log_sum_sq_probs"] = result.log_sum_sq_probs
            return type(self).function(result.log_probs, **tensors, **self.options)
        names = list(tensors)

        def loss_fn(log_probs: Tensor, *values: Tensor) -> tuple[Tensor, Metrics]:
            arguments: Iterator[Tensor] = iter(values)
            entropy = {"entropy": next(arguments)} if with_entropy else {}
            named = dict(zip(names, arguments, strict=True))
            return type(self).function(log_probs, **entropy, **named, **self.options)

        return linear_loss(
            hidden, weight, targets, loss_fn, *tensors.values(), group=division.group, reduction=division.reduction,
            bias=bias, with_entropy=with_entropy, **self.head_options, **self.sum_options,
        )  # fmt: skip


class DPOLoss(_HeadLoss):
    """DPO and its variants: `tigon.losses.dpo_loss` on hidden states and a head.

    Most types take three products with the head, and one more for a reference model. The types "aot", "aot_unpaired"
    and "sft", and `use_weighting`, take four and one more.

    Args:
        **options: The options of `dpo_loss` that are not tensors, and those of the head: `temperature`, `softcap`,
            `logit_scale` and `ignore_index` of `tigon.linear_log_probs`, `max_logits_mib` and `acc_dtype` of
            `tigon.linear_loss`.

    Raises:
        ValueError: An option has an unknown name. Values are checked when the module is called.

    Source: Rafailov et al., "Direct Preference Optimization", arXiv:2305.18290, and the papers of `dpo_loss`.

    Example:
        >>> hidden, head = torch.randn(4, 5, 16, requires_grad=True), torch.randn(100, 16)
        >>> tokens = torch.randint(100, (4, 5))
        >>> loss, metrics = tigon.DPOLoss(beta=0.1)(hidden, head, tokens, torch.randn(4, 5, 16), torch.randn(100, 16))
        >>> loss.backward(); sorted(metrics)[0]
        'logps/chosen'
    """

    function = staticmethod(dpo_loss)

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        ref_hidden: Tensor | None = None,
        ref_weight: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        ref_bias: Tensor | None = None,
        ref_log_probs: Tensor | None = None,
        ref_sequence_log_probs: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Return the loss and its metrics.

        Args:
            hidden: Tokens, H: the hidden states of the policy. The first half of the sequences are the chosen ones.
            weight: [V, H] of its head.
            targets: Tokens: the token that each hidden state predicts, `ignore_index` outside of completions.
            ref_hidden, ref_weight, ref_bias: The same of the reference model, whose H may differ.
            mask: Tokens, bool: the tokens of completions, if `targets` does not mark them.
            bias: [V].
            ref_log_probs, ref_sequence_log_probs, cu_seqlens: As in `dpo_loss`.
        """
        targets, mask = self._targets(targets, mask)
        reference = self._reference(ref_hidden, ref_weight, ref_bias, targets, ref_log_probs)
        types = self.options["loss_type"]
        types = [types] if isinstance(types, str) else list(types)
        is_sum = not {"aot", "aot_unpaired", "sft"} & set(types)
        tensors = {
            "mask": mask, "ref_log_probs": reference, "ref_sequence_log_probs": ref_sequence_log_probs,
            "cu_seqlens": cu_seqlens,
        }  # fmt: skip
        return self._compute(
            hidden, weight, targets, bias, _Division("pair") if is_sum else WHOLE, tensors,
            with_sum_sq_probs=bool(self.options["use_weighting"]),
        )  # fmt: skip


class _ReferenceFreeLoss(_HeadLoss):
    """A loss of pairs without a reference model."""

    def _division(self) -> _Division:
        return WHOLE

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Return the loss and its metrics.

        Args:
            hidden: Tokens, H: the hidden states of the policy. The first half of the sequences are the chosen ones.
            weight: [V, H] of its head.
            targets: Tokens: the token that each hidden state predicts, `ignore_index` outside of completions.
            mask: Tokens, bool: the tokens of completions, if `targets` does not mark them.
            bias: [V].
            cu_seqlens: [N + 1]: the boundaries of packed sequences.
        """
        targets, mask = self._targets(targets, mask)
        return self._compute(
            hidden, weight, targets, bias, self._division(), {"mask": mask, "cu_seqlens": cu_seqlens}
        )  # fmt: skip


class ORPOLoss(_ReferenceFreeLoss):
    """ORPO: `tigon.losses.orpo_loss` on hidden states and a head. It takes four products with the head.

    The divisor of its NLL term is the number of the tokens of all chosen completions, so it is no sum over pairs.

    Args:
        **options: The options of `orpo_loss` that are not tensors, and those of the head, as in `tigon.DPOLoss`.

    Raises:
        ValueError: An option has an unknown name. Values are checked when the module is called.

    Source: Hong et al., arXiv:2403.07691.

    Example:
        >>> hidden, head = torch.randn(4, 5, 16, requires_grad=True), torch.randn(100, 16)
        >>> loss, metrics = tigon.ORPOLoss(beta=0.1)(hidden, head, torch.randint(100, (4, 5)))
        >>> loss.backward(); loss.shape
        torch.Size([])
    """

    function = staticmethod(orpo_loss)


class CPOLoss(_ReferenceFreeLoss):
    """CPO and its variants: `tigon.losses.cpo_loss` on hidden states and a head.

    It takes four products with the head, and three if `cpo_alpha` is 0.

    Args:
        **options: The options of `cpo_loss` that are not tensors, and those of the head, as in `tigon.DPOLoss`.

    Raises:
        ValueError: An option has an unknown name. Values are checked when the module is called.

    Source: Xu et al., "Contrastive Preference Optimization", arXiv:2401.08417.

    Example:
        >>> hidden, head = torch.randn(4, 5, 16, requires_grad=True), torch.randn(100, 16)
        >>> loss, metrics = tigon.CPOLoss(beta=0.1)(hidden, head, torch.randint(100, (4, 5)))
        >>> loss.backward(); loss.shape
        torch.Size([])
    """

    function = staticmethod(cpo_loss)

    def _division(self) -> _Division:
        has_nll = self.options["cpo_alpha"] != 0 and self.options["loss_type"] != "alphapo"
        return WHOLE if has_nll else _Division("pair")


class SimPOLoss(_ReferenceFreeLoss):
    """SimPO: `tigon.losses.simpo_loss` on hidden states and a head. It takes three products with the head.

    Args:
        **options: The options of `simpo_loss` that are not tensors, and those of the head, as in `tigon.DPOLoss`.

    Raises:
        ValueError: An option has an unknown name. Values are checked when the module is called.

    Source: Meng et al., "SimPO", arXiv:2405.14734.

    Example:
        >>> hidden, head = torch.randn(4, 5, 16, requires_grad=True), torch.randn(100, 16)
        >>> loss, metrics = tigon.SimPOLoss(beta=2.0)(hidden, head, torch.randint(100, (4, 5)))
        >>> loss.backward(); loss.shape
        torch.Size([])
    """

    function = staticmethod(simpo_loss)

    def _division(self) -> _Division:
        return _Division("pair")


class KTOLoss(_HeadLoss):
    """KTO: `tigon.losses.kto_loss` on hidden states and a head.

    It takes three products with the head, and one more for a reference model.

    Args:
        **options: The options of `kto_loss` that are not tensors, and those of the head, as in `tigon.DPOLoss`.

    Raises:
        ValueError: An option has an unknown name. Values are checked when the module is called.

    Source: Ethayarajh et al., arXiv:2402.01306.

    Example:
        >>> hidden, head = torch.randn(3, 5, 16, requires_grad=True), torch.randn(100, 16)
        >>> is_desirable = torch.tensor([True, False, True])
        >>> loss, metrics = tigon.KTOLoss(beta=0.1)(hidden, head, torch.randint(100, (3, 5)), is_desirable)
        >>> loss.backward(); loss.shape
        torch.Size([])
    """

    function = staticmethod(kto_loss)

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        is_desirable: Tensor,
        ref_hidden: Tensor | None = None,
        ref_weight: Tensor | None = None,
        *,
        kl: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        ref_bias: Tensor | None = None,
        ref_log_probs: Tensor | None = None,
        ref_sequence_log_probs: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Return the loss and its metrics.

        Args:
            hidden: Tokens, H: the hidden states of the policy.
            weight: [V, H] of its head.
            targets: Tokens: the token that each hidden state predicts, `ignore_index` outside of completions.
            is_desirable: [N], bool.
            ref_hidden, ref_weight, ref_bias: The same of the reference model, whose H may differ.
            kl: Without dimensions, the result of `tigon.losses.kto_kl`.
            mask: Tokens, bool: the tokens of completions, if `targets` does not mark them.
            bias: [V].
            ref_log_probs, ref_sequence_log_probs, cu_seqlens: As in `kto_loss`.
        """
        targets, mask = self._targets(targets, mask)
        tensors = {
            "mask": mask, "is_desirable": is_desirable, "kl": kl,
            "ref_log_probs": self._reference(ref_hidden, ref_weight, ref_bias, targets, ref_log_probs),
            "ref_sequence_log_probs": ref_sequence_log_probs, "cu_seqlens": cu_seqlens,
        }  # fmt: skip
        return self._compute(hidden, weight, targets, bias, _Division("sequence"), tensors)


class _PolicyLoss(_HeadLoss):
    """A loss of a policy that learns from advantages."""

    # Whether the loss is the mean over its sequences if it has no entropy bonus.
    is_mean_of_sequences = False

    def _division(self, tensors: dict[str, Tensor | None]) -> _Division:
        if self.options.get("entropy_coef") or not self.is_mean_of_sequences:
            return WHOLE
        return _Division("sequence")

    def _needs_entropy(self, tensors: dict[str, Tensor | None]) -> bool:
        return bool(self.options.get("entropy_coef"))

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        advantages: Tensor,
        old_log_probs: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **tensors: Tensor | None,
    ) -> tuple[Tensor, Metrics]:
        """Return the loss and its metrics.

        Args:
            hidden: Tokens, H: the hidden states of the policy.
            weight: [V, H] of its head.
            targets: Tokens: the token that each hidden state predicts, `ignore_index` outside of completions.
            advantages: [N] or tokens.
            old_log_probs: Tokens, fp32: the log-probabilities of the policy that sampled the tokens; by default those
                of the policy itself.
            mask: Tokens, bool: the tokens of completions, if `targets` does not mark them.
            bias: [V].
            cu_seqlens: [N + 1]: the boundaries of packed sequences.
            **tensors: More tensors of the function of this loss, by name.
        """
        name, parameters = type(self).__name__, inspect.signature(self.function).parameters
        for key in tensors:
            allowed = ["ref_log_probs", *_TENSORS]
            checks.choice(name, "a tensor", key, tuple(each for each in allowed if each in parameters))
        targets, mask = self._targets(targets, mask)
        tensors = {
            "advantages": advantages, "mask": mask, "old_log_probs": old_log_probs, "cu_seqlens": cu_seqlens, **tensors,
        }  # fmt: skip
        division, with_entropy = self._division(tensors), self._needs_entropy(tensors)
        return self._compute(hidden, weight, targets, bias, division, tensors, with_entropy)


class GRPOLoss(_PolicyLoss):
    """GRPO and its variants: `tigon.losses.grpo_loss` on hidden states and a head.

    It takes three products with the head, and four with `loss_type="bnpo"`, with an entropy bonus, and with a quantile
    of entropies without `top_entropy_threshold`.

    Args:
        **options: The options of `grpo_loss` that are not tensors, and those of the head, as in `tigon.DPOLoss`.

    Raises:
        ValueError: An option has an unknown name. Values are checked when the module is called.

    Source: Shao et al., "DeepSeekMath", arXiv:2402.03300, and the papers of `grpo_loss`.

    Example:
        >>> hidden, head = torch.randn(4, 5, 16, requires_grad=True), torch.randn(100, 16)
        >>> tokens, advantages = torch.randint(100, (4, 5)), torch.randn(4)
        >>> loss, metrics = tigon.GRPOLoss(loss_type="dapo")(hidden, head, tokens, advantages)
        >>> loss.backward(); loss.shape
        torch.Size([])
    """

    function = staticmethod(grpo_loss)

    def _division(self, tensors: dict[str, Tensor | None]) -> _Division:
        loss_type = self.options["loss_type"]
        selects = self.options["top_entropy_quantile"] < 1 and tensors.get("top_entropy_threshold") is None
        if loss_type == "bnpo" or self.options["entropy_coef"] or selects:
            return WHOLE
        return _Division("sequence", "sum" if loss_type in ("dapo", "cispo", "vespo") else "mean")

    def _needs_entropy(self, tensors: dict[str, Tensor | None]) -> bool:
        has_threshold = tensors.get("top_entropy_threshold") is not None
        return bool(self.options["entropy_coef"] or self.options["top_entropy_quantile"] < 1 or has_threshold)

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor, *args: Any, **tensors: Any) -> Any:
        """Return the loss and its metrics. The arguments are those of `tigon.PPOLoss`, and tensors of `grpo_loss`.

        `ref_log_probs`, `num_items_in_batch`, `importance_sampling_ratio`, `sampling_log_probs` and
        `top_entropy_threshold` are passed by name.
        """
        if self.options["loss_type"] in ("dapo", "cispo", "vespo") and tensors.get("num_items_in_batch") is None:
            # The number of the tokens of the whole batch is the divisor of each part.
            _, counted = self._targets(targets, tensors.get("mask"))
            tensors["num_items_in_batch"] = counted.sum()
        return super().forward(hidden, weight, targets, *args, **tensors)


class PPOLoss(_PolicyLoss):
    """PPO's clipped objective: `tigon.losses.ppo_loss` on hidden states and a head. It takes four products.

    The loss is the mean over all tokens of the batch.

    Args:
        **options: The options of `ppo_loss` that are not tensors, and those of the head, as in `tigon.DPOLoss`.

    Raises:
        ValueError: An option has an unknown name. Values are checked when the module is called.

    Source: Schulman et al., "Proximal Policy Optimization Algorithms", arXiv:1707.06347.

    Example:
        >>> hidden, head = torch.randn(4, 5, 16, requires_grad=True), torch.randn(100, 16)
        >>> loss, metrics = tigon.PPOLoss()(hidden, head, torch.randint(100, (4, 5)), torch.randn(4, 5))
        >>> loss.backward(); loss.shape
        torch.Size([])
    """

    function = staticmethod(ppo_loss)


class RLOOLoss(_PolicyLoss):
    """RLOO: `tigon.losses.rloo_loss` on hidden states and a head.

    It takes three products with the head, and four with an entropy bonus.

    Args:
        **options: The options of `rloo_loss` that are not tensors, and those of the head, as in `tigon.DPOLoss`.

    Raises:
        ValueError: An option has an unknown name. Values are checked when the module is called.

    Source: Ahmadian et al., "Back to Basics", arXiv:2402.14740.

    Example:
        >>> hidden, head = torch.randn(4, 5, 16, requires_grad=True), torch.randn(100, 16)
        >>> loss, metrics = tigon.RLOOLoss()(hidden, head, torch.randint(100, (4, 5)), torch.randn(4))
        >>> loss.backward(); loss.shape
        torch.Size([])
    """

    function = staticmethod(rloo_loss)
    is_mean_of_sequences = True

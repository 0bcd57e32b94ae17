"""The losses of this package as modules that take hidden states and the weight of a head, and never hold the logits.

Each module passes the log-probabilities of the head to the function of the same loss by `tigon.linear_loss`. A loss
that is a sum over its sequences or pairs takes three products with the head, and every other loss four. The docstring
of each module says which options need four. The logits of a whole sequence, or of a pair, must fit into the budget
(`max_logits_mib`); otherwise every loss takes four products.

A reference model takes one more product: pass its hidden states, or its log-probabilities if you have them.

Shapes: N sequences, L tokens of a padded row, T packed tokens, H hidden, V vocabulary. Padded
tokens are [N, L]. Packed tokens are [T], and need `cu_seqlens`.
"""

import inspect
from typing import Any

from torch import Tensor

from tigon.losses.head_loss import TENSORS, HeadLoss
from tigon.losses.kto import kto_loss
from tigon.losses.policy import grpo_loss
from tigon.losses.ppo import ppo_loss, rloo_loss
from tigon.losses.preference import dpo_adds_up, dpo_loss
from tigon.losses.reference_free import cpo_loss, orpo_loss, simpo_loss
from tigon.losses.sequences import Metrics
from tigon.runtime import checks


class DPOLoss(HeadLoss):
    """DPO and its variants: `tigon.losses.dpo_loss` on hidden states and a head.

    It takes three products with the head, and one more for a reference model. The types "aot" and "aot_unpaired", and
    "sft" with `use_weighting`, take four and one more.

    Args:
        **options: The options of `dpo_loss` that are not tensors, and those of the head: `temperature`, `softcap`,
            `logit_scale`, `ignore_index`, `process_group` and `vocab_size` of `tigon.linear_log_probs`,
            `max_logits_mib` and `acc_dtype` of `tigon.linear_loss`.

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
    group = "pair"

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
            hidden: [N, L, H] or [T, H]: the hidden states of the policy. The first half of the sequences are the chosen
                ones.
            weight: [V, H] of its head.
            targets: [N, L] or [T]: the token that each hidden state predicts, `ignore_index` outside of completions.
            ref_hidden, ref_weight, ref_bias: The same of the reference model, whose H may differ.
            mask: [N, L] or [T], bool: the tokens of completions, if `targets` does not mark them.
            bias: [V].
            ref_log_probs, ref_sequence_log_probs, cu_seqlens: As in `dpo_loss`.
        """
        tensors = {"ref_log_probs": ref_log_probs, "ref_sequence_log_probs": ref_sequence_log_probs}
        return self._compute(
            hidden, weight, targets, bias, tensors, mask=mask, cu_seqlens=cu_seqlens,
            reference=(ref_hidden, ref_weight, ref_bias), with_sum_sq_probs=bool(self.options["use_weighting"]),
        )  # fmt: skip

    def _adds_up(self, tensors: dict[str, Any]) -> bool:
        return dpo_adds_up(self.options["loss_type"], bool(self.options["use_weighting"]))


class _ReferenceFreeLoss(HeadLoss):
    """A loss of pairs without a reference model."""

    group = "pair"

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
            hidden: [N, L, H] or [T, H]: the hidden states of the policy. The first half of the sequences are the chosen
                ones.
            weight: [V, H] of its head.
            targets: [N, L] or [T]: the token that each hidden state predicts, `ignore_index` outside of completions.
            mask: [N, L] or [T], bool: the tokens of completions, if `targets` does not mark them.
            bias: [V].
            cu_seqlens: [N + 1]: the boundaries of packed sequences.
        """
        return self._compute(hidden, weight, targets, bias, {}, mask=mask, cu_seqlens=cu_seqlens)


class ORPOLoss(_ReferenceFreeLoss):
    """ORPO: `tigon.losses.orpo_loss` on hidden states and a head. It takes three products with the head.

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

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        mask: Tensor | None = None,
        nll_mask: Tensor | None = None,
        bias: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Return the loss and its metrics. The arguments are those of `tigon.CPOLoss`, and `nll_mask`.

        Args:
            nll_mask: [N, L] or [T], bool: the tokens of the NLL term, as in `orpo_loss`. Their `targets` are tokens,
                also in prompts, so pass `mask` too.
        """
        tensors = {"nll_mask": nll_mask}
        return self._compute(hidden, weight, targets, bias, tensors, mask=mask, cu_seqlens=cu_seqlens)


class CPOLoss(_ReferenceFreeLoss):
    """CPO and its variants: `tigon.losses.cpo_loss` on hidden states and a head. It takes three products with the head.

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


class KTOLoss(HeadLoss):
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
            hidden: [N, L, H] or [T, H]: the hidden states of the policy.
            weight: [V, H] of its head.
            targets: [N, L] or [T]: the token that each hidden state predicts, `ignore_index` outside of completions.
            is_desirable: [N], bool.
            ref_hidden, ref_weight, ref_bias: The same of the reference model, whose H may differ.
            kl: Without dimensions, the result of `tigon.losses.kto_kl`.
            mask: [N, L] or [T], bool: the tokens of completions, if `targets` does not mark them.
            bias: [V].
            ref_log_probs, ref_sequence_log_probs, cu_seqlens: As in `kto_loss`.
        """
        tensors = {
            "is_desirable": is_desirable, "kl": kl, "ref_log_probs": ref_log_probs,
            "ref_sequence_log_probs": ref_sequence_log_probs,
        }  # fmt: skip
        return self._compute(
            hidden, weight, targets, bias, tensors, mask=mask, cu_seqlens=cu_seqlens,
            reference=(ref_hidden, ref_weight, ref_bias),
        )  # fmt: skip


# The module computes these arguments of the functions.
_COMPUTED = ("entropy", "part_of")


class _PolicyLoss(HeadLoss):
    """A loss of a policy that learns from advantages."""

    def _needs_entropy(self, tensors: dict[str, Any]) -> bool:
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
        **tensors: Any,
    ) -> tuple[Tensor, Metrics]:
        """Return the loss and its metrics.

        Args:
            hidden: [N, L, H] or [T, H]: the hidden states of the policy.
            weight: [V, H] of its head.
            targets: [N, L] or [T]: the token that each hidden state predicts, `ignore_index` outside of completions.
            advantages: [N], [N, L] or [T].
            old_log_probs: [N, L] or [T], fp32: the log-probabilities of the policy that sampled the tokens; by default
                those of the policy itself.
            mask: [N, L] or [T], bool: the tokens of completions, if `targets` does not mark them.
            bias: [V].
            cu_seqlens: [N + 1]: the boundaries of packed sequences.
            **tensors: More tensors of the function of this loss, by name: for `GRPOLoss` `ref_log_probs`,
                `num_items_in_batch`, `importance_sampling_ratio`, `sampling_log_probs` and `top_entropy_threshold`.
        """
        name, parameters = type(self).__name__, inspect.signature(self.function).parameters
        names = tuple(each for each in ("ref_log_probs", *TENSORS) if each in parameters and each not in _COMPUTED)
        for key in tensors:
            checks.choice(name, "a tensor", key, names)
        tensors = {"advantages": advantages, "old_log_probs": old_log_probs, **tensors}
        return self._compute(
            hidden, weight, targets, bias, tensors, mask=mask, cu_seqlens=cu_seqlens,
            with_entropy=self._needs_entropy(tensors),
        )  # fmt: skip


class GRPOLoss(_PolicyLoss):
    """GRPO and its variants: `tigon.losses.grpo_loss` on hidden states and a head.

    It takes three products with the head, and four if tokens are selected by the entropies of the whole batch: with
    `top_entropy_quantile` without `top_entropy_threshold`, or together with an entropy bonus.

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

    def _adds_up(self, tensors: dict[str, Any]) -> bool:
        has_threshold = "top_entropy_threshold" in tensors
        selects = self.options["top_entropy_quantile"] < 1 or has_threshold
        return not selects or (has_threshold and not self.options["entropy_coef"])

    def _needs_entropy(self, tensors: dict[str, Any]) -> bool:
        has_threshold = tensors.get("top_entropy_threshold") is not None
        return bool(self.options["entropy_coef"] or self.options["top_entropy_quantile"] < 1 or has_threshold)


class PPOLoss(_PolicyLoss):
    """PPO's clipped objective: `tigon.losses.ppo_loss` on hidden states and a head. It takes three products.

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
    """RLOO: `tigon.losses.rloo_loss` on hidden states and a head. It takes three products with the head.

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

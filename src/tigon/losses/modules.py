"""The losses of this package as modules that take hidden states and the weight of a head, and never hold the logits.

Each module passes the log-probabilities of the head to the function of the same loss by `tigon.linear_loss`. A loss
that is a sum over its sequences or pairs takes three products with the head, and every other loss four. The docstring
of each module says which options need four. The logits of a whole sequence, or of a pair, must fit into the budget
(`max_logits_mib`); otherwise every loss takes four products.

A reference model takes one more product: pass its hidden states, or its log-probabilities if you have them.

Shapes: N sequences, L tokens of a padded row, T packed tokens, H hidden, V vocabulary. Padded
tokens are [N, L]. Packed tokens are [T], and need `cu_seqlens`.
"""

from typing import Any

from tigon.losses.head_loss import HeadLoss
from tigon.losses.kto import kto_loss
from tigon.losses.policy import grpo_loss
from tigon.losses.ppo import ppo_loss, rloo_loss
from tigon.losses.preference import dpo_adds_up, dpo_loss
from tigon.losses.reference_free import cpo_loss, orpo_loss, simpo_loss


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
    group, positional = "pair", ("ref_hidden", "ref_weight")

    def _adds_up(self, tensors: dict[str, Any]) -> bool:
        return dpo_adds_up(self.options["loss_type"], bool(self.options["use_weighting"]))


class ORPOLoss(HeadLoss):
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
    group = "pair"


class CPOLoss(HeadLoss):
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
    group = "pair"


class SimPOLoss(HeadLoss):
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
    group = "pair"


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
    positional = ("is_desirable", "ref_hidden", "ref_weight")


class GRPOLoss(HeadLoss):
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
    positional = ("advantages", "old_log_probs")

    def _adds_up(self, tensors: dict[str, Any]) -> bool:
        has_threshold = "top_entropy_threshold" in tensors
        selects = self.options["top_entropy_quantile"] < 1 or has_threshold
        return not selects or (has_threshold and not self.options["entropy_coef"])

    def _needs_entropy(self, tensors: dict[str, Any]) -> bool:
        has_threshold = tensors.get("top_entropy_threshold") is not None
        return bool(self.options["entropy_coef"] or self.options["top_entropy_quantile"] < 1 or has_threshold)


class PPOLoss(HeadLoss):
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
    positional = ("advantages", "old_log_probs")


class RLOOLoss(HeadLoss):
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
    positional = ("advantages", "old_log_probs")

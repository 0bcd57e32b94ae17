"""The losses of this package as modules that take hidden states and the weight of a head, and never hold the logits.

Each module passes the log-probabilities of the head to the function of the same loss by `tigon.linear_loss`. A loss
that is a sum over its sequences or pairs takes three products with the head, if the logits of one of them fit into the
budget (`max_logits_mib`). Every other loss takes four, unless the logits of the whole batch fit. The docstring of each
module says which options need four. A reference model takes one more product: pass its hidden states, or its
log-probabilities if you have them.

Shapes: N sequences, L tokens of a padded row, T packed tokens, H hidden, V vocabulary. Padded tokens are [N, L]. Packed
tokens are [T], and need `cu_seqlens`.
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tigon.losses.kto import kto_loss
from tigon.losses.policy import grpo_loss
from tigon.losses.ppo import ppo_loss, rloo_loss
from tigon.losses.preference import dpo_adds_up, dpo_loss
from tigon.losses.reference_free import cpo_loss, orpo_loss, simpo_loss
from tigon.losses.sequences import Metrics
from tigon.ops.head.arguments import check_shapes
from tigon.ops.head.computed_rows import find_rows
from tigon.ops.head.linear_log_probs import linear_log_probs
from tigon.ops.head.linear_loss import linear_loss
from tigon.runtime import checks

# The options of the head and of the engine, which each constructor takes.
_HEAD_OPTIONS = ("temperature", "softcap", "logit_scale", "ignore_index", "process_group", "vocab_size")
_SUM_OPTIONS = ("max_logits_mib", "acc_dtype")
# The keyword arguments of the functions that are tensors, so that each call has others.
TENSORS = (
    "log_sum_sq_probs", "ref_sequence_log_probs", "nll_mask", "entropy", "top_entropy_threshold",
    "importance_sampling_ratio", "sampling_log_probs", "num_items_in_batch", "cu_seqlens", "part_of",
)  # fmt: skip
# The tensors that the module computes, or takes as arguments of its own.
_COMPUTED = ("log_probs", "mask", "log_sum_sq_probs", "entropy", "cu_seqlens", "part_of")
# The tensors of a reference model, from which the module computes `ref_log_probs`.
_REFERENCE = ("ref_hidden", "ref_weight", "ref_bias")


class HeadLoss(nn.Module):
    """A loss of log-probabilities, with its options and those of the head."""

    # A function of log-probabilities, of `mask` and of further tensors by name.
    function: Callable[..., tuple[Tensor, Metrics]]
    group: Literal["sequence", "pair"] = "sequence"  # The units over which the loss is a sum.
    positional: tuple[str, ...] = ()  # The tensors that a call may pass by position after the targets.

    def __init__(self, **options: Any) -> None:
        super().__init__()
        name = type(self).__name__
        parameters = list(inspect.signature(self.function).parameters.values())
        keywords = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.name not in TENSORS]
        for option in options:
            checks.choice(name, "an option", option, (*_HEAD_OPTIONS, *_SUM_OPTIONS, *keywords))
        self.head_options = {key: options.pop(key) for key in _HEAD_OPTIONS if key in options}
        self.sum_options = {key: options.pop(key) for key in _SUM_OPTIONS if key in options}
        defaults = {each.name: each.default for each in parameters if each.name in keywords}
        self.options = defaults | options
        names = [each.name for each in parameters if each.name not in (*keywords, *_COMPUTED)]
        self.tensor_names = (*names, *(_REFERENCE if "ref_log_probs" in names else ()))
        self._checked_arguments: object = None

    def extra_repr(self) -> str:
        options = self.head_options | self.sum_options | self.options
        return ", ".join(f"{key}={value!r}" for key, value in options.items())

    def _adds_up(self, tensors: dict[str, Any]) -> bool:
        """Return whether the loss of the batch is a sum over its sequences or pairs."""
        return True

    def _needs_entropy(self, tensors: dict[str, Any]) -> bool:
        """Return whether the function takes the entropy."""
        return bool(self.options.get("entropy_coef"))

    def forward(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *args: Tensor | None, mask: Tensor | None = None,
        bias: Tensor | None = None, cu_seqlens: Tensor | None = None, **tensors: Any,
    ) -> tuple[Tensor, Metrics]:  # fmt: skip
        """Return the loss and its metrics.

        Args:
            hidden: [N, L, H] or [T, H]: the hidden states of the policy. The first half of the sequences of pairs are
                the chosen ones.
            weight: [V, H] of its head.
            targets: [N, L] or [T]: the token that each hidden state predicts, `ignore_index` outside of completions.
            *args: `ref_hidden` and `ref_weight` of `DPOLoss`; `is_desirable`, `ref_hidden` and `ref_weight` of
                `KTOLoss`; `advantages` and `old_log_probs` of `GRPOLoss`, `PPOLoss` and `RLOOLoss`.
            mask: [N, L] or [T], bool: the tokens of completions, if `targets` does not mark them.
            bias: [V].
            cu_seqlens: [N + 1]: the boundaries of packed sequences.
            **tensors: The tensors of the function of this loss by name, such as `ref_log_probs`, `kl` or `nll_mask`. A
                loss that takes `ref_log_probs` also takes the hidden states and the head of the reference model in
                place of them, `ref_hidden`, `ref_weight` and `ref_bias`, whose H may differ. `nll_mask` may have tokens
                of prompts, whose `targets` must be tokens too, so pass `mask` with it.
        """
        name = type(self).__name__
        if len(args) > len(self.positional):
            raise TypeError(f"{name}: at most {3 + len(self.positional)} tensors by position, got {3 + len(args)}")
        for key in (*self.positional[: len(args)], *tensors):
            if key in self.positional[: len(args)] and key in tensors:
                raise TypeError(f"{name}: {key} must be given once, got it by position and by name")
            checks.choice(name, "a tensor", key, self.tensor_names)
        tensors |= zip(self.positional, args, strict=False)
        tensors = {key: value for key, value in tensors.items() if value is not None}
        check_shapes(name, hidden, weight, bias, targets, may_be_empty="process_group" in self.head_options)
        ignore_index = checks.ignore_index(name, self.head_options.get("ignore_index", -100))
        targets, masks = self._masked(targets, {"mask": mask, "nll_mask": tensors.get("nll_mask")}, ignore_index)
        tensors |= masks
        ref_hidden, ref_weight, ref_bias = (tensors.pop(key, None) for key in _REFERENCE)
        self._check_reference(ref_hidden, ref_weight, ref_bias, targets, tensors)
        with_entropy, with_sum_sq_probs = self._needs_entropy(tensors), bool(self.options.get("use_weighting"))
        outputs = ["entropy"] * with_entropy + ["log_sum_sq_probs"] * with_sum_sq_probs
        self._check(tensors, cu_seqlens, outputs, ref_hidden is not None)
        valid_rows = None
        if ref_hidden is not None:
            assert ref_weight is not None
            # Both models compute the same rows, so the host waits once for their number.
            valid_rows = find_rows(targets, ignore_index, hidden.numel() * len(weight))
            with torch.no_grad():
                tensors["ref_log_probs"] = linear_log_probs(
                    ref_hidden, ref_weight, targets, bias=ref_bias, valid_rows=valid_rows, **self.head_options
                )

        def loss_fn(log_probs: Tensor, *values: Tensor, **boundaries: Tensor) -> tuple[Tensor, Metrics]:
            named = dict(zip(outputs, values, strict=True))
            return type(self).function(log_probs, **named, **tensors, **boundaries, **self.options)

        return linear_loss(
            hidden, weight, targets, loss_fn, group=self.group if self._adds_up(tensors) else "batch", bias=bias,
            with_entropy=with_entropy, with_sum_sq_probs=with_sum_sq_probs, cu_seqlens=cu_seqlens,
            valid_rows=valid_rows, **self.head_options, **self.sum_options,
        )  # fmt: skip

    def _masked(
        self, targets: Tensor, masks: dict[str, Tensor | None], ignore_index: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return targets in which tokens that no mask needs are ignored, and the masks, without ignored tokens."""
        name, is_target = type(self).__name__, targets != ignore_index
        present_masks = {key: value for key, value in masks.items() if value is not None}
        for key, value in present_masks.items():
            checks.boolean(name, **{key: value})
            checks.shape(name, key, value, targets.shape)
            checks.same(name, "device", targets=targets, **{key: value})
        counted = {"mask": is_target} | {key: value & is_target for key, value in present_masks.items()}
        if "mask" not in present_masks:
            return targets, counted
        needed = counted["mask"] | counted.get("nll_mask", counted["mask"])
        return targets.masked_fill(~needed, ignore_index), counted

    def _check_reference(
        self, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None, targets: Tensor,
        tensors: dict[str, Any],
    ) -> None:  # fmt: skip
        """Check that a reference model is given in one way, and completely."""
        name = type(self).__name__
        if hidden is None:
            if weight is not None or bias is not None:
                raise ValueError(f"{name}: ref_hidden must be a tensor if ref_weight or ref_bias is one, got None")
            return
        for key in ("ref_log_probs", "ref_sequence_log_probs"):
            if key in tensors:
                raise ValueError(f"{name}: only one of ref_hidden and {key} can be given, got both")
        if weight is None:
            raise ValueError(f"{name}: ref_weight must be a tensor if ref_hidden is one, got None")
        checks.tensor(name, ref_hidden=hidden, ref_weight=weight)
        checks.floating(name, ref_hidden=hidden, ref_weight=weight)
        if weight.dim() != 2 or hidden.shape != (*targets.shape, weight.shape[1]):
            raise ValueError(
                f"{name}: ref_hidden must have shape {(*targets.shape, 'H')} and ref_weight (V, H), got "
                f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
            )

    def _check(
        self, tensors: dict[str, Any], cu_seqlens: Tensor | None, outputs: list[str], has_reference: bool
    ) -> None:
        """Call the function with tensors that have no values, so that it refuses bad arguments before any product.

        Arguments of the same shapes and dtypes as those of the last call are not checked again.
        """
        if torch.compiler.is_compiling():
            return
        arguments = tensors | ({} if cu_seqlens is None else {"cu_seqlens": cu_seqlens})
        checks.same(type(self).__name__, "device", **{k: v for k, v in arguments.items() if isinstance(v, Tensor)})
        signature = [(name, _signature(value)) for name, value in arguments.items()], outputs, has_reference
        if signature == self._checked_arguments:
            return
        arguments = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in arguments.items()}
        names = ["log_probs", *outputs, *(["ref_log_probs"] if has_reference else [])]
        arguments |= {name: torch.empty_like(arguments["mask"], dtype=torch.float32) for name in names}
        with torch.no_grad():
            type(self).function(**arguments, **self.options)
        self._checked_arguments = signature


def _signature(value: object) -> object:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else repr(value)


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

    The options are those of `orpo_loss` that are not tensors. `tigon.DPOLoss` lists those of the head, and the errors.

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

    The options are those of `cpo_loss` that are not tensors. `tigon.DPOLoss` lists those of the head, and the errors.

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

    The options are those of `simpo_loss` that are not tensors. `tigon.DPOLoss` lists those of the head, and the errors.

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

    The options are those of `kto_loss` that are not tensors. `tigon.DPOLoss` lists those of the head, and the errors.

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

    The options are those of `grpo_loss` that are not tensors. `tigon.DPOLoss` lists those of the head, and the errors.

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

    The options are those of `ppo_loss` that are not tensors. `tigon.DPOLoss` lists those of the head, and the errors.

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

    The options are those of `rloo_loss` that are not tensors. `tigon.DPOLoss` lists those of the head, and the errors.

    Source: Ahmadian et al., "Back to Basics", arXiv:2402.14740.

    Example:
        >>> hidden, head = torch.randn(4, 5, 16, requires_grad=True), torch.randn(100, 16)
        >>> loss, metrics = tigon.RLOOLoss()(hidden, head, torch.randint(100, (4, 5)), torch.randn(4))
        >>> loss.backward(); loss.shape
        torch.Size([])
    """

    function = staticmethod(rloo_loss)
    positional = ("advantages", "old_log_probs")

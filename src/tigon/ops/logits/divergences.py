r"""Divergences of distributions over a vocabulary, of a student Q from a teacher P.

    kl_div   KL(P || Q) = sum_j p_j (log p_j - log q_j)
    jsd      beta KL(P || M) + (1 - beta) KL(Q || M),   M = beta P + (1 - beta) Q,   beta 0: KL(P || Q), 1: KL(Q || P)
    tvd      1/2 sum_j |q_j - p_j|

`divergence_kernels` has the kernels and the gradients, and `divergence_reference` the maths in torch.

Shapes: V vocabulary.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from tigon.ops.logits.distillation import divergence_backward, divergence_forward
from tigon.ops.logits.divergence_kernels import DivergenceOptions
from tigon.ops.logits.divergence_reference import DivergenceReduction, divergence_reference, divisor, jsd_kind
from tigon.ops.logits.rescale import rescaled
from tigon.ops.logits.token.kernels import gradient_scales
from tigon.ops.logits.valid_rows import as_targets
from tigon.runtime import checks
from tigon.runtime.device import runs_kernels
from tigon.runtime.op import Node
from tigon.runtime.rows import dense_rows


def kl_div_reference(
    input: Tensor, target: Tensor, *, log_target: bool = False, reduction: DivergenceReduction = "mean", **options: Any
) -> Tensor:
    """Compute `kl_div` by its eager definition: the ground truth of the tests, and the code for CPUs."""
    return divergence_reference("kl", input, target, is_log=log_target, reduction=reduction, **options)


def jsd_reference(input: Tensor, target: Tensor, *, beta: float = 0.5, **options: Any) -> Tensor:
    """Compute `jsd` by its eager definition: the ground truth of the tests, and the code for CPUs."""
    return divergence_reference(jsd_kind(beta), input, target, beta=beta, **options)


def tvd_reference(input: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Compute `tvd` by its eager definition: the ground truth of the tests, and the code for CPUs."""
    return divergence_reference("tvd", input, target, is_log=False, **options)


def _rows(x: Tensor) -> Tensor:
    return dense_rows(x)[0].view(-1, x.shape[-1])


class _Divergence(Node):
    def forward(
        ctx: Any, input: Tensor, target: Tensor, labels: Tensor | None, inverse_count: Tensor | None, needs_dx: bool,
        options: DivergenceOptions,
    ) -> Tensor:  # fmt: skip
        # In fp16 the gradient is computed in backward, because the upstream gradient contains the loss scale.
        in_forward = needs_dx and input.dtype != torch.float16
        loss, dx = divergence_forward(_rows(input), _rows(target), labels, inverse_count, in_forward, options)
        ctx.save_for_backward(*((dx,) if in_forward else (input, target, labels, inverse_count) if needs_dx else ()))
        ctx.in_forward, ctx.options, ctx.shape = in_forward, options, input.shape
        return loss

    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.in_forward:
            (dx,) = ctx.saved_tensors
            dx = rescaled(dx, dloss)
        else:
            input, target, labels, inverse_count = ctx.saved_tensors
            dx = divergence_backward(dloss, _rows(input), _rows(target), labels, inverse_count, ctx.options)
        return (dx.view(ctx.shape),)


def _divergence(
    op: str, kind: str, input: Tensor, target: Tensor, *, reduction: DivergenceReduction, labels: Tensor | None,
    ignore_index: int, from_logits: bool, temperature: float, is_log: bool = True, beta: float = 0.0,
) -> Tensor:  # fmt: skip
    """Check the arguments of a divergence, and return its loss by the kernels or by the reference."""
    checks.tensor(op, input=input, target=target)
    checks.floating(op, input=input, target=target)
    checks.flag(op, from_logits=from_logits)
    if input.dim() == 0 or input.shape[-1] == 0:
        raise ValueError(f"{op}: input must have shape (..., V) with V > 0, got {tuple(input.shape)}")
    checks.shape(op, "target", target, input.shape)
    checks.choice(op, "reduction", reduction, ("batchmean", "mean", "sum", "none"))
    temperature = checks.number(op, "temperature", temperature, 0.0, excludes_low=True)
    if temperature != 1.0 and not from_logits:
        raise ValueError(
            f"{op}: temperature must be 1 without from_logits=True, got {temperature:g}; from_logits=True also accepts "
            "log-probabilities"
        )
    checks.ignore_index(op, ignore_index)
    if labels is not None:
        checks.integer(op, labels=labels)
        checks.shape(op, "labels", labels, input.shape[:-1])
    checks.same(op, "device", input=input, target=target, labels=labels)
    needs_grad = torch.is_grad_enabled()
    # Elementwise losses take more memory than anything that a kernel would save.
    if reduction == "none" or not runs_kernels(input, target) or (needs_grad and target.requires_grad):
        return divergence_reference(
            kind, input, target, reduction=reduction, labels=labels, ignore_index=ignore_index,
            from_logits=from_logits, temperature=temperature, is_log=is_log, beta=beta,
        )  # fmt: skip
    labels = None if labels is None else as_targets(labels, ignore_index)
    inverse_count = None
    if labels is not None and reduction in ("batchmean", "mean"):
        inverse_count = gradient_scales(labels, None, None, 1, ignore_index, True)
    options = DivergenceOptions(
        kind=kind, is_log=is_log or from_logits, from_logits=from_logits,
        divisor=divisor(input, labels, reduction), ignore_index=ignore_index, beta=beta, temperature=temperature,
    )  # fmt: skip
    return _Divergence.apply(input, target, labels, inverse_count, needs_grad and input.requires_grad, options)


def kl_div(
    input: Tensor, target: Tensor, *, log_target: bool = False, reduction: DivergenceReduction = "mean",
    from_logits: bool = False, temperature: float = 1.0, ignore_index: int = -100, labels: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return `torch.nn.functional.kl_div` of distributions over the last dimension, KL(target || input), in fp32.

    Args:
        input: [..., V] log-probabilities of the student, fp32 | bf16 | fp16. `input` gets the gradient.
        target: [..., V] probabilities of the teacher, or log-probabilities with `log_target`. If it needs a gradient,
            the reference runs.
        log_target: Whether `target` holds log-probabilities.
        reduction: "none" for [..., V], as in torch; "sum"; "batchmean": the sum divided by `input.shape[0]`, or with
            `labels` by the number of valid rows; "mean": the mean over all elements, or over those of valid rows.
        from_logits: Both tensors are logits, and the op computes their softmax in fp32. `log_target` then has no
            effect.
        temperature: Divides the logits. Unlike in some recipes, its square does not multiply the loss.
        ignore_index: Rows with this label have loss and gradient zero, whatever their values are.
        labels: [...] int64 | int32, or None if all rows are valid.

    Returns:
        The loss in fp32. A mean over no valid row is 0. If the probability of the teacher is zero, the element
        contributes zero, even if that of the student is zero too (where torch returns NaN). If only the probability of
        the student is zero, the loss is infinity.

    Raises:
        TypeError: `input` or `target` is not a floating-point tensor, or `labels` is not an integer tensor.
        ValueError: Shapes or devices do not match, or an option is out of range.

    Source: Kullback and Leibler, "On Information and Sufficiency", 1951; from logits with a temperature, Hinton et al.,
    arXiv:1503.02531.

    Example:
        >>> student, teacher = torch.randn(4, 100, requires_grad=True), torch.randn(4, 100)
        >>> loss = tigon.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")
        >>> torch.allclose(loss, tigon.kl_div(student, teacher, from_logits=True, reduction="batchmean"), atol=1e-5)
        True
    """
    checks.flag("kl_div", log_target=log_target)
    return _divergence(
        "kl_div", "kl", input, target, reduction=reduction, labels=labels, ignore_index=ignore_index,
        from_logits=from_logits, temperature=temperature, is_log=log_target,
    )  # fmt: skip


def jsd(
    input: Tensor, target: Tensor, *, beta: float = 0.5, temperature: float = 1.0, labels: Tensor | None = None,
    ignore_index: int = -100, from_logits: bool = False, reduction: DivergenceReduction = "batchmean",
) -> Tensor:  # fmt: skip
    """Return the generalised Jensen-Shannon divergence of distributions over the last dimension, in fp32.

    Args:
        input: [..., V] log-probabilities of the student, fp32 | bf16 | fp16. `input` gets the gradient.
        target: [..., V] log-probabilities of the teacher. If it needs a gradient, the reference runs.
        beta: In [0, 1], the share of the teacher in the mixture. 0 is KL(teacher || student), and 1 is
            KL(student || teacher).
        temperature, labels, ignore_index, from_logits, reduction: As in `kl_div`.

    Returns:
        The loss in fp32. A mean over no valid row is 0. Equal distributions have loss and gradient of exactly zero.

    Raises: As `kl_div`.
    Source: Agarwal et al., "On-Policy Distillation of Language Models", arXiv:2306.13649.

    Example:
        >>> student, teacher = torch.randn(4, 100, requires_grad=True), torch.randn(4, 100)
        >>> loss = tigon.jsd(student.log_softmax(-1), teacher.log_softmax(-1), beta=0.1)
        >>> torch.allclose(loss, tigon.jsd(student, teacher, beta=0.1, from_logits=True), atol=1e-5)
        True
    """
    beta = checks.number("jsd", "beta", beta, 0.0, 1.0)
    return _divergence(
        "jsd", jsd_kind(beta), input, target, reduction=reduction, labels=labels, ignore_index=ignore_index,
        from_logits=from_logits, temperature=temperature, beta=beta,
    )  # fmt: skip


def tvd(
    input: Tensor, target: Tensor, *, reduction: DivergenceReduction = "batchmean", labels: Tensor | None = None,
    ignore_index: int = -100, from_logits: bool = False, temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return the total variation distance of distributions over the last dimension, in fp32.

    Args:
        input: [..., V] probabilities of the student, fp32 | bf16 | fp16. `input` gets the gradient, which is zero where
            both probabilities are equal.
        target: [..., V] probabilities of the teacher. If it needs a gradient, the reference runs.
        reduction, labels, ignore_index, from_logits, temperature: As in `kl_div`.

    Returns:
        The loss in fp32. A mean over no valid row is 0.

    Raises: As `kl_div`.
    Source: Wen et al., "f-Divergence Minimization for Sequence-Level Knowledge Distillation", arXiv:2307.15190.

    Example:
        >>> tigon.tvd(torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.25, 0.5]]))
        tensor(0.5000)
    """
    return _divergence(
        "tvd", "tvd", input, target, reduction=reduction, labels=labels, ignore_index=ignore_index,
        from_logits=from_logits, temperature=temperature, is_log=False,
    )  # fmt: skip


class KLDivLoss(nn.KLDivLoss):
    """Compute `kl_div` as a module with the constructor of `torch.nn.KLDivLoss` and further options.

    Args:
        size_average, reduce: Deprecated arguments of torch's module.
        reduction: "none" | "mean" | "sum" | "batchmean".
        log_target: Whether the target holds log-probabilities.
        **options: `from_logits`, `temperature` and `ignore_index` of `kl_div`.

    Raises:
        TypeError: `log_target` is not a bool.
        ValueError: An option has another name. The module checks values when it is called.

    Example:
        >>> loss = tigon.KLDivLoss(reduction="batchmean", from_logits=True, temperature=2.0)
        >>> loss(torch.randn(4, 10), torch.randn(4, 10), labels=torch.tensor([1, 2, -100, 9])).shape
        torch.Size([])
    """

    def __init__(
        self, size_average: bool | None = None, reduce: bool | None = None, reduction: DivergenceReduction = "mean",
        log_target: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        deprecated = {"size_average": size_average, "reduce": reduce}
        checks.flag("KLDivLoss", log_target=log_target, **{k: x for k, x in deprecated.items() if x is not None})
        super().__init__(size_average, reduce, reduction, log_target)
        for name in options:
            checks.choice("KLDivLoss", "an option", name, ("from_logits", "temperature", "ignore_index"))
        self.options = options

    def forward(self, input: Tensor, target: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return `kl_div` of input and target [..., V] and labels [...]."""
        reduction = cast(DivergenceReduction, self.reduction)
        return kl_div(input, target, log_target=self.log_target, reduction=reduction, labels=labels, **self.options)


class JSDLoss(nn.Module):
    """Compute `jsd` as a module.

    Args:
        beta: In [0, 1], the share of the teacher in the mixture.
        ignore_index: Rows with this label have loss and gradient zero.
        **options: `temperature`, `from_logits` and `reduction` of `jsd`.

    Raises:
        ValueError: An option has another name. The module checks values when it is called.

    Example:
        >>> loss = tigon.JSDLoss(beta=0.1, from_logits=True)
        >>> loss(torch.randn(4, 10), torch.randn(4, 10), labels=torch.tensor([1, 2, -100, 9])).shape
        torch.Size([])
    """

    def __init__(self, beta: float = 0.5, ignore_index: int = -100, **options: Any) -> None:
        super().__init__()
        for name in options:
            checks.choice("JSDLoss", "an option", name, ("temperature", "from_logits", "reduction"))
        self.beta, self.ignore_index, self.options = beta, ignore_index, options

    def forward(self, input: Tensor, target: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return `jsd` of input and target [..., V] and labels [...]."""
        return jsd(input, target, beta=self.beta, ignore_index=self.ignore_index, labels=labels, **self.options)


class TVDLoss(nn.Module):
    """Compute `tvd` as a module.

    Args:
        reduction: "batchmean" | "mean" | "sum" | "none".
        ignore_index: Rows with this label have loss and gradient zero.
        **options: `from_logits` and `temperature` of `tvd`.

    Raises:
        ValueError: An option has another name. The module checks values when it is called.

    Example:
        >>> loss = tigon.TVDLoss(from_logits=True)
        >>> loss(torch.randn(4, 10), torch.randn(4, 10), labels=torch.tensor([1, 2, -100, 9])).shape
        torch.Size([])
    """

    def __init__(self, reduction: DivergenceReduction = "batchmean", ignore_index: int = -100, **options: Any) -> None:
        super().__init__()
        for name in options:
            checks.choice("TVDLoss", "an option", name, ("from_logits", "temperature"))
        self.reduction, self.ignore_index, self.options = reduction, ignore_index, options

    def forward(self, input: Tensor, target: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return `tvd` of input and target [..., V] and labels [...]."""
        return tvd(
            input, target, reduction=self.reduction, ignore_index=self.ignore_index, labels=labels, **self.options
        )  # fmt: skip

r"""Activations without a gate: the Gaussian error linear unit and its two approximations, and the squared ReLU.

`activation_kernels.py` has the formulas (Hendrycks and Gimpel, arXiv:1606.08415; So et al., arXiv:2109.08668). Models
that write an approximation as a sequence of torch operations round after each of them, and save up to seven tensors of
the size of x. These ops save x. As in eager code, NaN stays NaN, and dx of relu2 is 0 for x <= 0, even if dy is NaN.

Shapes: M = rows, N = features.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.memory.lean import recomputed_by_call
from tigon.ops.mlps.activation_kernels import activation_backward, activation_forward
from tigon.runtime import checks
from tigon.runtime.device import runs_kernels
from tigon.runtime.op import Node

# The kinds of the kernels, by the name of the approximation.
GELU_KINDS = {"none": "gelu", "tanh": "gelu_tanh", "sigmoid": "gelu_sigmoid"}


def gelu_reference(x: Tensor, approximate: str = "none") -> Tensor:
    return x * torch.sigmoid(1.702 * x) if approximate == "sigmoid" else F.gelu(x, approximate=approximate)


def relu2_reference(x: Tensor) -> Tensor:
    return F.relu(x).square()


class _Activation(Node):
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        return activation_forward(x, kind)

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor]:
        (x,) = ctx.saved_tensors
        return (activation_backward(dy, x, ctx.kind),)


def _has_features(x: Tensor) -> bool:
    return x.dim() > 0 and x.shape[-1] > 0


def gelu(x: Tensor, approximate: Literal["none", "tanh", "sigmoid"] = "none") -> Tensor:
    """Return the GELU of x, the activation of the MLPs of BERT, GPT-2 and vision towers. `x` gets a gradient.

    Args:
        x: [..., N], fp32 | bf16 | fp16, any strides.
        approximate: "none" is the exact GELU, "tanh" the approximation of GPT-2 (as in `F.gelu`), and "sigmoid" the
            approximation x * sigmoid(1.702 x) of CLIP.

    Returns:
        [..., N] in the dtype of `x`.

    Raises:
        TypeError: `x` is not a floating-point tensor.
        ValueError: `approximate` is unknown.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415.

    Example:
        >>> tigon.gelu(torch.tensor([-1.0, 0.0, 3.0]), approximate="tanh")
        tensor([-0.1588,  0.0000,  2.9964])
    """
    checks.tensor("gelu", x=x)
    checks.floating("gelu", x=x)
    checks.choice("gelu", "approximate", approximate, tuple(GELU_KINDS))
    return _gelu(x, approximate)


@recomputed_by_call
def _gelu(x: Tensor, approximate: str) -> Tensor:
    if runs_kernels(x) and _has_features(x):
        return _Activation.apply(x, GELU_KINDS[approximate])
    return gelu_reference(x, approximate)


def relu2(x: Tensor) -> Tensor:
    """Return relu(x)^2, the activation of the MLPs of Nemotron and Arcee. `x` gets a gradient.

    Args:
        x: [..., N], fp32 | bf16 | fp16, any strides.

    Returns:
        [..., N] in the dtype of `x`.

    Raises:
        TypeError: `x` is not a floating-point tensor.

    Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling", arXiv:2109.08668.

    Example:
        >>> tigon.relu2(torch.tensor([-1.0, 0.5, 3.0]))
        tensor([0.0000, 0.2500, 9.0000])
    """
    checks.tensor("relu2", x=x)
    checks.floating("relu2", x=x)
    return _relu2(x)


@recomputed_by_call
def _relu2(x: Tensor) -> Tensor:
    return _Activation.apply(x, "relu2") if runs_kernels(x) and _has_features(x) else relu2_reference(x)

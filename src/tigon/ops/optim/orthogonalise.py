r"""The polar factor of matrices by Newton-Schulz iterations: the product of the step of Muon.

With a singular value decomposition X = U diag(sigma) V^T, an odd polynomial in X acts on the singular values alone.
Muon (Jordan et al., https://kellerjordan.github.io/posts/muon, 2024) takes five steps of

    X <- (a I + b A + c A^2) X,   A = X X^T,   (a, b, c) = (3.4445, -4.7750, 2.0315)

from X / max(|X|_F, eps), which move singular values above about 0.003 to 0.7..1.2. Other coefficients, also one triple
for each step, may be given, such as those of the Polar Express (Amsel et al., arXiv:2505.16932). X has M <= N rows; a
taller matrix is transposed.

**The reference** is the loop of `torch.optim.Muon`: it rounds A, the polynomial and X to bf16 in every step.

**The Gram form** (Zhang, Amsel, Chen and Dao, "Gram Newton-Schulz", https://dao-lab.ai/blog/2026/gram-newton-schulz)
iterates on small matrices, because all factors are polynomials of the first A. With R = X X^T and Q = I,

    Z = b R + c R^2,   Q <- Q (a I + Z),   R <- (a I + Z) R (a I + Z)      in each step,   and at the end   X <- Q X

Each product is symmetric, so it costs half (`symmetric_product`). One matrix takes 6 M^2 N + 14 M^3 multiplications and
additions (5 steps, one restart), and 20 M^2 N + 10 M^3 in the loop. For the 224 matrices of the layers of Llama-3-8B
at 780 TFLOP/s, the floor of the Gram form is 412 ms, and that of the loop 854 ms.

**Precision.** Rounding errors of R grow with Q, so R is computed from X again (a restart) after step 3, then after
every second step, and before the product of the factors a exceeds 45, as it does for the Polar Express after step 2. R,
Z and Q are fp16, which has three bits more than bf16 at the same speed and whose range is large enough for |Q| < 45.
fp16 has fewer digits below 6e-5, and the mean of the eigenvalues of R is 1 / M. But the terms b R and c R^2 are small
beside a there: for [2048, 2560], a factor M in R changes the error by less than 1 %. X stays in bf16 and is never
divided by its norm: R and the result are scaled instead. Coefficients whose products could leave the range of fp16 are
computed by the loop.

The error against exact arithmetic, relative in the Frobenius norm, for [256, 896] and spectra from flat to rank 1 (the
loop of torch, the Gram form in bf16 with a restart after step 2, as here):

    Gaussian            0.012  0.012  0.007
    sigma_i ~ 1 / i     0.025  0.062  0.009
    log-uniform, 1e-4   0.070  0.152  0.016
    half zero           0.108  0.212  0.022
    one large           0.601  0.104  0.056

Shapes: X [batch, rows, columns] bf16, contiguous.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tigon.ops.optim.symmetric_product import Epilogue, symmetric_product
from tigon.runtime.device import runs_kernels

# (a, b, c) of each step.
Coefficients = Sequence[tuple[float, float, float]]

# The number of steps before the first restart, and between later ones, and the largest product of |a| in between.
FIRST_STEPS, LATER_STEPS, LARGEST_GROWTH = 3, 2, 45.0
# The smallest norm by which the kernels divide.
SMALLEST_NORM = 1e-18


def newton_schulz_reference(x: Tensor, coefficients: Coefficients, eps: float) -> Tensor:
    """Return the polar factor of x [rows, columns] in bf16, with the operations of `torch.optim.Muon`."""
    is_tall = x.shape[0] > x.shape[1]
    x = (x.mT if is_tall else x).bfloat16()
    x = x / x.norm().clamp(min=eps)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def has_range_of_fp16(coefficients: Coefficients) -> bool:
    """Return whether the Gram form cannot leave the range of fp16, 65504, for singular values up to about 1.2."""
    return all(abs(a) <= 32 and abs(b) <= 256 and abs(c) <= 256 for a, b, c in coefficients)


def restarts(coefficients: Coefficients) -> set[int]:
    """Return the steps, counted from 0, before which R is computed from X again.

    Example:
        >>> restarts([(3.4445, -4.7750, 2.0315)] * 5)
        {3}
    """
    steps: set[int] = set()
    length, growth = 0, 1.0
    for step, (a, _, _) in enumerate(coefficients):
        limit = LATER_STEPS if steps else FIRST_STEPS
        if length == limit or (length and growth * abs(a) > LARGEST_GROWTH):
            steps.add(step)
            length, growth = 0, 1.0
        length, growth = length + 1, growth * abs(a)
    return steps


def gram_newton_schulz(x: Tensor, inverse_norms: Tensor, coefficients: Coefficients) -> Tensor:
    """Return Q X, the polar factors divided by `inverse_norms` [batch], for x [batch, rows, columns] in bf16. The
    result is not contiguous memory of x."""
    is_tall = x.shape[1] > x.shape[2]
    squares = inverse_norms * inverse_norms
    r = q = None
    first_steps = restarts(coefficients)
    for step, (a, b, c) in enumerate(coefficients):
        if r is None:
            wide = x.mT if is_tall else x
            r, _ = symmetric_product(wide, wide, Epilogue(scales=squares))
        is_last = step + 1 == len(coefficients) or step + 1 in first_steps
        q_dtype = torch.bfloat16 if is_last else torch.float16
        # In the first step of a segment, Q is Z + a I.
        diagonal = a if q is None else None
        z, first_q = symmetric_product(
            r, r, Epilogue(alpha=c, beta=b, addend=r, diagonal=diagonal, diagonal_dtype=q_dtype)
        )
        if q is None:
            q = first_q
        else:
            q, _ = symmetric_product(q, z, Epilogue(beta=a, addend=q, dtype=q_dtype))
        assert q is not None
        if is_last:
            x = torch.bmm(x, q) if is_tall else torch.bmm(q, x)
            r = q = None
        else:
            y, _ = symmetric_product(r, z, Epilogue(beta=a, addend=r))
            r, _ = symmetric_product(y, z, Epilogue(beta=a, addend=y))
    return x


def orthogonalise(
    x: Tensor, squares: Tensor | None, coefficients: Coefficients, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Return the polar factors of x [batch, rows, columns] in bf16, and the numbers by which to multiply them, or None.
    `squares` [batch] fp32 are the sums of the squares of the matrices; None computes them here."""
    if not runs_kernels(x) or not coefficients or not has_range_of_fp16(coefficients):
        return torch.stack([newton_schulz_reference(y, coefficients, eps) for y in x]), None
    if squares is None:
        squares = torch.linalg.vector_norm(x, dim=(1, 2), dtype=torch.float32).square()
    # The square of the inverse of a smaller norm is infinite in fp32.
    inverse_norms = squares.sqrt().clamp(min=max(eps, SMALLEST_NORM)).reciprocal()
    return gram_newton_schulz(x, inverse_norms, coefficients), inverse_norms

"""Products of symmetric results, and the polar factors that Muon computes by them, are compared with fp64."""

import pytest
import torch

from op_cases import DEVICE, one_in
from tigon.ops.optim import symmetric_product as products
from tigon.ops.optim.orthogonalise import (
    gram_newton_schulz,
    has_range_of_fp16,
    newton_schulz_reference,
    orthogonalise,
    restarts,
)
from tigon.ops.optim.symmetric_product import Epilogue, SymmetricConfig, symmetric_product, symmetric_product_reference
from tigon.runtime.tuning import tuned

TORCH = (3.4445, -4.7750, 2.0315)
# The first steps of Amsel et al., which are different in each step. Their safety factor is 1.01.
POLAR_EXPRESS = [
    (a / 1.01, b / 1.01**3, c / 1.01**5)
    for a, b, c in (
        (8.2872, -23.5959, 17.3004), (4.1071, -2.9478, 0.5448), (3.9487, -2.9089, 0.5518),
        (3.3184, -2.4885, 0.5100), (2.3007, -1.6689, 0.4188),
    )
]  # fmt: skip


def make_matrices(batch: int, m: int, k: int, by_rows: bool, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(m + k)
    shape = (batch, m, k) if by_rows else (batch, k, m)
    x = (torch.randn(shape, generator=generator) / k**0.5).to(DEVICE, dtype)
    return x if by_rows else x.mT


SMALL = {"block_m": 16, "block_n": 16, "block_k": 16, "num_warps": 1, "num_stages": 2, "group": 2}
# Rows and columns are below, at and above the sides of tiles. The TMA copies rows of 16 bytes.
SIZES = {
    "one tile": (1, 16, 16), "odd": (2, 19, 37), "even": (2, 48, 32), "rows only": (1, 1, 5), "one column": (3, 21, 1),
    "aligned": (2, 40, 56),
}  # fmt: skip


@pytest.mark.kernels
@one_in(2, size=SIZES, by_rows={"rows": True, "columns": False}, uses_tma={"pointers": False, "TMA": True})
def test_the_kernel_computes_the_reference(size, by_rows, uses_tma):
    if uses_tma and products.TensorDescriptor is None:
        pytest.skip("This Triton has no tensor descriptors.")
    batch, *_ = size
    x = make_matrices(*size, by_rows, torch.float16)
    addend, scales = x @ x.mT, torch.arange(1, batch + 1, device=DEVICE) * 0.5
    epilogue = Epilogue(1.5, -0.5, addend, scales, 2.0, torch.float16, torch.bfloat16)
    with tuned(SymmetricConfig, **SMALL, uses_tma=uses_tma):
        c, q = symmetric_product(x, x, epilogue)
    expected, expected_q = symmetric_product_reference(x, x, epilogue)
    assert q.dtype == torch.bfloat16
    torch.testing.assert_close(c, expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(q, expected_q, rtol=1e-2, atol=1e-2)
    assert torch.equal(c, c.mT)
    assert torch.equal(q, q.mT)


@pytest.mark.kernels
@pytest.mark.parametrize("blocks", [{"block_n": 64}, {"block_m": 64}, {"block_m": 32, "block_n": 32}], ids=str)
def test_only_the_half_below_the_diagonal_is_computed(blocks):
    """Rounding makes products of commuting matrices slightly asymmetric. Here A B^T is not symmetric at all."""
    a = make_matrices(2, 70, 24, True, torch.float16)
    b = a.flip(1)
    with tuned(SymmetricConfig, **SMALL | blocks):
        c, q = symmetric_product(a, b, Epilogue())
    assert q is None
    expected, _ = symmetric_product_reference(a, b, Epilogue())
    torch.testing.assert_close(c, expected, rtol=2e-3, atol=2e-3)
    assert torch.equal(c, c.mT)
    assert not torch.allclose(c.float(), a.float() @ b.float().mT, atol=1e-2)


def spectrum(name: str, m: int) -> torch.Tensor:
    i = torch.arange(m, dtype=torch.float64)
    return {
        "flat": torch.ones(m, dtype=torch.float64), "1/i": 1 / (i + 1), "log-uniform": 10 ** (-8 * i / m),
        "few large": torch.where(i < max(1, m // 64), 1.0, 1e-3), "one large": torch.where(i < 1, 1.0, 1e-4),
        "half zero": torch.where(i < m // 2, 1.0, 0.0),
    }[name]  # fmt: skip


def make_matrix(m: int, n: int, name: str) -> torch.Tensor:
    """Return a matrix with these singular values in bf16."""
    generator = torch.Generator().manual_seed(m * n)
    if name == "Gaussian":
        return torch.randn(m, n, generator=generator, dtype=torch.float64).bfloat16()
    small = min(m, n)
    left, right = (torch.linalg.qr(torch.randn(x, small, generator=generator, dtype=torch.float64))[0] for x in (m, n))
    return ((left * spectrum(name, small)) @ right.T).bfloat16()


def exact_polar_factor(x: torch.Tensor, coefficients) -> torch.Tensor:
    """Return what the iterations compute without rounding: the polynomial of the singular values, in fp64."""
    x = x.double()
    left, values, right = torch.linalg.svd(x / x.norm(), full_matrices=False)
    for a, b, c in coefficients:
        values = a * values + b * values**3 + c * values**5
    return (left * values) @ right


def error(x: torch.Tensor, exact: torch.Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


def gram(x: torch.Tensor, coefficients) -> torch.Tensor:
    inverse_norms = 1 / x.float().norm()[None]
    return gram_newton_schulz(x[None], inverse_norms, coefficients)[0].double() * inverse_norms.double()


SPECTRA = ["Gaussian", "flat", "1/i", "log-uniform", "few large", "one large", "half zero"]


FORMS = {
    "wide": ((128, 448), [TORCH] * 5, SPECTRA),
    "tall": ((448, 128), [TORCH] * 5, SPECTRA),
    "square": ((128, 128), [TORCH] * 5, SPECTRA),
    "coefficients of each step": ((96, 160), POLAR_EXPRESS, SPECTRA),
} | {f"{n} steps": ((64, 160), [TORCH] * n, ["Gaussian", "log-uniform", "half zero"]) for n in (1, 2, 3, 4, 6, 7, 10)}


@pytest.mark.no_interpreter("Matrices of this size would take minutes.")
@pytest.mark.parametrize(("shape", "coefficients", "spectra"), FORMS.values(), ids=FORMS)
def test_the_gram_form_is_more_accurate_than_the_loop_of_torch(shape, coefficients, spectra):
    """Only for a square Gaussian matrix are both errors about equal. Without restarts, three spectra fail."""
    for name in spectra:
        x = make_matrix(*shape, name)
        exact = exact_polar_factor(x, coefficients)
        loop = newton_schulz_reference(x, coefficients, 1e-7)
        assert error(gram(x, coefficients), exact) < 1.05 * error(loop, exact) + 2**-9, name


def test_restarts_depend_on_the_growth():
    assert restarts([TORCH] * 10) == {3, 5, 7, 9}
    assert restarts(POLAR_EXPRESS) == {2, 4}
    assert restarts([(50.0, 0.0, 0.0)] * 3) == {1, 2}
    assert restarts([(1.0, 0.0, 0.0)] * 6) == {3, 5}
    assert restarts([]) == set()


@pytest.mark.kernels
@pytest.mark.parametrize("shape", [(16, 40), (17, 9), (1, 6), (6, 1), (24, 24)], ids=str)
def test_the_kernels_orthogonalise_a_batch(shape):
    x = torch.stack([make_matrix(*shape, "Gaussian"), 1e-3 * make_matrix(*shape, "1/i")]).to(DEVICE)
    before = x.clone()
    with tuned(SymmetricConfig, **SMALL, uses_tma=False):
        o, scales = orthogonalise(x, None, [TORCH] * 5, 1e-7)
    assert torch.equal(x, before)
    for y, z, scale in zip(x.cpu(), o.cpu(), scales.cpu(), strict=True):
        exact = exact_polar_factor(y, [TORCH] * 5)
        loop = error(newton_schulz_reference(y, [TORCH] * 5, 1e-7), exact)
        assert error(z.double() * scale.double(), exact) < 2 * loop + 2**-7


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Gaussian", "1/i", "half zero"])
@pytest.mark.parametrize(
    "shape", [(1024, 4096), (4096, 1024), (2048, 2048), (1000, 2048), (2048, 1000), (2304, 2880), (1023, 1537)], ids=str
)
def test_a_gpu_is_more_accurate_than_the_loop_of_torch(shape, name):
    """The sizes take the kernels with and without the TMA, and with each size of tiles."""
    x = make_matrix(*shape, name).to(DEVICE)
    exact = x.double() / x.double().norm()
    for a, b, c in [TORCH] * 5:
        gram = exact @ exact.mT if shape[0] <= shape[1] else exact.mT @ exact
        factor = a * torch.eye(len(gram), device=DEVICE, dtype=gram.dtype) + b * gram + c * gram @ gram
        exact = factor @ exact if shape[0] <= shape[1] else exact @ factor
    o, scales = orthogonalise(torch.stack([x, x, x]), None, [TORCH] * 5, 1e-7)
    loop = error(newton_schulz_reference(x, [TORCH] * 5, 1e-7), exact)
    for y, scale in zip(o, scales, strict=True):
        assert error(y.double() * scale.double(), exact) < 1.1 * loop + 2**-9


@pytest.mark.kernels
def test_zeros_stay_zeros():
    x = torch.zeros(2, 8, 24, dtype=torch.bfloat16, device=DEVICE)
    with tuned(SymmetricConfig, **SMALL):
        o, scales = orthogonalise(x, None, [TORCH] * 5, 1e-7)
    assert torch.equal(o, x)
    assert bool(scales.isfinite().all())


@pytest.mark.parametrize("coefficients", [[], [(40.0, -1.0, 0.1)], [(3.0, 300.0, 2.0)]], ids=["none", "a", "b"])
def test_the_loop_takes_what_fp16_may_not_hold(coefficients):
    assert coefficients == [] or not has_range_of_fp16(coefficients)
    x = make_matrix(8, 24, "Gaussian").to(DEVICE)
    o, scales = orthogonalise(x[None], None, coefficients, 1e-7)
    assert scales is None
    assert torch.equal(o[0], newton_schulz_reference(x, coefficients, 1e-7))

"""The two passes of Muon over memory are compared with their formulas in fp64."""

from unittest.mock import patch

import pytest
import torch

from op_cases import DEVICE, one_in
from tigon.ops.optim import muon_kernels, tensor_table
from tigon.ops.optim.muon_kernels import Matrix, apply_update, compute_momentum, table_of


@pytest.mark.kernels
@one_in(1, offset=[0, 1], nesterov=[True, False])
def test_both_passes_write_what_they_should(nesterov, offset):
    """The matrices have elements of 7 around them. With an offset they are not aligned."""
    generator = torch.Generator().manual_seed(0)
    memory = [torch.full((3, 16 * 33 + 2), 7.0, device=DEVICE) for _ in range(3)]
    matrices = []
    for i in range(3):
        views = [x[i][offset : offset + 16 * 33].view(16, 33) for x in memory]
        for x in views:
            x.copy_(torch.randn(16, 33, generator=generator))
        matrices.append(Matrix(*views))
    before = [Matrix(*(x.clone() for x in matrix)) for matrix in matrices]
    with patch.object(tensor_table, "BLOCK_BYTES", 256), patch.object(muon_kernels, "SPAN", 2):
        table = table_of(matrices, None)
        assert table_of(matrices, table) is table
        u, squares = compute_momentum(matrices, 0.9, nesterov, table)
        o, scales = torch.randn_like(u), torch.tensor([1.0, 2.0, 3.0], device=DEVICE)
        apply_update(matrices, o, scales, torch.tensor(0.5, device=DEVICE), 0.25, 0.1, table)
    for i, (matrix, old) in enumerate(zip(matrices, before, strict=True)):
        assert torch.equal(matrix.grad, old.grad)
        m = 0.9 * old.momentum.double() + 0.1 * old.grad.double()
        torch.testing.assert_close(matrix.momentum, m.float(), rtol=1e-5, atol=1e-6)
        expected = 0.9 * m + 0.1 * old.grad.double() if nesterov else m
        torch.testing.assert_close(u[i].double(), expected, rtol=2**-8, atol=1e-3)
        torch.testing.assert_close(squares[i], u[i].float().square().sum(), rtol=1e-5, atol=0.0)
        p = old.param.double() * (1 - 0.5 * 0.1) - 0.5 * 0.25 * (i + 1) * o[i].double()
        torch.testing.assert_close(matrix.param, p.float(), rtol=1e-5, atol=1e-5)
    for x in memory:
        assert bool((x[:, :offset] == 7).all())
        assert bool((x[:, offset + 16 * 33 :] == 7).all())

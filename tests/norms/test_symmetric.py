"""The norm of a symmetric matrix is not below that of any eigenvalue, and close to the largest."""

from __future__ import annotations

import pytest
import torch

from surefoot.norms.verified import symmetric_norm


@pytest.mark.parametrize("decay", [0.1, 3.0, 1e6])
@pytest.mark.parametrize("size", [1, 2, 40, 200])
def test_close_from_above(size: int, decay: float) -> None:
    torch.manual_seed(size)
    turn = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0]
    values = torch.randn(size, dtype=torch.float64) * torch.exp(-torch.arange(size) / decay)
    for scale in (1.0, 1e-160, 1e150):
        matrix = scale * (turn * values) @ turn.mT
        true = float(torch.linalg.eigvalsh(0.5 * (matrix + matrix.mT)).abs().max())
        assert true * (1 - 1e-12) <= symmetric_norm(matrix.clone()) <= true * 1.02


def test_only_the_symmetric_part_counts() -> None:
    matrix = torch.tensor([[1.0, 5.0], [-5.0, -2.0]], dtype=torch.float64)
    assert abs(symmetric_norm(matrix) - 2.0) <= 1e-9
    assert symmetric_norm(torch.zeros(3, 3, dtype=torch.float64)) == 0.0

"""Costs of computations and steps against the paper's closed forms and against algorithms that count."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from surefoot.complexity import cost
from surefoot.complexity.layers import newton_layer


def test_fully_connected_closed_form() -> None:
    """Paper: Σ 2 m δ_t (δ_{t-1} + 1)."""
    m, sizes = 5, (7, 6, 4, 3)
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())]
    found = cost(nn.Sequential(*layers), torch.ones(m, sizes[0]))
    expected = sum(2 * m * b * (a + 1) for a, b in pairwise(sizes))
    assert found.refined.backward == found.structured.backward == expected


def test_convolutional_closed_form() -> None:
    """Paper: Σ (2 n^p n^f s^f + n^p n^f + δ_t) m."""
    m = 3
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Softplus(), nn.Conv2d(4, 5, 3, stride=2), nn.Sigmoid())
    found = cost(model, torch.ones(m, 2, 8, 8))
    first = 2 * 64 * 4 * 18 + 64 * 4 + 64 * 4
    second = 2 * 9 * 5 * 36 + 9 * 5 + 9 * 5
    assert found.refined.backward == m * (first + second)


def test_generic_closed_form() -> None:
    m, sizes = 3, (4, 5, 2)
    found = cost(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)), torch.ones(m, 4))
    d = [m * size for size in sizes]
    p = [a * b + b for a, b in pairwise(sizes)]
    space = sum((p[t] + d[t]) * d[t + 1] for t in range(2))
    assert found.space == space
    assert found.generic.backward == 2 * space
    assert found.generic.forward_backward == found.forward + d[1] + 2 * space  # one derivative per ReLU


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x) + x)


def test_residual_sum_is_one_identity() -> None:
    """b(x, u) = xU + u⁰ + x: s_β = mδ², s_βu = mδ, s_βx = mδ."""
    (layer,) = cost(_Residual(), torch.ones(3, 4)).computations
    assert (layer.bilinear, layer.affine_parameters, layer.affine_state) == (48, 12, 12)
    assert layer.nonaffine == 12


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.query(x) @ self.key(x).transpose(1, 2)


def test_product_of_states_has_two_derivatives() -> None:
    found = cost(_Attention(), torch.ones(2, 5, 3))
    product = 2 * 5 * 5 * 3
    assert sum(layer.nonaffine for layer in found.computations) == 2 * product
    assert sum(layer.evaluation for layer in found.computations) == product


def test_fixed_factor_is_linear() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("matrix", torch.ones(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x @ self.matrix)

    (layer,) = cost(Scaled(), torch.ones(5, 4)).computations
    assert (layer.bilinear, layer.affine_parameters, layer.affine_state) == (30, 10, 60)
    assert layer.products == 90
    assert layer.products_backward == 30  # neither the input nor the fixed matrix is differentiated


def test_function_of_parameters_alone() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, 2 * self.weight)

    (layer,) = cost(Doubled(), torch.ones(5, 3)).computations
    assert (layer.bilinear, layer.affine_parameters, layer.affine_state) == (30, 6, 0)


def test_gauss_newton_calls() -> None:
    found = cost(nn.Linear(4, 3), torch.ones(5, 4))
    gradient, paper, shared, _ = found.oracles
    assert gradient.multiplications == found.structured.forward_backward
    assert paper.calls == 2 * 15 + 1
    assert paper.multiplications == 31 * gradient.multiplications
    assert paper.relative == 31
    forward = gradient.multiplications - found.structured.backward
    assert shared.multiplications == forward + 31 * found.structured.backward


class _Machine:
    """Matrix algebra that counts its multiplications, divisions and roots."""

    def __init__(self) -> None:
        self.count = 0

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        self.count += a.shape[0] * a.shape[1] * b.shape[1]
        return a @ b

    def along(self, tensor: Tensor, costate: Tensor) -> Tensor:
        self.count += tensor.numel()
        return tensor @ costate[:, 0]

    def factor(self, matrix: Tensor) -> Tensor:
        n = len(matrix)
        lower = torch.zeros_like(matrix)
        for j in range(n):
            for i in range(j, n):
                entry = matrix[i, j]
                for k in range(j):
                    entry = entry - lower[i, k] * lower[j, k]
                    self.count += 1
                lower[i, j] = entry.sqrt() if i == j else entry / lower[j, j]
                self.count += 1
        return lower

    def solve(self, lower: Tensor, right: Tensor) -> Tensor:
        for matrix, order in ((lower, range(len(lower))), (lower.T, reversed(range(len(lower))))):
            solution = torch.zeros_like(right)
            for i in order:
                entry = right[i].clone()
                for k in range(len(lower)):
                    if matrix[i, k] != 0 and k != i:
                        entry = entry - matrix[i, k] * solution[k]
                        self.count += right.shape[1]
                solution[i] = entry / matrix[i, i]
                self.count += right.shape[1]
            right = solution
        return right


@settings(deadline=None, derandomize=True, max_examples=25)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_newton_layer_counts_the_algorithm(d: int, e: int, p: int) -> None:
    """Lines of the Algorithm "Newton oracle by dynamic programming" on random matrices."""
    generator = torch.Generator().manual_seed(d + 7 * e + 49 * p)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    machine = _Machine()
    a, b, half, c = random(e, d), random(e, p), random(e, e), random(e, 1)
    cost_to_go = half @ half.T
    costate, y = random(e, 1), random(d, 1)
    p_before, q_second = machine.along(random(d, d, e), costate), machine.along(random(p, p, e), costate)
    r = machine.along(random(d, p, e), costate)
    machine.product(a.T, costate)
    ca, cb = machine.product(cost_to_go, a), machine.product(cost_to_go, b)
    aca, acb, bcb = machine.product(a.T, ca), machine.product(a.T, cb), machine.product(b.T, cb)
    damping = 100 + q_second.abs().sum()
    lower = machine.factor(damping * torch.eye(p) + (q_second + q_second.T) / 2 + bcb)
    linear = machine.product(b.T, c)
    solved = machine.solve(lower, torch.cat([r.T + acb.T, linear], dim=1))
    gain, offset = -solved[:, :d], -solved[:, d:]
    machine.product(r + acb, gain)
    machine.product(r + acb, offset)
    machine.product(a.T, c)
    step = machine.product(gain, y) + offset
    machine.product(a, y)
    machine.product(b, step)
    assert p_before.shape == aca.shape == (d, d)
    assert newton_layer(d, e, p) == machine.count

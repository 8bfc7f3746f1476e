"""Rows of the Jacobian, sample by sample, beside automatic differentiation row by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, vmap
from torch.nn import functional as F

import surefoot as sf
from judges.layered import MODELS, build
from surefoot.oracles.losses import factor_of
from surefoot.oracles.problem import Problem
from surefoot.oracles.samples import NONE, SEVERAL, labels, rows_of, structure

F64 = torch.float64


class Poisson(nn.Module):
    """Residuals inside and on the boundary of a square: both sets of points are rows of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def laplacian(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([0.3 * self.laplacian(x[:6]) + 1.0, self.net(x[6:]) - x[6:, :1]])


class ByAutograd(Poisson):
    def laplacian(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return sum(torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i : i + 1] for i in range(2))


class ByHessian(Poisson):
    def laplacian(self, x: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        at = hessian(lambda point: functional_call(self.net, weights, (point[None],))[0, 0])
        return vmap(lambda point: at(point).diagonal().sum())(x)[:, None]


class Closed(Poisson):
    def laplacian(self, x: Tensor) -> Tensor:
        first, last = self.net[0], self.net[2]
        t = torch.tanh(first(x))
        return (-2 * t * (1 - t * t)) @ (last.weight * first.weight.square().sum(1)).T


class Jets(Poisson):
    def laplacian(self, x: Tensor) -> Tensor:
        rows = torch.stack([x, *(torch.eye(2, dtype=F64)[i].expand_as(x) for i in range(2))])
        z = rows @ self.net[0].weight.T
        t = torch.tanh(z[0] + self.net[0].bias)
        return (-2 * t * (1 - t * t) * z[1:].square().sum(0)) @ self.net[2].weight.T


class Ansatz(Poisson):
    def laplacian(self, x: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        at = hessian(lambda p: (p * (1 - p)).prod() * functional_call(self.net, weights, (p[None],))[0, 0])
        return vmap(lambda point: at(point).diagonal().sum())(x)[:, None]


FORMULATIONS = [ByAutograd, ByHessian, Closed, Jets, Ansatz]
POINTS = torch.linspace(-1.0, 1.0, 20, dtype=F64).reshape(10, 2).sin()


def assert_rows(problem: Problem) -> None:
    """The rows are those of automatic differentiation, stored or as factors; so are products with them."""
    factor = factor_of(problem, F64)
    columns = factor.all_columns(F64, problem.output.device)
    expected = []
    for sample in range(factor.samples):
        for column in columns:
            slope = torch.zeros_like(problem.output)
            slope[sample] = column[sample]
            expected.append(problem.join(problem.autodiff.pullback(slope)))
    dense = torch.stack(expected)
    v = torch.linspace(-1, 1, problem.size, dtype=F64).cos()
    z = torch.linspace(-1, 1, len(dense), dtype=F64).sin()
    for outers in (False, True):
        rows = rows_of(problem, factor, outers=outers)
        torch.testing.assert_close(rows.push(problem.split(v)).flatten(), dense @ v, rtol=1e-10, atol=1e-12)
        pulled = problem.join(rows.pull(z.view(rows.shape), problem.parameters))
        torch.testing.assert_close(pulled, z @ dense, rtol=1e-10, atol=1e-12)
        assert outers or rows.dense.shape == dense.shape
    torch.testing.assert_close(rows_of(problem, factor).dense, dense, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_networks(name: str) -> None:
    model, x = build(name)
    assert_rows(Problem(sf.Chain(model, x), sf.CrossEntropy(torch.arange(len(x)) % 3)))


@pytest.mark.parametrize("kind", FORMULATIONS)
def test_rows_of_residuals_come_without_a_pull_back_for_each(kind: type[Poisson]) -> None:
    problem = Problem(sf.Chain(kind(), POINTS), sf.Square(torch.zeros(10, 1, dtype=F64)))
    assert_rows(problem)
    assert not structure(problem).rest
    before = problem.autodiff.calls
    rows_of(problem, factor_of(problem, F64))
    assert problem.autodiff.calls == before + 1


@pytest.mark.parametrize("method", ["auto", "primal_gram", "dual_gram"])
def test_every_way_to_write_an_equation_has_the_same_step(method: Any) -> None:
    steps = [
        sf.oracles.gauss_newton(sf.Chain(kind(), POINTS), sf.Square(torch.zeros(10, 1, dtype=F64)), 1e-3, method)
        for kind in FORMULATIONS[:4]
    ]
    assert all(step.solved for step in steps)
    for step in steps[1:]:
        for path, part in step.direction.items():
            torch.testing.assert_close(part, steps[0].direction[path], rtol=1e-7, atol=1e-9)


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.transpose(0, 1),
    "product of samples": lambda x: x.transpose(0, 1) @ x,
    "softmax over samples": lambda x: x.softmax(dim=0),
    "softmax": lambda x: x.softmax(dim=-1),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "cumulative": lambda x: x.cumsum(dim=0),
    "flip": lambda x: x.flip(0),
    "mean over samples": lambda x: x - x.mean(dim=0, keepdim=True),
    "mean": lambda x: x - x.mean(dim=1, keepdim=True),
    "merged and split": lambda x: x.reshape(16, 4).reshape(4, 4, 4),
    "one sample for all": lambda x: x + x[2],
    "largest of samples": lambda x: F.max_pool3d(x[None], 3, stride=1, padding=1)[0],
    "one sample expanded": lambda x: x[0].expand(4, 4, 4),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
}


@pytest.mark.parametrize("name", MIXING)
def test_labels_are_the_samples_that_an_entry_reaches(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 4, 4, dtype=F64, requires_grad=True)
    (found,) = labels(MIXING[name](x).tanh(), [x])
    jacobian = torch.autograd.functional.jacobian(MIXING[name], x.detach()).abs().amax((1, 2))
    count = (jacobian > 0).sum(0)
    assert torch.equal(found == NONE, count == 0)
    assert torch.equal(found == SEVERAL, count > 1)
    assert torch.equal(found[count == 1], jacobian.argmax(0)[count == 1])


def test_a_language_model_with_tokens_in_a_dimension_of_their_own_needs_no_large_blocks() -> None:
    """The step is that of the tokens as rows; blocks of a sample would have 16,000 × 15,984 numbers each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 6), nn.Tanh(), nn.Linear(6, 1000)).double()
    ids, y = torch.randint(0, 30, (4, 16)), torch.randint(0, 1000, (4, 16))
    whole = sf.oracles.gauss_newton(sf.Chain(model, ids), sf.CrossEntropy(y), 1e-2, "primal", tolerance=1e-8)
    rows = nn.Sequential(model, nn.Flatten(0, 1))
    flat = sf.oracles.gauss_newton(
        sf.Chain(rows, ids), sf.CrossEntropy(y.flatten()), 1e-2, "primal", tolerance=1e-8
    )
    assert whole.solved
    scale = max(float(part.abs().max()) for part in flat.direction.values())
    assert math.isfinite(scale)
    for path, part in whole.direction.items():
        assert float((part - flat.direction[f"0.{path}"]).abs().max()) <= 1e-6 * scale

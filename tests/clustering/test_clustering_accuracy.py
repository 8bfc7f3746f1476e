"""What is proved of the solvers of clustering objectives holds, judged with fifty digits or by all assignments."""

from __future__ import annotations

import itertools
from typing import Any

import mpmath as mp
import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.calculus.adjoint.gradient import proved_gradient, push
from surefoot.calculus.analysis import Analysis
from surefoot.clustering import ConvexClustering, KMeans, Spectral

D = torch.float64


class Placed(nn.Module):
    """Outputs that are the parameters themselves."""

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self.outputs = nn.Parameter(outputs)

    def forward(self, scale: Tensor) -> Tensor:
        return self.outputs * scale


def exactly(outputs: Tensor) -> Any:
    return mp.matrix(outputs.tolist())


def square(matrix: Any) -> Any:
    return mp.fsum(entry**2 for entry in matrix)


def judged(outputs: Tensor, objective: nn.Module, value: Any, gradient: Any, sharp: float) -> None:
    """Value, gradient and a directional derivative are off by no more than is proved, and that is little."""
    model, one = Placed(outputs), torch.ones((), dtype=D)
    nearest, count = objective.proximity.solved(outputs), len(outputs) if objective.reduction == "mean" else 1
    apart = exactly(nearest.point) - exactly(outputs) + count * gradient
    assert mp.sqrt(square(apart)) <= nearest.accuracy().point
    found = sf.evaluate(model, one, objective)
    assert abs(mp.mpf(found.value) - value) <= found.error <= sharp * float(value) + 1e-300
    analysis = Analysis.of(model, one, objective)
    proved, result = proved_gradient(analysis), analysis.over(sf.Ball(0.0))
    difference = exactly(proved.slopes["outputs"]) - gradient
    size = float(mp.sqrt(square(gradient)))
    assert mp.sqrt(square(difference)) <= proved.errors["outputs"] <= sharp * size + 1e-300
    move = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1), dtype=D)
    (name,) = result.region.variables
    pushed = push(result, {name: move}, result.outputs[0])
    along = mp.fsum(a * b for a, b in zip(exactly(move), gradient, strict=True))
    assert pushed is not None
    assert abs(mp.mpf(float(pushed.value)) - along) <= float(pushed.error) <= sharp * size * float(move.norm())


def placed(count: int, width: int, scale: float, mean: float) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return scale * (mean + torch.randn(count, width, generator=generator, dtype=D))


@pytest.mark.parametrize(("scale", "mean"), [(1.0, 0.0), (1.0, 1e6), (1e-100, 1.0), (1e100, 0.0)])
def test_one_mean(scale: float, mean: float) -> None:
    y = placed(7, 3, scale, mean)
    with mp.workdps(400):
        exact = exactly(y)
        means = [mp.fsum(exact[:, j]) / 7 for j in range(3)]
        gradient = mp.matrix([[(exact[i, j] - means[j]) / 7 for j in range(3)] for i in range(7)])
        judged(y, KMeans(1), square(gradient) * 7 / 2, gradient, 1e-12 * max(1.0, mean) ** 2)


@pytest.mark.parametrize("gap", [1.0, 1e-3, 1e-7])
@pytest.mark.parametrize("scale", [1.0, 1e-100, 1e100])
def test_spectral(gap: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    u, v = (torch.linalg.qr(torch.randn(n, 3, generator=generator, dtype=D))[0] for n in (6, 3))
    y = scale * (u * torch.tensor([2.0, 1.0 + gap, 1.0], dtype=D)) @ v.mT
    with mp.workdps(250):
        left, values, right = mp.svd_r(exactly(y))
        gradient = mp.matrix([[left[i, 2] * values[2] * right[2, j] for j in range(3)] for i in range(6)])
        judged(y, Spectral(2, reduction="sum"), values[2] ** 2 / 2, gradient, 1e-11 / gap)


def test_at_a_tie_nothing_is_claimed_of_the_choice() -> None:
    y = torch.diag(torch.tensor([2.0, 1.0, 1.0], dtype=D))
    objective = Spectral(2, reduction="sum")
    certificate = sf.certify(nn.Identity(), y, objective=objective, wrt="input", domain=sf.Ball(0.0))
    assert float(certificate.lipschitz) >= 1.0
    accuracy = objective.proximity.solved(y).accuracy()
    assert accuracy.point is None
    assert accuracy.value < 1e-12


@pytest.mark.parametrize("tolerance", [0.3, 1e-2, 1e-10])
def test_convex(tolerance: float) -> None:
    """Two points at a distance of 10 that pull each other by 2, and a loose solver."""
    y = torch.tensor([[0.0, 0.0], [6.0, 8.0]], dtype=D)
    with mp.workdps(50):
        gradient = mp.matrix([[mp.mpf(-6) / 5, mp.mpf(-8) / 5], [mp.mpf(6) / 5, mp.mpf(8) / 5]])
        objective = ConvexClustering(penalty=2.0, reduction="sum", tolerance=tolerance)
        judged(y, objective, mp.mpf(16), gradient, 1.0)


@pytest.mark.filterwarnings("ignore:convex clustering")
def test_an_evaluation_knows_the_duality_gap() -> None:
    y = placed(12, 2, 1.0, 0.0)
    loose = ConvexClustering(penalty=0.05, tolerance=0.3, max_iterations=1)
    found = sf.evaluate(Placed(y), torch.ones((), dtype=D), loose)
    truth = float(ConvexClustering(penalty=0.05, tolerance=1e-12)(y))
    assert 1e-9 < abs(found.value - truth) <= found.error + 1e-12 * truth


class Stretched(nn.Module):
    """The second column are parameters: nothing rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x[:, 0], self.by], 1)


def test_a_better_assignment_than_the_one_that_was_found_is_covered() -> None:
    """Lloyd's method stops where rows are cut apart and the parameter is of no use; the minimum cuts columns."""
    y = torch.tensor([[0.0, 0.0], [0.0, 1.0], [4.0, 0.0], [4.0, 1.0]], dtype=D)
    objective = KMeans(2, reduction="sum", warm_start=True)
    objective.proximity._centres = torch.tensor([[2.0, 0.0], [2.0, 1.0]], dtype=D)
    model = Stretched()
    certificate = sf.certify(model, y, objective=objective, domain=sf.Ball(0.0))
    assert objective.solve(y).labels.tolist() == [0, 1, 0, 1]

    def cut(labels: tuple[int, ...]) -> Tensor:
        outputs, groups = model(y), torch.tensor(labels)
        centres = torch.stack([outputs[groups == label].mean(0) for label in groups])
        return 0.5 * (outputs - centres).square().sum()

    best = min((cut(labels) for labels in itertools.product((0, 1), repeat=4)), key=Tensor.item)
    assert best.item() < float(objective(y))
    (slope,) = torch.autograd.grad(best, model.by)
    assert 0.5 < float(slope.norm()) <= float(certificate.lipschitz)

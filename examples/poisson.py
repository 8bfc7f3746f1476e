"""
A physics-informed network by Levenberg-Marquardt
=================================================

**Problem.** Find u on the unit square with :math:`-\\Delta u = f` inside and u = 0 on the boundary, for
:math:`f = 2\\pi^2\\sin(\\pi x)\\sin(\\pi y)`, so that :math:`u = \\sin(\\pi x)\\sin(\\pi y)`. A tanh network
2-32-32-1 stands for u; the residuals of the equation at 900 points inside and of the boundary condition at 120
points are made small in the sense of least squares.

**Method.** The module propagates the value of the network, its first derivatives and its Laplacian together, layer
by layer (forward Laplacian): a linear layer maps all of them alike, and for :math:`z = \\tanh(a)`

.. math:: \\partial_iz = (1 - z^2)\\,\\partial_ia, \\qquad
    \\Delta z = (1 - z^2)\\big(\\Delta a - 2z\\textstyle\\sum_i(\\partial_ia)^2\\big).

So the module is an ordinary function of its weights, and :class:`surefoot.optim.GaussNewton` does the rest: it
chooses how to solve for a step, adapts the damping, and bends steps by their geodesic acceleration.

**Statement.** Every step minimises the Gauss-Newton model with damping κ up to the stated residual. It is taken
only if the objective falls by a part of what the model predicts (Levenberg and Marquardt). At the end the output
layer is solved for, and :func:`surefoot.convergence` proves, round-off included, that it is within a stated
distance of the best one: the residuals are affine in it, so that the loss is a convex quadratic function, and its
smallest eigenvalue is positive. So Newton's method, which is Gauss-Newton here, converges to the least loss that
any output layer can reach on these features.

**Result.** The relative error falls below 1e-4 within 1,500 gradients of work, and below 1e-5 within 5,000. With
the best output layer after 1,500, the loss is 3.8e-10, and proved to be at most 4.1e-13 above the least that these
features allow. No theorem says that all weights together converge to residuals that are all zero: that takes rows
of the Jacobian which are independent, and at weights with an error of 1e-4 the largest singular value is 777, the
least 1e-14, round-off, and of the 1,020 only 154 are above 1e-9 of the largest.
"""

from __future__ import annotations

import math
import sys
import time

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import surefoot as sf

INSIDE, BOUNDARY, WEIGHT = 900, 120, 10.0


class Laplacian(nn.Module):
    """The network's value on the boundary and its negative Laplacian inside: one number per point.

    Args:
        width: of the two hidden layers.
        inside: how many of the points, the first ones, are inside.
        boundary: how many follow.
    """

    def __init__(self, width: int = 32, inside: int = INSIDE, boundary: int = BOUNDARY) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, 1)])
        is_inside = (torch.arange(inside + boundary) < inside).double()
        rows = torch.stack([WEIGHT * (1 - is_inside), 0 * is_inside, 0 * is_inside, -is_inside], dim=1)
        self.register_buffer("residual", rows)  # which part of value, ∂₁, ∂₂ and Δ counts at a point

    def value(self, x: Tensor) -> Tensor:
        """The network itself."""
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)

    def forward(self, x: Tensor) -> Tensor:
        """The residuals without their right-hand side; the boundary condition has a weight."""
        n = len(x)
        units = torch.eye(2, dtype=x.dtype, device=x.device).unsqueeze(0).expand(n, 2, 2)
        jet = torch.cat([x.unsqueeze(1), units, torch.zeros_like(x).unsqueeze(1)], dim=1)  # value, ∂₁, ∂₂, Δ
        for layer in self.layers[:-1]:
            jet = _through_tanh(self._affine(layer, jet))
        last = self._affine(self.layers[-1], jet).squeeze(2)
        return (self.residual * last).sum(1, keepdim=True)

    @staticmethod
    def _affine(layer: nn.Module, jet: Tensor) -> Tensor:
        mapped = nn.functional.linear(jet, layer.weight)
        return torch.cat([mapped[:, :1] + layer.bias, mapped[:, 1:]], dim=1)


def _through_tanh(jet: Tensor) -> Tensor:
    z = torch.tanh(jet[:, :1])
    slope, gradient = 1 - z * z, jet[:, 1:3]
    bent = jet[:, 3:] - 2 * z * (gradient * gradient).sum(1, keepdim=True)
    return torch.cat([z, slope * gradient, slope * bent], dim=1)


def problem() -> tuple[Laplacian, Tensor, Tensor]:
    """The network as it starts, the points, and the right-hand side."""
    torch.manual_seed(0)
    inside = torch.rand(INSIDE, 2, dtype=torch.float64)
    along = torch.rand(BOUNDARY, dtype=torch.float64)
    side = torch.arange(BOUNDARY) % 4
    boundary = torch.stack([torch.where(side < 2, along, side - 2.0), torch.where(side < 2, side, along)], dim=1)
    right = 2 * math.pi**2 * exact(inside)
    x = torch.cat([inside, boundary])
    return Laplacian().double(), x, torch.cat([right, torch.zeros(BOUNDARY, 1, dtype=torch.float64)])


def exact(x: Tensor) -> Tensor:
    """The solution."""
    return (torch.sin(math.pi * x[:, :1])) * torch.sin(math.pi * x[:, 1:])


def relative_error(model: Laplacian) -> float:
    """The relative error in the mean square on a grid."""
    axis = torch.linspace(0, 1, 41, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    with torch.no_grad():
        return float((model.value(grid) - exact(grid)).norm() / exact(grid).norm())


def trained(budget: float) -> Laplacian:
    """The network after as long as so many gradients take."""
    model, x, y = problem()
    objective = sf.Square()
    parameters = list(model.parameters())

    def gradient() -> float:
        start = time.process_time()
        torch.autograd.grad(objective(model(x), y), parameters)
        return time.process_time() - start

    unit = sorted(gradient() for _ in range(20))[10]
    optimizer = sf.optim.GaussNewton(model, objective)
    spent, steps = 0.0, 0
    while spent < budget:
        start = time.process_time()
        loss = optimizer.step(x, y)
        spent += (time.process_time() - start) / unit
        steps += 1
        if steps & (steps - 1) == 0:
            print(f"{steps:4} steps, {spent:5.0f} gradients: loss {loss:.2e}, error {relative_error(model):.2e}")
        if not optimizer.history[-1].step_size:
            break
    print(f"{steps:4} steps, {spent:5.0f} gradients: error {relative_error(model):.2e}")
    return model


def with_best_output_layer(model: Laplacian) -> sf.theorems.Convergence:
    """Solve for the output layer, the others fixed, and say how near it is to the best one, with a proof."""
    _, x, y = problem()
    last = model.layers[-1]
    model.layers[:-1].requires_grad_(False)
    units = torch.eye(last.weight.numel() + 1, dtype=x.dtype)
    before = nn.utils.parameters_to_vector(last.parameters()).detach()

    def residuals(weights: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(weights, last.parameters())
        return model(x).detach()

    columns = torch.cat([residuals(unit) for unit in units], 1)
    # the change is solved for, and not the weights, as it is small and its error is relative to it
    change = torch.linalg.lstsq(columns, y - residuals(before), driver="gelsd").solution.squeeze(1)
    residuals(before + change)
    return sf.convergence(model, x, sf.Square(y), method="newton")


def main(budget: float = 1500.0) -> float:
    """Train; the relative error at the end."""
    model = trained(budget)
    _, x, y = problem()
    verdict = with_best_output_layer(model)
    print(f"The best output layer: loss {sf.Square(y)(model(x)).item():.3e}, error {relative_error(model):.2e}")
    print(verdict)
    return relative_error(model)


def picture(model: Laplacian) -> Figure:
    """The network on the square, and how far it is from the solution."""
    axis = torch.linspace(0, 1, 81, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    value = model.value(grid).detach()
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    for axes, field, title in zip(
        figure.subplots(1, 2),
        (value, (value - exact(grid)).abs()),
        ("network", "distance to the solution"),
        strict=True,
    ):
        shown = axes.imshow(field.reshape(81, 81).T, origin="lower", extent=(0, 1, 0, 1))
        axes.set_title(title)
        figure.colorbar(shown, ax=axes)
    return figure


if __name__ == "__main__":
    finished = trained(float(sys.argv[1]) if len(sys.argv) > 1 else 1500.0)
    print(with_best_output_layer(finished))
    figure = picture(finished)

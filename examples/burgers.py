"""
Burgers' equation by Levenberg-Marquardt
========================================

**Problem.** Find u with :math:`u_t + uu_x = \\nu u_{xx}`, ν = 0.1, on :math:`[-1, 1] \\times [0, 1]`. At t = 0
and at both ends it has the values of the front :math:`\\frac12\\big(1 - \\tanh\\frac{x - t/2}{4\\nu}\\big)`, which
travels. A tanh network 2-24-24-1 stands for u.

**Method.** As for Poisson's equation, the module propagates the value and the derivatives that the equation needs,
:math:`u, u_x, u_t, u_{xx}`, layer by layer. The equation is not linear in u, so the residual is a
product of two of them.

**Statement.** Every step minimises the Gauss-Newton model with damping κ up to the stated residual. It is taken
only if the objective falls by a part of what the model predicts (Levenberg and Marquardt).

**Result.** The relative error falls below 1e-4 within 60 steps.
"""

from __future__ import annotations

import sys

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import surefoot as sf

INSIDE, BOUNDARY, VISCOSITY, WEIGHT = 600, 150, 0.1, 3.0


class Burgers(nn.Module):
    """The residual of the equation inside, and the value on the boundary: one number per point."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, 1)])
        self.register_buffer("is_inside", (torch.arange(INSIDE + BOUNDARY) < INSIDE).double().unsqueeze(1))

    def value(self, x: Tensor) -> Tensor:
        """The network itself."""
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)

    def forward(self, x: Tensor) -> Tensor:
        """The residuals without their right-hand side."""
        units = torch.eye(2, dtype=x.dtype, device=x.device).unsqueeze(0).expand(len(x), 2, 2)
        jet = torch.cat([x.unsqueeze(1), units, torch.zeros_like(x).unsqueeze(1)], dim=1)  # u, u_x, u_t, u_xx
        for layer in self.layers[:-1]:
            jet = self._affine(layer, jet)
            z = torch.tanh(jet[:, :1])
            slope, along = 1 - z * z, jet[:, 1:2]
            jet = torch.cat([z, slope * jet[:, 1:3], slope * (jet[:, 3:] - 2 * z * along * along)], dim=1)
        u, u_x, u_t, u_xx = self._affine(self.layers[-1], jet).squeeze(2).split(1, dim=1)
        return self.is_inside * (u_t + u * u_x - VISCOSITY * u_xx) + WEIGHT * (1 - self.is_inside) * u

    @staticmethod
    def _affine(layer: nn.Module, jet: Tensor) -> Tensor:
        mapped = nn.functional.linear(jet, layer.weight)
        return torch.cat([mapped[:, :1] + layer.bias, mapped[:, 1:]], dim=1)


def exact(x: Tensor) -> Tensor:
    """A front that travels with speed 1/2."""
    return 0.5 * (1 - torch.tanh((x[:, :1] - x[:, 1:] / 2) / (4 * VISCOSITY)))


def problem() -> tuple[Burgers, Tensor, Tensor]:
    """The network as it starts, the points, and the right-hand side."""
    torch.manual_seed(0)
    scale, shift = torch.tensor([2.0, 1.0]).double(), torch.tensor([-1.0, 0.0]).double()
    inside = torch.rand(INSIDE, 2, dtype=torch.float64) * scale + shift
    boundary = torch.rand(BOUNDARY, 2, dtype=torch.float64) * scale + shift
    side = torch.arange(BOUNDARY) % 3
    boundary[side == 0, 1] = 0.0
    boundary[side == 1, 0] = -1.0
    boundary[side == 2, 0] = 1.0
    right = torch.cat([torch.zeros(INSIDE, 1, dtype=torch.float64), WEIGHT * exact(boundary)])
    return Burgers().double(), torch.cat([inside, boundary]), right


def relative_error(model: Burgers) -> float:
    """The relative error in the mean square on a grid."""
    grid = torch.cartesian_prod(torch.linspace(-1, 1, 41).double(), torch.linspace(0, 1, 21).double())
    with torch.no_grad():
        return float((model.value(grid) - exact(grid)).norm() / exact(grid).norm())


def trained(steps: int) -> Burgers:
    """The network after so many steps."""
    model, x, y = problem()
    optimizer = sf.optim.GaussNewton(model, sf.Square())
    for step in range(1, steps + 1):
        loss = optimizer.step(x, y)
        if step % 10 == 0:
            print(f"{step:3} steps: loss {loss:.2e}, relative error {relative_error(model):.2e}")
    return model


def main(steps: int = 60) -> float:
    """Train; the relative error at the end."""
    return relative_error(trained(steps))


def picture(model: Burgers) -> Figure:
    """The front at three times, and where the network says it is."""
    figure = Figure(figsize=(6.5, 3.6), layout="constrained")
    axes = figure.add_subplot()
    place = torch.linspace(-1, 1, 101, dtype=torch.float64)
    for k, time in enumerate((0.0, 0.5, 1.0)):
        points = torch.stack([place, torch.full_like(place, time)], dim=1)
        axes.plot(place, exact(points).squeeze(1), color="0.75", linewidth=5, label=None if k else "exact")
        axes.plot(place, model.value(points).detach().squeeze(1), label=f"network, t = {time:g}")
    axes.set_xlabel("x")
    axes.set_ylabel("u(x, t)")
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    figure = picture(trained(int(sys.argv[1]) if len(sys.argv) > 1 else 60))

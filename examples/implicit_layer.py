r"""
A layer that is a minimiser
===========================

**Problem.** Classify digits with :math:`x \mapsto V\beta^*(\tanh(Wx + b)) + v`, where :math:`\beta^*(h) =
\arg\min_\beta\sum_k\log(1 + e^{(A\beta + h)_k}) + \frac\mu2\|\beta\|^2`. Parameters inside the minimised
function are trained like all others.

**Method.** The inner function declares how convex it is and how fast its derivatives change, from norms of its
arguments; the certificate makes constants of the minimiser from them. Then: steps of gradient descent whose size
is proved, and Gauss-Newton steps through the same layer.

**Statement.** Appendix "Implicit functions": the minimiser of a μ-strongly convex function with L-Lipschitz
gradient and H-Lipschitz Hessian is :math:`L\mu^{-1}`-Lipschitz and :math:`H\mu^{-1}(1 + L\mu^{-1})^2`-smooth;
Lemma approximplicitgrad: derivatives at an inexact minimiser are off by at most :math:`H\mu^{-1}(1 +
L\mu^{-1})` times its distance to the exact one.

**Result.** The smoothness that is claimed stands next to the largest eigenvalue of the Hessian, found by
powers; every certified step descends; Gauss-Newton steps take the loss down from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf

SAMPLES, CERTIFIED_STEPS, GAUSS_NEWTON_STEPS = 150, 40, 15


class Energy(nn.Module):
    r""":math:`\zeta(h, A, \beta) = \sum_k\log(1 + e^{(A\beta + h)_k}) + \frac\mu2\|\beta\|^2`.

    With :math:`z = A\beta + h` the gradient is :math:`A^\top s(z) + \mu\beta`, where :math:`s < 1` is the logistic
    function, :math:`s' \le 1/4` and :math:`|s''| \le 3^{-3/2}/2`. It is zero at the minimiser, so
    :math:`\mu\|\beta\| \le \|A\|\sqrt n`.
    """

    def __init__(self, size: int, mu: float) -> None:
        super().__init__()
        self.mu, self.a = mu, nn.Parameter(torch.randn(size, size) / size**0.5)

    def forward(self, h: Tensor, beta: Tensor) -> Tensor:
        """The energy of one sample."""
        return F.softplus(self.a @ beta + h).sum() + 0.5 * self.mu * beta.square().sum()

    def constants(self, norms: Mapping[str, float]) -> sf.implicit.Constants:
        """Bounds of the derivatives of the gradient, by argument and by pair of arguments."""
        a, root, second, third = norms["a"], len(self.a) ** 0.5, 0.25, 3**-1.5 / 2
        b = norms.get("beta", a * root / self.mu)
        slopes = {"h": a * second, "a": root + a * second * b, "beta": a * a * second + self.mu}
        bends = {
            ("h", "h"): a * third,
            ("h", "a"): a * third * b + second,
            ("h", "beta"): a * a * third,
            ("a", "a"): a * third * b * b + 2 * second * b,
            ("a", "beta"): a * a * third * b + 2 * a * second,
            ("beta", "beta"): a**3 * third,
        }
        return sf.implicit.Constants(self.mu, slopes, bends)


def main() -> Figure:
    """Certify, descend, and take second-order steps; the loss by step."""
    torch.manual_seed(0)
    x, y = data()
    layer = sf.implicit.ArgMin(Energy(8, mu=1.0), 8)
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), layer, nn.Linear(8, 10)).double()

    solution = layer.solution(model[:2](x))
    print(f"Inner problems: solved in {solution.iterations} iterations.")
    assert solution.error_bound is not None
    print(f"Proved distance to the exact minimisers: at most {float(solution.error_bound.max()):.1e}.\n")

    objective = sf.CrossEntropy(y)
    print(sf.certify(model, x, objective, domain=sf.Ball(0.01)))
    print(f"largest eigenvalue of the Hessian at the centre, by powers: {largest_eigenvalue(model, x, y):.3g}\n")

    optimizer = sf.optim.CertifiedDescent(model, sf.CrossEntropy())
    losses = [float(optimizer.step(x, y)) for _ in range(CERTIFIED_STEPS)]
    losses.append(float(optimizer.value(x, y)))
    ascents = sum(after > before for before, after in pairwise(losses))
    print(f"Certified descent: loss {losses[0]:.5f} → {losses[-1]:.5f}, {ascents} of {CERTIFIED_STEPS} steps up.")

    second_order = sf.optim.GaussNewton(model, sf.CrossEntropy())
    faster = [float(second_order.step(x, y)) for _ in range(GAUSS_NEWTON_STEPS)]
    faster.append(float(second_order.value(x, y)))
    print(f"Gauss-Newton: loss {faster[-1]:.5f} after {GAUSS_NEWTON_STEPS} more steps.")
    step = sf.oracles.newton(sf.Chain(model, x), objective, kappa=0.1, method="cg")
    print(f"A Newton step there: {step.status}, decrease of its model {step.model_decrease:.2e}.")

    figure = Figure(figsize=(6.5, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.semilogy(losses, label="certified descent")
    axes.semilogy(range(len(losses) - 1, len(losses) + len(faster) - 1), faster, label="Gauss-Newton")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)
    return figure


def data() -> tuple[Tensor, Tensor]:
    """Some images and their classes."""
    images, classes = load_digits(return_X_y=True)
    return torch.tensor(images[:SAMPLES], dtype=torch.float64) / 16, torch.tensor(classes[:SAMPLES])


def largest_eigenvalue(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """A lower bound of the norm of the Hessian in the parameters."""
    parameters = list(model.parameters())
    slopes = torch.autograd.grad(sf.CrossEntropy(y)(model(x)), parameters, create_graph=True)
    direction = [torch.randn_like(value) for value in parameters]
    for _ in range(30):
        size = torch.stack([value.square().sum() for value in direction]).sum().sqrt()
        unit = [value / size for value in direction]
        direction = list(torch.autograd.grad(slopes, parameters, unit, retain_graph=True))
    return float(torch.stack([value.square().sum() for value in direction]).sum().sqrt())


if __name__ == "__main__":
    figure = main()

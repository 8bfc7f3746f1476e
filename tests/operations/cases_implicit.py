"""Layers that minimise, with constants that are declared and that are derived."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from operations.case import Case, operation
from operations.tensors import real
from surefoot.implicit import ArgMin, Constants
from surefoot.implicit.operation import Minimiser


class Shifted(nn.Module):
    """ζ = softplus(β) + β²/2 − (x + u)β, of one number: everything claimed about its minimiser is attained."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Parameter(real(1))

    def forward(self, x: Tensor, beta: Tensor) -> Tensor:
        return (F.softplus(beta) + 0.5 * beta.square() - (x + self.u) * beta).sum()


class Linear(nn.Module):
    """ζ = (μ/2)‖β‖² − ⟨β, Wx⟩, whose minimiser is Wx/μ."""

    def __init__(self, mu: float) -> None:
        super().__init__()
        self.mu, self.w = mu, nn.Parameter(real(2, 3))

    def forward(self, x: Tensor, beta: Tensor) -> Tensor:
        return 0.5 * self.mu * beta.square().sum() - (beta * (self.w @ x)).sum()

    def constants(self, sizes: object) -> Constants:
        assert isinstance(sizes, dict)
        slopes = {"x": sizes["w"], "w": sizes["x"], "beta": self.mu}
        return Constants(self.mu, slopes, {("x", "w"): 1.0})


def _case(zeta: nn.Module, shape: int, *inputs: Tensor, mu: float | None = None) -> Case:
    layer = ArgMin(zeta.double(), shape, constants=None if mu is None else Constants(strong_convexity=mu))
    parameters = [value.detach() for value in zeta.parameters()]
    minimiser = Minimiser(layer.problem(len(inputs) + len(parameters)))
    return operation(minimiser, list(inputs), parameters, [], op="surefoot.argmin")


CASES: dict[str, list[Callable[[], Case]]] = {
    "surefoot.argmin": [
        lambda: _case(Linear(0.8), 2, real(2, 3)),
        lambda: _case(Shifted(), 1, real(1, 1), mu=1.0),
        lambda: _case(Linear(0.8), 2, real(2, 3), mu=0.8),
    ],
}

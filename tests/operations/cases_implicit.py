"""Layers that minimise."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from operations.case import Case, operation
from operations.tensors import real
from surefoot.implicit import ArgMin, Constants
from surefoot.implicit.operation import Minimiser


class Squared(nn.Module):
    """ζ = β²/2 − β(x + u)²/2, of one number: everything claimed about its minimiser is attained."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Parameter(real(1).abs())

    def forward(self, x: Tensor, beta: Tensor) -> Tensor:
        return (0.5 * beta.square() - 0.5 * beta * (x + self.u).square()).sum()

    def constants(self, sizes: Mapping[str, float]) -> Constants:
        slope = sizes["x"] + sizes["u"]
        bends = {("x", "x"): 1.0, ("x", "u"): 1.0, ("u", "u"): 1.0}
        return Constants(1.0, {"x": slope, "u": slope, "beta": 1.0}, bends)


class Linear(nn.Module):
    """ζ = (μ/2)‖β‖² − ⟨β, Wx⟩, whose minimiser is Wx/μ."""

    def __init__(self, mu: float) -> None:
        super().__init__()
        self.mu, self.w = mu, nn.Parameter(real(2, 3))

    def forward(self, x: Tensor, beta: Tensor) -> Tensor:
        return 0.5 * self.mu * beta.square().sum() - (beta * (self.w @ x)).sum()

    def constants(self, sizes: Mapping[str, float]) -> Constants:
        slopes = {"x": sizes["w"], "w": sizes["x"], "beta": self.mu}
        return Constants(self.mu, slopes, {("x", "w"): 1.0})


def _case(zeta: nn.Module, shape: int, *inputs: Tensor) -> Case:
    layer = ArgMin(zeta.double(), shape)
    parameters = [value.detach() for value in zeta.parameters()]
    minimiser = Minimiser(layer.problem(len(inputs) + len(parameters)))
    return operation(minimiser, list(inputs), parameters, [], op="surefoot.argmin")


CASES: dict[str, list[Callable[[], Case]]] = {
    "surefoot.argmin": [
        lambda: _case(Linear(0.8), 2, real(2, 3)),
        lambda: _case(Squared(), 1, real(1, 1).abs()),
    ],
}

"""Functions of the parameters of a model in 200-bit arithmetic, and steps in it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from flint import arb, arb_mat
from torch import Tensor, nn

from judges.exact import stored, truth

BITS = 200
HAIR = arb(1 + 2.0**-40)  # far more than 200 bits lose in a run


class Exact:
    """A function of the parameters of a model, at points of 200 bits."""

    def __init__(self, model: nn.Module, function: Callable[[], Tensor]) -> None:
        self.model, self.function = model, function
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def start(self) -> list[arb]:
        """The weights as they are stored."""
        return [number for p in self.parameters for number in stored(p).reshape(-1)]

    def _point(self, u: list[arb]) -> dict[Tensor, list[arb]]:
        point, at = {}, 0
        for p in self.parameters:
            point[p] = u[at : at + p.numel()]
            at += p.numel()
        return point

    def values(self, u: list[arb]) -> list[arb]:
        """The outputs."""
        return truth(self.function, self.model, self._point(u)).values

    def gradient(self, u: list[arb], weights: list[float] | None = None) -> list[arb]:
        """That of the outputs weighted."""
        return truth(self.function, self.model, self._point(u), weights=weights).gradient

    def jacobian(self, u: list[arb]) -> arb_mat:
        """Row by row."""
        count = len(self.values(u))
        return arb_mat([self.gradient(u, [float(k == i) for k in range(count)]) for i in range(count)])

    def hessian(self, u: list[arb]) -> arb_mat:
        """Of a real-valued function, column by column."""
        columns = []
        for i in range(len(u)):
            direction, at = {}, 0
            for p in self.parameters:
                flat = torch.zeros(p.numel(), dtype=torch.float64)
                if 0 <= i - at < p.numel():
                    flat[i - at] = 1.0
                direction[p] = flat.reshape(p.shape)
                at += p.numel()
            columns.append(truth(self.function, self.model, self._point(u), direction=direction).bent)
        return arb_mat(columns)


def middle(numbers: list[arb]) -> list[arb]:
    """The centres of balls: where the next step starts."""
    return [number.mid() for number in numbers]


def distance(u: list[arb], v: list[arb]) -> arb:
    """Euclidean, not below the exact one."""
    return sum(((a - b) * (a - b) for a, b in zip(u, v, strict=True)), arb(0)).upper().sqrt()


def gauss_newton(exact: Exact, u: list[arb], targets: Tensor) -> list[arb]:
    """The shortest solution of the linearised equations."""
    jacobian, wanted = exact.jacobian(u), stored(targets).reshape(-1)
    residual = arb_mat([[value - y] for value, y in zip(exact.values(u), wanted, strict=True)])
    step = jacobian.transpose() * (jacobian * jacobian.transpose()).solve(residual)
    return middle([a - step[k, 0] for k, a in enumerate(u)])


def newton(exact: Exact, u: list[arb]) -> list[arb]:
    step = exact.hessian(u).solve(arb_mat([[g] for g in exact.gradient(u)]))
    return middle([a - step[k, 0] for k, a in enumerate(u)])

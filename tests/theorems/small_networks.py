"""Networks small enough for 200-bit arithmetic, and steps in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import flint
import torch
from flint import arb, arb_mat
from torch import Tensor, nn

import surefoot as sf
from judges.exact import stored, truth

BITS = 200


def perceptron(*sizes: int, activation: type[nn.Module] = nn.Tanh, seed: int = 0) -> nn.Sequential:
    """Linear layers with a function between them, in double precision."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1]).double()


def data(count: int, inputs: int, outputs: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, inputs, dtype=torch.float64, generator=generator),
        torch.randn(count, outputs, dtype=torch.float64, generator=generator),
    )


def trained(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """Gauss-Newton steps in double precision, damped by halving."""
    for _ in range(steps):
        jacobian, residual = linearised(model, x, y)
        step = torch.linalg.lstsq(jacobian, -residual).solution
        before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        for k in range(12):
            torch.nn.utils.vector_to_parameters(before + step / 2**k, model.parameters())
            if (model(x) - y).norm() < residual.norm():
                break


def linearised(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The Jacobian and the residual, by automatic differentiation."""
    names = [name for name, _ in model.named_parameters()]

    def outputs(*values: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,)).reshape(-1)

    parts = torch.autograd.functional.jacobian(outputs, tuple(p.detach() for p in model.parameters()))
    return torch.cat([part.reshape(y.numel(), -1) for part in parts], 1), (model(x) - y).reshape(-1).detach()


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
    """A step."""
    with flint.ctx.workprec(BITS):
        jacobian = exact.jacobian(u)
        wanted = stored(targets).reshape(-1)
        residual = arb_mat([[value - y] for value, y in zip(exact.values(u), wanted, strict=True)])
        step = jacobian.transpose() * (jacobian * jacobian.transpose()).solve(residual)
        return middle([a - step[k, 0] for k, a in enumerate(u)])


def square(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """The objective as a function without arguments."""
    return lambda: sf.Square(y)(model(x))

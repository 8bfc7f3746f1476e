"""Steps by dense matrices: the Hessian of all parameters, and one linear solve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.objectives import Objective, Ridge
from surefoot.oracles import Step


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()])


def saturated(size: float) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A classifier in single precision whose logits are so many times as large as usual, samples and classes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        for parameter in model[2].parameters():
            parameter.mul_(size)
    return model, torch.randn(7, 4), torch.randint(0, 3, (7,))


@dataclass(frozen=True)
class DenseModel:
    """An objective of a model around its present parameters, those that are trainable."""

    model: nn.Module
    x: Any
    objective: Objective
    ridge: Ridge | None = None

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        return {path: value.detach() for path, value in self.model.named_parameters() if value.requires_grad}

    def split(self, u: Tensor) -> dict[str, Tensor]:
        parts = u.split([value.numel() for value in self.parameters.values()])
        return {
            path: part.reshape(v.shape) for (path, v), part in zip(self.parameters.items(), parts, strict=True)
        }

    def output(self, u: Tensor) -> Tensor:
        frozen = {path: value.detach() for path, value in self.model.named_parameters() if not value.requires_grad}
        buffers = {path: value.clone() for path, value in self.model.named_buffers()}
        found: Tensor = torch.func.functional_call(self.model, {**frozen, **buffers, **self.split(u)}, (self.x,))
        return found

    def regularizer(self, u: Tensor) -> Tensor:
        return u.new_zeros(()) if self.ridge is None else self.ridge(self.split(u))

    def value(self, u: Tensor) -> Tensor:
        loss: Tensor = self.objective(self.output(u))
        return loss + self.regularizer(u)

    @cached_property
    def point(self) -> Tensor:
        return flat(self.parameters)

    @cached_property
    def gradient(self) -> Tensor:
        return torch.func.grad(self.value)(self.point)

    @cached_property
    def hessian(self) -> Tensor:
        return second_derivative(self.value, self.point)

    @property
    def hessian_norm(self) -> float:
        return float(torch.linalg.matrix_norm(self.hessian, 2))

    @cached_property
    def gauss_newton(self) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            jacobian = torch.autograd.functional.jacobian(lambda u: self.output(u).flatten(), self.point)
        output = self.output(self.point).detach()
        curved = second_derivative(lambda y: self.objective(y.reshape(output.shape)), output.flatten())
        return jacobian.T @ curved @ jacobian + second_derivative(self.regularizer, self.point)

    def curvature(self, model: str) -> Tensor:
        if model == "gradient":
            return torch.zeros(len(self.point), len(self.point), dtype=self.point.dtype)
        return self.hessian if model == "newton" else self.gauss_newton

    def lowest(self, model: str) -> float:
        return float(torch.linalg.eigvalsh(self.curvature(model))[0])

    def direction(self, step: Step) -> Tensor:
        assert step.direction.keys() == self.parameters.keys()
        return flat({path: step.direction[path].double() for path in self.parameters})

    def error(self, step: Step, model: str) -> float:
        """The direction against the dense solve, relative."""
        expected = self.step(step.kappa, model)
        return float((self.direction(step) - expected).norm() / expected.norm())

    def residual(self, step: Step, model: str) -> float:
        """The gradient of the model at the direction, relative to that at zero."""
        v = self.direction(step)
        left = self.gradient + self.curvature(model) @ v + step.kappa * v
        return float(left.norm() / self.gradient.norm())

    def decrease(self, step: Step, model: str) -> float:
        return -self.predicted(self.direction(step), step.kappa, model)

    def predicted(self, v: Tensor, kappa: float, model: str) -> float:
        return float(self.gradient @ v + 0.5 * v @ self.curvature(model) @ v + 0.5 * kappa * v @ v)

    def step(self, kappa: float, model: str) -> Tensor:
        eye = torch.eye(len(self.point), dtype=torch.float64)
        return torch.linalg.solve(self.curvature(model) + kappa * eye, -self.gradient)


def second_derivative(function: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        return torch.func.jacrev(torch.func.grad(function))(point)

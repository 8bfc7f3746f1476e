"""The linear-quadratic problem: operators against derivatives of the computations, the cost against F itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from judges.networks import CLASSES, make
from judges.steps import DenseModel, flat, second_derivative
from surefoot.chain import Chain, Computation
from surefoot.graph import Role
from surefoot.objectives import CrossEntropy, Ridge, Square
from surefoot.oracles import linear_quadratic
from surefoot.oracles.problem import OracleError

NAMES = ["mlp", "convolutional", "layer_norm", "residual", "dense", "attention", "frozen", "shared", "batch_norm"]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> bool:
    return a.shape == b.shape and float((a - b).norm()) <= tolerance * (1 + float(b.norm()))


def labels(x: Tensor) -> CrossEntropy:
    return CrossEntropy(torch.arange(len(x)) % CLASSES)


def pieces(values: dict[str, Any], names: Sequence[str]) -> list[tuple[str, Tensor]]:
    return [(name, values[name]) for name in names if values[name].is_floating_point()]


def varying(computation: Computation, names: Sequence[str]) -> list[str]:
    return [name for name in names if Role.PARAMETERS in computation.graph.roles[name]]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The numbers of one sample after those of the other."""
    return torch.cat([tensor.reshape(len(tensor), -1) for tensor in tensors], dim=1).flatten()


def as_function(computation: Computation, state: dict[str, Any], parameters: dict[str, Tensor]) -> Any:
    """φ(x, u) of the vector (x; u), with the size of x and the point."""
    x, u = pieces(state, varying(computation, computation.before)), pieces(parameters, computation.parameters)
    start = joined([tensor for _, tensor in x]) if x else torch.zeros(0, dtype=torch.float64)

    def function(point: Tensor) -> Tensor:
        given, parts = {**state}, point[len(start) :].split([tensor.numel() for _, tensor in u])
        if x:
            n = len(x[0][1])
            rows = point[: len(start)].view(n, -1).split([tensor.numel() // n for _, tensor in x], dim=1)
            given |= {name: part.reshape(old.shape) for (name, old), part in zip(x, rows, strict=True)}
        weights = {name: part.reshape(old.shape) for (name, old), part in zip(u, parts, strict=True)}
        after = computation(given, {**parameters, **weights})
        return joined([tensor for _, tensor in pieces(after, varying(computation, computation.after))])

    return function, len(start), torch.cat([start, *(tensor.detach().reshape(-1) for _, tensor in u)])


@pytest.mark.parametrize("name", NAMES)
def test_operators_are_the_derivatives_of_each_computation(name: str) -> None:
    model, x = make(name)
    chain, objective, ridge = Chain(model, x), labels(x), Ridge(0.3)
    problem = linear_quadratic(chain, objective, ridge)
    parameters = {path: value.detach() for path, value in chain.parameters.items()}
    states = chain.states(parameters)
    costate = torch.func.grad(objective)(states[-1][chain.graph.outputs[0]]).flatten()
    curvature = second_derivative(
        lambda y: objective(y.reshape(len(x), -1)), states[-1][chain.graph.outputs[0]].flatten()
    )
    for t in range(len(chain) - 1, -1, -1):
        layer = problem[t]
        function, d, point = as_function(chain[t], states[t], parameters)
        jacobian = torch.autograd.functional.jacobian(function, point)
        hessian = second_derivative(lambda z: function(z) @ costate, point)  # noqa: B023
        assert close(layer.costate, costate)
        assert close(layer.A, jacobian[:, :d])
        assert close(layer.B, jacobian[:, d:])
        assert close(layer.P, curvature)
        assert close(layer.Q, hessian[d:, d:] + 0.3 * torch.eye(len(point) - d, dtype=torch.float64))
        assert close(layer.R, hessian[:d, d:])
        assert close(layer.q, 0.3 * point[d:])
        assert close(layer.p, costate if t == len(chain) - 1 else torch.zeros_like(costate))
        curvature, costate = hessian[:d, :d], jacobian[:, :d].T @ costate


@pytest.mark.parametrize("model", ["gradient", "gauss_newton", "newton"])
@pytest.mark.parametrize("name", ["mlp", "dense", "attention", "split"])
def test_the_cost_is_the_model_of_the_objective(name: str, model: Any) -> None:
    module, x = make(name)
    objective = Square(torch.randn(len(x), CLASSES, dtype=torch.float64))
    dense = DenseModel(module, x, objective, None if model == "gradient" else Ridge(0.2))
    problem = linear_quadratic(Chain(module, x), objective, dense.ridge, model=model)
    direction = {path: torch.randn_like(value) for path, value in dense.parameters.items()}
    expected = dense.predicted(flat(direction), 0.7, model)
    assert problem.cost(direction, kappa=0.7) == pytest.approx(expected, rel=1e-11)


def test_models_differ_where_the_paper_says() -> None:
    module, x = make("mlp")
    chain, objective = Chain(module, x), labels(x)
    gradient, gauss, newton = (
        linear_quadratic(chain, objective, model=m) for m in ("gradient", "gauss_newton", "newton")
    )
    for t in range(len(chain)):
        assert not gradient[t].P.any()
        assert bool(gauss[t].P.any()) == (t == len(chain) - 1)
        assert bool(newton[t].P.any()) == (t != len(chain) - 2)  # the last computation is biaffine
        for problem in (gradient, gauss):
            assert not problem[t].R.any()
            assert not problem[t].Q.any()
        assert bool(newton[t].R.any()) == (t > 0)  # the first state is the input, which does not vary
    assert bool(newton[0].Q.any())
    assert not newton[len(chain) - 1].Q.any()
    assert [tuple(layer.parameters) for layer in newton] == [c.parameters for c in chain]


def test_a_point_may_be_given() -> None:
    module, x = make("mlp")
    chain, objective = Chain(module, x), labels(x)
    moved = {path: value.detach() + 0.5 for path, value in module.named_parameters()}
    problem = linear_quadratic(chain, objective, params=moved)
    with torch.no_grad():
        for path, value in module.named_parameters():
            value.copy_(moved[path])
    expected = linear_quadratic(chain, objective)
    assert all(close(a.B, b.B) for a, b in zip(problem, expected, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    module, x = make("mlp")
    with pytest.raises(OracleError, match="one of gradient, gauss_newton, newton"):
        linear_quadratic(Chain(module, x), labels(x), model="hessian")  # type: ignore[arg-type]

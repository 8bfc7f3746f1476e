"""Small models of many kinds: sharp constants at the weights, values with small errors, steps of all methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.func import functional_call
from torch.nn import functional as F

import surefoot as sf
from judges.ordinary import Apply
from surefoot.objectives import ModelLoss

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TARGETS = torch.arange(4) % 2


def _layers() -> dict[str, nn.Module]:
    return {"first": nn.Linear(4, 5), "last": nn.Linear(5, 2)}


def _chained(m: Any, x: Tensor) -> Tensor:
    """The negative log-likelihood of a conditional random field."""
    scores = m.first(x)
    total = scores[:, 0:2]
    for k in range(1, 3):
        total = torch.logsumexp(total[:, :, None] + m.last.weight[:, :2], 1) + scores[:, k : k + 2]
    return (total.logsumexp(1) - scores[:, 0]).mean()


def _contrast(m: Any, x: Tensor) -> Tensor:
    points = F.normalize(m.last(m.first(x).tanh()), dim=1)
    return F.cross_entropy(m.scale.weight.squeeze().exp() * points @ points.T, torch.arange(4))


def _attention(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    return m.last((h @ h.T / torch.sqrt(torch.tensor(5.0, dtype=x.dtype))).softmax(-1) @ h)


def _shares(m: Any, x: Tensor) -> Tensor:
    weights = m.first(x).exp()
    return m.last(weights / weights.sum(0, keepdim=True))


def _density(m: Any, x: Tensor) -> Tensor:
    mean, spread = m.last(m.first(x).tanh()).unbind(1)
    return -Normal(mean, F.softplus(spread) + 0.1).log_prob(x[:, 0]).mean()


# the model, and whether it returns its loss
MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "random field": (lambda: Apply(_chained, first=nn.Linear(4, 4), last=nn.Linear(2, 2)), True),
    "contrast of directions": (lambda: Apply(_contrast, **_layers(), scale=nn.Linear(1, 1, bias=False)), True),
    "attention over samples": (lambda: Apply(_attention, **_layers()), False),
    "shares of a sum": (lambda: Apply(_shares, **_layers()), False),
    "density": (lambda: Apply(_density, **_layers()), True),
    "one output per sample": (lambda: Apply(lambda m, x: m.last(m.first(x).tanh()).prod(1), **_layers()), False),
    "ramps": (lambda: Apply(lambda m, x: m.last(F.hardsigmoid(m.first(x))), **_layers()), False),
}


def _problem(
    name: str,
) -> tuple[nn.Module, nn.Module, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Tensor]:
    torch.manual_seed(0)
    build, own = MODELS[name]
    model = build().double()
    judged = Apply(lambda m, x: m.last(F.relu6(m.first(x) + 3) / 6), **_layers()) if name == "ramps" else model
    named = dict(model.named_parameters())
    sizes = [value.numel() for value in named.values()]

    def outputs(flat: Tensor) -> Tensor:
        parts = zip(named.items(), flat.split(sizes), strict=True)
        return functional_call(judged, {key: part.clone().view_as(value) for (key, value), part in parts}, (X,))

    flat = torch.cat([value.detach().flatten() for value in named.values()])
    if own:
        return model, ModelLoss(), outputs, outputs, flat
    y = outputs(flat).detach()
    objective = sf.CrossEntropy(TARGETS) if y.dim() > 1 else sf.Square(torch.ones_like(y))
    return model, objective, outputs, lambda u: objective(outputs(u)), flat


@pytest.mark.parametrize("name", MODELS)
def test_smoothness_at_the_weights_is_the_norm_of_the_hessian(name: str) -> None:
    model, objective, _, loss, flat = _problem(name)
    hessian = torch.autograd.functional.hessian(loss, flat)
    norm = float(torch.linalg.matrix_norm(hessian, 2))
    found = sf.certify(model, X, objective=objective, domain=sf.Ball(0.0))
    assert norm * (1 - 1e-9) <= float(found.smoothness) <= 1.5 * norm
    around = sf.certify(model, X, objective=objective, domain=sf.Ball(1e-4))
    direction = torch.randn(len(flat), dtype=flat.dtype, generator=torch.Generator().manual_seed(2))
    moved = torch.autograd.functional.hessian(loss, flat + 0.99e-4 * direction / direction.norm())
    assert float(torch.linalg.matrix_norm(moved, 2)) <= float(around.smoothness)


@pytest.mark.parametrize("name", MODELS)
def test_values_are_known_up_to_round_off_and_steps_descend(name: str) -> None:
    model, objective, _, loss, flat = _problem(name)
    value = sf.evaluate(model, X, objective)
    assert value.error < 1e-10
    assert abs(value.value - float(loss(flat))) <= value.error + 1e-13
    before = float(loss(flat))
    if isinstance(objective, ModelLoss):
        sf.CertifiedDescent(model, objective).step(X)
    else:
        sf.CertifiedDescent(model, objective.bound_to(None)).step(X, objective.targets)
    with torch.no_grad():
        after = model(X)
        assert float(after if isinstance(objective, ModelLoss) else objective(after)) < before


@pytest.mark.parametrize("name", [name for name, (_, own) in MODELS.items() if not own])
def test_gauss_newton_steps_are_those_of_a_dense_solve(name: str) -> None:
    model, objective, outputs, _, flat = _problem(name)
    output = outputs(flat).detach()
    jacobian = torch.autograd.functional.jacobian(outputs, flat).reshape(-1, len(flat))

    def outer(z: Tensor) -> Tensor:
        return objective(z.view(output.shape))

    bend = torch.autograd.functional.hessian(outer, output.flatten())
    slope = torch.autograd.functional.jacobian(outer, output.flatten())
    matrix = jacobian.T @ bend @ jacobian + 0.1 * torch.eye(len(flat), dtype=flat.dtype)
    wanted = -torch.linalg.solve(matrix, jacobian.T @ slope)
    for method in ("auto", "primal", "dual"):
        step = sf.oracles.gauss_newton(sf.Chain(model, X), objective, kappa=0.1, method=method)
        found = torch.cat([step.direction[key].flatten() for key, _ in model.named_parameters()])
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9)

"""Models as people write them: constants, values and steps, each against dense derivatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import surefoot as sf
from judges.ordinary import MASKED, ORDINARY, Apply, inputs
from surefoot.objectives import ModelLoss

pytestmark = pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
DAMPING = 0.5
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


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


# models that return their loss, and models with an objective of their outputs, on ``X``
LOSSES: dict[str, Callable[[], nn.Module]] = {
    "random field": lambda: Apply(_chained, first=nn.Linear(4, 4), last=nn.Linear(2, 2)),
    "contrast of directions": lambda: Apply(_contrast, **_layers(), scale=nn.Linear(1, 1, bias=False)),
    "density": lambda: Apply(_density, **_layers()),
}
OUTPUTS: dict[str, Callable[[], nn.Module]] = {
    "attention over samples": lambda: Apply(_attention, **_layers()),
    "shares of a sum": lambda: Apply(_shares, **_layers()),
    "one output per sample": lambda: Apply(lambda m, x: m.last(m.first(x).tanh()).prod(1), **_layers()),
    "ramps": lambda: Apply(lambda m, x: m.last(F.hardsigmoid(m.first(x))), **_layers()),
}
SMALL = {**LOSSES, **OUTPUTS}
MODELS = {**MASKED, **ORDINARY, **{name: (build, ()) for name, build in SMALL.items()}}
# of which torch has no second derivative, or no derivative at all
ONCE = {"bags, weighted", "bags, own weights", "bags with offsets", "distances", "bags, largest",
        "bags, largest but padding"}  # fmt: skip
NEVER = {"scattered sums", "scattered products"}
# whose constants are those of others here, or whose Hessian takes seconds
LATER = {"transformer", "hint", "mask of truth values", "mask made in forward", "mask as an input"}


@dataclass
class Case:
    """A model with data and an objective, and all of them as functions of the flat weights."""

    model: nn.Module
    x: Any
    objective: Any
    targets: Tensor | None
    outputs: Callable[[Tensor], Tensor]
    flat: Tensor

    def loss(self, flat: Tensor) -> Tensor:
        outputs = self.outputs(flat)
        found: Tensor = outputs if self.targets is None else self.objective(outputs)
        return found


def case(name: str) -> Case:
    torch.manual_seed(0)
    build, given = MODELS[name]
    model = build().double()
    x = inputs(given) if given else (X,)
    # torch does not differentiate hardsigmoid twice
    judged = Apply(lambda m, x: m.last(F.relu6(m.first(x) + 3) / 6), **_layers()) if name == "ramps" else model
    named = dict(model.named_parameters())
    sizes = [value.numel() for value in named.values()]

    def outputs(flat: Tensor) -> Tensor:
        parts = zip(named.items(), flat.split(sizes), strict=True)
        values = {key: part.clone().view_as(value) for (key, value), part in parts}
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels are differentiable once
            return functional_call(judged, values, x)

    flat = torch.cat([value.detach().flatten() for value in named.values()])
    objective: Any = ModelLoss()
    targets = None
    if name not in LOSSES:
        with torch.no_grad():
            y = outputs(flat)
        classes = name in OUTPUTS and y.dim() > 1
        targets = torch.arange(4) % 2 if classes else torch.randn_like(y)
        objective = (sf.CrossEntropy if classes else sf.Square)(targets)
    return Case(model, x if len(x) > 1 else x[0], objective, targets, outputs, flat)


def curvature(name: str, case: Case, point: Tensor) -> float:
    """The norm of the Hessian, or how much it is at least where torch has only values."""
    if name in NEVER:
        directions = torch.randn(20, len(point), dtype=point.dtype, generator=torch.Generator().manual_seed(2))
        directions /= directions.norm(dim=1, keepdim=True)
        start, far = case.loss(point), 1e-4
        bends = [
            (case.loss(point + far * v) - 2 * start + case.loss(point - far * v)) / far**2 for v in directions
        ]
        return max(abs(float(bend)) for bend in bends) * (1 - 1e-3)
    if name in ONCE:

        def gradient(u: Tensor) -> Tensor:
            return torch.autograd.functional.jacobian(case.loss, u)

        step = 1e-5 * torch.eye(len(point), dtype=point.dtype)
        hessian = torch.stack([(gradient(point + v) - gradient(point - v)) / 2e-5 for v in step])
        return float(torch.linalg.matrix_norm((hessian + hessian.mT) / 2, 2)) * (1 - 1e-4)
    return float(torch.linalg.matrix_norm(torch.autograd.functional.hessian(case.loss, point), 2))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LATER)) for n in MODELS])
def test_smoothness_is_above_the_hessian(name: str) -> None:
    one = case(name)
    radius = 1e-4 if name in SMALL else 1e-3
    ball = sf.certify(one.model, one.x, objective=one.objective, domain=sf.Ball(radius))
    assert ball.smoothness.is_finite
    assert curvature(name, one, one.flat) <= float(ball.smoothness)
    if name in SMALL:
        direction = torch.randn(len(one.flat), dtype=X.dtype, generator=torch.Generator().manual_seed(2))
        moved = one.flat + 0.99 * radius * direction / direction.norm()
        assert curvature(name, one, moved) <= float(ball.smoothness)
        exact = curvature(name, one, one.flat)
        at_weights = sf.certify(one.model, one.x, objective=one.objective, domain=sf.Ball(0.0))
        assert exact * (1 - 1e-9) <= float(at_weights.smoothness) <= 1.5 * exact


@pytest.mark.parametrize("name", MODELS)
def test_values_and_steps(name: str) -> None:
    one = case(name)
    before = float(one.loss(one.flat).detach())
    value = sf.evaluate(one.model, one.x, one.objective)
    assert abs(value.value - before) <= value.error + 1e-12 * abs(before)
    assert name not in SMALL or value.error < 1e-10
    if one.targets is not None:
        step = sf.oracles.gauss_newton(sf.Chain(one.model, one.x), one.objective, kappa=DAMPING, method="dual")
        assert step.solved
        if name not in NEVER:  # of which torch has no derivative to judge by
            output = one.outputs(one.flat).detach()
            jacobian = torch.autograd.functional.jacobian(one.outputs, one.flat).reshape(output.numel(), -1)

            def outer(z: Tensor) -> Tensor:
                found: Tensor = one.objective(z.view(output.shape))
                return found

            bend = torch.autograd.functional.hessian(outer, output.flatten())
            slope = torch.autograd.functional.jacobian(outer, output.flatten())
            matrix = jacobian.T @ bend @ jacobian + DAMPING * torch.eye(len(one.flat), dtype=X.dtype)
            direction = torch.cat([step.direction[key].flatten() for key, _ in one.model.named_parameters()])
            wanted = -torch.linalg.solve(matrix, jacobian.T @ slope)
            torch.testing.assert_close(direction, wanted, rtol=1e-6, atol=1e-8)
        sf.CertifiedDescent(one.model, one.objective.bound_to(None)).step(one.x, one.targets)
    else:
        sf.CertifiedDescent(one.model, one.objective).step(one.x)
    moved = torch.cat([value.detach().flatten() for value in one.model.parameters()])
    with torch.no_grad():
        assert float(one.loss(moved)) < before


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "mask made in forward" else pytest.mark.slow)
        for name in MASKED
        if name.startswith("mask")
    ],
)
def test_a_causal_mask_has_the_constants_of_the_hint(name: str) -> None:
    cases = [case(which) for which in (name, "hint")]
    first, hint = (
        sf.certify(each.model, each.x, objective=each.objective, domain=sf.Ball(1e-3)) for each in cases
    )
    assert float(first.smoothness) == pytest.approx(float(hint.smoothness), rel=1e-6)

"""Models as people write them: constants, values and steps, each against the dense derivatives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import surefoot as sf
from judges.ordinary import MASKED, ORDINARY, inputs

pytestmark = pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
MODELS = {**MASKED, **ORDINARY}
KAPPA = 0.5


def _built(name: str) -> tuple[nn.Module, tuple[Tensor, ...], Tensor]:
    torch.manual_seed(0)
    build, given = MODELS[name]
    model, x = build().double(), inputs(given)
    with torch.no_grad():
        return model, x, torch.randn_like(model(*x))


def _outputs(model: nn.Module, x: tuple[Tensor, ...], flat: Tensor) -> Tensor:
    named = dict(model.named_parameters())
    parts = flat.split([value.numel() for value in named.values()])
    values = {key: part.view_as(value) for (key, value), part in zip(named.items(), parts, strict=True)}
    with sdpa_kernel(SDPBackend.MATH):  # the other kernels are differentiable once
        return functional_call(model, values, x)


def _flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


# kernels of torch without a second derivative, and maxima, of which the second derivative is zero at most points
_ONCE = {"bags, weighted", "bags, own weights", "bags with offsets", "distances", "scattered sums",
         "scattered products", "bags, largest", "bags, largest but padding"}  # fmt: skip


# whose constants are those of others here, or whose Hessian takes seconds
_LATER = {"transformer", "hint", "mask of truth values", "mask made in forward", "mask as an input"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in _LATER)) for n in MODELS])
def test_smoothness_is_above_the_hessian(name: str) -> None:
    model, x, y = _built(name)
    given = x if len(x) > 1 else x[0]
    certificate = sf.certify(model, given, objective=sf.Square(y), domain=sf.Ball(1e-3))
    assert certificate.smoothness.is_finite
    point, step = _flat(model), 1e-5

    def loss(u: Tensor) -> Tensor:
        return 0.5 * (_outputs(model, x, u) - y).square().sum() / len(y)

    if name in {"scattered sums", "scattered products"}:  # no derivative at all: curvature of the values
        directions = torch.randn(20, len(point), dtype=point.dtype, generator=torch.Generator().manual_seed(2))
        directions /= directions.norm(dim=1, keepdim=True)
        bends = [(loss(point + 1e-4 * v) - 2 * loss(point) + loss(point - 1e-4 * v)) / 1e-8 for v in directions]
        assert max(abs(float(bend)) for bend in bends) <= float(certificate.smoothness) * (1 + 1e-3)
    elif name in _ONCE:

        def gradient(u: Tensor) -> Tensor:
            return torch.autograd.functional.jacobian(loss, u)

        unit = torch.eye(len(point), dtype=point.dtype)
        hessian = torch.stack(
            [(gradient(point + step * v) - gradient(point - step * v)) / (2 * step) for v in unit]
        )
        norm = float(torch.linalg.matrix_norm((hessian + hessian.mT) / 2, 2))
        assert norm <= float(certificate.smoothness) * (1 + 1e-4)
    else:
        hessian = torch.autograd.functional.hessian(loss, point)
        assert float(torch.linalg.matrix_norm(hessian, 2)) <= float(certificate.smoothness)


@pytest.mark.parametrize("name", MODELS)
def test_values_and_steps(name: str) -> None:
    model, x, y = _built(name)
    given = x if len(x) > 1 else x[0]
    with torch.no_grad():
        live = float(0.5 * (model(*x) - y).square().sum() / len(y))
    value = sf.evaluate(model, given, sf.Square(y))
    assert abs(value.value - live) <= value.error + 1e-12 * abs(live)
    step = sf.oracles.gauss_newton(sf.Chain(model, given), sf.Square(y), kappa=KAPPA, method="dual")
    assert step.solved
    if not name.startswith("scattered"):  # of which torch has no derivative to judge by
        with torch.no_grad():
            outputs = model(*x)
        jacobian = torch.autograd.functional.jacobian(lambda u: _outputs(model, x, u), _flat(model))
        jacobian = jacobian.reshape(outputs.numel(), -1)
        matrix = jacobian.mT @ jacobian / len(y) + KAPPA * torch.eye(jacobian.shape[1], dtype=jacobian.dtype)
        slope = jacobian.mT @ (outputs - y).reshape(-1) / len(y)
        judged = torch.linalg.solve(matrix, -slope)
        found = torch.cat([step.direction[key].reshape(-1) for key, _ in model.named_parameters()])
        assert torch.allclose(found, judged, rtol=1e-6, atol=1e-8)
    before = sf.CertifiedDescent(model, sf.Square()).step(given, y)
    with torch.no_grad():
        assert float(0.5 * (model(*x) - y).square().sum() / len(y)) < before


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "mask made in forward" else pytest.mark.slow)
        for name in MASKED
        if name.startswith("mask")
    ],
)
def test_a_causal_mask_has_the_constants_of_the_hint(name: str) -> None:
    found = []
    for which in (name, "hint"):
        model, x, y = _built(which)
        found.append(float(sf.certify(model, x, objective=sf.Square(y), domain=sf.Ball(1e-3)).smoothness))
    assert found[0] == pytest.approx(found[1], rel=1e-6)

"""Along a segment no value exceeds its bound, and the coefficients are the derivatives."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from attack.networks import network
from judges.function import in_double
from surefoot.calculus.segment.along import Along, majorant
from surefoot.errors import SurefootError
from surefoot.operations.call import Norms


def direction_for(model: nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, generator=generator, dtype=torch.float64)
        for name, value in model.named_parameters()
        if value.requires_grad
    }


def moved(model: nn.Module, direction: dict[str, Tensor], step: float) -> dict[str, Tensor]:
    present = {name: value.detach().double() for name, value in model.named_parameters()}
    return present | {name: present[name] + step * move for name, move in direction.items()}


def values(model: nn.Module, x: Tensor, objective: nn.Module, direction: dict[str, Tensor], steps) -> list[float]:
    """The objective at steps along the direction, in double precision."""
    twin = in_double(model, next(p.dtype for p in model.parameters() if p.is_floating_point()))
    inputs = x.double() if x.is_floating_point() else x
    with torch.no_grad():
        outputs = [torch.func.functional_call(twin, moved(model, direction, step), (inputs,)) for step in steps]
        return [float(objective(output)) for output in outputs]


def attacked(model, x, objective, seed, length, order) -> str | None:
    """What is wrong with a segment, if anything; ``None`` if there was nothing to attack."""
    direction = direction_for(model, seed)
    try:
        (along,) = Along(model, x, objective).expand(direction, length, order)
    except SurefootError:
        return None
    bound = majorant(along)
    if not math.isfinite(bound.curvature):
        return None
    steps = [length * t for t in (1e-3, 0.1, 0.3, 0.5, 0.8, 0.95, 1.0)]
    start, *reached = values(model, x, objective, direction, [0.0, *steps])
    slack = 1e-11 * (1 + abs(start)) + 2 * bound.error
    if abs(start - bound.value) > slack:
        return f"starts at {start}, not {bound.value}"
    for step, value in zip(steps, reached, strict=True):
        highest = bound.value + bound.slope * step + 0.5 * bound.curvature * step**2
        if not value <= highest + slack:
            return f"{value} at {step} exceeds {highest}"
        numbers = [0.0 if c is None else float(c) for c in along.coefficients]
        rest, error = float(along.rest), float(along.error)
        polynomial = sum(c * step**j for j, c in enumerate(numbers))
        if not abs(value - polynomial) <= rest * step**along.order + error + slack:
            return f"{value} at {step} is farther from {polynomial} than {rest * step**along.order}"
    return ""


@pytest.mark.parametrize("part", [0, 1, 2, *(pytest.param(k, marks=pytest.mark.slow) for k in range(3, 8))])
def test_random_networks_stay_below_their_majorant(part):
    outcomes = []
    for seed in range(40 * part, 40 * part + 40):
        case = network(1000 + seed)
        model, x = case.model, case.x
        if not any(p.requires_grad for p in model.parameters()):
            continue
        output = model(x)
        if not isinstance(output, Tensor) or not output.is_floating_point() or not output.dim():
            continue
        generator = torch.Generator().manual_seed(seed)
        targets = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        length = 10.0 ** (-3 + seed % 4)
        outcome = attacked(model, x, sf.Square(targets), seed, length, 2 + seed % 4)
        assert not outcome, f"{case}, length {length}, order {2 + seed % 4}: {outcome}"
        outcomes.append(outcome)
    assert sum(outcome is not None for outcome in outcomes) >= 8


def perceptron(activation: type[nn.Module], seed: int, *sizes: int) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1]).double()


@pytest.mark.parametrize("activation", [nn.Softplus, nn.Tanh, nn.GELU, nn.SiLU, nn.Sigmoid, nn.ELU])
@pytest.mark.parametrize("order", [2, 3, 4, 5])
def test_the_cross_entropy_stays_below_its_majorant(activation, order):
    for seed, length in enumerate([1e-3, 1e-2, 0.1, 1.0, 10.0]):
        model = perceptron(activation, seed, 5, 8, 7, 4)
        x = torch.randn(6, 5, dtype=torch.float64)
        y = torch.randint(4, (6,)) if seed % 2 else torch.softmax(torch.randn(6, 4, dtype=torch.float64), dim=1)
        assert not attacked(model, x, sf.CrossEntropy(y), seed, length, order)


@pytest.mark.parametrize("objective", ["cross-entropy", "square"])
def test_coefficients_are_derivatives(objective):
    model, x = perceptron(nn.Tanh, 0, 4, 6, 3), torch.randn(5, 4, dtype=torch.float64)
    loss = (
        sf.CrossEntropy(torch.tensor([0, 1, 2, 0, 1]))
        if objective == "cross-entropy"
        else sf.Square(torch.eye(5, 3))
    )
    direction = direction_for(model, 0)

    def along(step):
        present = dict(model.named_parameters())
        at = {name: value.detach() + step * direction[name] for name, value in present.items()}
        return loss(torch.func.functional_call(model, at, (x,)))

    (found,) = Along(model, x, loss).expand(direction, 0.1, 5)
    derivative, start = along, torch.tensor(0.0, dtype=torch.float64)
    for j, coefficient in enumerate(found.coefficients):
        assert float(coefficient) == pytest.approx(
            float(derivative(start)) / math.factorial(j), rel=1e-9, abs=1e-12
        )
        derivative = torch.func.grad(derivative)


def test_a_quadratic_is_exact():
    model = nn.Linear(3, 2, bias=False).double()
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    direction = direction_for(model, 1)
    certificate = sf.certify(model, x, objective=sf.Square(y), domain=sf.Segment(direction, 10.0))
    exact = float((x @ direction["weight"].T).square().sum()) / 4
    assert float(certificate.smoothness) == pytest.approx(exact, rel=1e-6)


def test_the_safe_step_descends_along_the_gradient():
    model, x = perceptron(nn.Softplus, 3, 4, 8, 3), torch.randn(20, 4, dtype=torch.float64)
    loss = sf.CrossEntropy(torch.randint(3, (20,)))
    certificate = sf.certify(model, x, objective=loss, domain=sf.Segment(None, 1.0))
    steepest = Along(model, x, loss).steepest_descent()
    before, after = values(model, x, loss, steepest, [0.0, certificate.safe_step])
    slope = sum(float(move.square().sum()) for move in steepest.values())
    bound = Along(model, x, loss).majorant(steepest, certificate.safe_step, 4)
    assert bound.slope == pytest.approx(-slope, rel=1e-10)
    assert before - after >= bound.decrease(certificate.safe_step) > 0


def test_too_long_a_segment_does_not_shorten_the_safe_step():
    model, x = perceptron(nn.Tanh, 3, 4, 8, 3), torch.randn(20, 4, dtype=torch.float64)
    loss = sf.CrossEntropy(torch.randint(3, (20,)))
    steps = [
        sf.certify(model, x, objective=loss, domain=sf.Segment(None, length)).safe_step
        for length in (1e-3, 1.0, 10.0, 1000.0)
    ]
    assert steps[:2] == [1e-3, 1.0]  # the whole segment
    assert min(steps[2:]) > 0.95 * max(steps[2:]) > 1.0


def test_a_kink_within_reach_has_no_majorant():
    model, x = perceptron(nn.ReLU, 0, 4, 8, 3), torch.randn(6, 4, dtype=torch.float64)
    loss = sf.CrossEntropy(torch.zeros(6, dtype=torch.long))
    certificate = sf.certify(model, x, objective=loss, domain=sf.Segment(None, 10.0))
    assert not certificate.smoothness.is_finite
    assert 0 < certificate.safe_step < 10.0  # on a part of the segment there is no kink
    assert "surefoot.smooth" in certificate.reasons[0]
    near = sf.certify(model, x, objective=loss, domain=sf.Segment(None, 1e-6))
    assert near.smoothness.is_finite


@pytest.mark.parametrize(
    ("direction", "word"),
    [
        ({"nothing": torch.zeros(1)}, "no parameter"),
        ({"0.bias": torch.zeros(2)}, "shape"),
        ({"0.bias": torch.full((8,), math.nan)}, "finite"),
    ],
)
def test_a_direction_that_does_not_fit_is_refused(direction, word):
    model, x = perceptron(nn.Tanh, 0, 4, 8, 3), torch.randn(6, 4, dtype=torch.float64)
    with pytest.raises(SurefootError, match=word):
        sf.certify(model, x, domain=sf.Segment(direction, 1.0))


def test_norms_are_not_carried_over_to_images_of_another_size():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 2, 3, padding=1)).double()
    direction, norms = direction_for(model, 0), Norms()
    small, large = (torch.randn(2, 1, size, size, dtype=torch.float64) for size in (2, 12))
    for x in (small, large):
        targets = sf.Square(torch.zeros(2, 2, *x.shape[2:], dtype=torch.float64))
        (shared,) = Along(model, x, targets, norms).expand(direction, 0.1, 3)
        (own,) = Along(model, x, targets).expand(direction, 0.1, 3)
        assert torch.equal(shared.tail, own.tail)

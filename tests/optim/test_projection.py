"""Projection on products of balls, against bisection on the multiplier, and exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.domains import DomainError
from surefoot.operations.captured import capture
from surefoot.optim.projection import Balls

Point = dict[str, torch.Tensor]


def judged(point: Point, balls: Balls) -> Point:
    """The minimiser of ½‖p − u‖² + λ/2(‖p − c‖² − R²), with λ by bisection."""
    found = dict(point)
    for names, radius in balls.groups:
        offset = {name: point[name] - balls.centre.get(name, 0.0) for name in names}

        def length(multiplier: float, offset: Point = offset) -> float:
            return float(torch.cat([part.reshape(-1) / (1 + multiplier) for part in offset.values()]).norm())

        low, high = 0.0, 1.0
        if length(0.0) <= radius:
            continue
        while length(high) > radius:
            high *= 2
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if length(middle) > radius else (low, middle)
        for name in names:
            found[name] = balls.centre.get(name, 0.0) + offset[name] / (1 + high)
    return found


@pytest.mark.parametrize("groups", [((("a",), 0.7), (("b",), 2.0)), ((("a", "b"), 1.3),)])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_projection_is_the_nearest_point(groups, centred: bool, scale: float) -> None:
    for _ in range(10):
        shapes = {"a": (3, 2), "b": (4,), "free": (2,)}
        point = {name: scale * torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
        centre = {name: torch.randn_like(value) for name, value in point.items()} if centred else {}
        balls = Balls(groups, centre)
        found = balls.project(point)
        expected = judged(point, balls)
        for name in point:
            assert torch.allclose(found[name], expected[name], rtol=1e-12, atol=1e-13)
        assert torch.equal(found["free"], point["free"])
        for _ in range(20):  # no point of the set is nearer: ⟨u − p, z − p⟩ ≤ 0
            other = balls.project({name: 3 * torch.randn_like(value) for name, value in point.items()})
            other["free"] = point["free"]
            product = sum(float(((point[n] - found[n]) * (other[n] - found[n])).sum()) for n in point)
            assert product <= 1e-10 * scale


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("centred", [False, True])
def test_rounded_points_are_inside_in_exact_arithmetic(dtype: torch.dtype, centred: bool) -> None:
    for radius in (1.0, 0.3, 1e-3):
        point = {"a": torch.randn(50).to(dtype)}
        centre = {"a": torch.randn(50).to(dtype).double()} if centred else {}
        balls = Balls(((("a",), radius),), centre)
        exact = balls.project(point)
        found = balls.rounded(exact, point)["a"]
        assert found.dtype == dtype
        middle = centre.get("a", torch.zeros(50))
        square = sum(
            (Fraction(v) - Fraction(c)) ** 2 for v, c in zip(found.tolist(), middle.tolist(), strict=True)
        )
        assert square <= Fraction(radius) ** 2
        assert balls.contains({"a": found})
        if not centred:  # and next to where it should be
            assert torch.allclose(found.double(), exact["a"], rtol=4 * torch.finfo(dtype).eps, atol=1e-7)


def test_a_point_inside_stays_bit_by_bit() -> None:
    point = {"a": torch.randn(7)}
    balls = Balls(((("a",), 10.0),), {})
    assert torch.equal(balls.rounded(balls.project(point), point)["a"], point["a"])


def test_radius_zero_and_radius_below_the_precision() -> None:
    point = {"a": torch.ones(3)}
    assert not Balls(((("a",), 0.0),), {}).project(point)["a"].any()
    third = {"a": torch.full((3,), 1 / 3, dtype=torch.float64)}
    balls = Balls(((("a",), 1e-12),), third)
    with pytest.raises(DomainError, match="larger radius or double precision"):
        balls.rounded(balls.project(point), point)
    assert torch.equal(Balls(((("a",), 0.0),), third).project(point)["a"], third["a"])


def test_blocks_are_those_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    graph = capture(model, torch.zeros(1, 3))
    assert Balls.of(sf.ProductBall({"0": 1.0, "2": 2.0}), graph, {}).groups == (
        (("0.weight",), 1.0),
        (("2.weight", "2.bias"), 2.0),
    )
    assert Balls.of(sf.Ball(3.0), graph, {}).groups == ((("0.weight", "2.weight", "2.bias"), 3.0),)
    with pytest.raises(DomainError, match="check '2'"):
        Balls.of(sf.ProductBall({"0": 1.0}), graph, {})

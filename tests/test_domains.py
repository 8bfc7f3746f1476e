"""A domain read on variables: radii, and how far functions move on it."""

from __future__ import annotations

import time

import numpy as np
import pytest

from surefoot.domains import Ball, ProductBall, Region
from surefoot.magnitude import Magnitude


def blocks(count: int) -> dict[str, tuple[str, ...]]:
    return {f"b{i}": tuple(f"b{i}.{k}" for k in range(1 + i % 3)) for i in range(count)}


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("kind", ["ball", "product", "radii"])
def test_reach_is_the_sum_over_groups_of_radius_times_norm(count: int, kind: str) -> None:
    names = blocks(count)
    radii = {path: 0.25 * i for i, path in enumerate(names)}
    domain = {"ball": Ball(0.3), "product": ProductBall(0.7), "radii": ProductBall(radii)}[kind]
    region = Region.of(domain, names)
    lipschitz = Magnitude(np.random.default_rng(0).normal(size=len(region.variables)) * 3)
    values = lipschitz.numpy()
    expected = sum(radius * np.linalg.norm(values[list(members)]) for members, radius in region.groups)
    assert float(region.reach(lipschitz)) == pytest.approx(expected, rel=1e-12)
    assert float(region.reach(lipschitz)) >= expected * (1 - 1e-14)
    for members, radius in region.groups:
        assert all(region.radii[region.variables[position]] == radius for position in members)


def test_reach_of_many_blocks_takes_one_pass() -> None:
    region = Region.of(ProductBall(1.0), blocks(3000))
    lipschitz = Magnitude(np.zeros(len(region.variables)))
    region.reach(lipschitz)
    start = time.process_time()
    for _ in range(10):
        region.reach(lipschitz)
    assert time.process_time() - start < 0.5

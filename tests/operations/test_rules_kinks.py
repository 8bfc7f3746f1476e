"""Infinite curvature exactly where a kink can be reached, and none where it cannot."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from operations.case import Case, operation, pieces
from operations.harness import claims, enclosed
from surefoot.calculus.prepare import scalar
from surefoot.operations.scaled import unit
from surefoot.scalar import ScalarFunction

aten = torch.ops.aten


def _tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _scalar(name: str, value: Tensor, **parameters: float) -> Case:
    return operation(scalar, value, ScalarFunction.named(name, **parameters), op="surefoot.scalar")


def _image(*numbers: float) -> Tensor:
    return _tensor(*numbers).reshape(1, 1, 2, 2)


# A case, and the radius at which the kink comes within reach.
KINKS: dict[str, tuple[Callable[[], Case], float]] = {
    "relu": (lambda: _scalar("relu", _tensor(-0.7, 0.5, 3.0)), 0.5),
    "leaky relu": (lambda: _scalar("leaky_relu", _tensor(0.5, 3.0), negative_slope=0.2), 0.5),
    "hard tanh": (lambda: _scalar("hardtanh", _tensor(0.2, -0.6)), 0.4),
    "prelu": (lambda: operation(aten.prelu.default, _tensor(-0.7, 0.5), _tensor(0.3)), 0.5),
    "max-pool 2d": (
        lambda: operation(aten.max_pool2d.default, _image(0.0, 2.0, 1.5, -1.0), [2, 2]),
        0.5 / math.sqrt(2),
    ),
    "max-pool 1d": (
        lambda: operation(aten.max_pool1d.default, _tensor(0.0, 1.0, 4.0, 9.0).reshape(1, 4), [2]),
        1 / math.sqrt(2),
    ),
    "padded max-pool": (
        lambda: operation(aten.max_pool1d.default, _tensor(-3.0, -1.0, 4.0).reshape(1, 3), [2], [2], [1]),
        5 / math.sqrt(2),
    ),
    "max-pool 3d": (
        lambda: operation(aten.max_pool3d.default, _tensor(0.0, 1.0).reshape(1, 1, 1, 2), [1, 1, 2]),
        1 / math.sqrt(2),
    ),
    "adaptive max-pool": (
        lambda: pieces(aten.adaptive_max_pool1d.default, _tensor(0.0, 1.0, 4.0).reshape(1, 3), [2]),
        1 / math.sqrt(2),
    ),
    "largest entry": (lambda: operation(aten.amax.default, _tensor(0.0, 1.0, 4.0), [0]), 3 / math.sqrt(2)),
    "smallest entry": (lambda: operation(aten.amin.default, _tensor(0.0, 1.0, 4.0), [0]), 1 / math.sqrt(2)),
    "largest entry at a place": (
        lambda: operation(
            aten.scatter_reduce.two, _tensor(0.0, 1.0), 0, torch.tensor([0, 0, 1]), _tensor(4.0, 3.0, 8.0), "amax"
        ),
        1 / 2,
    ),
    "smallest entry, the old one left out": (
        lambda: operation(
            aten.scatter_reduce.two,
            _tensor(0.0, 1.0),
            0,
            torch.tensor([0, 0]),
            _tensor(4.0, 3.0),
            "amin",
            include_self=False,
        ),
        1 / 2,
    ),
    "entries in order": (lambda: pieces(aten.sort.default, _tensor(0.0, 1.0, 4.0)), 1 / math.sqrt(2)),
    "largest entries": (lambda: pieces(aten.topk.default, _tensor(0.0, 1.0, 4.0, 6.0), 1), 2 / math.sqrt(2)),
    "two largest entries": (lambda: pieces(aten.topk.default, _tensor(0.0, 0.1, 4.0, 7.0), 2), 3 / math.sqrt(2)),
    "smallest entries": (
        lambda: pieces(aten.topk.default, _tensor(0.0, 2.0, 2.5, 3.0), 1, 0, False),
        2 / math.sqrt(2),
    ),
    "entry in the middle": (
        lambda: pieces(aten.kthvalue.default, _tensor(0.0, 0.1, 4.0, 9.0), 3),
        3.9 / math.sqrt(2),
    ),
    "median entry": (lambda: operation(aten.median.default, _tensor(0.0, 1.0, 4.0, 5.0, 5.1)), 1 / math.sqrt(2)),
    "length": (lambda: operation(aten.linalg_vector_norm.default, _tensor(3.0, 4.0)), 5.0),
    "deviation": (lambda: operation(aten.std.dim, _tensor(3.0, 1.0, -1.0, -3.0), [0]), math.sqrt(20)),
    "direction": (lambda: operation(unit, _tensor(3.0, 4.0), [0], 1.0, op="surefoot.unit"), 4.0),
    "quotient": (lambda: operation(aten.div.Tensor, _tensor(1.0, 1.0), _tensor(-2.0, 3.0)), 2.0),
}


def _curvature(case: Case, radius: float) -> float:
    """The largest curvature that the first operation of a case claims."""
    return max(float(c) for c in enclosed(case, radius)[1].steps[0].bounds.curvature.values())


@pytest.mark.parametrize("name", KINKS)
def test_curvature_is_infinite_once_the_kink_is_within_reach(name: str) -> None:
    build, reach = KINKS[name]
    assert math.isfinite(_curvature(build(), 0.0))
    assert math.isfinite(_curvature(build(), 0.999 * reach))
    assert math.isinf(_curvature(build(), 1.001 * reach))


@pytest.mark.parametrize("name", [name for name in KINKS if "max-pool" in name or "entry" in name])
def test_maxima_that_keep_their_place_are_linear(name: str) -> None:
    build, reach = KINKS[name]
    assert _curvature(build(), 0.999 * reach) == 0.0


def test_a_tie_is_a_kink_even_at_a_point() -> None:
    assert math.isinf(_curvature(operation(aten.max_pool2d.default, _image(1.0, 1.0, 0.0, 0.0), [2, 2]), 0.0))
    assert math.isinf(_curvature(_scalar("relu", _tensor(0.0)), 0.0))
    assert math.isinf(_curvature(operation(aten.prelu.default, _tensor(0.0), _tensor(0.3)), 0.0))


def test_without_a_centre_kinks_are_within_reach() -> None:
    for build in (
        lambda: operation(aten.max_pool2d.default, _image(0.0, 2.0, 1.5, -1.0), [2, 2]),
        lambda: operation(aten.prelu.default, _tensor(2.0, 3.0), _tensor(0.3)),
        lambda: _scalar("relu", _tensor(2.0, 3.0)),
    ):
        bounds = claims(build(), "unknown")
        assert math.isinf(max(float(c) for c in bounds.curvature.values()))
        assert bounds.reason


def test_prelu_of_positive_entries_does_not_depend_on_the_slope() -> None:
    bounds = claims(operation(aten.prelu.default, _tensor(2.0, 3.0), _tensor(7.0)), 0.5)
    assert float(bounds.jacobian["weight"]) == 0.0
    assert float(bounds.jacobian["self"]) == 1.0
    assert all(c.is_zero for c in bounds.curvature.values())


@pytest.mark.parametrize("name", ["gelu", "silu", "softplus", "tanh", "sigmoid", "mish", "elu", "log_sigmoid"])
def test_smooth_activations_have_curvature_everywhere(name: str) -> None:
    bounds = claims(_scalar(name, _tensor(-0.3, 0.0, 2.0)), "unknown")
    assert all(c.is_finite for c in bounds.curvature.values())
    assert not bounds.reason

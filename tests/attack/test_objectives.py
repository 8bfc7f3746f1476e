"""No slope or curvature of an objective on the domain exceeds its certificate, over random networks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import surefoot as sf
from attack.networks import Network, network
from surefoot.domains import DomainError
from surefoot.objectives import BinaryCrossEntropy, Huber

PARTS = 6


def objective_of(drawn: Network) -> torch.nn.Module | None:
    """A loss that the outputs fit, if there is one."""
    outputs = drawn.model(drawn.x)
    if not isinstance(outputs, Tensor) or not outputs.is_floating_point() or not outputs.dim():
        return None
    generator = torch.Generator().manual_seed(drawn.seed)
    if outputs.dim() == 2 and drawn.seed % 2:
        labels = torch.randint(outputs.shape[1], outputs.shape[:1], generator=generator)
        if drawn.seed % 4 == 1:
            return sf.CrossEntropy(labels)
        weight = torch.rand(outputs.shape[1], generator=generator, dtype=torch.float64) + 0.1
        return sf.CrossEntropy(labels, weight=weight, label_smoothing=0.2)
    numbers = torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
    match drawn.seed // 2 % 4:
        case 0:
            return Huber(numbers, delta=0.5)
        case 1:
            return BinaryCrossEntropy(torch.sigmoid(numbers), pos_weight=2.0, reduction="entries")
        case _:
            return sf.Square(numbers)


@pytest.mark.parametrize("part", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, PARTS))])
def test_certificates_of_objectives_hold(part):
    finite = 0
    for seed in range(5000 + part, 5000 + part + 16 * PARTS, PARTS):
        drawn = network(seed)
        objective, case = objective_of(drawn), drawn.case(seed % 4)
        if objective is None or case.input_norm is not None:
            continue
        options = {"objective": objective, "domain": case.domain, "wrt": case.wrt}
        try:
            certificate = sf.certify(drawn.model, drawn.x, **options)
        except DomainError:  # nothing varies
            continue
        found = sf.estimate(drawn.model, drawn.x, **options, starts=2, budget=100, seed=seed)
        finite += certificate.smoothness.is_finite
        for name in ("bound", "lipschitz", "smoothness"):
            claimed, attained = float(getattr(certificate, name)), float(getattr(found, name))
            assert attained <= claimed * (1 + 1e-9) + 1e-12, f"{name}: {attained} > {claimed}\n{drawn}\n{case}"
    assert finite >= 5

"""One small module of each class of torch.nn: certified, and the certificate attacked."""

from __future__ import annotations

import math

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from judges import assert_upper_bound
from operations.modules import MODULES, example
from surefoot.certificate import Certificate
from surefoot.certifying import certify
from surefoot.domains import Ball, ProductBall


class _Hardsigmoid(nn.Module):
    """PyTorch's derivative of ``hardsigmoid`` is 1/6 rounded to single precision, also in double."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x + 3) / 6


def _attacked(model: nn.Module, x: Tensor, domain: Ball | ProductBall, wrt: str, **effort: int) -> Certificate:
    certificate = certify(model, x, domain=domain, wrt=wrt)  # type: ignore[arg-type]
    judged = _Hardsigmoid() if isinstance(model, nn.Hardsigmoid) else model
    assert_upper_bound(certificate, judged, x, domain, wrt, **effort)
    return certificate


def _varying(model: nn.Module, x: Tensor) -> list[str]:
    """What can vary: parameters, if there are any, and inputs that are not ids."""
    trainable = any(p.requires_grad for p in model.parameters())
    return ["params"] * trainable + ["input"] * x.is_floating_point()


@pytest.mark.parametrize("name", MODULES)
def test_module(name: str) -> None:
    model, x = example(name)
    wrt = _varying(model, x)[0]
    near = _attacked(model, x, Ball(0.02), wrt, starts=1, steps=1)
    assert math.isfinite(float(near.bound))
    assert math.isfinite(float(near.lipschitz))
    _attacked(model, x, ProductBall(0.7), wrt, starts=1, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_module_under_longer_attacks(name: str) -> None:
    model, x = example(name)
    domains = [Ball(radius, center=center) for radius in (0.0, 0.1, 2.0) for center in ("present", "origin")]
    for wrt in _varying(model, x):
        for domain in domains:
            _attacked(model, x, domain, wrt, starts=4, steps=3)

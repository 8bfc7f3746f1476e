"""What the tests of the reader share."""

from __future__ import annotations

import pytest
import torch
from paper_judges import normal
from torch import Tensor, nn

from surefoot import paper, zoo
from surefoot.domains import ProductBall

UNIT = ProductBall(1.0)
SMOOTH = {"activation": "softplus", "pooling": "average"}


def mlp(*sizes: int, activation: type[nn.Module] = nn.Softplus, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return zoo.mlp(sizes, activation, bias).double()


def batch(*shape: int) -> Tensor:
    return normal(*shape, seed=5)


def same(certificate, result: paper.Result) -> bool:
    found = (certificate.bound, certificate.lipschitz, certificate.smoothness)
    return (
        found == (result.bound, result.lipschitz, result.smoothness) and tuple(certificate.flags) == result.flags
    )


def close(certificate, result: paper.Result) -> None:
    for found, expected in (
        (certificate.bound, result.bound),
        (certificate.lipschitz, result.lipschitz),
        (certificate.smoothness, result.smoothness),
    ):
        assert float(found) == pytest.approx(float(expected), rel=1e-12)

"""What a certificate says besides its numbers: what is assumed, and what torch leaves out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from additions.test_additions import UnitRms
from surefoot.operations import Form, records
from surefoot.operations.evaluation import softplus_gap

D = torch.float64


def of(middle: nn.Module, size: float, domain: sf.domains.Domain | None = None) -> sf.Certificate:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), middle, nn.Linear(3, 1)).double()
    x, y = size * torch.randn(4, 2, dtype=D), torch.zeros(4, 1, dtype=D)
    if isinstance(domain, sf.Segment):
        domain = sf.Segment({n: torch.ones_like(p) for n, p in model.named_parameters()}, domain.length)
    return sf.certify(model, x, objective=sf.Square(y), domain=domain)


@pytest.mark.parametrize(
    "domain", [None, sf.Ball(0.01), sf.Segment(None, 0.01)], ids=["longest", "ball", "segment"]
)
def test_the_jump_of_softplus_is_said_where_it_is_within_reach(domain: sf.domains.Domain | None) -> None:
    far, near = (of(nn.Softplus(), size, domain) for size in (30.0, 1.0))
    assert not near.remarks
    (remark,) = far.remarks
    assert f"{softplus_gap():.1e}" in remark
    assert "without the jump" in str(far)
    copy = sf.Certificate.from_json(far.to_json())
    assert copy == far
    assert copy.remarks == far.remarks


@pytest.mark.parametrize("beta", [1.0, 0.5, 4.0])
def test_values_and_slopes_of_torch_are_that_close_to_those_certified(beta: float) -> None:
    point = torch.tensor([[20.0 / beta * (1 + 2.0**-40)]], dtype=D, requires_grad=True)
    computed = F.softplus(point, beta)
    (slope,) = torch.autograd.grad(computed, point)
    smooth = math.log1p(math.exp(beta * point.item())) / beta
    claimed = sf.certify(nn.Softplus(beta), point.detach(), wrt="input", domain=sf.Ball(0.0))
    (remark,) = claimed.remarks
    said = softplus_gap(beta) * max(1.0, beta)
    assert f"{said:.1e}" in remark
    assert 0 < smooth - computed.item() <= said
    assert computed.item() <= float(claimed.bound)
    assert float(claimed.lipschitz) < slope.item() <= float(claimed.lipschitz) + said


def test_every_operation_has_proved_derivatives() -> None:
    plain = (Form.LAYOUT, Form.LINEAR, Form.PRODUCT)
    for name, record in records().items():
        if record.bounds is None or not record.family.startswith("surefoot.") or not isinstance(record.form, Form):
            continue
        proved = record.pullback is not None and bool(record.push or record.symmetric or record.taylor)
        assert proved or record.form in plain or record.rounds is not True, name


class Mixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return UnitRms()(x) + x


def test_what_is_assumed_of_operations_of_others_is_said() -> None:
    certificate = of(Mixed(), 1.0, sf.Ball(0.01))
    (remark,) = certificate.remarks
    assert remark.startswith("assumed: 'example.unit_rms', a rule of additions.own_normalisation")
    assert "assumed: 'example.unit_rms'" in str(certificate)
    assert not of(nn.Tanh(), 1.0, sf.Ball(0.01)).remarks

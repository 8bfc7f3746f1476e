"""Certificates of functions whose numbers leave the range of doubles, or come near its ends."""

from __future__ import annotations

import itertools
import math
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.enclosure import measure, row_norms
from surefoot.errors import SurefootError
from surefoot.magnitude import Magnitude
from surefoot.operations.common import weighed

mpmath.mp.prec = 400
Number = mpmath.mpf
Matrix = list[list[Any]]


def _at_least(bound: Magnitude, exact: Any) -> None:
    assert not math.isnan(bound.log2)
    assert exact == 0 or bound.log2 >= mpmath.log(exact, 2) - 1e-12


def _numbers(tensor: Tensor) -> Matrix:
    return [[Number(a) for a in row] for row in tensor.double().tolist()]


def _product(a: Matrix, b: Matrix) -> Matrix:
    return [[sum(x * y for x, y in zip(row, other, strict=True)) for other in b] for row in a]


def _norm(a: Matrix) -> Any:
    return mpmath.sqrt(sum(x * x for row in a for x in row))


SIZES = {
    torch.float64: (1e200, 1e-200, 1e300, 1e-300, 1.0),
    torch.float32: (1e38, 1e-38, 1e-44, 1.0),
    torch.bfloat16: (1e38, 1e-38, 1e-40, 1.0),
    torch.float16: (6e4, 6e-8, 1.0),
}
CASES = [(dtype, x, w) for dtype, sizes in SIZES.items() for x, w in itertools.product(sizes, sizes)]


@pytest.mark.parametrize(("dtype", "size", "weight"), CASES)
def test_two_linear_layers(dtype: torch.dtype, size: float, weight: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(weight)
    x = (torch.rand(2, 2, dtype=torch.float64) * size).to(dtype)
    first, second = (_numbers(p.detach()) for p in model.parameters())
    hidden = _product(_numbers(x), first)
    exact = _product(hidden, second)
    for radius in (0.0, 0.1):
        certificate = sf.certify(model, x, domain=sf.Ball(radius))
        _at_least(certificate.bound, _norm(exact))
        _at_least(certificate.lipschitz, _norm(hidden) / 2)  # of rank 2 at most: ‖·‖₂ ≥ ‖·‖_F/√2
        assert not math.isnan(certificate.smoothness.log2)
        objective = sf.Square(torch.zeros(2, 2, dtype=dtype))
        certificate = sf.certify(model, x, objective=objective, domain=sf.Ball(radius))
        _at_least(certificate.bound, _norm(exact) ** 2 / 4)  # the mean over two samples of ½‖ŷ‖²
        assert not math.isnan(certificate.smoothness.log2)
        assert str(certificate)


def _networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    return {
        "tanh": (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), (3, 4)),
        "gelu": (nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)), (3, 4)),
        "relu": (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), (3, 4)),
        "convolution": (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.AvgPool2d(2)), (2, 1, 6, 6)),
        "batch": (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), (2, 1, 6, 6)),
        "running": (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).eval(), (2, 1, 6, 6)),
        "layer": (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)), (3, 4)),
        "rms": (nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4, eps=1e-6), nn.Linear(4, 2)), (3, 4)),
        "softmax": (nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), (3, 4)),
        "attention": (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), (2, 3, 4)),
        "length": (_Length(), (3, 4)),
    }


class _Length(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        length: Tensor = self.linear(x).norm(dim=-1)
        return length


@pytest.mark.parametrize("name", _networks())
@pytest.mark.parametrize(("size", "weight"), [(1e200, 1.0), (1.0, 1e200), (1e-200, 1e-200), (1e200, 1e-200)])
def test_no_crash_and_not_nan(name: str, size: float, weight: float) -> None:
    torch.manual_seed(0)
    model, shape = _networks()[name]
    model = model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(weight)
    x = torch.rand(shape, dtype=torch.float64) * size
    for objective in (False, True):
        try:
            target = sf.Square(torch.zeros_like(model(x))) if objective else None
            certificate = sf.certify(model, x, objective=target, domain=sf.Ball(0.1))
        except SurefootError:
            continue
        for number in (certificate.bound, certificate.lipschitz, certificate.smoothness):
            assert not math.isnan(number.log2)
        value = (model(x).square().sum() / 2 / len(x) if objective else model(x).norm()).item()
        assert certificate.bound >= value * (1 - 1e-9) or not math.isfinite(value)
        assert str(certificate)


@pytest.mark.parametrize("scale", [1e160, 1e200, 1e300, 1e-160, 1e-200, 1e-300])
@pytest.mark.parametrize("build", [
    lambda eps: nn.LayerNorm(4, eps=eps, elementwise_affine=False),
    lambda eps: nn.RMSNorm(4, eps=eps, elementwise_affine=False),
    lambda eps: nn.GroupNorm(1, 4, eps=eps, affine=False),
])  # fmt: skip
def test_normalisations_of_huge_and_tiny_inputs(build: Any, scale: float) -> None:
    z = torch.tensor([[1.0, -2.0, 3.0, 0.5]], dtype=torch.float64)
    x = z * scale
    eps = 1e-6 if scale > 1 else 1e-300 if scale < 1e-180 else 1e-5
    layer = build(eps)
    centre = not isinstance(layer, nn.RMSNorm)
    numbers = [Number(a) for a in x[0].tolist()]
    mean = sum(numbers) / 4 if centre else Number(0)
    numbers = [a - mean for a in numbers]
    rho = mpmath.sqrt(sum(a * a for a in numbers) / 4 + Number(eps))
    certificate = sf.certify(layer, x, domain=sf.Ball(0.0), wrt="input")
    _at_least(certificate.bound, _norm([[a / rho for a in numbers]]))
    _at_least(certificate.lipschitz, 1 / rho)
    inner = rho**2 - Number(eps)
    bend = 2 / mpmath.sqrt(3) / rho**2 if inner >= Number(eps) / 2 else 3 * mpmath.sqrt(inner) * eps / rho**5
    _at_least(certificate.smoothness, bend / 2)
    assert certificate.lipschitz.log2 <= mpmath.log(1 / rho, 2) + 1e-6


@pytest.mark.parametrize("eps", [1e-300, 5e-324])
def test_tiny_eps(eps: float) -> None:
    x = torch.tensor([[1.0, -2.0, 3.0, 0.5]], dtype=torch.float64) * 1e6
    layer = nn.LayerNorm(4, eps=eps, elementwise_affine=False)
    certificate = sf.certify(layer, x, domain=sf.Ball(1.0), wrt="input")
    variance = float(x.var(correction=0))
    assert 0.9 < float(certificate.smoothness) / (2 / math.sqrt(3) / variance / 2) < 1.1
    certificate = sf.certify(layer, x * 0, domain=sf.Ball(1.0), wrt="input")
    _at_least(certificate.lipschitz, 1 / mpmath.sqrt(Number(eps)))
    _at_least(certificate.smoothness, Number(0.858) / Number(eps) / 2)


@pytest.mark.parametrize("mean", [1e5, 1e6, 1e7])
@pytest.mark.parametrize("seed", range(3))
def test_group_norm_of_channels_last_images_with_a_large_mean(mean: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 4, 2, 2, dtype=torch.float64, generator=generator) + mean
    x = x.contiguous(memory_format=torch.channels_last)
    target = torch.randn(1, 4, 2, 2, dtype=torch.float64, generator=generator) * 3
    layer = nn.GroupNorm(1, 4, eps=1e-5, affine=False).double()
    certificate = sf.certify(layer, x, objective=sf.Square(target), wrt="input", domain=sf.Ball(0.0))
    values, goal = ([Number(a) for a in t.reshape(-1).tolist()] for t in (x, target))
    centre = sum(values) / 16
    values = [a - centre for a in values]
    rho = mpmath.sqrt(sum(a * a for a in values) / 16 + Number(1e-5))
    z = [a / rho for a in values]
    slopes = [a - b for a, b in zip(z, goal, strict=True)]
    middle = sum(slopes) / 16
    along = sum(a * (b - middle) for a, b in zip(z, slopes, strict=True)) / 16
    gradient = [(b - middle - a * along) / rho for a, b in zip(z, slopes, strict=True)]
    assert certificate.bound.log2 >= mpmath.log(sum(a * a for a in slopes) / 2, 2)
    assert certificate.lipschitz.log2 >= mpmath.log(_norm([gradient]), 2)


@pytest.mark.parametrize("scale", [1.0, 1e200, 1e-200, 1e308, 1e-308, 5e-324])
def test_norms_of_huge_and_tiny_tensors(scale: float) -> None:
    value = torch.tensor([[3.0, -1.0], [1e-170, 1e-160], [0.0, 1.0]], dtype=torch.float64) * min(scale, 1e308) / 3
    rows = _numbers(value)
    size, peak = measure(value)
    _at_least(size, _norm(rows))
    _at_least(peak, max(abs(a) for row in rows for a in row))
    for bound, row in zip(row_norms(value), rows, strict=True):
        _at_least(bound, _norm([row]))


def test_products_of_bounds_that_underflow_are_rounded_up() -> None:
    sizes = torch.tensor([1e-200, 1e-200, 0.0, 1e-320], dtype=torch.float64)
    curvatures = torch.tensor([1e-200, 0.0, 1.0, 0.3], dtype=torch.float64)
    products = weighed(sizes, curvatures)
    assert (products > 0).tolist() == [True, False, False, True]
    for bound, a, b in zip(products.tolist(), sizes.tolist(), curvatures.tolist(), strict=True):
        assert Number(bound) >= Number(a) * Number(b)

"""Operations that are written out in others: the same function, with certificates that hold against an attack."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from judges import assert_upper_bound
from surefoot.calculus.prepare import prepared
from surefoot.certifying import certify
from surefoot.domains import Ball
from surefoot.errors import UnsupportedOperation
from surefoot.operations.captured import capture
from surefoot.operations.evaluation import evaluate_in_double

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")  # torch calls it new
X = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
_IDS = torch.tensor([0, 2, 1, 2, -100])
_PLACES = torch.tensor([[0, 2, 0, 1, 1, 3], [1, 1, 1, 0, 2, 5], [5, 4, 3, 2, 1, 0], [0] * 6, [4, 4, 2, 2, 0, 0]])
_MASK = _PLACES > 1
_WEIGHTS = torch.arange(1.0, 7.0, dtype=torch.float64)
Function = Callable[[Tensor, Tensor], Any]


class Read(nn.Module):
    """A function of what a layer computes (5 × 6) and of a matrix of weights (3 × 6)."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.function = nn.Linear(4, 6), function
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return self.function(h, self.weight) + 0.1 * (self.weight.sum() + h.sum())


SMOOTH: dict[str, Function] = {
    "addcmul": lambda h, w: torch.addcmul(h, h.tanh(), w[0], value=0.5),
    "addcdiv": lambda h, w: torch.addcdiv(h, w[0], h**2 + 1),
    "lerp": lambda h, w: torch.lerp(h.tanh(), h.sin(), 0.3) + torch.lerp(h, w[0], w[1].sigmoid()),
    "logaddexp": lambda h, w: torch.logaddexp(h, w[0]),
    "logaddexp2": lambda h, w: torch.logaddexp2(h, w[0]),
    "logcumsumexp": lambda h, w: torch.logcumsumexp(h, 1),
    "hypot": lambda h, w: torch.hypot(h, 3 + w[0].tanh()),
    "atan2": lambda h, w: torch.atan2(h, 2 + w[0].tanh()),
    "xlogy": lambda h, w: torch.xlogy(h, 2 + w[0].tanh()),
    "var_mean": lambda h, w: sum(torch.var_mean(h, 1)) + sum(torch.var_mean(h + 5)),
    "std_mean": lambda h, w: sum(torch.std_mean(h, [1], correction=0)),
    "prod": lambda h, w: h.prod(1) + h.sigmoid().prod(),
    "cumprod": lambda h, w: h.cumprod(1),
    "cdist": lambda h, w: torch.cdist(h + 9, w),
    "pairwise_distance": lambda h, w: F.pairwise_distance(h + 9, h.tanh()),
    "dist": lambda h, w: torch.dist(h + 9, w[0]),
    "squared norm": lambda h, w: h.norm(dim=1) * h.norm(dim=1),
    "det": lambda h, w: h * torch.linalg.det(w[:, :3]) + torch.det(h[:4, :4]),
    "slogdet": lambda h, w: h + torch.linalg.slogdet(-9 * torch.eye(3, dtype=w.dtype) + w[:, :3])[1],
    "cross": lambda h, w: torch.linalg.cross(h[:, :3], w[:1, 3:], dim=1),
    "trace": lambda h, w: h * torch.trace(w),
    "addmv": lambda h, w: torch.addmv(w[0, :5], h, w[1], alpha=2.0),
    "addr": lambda h, w: torch.addr(h, h[:, 0], w[0]),
    "take": lambda h, w: torch.take(h, torch.tensor([1, 2, 2])),
    "pow": lambda h, w: (h.sigmoid() + 0.5) ** w[0],
    "number to a power": lambda h, w: 1.5**h,
    "einsum of three": lambda h, w: torch.einsum("bi,ki,bk->b", h, w, h[:, :3].tanh()),
    "tensordot": lambda h, w: torch.tensordot(h, w, dims=([1], [1])),
    "kron": lambda h, w: torch.kron(h[:2], w[:, :2]),
    "diff": lambda h, w: h.diff(dim=1),
    "multi_dot": lambda h, w: torch.linalg.multi_dot([h, w.mT, w]),
    "meshgrid": lambda h, w: torch.meshgrid(h[0], w[0], indexing="ij")[0],
    "block_diag": lambda h, w: torch.block_diag(h, w[0], h.tanh()),
    "chebyshev": lambda h, w: (
        torch.special.chebyshev_polynomial_t(h, 4) + torch.special.chebyshev_polynomial_u(h.tanh(), 3)
    ),
    "hermite": lambda h, w: (
        torch.special.hermite_polynomial_h(h.sin(), 3) + torch.special.hermite_polynomial_he(h, 4)
    ),
    "legendre": lambda h, w: (
        torch.special.legendre_polynomial_p(h.tanh(), 4) + torch.special.laguerre_polynomial_l(h, 3)
    ),
    "low degrees": lambda h, w: (
        torch.special.chebyshev_polynomial_u(h, 1) * torch.special.hermite_polynomial_h(h, 0)
        + torch.special.laguerre_polynomial_l(h, 1)
    ),
    "a sum into single precision": lambda h, w: (
        torch.zeros(5, 6).double().scatter_reduce(1, _PLACES, h, "mean")
        + torch.ones(5, 6).double().scatter_reduce(1, _PLACES, h, "sum")
    ),
    "exp2": lambda h, w: torch.exp2(h) + torch.log2(h**2 + 1) + torch.log10(h**2 + 1),
    "asin": lambda h, w: torch.asin(0.8 * h.tanh()) - torch.acos(0.7 * h.sin()),
    "atanh": lambda h, w: torch.atanh(0.8 * h.tanh()) + torch.acosh(h**2 + 2),
    "logit": lambda h, w: torch.logit(0.1 + 0.8 * h.sigmoid()) + torch.special.entr(h.sigmoid()),
    "inverse": lambda h, w: torch.linalg.inv(9 * torch.eye(3, dtype=w.dtype) + w[:, :3]) @ h[:3],
    "solve": lambda h, w: torch.linalg.solve(9 * torch.eye(3, dtype=w.dtype) + w[:, :3], h[:3]),
    "logdet": lambda h, w: h + torch.logdet(9 * torch.eye(3, dtype=w.dtype) + w[:, :3]),
    "nan_to_num": lambda h, w: torch.nan_to_num(h).tanh(),
    "nansum": lambda h, w: (h.tanh().nansum(1) + h.nansum()) * h.sin().nanmean(1, keepdim=True),
    "isfinite": lambda h, w: torch.where(h.isinf(), w[0], h.sin()),
    "pdist": lambda h, w: F.pdist(h + 9 * torch.arange(5.0)[:, None]),
    "3-norm": lambda h, w: torch.linalg.vector_norm(h + 5, 3, dim=1) + torch.linalg.vector_norm(w + 5, 1.5),
    "filled": lambda h, w: h.masked_fill(_MASK, w[0, 0].sin()).masked_fill(~_MASK[0], h.sum()),
    "filled, copied": lambda h, w: h[:, :1].masked_fill(_MASK, 0.5).tanh() * torch.where(_MASK, w[0], h[:1]),
    "scatter_reduce": lambda h, w: (
        h.scatter_reduce(1, _PLACES, h.tanh(), "prod")
        + h.scatter_reduce(0, _PLACES[:2, :5] % 5, h[:2, :5], "mean")
    ),
    "scatter_reduce alone": lambda h, w: (
        h.scatter_reduce(1, _PLACES, h.sin(), "prod", include_self=False)
        + h.scatter_reduce(1, _PLACES, h.sin(), "mean", include_self=False)
        + h.scatter_reduce(-1, _PLACES[:3, :2], w[:, :2], "sum", include_self=False)
    ),
    "index_reduce": lambda h, w: h.index_reduce(1, _IDS[:3], w[:1, :3].expand(5, 3), "prod"),
    "put": lambda h, w: h.put(_IDS[:2], w[0, :2].sin()) + h.put(_PLACES[0], w[0].sin(), accumulate=True),
    "einsum with diagonals": lambda h, w: torch.einsum("iij,j->ij", h[:4].reshape(2, 2, 6), w[0]),
    "einsum of one": lambda h, w: torch.einsum("b...->...", h) * torch.einsum("ij->ji", w)[:, 0],
    "einsum of a diagonal": lambda h, w: torch.einsum("ii->i", h[:3, :3]) + torch.einsum("ii->", w[:3, :3]),
    "einsum with dots": lambda h, w: torch.einsum("...i,...i,...i->...", h, h.tanh(), h.sin()),
    "addbmm": lambda h, w: torch.addbmm(w[:2, :2], h.reshape(5, 2, 3), h.sin().reshape(5, 3, 2), beta=2.0),
    "baddbmm": lambda h, w: torch.baddbmm(
        w[:1, :2, None], h.reshape(5, 2, 3), h.sin().reshape(5, 3, 2), beta=0.5, alpha=-2.0
    ),
    "xlog1py": lambda h, w: torch.special.xlog1py(h, w[0].sigmoid()),
    "where": lambda h, w: torch.where(h > 0, h.square(), -h.square()),
    "times a condition": lambda h, w: h.square() * (h >= 0) + (h**3).masked_fill(h < 0, 0.0),
    "where of a function": lambda h, w: torch.where(h.tanh() > 0, h.tanh().square(), -(h.tanh() ** 3)),
    "condition as a number": lambda h, w: h.square() * (h >= 0).double(),
    "isnan": lambda h, w: torch.where(torch.isnan(h), 0.0, h.tanh()),
    "mse_loss": lambda h, w: F.mse_loss(h, w[0].expand(5, 6)),
    "huber_loss": lambda h, w: F.huber_loss(h, w[0].expand(5, 6), delta=0.5) + F.smooth_l1_loss(h, h * 0, beta=2),
    "binary": lambda h, w: F.binary_cross_entropy_with_logits(h, _WEIGHTS.expand(5, 6) / 9, pos_weight=_WEIGHTS),
    "binary, chances": lambda h, w: F.binary_cross_entropy(h.sigmoid(), _WEIGHTS.expand(5, 6) / 9),
    "cosine_embedding": lambda h, w: F.cosine_embedding_loss(h + 3, w[:1].expand(5, 6) + 3, torch.ones(5)),
    "soft_margin": lambda h, w: F.soft_margin_loss(h, torch.ones_like(h)),
    "kl_div": lambda h, w: F.kl_div(F.log_softmax(h, 1), _WEIGHTS.expand(5, 6) / 21, reduction="batchmean"),
    "cross_entropy": lambda h, w: F.cross_entropy(h, _IDS, label_smoothing=0.2),
    "cross_entropy, images": lambda h, w: F.cross_entropy(h.reshape(5, 3, 2), _IDS[:, None].expand(5, 2)),
    "cross_entropy, weights": lambda h, w: F.cross_entropy(h, _IDS, _WEIGHTS, label_smoothing=0.2),
    "cross_entropy, each": lambda h, w: F.cross_entropy(h, _IDS, reduction="none"),
    "cross_entropy, shares": lambda h, w: F.cross_entropy(h, torch.softmax(w[0], 0).expand(5, 6)),
    "nll_loss": lambda h, w: F.nll_loss(torch.log_softmax(h, 1), _IDS, reduction="sum"),
}
KINKED: dict[str, Function] = {
    "maximum": lambda h, w: torch.maximum(h, w[0]),
    "minimum": lambda h, w: torch.minimum(h, w[0]),
    "where": lambda h, w: torch.where(h < w[0], h, w[0]) + torch.where(h > 0, h, 0.1 * h),
    "clamp": lambda h, w: torch.clamp(h, min=w[0] - 1, max=w[0] + 1),
    "aminmax": lambda h, w: torch.aminmax(h, dim=1)[0],
    "sort": lambda h, w: h.sort(dim=1).values * w[0],
    "topk": lambda h, w: h.topk(3, dim=1).values,
    "kthvalue": lambda h, w: h.kthvalue(2, dim=1).values + h.median(dim=1).values + h.median(),
    "cummax": lambda h, w: h.cummax(dim=1).values,
    "max": lambda h, w: torch.max(h, w[0]) + torch.min(w[1], h),
    "scatter_reduce": lambda h, w: (
        h.scatter_reduce(1, _PLACES, h.sin(), "amax") + h.scatter_reduce(0, _PLACES[:2] % 5, w[:2], "amin")
    ),
    "index_reduce": lambda h, w: h.index_reduce(0, _IDS[:2], w[:2], "amax", include_self=False),
    "quantile": lambda h, w: torch.quantile(h, 0.3, dim=1) + h.nanmedian(),
    "1-norm": lambda h, w: h.norm(p=1, dim=1) + h.norm(p=math.inf, dim=1),
    "l1_loss": lambda h, w: F.l1_loss(h, w[0].expand(5, 6)),
}
JUMPS: dict[str, Function] = {
    "floor": lambda h, w: h.floor(),
    "round": lambda h, w: h.round(),
    "remainder": lambda h, w: h % 1.0,
    "argmax": lambda h, w: h * F.one_hot(h.argmax(1), 6),
    "gt": lambda h, w: w[0] * (h > 0),
    "copysign": lambda h, w: torch.copysign(h, w[0]),
    "histc": lambda h, w: torch.histc(h, 3),
    "mode": lambda h, w: h.mode(1).values,
    "bucketize": lambda h, w: torch.bucketize(h, torch.arange(3.0)).double(),
    "fake_quantize": lambda h, w: torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -10, 10),
}


def _model(function: Function) -> nn.Module:
    return Read(function).double()


@pytest.mark.parametrize("name", [*SMOOTH, *(f"kinked {name}" for name in KINKED)])
def test_the_pieces_compute_the_operation(name: str) -> None:
    model = _model(SMOOTH[name] if name in SMOOTH else KINKED[name.removeprefix("kinked ")])
    graph = prepared(capture(model, X))
    values = {**graph.held, **{leaf.name: dict(model.named_parameters())[leaf.path] for leaf in graph.parameters}}
    (found,) = evaluate_in_double(graph, {**values, graph.inputs[0].name: X})
    torch.testing.assert_close(found, model(X).double(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SMOOTH)
def test_certificates_hold(name: str) -> None:
    model = _model(SMOOTH[name])
    certificate = certify(model, X, domain=Ball(0.02))
    assert math.isfinite(float(certificate.smoothness))
    assert_upper_bound(certificate, model, X, Ball(0.02), starts=1, steps=1)


@pytest.mark.parametrize("name", KINKED)
def test_certificates_of_what_has_kinks_hold(name: str) -> None:
    model = _model(KINKED[name])
    certificate = certify(model, X, domain=Ball(0.02))
    assert math.isfinite(float(certificate.lipschitz))
    assert_upper_bound(certificate, model, X, Ball(0.02), starts=1, steps=1)


TWICE: dict[str, Function] = {
    "scatter": lambda h, w: h.scatter(1, _PLACES, h.sin()),
    "index_put": lambda h, w: h.index_put((torch.tensor([1, 1]),), w[:2]),
    "index_copy": lambda h, w: h.index_copy(0, torch.tensor([1, 1]), w[:2]),
}


@pytest.mark.parametrize("name", TWICE)
def test_numbers_that_are_written_to_one_place_are_refused(name: str) -> None:
    """Torch keeps one of them, and its derivative is that of none."""
    with pytest.raises(UnsupportedOperation, match="two numbers are written to one place"):
        certify(_model(TWICE[name]), X, domain=Ball(0.02))


@pytest.mark.parametrize("name", JUMPS)
def test_what_jumps_is_refused_as_jumping(name: str) -> None:
    with pytest.raises(UnsupportedOperation, match="jumps as its argument varies"):
        certify(_model(JUMPS[name]), X, domain=Ball(0.02))


WITHOUT_BOUNDS: dict[str, tuple[Function, str]] = {
    "eigh": (lambda h, w: torch.linalg.eigh(w @ w.mT)[1], "where two of them meet"),
    "eigvalsh": (lambda h, w: torch.linalg.eigvalsh(w @ w.mT), "where two of them meet"),
    "svd": (lambda h, w: torch.linalg.svd(w, full_matrices=False)[0], "where two of them meet"),
    "nuclear norm": (lambda h, w: torch.linalg.matrix_norm(w, "nuc"), "where two of them meet"),
    "qr": (lambda h, w: torch.linalg.qr(w)[0], "columns become dependent"),
    "pinv": (lambda h, w: torch.linalg.pinv(w), "where the rank changes"),
    "lu": (lambda h, w: torch.linalg.lu(w[:, :3])[1], "exchanges rows"),
    "cholesky": (lambda h, w: torch.linalg.cholesky(w @ w.mT), "factors and exponentials"),
    "matrix_exp": (lambda h, w: torch.linalg.matrix_exp(w[:, :3]), "factors and exponentials"),
    "fft": (lambda h, w: torch.fft.rfft(h).abs(), "complex numbers"),
    "view_as_complex": (lambda h, w: torch.view_as_complex(h.reshape(5, 3, 2)).real, "complex numbers"),
    "as_strided": (lambda h, w: torch.as_strided(h, (2, 2), (3, 1)), "lie in memory"),
    "lgamma": (lambda h, w: torch.lgamma(1 + h.sigmoid()), "special function"),
    "i0": (lambda h, w: torch.i0(h), "special function"),
    "erfinv": (lambda h, w: torch.erfinv(h.tanh()), "special function"),
}


@pytest.mark.parametrize("name", WITHOUT_BOUNDS)
def test_what_has_no_bounds_is_refused_with_the_reason(name: str) -> None:
    function, reason = WITHOUT_BOUNDS[name]
    with pytest.raises(UnsupportedOperation, match=f"'aten.* in the model itself: .*{reason}"):
        certify(_model(function), X, domain=Ball(0.02))


INSTEAD: dict[str, tuple[Function, Function]] = {
    "pinv, columns": (
        lambda h, w: torch.linalg.solve(w @ w.mT, w),
        lambda h, w: torch.linalg.pinv(w.mT),
    ),
    "pinv, rows": (
        lambda h, w: w.mT @ torch.linalg.inv(w @ w.mT),
        lambda h, w: torch.linalg.pinv(w),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INSTEAD)
def test_what_refusals_advise_is_the_same_function_and_has_bounds(name: str) -> None:
    advised, refused = INSTEAD[name]
    model = _model(advised)
    assert torch.allclose(model(X), _model(refused)(X), rtol=1e-10, atol=1e-10)
    assert certify(model, X, domain=Ball(1e-4)).smoothness.is_finite

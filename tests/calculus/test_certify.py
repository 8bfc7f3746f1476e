"""Certificates: attained where the truth is known, never exceeded where it is not, refused where there is none."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from judges import (
    Target,
    assert_invariant_under,
    assert_upper_bound,
    jacobian_norm,
    second_derivative,
    tensor_norm,
)
from judges.models import MODELS, fresh, make
from judges.properties import NAMES
from surefoot.certificate import proving
from surefoot.domains import DomainError
from surefoot.errors import CaptureError, UnsupportedOperation

DOMAINS = {
    "product at the origin": sf.ProductBall(3.0),
    "product at present": sf.ProductBall(0.1, center="present"),
    "ball at present": sf.Ball(1.0),
}


def batch(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-9)


def spectral(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix.double(), ord=2))


class Pair(nn.Module):
    """Two inputs, two outputs."""

    def __init__(self, together: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.together = nn.Linear(2, 3), nn.Linear(4, 3), together

    def forward(self, a: Tensor, b: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        outputs = torch.tanh(self.first(a)) * self.second(b), self.second(b)
        return torch.cat(outputs, dim=1) if self.together else outputs


@pytest.mark.parametrize("radius", [0.0, 0.3, 1.0, 7.0])
def test_one_linear_layer_is_exact(radius):
    x = batch(5, 3)
    certificate = sf.certify(nn.Linear(3, 2, bias=False), x, domain=sf.ProductBall(radius))
    assert float(certificate.bound) == close(radius * spectral(x))
    assert float(certificate.lipschitz) == close(spectral(x))
    assert float(certificate.smoothness) == 0.0


def test_two_linear_layers_are_exact_for_one_sample():
    """D²(W₂W₁x)[v, v] = 2V₂V₁x is at most 2‖V₂‖‖V₁‖‖x‖ ≤ ‖x‖, reached by rank one."""
    x = batch(1, 3)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))
    certificate = sf.certify(model, x, domain=sf.ProductBall(0.5))
    norm = float(x.double().norm())
    assert float(certificate.bound) == close(0.25 * norm)
    assert float(certificate.lipschitz) == close(math.sqrt(0.5) * norm)
    assert float(certificate.smoothness) == close(norm)


@pytest.mark.parametrize(
    ("module", "lipschitz", "smoothness"),
    [
        (nn.Softplus(), 0.5, 0.25),
        (nn.Tanh(), 1.0, 0.0),
        (nn.Softmax(-1), 0.5, None),
        (nn.LayerNorm(2, eps=1e-2, elementwise_affine=False), 10.0, None),
        (nn.AvgPool1d(2), 1 / math.sqrt(2), 0.0),
    ],
    ids=str,
)
def test_at_the_origin_of_the_input(module, lipschitz, smoothness):
    certificate = sf.certify(module, torch.zeros(1, 2), domain=sf.Ball(0.0), wrt="input")
    assert float(certificate.lipschitz) == pytest.approx(lipschitz, rel=1e-3)
    if smoothness is not None:
        assert float(certificate.smoothness) == pytest.approx(smoothness, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("domain", DOMAINS.values(), ids=DOMAINS)
def test_nothing_exceeds_a_certificate(name, domain):
    model, x = make(name)
    for wrt in ["params"] + ["input"] * x.is_floating_point():
        certificate = sf.certify(model, x, domain=domain, wrt=wrt)
        assert_upper_bound(certificate, model, x, domain, wrt, starts=2, steps=2)


def test_blocks_in_place_of_very_many_variables(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Softplus(), nn.Linear(5, 2)).double()
    x, domain = batch(7, 4).double(), sf.ProductBall(1.0)
    each = sf.certify(model, x, domain=domain)
    monkeypatch.setattr(proving, "_MANY", 0)
    joint = sf.certify(model, x, domain=domain)
    ratios = (joint.block_smoothness / each.block_smoothness).numpy()
    assert ratios.min() > 1 - 1e-9
    assert 1 - 1e-9 < float(joint.smoothness / each.smoothness) < 1.2
    assert_upper_bound(joint, model, x, domain, "params", starts=2, steps=2)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("transformer", "group_normalised")])
def test_at_a_point_it_is_close_to_the_derivatives(name):
    model, x = make(name)
    point = sf.Ball(0.0)
    target = Target.of(model, x, point)
    certificate = sf.certify(model, x, domain=point)
    assert float(certificate.bound) == close(float(target.value(target.center).norm()))
    assert 1 - 1e-9 <= float(certificate.lipschitz) / jacobian_norm(target, target.center) < 3


def test_the_curvature_at_a_point_is_close_to_the_second_derivative():
    model, x = make("dense")
    target = Target.of(model, x, sf.Ball(0.0))
    truth = tensor_norm(second_derivative(target, target.center))
    assert 1 - 1e-9 <= float(sf.certify(model, x, domain=sf.Ball(0.0)).smoothness) / truth < 4


def test_a_saddle_is_not_flat():
    """At the origin of W ↦ WᵀWx the slope is zero and the curvature is not, also on a domain that is one point."""
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    model[2].requires_grad_(False)
    x, point = batch(1, 3), sf.Ball(0.0, center="origin")
    target = Target.of(model, x, point)
    truth = tensor_norm(second_derivative(target, target.center))
    certificate = sf.certify(model, x, domain=point)
    assert float(certificate.lipschitz) == 0.0
    assert float(certificate.smoothness) >= truth > 0


def test_several_inputs_and_outputs():
    torch.manual_seed(0)
    model, x = Pair(), (batch(2, 2), batch(2, 4, seed=1))
    joined = Pair(together=True)
    joined.load_state_dict(model.state_dict())
    for wrt in ("params", "input"):
        certificate = sf.certify(model, x, domain=sf.Ball(0.4), wrt=wrt)
        assert_upper_bound(certificate, model, x, sf.Ball(0.4), wrt)
        assert_invariant_under(
            certificate, sf.certify(joined, x, domain=sf.Ball(0.4), wrt=wrt), names=("bound", "lipschitz")
        )


def test_keyword_inputs_in_any_order():
    torch.manual_seed(0)
    model, a, b = Pair(), 10 * batch(2, 2), batch(2, 4, seed=1)
    certificates = [sf.certify(model, x) for x in ((a, b), {"a": a, "b": b}, {"b": b, "a": a})]
    assert_invariant_under(certificates[0], certificates[1])
    assert_invariant_under(certificates[0], certificates[2])


@pytest.mark.parametrize("name", [name for name in MODELS if name != "language"])
def test_without_data_or_weights_it_still_holds(name):
    model, x = make(name)
    norm = float(x.double().norm()) * (1 + 1e-12)
    for radius in (0.3, 2.0):
        domain = sf.ProductBall(radius)
        by_norm = sf.certify(model, x, domain=domain, input_norm=norm)
        empty = sf.certify(copy.deepcopy(model).to("meta"), x.to("meta"), domain=domain, input_norm=norm)
        for certificate in (by_norm, empty):
            assert_upper_bound(certificate, model, x, domain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_are_read_as_the_numbers_they_are(dtype):
    model, x = fresh("perceptron")
    narrow, data = model.to(dtype), x.to(dtype)
    assert_invariant_under(
        sf.certify(narrow, data, domain=sf.Ball(0.1)),
        sf.certify(copy.deepcopy(narrow).double(), data.double(), domain=sf.Ball(0.1)),
    )


def test_frozen_parameters_do_not_vary():
    model, x = fresh("perceptron")
    model[0].requires_grad_(False)
    certificate = sf.certify(model, x, domain=sf.Ball(0.5))
    assert list(certificate.block_lipschitz) == ["2", "4"]
    assert_upper_bound(certificate, model, x, sf.Ball(0.5))


def test_the_parts_of_a_certificate_agree():
    model, x = make("perceptron")
    certificate = sf.certify(model, x, domain=sf.Ball(0.5))
    total = math.hypot(*map(float, certificate.block_lipschitz.values()))
    assert float(certificate.lipschitz) == close(total)
    blocks = torch.tensor(certificate.block_smoothness.numpy())
    assert torch.allclose(blocks, blocks.T)
    assert float(certificate.smoothness) <= spectral(blocks) * (1 + 1e-9)
    assert certificate.step_size <= 1 / float(certificate.smoothness)
    assert sum(row.share for row in certificate.rows) == pytest.approx(1.0)
    assert sum(certificate.by_operation().values()) == pytest.approx(1.0)
    assert set(certificate.by_module()) == {"0", "1", "2", "3", "4"}
    assert json.loads(json.dumps(certificate.to_dict()))["bound"] == float(certificate.bound)


def test_a_kink_makes_the_smoothness_infinite_and_says_so():
    model, x = make("kinked")
    certificate = sf.certify(model, x)
    assert not certificate.smoothness.is_finite
    assert certificate.step_size == 0.0
    assert any("relu" in reason for reason in certificate.reasons)
    assert "∞" in str(certificate)


def test_a_kink_out_of_reach_does_no_harm():
    model, x = make("kinked")
    domain = sf.Ball(1e-5)
    certificate = sf.certify(model, x, domain=domain)
    assert certificate.smoothness.is_finite
    assert_upper_bound(certificate, model, x, domain)


def test_a_deep_network_does_not_overflow():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(120)))
    certificate = sf.certify(model, batch(1, 2), domain=sf.ProductBall(1e10))
    assert all(getattr(certificate, name).is_finite for name in NAMES)
    assert math.isinf(float(certificate.lipschitz))
    assert int(str(certificate.lipschitz).partition("e+")[2]) > 1000


@pytest.mark.parametrize("scale", [2.0**-600, 2.0**-80, 2.0**400])
@pytest.mark.parametrize("domain", [sf.ProductBall(0.5), sf.Ball(0.1)], ids=str)
def test_data_of_any_size(scale, domain):
    """Without biases these layers are linear in the data, whatever its size."""
    layers = (nn.Conv2d(2, 3, 2, bias=False), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(3, 2, bias=False))
    torch.manual_seed(0)
    model, x = nn.Sequential(*layers).double(), batch(2, 2, 3, 3).double()
    one, other = sf.certify(model, x, domain=domain), sf.certify(model, scale * x, domain=domain)
    for name in NAMES:
        ratio = 2.0 ** (getattr(other, name).log2 - getattr(one, name).log2 - math.log2(scale))
        assert ratio == pytest.approx(1.0, rel=1e-6), name


def test_the_model_is_untouched():
    model, x = make("batch_normalised")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.random.get_rng_state()
    sf.certify(model, x, domain=sf.Ball(0.1))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), random)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


class Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.floor(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wrt": "weights"}, "wrt"),
        ({"domain": sf.ProductBall({"0": 1.0})}, "radii"),
        ({"domain": sf.Ball(1.0, center={})}, "centre"),
        ({"domain": sf.Ball(1.0, center={"0.weight": torch.zeros(1, 1)})}, "shape"),
    ],
)
def test_a_domain_that_does_not_fit_is_refused(options, message):
    model, x = make("perceptron")
    with pytest.raises(DomainError, match=message):
        sf.certify(model, x, **options)


@pytest.mark.parametrize("radius", [-1.0, math.inf, math.nan, "wide"])
def test_a_radius_that_is_none_is_refused(radius):
    with pytest.raises(DomainError, match="radius"):
        sf.Ball(radius)
    with pytest.raises(DomainError, match="radius"):
        sf.ProductBall({"0": radius})


def test_what_has_no_derivative_is_refused():
    model, ids = fresh("language")
    with pytest.raises(DomainError, match="integers"):
        sf.certify(model, ids, wrt="input")
    with pytest.raises(DomainError, match="nothing varies"):
        sf.certify(model.requires_grad_(False), ids)
    with pytest.raises(UnsupportedOperation, match="jumps"):
        sf.certify(Rounded(), batch(1, 2), wrt="input")
    with pytest.raises(CaptureError):
        sf.certify(nn.Dropout(0.5), batch(1, 2), wrt="input")


def test_a_model_without_values_needs_the_norm_of_its_input():
    model, x = nn.Linear(2, 2, device="meta"), torch.zeros(1, 2, device="meta")
    with pytest.raises(DomainError, match="input_norm"):
        sf.certify(model, x)
    with pytest.raises(DomainError, match="origin"):
        sf.certify(model, x, domain=sf.Ball(1.0), input_norm=1.0)


class _Masked(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))

    def forward(self, x):
        return self.linear(x) * self.mask


class _Times(nn.Module):
    """A linear layer times a constant that the model makes itself."""

    def __init__(self, constant):
        super().__init__()
        self.linear, self.constant = nn.Linear(4, 3), constant

    def forward(self, x):
        return self.linear(x) * self.constant()


def test_a_mask_without_values_is_at_most_one():
    with torch.device("meta"):
        model, x = nn.Linear(4, 3), torch.zeros(2, 4)
        masked = _Masked(model)
    constants = [sf.certify(m, x, domain=sf.ProductBall(1.0), input_norm=1.0).lipschitz for m in (model, masked)]
    assert float(constants[1]) == close(float(constants[0]))


def test_constants_are_folded_in_double_precision():
    model, x = _Times(lambda: torch.arange(3) * 0.1), torch.eye(4)[:1]
    with torch.no_grad():
        model.linear.weight.zero_()
        model.linear.bias.copy_(torch.tensor([0.0, 0.0, 1.0]))
    certificate = sf.certify(model, x, domain=sf.ProductBall(1e-300, center="present"))
    assert abs(float(certificate.bound) - 2 * 0.1) < 1e-13
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("domain", [sf.Ball(0.1), sf.Segment(None, 0.1)], ids=["ball", "segment"])
def test_the_default_device_does_not_matter(domain):
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(5, 4)
    objective = sf.CrossEntropy(torch.arange(5) % 3)
    expected = sf.certify(model, x, objective=objective, domain=domain)
    with torch.device("meta"):
        found = sf.certify(model, x, objective=objective, domain=domain)
    assert (found.lipschitz, found.smoothness) == (expected.lipschitz, expected.smoothness)
    assert str(found) == str(expected)

"""What must not change, or must change in a known way, when a model is written differently."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import surefoot as sf
from judges import assert_invariant_under, assert_monotone_in_radius
from judges.models import MODELS, Side, Sum, make
from judges.properties import NAMES

DOMAINS = {
    "product at the origin": sf.ProductBall(0.7),
    "product at present": sf.ProductBall(0.2, center="present"),
    "ball at present": sf.Ball(0.3),
}
every_model = pytest.mark.parametrize("name", MODELS)
every_domain = pytest.mark.parametrize("domain", DOMAINS.values(), ids=DOMAINS)


def linear(rows: int, columns: int, seed: int = 0, **options: bool) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(columns, rows, **options)


def batch(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def scaled(certificate: sf.Certificate, bound: float, lipschitz: float, smoothness: float) -> sf.Certificate:
    """The certificate with its constants multiplied."""
    factors = dict(zip(NAMES, (bound, lipschitz, smoothness), strict=True))
    values = {name: getattr(certificate, name) * factor for name, factor in factors.items()}
    return sf.Certificate(**values, block_lipschitz={}, block_smoothness=certificate.block_smoothness)


@every_model
@every_domain
def test_identity_modules_change_nothing(name, domain):
    model, x = make(name)
    parts = list(model) if isinstance(model, nn.Sequential) else [model]
    padded = nn.Sequential(*(m for part in parts for m in (nn.Identity(), part)), nn.Identity())
    assert_invariant_under(sf.certify(model, x, domain=domain), sf.certify(padded, x, domain=domain))


@every_domain
def test_a_linear_layer_split_by_an_identity_matrix(domain):
    whole = linear(4, 3)
    identity = nn.Linear(4, 4, bias=False)
    identity.weight.data = torch.eye(4)
    split = nn.Sequential(whole, frozen(identity), nn.Tanh())
    x = batch(2, 3)
    assert_invariant_under(
        sf.certify(nn.Sequential(whole, nn.Tanh()), x, domain=domain), sf.certify(split, x, domain=domain)
    )


@every_domain
@pytest.mark.parametrize("join", [Sum, Side])
def test_the_order_of_independent_branches_does_not_matter(domain, join):
    first, second = nn.Sequential(linear(4, 3), nn.Tanh()), nn.Sequential(linear(4, 3, seed=1), nn.Softplus())
    head, x = linear(2, 4 if join is Sum else 8), batch(2, 3)
    there, back = (nn.Sequential(join(*order), head) for order in ((first, second), (second, first)))
    if join is Side:
        back[1] = copy.deepcopy(head)
        back[1].weight.data = head.weight.data.roll(4, dims=1)
    assert_invariant_under(sf.certify(there, x, domain=domain), sf.certify(back, x, domain=domain))


@pytest.mark.parametrize("factor", [0.01, 3.0, 250.0])
def test_a_rescaled_input_and_the_inverse_radius(factor):
    """u ↦ f(cx; u) on ‖u‖ ≤ R/c takes the values of u ↦ f(x; u) on ‖u‖ ≤ R; slopes grow by c, curvatures by c²."""
    first, rest = linear(4, 3, bias=False), frozen(nn.Sequential(nn.Softplus(), linear(2, 4, seed=1)))
    model, x = nn.Sequential(first, *rest).double(), batch(2, 3).double()
    before = sf.certify(model, x, domain=sf.ProductBall(0.8))
    after = sf.certify(model, factor * x, domain=sf.ProductBall(0.8 / factor))
    assert_invariant_under(scaled(before, 1.0, factor, factor**2), after, relative=1e-6)


@every_domain
def test_permuted_hidden_units(domain):
    model = nn.Sequential(linear(5, 3), nn.GELU(), linear(2, 5, seed=1))
    permuted, order, x = copy.deepcopy(model), torch.tensor([3, 0, 4, 2, 1]), batch(2, 3)
    permuted[0].weight.data, permuted[0].bias.data = model[0].weight.data[order], model[0].bias.data[order]
    permuted[2].weight.data = model[2].weight.data[:, order]
    assert_invariant_under(
        sf.certify(model, x, domain=domain), sf.certify(permuted, x, domain=domain), relative=1e-8
    )


@every_model
@every_domain
def test_permuted_samples(name, domain):
    model, x = make(name)
    assert_invariant_under(
        sf.certify(model, x, domain=domain), sf.certify(model, x.flip(0), domain=domain), relative=1e-8
    )


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("batch_normalised", "transformer")])
@every_domain
def test_a_duplicated_sample_costs_between_once_and_twice(name, domain):
    """Outputs and slopes grow by √2 exactly; a bound on curvatures may grow by 2, and by √2 at least."""
    model, x = make(name)
    one, two = (sf.certify(model, batch, domain=domain) for batch in (x, torch.cat([x, x])))
    for quantity in NAMES:
        low, high = getattr(one, quantity), getattr(two, quantity)
        assert low <= high * (1 + 1e-9), quantity
        assert high <= low * 2.0 * (1 + 1e-9), quantity


def test_a_duplicated_sample_of_a_linear_network():
    model, x = nn.Sequential(linear(4, 3), linear(2, 4, seed=1)), batch(2, 3)
    one, two = (sf.certify(model, batch, domain=sf.ProductBall(1.0)) for batch in (x, torch.cat([x, x])))
    assert_invariant_under(scaled(one, *[math.sqrt(2)] * 3), two)


@every_model
@pytest.mark.parametrize("center", ["origin", "present"])
@pytest.mark.parametrize("shape", [sf.Ball, sf.ProductBall])
def test_a_larger_domain_has_no_smaller_constants(name, center, shape):
    model, x = make(name)
    assert_monotone_in_radius(
        lambda radius: sf.certify(model, x, domain=shape(radius, center=center)), [0.0, 1e-3, 0.1, 0.5, 2.0, 10.0]
    )


@pytest.mark.parametrize("name", [name for name in MODELS if name != "language"])
@pytest.mark.parametrize("center", ["origin", "present"])
def test_a_larger_domain_of_inputs_has_no_smaller_constants(name, center):
    model, x = make(name)
    assert_monotone_in_radius(
        lambda radius: sf.certify(model, x, domain=sf.Ball(radius, center=center), wrt="input"),
        [0.0, 1e-3, 0.1, 0.5, 2.0, 10.0],
    )


@every_model
@pytest.mark.parametrize("center", ["origin", "present"])
@pytest.mark.parametrize("radius", [0.05, 1.0])
def test_one_ball_has_no_larger_constants_than_a_product_of_such_balls(name, center, radius):
    model, x = make(name)
    ball, product = (
        sf.certify(model, x, domain=kind(radius, center=center)) for kind in (sf.Ball, sf.ProductBall)
    )
    for quantity in NAMES:
        assert getattr(ball, quantity) <= getattr(product, quantity) * (1 + 1e-9), quantity


@every_model
@every_domain
def test_the_precision_of_the_weights_hardly_matters(name, domain):
    model, x = make(name)
    wide = copy.deepcopy(model).double()
    double = x.double() if x.is_floating_point() else x
    assert_invariant_under(
        sf.certify(model, x, domain=domain), sf.certify(wide, double, domain=domain), relative=1e-5
    )


class Times(nn.Module):
    def __init__(self, model: nn.Module, factor: float) -> None:
        super().__init__()
        self.model, self.factor = model, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x) * self.factor


@every_model
@pytest.mark.parametrize("factor", [-1.0, 0.125, 30.0])
def test_a_multiple_of_the_output(name, factor):
    model, x = make(name)
    before, after = (sf.certify(m, x, domain=sf.Ball(0.2)) for m in (model, Times(model, factor)))
    assert_invariant_under(scaled(before, *[abs(factor)] * 3), after)


@every_model
def test_moving_the_numbers_of_the_output_changes_nothing(name):
    model, x = make(name)
    moved = nn.Sequential(model, nn.Flatten(), nn.Unflatten(1, (1, -1)))
    assert_invariant_under(sf.certify(model, x), sf.certify(moved, x))


@every_domain
def test_a_frozen_layer_can_be_merged_into_the_data(domain):
    """With respect to the parameters behind it, a fixed layer only prepares the data."""
    front, rest = frozen(linear(4, 3)), nn.Sequential(linear(3, 4, seed=1), nn.Tanh())
    x = batch(2, 3)
    merged = front(x).detach()
    assert_invariant_under(
        sf.certify(nn.Sequential(front, rest), x, domain=domain),
        sf.certify(rest, merged, domain=domain),
        relative=1e-6,
    )

"""What a certificate says in words is true."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace

import pytest
import torch
from certificates import LABELS, certificate, constructed, perceptron, row
from torch import nn

import surefoot as sf
from surefoot.attained import LowerBound
from surefoot.certificate.advice import headline, limits, remedies, verdict

DOMAINS = {"origin": sf.ProductBall, "near": lambda r: sf.Ball(0.1 * r), "far": lambda r: sf.Ball(r)}


def claims(found: sf.Certificate) -> dict[str, float]:
    """What a certificate says would help, and by how much."""
    pattern = re.compile(r"(half the radius|ten times the ε).* divides L by about (\S+) or more")
    matches = [pattern.fullmatch(text) for text in remedies(found)]
    return {match[1]: float(match[2]) for match in matches if match}


def layers(normalisation: type[nn.Module] | None, activation: type[nn.Module], count: int) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(count - 1):
        parts += [nn.Linear(4, 4), *([normalisation(4)] if normalisation else []), activation()]
    return nn.Sequential(*parts, nn.Linear(4, 3)).double()


CASES = {
    "network": (nn.Softplus, 4, None),
    "objective": (nn.Tanh, 3, sf.CrossEntropy(LABELS)),
    "linear": (nn.Identity, 3, None),
    "product": (nn.Identity, 2, None),
}


@pytest.mark.parametrize("where", DOMAINS)
@pytest.mark.parametrize("case", CASES)
def test_half_the_radius_helps_as_much_as_is_said(where, case):
    activation, count, objective = CASES[case]
    model, x = layers(None, activation, count), torch.randn(5, 4).double()
    whole, half = (sf.certify(model, x, objective=objective, domain=DOMAINS[where](r)) for r in (1.0, 0.5))
    gained = 2.0 ** (whole.smoothness.log2 - half.smoothness.log2)
    claim = claims(whole).get("half the radius", 1.0)
    assert claim <= gained * (1 + 1e-9)
    if case == "product":  # the second derivative of W₂W₁x does not depend on W
        assert claim == 1.0
    elif where == "origin":
        assert claim > 1.3


@pytest.mark.parametrize("where", DOMAINS)
@pytest.mark.parametrize("normalisation", [nn.LayerNorm, nn.BatchNorm1d])
def test_a_larger_epsilon_helps_as_much_as_is_said(where, normalisation):
    model, x = layers(normalisation, nn.Softplus, 3), torch.randn(5, 4).double()
    eased = copy.deepcopy(model)
    for module in eased.modules():
        if isinstance(module, normalisation):
            module.eps *= 10
    before, after = (sf.certify(net, x, domain=DOMAINS[where](1.0)) for net in (model, eased))
    gained = 2.0 ** (before.smoothness.log2 - after.smoothness.log2)
    claim = claims(before)["ten times the ε"]
    assert 0.8 * gained <= claim <= gained * 1.02
    assert any("(now 1e-05)" in text for text in remedies(before))


def test_a_normalisation_with_known_statistics_far_from_zero_is_not_blamed():
    model, x = layers(nn.BatchNorm1d, nn.Softplus, 3).eval(), torch.randn(5, 4).double()
    assert "ten times the ε" not in claims(sf.certify(model, x, domain=sf.Ball(0.1)))


def test_where_the_smoothness_comes_from():
    few = constructed(row("a", share=0.92), row("b", share=0.08))
    assert limits(few) == ["92% of L comes from a (linear)"]
    two = constructed(row("a", share=0.3), row("", "tanh", share=0.7))
    assert limits(two) == ["70% of L comes from (model) (tanh), 30% from a (linear)"]
    many = constructed(*[row(f"l{k}", "tanh" if k % 4 else "linear", share=0.05) for k in range(20)])
    sentence = "L comes from many places: 75% from tanh, 25% from linear; the largest is l0 (linear) with 5%"
    assert limits(many) == [sentence]
    called_twice = constructed(row("a", share=0.5), row("a", share=0.45), row("b", share=0.05))
    assert limits(called_twice) == ["95% of L comes from a (linear)"]
    assert limits(constructed(row("a"))) == []
    assert limits(constructed()) == []


def test_the_largest_remedy_is_named_first_and_small_ones_not_at_all():
    found = constructed(
        row("a", share=1.0, bits_by_radius=1.0, bits_by_epsilon=2.0), row("n", "layer_norm", epsilon=0.1)
    )
    assert remedies(found) == [
        "ten times the ε of layer_norm (now 0.1) divides L by about 4 or more",
        "half the radius divides L by about 2 or more",
    ]
    assert remedies(constructed(row("a", share=1.0, bits_by_radius=0.2))) == []
    mixed = constructed(row("a", share=0.5, bits_by_radius=50.0), row("b", share=0.5))
    assert claims(mixed) == {"half the radius": 1.9}


def test_headlines():
    assert headline(certificate("kinked")).startswith(
        "Nothing is proved about steps: L is infinite because of relu"
    )
    assert headline(certificate("segment")).startswith("A step of ")
    found = certificate("objective")
    assert headline(found).startswith("Steps up to ")
    assert float(headline(found).split()[3]) <= found.step_size
    told = headline(replace(found, radius=1.0, curvature=LowerBound(0.5 / found.step_size)))
    assert "are proved to descend; the curvature at these weights would allow " in told
    assert "too short to be of use" in headline(constructed(smoothness=1e12, scalar=True))
    assert headline(certificate("network")).endswith("times the change of the parameters, on the domain.")


def test_verdicts():
    assert verdict(certificate("network")).startswith("useful: on the domain the output")
    assert verdict(certificate("objective")).startswith("useful: the gradient is L-Lipschitz")
    assert verdict(certificate("segment")).startswith("useful: on the segment")
    assert verdict(certificate("kinked")) == "not certified: L is infinite because of relu in 1; m and ℓ hold"
    flagged = constructed(flags=("a bias",), scalar=True)
    assert verdict(flagged).startswith("not certified: no step size is guaranteed")
    assert "guaranteed step size" not in str(flagged)
    still = constructed(scalar=True, segment_step=0.0)
    assert verdict(still) == "not certified: no step along the segment is proved to descend"


def test_a_finite_constant_may_be_of_no_use():
    assert verdict(certificate("deep")).startswith("finite but of no use: ")
    assert verdict(constructed(smoothness=0.99e12, scalar=True)).startswith("useful: ")
    assert verdict(constructed(smoothness=1e12, scalar=True)).startswith("finite but of no use: ")
    steep = constructed(smoothness=1e12, scalar=True, block_gradients={"a": 3.0, "b": 4.0})
    assert verdict(steep).startswith("useful: ")  # as steep as it is curved: 1/L is a step of some length
    assert verdict(replace(steep, curvature=LowerBound(1e5))).startswith("finite but of no use: ")
    known = verdict(replace(steep, curvature=LowerBound(2.6e11)))
    assert known.startswith("useful: ")
    assert known.endswith("; 1/L is at least 0.25 of what the curvature at these weights allows")
    for flat in (0.0, 1.0):
        assert verdict(constructed(smoothness=flat, scalar=True, curvature=LowerBound(0.0))).startswith("useful: ")
    point = constructed(scalar=True, radius=0.0)
    assert verdict(point) == (
        "finite but of no use: the gradient is L-Lipschitz on the domain, but no step stays in it"
    )
    assert float(sf.Certificate.from_json(replace(steep, curvature=LowerBound(2e11)).to_json()).curvature) == 2e11


def test_the_headline_says_what_helps_where_steps_are_of_no_use():
    alone = "What helps: surefoot.CertifiedDescent proves the steps that it takes, one by one."
    point = constructed(scalar=True, radius=0.0)
    assert headline(point).startswith("Nothing is proved about steps: ")
    assert headline(point).endswith(alone)
    ball = constructed(smoothness=1e13, scalar=True, radius=1.0, block_gradients={"a": 1.0})
    assert "too short to be of use" in headline(ball)
    assert 'What helps: effort="high" may sharpen L, and surefoot.CertifiedDescent' in headline(ball)
    assert headline(replace(ball, effort="high")).endswith(alone)
    assert headline(constructed(smoothness=math.inf, scalar=True, radius=1.0)).endswith(alone)
    for other in (constructed(scalar=True, radius=1.0), constructed(smoothness=1e13, radius=1.0)):
        assert "What helps" not in headline(other)


def test_many_kinks_are_one_reason():
    model = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(4, 4), nn.ReLU()))).double()
    found = sf.certify(model, perceptron()[1])
    assert verdict(found) == "not certified: L is infinite because of relu in 6 places; m and ℓ hold"
    assert len(found.reasons) == 1
    assert found.reasons[0].startswith("1 and 5 more (relu): ")
    assert found.reasons[0] in str(found)


def test_the_guaranteed_step_descends():
    model, x = perceptron()
    text = str(certificate("objective"))
    step = float(text.partition("guaranteed step size = ")[2].split(":")[0])
    loss = sf.CrossEntropy(LABELS)
    before = loss(model(x))
    gradients = torch.autograd.grad(before, list(model.parameters()))
    norm = torch.stack([g.norm() for g in gradients]).norm()
    assert step * float(norm) <= 0.1  # it stays in the ball
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter -= step * gradient
        after = float(loss(model(x)))
    assert after <= float(before.detach()) - 0.5 * step * float(norm) ** 2 * (1 - 1e-9)

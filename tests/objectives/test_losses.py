"""Losses: equal to torch's, certified soundly and sharply, refused with words where targets do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.objectives import ObjectiveError

LABELS = torch.tensor([0, 2, 1, 2, 2])
SOFT = torch.softmax(torch.randn(5, 3, generator=torch.Generator().manual_seed(1)), dim=1)
OBJECTIVES = {
    "labels": sf.CrossEntropy(LABELS),
    "distributions": sf.CrossEntropy(SOFT),
    "square": sf.Square(SOFT),
}


def network(activation: type[nn.Module] = nn.Softplus) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), activation(), nn.Linear(6, 3)), torch.randn(5, 4)


def test_values_are_those_of_torch():
    outputs = torch.randn(5, 3, dtype=torch.float64)
    assert torch.equal(sf.CrossEntropy(LABELS)(outputs), nn.functional.cross_entropy(outputs, LABELS))
    assert torch.equal(sf.CrossEntropy()(outputs, LABELS), sf.CrossEntropy(LABELS)(outputs))
    expected = nn.functional.mse_loss(outputs, SOFT.double(), reduction="sum") / 10
    assert torch.allclose(sf.Square(SOFT)(outputs), expected, rtol=1e-14)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("radius", [0.0, 0.1, 1.0])
def test_a_certificate_of_an_objective_holds(name, radius):
    model, x = network()
    objective, domain = OBJECTIVES[name], sf.Ball(radius)
    certificate = sf.certify(model, x, objective=objective, domain=domain)
    found = sf.estimate(model, x, objective=objective, domain=domain)
    assert certificate.scalar
    for what in ("bound", "lipschitz", "smoothness"):
        assert float(getattr(found, what)) <= float(getattr(certificate, what)) * (1 + 1e-9), what


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_the_curvature_of_the_cross_entropy_is_reached_at_equal_scores(classes):
    scores = nn.Linear(1, classes, bias=False)
    with torch.no_grad():
        scores.weight.zero_()
    y = torch.zeros(1, dtype=torch.long)
    certificate = sf.certify(scores, torch.ones(1, 1), objective=sf.CrossEntropy(y), domain=sf.Ball(0.0))
    assert float(certificate.smoothness) == pytest.approx(1 / classes, rel=1e-9)


def test_any_module_is_an_objective():
    model, x = network()
    head = nn.Sequential(nn.Flatten(0), nn.Linear(15, 1), nn.Tanh())
    composed = sf.certify(model, x, objective=head, domain=sf.Ball(0.1))
    found = sf.estimate(model, x, objective=head, domain=sf.Ball(0.1))
    assert composed.scalar
    assert list(composed.block_lipschitz) == ["0", "2"]
    assert float(found.smoothness) <= float(composed.smoothness)


@pytest.mark.parametrize(
    ("objective", "word"),
    [
        (sf.CrossEntropy(LABELS[:3]), "5×3 and 3"),
        (sf.CrossEntropy(), "no targets"),
        (sf.Square(LABELS), "one shape"),
        (nn.Identity(), "one number"),
    ],
)
def test_what_does_not_fit_is_refused(objective, word):
    model, x = network()
    with pytest.raises(ObjectiveError, match=word):
        sf.certify(model, x, objective=objective, domain=sf.Ball(0.1))


def test_targets_that_are_no_distributions_are_refused():
    with pytest.raises(ObjectiveError, match="distributions"):
        sf.CrossEntropy(torch.randn(4, 3))


def test_a_composition_is_made_once():
    from surefoot.graph import capture
    from surefoot.objectives import attach

    model, x = network()
    graph = capture(model, x)
    first, _ = attach(graph, sf.CrossEntropy(LABELS))
    second, targets = attach(graph, sf.CrossEntropy(LABELS.flip(0)))
    assert first is second
    assert torch.equal(next(iter(targets.values())), LABELS.flip(0))

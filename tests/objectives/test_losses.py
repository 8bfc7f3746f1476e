"""Losses: equal to torch's, certified soundly and sharply, refused with words where targets do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.objectives import BinaryCrossEntropy, Huber, ObjectiveError, Ridge

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
@pytest.mark.parametrize("radius", [0.1, 1.0])
def test_a_certificate_of_an_objective_holds(name, radius):
    model, x = network()
    objective, domain = OBJECTIVES[name], sf.Ball(radius)
    certificate = sf.certify(model, x, objective=objective, domain=domain)
    found = sf.estimate(model, x, objective=objective, domain=domain, starts=2, budget=100)
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
    found = sf.estimate(model, x, objective=head, domain=sf.Ball(0.1), starts=2, budget=100)
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
        (sf.Square, "write Square"),
    ],
)
def test_what_does_not_fit_is_refused(objective, word):
    model, x = network()
    with pytest.raises(ObjectiveError, match=word):
        sf.certify(model, x, objective=objective, domain=sf.Ball(0.1))


def test_targets_that_are_no_distributions_are_refused():
    with pytest.raises(ObjectiveError, match="distributions"):
        sf.CrossEntropy(torch.randn(4, 3))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sf.CrossEntropy(torch.tensor([0, -1])), "not negative, got -1"),
        (lambda: sf.CrossEntropy(torch.tensor([0, 3]))(torch.zeros(2, 3)), "3 classes.*class number 3"),
        (lambda: sf.CrossEntropy(label_smoothing=1.0), "label smoothing"),
        (lambda: sf.CrossEntropy(label_smoothing=-0.1), "label smoothing"),
        (lambda: sf.CrossEntropy(weight=[1.0, -1.0]), "finite entries ≥ 0"),
        (lambda: sf.CrossEntropy(weight=[1.0, float("nan")]), "finite entries ≥ 0"),
        (lambda: sf.CrossEntropy(weight=[[1.0, 1.0]]), "one entry per class"),
        (lambda: sf.CrossEntropy(weight=[1.0, 1.0])(torch.zeros(2, 3), [0, 1]), "2 class weights.*3 classes"),
        (lambda: sf.CrossEntropy([1, 1], weight=[1.0, 0.0]), "no sample .* has a weight"),
        (lambda: sf.CrossEntropy([-100], ignore_index=-100), "no sample .* has a weight"),
        (lambda: sf.CrossEntropy(reduction="entries"), "one of mean, sum"),
        (lambda: sf.CrossEntropy(SOFT * float("nan")), "distributions"),
        (lambda: sf.CrossEntropy()(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)), "at least one sample"),
        (lambda: BinaryCrossEntropy([1.5]), "between 0 and 1"),
        (lambda: BinaryCrossEntropy([float("nan")]), "between 0 and 1"),
        (lambda: BinaryCrossEntropy(pos_weight=-1.0), "finite entries ≥ 0"),
        (
            lambda: BinaryCrossEntropy(weight=[1.0, 1.0])(torch.zeros(2, 3), torch.zeros(2, 3)),
            "does not broadcast",
        ),
        (lambda: Huber(delta=0.0), "delta"),
        (lambda: Huber(delta=float("nan")), "delta"),
        (lambda: Huber([float("inf")]), "not finite"),
        (lambda: sf.Square([float("nan")]), "not finite"),
        (lambda: sf.Square(scale=0.0), "scale"),
        (lambda: sf.Square(reduction="none"), "one of mean, sum, entries, row"),
        (lambda: sf.Square(object()), "targets are a tensor"),
        (lambda: Ridge(-1.0), "weights ≥ 0"),
    ],
)
def test_bad_input_is_refused_with_words(make, words):
    with pytest.raises(ObjectiveError, match=words):
        make()


def test_binding_keeps_the_options_and_leaves_the_loss_alone():
    loss = sf.CrossEntropy(weight=[1.0, 2.0, 0.5], label_smoothing=0.1, reduction="sum", scale=2.0)
    bound = loss.bound_to(LABELS)
    assert bound.options == loss.options
    assert loss.targets is None
    assert bound.bound_to(LABELS.flip(0)).targets is not bound.targets
    outputs = torch.randn(5, 3, dtype=torch.float64)
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    options = {"weight": weight, "label_smoothing": 0.1, "reduction": "sum"}
    expected = 2 * nn.functional.cross_entropy(outputs, LABELS, **options)
    assert torch.allclose(bound(outputs), expected, rtol=1e-14)
    assert "label_smoothing=0.1, reduction=sum, scale=2.0, targets: 5" in repr(bound)


def test_samples_are_averaged_and_their_entries_added_up():
    outputs, y = torch.randn(4, 2, 3, dtype=torch.float64), torch.rand(4, 2, 3, dtype=torch.float64)
    functional = nn.functional
    binary = functional.binary_cross_entropy_with_logits(outputs, y, reduction="sum") / 4
    assert torch.allclose(BinaryCrossEntropy(y)(outputs), binary, rtol=1e-14)
    huber = functional.huber_loss(outputs, y, reduction="sum", delta=0.4) / 4
    assert torch.allclose(Huber(y, delta=0.4)(outputs), huber, rtol=1e-14)
    whole = torch.tensor([[0, 1], [1, 1]])
    scores = torch.randn(2, 2)
    assert torch.allclose(BinaryCrossEntropy(whole)(scores), BinaryCrossEntropy(whole.float())(scores))


def test_the_smoothness_of_a_ridge():
    ridge = Ridge({"0": 0.5, "2": 2.0})
    assert ridge.convex
    assert ridge.smooth
    assert float(ridge.smoothness) == 2.0
    hessian = torch.autograd.functional.hessian(lambda u: ridge({"2.weight": u}), torch.randn(3))
    assert float(torch.linalg.matrix_norm(hessian, 2)) == pytest.approx(float(ridge.smoothness))

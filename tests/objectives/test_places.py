"""Losses of class numbers on sequences and images: one target for each place, some of which do not count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from surefoot.objectives import ModelLoss, ObjectiveError, from_torch

torch.manual_seed(0)
SEQUENCES = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), torch.randn(2, 5, 4).double()
IMAGES = (
    nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Conv2d(3, 3, 1)).double(),
    torch.randn(2, 1, 3, 4).double(),
)
MARKS = {"sequences": torch.tensor([[0, 2, -100, 1, 1], [2, 0, 1, -100, -100]]),
         "images": torch.tensor([[[0, 2, -100], [1, 1, 0]], [[2, -100, 1], [0, 2, 2]]])}  # fmt: skip
DATA = {"sequences": SEQUENCES, "images": IMAGES}
OPTIONS = [{}, {"weight": [1.0, 2.0, 0.5]}, {"label_smoothing": 0.1, "reduction": "sum"}]


def _torch(name: str, outputs: Tensor, **options: object) -> Tensor:
    """The loss of torch, which has the classes in dimension 1."""
    if "weight" in options:
        options["weight"] = torch.tensor(options["weight"], dtype=outputs.dtype)
    return F.cross_entropy(outputs.movedim(-1, 1) if name == "sequences" else outputs, MARKS[name], **options)


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values_and_certificates(name: str, options: dict) -> None:
    model, x = DATA[name]
    loss = sf.CrossEntropy(MARKS[name], ignore_index=-100, **options)
    torch.testing.assert_close(loss(model(x)), _torch(name, model(x), **options), rtol=1e-14, atol=0)
    value = sf.evaluate(model, x, loss)
    exact = float(_torch(name, model(x).detach(), **options))
    assert abs(value.value - exact) <= value.error + 1e-15
    certificate = sf.certify(model, x, objective=loss, domain=sf.Ball(0.01))
    found = sf.estimate(model, x, objective=loss, domain=sf.Ball(0.01), starts=1, budget=100)
    assert float(found.lipschitz) <= float(certificate.lipschitz)
    assert float(found.smoothness) <= float(certificate.smoothness) < 30 * float(found.smoothness)


@pytest.mark.parametrize("name", DATA)
def test_constants_hold_for_the_outputs(name: str) -> None:
    model, x = DATA[name]
    loss, outputs = sf.CrossEntropy(MARKS[name], ignore_index=-100), model(x).detach()
    constants = loss.constants(outputs)
    curvature = torch.linalg.eigvalsh(
        torch.autograd.functional.hessian(loss, outputs).reshape(outputs.numel(), -1)
    )[-1]
    assert float(curvature) <= float(constants.smoothness) <= 4 * float(curvature)
    assert float(loss.gradient(outputs).norm()) <= float(constants.lipschitz)
    with pytest.raises(ObjectiveError, match="bind them"):
        loss.bound_to(None).constants(outputs)


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("method", ["dual", "dual_gram", "dynamic"])
def test_gauss_newton_steps_are_those_of_the_dense_matrix(name: str, method: str) -> None:
    model, x = DATA[name]
    loss = sf.CrossEntropy(MARKS[name], ignore_index=-100)
    step = sf.oracles.gauss_newton(sf.Chain(model, x), loss, kappa=0.5, method=method)
    names = dict(model.named_parameters())

    def outputs(*weights: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, weights, strict=True)), x).flatten()

    parts = torch.autograd.functional.jacobian(outputs, tuple(names.values()))
    jacobian = torch.cat([part.flatten(1) for part in parts], dim=1)
    at = model(x).detach()
    hessian = torch.autograd.functional.hessian(loss, at).reshape(at.numel(), -1)
    slope = jacobian.T @ loss.gradient(at).flatten()
    matrix = jacobian.T @ hessian @ jacobian + 0.5 * torch.eye(len(slope), dtype=slope.dtype)
    expected = -torch.linalg.solve(matrix, slope)
    got = torch.cat([step.direction[name].flatten() for name in names])
    assert float((got - expected).norm()) <= 1e-3 * float(expected.norm())


def test_all_data_weigh_as_many_places_as_count() -> None:
    model, x = SEQUENCES
    y = MARKS["sequences"]
    loss = sf.CrossEntropy(ignore_index=-100)
    batches = [(x[:1], y[:1]), (x[1:], y[1:])]
    value = sf.evaluate(model, batches, loss)
    assert abs(value.value - float(_torch("sequences", model(x).detach()))) <= value.error + 1e-15


def test_steps_go_down() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = sf.CertifiedDescent(model, sf.CrossEntropy(ignore_index=-100))
    x, y = SEQUENCES[1], MARKS["sequences"]
    losses = [float(optimizer.step(x, y)) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]


def test_the_dimension_of_the_classes() -> None:
    scores, y = torch.randn(2, 3, 3), torch.tensor([[0, 1, 2], [2, 1, 0]])
    with pytest.raises(ObjectiveError, match="class_dim=1 or class_dim=2"):
        sf.CrossEntropy()(scores, y)
    assert torch.equal(sf.CrossEntropy(class_dim=1)(scores, y), F.cross_entropy(scores, y))
    assert torch.equal(from_torch(nn.CrossEntropyLoss())(scores, y), F.cross_entropy(scores, y))
    last = sf.CrossEntropy(class_dim=-1)(scores, y)
    torch.testing.assert_close(last, F.cross_entropy(scores.mT, y))
    shares = torch.softmax(torch.randn(2, 5, 3), -1)
    outputs = torch.randn(2, 5, 3)
    torch.testing.assert_close(
        sf.CrossEntropy(class_dim=-1)(outputs, shares), F.cross_entropy(outputs.mT, shares.mT)
    )
    with pytest.raises(ObjectiveError, match="class_dim"):
        sf.CrossEntropy()(outputs, shares)
    with pytest.raises(ObjectiveError, match="one for each row of classes"):
        sf.CrossEntropy()(outputs, torch.zeros(2, 4, dtype=torch.long))


class Scored(nn.Module):
    """A model that returns its loss beside its scores, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.scores(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_a_model_that_returns_its_loss() -> None:
    model, batch = Scored().double(), {"x": SEQUENCES[1], "labels": MARKS["sequences"]}
    loss = sf.CrossEntropy(batch["labels"], ignore_index=-100)
    for radius, effort in ((0.01, "quick"), (0.0, "normal")):  # away from the weights a loss outside is sharper
        certificate = sf.certify(model, batch, objective=ModelLoss(), domain=sf.Ball(radius), effort=effort)
        alone = sf.certify(model.scores, batch["x"], objective=loss, domain=sf.Ball(radius), effort=effort)
        assert float(certificate.lipschitz) == pytest.approx(float(alone.lipschitz), rel=1e-6)
        assert float(certificate.smoothness) == pytest.approx(float(alone.smoothness), rel=1e-6)
    optimizer = sf.CertifiedDescent(model, ModelLoss())
    losses = [float(optimizer.step(batch)) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    with pytest.raises(ObjectiveError, match="one number"):
        ModelLoss()(torch.zeros(3))

"""Certificates of batches against the one of all samples at once, and both against dense Hessians."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import surefoot as sf
from judges.memory import peak_bytes
from surefoot.calculus import effort as efforts

D = torch.float64
SIZES = (1, 9, 6)  # of the batches


class Residual(nn.Module):
    """Two layers, the second of which is added to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x + torch.tanh(self.second(x)))


class Attention(nn.Module):
    """A transformer layer on two tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(2, 1, 3, 0.0, "gelu", batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(-1, 2, 2)).mean(1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 2),
    "tanh": lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
    "layer norm": lambda: nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.GELU(), nn.Linear(3, 2)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Conv1d(2, 1, 2), nn.Tanh(), nn.Flatten()
    ),
    "residual": Residual,
    "attention": Attention,
}


class Case:
    """A model with data, and its Hessian as a function of all weights."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model, self.x = MODELS[name]().to(D), torch.randn(sum(SIZES), 4, dtype=D) + 0.3
        self.y = (self.x[:, 0] > 0).long()
        self.batches = list(zip(self.x.split(SIZES), self.y.split(SIZES), strict=True))
        self.weights = nn.utils.parameters_to_vector(self.model.parameters()).detach()

    def value(self, weights: Tensor) -> Tensor:
        named = dict(self.model.named_parameters())
        parts = weights.split([value.numel() for value in named.values()])
        given = {path: part.view_as(named[path]) for path, part in zip(named, parts, strict=True)}
        found: Tensor = sf.CrossEntropy()(torch.func.functional_call(self.model, given, (self.x,)), self.y)
        return found

    def norm(self, weights: Tensor) -> float:
        with sdpa_kernel(SDPBackend.MATH):
            return float(torch.linalg.matrix_norm(torch.autograd.functional.hessian(self.value, weights), 2))

    def joined(self, **options: Any) -> sf.Certificate:
        return sf.certify(self.model, self.x, objective=sf.CrossEntropy(self.y), **options)

    def pieces(self, **options: Any) -> sf.Certificate:
        return sf.certify(self.model, self.batches, objective=sf.CrossEntropy(), **options)


@pytest.mark.parametrize(("name", "effort"), [*((name, "normal") for name in MODELS), ("tanh", "high")])
def test_the_curvature_at_the_weights_is_that_of_the_joined_batch(name: str, effort: str) -> None:
    """Between the exact number and the one of the joined batch, which is larger by its round-off alone, which is
    counted for more samples at once.
    """
    case = Case(name)
    joined, pieces = (each(domain=sf.Ball(0.0), effort=effort) for each in (case.joined, case.pieces))
    exact = case.norm(case.weights)
    assert exact * (1 - 1e-13) <= float(pieces.smoothness) <= float(joined.smoothness) * (1 + 1e-8)
    assert float(joined.smoothness) <= exact * (1 + (1e-10 if name == "linear" else 1e-7))
    for one in ("bound", "lipschitz"):
        assert float(getattr(pieces, one)) == pytest.approx(float(getattr(joined, one)), rel=1e-8)
    assert pieces.gradients == joined.gradients


@pytest.mark.parametrize("name", ["tanh", "layer norm", "convolution", "residual"])
def test_constants_on_a_ball_are_close_to_those_of_the_joined_batch(name: str) -> None:
    case, radius = Case(name), 0.01
    joined, pieces = (each(domain=sf.Ball(radius)) for each in (case.joined, case.pieces))
    for one in ("bound", "lipschitz", "smoothness", "one_step"):
        assert float(getattr(pieces, one)) <= float(getattr(joined, one)) * 1.1
    assert pieces.step_size >= joined.step_size * 0.95
    generator = torch.Generator().manual_seed(1)
    for move in torch.randn(3, len(case.weights), dtype=D, generator=generator):
        point = case.weights + radius * move / move.norm()
        assert float(case.value(point)) <= pieces.bound
        assert float(torch.func.grad(case.value)(point).norm()) <= pieces.lipschitz
        assert case.norm(point) <= pieces.smoothness


def test_batches_without_a_second_derivative_add_their_own_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of nine samples are too many here to be added up one by one."""
    monkeypatch.setattr(efforts, "NORMAL", replace(efforts.NORMAL, whole=0.0))
    case = Case("tanh")
    numbers = len(case.weights)
    ball, exact = sf.Ball(0.0), case.norm(case.weights)
    all_of_them = float(case.pieces(domain=ball).smoothness)
    monkeypatch.setattr(efforts, "_SUMMED", (5 + numbers) * numbers**2)
    some = float(case.pieces(domain=ball).smoothness)
    monkeypatch.setattr(efforts, "_SUMMED", 0)
    none = float(case.pieces(domain=ball).smoothness)
    assert exact <= all_of_them < some < none


@pytest.mark.parametrize(("effort", "radius"), [("normal", 0.0), ("quick", 0.01)])
def test_memory_is_that_of_one_batch_and_of_sums(effort: str, radius: float) -> None:
    """The joined second derivatives of 745 parameters are a small part of it."""
    torch.manual_seed(0)
    hidden = nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh()
    model = nn.Sequential(*hidden, nn.Linear(24, 1)).to(D)
    x, y = torch.randn(600, 4, dtype=D), torch.randn(600, 1, dtype=D)

    def most(count: int) -> int:
        loader = list(zip(x[: 100 * count].split(100), y[: 100 * count].split(100), strict=True))
        domain = sf.Ball(radius)
        return peak_bytes(lambda: sf.certify(model, loader, objective=sf.Square(), domain=domain, effort=effort))

    assert most(6) <= 1.2 * most(1)


def test_batches_that_read_other_parameters_are_refused() -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) if len(x) < 5 else self.other(x)

    case = Case("linear")
    with pytest.raises(sf.errors.EvaluationError, match="batch 1 of the loader: the model reads other parameters"):
        sf.certify(Choosing().to(D), case.batches, objective=sf.CrossEntropy(), domain=sf.Ball(0.1))

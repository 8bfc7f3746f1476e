"""Masks of very negative scores neither blur values nor hide the centre; judged in exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import surefoot as sf
from judges.dense import second_derivative, tensor_norm
from judges.exact import exact_value, exactly, settled
from surefoot.errors import EvaluationError
from surefoot.valuation.valuer import Valuer

NODES, CLASSES = 5, 3
ADJACENT = (torch.rand(NODES, NODES, generator=torch.Generator().manual_seed(0)) < 0.4) | torch.eye(NODES).bool()
MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "filled": lambda scores: scores.masked_fill(~ADJACENT, -1e9),
    "chosen": lambda scores: torch.where(ADJACENT, scores, -9e15),
    "added": lambda scores: scores + (1 - ADJACENT.to(scores.dtype)) * -1e9,
    "little": lambda scores: scores + (1 - ADJACENT.to(scores.dtype)) * -1e4,
    "infinite": lambda scores: scores.masked_fill(~ADJACENT, -math.inf),
}


class Attention(nn.Module):
    """One head of graph attention with a dense adjacency."""

    def __init__(self, mask: str, scale: float) -> None:
        super().__init__()
        self.map, self.head = nn.Linear(3, 4, bias=False), nn.Linear(4, CLASSES)
        self.left, self.right = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
        self.mask, self.scale = mask, scale

    def forward(self, x: Tensor) -> Tensor:
        h = self.map(x)
        scores = self.scale * torch.tanh(self.left(h) + self.right(h).mT)
        logits: Tensor = self.head(torch.softmax(MASKS[self.mask](scores), -1) @ h)
        return logits


class Contrasted(nn.Module):
    """Similarities of all pairs, none of a sample with itself."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.net, self.value = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), value

    def forward(self, x: Tensor) -> Tensor:
        z = functional.normalize(self.net(x), dim=-1)
        return (z @ z.mT / 0.5).masked_fill(torch.eye(len(x), dtype=torch.bool), self.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 300.0])
@pytest.mark.parametrize("mask", MASKS)
def test_values_of_masked_attention_are_sharp(mask: str, scale: float, dtype: torch.dtype) -> None:
    torch.manual_seed(int(scale))
    model, x = Attention(mask, scale).to(dtype), torch.randn(NODES, 3, dtype=dtype)
    loss = sf.CrossEntropy(torch.arange(NODES) % CLASSES)
    valuer = Valuer.of(model, x, loss)
    weights = dict(model.named_parameters())
    found = valuer.enclosed(valuer.run(weights))
    assert found.error < 1e-9
    others = [found, valuer.enclosed(valuer.run(weights, derivatives=False)), sf.evaluate(model, x, loss)]

    def inside(lower: float, upper: float) -> bool | None:
        wide = Attention("filled" if mask == "infinite" else mask, scale).double()  # which is 10^(-4·10⁸) away
        wide.load_state_dict(model.state_dict())
        fact = exact_value(lambda: functional.cross_entropy(wide(x.double()), torch.arange(NODES) % CLASSES), wide)
        if exactly(lower) <= fact <= exactly(upper):
            return True
        return False if fact < exactly(lower) or fact > exactly(upper) else None

    for each in others:
        assert settled(lambda each=each: inside(each.lower, each.upper)) is True


@pytest.mark.parametrize("value", [-math.inf, -1e9])
def test_masked_similarities_are_certified_sharply(value: float) -> None:
    torch.manual_seed(0)
    model, x = Contrasted(value).double(), torch.randn(4, 3, dtype=torch.float64)
    loss = sf.CrossEntropy(torch.tensor([2, 3, 0, 1]))
    names, values = zip(*model.named_parameters(), strict=True)

    def objective(point: Tensor) -> Tensor:
        parts = point.split([value.numel() for value in values])
        given = {name: part.view_as(value) for name, part, value in zip(names, parts, values, strict=True)}
        found: Tensor = loss(torch.func.functional_call(model, given, (x,)))
        return found

    sharp = tensor_norm(second_derivative(objective, nn.utils.parameters_to_vector(values).detach()))
    at_weights = float(sf.certify(model, x, objective=loss, domain=sf.Ball(0.0)).smoothness)
    assert sharp * (1 - 1e-9) <= at_weights <= 1.01 * sharp
    assert sf.certify(model, x, objective=loss).step_size > 1e-4


def test_a_class_without_a_score_has_no_certificate() -> None:
    model, x = Contrasted(-math.inf).double(), torch.randn(4, 3, dtype=torch.float64)
    found = sf.certify(model, x, objective=sf.CrossEntropy(torch.tensor([0, 3, 0, 1])))
    assert found.step_size == 0
    assert not found.bound.is_finite


class Logarithms(nn.Module):
    """Losses that are written by hand on scores, some of which are -∞."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.net, self.way = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, NODES)), way

    def forward(self, x: Tensor) -> Tensor:
        scores, own = self.net(x), torch.arange(NODES)
        infinite = torch.zeros(NODES, NODES, dtype=x.dtype).masked_fill(~ADJACENT, -math.inf)
        if self.way.startswith("sum"):
            masked = {
                "sum, filled": lambda: scores.masked_fill(~ADJACENT, -math.inf),
                "sum, chosen": lambda: torch.where(ADJACENT, scores, -math.inf),
                "sum, left out": lambda: torch.where(~ADJACENT, -math.inf, scores),
                "sum, added": lambda: scores + infinite,
                "sum of columns": lambda: scores.masked_fill(~ADJACENT, -math.inf),
            }[self.way]()
            loss = torch.logsumexp(masked, 0 if self.way == "sum of columns" else 1) - scores.diagonal()
        else:
            logs = functional.log_softmax(scores.masked_fill(~ADJACENT, -math.inf), dim=1)
            loss = {
                "gathered": lambda: -logs.gather(1, own[:, None]),
                "indexed": lambda: -logs[own, own],
                "diagonal": lambda: -logs.diagonal(),
                "likelihood": lambda: functional.nll_loss(logs, own, reduction="none"),
                "left": lambda: -logs.masked_fill(~ADJACENT, 0.0),
            }[self.way]()
        return loss.sum() / NODES


WAYS = ("sum, filled", "sum, chosen", "sum, left out", "sum, added", "sum of columns", "gathered", "indexed",
        "diagonal", "likelihood", "left")  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_logarithms_of_masked_scores_are_sharp(way: str) -> None:
    torch.manual_seed(0)
    model, x = Logarithms(way).double(), torch.randn(NODES, 3, dtype=torch.float64)
    names, values = zip(*model.named_parameters(), strict=True)

    def objective(point: Tensor) -> Tensor:
        parts = point.split([value.numel() for value in values])
        given = {name: part.view_as(value) for name, part, value in zip(names, parts, values, strict=True)}
        found: Tensor = torch.func.functional_call(model, given, (x,))
        return found

    here = nn.utils.parameters_to_vector(values).detach()
    sharp = tensor_norm(second_derivative(objective, here))
    found = float(sf.certify(model, x, objective=nn.Identity(), domain=sf.Ball(0.0)).smoothness)
    assert sharp * (1 - 1e-9) <= found <= 1.001 * sharp
    on_ball = float(sf.certify(model, x, objective=nn.Identity(), domain=sf.Ball(0.05)).smoothness)
    for _ in range(3):
        move = torch.randn_like(here)
        there = here + move * (0.05 / move.norm())
        assert tensor_norm(second_derivative(objective, there)) <= on_ball <= 20 * sharp
    value = sf.evaluate(model, x, nn.Identity())
    assert abs(value.value - float(objective(here))) <= value.error + 1e-14
    assert value.error < 1e-11


def test_logarithms_that_are_read_where_they_are_infinite_stay_so() -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, NODES)

        def forward(self, x: Tensor) -> Tensor:
            logs = functional.log_softmax(self.linear(x).masked_fill(~ADJACENT, -math.inf), dim=1)
            return -logs[:, 0].mean() - torch.logsumexp(logs, 1).sum()

    assert not bool(ADJACENT[:, 0].all())
    model, x = Read().double(), torch.randn(NODES, 3, dtype=torch.float64)
    found = sf.certify(model, x, objective=nn.Identity(), domain=sf.Ball(0.0))
    assert not found.bound.is_finite


def test_probabilities_from_masked_logarithms_have_a_certificate_or_a_reason() -> None:
    class Entropy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, NODES)

        def forward(self, x: Tensor) -> Tensor:
            logs = functional.log_softmax(self.linear(x).masked_fill(~ADJACENT, -math.inf), dim=1)
            return -(logs.exp() * logs.masked_fill(~ADJACENT, 0.0)).sum()

    model, x = Entropy().double(), torch.randn(NODES, 3, dtype=torch.float64)
    with pytest.raises(EvaluationError, match="no error of the value"):
        sf.evaluate(model, x, nn.Identity())

"""What no variable enters is folded, and its round-off counts: judged in exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import flint
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from judges.exact import stored, truth
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.folding import fold
from surefoot.calculus.prepare import prepared
from surefoot.enclosure import Computed, Enclosure
from surefoot.operations.captured import capture

D = torch.float64
HARD = torch.tensor([[1e8, -1e8], [3.0, 1.1]], dtype=D)


class Before(nn.Module):
    """A function of the data, then a linear layer."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = 2) -> None:
        super().__init__()
        self.function, self.last = function, nn.Linear(width, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(x))


def frozen(x: Tensor) -> Tensor:
    weight = torch.tensor([[1e8, -1e8], [3.0, 1e8]], dtype=D)
    return (x @ weight @ weight).tanh() + x / 3.0


CANCELLING = {
    "sum": lambda x: (x + 1e9) - 1e9,
    "product": lambda x: x * 1.1 * 1e9 - x * 1.1e9,
    "quotient": lambda x: x / 3.0 - x * (1.0 / 3.0),
    "exponential": lambda x: torch.exp(x * 1e-9) - 1.0,
    "mean": lambda x: (x + 1e8) - (x + 1e8).mean(-1, keepdim=True),
    "moved": lambda x: torch.cat([(x + 1e9) - 1e9, x], -1).flip(-1)[:, 1:3],
    "pieces": lambda x: torch.stack(((x + 1e9) - 1e9).unbind(-1)[::-1], -1),
    "largest": lambda x: ((x + 1e9) - 1e9).max(-1, keepdim=True).values + x,
    "masked": lambda x: torch.where(x > 0, (x + 1e9) - 1e9, -1.0),
    "frozen": frozen,
    "layers": lambda x: F.linear(F.linear(x + 1e8, HARD, HARD[0]), HARD).tanh() + F.linear(x, HARD * 1e-9),
    "added up": lambda x: torch.stack([x + 1e9, x * 0.1, -x - 1e9], -1).sum(-1),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CANCELLING)
def test_constants_contain_the_truth(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Before(CANCELLING[name]), torch.rand(3, 2, dtype=D) * 3 - 1.5
    y = torch.randn(3, 2, dtype=D)
    loss = sf.Square(y)
    for objective, function in ((None, lambda: model(x)), (loss, lambda: loss(model(x)))):
        certificate = sf.certify(model, x, objective=objective, domain=sf.Ball(0.0))
        with flint.ctx.workprec(200):
            weights = {p: stored(p) for p in model.parameters()}
            fact = truth(function, model, weights, None if objective else {p: p.detach() for p in weights})
            assert flint.arb(float(certificate.bound)) >= fact.bound
            if objective is not None:
                assert flint.arb(float(certificate.lipschitz)) >= fact.lipschitz
                assert flint.arb(float(certificate.smoothness)) >= fact.smoothness


def enclosed(function: Callable[[Tensor], Tensor], x: Tensor) -> Enclosure:
    """What the forward pass says of the data that the linear layer reads."""
    model = Before(function, function(x).shape[-1])
    result = Analysis.of(model, x).over(sf.Ball(0.1))
    (step,) = result.steps
    return result.enclosures[step.node.args[0].name]


def test_a_mask_has_no_error() -> None:
    x = torch.tensor([[1.0, 0.0, 1.0]], dtype=D)
    for function in (
        lambda x: (1.0 - x) * -1e9,
        lambda x: (1.0 - x) * torch.finfo(torch.float32).min,
        lambda x: torch.zeros_like(x).masked_fill(x == 0, -1e30).flip(-1),
        lambda x: torch.where(x > 0, x, -1e9) + x,
        lambda x: torch.tril(x.expand(3, 3) * -1e20),
    ):
        assert enclosed(function, x).error.is_zero


def test_the_error_of_a_sum_is_that_of_its_entries() -> None:
    x = torch.tensor([[0.1, 1e9]], dtype=D)
    found = enclosed(lambda x: x + 0.7, x)
    pairs = zip((x + 0.7)[0].tolist(), x[0].tolist(), strict=True)
    wrong = [Fraction(z) - Fraction(a) - Fraction(0.7) for z, a in pairs]
    assert isinstance(found, Computed)
    errors = found.entries
    assert all(abs(w) <= Fraction(float(e)) for w, e in zip(wrong, errors[0], strict=True))
    assert float(errors[0, 0]) < 1e-15


@pytest.mark.parametrize("seed", range(3))
def test_the_entries_of_a_layer_and_of_a_sum_have_errors_of_their_own(seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(4, 3, 5, dtype=D) * torch.tensor([1e-12, 1.0, 1e12], dtype=D)[:, None]
    weight, bias = torch.randn(6, 5, dtype=D), torch.randn(6, dtype=D)

    def computed(x: Tensor) -> Tensor:
        return F.linear(x / 3.0, weight, bias).sum(2)

    found = enclosed(computed, x)
    assert isinstance(found, Computed)
    exact = [
        [
            sum(
                sum(Fraction(a) / 3 * Fraction(w) for a, w in zip(line, row, strict=True)) + Fraction(b)
                for row, b in zip(weight.tolist(), bias.tolist(), strict=True)
            )
            for line in sample
        ]
        for sample in x.tolist()
    ]
    for truths, values, errors in zip(exact, computed(x).tolist(), found.entries.tolist(), strict=True):
        for true, value, error in zip(truths, values, errors, strict=True):
            assert abs(true - Fraction(value)) <= Fraction(error)
    assert float(found.entries[:, 0].max()) < 1e-12 < 1e-3 < float(found.error)


def test_a_number_that_was_rounded_is_not_fused() -> None:
    number = torch.tensor(2.0, dtype=D)

    def nodes(function: Callable[[Tensor], Tensor]) -> list[str]:
        class Scaled(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return torch.tanh(super().forward(x) * function(number))

        graph = prepared(capture(Scaled(2, 2).double(), torch.ones(1, 2, dtype=D)))
        return [node.op for node in graph.nodes]

    assert "aten.mul" not in nodes(lambda t: t + 2.0)
    assert "aten.mul" in nodes(torch.sqrt)


def test_folding_alone() -> None:
    class Root(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.full((2,), 2.0, dtype=D).sqrt()

    graph = capture(Root(2, 2).double(), torch.ones(1, 2, dtype=D))
    (root,) = [e for name, e in fold(graph, graph.held).items() if "sqrt" in name]
    assert 0 < float(root.error) < 1e-14
    with flint.ctx.workprec(200):
        assert abs(flint.arb(2).sqrt() - flint.arb(math.sqrt(2.0))) <= flint.arb(float(root.entry_radius()[0]))

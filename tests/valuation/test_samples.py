"""Errors that are carried along per sample, against errors that are really made, where they hurt most."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from attack.exact_subject import Subject
from surefoot import zoo
from surefoot.calculus.leaves import captured
from surefoot.valuation import propagation, valuer
from surefoot.valuation.entropy import entropy
from surefoot.valuation.passes import Run
from surefoot.valuation.propagation import errors, forward_errors
from surefoot.valuation.tape import Tape, tape_of
from surefoot.valuation.valuer import Valuer
from valuation.test_exact_values import evaluations, is_within

SAMPLES = 3


class Letters(nn.Module):
    """Rows of a language model: samples are blocks of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = zoo.gpt(5, 4, 4, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.gpt(x).flatten(0, 1)


class Attention(nn.Module):
    """Kinks, shifts, a parameter with one row per sample, and attention over as many places as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixed, self.last = nn.Linear(4, 4), nn.Linear(4, 12), nn.Linear(4, 3)
        self.each, self.place = (
            nn.Parameter(torch.randn(SAMPLES, SAMPLES, 4)),
            nn.Parameter(torch.randn(SAMPLES, 4)),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x - 0.3) + self.place) + self.each
        q, k, v = self.mixed(x).chunk(3, dim=-1)
        return self.last((x + torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v)[:, 0])


def made(name: str, seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    if name == "letters":
        return Letters().double(), torch.randint(0, 5, (SAMPLES, 4)), torch.randint(0, 5, (4 * SAMPLES,))
    y = torch.randint(0, 3, (SAMPLES,))
    if name == "images":
        return zoo.vit(3, 4, 2, 1, 4, 1, 2).double(), torch.randn(SAMPLES, 1, 4, 4, dtype=torch.float64), y
    return Attention().double(), torch.randn(SAMPLES, SAMPLES, 4, dtype=torch.float64), y


class Spoilt:
    """Operations whose results are moved by so much per sample, where each hurts most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tape: Tape, sign: float) -> None:
        self.size, self.sign = 0.0, sign
        self.towards: dict[str, Tensor] = {}
        rounds, compute, formula, looks = propagation.rounding, Tape._compute, Run.by_formula, self

        def rounding(slope: Any, *args: Any, **options: Any) -> Any:
            return rounds(slope, *args, **options) + (looks.size if slope.node.name in tape.rounding else 0.0)

        def _compute(self: Tape, node: Any, values: Any) -> Any:
            return looks.moved(node.name, compute(self, node, values), tape)

        def by_formula(self: Run, node: Any, values: Any) -> Any:
            value = formula(self, node, values)
            for facts in (self.facts, self.losses):
                if node.name in facts:
                    facts[node.name] = replace(facts[node.name], error=facts[node.name].error + looks.size)
            return None if value is None else looks.moved(node.name, value, tape)

        monkeypatch.setattr(propagation, "rounding", rounding)
        monkeypatch.setattr(Tape, "_compute", _compute)
        monkeypatch.setattr(Run, "by_formula", by_formula)

    def moved(self, name: str, value: Any, tape: Tape) -> Any:
        if not self.size or name not in tape.rounding or name not in self.towards or name.startswith("relu"):
            return value
        return value + self.sign * self.size * self.towards[name]


def costates(tape: Tape, run: Run) -> dict[str, Tensor]:
    """Directions in which the value grows fastest, of length one for each sample; of the result itself, one."""
    names = [node.name for node in tape.varying if isinstance(run.values[node.name], Tensor)]
    wanted = [run.values[name] for name in names]
    slopes = torch.autograd.grad(run.values[run.output], wanted, allow_unused=True, retain_graph=True)
    found = {}
    for name, slope in zip(names, slopes, strict=True):
        if slope is not None:
            rows = slope.reshape(SAMPLES if name != run.output else 1, -1)
            found[name] = (rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-300)).reshape(slope.shape)
    return found


@pytest.mark.parametrize("size", [1e-9, 1e-5, 1e-3, 1e-2])
@pytest.mark.parametrize("name", ["letters", "images", "attention"])
def test_errors_that_are_made_are_bounded(name: str, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """First order is met almost exactly where errors are small; where they are large, second order has to help."""
    best = 0.0
    for seed in range(2):
        model, x, y = made(name, seed)
        for sign in (1.0, -1.0):
            with monkeypatch.context() as patch:
                patch.setattr(Tape, "spare", frozenset())  # all values are compared
                one = Valuer.of(model, x, sf.CrossEntropy(y))
                assert one.tape.samples == SAMPLES
                weights = dict(model.named_parameters())
                run = one.run(weights)
                exact = run.value
                spoilt = Spoilt(patch, one.tape, sign)
                spoilt.towards, spoilt.size = costates(one.tape, run), size
                bad = one.run(weights)
                fresh = valuer.slopes_of(one.tape, bad, 0.01)
                for found in (errors(one.tape, bad, fresh), forward_errors(one.tape, bad, fresh)):
                    assert abs(bad.value - exact) <= found.total * (1 + 1e-9) + 1e-12
                    for node in one.tape.varying:
                        if isinstance(run.values.get(node.name), Tensor):
                            off = float((bad.values[node.name] - run.values[node.name]).detach().norm())
                            assert off <= found.apart[node.name] * (1 + 1e-9) + 1e-12
                best = max(best, abs(bad.value - exact) / errors(one.tape, bad, fresh).total)
    assert best > 0.5 or size > 1e-6  # the bound is sharp, so that a term left out is seen


@pytest.mark.parametrize("size", [1e-9, 1e-3])
@pytest.mark.parametrize("name", ["letters", "images", "attention"])
def test_errors_of_all_samples_together_are_bounded(
    name: str, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, y = made(name, 0)
    monkeypatch.setattr(Tape, "spare", frozenset())
    one = Valuer.of(model, x, sf.CrossEntropy(y))
    run = one.run(dict(model.named_parameters()))
    exact, spoilt, root = run.value, Spoilt(monkeypatch, one.tape, 1.0), SAMPLES**0.5
    spoilt.towards = {node: slope / root for node, slope in costates(one.tape, run).items()}
    spoilt.size = size * root
    bad = one.tape.run(run.parameters, one.constants, derivatives=True, light=True, rough=True)
    assert (bad.rough, bad.samples) == (True, 0)
    found = forward_errors(one.tape, bad, valuer.slopes_of(one.tape, bad, 0.01))
    assert abs(bad.value - exact) <= found.total * (1 + 1e-9) + 1e-12
    for node in one.tape.varying:
        if isinstance(run.values.get(node.name), Tensor):
            off = float((bad.values[node.name] - run.values[node.name]).detach().norm())
            assert off <= found.apart[node.name] * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("name", ["letters", "images"])
def test_samples_are_kept_apart_where_errors_are_not_far_below_what_is_enough(name: str) -> None:
    model, x, y = made(name, 0)
    one, weights = Valuer.of(model, x, sf.CrossEntropy(y)), dict(model.named_parameters())
    sharp = one.enclosed(one.run(weights)).error
    rough = one.run(weights, light=True)
    assert rough.rough
    error = one.enclosed(rough, 1.0).error
    assert error >= sharp
    again = one.run(weights, light=True)
    assert again.rough
    one.enclosed(again, 2 * error)
    apart = one.run(weights, light=True)
    assert (apart.light, apart.rough, apart.samples) == (True, False, SAMPLES)


def test_the_exact_value_of_attention_is_inside() -> None:
    for seed in range(4):
        model, x, y = made("attention", seed)
        for scale in (1.0, 3.0):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter *= scale
            subject = Subject("", model, x, sf.CrossEntropy(), y)
            assert all(is_within(subject, found) is True for found in evaluations(subject))


def test_second_order_is_smaller_per_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x, y = (
        zoo.vit(3, 4, 2, 1, 8, 2, 2).double(),
        torch.randn(64, 1, 4, 4).double(),
        torch.randint(0, 3, (64,)),
    )
    weights = dict(model.named_parameters())

    def total() -> tuple[float, float]:
        one = Valuer.of(model, x, sf.CrossEntropy(y))
        one.tape.__dict__.pop("samples", None)
        run = one.run(weights)
        return one.enclosed(run).error, forward_errors(one.tape, run, one._slopes).total  # type: ignore[arg-type]

    each = total()
    monkeypatch.setattr(Tape, "samples", 0)
    together = total()
    assert each[0] < together[0]
    assert 2 * each[1] < together[1]


def test_samples_that_meet_are_not_taken_apart() -> None:
    def samples(forward: Any, x: Tensor, y: Tensor | None = None) -> int:
        class Mixing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(3), nn.Linear(4, 3)

            def forward(self, x: Tensor) -> Tensor:
                z = self.linear(x)
                return forward(self, z @ z.transpose(-1, -2) @ z)

        y = torch.tensor([0, 1, 2]) if y is None else y
        return tape_of(captured(Mixing().double(), x, sf.CrossEntropy(y))[0]).samples

    x = torch.randn(3, 3, 4, dtype=torch.float64)
    assert samples(lambda m, z: m.last(z[:, 0]), x) == 3
    assert samples(lambda m, z: m.last(z.mean(dim=1)), x) == 3
    assert samples(lambda m, z: m.last(z).flatten(0, 1), x, torch.arange(9) % 3) == 3
    assert samples(lambda m, z: m.last(torch.cat(z.chunk(2, 2)[::-1], 2)[:, 0]), x) == 3
    assert samples(lambda m, z: m.last(torch.stack(z.unbind(0)[::-1])[:, 0]), x) == 0
    assert samples(lambda m, z: m.last(z.mean(dim=0)), x) == 0
    assert samples(lambda m, z: m.last(z[0]), x) == 0
    assert samples(lambda m, z: m.last(z.transpose(0, 1)[:, 0]), x) == 0
    assert samples(lambda m, z: m.last(z.permute(1, 0, 2).flatten(0, 1)), x, torch.arange(9) % 3) == 0
    assert samples(lambda m, z: m.last(m.norm(z)[:, 0]), x) == 0
    assert samples(lambda m, z: m.last(z - z.flip(0))[:, 0], x) == 0
    assert samples(lambda m, z: m.last(torch.softmax(z, dim=0)[:, 0]), x) == 0


@pytest.mark.parametrize("size", [0.1, 3.0, 40.0])
def test_a_logistic_loss_is_at_most_as_steep_as_it_says(size: float) -> None:
    """Against gradients at moves in many directions, for all samples together and for each."""
    torch.manual_seed(0)
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    outputs = torch.randn(6, 4, dtype=torch.float64) + size * nn.functional.one_hot(labels, 4)
    graph, _ = captured(nn.Linear(4, 4, bias=False).double(), outputs, sf.CrossEntropy(labels))
    node = tape_of(graph).varying[-1]
    values = dict(zip(node.inputs, (outputs, labels), strict=True))
    alone, each = entropy(node, values), entropy(node, values, 3)
    assert alone is not None
    assert each is not None

    def careful(point: Tensor) -> Tensor:
        """The gradient, without cancellation."""
        others = torch.softmax(point, dim=1) * (1 - nn.functional.one_hot(labels, 4))
        return (others - others.sum(dim=1, keepdim=True) * nn.functional.one_hot(labels, 4)) / len(labels)

    for moved in (0.0, 0.1, 1.0, size):
        for step in [torch.randn(6, 4, dtype=torch.float64) for _ in range(20)]:
            slope = careful(outputs + moved * step / step.norm())
            assert float(slope.norm()) <= alone[1].slope(moved) * (1 + 1e-9)
            each_move = (moved * step / step.norm()).reshape(3, -1).norm(dim=1).numpy()
            assert np.all(slope.reshape(3, -1).norm(dim=1).numpy() <= each[1].slope(each_move) * (1 + 1e-9))
    assert alone[1].slope(0.0) <= 1.5 * float(careful(outputs).norm())

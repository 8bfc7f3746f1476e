"""Errors of long chains, from state to state: judged where they are large, so that second order counts."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import surefoot as sf
from surefoot.valuation import joints, propagation, valuer
from surefoot.valuation.joints import Composed
from surefoot.valuation.passes import Run
from surefoot.valuation.propagation import Errors
from surefoot.valuation.tape import Tape
from surefoot.valuation.valuer import Valuer
from valuation.chains import CHAINS, chain
from valuation.test_exact_values import is_within

SIZE = {"RNN": 40, "GRU": 24, "LSTM": 24, "time first": 24, "two layers": 20, "by hand": 16, "normalised": 10}


@dataclass
class Seen:
    """What was claimed of the last pass with links."""

    run: Run
    found: Errors
    composed: Composed
    costates: dict[str, float]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """Links wherever they can be, and what is claimed with them."""
    claims: list[Seen] = []
    made: list[Composed] = []
    costates: dict[str, float] = {}
    plain, costate, errors = Composed.__post_init__, Composed.costate, propagation.errors

    def made_anew(self: Composed) -> None:
        plain(self)
        made.append(self)
        costates.clear()

    def told(self: Composed, name: str) -> Any:
        found = costate(self, name)
        if found < math.inf:
            costates[name] = found
        return found

    def recorded(tape: Tape, run: Run, slopes: Any) -> Errors:
        found = errors(tape, run, slopes)
        if run.links is not None:
            claims.append(Seen(run, found, made[-1], dict(costates)))
        return found

    monkeypatch.setattr(Composed, "__post_init__", made_anew)
    monkeypatch.setattr(Composed, "costate", told)
    monkeypatch.setattr(valuer, "errors", recorded)
    monkeypatch.setattr(valuer, "_PREVAIL", 0.0)
    monkeypatch.setattr(joints, "_LOW", 1.5)
    monkeypatch.setattr(joints, "_HIGH", 6.0)
    return claims


def costates_of(run: Run, names: tuple[str, ...]) -> dict[str, Tensor]:
    output = run.values[run.output]
    return {n: torch.autograd.grad(output, run.values[n], retain_graph=True)[0] for n in names}


@pytest.mark.parametrize("size", [1e-9, 1e-5, 1e-3])
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("name", CHAINS)
def test_large_errors_of_every_operation_stay_within_what_is_claimed(
    name: str, scale: float, size: float, seen: list[Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = chain(name, SIZE.get(name, 12), scale)
    weights = dict(subject.model.named_parameters())
    found = Valuer.of(subject.model, subject.x, subject.loss.bound_to(subject.y))
    found.enclosed(found.run(weights))
    if not seen:
        pytest.fail("no states")
    states, slopes = seen[-1].run.links.joints, found._slopes
    found.tape.__dict__["spare"] = frozenset()  # all values are kept
    by_name = {leaf.name: weights[leaf.path] for leaf in found.tape.graph.parameters}
    clean = found.tape.run(by_name, found.constants, derivatives=True, joints=states)
    exact = costates_of(clean, states.names)
    noisy = {n for n, s in slopes.by_name.items() if s.kind != "exact" and not s.parts and n in found.tape.moving}
    compute = Tape._compute

    def disturbed(self: Tape, node: Any, values: Any) -> Any:
        value = compute(self, node, values)
        if node.name not in noisy or node.name in self.special:
            return value
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(zlib.crc32(node.name.encode())))
        return value + noise.double() * (0.999 * size / float(noise.double().norm()))

    monkeypatch.setattr(Tape, "_compute", disturbed)
    monkeypatch.setattr(propagation, "rounding", lambda slope, *a, **k: 0.0 if slope.kind == "exact" else size)
    seen.clear()
    run = found.tape.run(by_name, found.constants, derivatives=True, joints=states)
    near = costates_of(run, states.names)
    found.enclosed(found.run(weights))
    claim = seen[-1]
    assert claim.run.value == run.value
    if not math.isfinite(claim.found.total):
        assert size > 1e-9
        return
    assert abs(claim.run.value - clean.value) <= claim.found.total
    for key, value in clean.values.items():
        if isinstance(value, Tensor) and value.is_floating_point() and key != clean.output:
            assert float((value - run.values[key]).detach().norm()) <= claim.found.apart.get(key, 0.0) * (1 + 1e-9) + 1e-13
    for key, bound in claim.costates.items():
        if key in exact and claim.run.links.joints == states:
            assert float((exact[key] - near[key]).norm()) <= bound

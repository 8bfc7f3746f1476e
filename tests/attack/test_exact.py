"""Every claim on networks that nobody tuned is true in real arithmetic, not only against other doubles."""

from __future__ import annotations

from dataclasses import replace

import flint
import pytest
import torch
from torch import nn

import surefoot as sf
from attack.exact_families import FAMILIES
from attack.exact_judge import Findings, Trial, investigate
from attack.exact_subject import Material, Subject
from attack.exact_trees import CANCELLING, LEAVES, Expression
from judges.exact import stored, truth
from surefoot.objectives import BinaryCrossEntropy, Huber

CASES = 60  # of each family
FURTHER = 270  # of each family and part: 21,600 together


def judged(family: str, number: int, cases: int) -> None:
    findings = investigate(family, FAMILIES[family], number, cases)
    assert not findings.violations, "\n".join(map(str, findings.violations))
    count = findings.count
    decided = count[family] - count["refused"] - count["undecided"] - count["empty"]
    assert decided >= (0.3 if family == "custom_backward" else 0.6) * cases, count


@pytest.mark.parametrize("family", FAMILIES)
def test_claims_are_true(family):
    judged(family, 0, CASES)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, 6))
@pytest.mark.parametrize("family", FAMILIES)
def test_claims_are_true_on_twenty_thousand_more_cases(family, part):
    judged(family, part, FURTHER)


def _ordinary() -> dict[str, Subject]:
    """Networks on which double precision is good to nine digits."""
    m = Material(0)
    x, y = m.normal(3, 4), m.normal(3, 2)
    smooth = {**LEAVES, **CANCELLING}
    functions = {name: Expression(f) for name, f in smooth.items() if name != "celu"}  # its backward is in single
    modules = {
        "layer": nn.LayerNorm(3),
        "group": nn.GroupNorm(1, 3),
        "root": nn.RMSNorm(3),
        "batch": nn.BatchNorm1d(3),
        "batch_eval": nn.BatchNorm1d(3).eval(),
        "softmax": nn.Softmax(-1),
        "softplus": nn.Softplus(2.0, 0.5),
    }
    found = {
        name: Subject(name, nn.Sequential(nn.Linear(4, 3), f, nn.Linear(3, 2)).double(), x, sf.Square(), y)
        for name, f in {**functions, **modules}.items()
    }
    dense = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    found["entropy"] = Subject("", dense, x, sf.CrossEntropy(), torch.tensor([0, 1, 1]))
    found["logistic"] = Subject("", dense, x, BinaryCrossEntropy(), torch.ones(3, 2))
    found["huber"] = Subject("", dense, x, Huber(delta=0.3), y)
    image = m.normal(1, 2, 3, 3).contiguous(memory_format=torch.channels_last)
    conv = nn.Sequential(nn.Conv2d(2, 4, 2, 2, 1, groups=2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten()).double()
    found["conv"] = Subject("", conv, image, sf.Square(), m.normal(1, 16))
    return found


@pytest.mark.parametrize("name", _ordinary())
def test_the_judge_agrees_with_autograd_where_that_is_good(name):
    subject = _ordinary()[name]
    m = Material(1)
    m.weights(subject.model, 0.5)
    variables = list(subject.variables.values())
    direction = {value: m.normal(*value.shape) for value in variables}
    with flint.ctx.workprec(200):
        fact = truth(subject.objective, subject.model, {v: stored(v) for v in variables}, direction)
    value = subject.objective()
    slopes = torch.autograd.grad(value, variables, create_graph=True)
    along = sum((slope * direction[v]).sum() for slope, v in zip(slopes, variables, strict=True))
    bends = torch.autograd.grad(along, variables, materialize_grads=True)
    assert float(fact.values[0]) == pytest.approx(value.item(), rel=1e-9)
    for computed, exact in ((slopes, fact.gradient), (bends, fact.bent)):
        flat = torch.cat([part.detach().reshape(-1) for part in computed])
        expected = torch.tensor([float(number) for number in exact], dtype=torch.float64)
        assert torch.allclose(flat, expected, rtol=1e-9, atol=1e-9 * float(expected.norm()))


@pytest.mark.parametrize("name", ["bound", "lipschitz"])
def test_a_claim_that_is_too_small_by_the_last_digits_is_caught(name, monkeypatch):
    model = nn.Linear(1, 1, bias=False).double()
    subject = Subject("", model, torch.ones(1, 1).double(), sf.Square(), torch.zeros(1, 1).double(), radii=(0.0,))
    certify = sf.certify

    def boastful(*args, **kwargs):
        certificate = certify(*args, **kwargs)
        return replace(certificate, **{name: getattr(certificate, name) * (1 - 1e-9)})

    for function, expected in ((certify, 0), (boastful, 1)):
        monkeypatch.setattr(sf, "certify", function)
        findings = Findings()
        Trial("linear", 0, subject, findings).run(("certificate",))
        assert len(findings.violations) == expected, findings.violations

"""What a certificate says in words and in its table is true, and fits on a screen."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from certificates import LABELS, NAMES, certificate, constructed, perceptron, row
from torch import nn

import surefoot as sf
from surefoot.attained import LowerBound
from surefoot.certificate.advice import headline, limits, verdict
from surefoot.certificate.rows import lines
from surefoot.magnitude import Magnitude
from surefoot.numbers import down, short


@pytest.mark.parametrize(
    ("rows", "sentences"),
    [
        ([row("a", share=0.92), row("b", share=0.08)], ["92% of L comes from a (linear)"]),
        (
            [row("a", share=0.3), row("", "tanh", share=0.7)],
            ["70% of L comes from (model) (tanh), 30% from a (linear)"],
        ),
        ([row("a", share=0.5), row("a", share=0.45), row("b", share=0.05)], ["95% of L comes from a (linear)"]),
        (
            [row(f"l{k}", "tanh" if k % 4 else "linear", share=0.05) for k in range(20)],
            ["L comes from many places: 75% from tanh, 25% from linear; the largest is l0 (linear) with 5%"],
        ),
        ([row("a")], []),
        ([], []),
    ],
)
def test_where_the_smoothness_comes_from(rows, sentences):
    assert limits(constructed(*rows)) == sentences


STEEP = constructed(smoothness=1e12, scalar=True, block_gradients={"a": 3.0, "b": 4.0})  # as steep as curved
ALONE = "What helps: surefoot.CertifiedDescent proves the steps that it takes, one by one."
BALL = constructed(smoothness=1e13, scalar=True, radius=1.0, block_gradients={"a": 1.0})


@pytest.mark.parametrize(
    ("found", "begins", "ends"),
    [
        ("network", "useful: on the domain the output", "L-Lipschitz"),
        ("objective", "useful: the gradient is L-Lipschitz", "curvature at these weights allows"),
        ("segment", "useful: on the segment", "descends"),
        ("kinked", "not certified: L is infinite because of relu in 1;", "m and ℓ hold"),
        (constructed(flags=("a bias",), scalar=True), "not certified: no step size is guaranteed", "not bounds"),
        (constructed(scalar=True, segment_step=0.0), "not certified: no step along the segment", "descend"),
        ("deep", "finite but of no use: ", ""),
        (constructed(smoothness=0.99e12, scalar=True), "useful: ", ""),
        (constructed(smoothness=1e12, scalar=True), "finite but of no use: ", ""),
        (STEEP, "useful: ", "within it"),
        (replace(STEEP, curvature=LowerBound(1e5)), "finite but of no use: ", "allows"),
        (
            replace(STEEP, curvature=LowerBound(2.6e11)),
            "useful: ",
            "; 1/L is at least 0.25 of what the curvature at these weights allows",
        ),
        (constructed(smoothness=0.0, scalar=True, curvature=LowerBound(0.0)), "useful: ", ""),
        (constructed(smoothness=1.0, scalar=True, curvature=LowerBound(0.0)), "useful: ", ""),
        (constructed(scalar=True, radius=0.0), "finite but of no use: the gradient", "but no step stays in it"),
    ],
)
def test_verdicts(found, begins, ends):
    found = certificate(found) if isinstance(found, str) else found
    assert verdict(found).startswith(begins)
    assert verdict(found).endswith(ends)


@pytest.mark.parametrize(
    ("found", "begins", "ends"),
    [
        ("kinked", "Nothing is proved about steps: L is infinite because of relu", "hold."),
        ("segment", "A step of ", "the most of all steps on the segment."),
        ("objective", "Steps up to ", "at most."),
        ("network", "The output changes by at most ", "times the change of the parameters, on the domain."),
        (constructed(smoothness=1e12, scalar=True), "Steps up to ", f"too short to be of use. {ALONE}"),
        (constructed(scalar=True, radius=0.0), "Nothing is proved about steps: ", ALONE),
        (BALL, "Steps up to ", 'What helps: effort="high" may sharpen L, and ' + ALONE[12:]),
        (replace(BALL, effort="high"), "Steps up to ", f"too short to be of use. {ALONE}"),
        (constructed(smoothness=math.inf, scalar=True, radius=1.0), "Nothing is proved", ALONE),
        (constructed(scalar=True, radius=1.0), "Steps up to ", "descend."),
        (constructed(smoothness=1e13, radius=1.0), "", "on the domain."),
    ],
)  # fmt: skip
def test_headlines(found, begins, ends):
    found = certificate(found) if isinstance(found, str) else found
    assert headline(found).startswith(begins)
    assert headline(found).endswith(ends)


def test_the_headline_compares_with_the_curvature_and_its_step_is_not_rounded_up():
    found = certificate("objective")
    assert 0.99 * found.step_size < float(headline(found).split()[3]) <= found.step_size
    bent = replace(found, radius=1.0, curvature=LowerBound(0.5 / found.step_size))
    allowed = re.search(r"the curvature at these weights would allow (\S+) at most", headline(bent))
    assert allowed is not None
    assert float(allowed[1]) == pytest.approx(2 * found.step_size, rel=1e-2)
    assert "guaranteed step size" not in str(constructed(flags=("a bias",), scalar=True))


def test_many_kinks_are_one_reason():
    model = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(4, 4), nn.ReLU()))).double()
    found = sf.certify(model, perceptron()[1])
    assert verdict(found) == "not certified: L is infinite because of relu in 6 places; m and ℓ hold"
    (reason,) = found.reasons
    assert reason.startswith("1 and 5 more (relu): ")
    assert reason in str(found)


def test_the_printed_step_descends():
    model, x = perceptron()
    loss, text = sf.CrossEntropy(LABELS), str(certificate("objective"))
    step = float(text.partition("guaranteed step size = ")[2].split(":")[0])
    before = loss(model(x))
    gradients = torch.autograd.grad(before, list(model.parameters()))
    norm = float(torch.stack([g.norm() for g in gradients]).norm())
    assert step * norm <= 0.1  # it stays in the ball
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter -= step * gradient
        assert float(loss(model(x))) <= float(before.detach()) - 0.5 * step * norm**2 * (1 - 1e-9)


def test_folding_keeps_every_operation_and_every_share():
    rows = [row(f"a.{k}.{part}", share=0.01) for k in range(10) for part in "xy"] + [row("b", share=0.8)]
    for depth in (1, 2, 3, None):
        folded = lines(rows, depth)
        assert sum(line.operations for line in folded) == len(rows)
        assert sum(line.share for line in folded) == pytest.approx(1.0)
    first, last = lines(rows, 1)
    assert (first.name, first.operations, first.row) == ("a", 20, rows[19])
    assert first.share == pytest.approx(0.2)
    assert (last.name, last.operations) == ("b", 1)
    assert [line.name for line in lines([row(""), row("a.x"), row("")])] == ["(model)", "a.x", "(model)"]
    assert [line.name for line in lines([row("a.x"), row("b"), row("a.x")], 1)] == ["a.x", "b", "a.x"]


def test_a_long_table_is_folded_until_it_fits_and_cut_where_that_is_not_enough():
    nested = constructed(*[row(f"stage.{k}.{part}") for k in range(30) for part in ("conv", "act")])
    assert len(nested.table().splitlines()) == 3 + 60 + 1
    folded = nested.table(rows=40).splitlines()
    assert len(folded) == 3 + 30 + 2
    assert folded[-1].startswith("60 of 60 operations are folded")
    flat = constructed(*[row(f"layer{k}") for k in range(500)])
    cut = flat.table(rows=21).splitlines()
    assert len(cut) == 3 + 21 + 1 + 2
    assert cut[3 + 10] == "… 479 more operations"
    assert cut[3].startswith("layer0 ")
    assert cut[-3].startswith("layer499 ")
    assert cut[-1].startswith("479 of 500 operations are folded")
    assert len(str(flat).splitlines()) < 71
    assert nested.table(depth=1).splitlines()[3].split()[:3] == ["stage", "60", "operations"]
    assert nested.table(0) == nested.table(-1) == nested.table(1)


def test_a_small_model_has_one_line_per_layer_with_the_constants_of_its_rules():
    found = certificate("network")
    text, table = str(found).splitlines(), found.table().splitlines()
    assert text[0].startswith(f"The output changes by at most {found.lipschitz} times")
    assert text[1] == "Certificate with respect to parameters: all variables together within 0.1 of the centre"
    assert text[3].startswith("useful: ")
    head = "module operation output bound m Lipschitz ℓ smoothness L slope curvature share"
    assert " ".join(table[1].split()) == head
    for line, each in zip(table[3:6], found.rows, strict=True):
        constants = [str(value) for value in (each.bound, each.lipschitz, each.smoothness)]
        assert line.split()[:6] == [each.module, each.operation, "×".join(map(str, each.shape)), *constants]
    assert table[4].split()[6:] == [short(found.rows[1].slope), short(found.rows[1].curvature), "33%"]


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_certificate_prints_within_the_width(name):
    found = certificate(name)
    text = str(found)
    assert "nan" not in text.lower()
    assert str(found.smoothness) in text
    reasons = tuple(f"  {reason}" for reason in found.reasons)
    assert all(len(line) <= 126 for line in text.splitlines() if line not in reasons)
    assert all(len(line) <= 110 for line in found.table().splitlines())
    if name == "kinked":  # shares of infinity are not percentages
        assert found.table().splitlines()[4].split()[-1] == "∞"
        assert "%" not in text


def test_the_rules_of_known_functions():
    """tanh has slope 1 and curvature 4/(3√3) everywhere, up to the width of their tables."""
    found = {each.operation: each for each in certificate("nested").rows}
    assert 1 <= float(found["tanh"].slope) <= 1 + 1e-3
    assert 0.5 < float(found["tanh"].curvature) <= 4 / 27**0.5 * (1 + 1e-3)
    assert found["add"].curvature.is_zero
    assert float(found["add"].slope) == 1.0
    first = certificate("nested").rows[0]
    assert first.slope is None
    assert first.curvature.is_zero
    assert float(certificate("input").rows[0].slope) > 0


def test_rows_of_a_network_with_many_variables_bound_what_they_stand_for():
    """Beyond 64 variables rows have a quicker norm; the first layers alone, certified sharply, stay below it."""
    parts = [part for _ in range(20) for part in (nn.Linear(3, 3), nn.Tanh())]
    whole = nn.Sequential(*parts, *(nn.Linear(3, 3) for _ in range(15))).double()
    x = torch.randn(2, 3).double()
    rows = sf.certify(whole, x, domain=sf.ProductBall(1.0)).rows
    for count in (4, 12, 30):
        first = sf.certify(whole[:count], x, domain=sf.ProductBall(1.0)).smoothness
        assert first <= rows[count - 1].smoothness <= first * 1.5


def test_names_cannot_break_a_line():
    text = constructed(row("a\nb"), row("x" * 300), row("\x1b[31mred")).table()
    assert len(text.splitlines()) == 3 + 3 + 1
    assert "\\n" in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 110


def test_rounding_is_upwards_for_bounds_and_downwards_for_steps():
    for number in (0.2501, 1.0051, 317.2, 9999.4, 12345.6, 1e-9):
        assert float(short(Magnitude.of(number))) >= number
    assert short(Magnitude.of(0.25) * (1 + 1e-9)) == "0.25"
    assert short(Magnitude(4000.0)) == str(Magnitude(4000.0).format(2))
    for number in (0.29999, 1.23456e-7, 5e-320):
        assert 0 < float(down(number)) <= number

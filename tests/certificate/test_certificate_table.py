"""The table: what is folded, what the columns say, and what a hostile name may not do."""

from __future__ import annotations

import pytest
import torch
from certificates import NAMES, certificate, constructed, row
from torch import nn

import surefoot as sf
from surefoot.certificate.rows import lines
from surefoot.magnitude import Magnitude
from surefoot.numbers import down, short


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


def test_a_small_model_has_one_line_per_layer_with_the_constants_of_its_rules():
    found = certificate("network")
    text = str(found).splitlines()
    assert text[0].startswith(f"The output changes by at most {found.lipschitz} times")
    assert text[1] == "Certificate with respect to parameters: all variables together within 0.1 of the centre"
    assert text[3].startswith("useful: ")
    table = found.table().splitlines()
    assert " ".join(table[1].split()) == (
        "module operation output bound m Lipschitz ℓ smoothness L slope curvature share"
    )
    for line, each in zip(table[3:6], found.rows, strict=True):
        cells = line.split()
        constants = [str(value) for value in (each.bound, each.lipschitz, each.smoothness)]
        assert cells[:6] == [each.module, each.operation, "×".join(map(str, each.shape)), *constants]
    assert table[4].split()[6:] == [short(found.rows[1].slope), short(found.rows[1].curvature), "33%"]


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_certificate_prints_within_the_width(name):
    found = certificate(name)
    text = str(found)
    assert text == str(found)
    assert "nan" not in text.lower()
    assert str(found.smoothness) in text
    reasons = tuple(f"  {reason}" for reason in found.reasons)
    assert all(len(line) <= 126 for line in text.splitlines() if line not in reasons)
    assert all(len(line) <= 110 for line in found.table().splitlines())


def test_the_rules_of_known_functions():
    """tanh has slope 1 and curvature 4/(3√3) everywhere, up to the width of their tables."""
    found = {each.operation: each for each in certificate("nested").rows}
    assert float(found["tanh"].slope) <= 1 + 1e-3
    assert 0.5 < float(found["tanh"].curvature) <= 4 / 27**0.5 * (1 + 1e-3)
    assert found["add"].curvature.is_zero
    assert float(found["add"].slope) == 1.0
    first = certificate("nested").rows[0]
    assert first.slope is None
    assert first.curvature.is_zero
    assert float(certificate("input").rows[0].slope) > 0


def test_rows_of_a_network_with_many_variables_bound_what_they_stand_for():
    """Beyond 64 variables rows have a quicker norm; the first layers alone, certified sharply, stay below it."""
    torch.manual_seed(0)
    parts = [part for _ in range(20) for part in (nn.Linear(3, 3), nn.Tanh())]
    whole = nn.Sequential(*parts, *(nn.Linear(3, 3) for _ in range(15))).double()
    x = torch.randn(2, 3).double()
    rows = sf.certify(whole, x, domain=sf.ProductBall(1.0)).rows
    for count in (4, 12, 30):
        first = sf.certify(whole[:count], x, domain=sf.ProductBall(1.0)).smoothness
        assert first <= rows[count - 1].smoothness <= first * 1.5


def test_infinite_shares_are_not_percentages():
    table = certificate("kinked").table().splitlines()
    assert table[4].split()[-1] == "∞"
    assert "%" not in str(certificate("kinked"))


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

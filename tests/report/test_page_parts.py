from __future__ import annotations

import builtins
import math
import re
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from hand_made import hand_made, ten_to
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import Markup

import surefoot as sf
from surefoot.calculus.prepare import prepared
from surefoot.certificate import Row
from surefoot.certificate.numbers import count, lower, per_cent, readable, sort_key, upper
from surefoot.certificate.rows import lines
from surefoot.magnitude import Magnitude
from surefoot.operations.call import label
from surefoot.operations.captured import capture
from surefoot.operations.record import rule_for, rules
from surefoot.report.blocks import blocks, heat
from surefoot.report.growth import HEIGHT, Axis, curves
from surefoot.report.rules import errata, families, maths, prose, record_for, summary
from surefoot.report.summary import comparison, ratio

_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")


def row(module: str, share: float = 0.0, operation: str = "linear") -> Row:
    one = Magnitude.of(1.0)
    return Row(module, operation, (2,), one, one, one, share)


# Numbers


@given(st.floats(-5000, 5000))
def test_the_fast_upper_bound_has_the_digits_of_the_exact_one(log2: float) -> None:
    assert upper(Magnitude(log2)) == readable(str(Magnitude(log2)))


@given(st.integers(1, 9999), st.integers(-40, 40))
def test_short_numbers_are_not_rounded_up(digits: int, exponent: int) -> None:
    value = Magnitude.of(float(f"{digits}e{exponent}"))
    assert upper(value) == readable(str(value))


@given(st.floats(1e-300, 1e300))
def test_a_printed_step_is_not_longer_than_the_step(step: float) -> None:
    mantissa, _, power = lower(step).partition("×10")
    shown = float(f"{mantissa}e{power.translate(_DIGITS) or 0}")
    assert shown <= step
    assert shown >= step * (1 - 1.001e-3)


def test_numbers_as_people_write_them() -> None:
    assert [upper(Magnitude.of(v)) for v in (0.0, 1.0, 1234.0, 12345.0, 0.001, 0.0001)] == [
        "0", "1", "1234", "1.235×10⁴", "0.001", "1×10⁻⁴",
    ]  # fmt: skip
    assert upper(Magnitude.infinity()) == "∞"
    assert upper(ten_to(1043.5)).endswith("×10¹⁰⁴³")
    assert count(256416) == "256\u202f416"
    assert count(10**40) == upper(Magnitude.of(10**40))
    assert [per_cent(s) for s in (0.0, 4e-4, 0.006, 0.12, 1.0)] == [
        "",
        "",
        "0.6\u202f%",
        "12\u202f%",
        "100\u202f%",
    ]
    assert ratio(ten_to(1000), ten_to(0)) == "×1×10¹⁰⁰⁰"
    assert ratio(Magnitude.infinity(), Magnitude.infinity()) == "×1"


def test_sort_keys_order_what_floats_cannot_hold() -> None:
    values = [Magnitude.zero(), ten_to(-900), Magnitude.of(0.5), Magnitude.of(2.0), ten_to(1043), ten_to(1044)]
    keys = [float(sort_key(v)) for v in [*values, Magnitude.infinity()]]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)


# Prose


def test_every_rule_reads_without_markup() -> None:
    for rule in rules().values():
        if not rule.__module__.startswith("surefoot."):
            continue
        claim, proof = summary(rule.__doc__)
        family = prose(sys.modules[rule.__module__].__doc__)
        assert claim, rule
        for text in (claim, proof, family):
            plain = text.striptags()
            assert "\\" not in plain, (rule, plain)
            assert ":math:" not in plain
            assert "``" not in plain


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (r"\|x\|_2 \le \sqrt{c}\,\|w\|", "‖x‖2≤c‖w‖"),
        (r"\frac1{2n}\sum_i x_i", "12n∑ixi"),
        (r"e^{-\lambda t}", "e−λt"),
        (r"XW^\top + 1", "XW⊤+1"),
        (r"\langle\dot W, \hat x\rangle", "⟨W˙,x^⟩"),
        (r"a < b", "a<b"),
        (r"\text{<b>&}", "<b>&"),
    ],
)
def test_formulas(source: str, shown: str) -> None:
    assert maths(source).startswith("<math ")
    assert maths(source).striptags() == shown


def test_what_is_no_formula_is_text() -> None:
    for source in ("{", r"\frac", "^", r"\left(x", "<b>{"):
        assert maths(source) == Markup("<code>{}</code>").format(source)


@pytest.mark.parametrize("package", ["docutils", "latex2mathml"])
def test_without_packages_docstrings_are_shown_as_they_are_written(monkeypatch, package: str) -> None:
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    claim, proof = summary("The norm :math:`x^2`.\n\nProof: <b>.")
    assert r"x^2" in claim
    assert proof == "<p>Proof: &lt;b&gt;.</p>"


_PIECES = [*"\\{}^_<>&\"'`:*ax1 \n", "frac", "sqrt", "hat", "text{", "<script>", "\n\n", ".. math::", "* ",
           ".. raw:: html\n\n  ", ".. image:: http://a/b", "http://a.b", "`a <b>`_",
           r"\href{js:1}{x}"]  # fmt: skip


@given(st.lists(st.sampled_from(_PIECES), max_size=40).map("".join))
@settings(deadline=None)
def test_no_docstring_puts_elements_into_the_page(text: str) -> None:
    """Whatever a docstring says, the only elements are those that prose and formulas are made of."""
    for source in (text, f":math:`{text}`", f"``{text}``"):
        found = str(prose(source))
        allowed = (
            r"</?(?:p|ul|ol|li|code|pre|em|strong|math|m[a-z]+)(?: (?:class=\"formula\"|[a-z]+=\"[\w .]*\"))* ?/?>"
        )
        rest = re.sub(allowed, "", found)
        assert not re.search("[<>]", rest), found
        assert not re.search(r"<[^>]*(?:href|src|style|on\w+)=", found), found


# The tree


def test_modules_with_one_operation_are_one_line() -> None:
    rows = [row("a.0", 0.1), row("a.1", 0.2), row("b.c.d"), row(""), row("a.0", 0.3), row("e.f.0"), row("e.f.1.g")]
    found = [(line.depth, line.name, line.path, line.operations, round(line.share, 9)) for line in lines(rows)]
    assert found == [
        (0, "a", "a", 2, 0.3),
        (1, "0", "a.0", 1, 0.1),
        (1, "1", "a.1", 1, 0.2),
        (0, "b.c.d", "b.c.d", 1, 0.0),
        (0, "(model)", "", 1, 0.0),
        (0, "a.0", "a.0", 1, 0.3),
        (0, "e.f", "e.f", 2, 0.0),
        (1, "0", "e.f.0", 1, 0.0),
        (1, "1.g", "e.f.1.g", 1, 0.0),
    ]


@given(st.lists(st.lists(st.sampled_from("ab"), max_size=3).map(".".join), max_size=12))
def test_every_operation_is_there_once_in_order(paths: list[str]) -> None:
    shown = lines([row(path) for path in paths])
    operations = [line for line in shown if not line.is_group]
    assert [line.row.module for line in operations] == paths
    assert [line.position for line in operations] == list(range(1, len(paths) + 1))
    depths = [line.depth for line in shown]
    assert all(after <= before + 1 for before, after in pairwise(depths))


# Curves


def test_curves_of_any_size_stay_in_the_drawing() -> None:
    certificate = hand_made([f"stage.{k // 10}.{k}" for k in range(300)], infinite=True)
    drawn = curves(certificate.rows)
    assert drawn is not None
    assert drawn.axis.has_zero
    assert drawn.axis.has_infinity
    for curve in drawn.curves:
        numbers = re.findall(r"[ML](\S+?) ([^MLh]+)", curve.line)
        assert len(numbers) == 300
        assert all(0 <= float(x) <= 300 and 0 <= float(y) <= HEIGHT for x, y in numbers)
    assert 2 <= len([text for _, text in drawn.axis.ticks if text.startswith("10")]) <= 9
    assert sum(band.width for band in drawn.bands) == pytest.approx(100)


@pytest.mark.parametrize("exponents", [(0.0, 0.0), (-900.0, 1043.0), (3.2, 3.4), (1e7, 3e7), (-2.0, 18.0)])
def test_larger_is_higher_and_ticks_are_where_they_say(exponents: tuple[float, float]) -> None:
    axis = Axis.of([ten_to(x) for x in exponents] + [Magnitude.zero(), Magnitude.infinity()])
    marks = [-math.inf, *np.linspace(*exponents, 5), math.inf]
    heights = [axis.height(x) for x in marks]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] > heights[1]
    assert heights[-2] > heights[-1]
    for y, text in axis.ticks:
        written = re.fullmatch(r"10([⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+)", text)
        if written:
            assert axis.height(float(written[1].translate(_DIGITS))) == y


def test_one_operation_is_no_curve() -> None:
    assert curves([]) is None
    assert curves([row("a")]) is None
    assert curves([row("a"), row("b")]) is not None


# Blocks


@pytest.mark.parametrize("number", [2, 60, 61, 159, 160, 161, 700])
def test_cells_cover_the_matrix_once_and_show_the_largest_bound(number: int) -> None:
    certificate = hand_made([f"b{k}" for k in range(number)], infinite=True)
    drawn = heat(certificate)
    assert drawn is not None
    assert drawn.size <= 160
    covered = np.zeros((drawn.size, drawn.size), dtype=int)
    for outline in [path for _, path in drawn.paths] + [drawn.infinite]:
        for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)v1", outline):
            covered[int(y), int(x) : int(x) + int(width)] += 1
    log2, together = certificate.block_smoothness.log2, drawn.together
    for y, line in enumerate(drawn.values):
        for x, value in enumerate(line):
            part = log2[y * together : (y + 1) * together, x * together : (x + 1) * together]
            assert covered[y, x] == covered[x, y] == (part.max() > -np.inf)
            if (x * 31 + y) % 97 == 0 or x == y:
                assert value == upper(Magnitude(float(part.max())))


def test_one_tiny_bound_takes_no_shades_from_the_others() -> None:
    certificate = hand_made([f"b{k}" for k in range(30)])
    certificate.block_smoothness.log2[29, 29] = -1000.0
    drawn = heat(certificate)
    assert drawn is not None
    assert sum(bool(path) for _, path in drawn.paths) == len(drawn.paths)
    assert drawn.low.startswith("≤ ")


def test_blocks_have_their_own_constants_and_steps() -> None:
    certificate = hand_made(["a", "b", "c"], scalar=True)
    shown = blocks(certificate)
    assert [line.name for line in shown] == ["a", "b", "c"]
    assert [line.step for line in shown] == list(certificate.block_step_sizes.values())
    assert [line.smoothness for line in shown] == [certificate.block_smoothness[k, k] for k in range(3)]


# Comparison and rules


def test_bars_are_as_long_as_the_logarithms_say() -> None:
    certificates = [(str(k), hand_made([f"{j}" for j in range(k)], infinite=k == 5)) for k in (4, 5, 9)]
    m, lipschitz, smoothness = comparison(certificates)
    for quantity, name in ((m, "bound"), (lipschitz, "lipschitz")):
        values = [getattr(c, name).log2 for _, c in certificates]
        assert np.argsort([bar.width for bar in quantity.bars]).tolist() == np.argsort(values).tolist()
        assert all(0 < bar.width <= 100 for bar in quantity.bars)
    assert [bar.width for bar in smoothness.bars][1] == 100
    assert smoothness.bars[1].infinite
    assert smoothness.bars[0].width == smoothness.bars[2].width < 100
    assert [bar.ratio for bar in smoothness.bars] == ["", "", "×1"]


def test_ratios_are_to_the_first_finite_bound() -> None:
    kinked, smooth = hand_made(list("abcde"), infinite=True), hand_made(list("abcde"))
    *_, smoothness = comparison([("kinked", kinked), ("smooth", smooth), ("again", smooth)])
    assert [bar.ratio for bar in smoothness.bars] == ["", "", "×1"]


@pytest.mark.parametrize("name", ["vgg16-batchnorm", "resnet18-smooth", "gpt", "vit", "highway-gated"])
def test_rows_name_the_rule_that_was_used(name: str) -> None:
    with torch.device("meta"):
        model, x = sf.zoo.build(name), sf.zoo.example_input(name, batch=2)
    graph = prepared(capture(model, x))
    one = Magnitude.of(1.0)
    for node in graph.nodes:
        shown = Row(node.module, label(node), node.specs[0].shape, one, one, one, 0.0)
        assert record_for(shown).bounds is rule_for(node, graph), node.op


def test_families_count_operations_and_errata_match_them() -> None:
    certificate = hand_made([str(k) for k in range(8)])  # linear, softplus, conv2d, add, twice each
    found = {entry.operations: entry.count for family in families([certificate]) for entry in family.entries}
    assert found == {"linear": 2, "softplus": 2, "conv2d": 2, "add": 2}
    assert [e.number for e in errata([certificate])] == [2, 17]
    assert [e.number for e in errata([hand_made(["a", "b"], scalar=True)])] == [17, 18]

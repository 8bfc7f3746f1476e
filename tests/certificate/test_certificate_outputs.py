"""Figure, data frame and citation."""

from __future__ import annotations

import io
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from certificates import NAMES, certificate, constructed, row

import surefoot as sf
from surefoot.errors import SurefootError
from surefoot.magnitude import Magnitude

HOSTILE = '<script>alert("$x_$")</script>'


def expected(rows, name):
    heights = [getattr(each, name).log2 * math.log10(2.0) for each in rows]
    return [height if math.isfinite(height) else math.nan for height in heights]


@pytest.mark.parametrize("name", NAMES)
def test_the_curves_are_the_logarithms_of_the_table(name):
    found = certificate(name)
    figure, (growth, blocks) = found.plot()
    assert figure.axes[:2] == [growth, blocks]
    curves = growth.get_lines()
    assert len(curves) == (3 if found.rows else 0)
    for curve, constant in zip(curves, ("bound", "lipschitz", "smoothness"), strict=False):
        assert np.allclose(curve.get_ydata(), expected(found.rows, constant), rtol=1e-12, atol=0, equal_nan=True)
        assert list(curve.get_xdata()) == list(range(len(found.rows)))
    count = len(found.block_lipschitz)
    assert [image.get_array().shape for image in blocks.get_images()] == ([(count, count)] if count else [])
    figure.savefig(io.BytesIO(), format="png", dpi=40)


def test_the_matrix_shows_zero_and_infinity_apart_from_numbers():
    one = Magnitude.of(1.0)
    matrix = Magnitude(np.array([[3500.0, -np.inf, 0.0], [-np.inf, np.inf, 1.0], [0.0, 1.0, -990.0]]))
    found = sf.Certificate(one, one, Magnitude.infinity(), dict.fromkeys("abc", one), matrix)
    _, (_, blocks) = found.plot()
    (image,) = blocks.get_images()
    shown = image.get_array()
    low, high = image.get_clim()
    assert shown.mask.tolist() == [[False, True, False], [True, False, False], [False, False, True]]
    assert shown[1, 1] > high == pytest.approx(3500 * math.log10(2))
    assert low == 0.0


def test_long_networks_have_few_labels_and_names_are_no_formulas():
    long = constructed(*[row(f"stage.{k // 4}.part{k % 4}") for k in range(600)])
    _, (growth, _) = long.plot()
    assert 10 <= len(growth.get_xticks()) <= 60
    figure, (growth, _) = constructed(row(HOSTILE), row("$\\frac{$")).plot()
    figure.savefig(io.BytesIO(), format="png", dpi=40)
    assert not any(tick.get_parse_math() for tick in growth.get_xticklabels())


def test_the_figure_leaves_pyplot_alone():
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    certificate("network").plot()
    assert pyplot.get_fignums() == before


def test_the_data_frame_has_the_numbers_of_the_table():
    found = certificate("objective")
    frame = found.to_pandas()
    assert list(frame["module"]) == [each.module for each in found.rows]
    assert list(frame["smoothness"]) == [float(each.smoothness) for each in found.rows]
    assert math.isnan(frame["slope"][0])
    assert frame["share"].sum() == pytest.approx(1.0)
    assert frame.attrs["smoothness"] == str(found.smoothness)
    deep = certificate("deep").to_pandas()
    assert math.isinf(deep["lipschitz"].iloc[-1])
    assert deep["lipschitz_log10"].iloc[-1] == pytest.approx(
        certificate("deep").rows[-1].lipschitz.log2 * math.log10(2)
    )
    assert len(certificate("segment").to_pandas()) == 0


@pytest.mark.parametrize(("module", "method"), [("pandas", "to_pandas"), ("matplotlib.figure", "plot")])
def test_a_missing_package_is_named(monkeypatch, module, method):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SurefootError, match=f"{method} needs .*pip install {module.partition('.')[0]}$"):
        getattr(certificate("network"), method)()


def test_a_certificate_that_was_read_back_shows_the_same():
    found = certificate("objective")
    restored = sf.Certificate.from_json(found.to_json())
    assert restored.to_pandas().equals(found.to_pandas())
    assert restored._repr_html_() == found._repr_html_()
    curves, again = (each.plot()[1][0].get_lines() for each in (found, restored))
    for one, other in zip(curves, again, strict=True):
        assert np.array_equal(one.get_ydata(), other.get_ydata(), equal_nan=True)
    assert restored.by_module() == found.by_module()
    assert restored.by_operation() == found.by_operation()


def test_the_citation_has_the_facts_of_the_citation_file():
    path = Path(__file__).parents[2] / "CITATION.cff"
    facts = path.resolve().read_text(encoding="utf-8") if path.exists() else ""
    text = sf.Certificate.citation()
    assert certificate("network").citation() == text
    assert text.count("@") == 2
    assert text.count("{") == text.count("}")
    title, url = re.search(r'  title: "(.+)"', facts), re.search(r'  url: "(.+)"', facts)
    assert title is not None
    assert url is not None
    for fact in (title[1], url[1], "Roulet, Vincent", "Harchaoui, Zaid", "2020", "The surefoot developers"):
        assert fact in text
    for fact in ("family-names: Roulet", "family-names: Harchaoui", "year: 2020", "The surefoot developers"):
        assert fact in facts
    assert sf.__version__ in text

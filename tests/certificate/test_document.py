"""Documents, copies, figures and data frames: what comes out is what was certified."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certificates import NAMES, certificate, constructed, row
from hypothesis import given, settings
from hypothesis import strategies as st

import surefoot as sf
from surefoot.attained import Contradiction
from surefoot.certificate.document import SCHEMA, CertificateError, _digest
from surefoot.errors import SurefootError
from surefoot.guarantees import GuaranteeError
from surefoot.lower import Estimate, LowerBound
from surefoot.magnitude import Magnitude

ONE = Magnitude.of(1.0)
logarithms = st.one_of(
    st.sampled_from([-math.inf, math.inf, 0.0, -0.0, 1e15, -1e15, 5e-324, 3465.7]),
    st.floats(allow_nan=False, allow_infinity=True),
)
magnitudes = logarithms.map(Magnitude)
texts = st.text(max_size=8)
numbers = st.floats(min_value=0.0, allow_nan=False, allow_infinity=True)


def says(found: sf.Certificate) -> list[Any]:
    """All that a certificate says, with what it refuses."""

    def outcome(name: str) -> Any:
        try:
            return found.iterations(0.1) if name == "iterations" else getattr(found, name)
        except GuaranteeError as error:
            return str(error)

    derived = "step_size", "block_step_sizes", "damping", "safe_step", "iterations"
    return [found, hash(found), found.rows, str(found), found.to_dict(), *map(outcome, derived)]


COPIES = {
    "json": lambda c: sf.Certificate.from_json(c.to_json()),
    "one line": lambda c: sf.Certificate.from_json(c.to_json(indent=None)),
    "dict": lambda c: sf.Certificate.from_dict(c.to_dict()),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda c: pickle.loads(pickle.dumps(c)),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_certificate_comes_back_as_it_was(name):
    found = certificate(name)
    json.loads(found.to_json(), parse_constant=pytest.fail)
    for copied in COPIES.values():
        assert says(copied(found)) == says(found)
    restored = COPIES["json"](found)
    assert restored.lipschitz.log2 == found.lipschitz.log2
    assert restored.to_pandas().equals(found.to_pandas())
    assert restored._repr_html_() == found._repr_html_()
    assert restored.by_module() == found.by_module()
    assert restored.by_operation() == found.by_operation()


rows = st.builds(
    row,
    module=texts,
    operation=texts,
    share=st.floats(0.0, 1.0),
    slope=st.none() | magnitudes,
    curvature=st.none() | magnitudes,
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_certificate_comes_back_as_it_was(data):
    names = data.draw(st.lists(texts, unique=True, max_size=3))
    entries = [data.draw(logarithms) for _ in range(len(names) ** 2)]
    matrix = np.array(entries, dtype=float).reshape(len(names), len(names))
    damping = data.draw(st.none() | st.tuples(magnitudes, st.booleans()))
    table = tuple(data.draw(st.lists(rows, max_size=3)))
    found = sf.Certificate(
        *[data.draw(magnitudes) for _ in range(3)],
        {name: data.draw(magnitudes) for name in names},
        Magnitude(matrix),
        reasons=tuple(data.draw(st.lists(texts, max_size=2))),
        domain=data.draw(texts),
        flags=tuple(data.draw(st.lists(texts, max_size=1))),
        scalar=data.draw(st.booleans()),
        nonnegative=data.draw(st.booleans()),
        block_gradients=data.draw(st.none() | st.fixed_dictionaries(dict.fromkeys(names, numbers))),
        segment_step=data.draw(st.none() | numbers),
        make_rows=lambda: table,
        make_damping=None if damping is None else lambda: damping,
    )
    restored = sf.Certificate.from_json(found.to_json())
    assert restored == found
    assert restored.rows == found.rows
    assert restored.to_json() == found.to_json()
    for name in ("bound", "lipschitz", "smoothness"):
        assert getattr(restored, name).log2 == getattr(found, name).log2
    assert np.array_equal(restored.block_smoothness.log2, matrix)


def test_what_a_document_says():
    found = certificate("objective")
    document = found.to_dict()
    assert document["schema"] == SCHEMA == "surefoot/certificate/2"
    assert document["version"] == sf.__version__
    assert document["certified"] is True
    assert document["verdict"].startswith("useful: ")
    assert [each["module"] for each in document["rows"]] == ["0", "1", "2", "objective"]
    assert np.array_equal(np.array(document["log2"]["block_smoothness"]), found.block_smoothness.log2)
    kinked = certificate("kinked").to_dict()
    assert kinked["certified"] is False
    assert kinked["log2"]["smoothness"] == "∞"
    assert math.isinf(float(certificate("deep").lipschitz))  # and yet it is written, as a logarithm
    assert certificate("deep").to_dict()["log2"]["lipschitz"] > 3000


CHANGES = {
    "a constant": lambda d: d["log2"].update(smoothness=d["log2"]["smoothness"] - 1.0),
    "its text": lambda d: d.update(smoothness="1.000e-03"),
    "a flag": lambda d: d.update(flags=["x"]),
    "a row": lambda d: d["rows"][0].update(module="other"),
    "the domain": lambda d: d.update(domain="everywhere"),
    "an addition": lambda d: d.update(note="trust me"),
    "the digest": lambda d: d.update(digest="sha256:0"),
    "no digest": lambda d: d.pop("digest"),
}
WRONG = {  # with a digest that fits
    "no rows": lambda d: d.pop("rows"),
    "a word": lambda d: d["log2"].update(bound="many"),
    "nothing": lambda d: d["log2"].update(bound=None),
    "a small matrix": lambda d: d["log2"].update(block_smoothness=[[0.0]]),
    "one more": lambda d: d["rows"][0]["log2"].update(other=1.0),
    "a list": lambda d: d.update(log2=[]),
}


@pytest.mark.parametrize("change", [*CHANGES, *WRONG])
def test_a_changed_document_is_refused(change):
    document = json.loads(certificate("objective").to_json())
    if change in CHANGES:
        CHANGES[change](document)
    else:
        WRONG[change](document)
        del document["digest"]
        document["digest"] = _digest(document)
    message = "changed since it was written" if change in CHANGES else "not a whole certificate"
    with pytest.raises(CertificateError, match=message):
        sf.Certificate.from_dict(document)


def test_a_document_that_another_program_wrote_again_is_the_same():
    """Keys in another order, whole numbers without a point: what JSON does not tell apart."""

    def rewritten(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rewritten(value[key]) for key in reversed(value) if key != "blocks"} | (
                {"blocks": value["blocks"]} if "blocks" in value else {}
            )
        if isinstance(value, list):
            return [rewritten(entry) for entry in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    document = rewritten(json.loads(certificate("objective").to_json()))
    assert sf.Certificate.from_dict(document) == certificate("objective")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "not a JSON document"),
        ("[]", "an object with a schema, got list"),
        ("{}", "has the schema None"),
        ('{"schema": "surefoot/certificate/1"}', "reads 'surefoot/certificate/2'"),
        ('{"schema": "surefoot/certificate/2"}', "changed since"),
        ('{"schema": "surefoot/certificate/2", "bound": NaN}', "holds NaN"),
    ],
)
def test_what_is_no_certificate_is_refused(text, match):
    with pytest.raises(CertificateError, match=match):
        sf.Certificate.from_json(text)


def estimate(bound: float, lipschitz: float, smoothness: float, **where: str) -> Estimate:
    return Estimate(LowerBound(bound), LowerBound(lipschitz), LowerBound(smoothness), **where)


def test_an_estimate_is_shown_and_checked():
    found = certificate("network")
    lower = estimate(1.0, 2.0, 3.0, domain=found.domain)
    both = found.with_estimate(lower)
    assert found.estimate is None
    assert both.estimate == lower
    assert both != found
    assert both.rows is found.rows
    assert str(both) == str(found) + "\n" + found.bracket(lower)
    assert both.to_dict()["bracket"] == found.bracket(lower).splitlines()
    assert says(COPIES["json"](both)) == says(both)
    assert COPIES["json"](both).estimate == lower
    with pytest.raises(Contradiction):
        found.with_estimate(estimate(1.0, 200.0, 3.0, domain=found.domain))
    for wrong, word in (
        (estimate(1.0, 2.0, 3.0, domain="elsewhere"), "search where the certificate speaks"),
        (estimate(1.0, 2.0, 3.0, domain=found.domain, wrt="input"), "input"),
        (None, r"surefoot\.estimate returns, got NoneType"),
    ):
        with pytest.raises(CertificateError, match=word):
            found.with_estimate(wrong)


def test_equality_looks_at_every_constant():
    assert certificate("objective") != certificate("square")
    assert certificate("objective") != 1
    matrices = [Magnitude.of(np.array([[1.0, 0.0], [0.0, last]])) for last in (1.0, 2.0)]
    first, second = (sf.Certificate(ONE, ONE, ONE, {"a": ONE, "b": ONE}, matrix) for matrix in matrices)
    assert first != second
    assert constructed() == constructed()


@pytest.mark.parametrize("name", NAMES)
def test_the_curves_are_the_logarithms_of_the_table(name):
    found = certificate(name)
    figure, (growth, blocks) = found.plot()
    assert figure.axes[:2] == [growth, blocks]
    curves = growth.get_lines()
    assert len(curves) == (3 if found.rows else 0)
    for curve, constant in zip(curves, ("bound", "lipschitz", "smoothness"), strict=False):
        heights = np.array([getattr(each, constant).log2 * math.log10(2.0) for each in found.rows])
        heights = np.where(np.isfinite(heights), heights, np.nan)
        assert np.allclose(curve.get_ydata(), heights, rtol=1e-12, atol=0, equal_nan=True)
        assert list(curve.get_xdata()) == list(range(len(found.rows)))
    count = len(found.block_lipschitz)
    assert [image.get_array().shape for image in blocks.get_images()] == ([(count, count)] if count else [])
    figure.savefig(io.BytesIO(), format="png", dpi=40)


def test_the_matrix_shows_zero_and_infinity_apart_from_numbers():
    matrix = Magnitude(np.array([[3500.0, -np.inf, 0.0], [-np.inf, np.inf, 1.0], [0.0, 1.0, -990.0]]))
    found = sf.Certificate(ONE, ONE, Magnitude.infinity(), dict.fromkeys("abc", ONE), matrix)
    (image,) = found.plot()[1][1].get_images()
    shown = image.get_array()
    low, high = image.get_clim()
    assert shown.mask.tolist() == [[False, True, False], [True, False, False], [False, False, True]]
    assert shown[1, 1] > high == pytest.approx(3500 * math.log10(2))
    assert low == 0.0


def test_figures_have_few_labels_no_formulas_and_no_window():
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    _, (growth, _) = constructed(*[row(f"stage.{k // 4}.part{k % 4}") for k in range(600)]).plot()
    assert 10 <= len(growth.get_xticks()) <= 60
    figure, (growth, _) = constructed(row('<script>alert("$x_$")</script>'), row("$\\frac{$")).plot()
    figure.savefig(io.BytesIO(), format="png", dpi=40)
    assert not any(tick.get_parse_math() for tick in growth.get_xticklabels())
    assert pyplot.get_fignums() == before


def test_the_data_frame_has_the_numbers_of_the_table():
    found, deep = certificate("objective"), certificate("deep")
    frame = found.to_pandas()
    assert list(frame["module"]) == [each.module for each in found.rows]
    assert list(frame["smoothness"]) == [float(each.smoothness) for each in found.rows]
    assert math.isnan(frame["slope"][0])
    assert frame["share"].sum() == pytest.approx(1.0)
    assert frame.attrs["smoothness"] == str(found.smoothness)
    last = deep.to_pandas().iloc[-1]
    assert math.isinf(last["lipschitz"])
    assert last["lipschitz_log10"] == pytest.approx(deep.rows[-1].lipschitz.log2 * math.log10(2))
    assert len(certificate("segment").to_pandas()) == 0


@pytest.mark.parametrize(("module", "method"), [("pandas", "to_pandas"), ("matplotlib.figure", "plot")])
def test_a_missing_package_is_named(monkeypatch, module, method):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SurefootError, match=f"{method} needs .*pip install {module.partition('.')[0]}$"):
        getattr(certificate("network"), method)()


def test_the_citation_has_the_facts_of_the_citation_file():
    facts = (Path(__file__).parents[2] / "CITATION.cff").read_text(encoding="utf-8")
    text = sf.Certificate.citation()
    assert text.count("@") == 2
    assert text.count("{") == text.count("}")
    found = [re.search(pattern, facts) for pattern in (r'  title: "(.+)"', r'  url: "(.+)"')]
    for fact in (*(match[1] for match in found if match), "Roulet, Vincent", "Harchaoui, Zaid", "2020"):
        assert fact in text
    for fact in ("family-names: Roulet", "family-names: Harchaoui", "year: 2020", "The surefoot developers"):
        assert fact in facts
    assert "The surefoot developers" in text
    assert sf.__version__ in text

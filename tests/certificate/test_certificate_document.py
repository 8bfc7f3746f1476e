"""Documents: what is read back is what was written, and what was changed is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from certificates import NAMES, certificate, constructed, row
from hypothesis import given, settings
from hypothesis import strategies as st

import surefoot as sf
from surefoot.attained import Contradiction
from surefoot.certificate.document import SCHEMA, CertificateError
from surefoot.guarantees import GuaranteeError
from surefoot.lower import Estimate, LowerBound
from surefoot.magnitude import Magnitude

logarithms = st.one_of(
    st.sampled_from([-math.inf, math.inf, 0.0, -0.0, 1e15, -1e15, 5e-324, 3465.7]),
    st.floats(allow_nan=False, allow_infinity=True),
)
magnitudes = logarithms.map(Magnitude)
texts = st.text(max_size=8)
numbers = st.floats(min_value=0.0, allow_nan=False, allow_infinity=True)


def outcome(call):
    """What a call returns, or what it refuses with."""
    try:
        return call()
    except GuaranteeError as error:
        return str(error)


def assert_same(first: sf.Certificate, second: sf.Certificate) -> None:
    assert first == second
    assert hash(first) == hash(second)
    assert first.rows == second.rows
    assert str(first) == str(second)
    assert first.version == second.version
    assert first.step_size == second.step_size
    assert outcome(lambda: first.block_step_sizes) == outcome(lambda: second.block_step_sizes)
    assert outcome(lambda: first.damping) == outcome(lambda: second.damping)
    assert outcome(lambda: first.safe_step) == outcome(lambda: second.safe_step)
    assert outcome(lambda: first.iterations(0.1)) == outcome(lambda: second.iterations(0.1))
    assert first.to_dict() == second.to_dict()


@pytest.mark.parametrize("name", NAMES)
def test_a_certificate_comes_back_as_it_was(name):
    found = certificate(name)
    text = found.to_json()
    json.loads(text, parse_constant=pytest.fail)
    assert_same(found, sf.Certificate.from_json(text))
    assert_same(found, sf.Certificate.from_dict(found.to_dict()))
    assert sf.Certificate.from_json(found.to_json(indent=None)) == found


rows = st.builds(
    row,
    module=texts,
    operation=texts,
    share=st.floats(0.0, 1.0),
    slope=st.none() | magnitudes,
    curvature=st.none() | magnitudes,
    epsilon=st.none() | st.floats(1e-12, 1.0),
    bits_by_radius=st.floats(0.0, 50.0),
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
    text = found.to_json()
    restored = sf.Certificate.from_json(text)
    assert restored == found
    assert restored.rows == found.rows
    assert restored.to_json() == text
    for name in ("bound", "lipschitz", "smoothness"):
        assert getattr(restored, name).log2 == getattr(found, name).log2
    assert np.array_equal(restored.block_smoothness.log2, matrix)


def test_magnitudes_beyond_doubles_are_kept():
    found = certificate("deep")
    assert math.isinf(float(found.lipschitz))
    restored = sf.Certificate.from_json(found.to_json())
    assert restored.lipschitz.log2 == found.lipschitz.log2 > 3000
    assert str(restored.lipschitz) == str(found.lipschitz)


def test_what_a_document_says():
    document = certificate("objective").to_dict()
    assert document["schema"] == SCHEMA == "surefoot/certificate/2"
    assert document["version"] == sf.__version__
    assert document["certified"] is True
    assert document["verdict"].startswith("useful: ")
    assert [each["module"] for each in document["rows"]] == ["0", "1", "2", "objective"]
    matrix = np.array(document["log2"]["block_smoothness"])
    assert np.array_equal(matrix, certificate("objective").block_smoothness.log2)
    assert certificate("kinked").to_dict()["certified"] is False
    assert certificate("kinked").to_dict()["log2"]["smoothness"] == "∞"


CHANGES = {
    "a constant": lambda d: d["log2"].update(smoothness=d["log2"]["smoothness"] - 1.0),
    "its text": lambda d: d.update(smoothness="1.000e-03"),
    "a flag": lambda d: d.update(flags=["x"]),
    "a row": lambda d: d["rows"][0].update(module="other"),
    "a missing row": lambda d: d["rows"].pop(),
    "the domain": lambda d: d.update(domain="everywhere"),
    "an addition": lambda d: d.update(note="trust me"),
    "the digest": lambda d: d.update(digest="sha256:0"),
    "no digest": lambda d: d.pop("digest"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_document_is_refused(change):
    document = json.loads(certificate("objective").to_json())
    CHANGES[change](document)
    with pytest.raises(CertificateError, match="changed since it was written"):
        sf.Certificate.from_dict(document)


def test_a_document_that_another_program_wrote_again_is_the_same():
    """Keys in another order, whole numbers without a point: what JSON does not tell apart."""

    def rewritten(value):
        if isinstance(value, dict):
            return {key: rewritten(value[key]) for key in value if key != "blocks"} | (
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
        ("", "not a JSON document"),
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


def test_a_document_with_a_right_digest_and_wrong_content_is_refused():
    from surefoot.certificate.document import _digest

    for change in (
        lambda d: d.pop("rows"),
        lambda d: d["log2"].update(bound="many"),
        lambda d: d["log2"].update(bound=None),
        lambda d: d["log2"].update(block_smoothness=[[0.0]]),
        lambda d: d["rows"][0]["log2"].update(other=1.0),
        lambda d: d.update(log2=[]),
    ):
        document = json.loads(certificate("objective").to_json())
        change(document)
        del document["digest"]
        document["digest"] = _digest(document)
        with pytest.raises(CertificateError, match="not a whole certificate"):
            sf.Certificate.from_dict(document)


def estimate(bound: float, lipschitz: float, smoothness: float, **where: str) -> Estimate:
    return Estimate(LowerBound(bound), LowerBound(lipschitz), LowerBound(smoothness), **where)


def test_an_estimate_is_shown_kept_and_checked():
    found = certificate("network")
    domain = found.domain
    lower = estimate(1.0, 2.0, 3.0, domain=domain)
    both = found.with_estimate(lower)
    assert found.estimate is None
    assert both.estimate == lower
    assert both != found
    assert both.rows is found.rows
    assert str(both) == str(found) + "\n" + found.bracket(lower)
    assert sf.Certificate.from_json(both.to_json()).estimate == lower
    assert str(sf.Certificate.from_json(both.to_json())) == str(both)
    assert both.to_dict()["bracket"] == found.bracket(lower).splitlines()
    with pytest.raises(Contradiction):
        found.with_estimate(estimate(1.0, 200.0, 3.0, domain=domain))
    with pytest.raises(CertificateError, match="search where the certificate speaks"):
        found.with_estimate(estimate(1.0, 2.0, 3.0, domain="elsewhere"))
    with pytest.raises(CertificateError, match="input"):
        found.with_estimate(estimate(1.0, 2.0, 3.0, domain=domain, wrt="input"))


def test_equality_looks_at_every_constant():
    found = certificate("objective")
    assert found != certificate("square")
    assert found != 1
    one = Magnitude.of(1.0)
    matrices = [Magnitude.of(np.array([[1.0, 0.0], [0.0, last]])) for last in (1.0, 2.0)]
    first, second = (sf.Certificate(one, one, one, {"a": one, "b": one}, matrix) for matrix in matrices)
    assert first != second
    assert constructed() == constructed()

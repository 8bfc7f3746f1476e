"""One page of certificates, of a run, of a verdict: what is on it, and that no name breaks out of its text."""

from __future__ import annotations

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.certificate import Certificate, Row
from surefoot.errors import SurefootError
from surefoot.magnitude import Magnitude
from surefoot.report import fragment, render_report, run_document, write_report

# Names that break out of text, attributes, scripts and JSON if anything is left unescaped.
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "</script><script>alert(3)</script>",
    "' onmouseover='alert(4)",
    "{{ 7 * 7 }}${7 * 7}\u2028&amp;",
    "</style><b>5</b>",
)


class Page(HTMLParser):
    """Tags with their attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "rect", "line", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and tag not in ("rect", "line", "polyline"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def hand_made(names: tuple[str, ...], infinite: bool = False) -> Certificate:
    """A certificate with these names everywhere, and numbers beyond doubles."""
    huge = Magnitude(5000.0)
    rows = [Row(name, name, (2, 3), huge, huge, huge, 0.5) for name in names]
    return Certificate(
        bound=huge,
        lipschitz=huge,
        smoothness=Magnitude.infinity() if infinite else huge,
        block_lipschitz=dict.fromkeys(names, huge),
        block_smoothness=Magnitude(np.full((len(names), len(names)), 40.0)),
        reasons=names if infinite else (),
        remarks=names,
        domain=names[0],
        make_rows=lambda: rows,
    )


def problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    return model, torch.randn(4, 3).double(), torch.randn(4, 2).double()


@pytest.mark.parametrize("infinite", [False, True])
def test_hostile_names_are_text(infinite: bool) -> None:
    page = Page(render_report({name: hand_made(HOSTILE, infinite) for name in HOSTILE}, title=HOSTILE[0]))
    assert not page.open
    assert not {tag for tag, _ in page.tags} & {"script", "img", "b-", "iframe", "object"}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    for name in HOSTILE:
        assert " ".join(name.split()) in page.text
    part = Page(fragment(hand_made(HOSTILE, infinite).to_dict()))
    assert not {tag for tag, _ in part.tags} & {"script", "img"}
    assert not part.open


def test_the_page_needs_nothing_outside_and_runs_nothing() -> None:
    text = render_report(hand_made(("a", "b")))
    page = Page(text)
    assert not any(tag == "script" for tag, _ in page.tags)
    links = [a.get("href") or a.get("src") or "" for _, a in page.tags if "href" in a or "src" in a]
    assert links
    assert all(link.startswith(("#", "data:application/json")) for link in links)
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert not re.search(r"url\(|@import", text)


def test_a_certificate_has_its_numbers_and_comes_back_from_the_page() -> None:
    model, x, y = problem()
    certificate = sf.certify(model, x, objective=sf.Square(y))
    text = render_report({"net": certificate})
    page = Page(text)
    for row in certificate.rows:
        assert row.module in page.text
        assert row.operation in page.text
    assert certificate.to_dict()["domain"] in page.text
    assert "Useful" in page.text
    data = re.search(r'download="net.json" href="data:application/json;base64,([^"]+)"', text)
    assert data is not None
    document = json.loads(base64.b64decode(data[1]))
    assert sf.Certificate.from_dict(document) == certificate
    assert render_report(document | {}, title="net") == render_report(certificate, title="net")


def test_several_certificates_are_compared_with_the_first_finite_one() -> None:
    model, x, y = problem()
    certificates = [
        (f"radius {r:g}", sf.certify(model, x, objective=sf.Square(y), domain=sf.Ball(r))) for r in (0.1, 0.2)
    ]
    page = Page(render_report([("kink", hand_made(("a",), True)), *certificates]))
    assert "Comparison" in page.text
    row = page.text.split("radius 0.2")[4]
    times = float(certificates[1][1].smoothness) / float(certificates[0][1].smoothness)
    assert f"{times:.3g}"[:4] in row


def test_a_run_has_its_steps_and_what_was_proved() -> None:
    model, x, y = problem()
    optimizer = sf.CertifiedDescent(model, sf.Square())
    losses = [optimizer.step(x, y) for _ in range(5)]
    document = run_document(optimizer)
    assert [step["loss"] for step in document["steps"]] == losses
    assert document["proved_steps"] == 5
    page = Page(render_report(optimizer, title="my run"))
    assert "Every step is proved" in page.text
    curves = [attributes for tag, attributes in page.tags if tag == "polyline"]
    assert len(curves) == 3
    places = [tuple(map(float, point.split(","))) for point in (curves[0]["points"] or "").split()]
    assert [x for x, _ in places] == [0, 180, 360, 540, 720]
    assert [y for _, y in places] == sorted(y for _, y in places)
    low, high = math.floor(math.log10(min(losses))), math.ceil(math.log10(max(losses)))
    for (_, height), loss in zip(places, losses, strict=True):
        assert height == pytest.approx(220 * (high - math.log10(loss)) / max(high - low, 1), abs=0.06)


def test_a_verdict_has_its_hypotheses_and_what_is_missing() -> None:
    model, x, y = problem()
    verdict = sf.convergence(model, x, sf.Square(y))
    page = Page(render_report(verdict))
    assert ("Proved" if verdict.proved else "Not proved") in page.text
    for hypothesis in verdict.hypotheses:
        assert hypothesis.meaning in page.text
    proved = sf.convergence(model, x, sf.Square(model(x).detach() + 1e-9))
    assert proved.proved
    assert "Proved" in Page(render_report(proved)).text
    assert "hypothes" not in Page(proved.to_html()).text.lower() or proved.hypotheses


def test_a_page_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    assert write_report(path, hand_made(("a",)), title="first") == path
    before = path.read_bytes()
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_report(path, hand_made(("b",)))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("subject", [[], {}, 3, {"a": 1}, sf.CertifiedDescent(nn.Linear(2, 1), sf.Square())])
def test_what_cannot_be_shown_is_refused(subject: object) -> None:
    with pytest.raises(SurefootError):
        render_report(subject)

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hand_made import HOSTILE, hand_made
from torch import nn

import surefoot as sf
from surefoot.attained import Contradiction
from surefoot.certificate.numbers import count, lower, upper
from surefoot.lower import Estimate, LowerBound
from surefoot.report import ReportError, page, render_report, write_report


class Elements(HTMLParser):
    """All elements of a page with their attributes, the text, and what stands in scripts."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif "style" not in self.open:
            self.text.append(data)


@pytest.fixture(scope="module")
def objective() -> tuple[sf.Certificate, Estimate]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 2)).double()
    x, loss = torch.randn(6, 3).double(), sf.CrossEntropy(torch.tensor([0, 1, 0, 1, 1, 0]))
    certificate = sf.certify(model, x, objective=loss, domain=sf.Ball(0.05))
    attained = (certificate.bound, certificate.lipschitz, certificate.smoothness)
    half = [LowerBound(float(value) / 2) for value in attained]
    return certificate, Estimate(*half, domain=certificate.domain, wrt=certificate.wrt)


def text_of(source: str) -> str:
    return " ".join(" ".join(Elements(source).text).split())


def test_hostile_names_stay_text() -> None:
    def rendered(names: Sequence[str]) -> Elements:
        certificate = hand_made([*names, *(f"{name}.inner" for name in names)], infinite=True)
        return Elements(render_report([(name, certificate) for name in names], title=names[0]))

    elements, harmless = rendered(HOSTILE), rendered("abcde")
    assert {tag for tag, _ in elements.found} == {tag for tag, _ in harmless.found}
    assert len(elements.scripts) == len(harmless.scripts)
    for tag, attributes in elements.found:
        assert not any(name.startswith("on") or name == "style" for name in attributes), (tag, attributes)
    runnable = [text for attributes, text in elements.scripts if attributes.get("type") != "application/json"]
    assert runnable == [page._asset("report.js")]
    for name in HOSTILE:
        assert name in "".join(elements.text)  # shown as it is, and so neither lost nor evaluated


def test_names_in_the_embedded_data_come_back_as_they_were() -> None:
    certificate = hand_made([*HOSTILE, "last"])
    source = render_report([("one", certificate)])
    (data,) = [json.loads(text) for attributes, text in Elements(source).scripts if attributes.get("type")]
    assert [row[0] for row in data["rows"]] == [*HOSTILE, "last"]
    assert data["blocks"] == [f"{row.module} · {row.operation}" for row in certificate.rows]
    assert [box[:2] for box in data["boxes"]] == [[row.module, row.operation] for row in certificate.rows]


def test_nothing_is_loaded_from_anywhere() -> None:
    source = render_report([("a", hand_made(["x", "y"])), ("b", hand_made(["x", "z"]))])
    elements = Elements(source)
    for tag, attributes in elements.found:
        assert "src" not in attributes
        address = attributes.get("href") or "#"
        assert address.startswith(("#", "data:")) or (tag == "a" and address == "https://arxiv.org/abs/2002.09051")
    style = page._asset("report.css")
    assert "url(" not in style
    assert "@import" not in style
    assert "@font-face" not in style


def test_the_policy_allows_this_style_and_this_script_alone() -> None:
    source = render_report([("a", hand_made(["x", "y"]))])
    (policy,) = [a["content"] for tag, a in Elements(source).found if "http-equiv" in a]
    style, script = (
        re.search("<style>(.*?)</style>", source, re.S),
        re.search("<script>(.*?)</script>", source, re.S),
    )
    assert style
    assert script
    for name, content in (("style", style[1]), ("script", script[1])):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}';" in str(policy)
    assert str(policy).startswith("default-src 'none';")
    assert "unsafe" not in str(policy)


def test_the_download_is_the_certificate(objective: tuple[sf.Certificate, Estimate]) -> None:
    certificate, _ = objective
    source = render_report([("../a b", certificate)])
    ((attributes),) = [a for _, a in Elements(source).found if "download" in a]
    assert attributes["download"] == "---a-b.json"
    kind, _, content = str(attributes["href"]).partition(",")
    assert kind == "data:application/json;base64"
    assert json.loads(base64.b64decode(content)) == certificate.to_dict()


def test_an_objective_shows_its_constants_steps_and_bracket(objective: tuple[sf.Certificate, Estimate]) -> None:
    certificate, estimate = objective
    text = text_of(render_report([("small", certificate)], estimates=[estimate]))
    for value in (certificate.bound, certificate.lipschitz, certificate.smoothness):
        assert upper(value) in text
    assert certificate.step_size < certificate.inverse_smoothness
    shown = f"step size {lower(certificate.step_size)} as far as the domain reaches; 1/L is "
    assert shown + lower(certificate.inverse_smoothness) in text
    assert "steps of size 1/L" not in text
    assert "Steps 1/L may leave the ball of radius 0.05 before the gradient is 0.1: a radius of " in text
    assert f"{lower(estimate.smoothness)} ≤ true ≤ {upper(certificate.smoothness)}" in text
    assert "Useful" in text
    assert "real arithmetic" in text


def test_where_it_is_proved_the_number_of_steps_is_shown() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.randn(6, 3).double()
    objective = sf.CrossEntropy(torch.tensor([0, 1, 0, 1, 1, 0]))
    certificate = sf.certify(model, x, objective=objective, domain=sf.ProductBall(1.0))
    text = text_of(render_report([("small", certificate)]))
    assert f"1/L step size {lower(certificate.step_size)}" in text
    for eps in (0.1, 0.01, 0.001):
        assert f"ε = {eps:g} {' '.join(count(certificate.iterations(eps)).split())}" in text


def test_what_is_of_no_use_is_not_green() -> None:
    deep = nn.Sequential(*(nn.Linear(2, 2) for _ in range(60)))
    source = render_report([("deep", sf.certify(deep, torch.ones(1, 2), domain=sf.ProductBall(1e20)))])
    assert '<div class="verdict idle">' in source
    assert "Finite but of no use" in text_of(source)


def test_estimates_by_name_and_those_attached(objective: tuple[sf.Certificate, Estimate]) -> None:
    certificate, estimate = objective
    attached = certificate.with_estimate(estimate)
    for source in (
        render_report([("a", certificate)], estimates={"a": estimate}),
        render_report([("a", attached)]),
    ):
        assert "≤ true ≤" in source
    assert "≤ true ≤" not in render_report([("a", certificate)])


def test_what_does_not_fit_is_refused(objective: tuple[sf.Certificate, Estimate]) -> None:
    certificate, estimate = objective
    with pytest.raises(ReportError, match="none was given"):
        render_report([])
    with pytest.raises(ReportError, match="given for typo"):
        render_report([("a", certificate)], estimates={"typo": estimate})
    with pytest.raises(ReportError, match="2 estimates were given for 1"):
        render_report([("a", certificate)], estimates=[estimate, None])
    above = LowerBound(2 * float(certificate.smoothness))
    with pytest.raises(Contradiction):
        render_report([("a", certificate)], estimates=[Estimate(estimate.bound, estimate.lipschitz, above)])


def test_infinity_is_said_in_words_with_its_reason() -> None:
    certificate = hand_made([f"layer.{k}" for k in range(8)], infinite=True)
    text = text_of(render_report([("kinked", certificate)]))
    assert "Not certified" in text
    assert "relu has a kink: use <b>soft-plus</b>." in text
    assert "steps of size 1/L" not in text


def test_constants_of_the_paper_are_not_called_bounds() -> None:
    with torch.device("meta"):
        model, x = sf.zoo.build("vgg16-smooth"), sf.zoo.example_input("vgg16-smooth", batch=2)
    certificate = sf.certify(model, x, domain=sf.ProductBall(1.0), input_norm=1.0, constants="paper")
    text = text_of(render_report([("printed", certificate)]))
    assert "Not certified" in text
    assert "is at most this" not in text
    assert "ERRATA 2" in text
    assert "Rules that were used" not in text  # those of the certified constants were not


def test_along_a_segment_the_constants_are_those_of_a_direction() -> None:
    model, x, loss = nn.Linear(2, 2).double(), torch.ones(3, 2).double(), sf.CrossEntropy(torch.tensor([0, 1, 1]))
    certificate = sf.certify(model, x, objective=loss, domain=sf.Segment(None, 0.1))
    text = text_of(render_report([("a", certificate)]))
    assert "below a parabola of this curvature" in text
    assert "‖D²F‖ is at most" not in text
    assert "safe step" in text


def test_comparison_has_ratios_to_the_first() -> None:
    models = [nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))]
    x = torch.ones(1, 2)
    certificates = [(f"model {k}", sf.certify(m, x, domain=sf.ProductBall(2.0 - k))) for k, m in enumerate(models)]
    first, second = (float(c.lipschitz) for _, c in certificates)
    text = text_of(render_report(certificates))
    assert "Certificates of model 0 and model 1" in text
    assert f"×{second / first:.3g}" in text


def test_a_file_appears_complete_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = hand_made(["x", "y"])
    target = tmp_path / "out.html"
    assert write_report(target, [("a", certificate)]) == target
    assert target.read_text(encoding="utf-8") == render_report([("a", certificate)])
    before = target.read_bytes()
    with pytest.raises(ReportError):
        write_report(target, [])

    def failing(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", failing)
    with pytest.raises(OSError, match="disk full"):
        write_report(target, [("b", certificate)])
    assert target.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out.html"]


def test_permissions_are_those_of_any_new_file_and_of_the_file_replaced(tmp_path: Path) -> None:
    certificate, plain, report = hand_made(["x", "y"]), tmp_path / "plain", tmp_path / "report.html"
    plain.touch()
    write_report(report, [("a", certificate)])
    assert report.stat().st_mode == plain.stat().st_mode
    report.chmod(0o640)
    write_report(report, [("a", certificate)])
    assert report.stat().st_mode & 0o777 == 0o640


def test_style_script_and_templates_are_in_the_package() -> None:
    names = {entry.name for entry in files("surefoot.report").joinpath("templates").iterdir()}
    assert {
        "report.html.j2",
        "model.html.j2",
        "charts.html.j2",
        "proof.html.j2",
        "report.css",
        "report.js",
    } <= names


def luminance(colour: str) -> float:
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("ground", ["page", "surface", "sunken"])
@pytest.mark.parametrize("ink", ["text", "muted", "accent", "warn"])
def test_contrast_is_that_of_level_aa(theme: int, ground: str, ink: str) -> None:
    """4.5 : 1 as the Web Content Accessibility Guidelines 2.1 define it (success criterion 1.4.3)."""
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", page._asset("report.css"))
    colours = {name: pair[theme] for name, *pair in found}
    grounds = [ground] if ink in ("text", "muted") else [ground, f"{ink}-soft"]
    for behind in grounds:
        light, dark = sorted((luminance(colours[ink]), luminance(colours[behind])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_headings_go_down_one_level_at_a_time() -> None:
    one = hand_made([f"a.{k}" for k in range(5)])
    for certificates in ([("one", one)], [("one", one), ("two", one)]):
        levels = [
            int(tag[1]) for tag, _ in Elements(render_report(certificates)).found if re.fullmatch("h[1-6]", tag)
        ]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after <= before + 1 for before, after in pairwise(levels))


def test_ids_are_unique_and_references_lead_somewhere() -> None:
    one = hand_made([f"a.{k}" for k in range(5)], infinite=True)
    found = Elements(render_report([("one", one), ("two", one)])).found
    ids = [a["id"] for _, a in found if "id" in a]
    assert len(ids) == len(set(ids))
    for _, attributes in found:
        names = " ".join(str(attributes.get(key, "")) for key in ("aria-labelledby", "data-source", "data-for"))
        href = str(attributes.get("href", ""))
        targets = names.split() + ([href[1:]] if href.startswith("#") else [])
        assert set(targets) <= set(ids)

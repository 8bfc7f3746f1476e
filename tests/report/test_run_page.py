"""The page of a training run, and other radii and layers on the page of a certificate."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made import hand_made
from torch import nn

import surefoot as sf
from surefoot.certificate.numbers import upper
from surefoot.report import ReportError, render_report, render_run, what_if, write_run
from surefoot.report.blocks import architecture
from surefoot.report.run import promises
from surefoot.report.variants import normalised


@pytest.fixture(scope="module")
def trained() -> sf.CertifiedDescent:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    optimizer = sf.CertifiedDescent(model, sf.CrossEntropy())
    x = torch.randn(8, 3, dtype=torch.float64)
    for _ in range(12):
        optimizer.step(x, torch.arange(8) % 2)
    return optimizer


def embedded(page: str) -> dict[str, Any]:
    found = re.findall(r'<script type="application/json" id="([^"]*)-data">(.*?)</script>', page, re.S)
    return {name: json.loads(text) for name, text in found}


def number(text: str) -> float:
    return float(text.replace("×10", "e").translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")))


def test_a_run_shows_its_losses_promises_and_bound(trained: sf.CertifiedDescent, tmp_path: Path) -> None:
    page = write_run(tmp_path / "run.html", trained, title="<b>mine</b>").read_text(encoding="utf-8")
    data = embedded(page)
    assert list(data) == ["loss", "promises", "gradient"]
    assert [row[0] for row in data["loss"]["rows"]] == [f"step {k}" for k in range(12)]
    assert [row[2] for row in data["loss"]["rows"]] == [upper(sf.Magnitude.of(r.loss)) for r in trained.history]
    for promised, actual in (map(number, row[2:]) for row in data["promises"]["rows"] if row[3]):
        assert 0 < promised <= actual * (1 + 1e-3)
    stated = trained.stationarity()
    assert stated.bound is not None
    assert upper(sf.Magnitude.of(stated.bound)) in page
    assert "Every promise was kept" in page
    assert "<math" in page
    assert "&lt;b&gt;mine" in page
    assert "<b>mine" not in page


def test_work_is_the_horizontal_axis(trained: sf.CertifiedDescent) -> None:
    work = [3.0 * k**1.5 for k in range(12)]
    data = embedded(render_run(trained, work=work))
    assert data["loss"]["places"] == work
    assert data["loss"]["width"] == work[-1]
    with pytest.raises(ReportError, match="before each of 12 steps, got 3"):
        render_run(trained, work=[1.0, 2.0, 3.0])


def test_reading_the_model_does_not_fill_the_chart(trained: sf.CertifiedDescent) -> None:
    page = render_run(trained, work=[0.0, *(180.0 + 2 * k for k in range(len(trained.history) - 1))])
    assert "Reading the model, once, took 178 more." in page
    assert embedded(page)["loss"]["width"] == 2 * (len(trained.history) - 1)


def test_a_broken_promise_is_said(trained: sf.CertifiedDescent) -> None:
    made, kept = promises(trained)
    assert made == kept > 0
    before = list(trained.history)
    try:
        trained.history[3] = replace(before[3], actual_decrease=-1.0)
        assert promises(trained) == (made, kept - 1)
        assert "A promise was broken" in render_run(trained)
    finally:
        trained.history[:] = before


def test_on_other_data_no_bound_is_shown(trained: sf.CertifiedDescent) -> None:
    before = list(trained.history)
    try:
        trained.history[5:] = [replace(record, data="other") for record in before[5:]]
        page = render_run(trained)
    finally:
        trained.history[:] = before
    assert list(embedded(page)) == ["loss", "promises"]
    assert "No bound on the gradient follows: the steps were taken on different data." in page


def test_without_steps_there_is_no_page(trained: sf.CertifiedDescent) -> None:
    with pytest.raises(ReportError, match="take steps first"):
        render_run(sf.CertifiedDescent(trained.model, trained.objective))


@pytest.fixture(scope="module")
def kinked() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    return model.double(), torch.randn(4, 1, 3, dtype=torch.float64)


def test_other_radii_and_layers_are_certified_and_shown(kinked: tuple[nn.Module, torch.Tensor]) -> None:
    (model, x), ball = kinked, sf.Ball(0.05)
    certificate = sf.certify(model, x, domain=ball)
    others = what_if(model, x, certificate, domain=ball)
    radii = [radius for radius, _ in others.radii]
    assert radii == sorted(radii)
    assert dict(others.radii)[0.05] is certificate
    for radius, each in others.radii[::4]:
        assert each.lipschitz == sf.certify(model, x, domain=sf.Ball(radius)).lipschitz
    assert [name for name, _ in others.variants] == [
        "half the radius",
        "smooth activations",
        "layer normalisation",
    ]
    soft = dict(others.variants)["smooth activations"]
    assert soft.smoothness == sf.certify(sf.smooth(model), x, domain=ball).smoothness
    assert soft.smoothness.is_finite
    page = render_report([("net", certificate)], what_if={"net": others})
    shown = embedded(page)["model-1"]["radii"]
    assert [row[1] for row in shown["rows"]] == [upper(each.smoothness) for _, each in others.radii]
    assert shown["rows"][shown["at"]][0] == "0.05"
    for name, each in others.variants:
        assert f'<th scope="row">{name}</th>' in page
        assert upper(each.lipschitz) in page
    assert "what-if" not in render_report([("net", certificate)])


def test_the_normalised_copy_is_another_model_with_the_same_weights(
    kinked: tuple[nn.Module, torch.Tensor],
) -> None:
    model, _ = kinked
    copy = normalised(model)
    assert [type(part[1]) for part in copy if isinstance(part, nn.Sequential)] == [nn.GroupNorm, nn.LayerNorm]
    for mine, theirs in zip(model.parameters(), copy.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine is not theirs
    assert type(normalised(copy)[0][0]) is nn.Conv1d  # normalised already: once is enough


def test_the_numbers_say_where_they_hold() -> None:
    model, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), torch.eye(2)
    near = render_report(
        [("a", sf.certify(model, x, objective=sf.Square(torch.ones(2, 1)), domain=sf.Ball(0.25)))]
    )
    for claim in ("‖F‖ is at most this", "‖DF‖ is at most this", "‖D²F‖ is at most this", "of this matrix"):
        assert re.search(re.escape(claim) + ",? within 0.25 of the weights", near)
    each = sf.ProductBall(0.5, center="present")
    assert "with each block within 0.5 of the weights" in render_report([("a", sf.certify(model, x, domain=each))])
    far = render_report([("a", sf.certify(model, x, domain=sf.ProductBall(2.0)))])
    assert "‖f‖ is at most this, on the domain (each block within 2 of the origin)" in far


def test_boxes_are_as_wide_as_shares_and_inside_of_their_modules() -> None:
    paths = ["a.x", "a.y.u", "a.y.v", "b", "c"]
    drawing = architecture(hand_made(paths, scalar=True))
    assert drawing is not None
    boxes = {box.facts[0]: box for box in drawing.boxes}
    assert list(boxes) == ["a", "a.x", "a.y", "a.y.u", "a.y.v", "b", "c"]
    for outer, inner in (("a", "a.x"), ("a", "a.y"), ("a.y", "a.y.v")):
        assert boxes[outer].x - 1e-2 <= boxes[inner].x
        assert boxes[inner].x + boxes[inner].width <= boxes[outer].x + boxes[outer].width + 1e-2
        assert boxes[inner].level == boxes[outer].level + 1
    leaves = [boxes[path] for path in paths]
    assert sum(box.width for box in leaves) == pytest.approx(100, abs=0.05)
    shares = [row.share for row in hand_made(paths, scalar=True).rows]
    assert sorted(range(5), key=lambda k: shares[k]) == sorted(range(5), key=lambda k: leaves[k].width)
    even = architecture(hand_made(paths, infinite=True))
    assert even is not None
    assert len({box.width for box in even.boxes if box.facts[0] in paths}) == 1

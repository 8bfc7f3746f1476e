"""The page of a verdict about convergence."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from hand_made import HOSTILE
from torch import nn

import surefoot as sf
from surefoot.report import render_convergence, write_convergence
from surefoot.theorems import Convergence


def verdict(residual: float, **options: object) -> Convergence:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    x = torch.randn(3, 2, dtype=torch.float64)
    return sf.convergence(model, x, sf.Square(model(x).detach() + residual), **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def proved() -> Convergence:
    return verdict(1e-8, method="momentum", per_block=True)


def test_the_page_says_what_the_verdict_says(proved: Convergence, tmp_path: Path) -> None:
    page = write_convergence(tmp_path / "page.html", proved).read_text(encoding="utf-8")
    assert proved.proved
    assert page.count("<tr>") == 2 + len(proved.hypotheses) + len(proved.block_step_sizes or {})
    for hypothesis in proved.hypotheses:
        assert f"<i>{hypothesis.symbol}</i>" in page
    assert ">Proved<" in page
    assert "<em>Proof.</em>" in page
    assert "<math" in page
    (data,) = re.findall(r"data:application/json;base64,([^\"]*)", page)
    assert json.loads(base64.b64decode(data)) == json.loads(proved.to_json())


def test_only_its_style_and_its_script_may_run(proved: Convergence) -> None:
    page = render_convergence(proved)
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src &#39;sha256-{digest}&#39;" in page or f"{tag}-src 'sha256-{digest}'" in page
    assert "http://" not in page


def test_what_is_missing_is_on_the_page_and_not_where_nothing_is(proved: Convergence) -> None:
    far = verdict(5.0)
    page = render_convergence(far)
    assert not far.proved
    assert 'id="missing"' in page
    assert "times smaller" in page
    assert ">Not proved<" in page
    assert 'id="missing"' not in render_convergence(proved)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_title_is_text(proved: Convergence, name: str) -> None:
    page = render_convergence(proved, title=name)
    assert page.count("<script") == render_convergence(proved).count("<script")
    assert page.count("<img") == 0


def test_a_notebook_shows_a_part_of_a_page(proved: Convergence) -> None:
    text = proved._repr_html_()
    assert text == proved.to_html()
    assert text.count("<tr>") == 1 + len(proved.hypotheses)
    assert "<script" not in text
    assert "momentum" in text
    assert "times smaller" in verdict(5.0).to_html()

"""``converge``: a theorem after some steps, or what is missing."""

from __future__ import annotations

import json


def test_a_small_network_is_proved_to_converge(surefoot):
    found = surefoot("converge", "mlp@activation=tanh", "--batch", 4, "--json")
    document = json.loads(found.stdout)
    assert found.exit_code == 0
    assert document["convergence"]["proved"]
    assert document["convergence"]["method"] == "gauss_newton"
    text = surefoot("converge", "mlp@activation=tanh", "--batch", 4).stdout
    assert "converges to an exact solution" in text


def test_without_steps_it_says_what_is_missing(surefoot):
    found = surefoot("converge", "mlp@activation=tanh", "--batch", 6, "--steps", 0)
    assert found.exit_code == 1
    assert "is not proved" in found.stdout
    assert "times smaller" in found.stdout


def test_wrong_options_are_refused(surefoot):
    assert "--method is one of" in surefoot("converge", "--method", "adam").stderr
    assert "--batch is at least 1" in surefoot("converge", "--batch", 0).stderr


def test_a_page_with_the_proof_is_written(surefoot, tmp_path):
    page = tmp_path / "proof.html"
    found = surefoot("converge", "mlp@activation=tanh", "--batch", 4, "--method", "momentum", "--report", page)
    assert found.exit_code == 0
    assert "momentum" in found.stdout
    text = page.read_text(encoding="utf-8")
    assert ">Proved<" in text
    assert "4 samples of digits" in text

"""What is printed fits a narrow screen; reports of runs and of variants; where it is computed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

COMMANDS = (
    "certify mlp@activation=tanh --data digits --batch 8 --objective cross-entropy",
    "certify vit --batch 2",
    "compare vgg16@width=0.0625@image_size=32 vgg16-smooth@width=0.0625@image_size=32 --batch 2 --constants both",
    "train --steps 2 --batch 20",
    "step mlp@activation=tanh@sizes=64,4,10 --batch 4",
    "converge mlp@activation=tanh@sizes=64,4,10 --batch 2 --steps 1",
    "cost mlp --batch 2",
    "rules --search pool",
    "models",
    "doctor",
    "--help",
    "train --help",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_everything_fits_sixty_columns(surefoot, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "60")
    found = surefoot(*command.split())
    assert found.exit_code in (0, 1), found.stderr
    lines = found.stdout.splitlines()
    assert len(lines) > 5
    assert [line for line in lines if len(line) > 60] == []


def test_nothing_is_lost_on_a_narrow_screen(surefoot, monkeypatch):
    wide = surefoot("compare", "mlp", "mlp@activation=tanh").stdout
    monkeypatch.setenv("COLUMNS", "60")
    narrow = surefoot("compare", "mlp", "mlp@activation=tanh").stdout
    assert sorted(wide.split()) != sorted(narrow.split())  # each row has its titles now
    assert set(wide.split()) == set(narrow.split()) | {"model"}


def test_a_document_is_not_wrapped(surefoot, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert "certificate" in json.loads(surefoot("certify", "mlp", "--json").stdout)


@pytest.mark.parametrize("name", ["meta", "nonsense", "cuda:99"])
def test_a_device_that_is_not_there(surefoot, name):
    for command in (("certify", "mlp"), ("train", "--steps", "1")):
        found = surefoot(*command, "--device", name)
        assert found.exit_code == 2
        assert f"--device {name}: " in found.stderr
        assert "Use --device cpu" in found.stderr


def test_a_device_that_is_there(surefoot):
    options = ("certify", "mlp", "--center", "weights", "--batch", "4", "--json")
    assert surefoot(*options).stdout == surefoot(*options, "--device", "cpu").stdout


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("mlp@sizes=64,a", "write sizes as whole numbers with commas between them, such as mlp@sizes=16,32,32,10"),
        ("mlp@sizes=64", "write sizes as whole numbers with commas"),
        ("mlp@sizes=1.5,2", "write sizes as whole numbers with commas"),
        ("mlp@bias=maybe", "write bias as True or False, such as mlp@bias=True"),
        ("vgg16@image_size=big", "write image_size as a whole number, such as vgg16@image_size=224"),
    ],
)
def test_an_option_of_the_wrong_kind_is_answered_with_its_default(surefoot, given, fix):
    found = surefoot("certify", given)
    assert found.exit_code == 2
    assert fix in found.stderr
    assert "instance" not in found.stderr


def test_false_is_false_in_small_letters_too(surefoot):
    counts = [
        json.loads(surefoot("cost", f"mlp@sizes=4,3,2@bias={bias}", "--json").stdout)
        for bias in ("false", "False", "true")
    ]
    assert counts[0] != counts[2]
    assert {**counts[0], "model": ""} == {**counts[1], "model": ""}


def test_a_run_writes_its_report(surefoot, here: Path):
    found = surefoot("train", "--steps", "4", "--report", "run.html")
    assert "the report is in run.html" in found.stderr
    page = Path("run.html").read_text(encoding="utf-8")
    assert "Loss by work" in page
    assert "Every promise was kept" in page
    assert surefoot("train", "--steps", "1", "--report", "run.txt").exit_code == 2


def test_variants_are_in_the_report(surefoot, here: Path):
    assert "--report FILE.html" in surefoot("certify", "mlp", "--what-if").stderr
    mine = (
        "certify",
        "mlp@sizes=4,3,2@activation=relu",
        "--batch",
        "3",
        "--center",
        "weights",
        "--report",
        "a.html",
    )
    assert surefoot(*mine, "--what-if").exit_code == 1  # ReLU
    page = Path("a.html").read_text(encoding="utf-8")
    for name in ("as it is", "half the radius", "smooth activations", "layer normalisation", 'type="range"'):
        assert name in page

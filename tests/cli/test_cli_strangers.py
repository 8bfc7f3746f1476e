"""What strangers give to the command line: data that are none, shapes that do not fit, models that print."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import surefoot as sf
from cli.test_cli_process import run
from surefoot.optim import CertifiedDescent

MORE = """
class Printing(Net):
    def __init__(self):
        super().__init__()
        print("made")

    def forward(self, x):
        print("called")
        return super().forward(x)


class Double(Net):
    def __init__(self):
        super().__init__()
        self.double()


class Pair(Net):
    def forward(self, x, y):
        return super().forward(x) + super().forward(y)


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
"""


@pytest.fixture(autouse=True)
def more(here: Path) -> None:
    """Further models in ``mine``."""
    (here / "mine.py").write_text((here / "mine.py").read_text() + MORE)


def saved(name: str = "data.npz", **changes: np.ndarray) -> str:
    """A file of 8 samples with some of its arrays changed."""
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    np.savez(name, **{"x": x, "y": np.arange(8) % 3, **changes})
    return name


def test_what_a_model_prints_is_not_in_the_result(surefoot):
    found = surefoot("certify", "mine:Printing", "--input", "2,4", "--json")
    assert found.exit_code == 0
    assert json.loads(found.stdout)["certified"] is True
    assert found.stderr.startswith("made\n")
    assert "called" in found.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("certify", "mine:Net", "--input", "2,5"),
        ("certify", "mine:Net", "--input", "2,4", "--input", "2,4"),
        ("certify", "mine:Pair", "--input", "2,4"),
        ("certify", "mine:Net@depth=3", "--input", "2,4"),
        ("certify", "mlp", "--input", "2"),
        ("certify", "mlp", "--input", "2,4", "--input", "2,4"),
        ("certify", "mlp", "--seed", str(10**20)),
        ("certify", "mlp", "--report", "/proc/page.html"),
        ("certify", "mine:Net", "--input", "2,4", "--objective", "kmeans"),
        ("cost", "mine:Net", "--input", "2,5"),
        ("train", "mine:Frozen", "--data", "data.npz"),
        ("train", "mine:Pair", "--data", "data.npz"),
        ("step", "mine:Pair", "--data", "data.npz"),
    ],
)
def test_what_does_not_fit_is_a_matter_of_usage(surefoot, arguments):
    saved()
    found = surefoot(*arguments)
    assert found.exit_code == 2, found.stderr
    assert "error: " in found.stderr
    assert found.stdout == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x": np.zeros((0, 4), np.float32), "y": np.zeros(0, np.int64)}, "holds no number"),
        ({"x": np.full((8, 4), np.nan, np.float32)}, "in 8 of 8 rows, first in row 0"),
        ({"x": np.zeros((8, 4), np.complex64)}, "x is complex"),
        ({"x": np.zeros((8, 5), np.float32)}, "does not take the samples of data.npz, 5:"),
        ({"x": np.zeros((8, 4), np.int64)}, "4 (int64)"),
        ({"x": np.zeros((8, 4), bool)}, "4 (bool)"),
        ({"x": np.zeros(8, np.float32)}, "single numbers"),
    ],
)
@pytest.mark.parametrize("command", ["certify", "train"])
def test_data_that_are_none(surefoot, changes, said, command):
    found = surefoot(command, "mine:Net", "--data", saved(**changes))
    assert found.exit_code == 2, found.stderr
    assert said in found.stderr


def test_one_bad_sample_is_met_even_if_it_would_be_kept_for_testing(surefoot):
    for row in range(8):
        x = np.zeros((8, 4), np.float32)
        x[row, 1] = np.inf
        found = surefoot("train", "mine:Net", "--data", saved(x=x), "--steps", 1)
        assert found.exit_code == 2
        assert f"1 of 8 rows, first in row {row}" in found.stderr


def test_an_empty_file_and_a_negative_class(surefoot):
    Path("empty.pt").touch()
    assert "is empty" in surefoot("train", "mine:Net", "--data", "empty.pt").stderr
    found = surefoot("train", "mine:Net", "--data", saved(y=np.arange(8) - 1), "--objective", "square")
    assert found.exit_code == 2
    assert "-1" in found.stderr


def test_the_random_input_has_the_type_of_the_model(surefoot):
    for more in (("--around-weights", "--radius", 0.1), ("--wrt", "input")):
        assert surefoot("certify", "mine:Double", "--input", "2,4", *more).exit_code == 0


def test_complex_weights_are_not_cut_to_real_ones(surefoot):
    shapes = {"a.weight": (5, 4), "a.bias": (5,), "b.weight": (3, 5), "b.bias": (3,)}
    torch.save({name: torch.zeros(shape, dtype=torch.complex64) for name, shape in shapes.items()}, "w.pt")
    found = surefoot("certify", "mine:Net", "--input", "2,4", "--weights", "w.pt")
    assert found.exit_code == 2
    assert "complex64" in found.stderr


def test_compare_says_which_model_failed(surefoot):
    found = surefoot("compare", "mine:Net", "mine:Singular", "--input", "4,4")
    assert found.exit_code == 0
    assert "no certificate for mine:Singular" in found.stderr
    assert surefoot("compare", "mine:Singular", "--input", "4,4").exit_code == 3


def test_reconstructions_are_trained(surefoot):
    arguments = ("mlp@sizes=4,3,4", "--data", saved(), "--objective", "reconstruction")
    found = surefoot("train", *arguments, "--steps", 1, "--test", 0, "--json")
    assert found.exit_code == 0, found.stderr
    assert surefoot("certify", *arguments).exit_code == 0


def test_a_model_exported_for_one_number_of_samples(surefoot):
    torch.export.save(torch.export.export(nn.Linear(4, 3), (torch.zeros(8, 4),)), "fixed.pt2")
    assert surefoot("certify", "fixed.pt2", "--data", saved(), "--objective", "cross-entropy").exit_code == 0
    assert surefoot("certify", "fixed.pt2", "--batch", 5).exit_code == 2
    found = surefoot("train", "fixed.pt2", "--data", "data.npz", "--steps", 1)
    assert found.exit_code == 2
    assert "6 samples at once" in found.stderr


def test_a_checkpoint_of_a_model_that_was_changed(surefoot):
    arguments = ("train", "mine:Net", "--data", saved(), "--checkpoint", "run.pt")
    assert surefoot(*arguments, "--steps", 1).exit_code == 0
    content = torch.load("run.pt", weights_only=True)
    content["model"]["a.bias"] = torch.zeros(7)
    torch.save(content, "run.pt")
    found = surefoot(*arguments, "--steps", 2)
    assert found.exit_code == 2
    assert "does not fit the model" in found.stderr


def test_a_json_document_is_whole_where_a_terminal_has_no_unicode():
    found = run("certify", "mlp", "--batch", "2", "--json", PYTHONIOENCODING="ascii")
    content = json.loads(found.stdout)
    assert content["input"] == "2×16"
    assert sf.Certificate.from_dict(content["certificate"]).smoothness.is_finite


def test_numbers_that_json_has_not_are_null(surefoot):
    found = surefoot("step", "mine:Net", "--data", saved(), "--kappa", 1e-300, "--json")
    assert found.exit_code == 0
    assert len(json.loads(found.stdout)["steps"]) == 4


def test_a_step_that_is_interrupted_half_way_leaves_nothing_behind(surefoot, monkeypatch):
    arguments = ("train", "mine:Net", "--data", saved(), "--steps", 6, "--json")
    whole = surefoot(*arguments)
    complete, calls = CertifiedDescent._append, iter(range(100))

    def interrupted(self, *record):
        if next(calls) == 3:
            raise KeyboardInterrupt
        complete(self, *record)

    monkeypatch.setattr(CertifiedDescent, "_append", interrupted)
    assert surefoot(*arguments, "--checkpoint", "run.pt").exit_code == 130
    monkeypatch.setattr(CertifiedDescent, "_append", complete)
    resumed = surefoot(*arguments, "--checkpoint", "run.pt")
    assert resumed.exit_code == 0, resumed.stderr
    found, expected = json.loads(resumed.stdout), json.loads(whole.stdout)
    for key in (
        "promised_decrease",
        "proved_gradient",
    ):  # what is proved of round-off depends on what was asked before
        assert found.pop(key) == pytest.approx(expected.pop(key), rel=1e-10)
    assert found == expected


@pytest.mark.parametrize(
    "arguments",
    [("certify", "vgg16", "--batch", 10**21), ("certify", "mlp@sizes=4,100000000000000000000000,3"),
     ("train", "mlp@sizes=64,100000000000000000,10", "--steps", 1), ("certify", "mlp@sizes=" + "-" * 20000 + "1")],
)  # fmt: skip
def test_absurd_sizes_and_depths_are_refused_in_words(surefoot, arguments):
    found = surefoot(*arguments)
    assert found.exit_code == 2
    assert "sizes" in found.stderr

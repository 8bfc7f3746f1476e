"""``train`` and ``converge``: promises, files, what is refused."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import surefoot as sf
from cli.conftest import data
from surefoot.errors import SurefootError

MODEL = "mlp@sizes=4,6,3@activation=tanh"


def run(surefoot, *arguments):
    result = surefoot("train", MODEL, "--data", "points.npz", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_training_is_that_of_the_library(surefoot, folder):
    document = run(surefoot, "--steps", 6, "--seed", 2, "--test", 0)
    torch.manual_seed(2)
    model = sf.zoo.mlp((4, 6, 3), "tanh").double()
    with np.load("points.npz") as file:
        x, y = torch.from_numpy(file["x"]).double(), torch.from_numpy(file["y"])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    optimizer = sf.CertifiedDescent(model, sf.CrossEntropy())
    losses = [optimizer.step(x[order], y[order]) for _ in range(6)]
    assert [step["loss"] for step in document["steps"]] == losses
    assert document["last_loss"] == optimizer.value(x[order], y[order]) < losses[0]
    assert document["proved_steps"] == 6


def test_mini_batches_go_through_all_samples(surefoot, folder):
    document = run(surefoot, "--steps", 12, "--batch", 7)
    assert document["proved_steps"] == 12
    assert document["last_loss"] < document["steps"][0]["loss"]


def test_an_optimizer_that_only_measures_proves_nothing_and_says_so(surefoot, folder):
    result = surefoot("train", MODEL, "--data", "points.npz", "--optimizer", "gauss-newton", "--steps", 2)
    proved = " 0 proved" not in result.stdout
    assert result.exit_code == (0 if proved else 1)
    assert proved or "nothing was proved" in result.stderr


def test_saved_weights_are_the_trained_ones_and_can_be_loaded(surefoot, folder):
    document = run(surefoot, "--steps", 4, "--save", "net.safetensors", "--test", 0)
    assert set(load_file("net.safetensors")) == set(sf.zoo.mlp((4, 6, 3)).state_dict())
    again = run(surefoot, "--steps", 1, "--weights", "net.safetensors", "--test", 0)
    assert again["steps"][0]["loss"] == pytest.approx(document["last_loss"], rel=1e-6)  # weights are single here
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt, 130), (SurefootError("nothing can be proved"), 2)])
def test_a_run_that_stops_early_keeps_what_it_has(surefoot, folder, monkeypatch, stop, code):
    steps, step = iter(range(10)), sf.CertifiedDescent.step

    def stopped(self, *arguments):
        if next(steps) == 3:
            raise stop
        return step(self, *arguments)

    monkeypatch.setattr(sf.CertifiedDescent, "step", stopped)
    files = ("--save", "net.pt", "--report", "run.html")
    result = surefoot("train", MODEL, "--data", "points.npz", "--steps", 9, *files)
    assert result.exit_code == code
    assert result.stdout == ""
    saved = torch.load("net.pt", weights_only=True)
    assert "Steps" in Path("run.html").read_text()
    monkeypatch.setattr(sf.CertifiedDescent, "step", step)
    run(surefoot, "--steps", 3, "--save", "three.pt")
    other = torch.load("three.pt", weights_only=True)
    assert all(torch.equal(value, other[name]) for name, value in saved.items())


def test_nothing_is_left_behind_when_writing_fails(surefoot, folder, monkeypatch):
    (folder / "net.pt").write_bytes(b"precious")

    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(torch, "save", fail)
    result = surefoot("train", MODEL, "--data", "points.npz", "--steps", 1, "--save", "net.pt")
    assert result.exit_code == 2
    assert "--save net.pt could not be written: the disk is full. Make room" in result.stderr
    assert (folder / "net.pt").read_bytes() == b"precious"
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == ["mine.py", "net.pt", "points.npz"]


def test_the_table_and_what_is_proved(surefoot, folder):
    result = surefoot("train", MODEL, "--data", "points.npz", "--steps", 3)
    assert "in 3 steps, 3 proved" in result.stdout
    assert "nothing is proved about this" in result.stdout
    square = surefoot("train", MODEL, "--data", "points.npz", "--steps", 1, "--objective", "square")
    assert "one-hot" in square.stderr
    autoencoder = ("train", "mlp@sizes=4,3,4", "--data", "points.npz", "--objective", "reconstruction")
    assert surefoot(*autoencoder, "--steps", 1).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", MODEL, "--save", "absent/net.pt"], "no folder"),
        (["train", MODEL, "--save", "net.onnx"], ".safetensors or .pt"),
        (["train", MODEL, "--steps", "-1"], "--steps"),
        (["train", MODEL, "--test", "1"], "--test"),
        (["train", "mlp", "--objective", "hinged"], "cross-entropy"),
        (["train", "mine.py:Frozen", "--data", "points.npz"], "nothing to train"),
        (["converge", "--method", "adam"], "--method is one of"),
        (["converge", "--batch", "0"], "--batch is at least 1"),
    ],
)
def test_what_cannot_be_run_is_said_first(surefoot, folder, arguments, says):
    result = surefoot(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x": np.zeros((0, 4), np.float32), "y": np.zeros(0, np.int64)}, "holds no number"),
        ({"x": np.full((40, 4), np.nan, np.float32)}, "in 40 of 40 rows, first in row 0"),
        ({"x": np.zeros((40, 4), np.complex64)}, "x is complex"),
        ({"x": np.zeros((40, 5), np.float32)}, "does not take the samples of changed.npz, 5 "),
        ({"x": np.zeros((40, 4), np.int64)}, "4 (torch.int64)"),
        ({"x": np.zeros(40, np.float32)}, "single numbers"),
    ],
)
@pytest.mark.parametrize("command", ["certify", "train"])
def test_data_that_are_none(surefoot, folder, changes, said, command):
    result = surefoot(command, "mine.py:Net", "--data", data("changed.npz", **changes))
    assert result.exit_code == 2, result.stderr
    assert said in result.stderr


class Attack:
    """Unpickling it creates the file ``owned`` in the present folder."""

    def __reduce__(self):
        return os.system, ("touch owned",)


def test_files_that_would_run_code_are_refused(surefoot, folder):
    torch.save({"0.weight": Attack()}, "weights.pt")
    torch.save({"x": torch.ones(3, 2), "y": Attack()}, "data.pt")
    Path("plain.pt").write_bytes(pickle.dumps(Attack()))
    for arguments in (["--weights", "weights.pt"], ["--weights", "plain.pt"], ["--data", "data.pt"]):
        result = surefoot("certify", "mlp", *arguments)
        assert result.exit_code == 2
        assert "pickle" in result.stderr
    assert not Path("owned").exists()


def test_a_small_network_is_proved_to_converge(surefoot, tmp_path):
    page = tmp_path / "proof.html"
    result = surefoot("converge", "mlp@activation=tanh", "--batch", 4, "--json", "--report", page)
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert document["convergence"]["proved"]
    assert document["convergence"]["method"] == "gauss_newton"
    assert ">Proved<" in page.read_text(encoding="utf-8")
    assert "4 samples of digits" in page.read_text(encoding="utf-8")
    assert "converges to an exact solution" in surefoot("converge", "--batch", 4).stdout


def test_without_steps_it_says_what_is_missing(surefoot):
    result = surefoot("converge", "mlp@activation=tanh", "--batch", 6, "--steps", 0)
    assert result.exit_code == 1
    assert "is not proved" in result.stdout

"""``surefoot train`` and ``step``: promises, files, resuming."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import surefoot as sf
from surefoot.errors import SurefootError
from surefoot.optim import CertifiedDescent

MODEL = "mlp@sizes=4,6,3@activation=tanh"


@pytest.fixture
def data(here: Path) -> str:
    """Three classes of points in a file."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((40, 4)).astype(np.float32)
    np.savez(here / "points.npz", x=x, y=np.argmax(x[:, :3], axis=1))
    return "points.npz"


def run(surefoot, *arguments, code=0):
    found = surefoot("train", MODEL, *arguments, "--json")
    assert found.exit_code == code, found.stderr
    return json.loads(found.stdout)


def test_training_is_that_of_the_library(surefoot, data):
    document = run(surefoot, "--data", data, "--steps", 6, "--seed", 2, "--test", 0)
    torch.manual_seed(2)
    model = sf.zoo.mlp((4, 6, 3), "tanh").double()
    with np.load(data) as file:
        held = dict(file)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    x, y = torch.from_numpy(held["x"]).double()[order], torch.from_numpy(held["y"])[order]
    optimizer = CertifiedDescent(model, sf.CrossEntropy())
    assert document["losses"] == [optimizer.step(x, y) for _ in range(6)]
    assert document["last_loss"] == optimizer.value(x, y) < document["first_loss"]
    assert (document["promises"], document["promises_kept"]) == (6, 6)


@pytest.mark.parametrize("batch", [[], ["--batch", 7]])
@pytest.mark.parametrize("optimizer", ["certified", "gauss-newton"])
def test_a_resumed_run_is_the_uninterrupted_one(surefoot, data, batch, optimizer):
    arguments = ["--data", data, "--optimizer", optimizer, *batch]
    code = 0 if optimizer == "certified" else 1  # nothing is proved of the others
    whole = run(surefoot, *arguments, "--steps", 8, "--save", "whole.pt", code=code)
    run(surefoot, *arguments, "--steps", 5, "--checkpoint", "run.pt", code=code)
    resumed = run(surefoot, *arguments, "--steps", 8, "--checkpoint", "run.pt", "--save", "resumed.pt", code=code)
    assert resumed["losses"] == whole["losses"]
    saved = [torch.load(name, weights_only=True) for name in ("whole.pt", "resumed.pt")]
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


def test_a_checkpoint_of_another_run_is_refused(surefoot, data):
    run(surefoot, "--data", data, "--steps", 1, "--checkpoint", "run.pt")
    found = surefoot("train", MODEL, "--data", data, "--steps", 2, "--checkpoint", "run.pt", "--seed", 5)
    assert found.exit_code == 2
    assert "seed was 0, not 5" in found.stderr


def test_an_interrupted_run_keeps_what_it_has(surefoot, data, monkeypatch):
    steps = iter(range(10))
    step = CertifiedDescent.step

    def interrupted(self, x, y):
        if next(steps) == 3:
            raise KeyboardInterrupt
        return step(self, x, y)

    monkeypatch.setattr(CertifiedDescent, "step", interrupted)
    files = ("--checkpoint", "run.pt", "--save", "net.pt", "--log", "run.jsonl")
    found = surefoot("train", MODEL, "--data", data, "--steps", 9, *files)
    assert found.exit_code == 130
    assert set(torch.load("net.pt", weights_only=True)) == set(sf.zoo.mlp((4, 6, 3)).state_dict())
    assert [json.loads(line)["step"] for line in Path("run.jsonl").read_text().splitlines()] == [0, 1, 2]
    assert found.stdout == ""
    assert "after 3 steps" in found.stderr
    monkeypatch.setattr(CertifiedDescent, "step", step)
    whole = run(surefoot, "--data", data, "--steps", 5)
    assert run(surefoot, "--data", data, "--steps", 5, "--checkpoint", "run.pt")["losses"] == whole["losses"]


def test_saved_weights_are_the_trained_ones_and_can_be_loaded(surefoot, data, here):
    document = run(surefoot, "--data", data, "--steps", 4, "--save", "net.safetensors", "--test", 0, "--single")
    assert set(load_file("net.safetensors")) == set(sf.zoo.mlp((4, 6, 3)).state_dict())
    again = run(surefoot, "--data", data, "--steps", 1, "--weights", "net.safetensors", "--test", 0, "--single")
    # in single precision if that decided, in double if not
    assert again["first_loss"] == pytest.approx(document["last_loss"], rel=1e-6)
    assert sorted(path.name for path in here.glob("*.safetensors")) == ["net.safetensors"]
    assert not [path for path in here.iterdir() if path.name.startswith(".")]


def test_nothing_is_left_behind_when_writing_fails(surefoot, data, here, monkeypatch):
    (here / "net.pt").write_bytes(b"precious")

    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(torch, "save", fail)
    found = surefoot("train", MODEL, "--data", data, "--steps", 1, "--save", "net.pt")
    assert found.exit_code == 2
    assert "--save net.pt could not be written: the disk is full. Make room" in found.stderr
    assert (here / "net.pt").read_bytes() == b"precious"
    assert sorted(path.name for path in here.iterdir() if path.is_file()) == ["mine.py", "net.pt", "points.npz"]


def test_a_checkpoint_that_cannot_be_written_loses_no_weights(surefoot, data, here, monkeypatch):
    run(surefoot, "--data", data, "--steps", 1, "--checkpoint", "run.pt")
    before = (here / "run.pt").read_bytes()

    def fail(*_):
        raise RuntimeError("unexpected pos 576 vs 534")  # what torch says of a full disk

    monkeypatch.setattr(torch, "save", fail)
    files = ("--checkpoint", "run.pt", "--every", 2, "--save", "net.safetensors")
    found = surefoot("train", MODEL, "--data", data, "--steps", 9, *files)
    assert found.exit_code == 2
    assert "--checkpoint run.pt could not be written: unexpected pos" in found.stderr
    assert (here / "run.pt").read_bytes() == before
    assert set(load_file("net.safetensors")) == set(sf.zoo.mlp((4, 6, 3)).state_dict())
    assert not [path for path in here.iterdir() if path.name.startswith(".")]


def test_a_step_that_is_refused_loses_no_weights(surefoot, data, monkeypatch):
    steps, step = iter(range(10)), CertifiedDescent.step

    def refused(self, x, y):
        if next(steps) == 2:
            raise SurefootError("nothing can be proved")
        return step(self, x, y)

    monkeypatch.setattr(CertifiedDescent, "step", refused)
    found = surefoot("train", MODEL, "--data", data, "--steps", 9, "--save", "net.safetensors")
    assert found.exit_code == 2
    assert "nothing can be proved" in found.stderr
    after = load_file("net.safetensors")
    monkeypatch.setattr(CertifiedDescent, "step", step)
    run(surefoot, "--data", data, "--steps", 2, "--save", "net.safetensors")
    assert all(torch.equal(after[name], value) for name, value in load_file("net.safetensors").items())


def test_the_table_and_what_is_proved(surefoot, data):
    found = surefoot("train", MODEL, "--data", data, "--steps", 3)
    assert "promises   3 of 3 kept" in found.stdout
    assert "Every one of the 3 steps" in found.stdout
    measured = surefoot("train", MODEL, "--data", data, "--steps", 2, "--optimizer", "newton")
    assert "--damping certified" in measured.stdout
    proved = run(surefoot, "--data", data, "--steps", 3, "--optimizer", "newton", "--damping", "certified")
    assert proved["promises_kept"] == proved["promises"] == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--save", "absent/net.pt"], "no folder"),
        (["--save", "net.onnx"], ".safetensors or .pt"),
        (["--steps", "-1"], "--steps"),
        (["--test", "1"], "--test"),
        (["--objective", "hinged"], "cross-entropy"),
    ],
)
def test_what_cannot_be_trained_is_said_first(surefoot, data, arguments, says):
    found = surefoot("train", MODEL, "--data", data, *arguments)
    assert found.exit_code == 2
    assert says in found.stderr


def test_a_step_of_each_kind_gains_what_it_says(surefoot, data):
    found = surefoot("step", MODEL, "--data", data, "--batch", 40, "--kappa", 0.5, "--json")
    assert found.exit_code == 0, found.stderr
    document = json.loads(found.stdout)
    steps = {step["name"]: step for step in document["steps"]}
    torch.manual_seed(0)
    model = sf.zoo.mlp((4, 6, 3), "tanh").double()
    with np.load(data) as file:
        held = dict(file)
    x, y = torch.from_numpy(held["x"]).double(), torch.from_numpy(held["y"])
    parameters = list(model.parameters())
    loss = nn.functional.cross_entropy(model(x), y)
    gradient = torch.autograd.grad(loss, parameters)
    loss = loss.detach()
    with torch.no_grad():
        for parameter, slope in zip(parameters, gradient, strict=True):
            parameter -= slope / steps["gradient"]["kappa"]
        after = nn.functional.cross_entropy(model(x), y)
    assert document["loss"] == pytest.approx(float(loss), rel=1e-12)
    assert steps["gradient"]["decrease"] == pytest.approx(float(loss - after), rel=1e-9)
    assert steps["gradient"]["counted"] == steps["gradient"]["at_worst"] == 1
    dual, gram = steps["Gauss-Newton, dual"], steps["Gauss-Newton, Gram"]
    assert dual["decrease"] == pytest.approx(gram["decrease"], rel=1e-6)
    assert 0 < dual["counted"] <= dual["at_worst"]
    assert document["recommended"] in steps
    advice = next(
        line for line in surefoot("step", MODEL, "--data", data).stdout.splitlines() if "To go on" in line
    )
    assert surefoot(*advice.split("surefoot ", 1)[1].split(), "--steps", 1).exit_code == 0

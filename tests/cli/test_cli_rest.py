"""``cost``, ``rules``, ``models``, ``doctor``, the help, and data sets."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import surefoot as sf
from surefoot.certificate.numbers import down
from surefoot.cli import catalogue
from surefoot.cli.certifying import ratio
from surefoot.cli.commands import app
from surefoot.data import DataError, load
from surefoot.magnitude import Magnitude
from surefoot.operations import rules


def test_cost_is_that_of_the_library(surefoot):
    found = surefoot("cost", "vgg16@width=0.0625@image_size=32", "--batch", 3, "--json")
    with torch.device("meta"):
        expected = sf.cost(sf.zoo.vgg16(width=0.0625, image_size=32), torch.empty(3, 3, 32, 32))
    assert json.loads(found.stdout)["cost"] == json.loads(json.dumps(expected.to_dict()))
    assert surefoot("cost", "mlp", "--batch", 3).stdout.endswith(
        str(sf.cost(sf.zoo.mlp(), torch.ones(3, 16))) + "\n"
    )


def test_rules_lists_the_registry(surefoot):
    entries = json.loads(surefoot("rules", "--json").stdout)
    assert {entry["operation"] for entry in entries} == set(rules())
    assert all(entry["claim"] and "`" not in entry["claim"] and "\n" not in entry["claim"] for entry in entries)
    found = surefoot("rules", "--search", "POOL")
    assert "aten.avg_pool2d" in found.stdout
    assert "aten.tanh" not in found.stdout
    nothing = surefoot("rules", "--search", "quantum")
    assert nothing.stdout == ""
    assert "quantum" in nothing.stderr


def test_a_new_process_knows_all_rules_and_own_rules_replace_them():
    code = """
import surefoot as sf, torch
from surefoot.magnitude import Magnitude
from surefoot.operations.common import affine
assert "aten.linear" in sf.operations.rules()
sf.register_rule("aten.avg_pool1d")(lambda call: affine(call, {"self": Magnitude.of(100.0)}))
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.AvgPool1d(2))
print(float(sf.certify(model, torch.ones(2, 4), domain=sf.ProductBall(1.0)).lipschitz) >= 100)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "True\n"


def test_a_damaged_file_is_called_so_and_no_general_loss_is_offered(surefoot, tmp_path):
    whole, cut = tmp_path / "whole.pt", tmp_path / "cut.pt"
    torch.save({"x": torch.ones(4, 16), "y": torch.arange(4)}, whole)
    cut.write_bytes(whole.read_bytes()[:500])
    assert "it is damaged, or no file of torch.save" in surefoot("certify", "mlp", "--data", cut).stderr
    found = surefoot("certify", "mlp", "--data", "digits", "--objective", "loss")
    assert found.exit_code == 2
    assert "there is no objective 'loss'" in found.stderr


def test_models_lists_the_zoo(surefoot):
    entries = json.loads(surefoot("models", "--json").stdout)
    assert tuple(entry["name"] for entry in entries) == sf.zoo.names()
    assert "pooling=average" in surefoot("models", "--search", "vgg16-smooth").stdout


def test_doctor_is_well(surefoot):
    found = surefoot("doctor", "--json")
    assert found.exit_code == 0
    document = json.loads(found.stdout)
    assert document["needed"]["torch"] == torch.__version__
    assert document["check"]["passed"]


def test_doctor_says_what_is_missing_and_what_is_wrong(surefoot, monkeypatch):
    version = catalogue.version
    monkeypatch.setattr(
        catalogue, "_version", lambda name: None if name in ("mlxtend", "pandas") else version(name)
    )
    monkeypatch.setattr(sf, "certify", lambda *_, **__: 1 / 0)
    found = surefoot("doctor")
    assert found.exit_code == 1
    assert re.search(r"pip install (mlxtend pandas|pandas mlxtend)\n", found.stdout)
    assert "FAILED: ZeroDivisionError" in found.stdout


def test_every_command_explains_itself_with_an_example(surefoot):
    names = [command.callback.__name__ for command in app.registered_commands]
    assert names == ["certify", "compare", "train", "step", "converge", "cost", "rules", "models", "doctor"]
    for name in names:
        found = surefoot(name, "--help")
        assert found.exit_code == 0
        assert "Example" in found.stdout
        assert f"surefoot {name}" in found.stdout.split("Example", 1)[1]
    assert surefoot("--version").stdout == f"surefoot {sf.__version__}\n"


def test_ratios_of_numbers_beyond_a_double():
    huge, one, infinite = Magnitude.of(10.0) ** 1000, Magnitude.of(1.0), Magnitude.infinity()
    assert ratio(huge, [infinite, one, huge]) == "1.0e+1000"
    assert ratio(one, [huge, one]) == "1.0e-1000"
    assert ratio(infinite, [infinite, one]) == "–"
    assert ratio(one, [infinite]) == "–"
    assert ratio(Magnitude.zero(), [one]) == "0"


def test_a_printed_step_is_never_longer():
    for step in (0.19999999, 1 / 3, 5e-324, 1.0, 9.9999e300):
        assert 0 <= float(down(step)) <= step
    assert down(0.12349999) == "1.234e-01"


@pytest.mark.parametrize(
    ("name", "count", "side"),
    [("digits", 1797, 8), pytest.param("mnist-5k", 5000, 28, marks=pytest.mark.slow)],
)
def test_digits(name, count, side):
    data = load(name)
    assert data.x.shape == (count, 1, side, side)
    assert (float(data.x.min()), float(data.x.max())) == (0.0, 1.0)
    assert data.classes == 10
    train, test = data.split(0.75, seed=1)
    assert len(train) + len(test) == count
    assert torch.equal(load(name).split(0.75, seed=1)[1].x, test.x)
    assert not torch.equal(data.split(0.75, seed=2)[1].x, test.x)


def test_tensors_of_one_s_own(tmp_path):
    x, y = torch.randn(6, 3), torch.arange(6) % 2
    torch.save((x, y), tmp_path / "pair.pt")
    torch.save({"x": x, "y": y}, tmp_path / "named.pth")
    np.savez(tmp_path / "named.npz", x=x.numpy(), y=y.numpy())
    save_file({"x": x, "y": y}, tmp_path / "named.safetensors")
    for name in ("pair.pt", "named.pth", "named.npz", "named.safetensors"):
        data = load(str(tmp_path / name))
        assert torch.equal(data.x, x)
        assert torch.equal(data.y, y)
        assert data.classes == 2
    torch.save({"x": x, "y": y[:5]}, tmp_path / "short.pt")
    torch.save({"images": x}, tmp_path / "unnamed.pt")
    torch.save("text", tmp_path / "text.pt")
    (tmp_path / "bad.safetensors").write_bytes(b"nonsense")
    for name, says in {
        "short.pt": "one row per sample",
        "unnamed.pt": "'images', but no 'x'",
        "text.pt": "a str without tensors",
        "bad.safetensors": "cannot be read",
        "absent.npz": "no file",
        "table.csv": "no file",
    }.items():
        with pytest.raises(DataError, match=says):
            load(str(tmp_path / name))

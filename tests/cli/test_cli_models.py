"""Models by name, by import, from files; weights; completion."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import surefoot as sf
from surefoot.cli.models import Spec, fitted
from surefoot.cli.zoo_names import complete_model, zoo_names


def test_names_for_completion_are_those_of_the_zoo():
    found = zoo_names()
    assert tuple(found) == sf.zoo.names()
    for name, (about, preset) in found.items():
        entry = sf.zoo.entry(name)
        assert about.startswith(entry.summary.partition(" [")[0].partition("\n")[0])
        assert all(f"{option}={value}" in preset for option, value in entry.preset.items())
    assert [name for name, _ in complete_model("vgg")] == ["vgg16", "vgg16-batchnorm", "vgg16-smooth"]


def test_options_behind_a_name():
    spec = Spec.of("pkg.mod:make@sizes=64,32,10@rate=1e-2@name=tanh@flag=True")
    assert spec.target == "pkg.mod:make"
    assert spec.options == {"sizes": (64, 32, 10), "rate": 0.01, "name": "tanh", "flag": True}


def test_models_are_fitted_to_the_data_but_not_against_the_user():
    mlp, vgg = sf.zoo.entry("mlp"), sf.zoo.entry("vgg16")
    assert fitted(mlp, {}, (1, 8, 8), 7)["sizes"] == (64, 32, 32, 7)
    assert fitted(mlp, {"sizes": (3, 2)}, (1, 8, 8), 7) == {}
    assert fitted(vgg, {"num_classes": 3}, (1, 32, 32), 7) == {"in_channels": 1, "image_size": 32}


def test_a_model_of_one_s_own(surefoot, here):
    given = surefoot("certify", "mine:make@width=2", "--input", "6,4", "--json")
    assert json.loads(given.stdout)["certificate"]["rows"][0]["shape"] == [6, 2]
    paired = surefoot("certify", "mine:pair", "--json")
    assert json.loads(paired.stdout)["input"] == "2×4"
    assert json.loads(paired.stdout)["input_norm"] is None


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_weights_from_a_file(surefoot, here, suffix):
    torch.manual_seed(7)
    model = sf.zoo.mlp((4, 5, 3))
    path = here / f"weights{suffix}"
    if suffix == ".pt":
        torch.save({"state_dict": {f"module.{name}": value for name, value in model.state_dict().items()}}, path)
    else:
        save_file(model.state_dict(), path)
    found = surefoot("certify", "mlp@sizes=4,5,3", "--input", "6,4", "--weights", path, "--json")
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    expected = sf.certify(model, x, domain=sf.Ball(0.1))
    assert json.loads(found.stdout)["certificate"]["smoothness"] == float(expected.smoothness)


def test_weights_that_do_not_fit(surefoot, here):
    state = sf.zoo.mlp((4, 5, 3)).state_dict()
    del state["0.bias"]
    torch.save({**state, "extra": torch.ones(1)}, "weights.pt")
    found = surefoot("certify", "mlp@sizes=4,6,3", "--weights", "weights.pt")
    assert found.exit_code == 2
    for part in ("'0.weight' is 5×4, not 6×4", "'0.bias' is missing", "'extra' is not in the model"):
        assert part in found.stderr


@pytest.fixture
def exported(here):
    """A network with a constant, exported for any number of samples; and the network."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
            self.head = nn.Linear(5, 3)
            self.scale = torch.tensor([1.0, 2.0, 3.0])

        def forward(self, x):
            return self.head(self.body(x)) * self.scale

    model, x = Net(), torch.randn(6, 4)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", max=64)},))
    torch.export.save(program, here / "net.pt2")
    return model, x


def test_an_exported_model(surefoot, exported):
    model, x = exported
    found = surefoot("certify", "net.pt2", "--around-weights", "--radius", 0.2, "--json")
    assert found.exit_code == 0, found.stderr
    certificate = json.loads(found.stdout)["certificate"]
    expected = sf.certify(model, x, domain=sf.Ball(0.2))
    assert certificate["smoothness"] == float(expected.smoothness)
    assert {row["module"] for row in certificate["rows"]} >= {"body.0", "body.1", "head"}
    assert found.stderr == ""


def test_an_exported_model_with_another_batch(surefoot, exported):
    found = surefoot("certify", "net.pt2", "--batch", 9, "--json")
    assert json.loads(found.stdout)["input"] == "9×4"
    shaped = surefoot("certify", "net.pt2", "--input", "3,4", "--json")
    assert json.loads(shaped.stdout)["input_norm"] == 1.0

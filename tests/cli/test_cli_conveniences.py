"""Options from a file, tables as data, Hugging Face configurations, and what is kept when something goes wrong."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pytest
import torch

import surefoot as sf
from surefoot import data as datasets
from surefoot.data import DataError


def test_defaults_come_from_a_file_and_give_way_to_the_command_line(surefoot, here):
    (here / "surefoot.toml").write_text('[certify]\nradius = 0.5\n"input-norm" = 2.0\n')
    found = json.loads(surefoot("--config", "surefoot.toml", "certify", "mlp", "--json").stdout)
    assert found["input_norm"] == 2.0
    assert "within 0.5 " in found["certificate"]["domain"]
    other = surefoot("--config", "surefoot.toml", "certify", "mlp", "--radius", "0.25", "--json")
    assert "within 0.25 " in json.loads(other.stdout)["certificate"]["domain"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[certify]\nradios = 1\n", "certify has no option 'radios'"),
        ("[certfy]\nradius = 1\n", "[certfy] is none of the commands"),
        ("certify", "is not a TOML file"),
    ],
)
def test_a_file_of_options_that_does_not_fit_is_refused(surefoot, here, text, says):
    (here / "wrong.toml").write_text(text)
    found = surefoot("--config", "wrong.toml", "certify", "mlp")
    assert found.exit_code == 2
    assert says in " ".join(found.stderr.replace("│", " ").split())


def test_tables_are_data(here):
    (here / "named.csv").write_text("height,width,kind\n1.5,2,0\n3,4,2\n5,6,1\n")
    read = datasets.load("named.csv")
    assert read.x.tolist() == [[1.5, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert read.y.tolist() == [0, 2, 1]
    np.save("plain.npy", np.array([[1.0, 2.0, 0.5], [3.0, 4.0, 0.25]]))
    real = datasets.load("plain.npy")
    assert real.y.tolist() == [[0.5], [0.25]]
    assert real.y.dtype == real.x.dtype == torch.get_default_dtype()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("one.csv", "1\n2\n", "in the last column y"),
        ("ragged.csv", "1,2\n1,2,3\n", "cannot be read"),
        ("words.csv", "a,b\nc,d\n", "cannot be read"),
        ("nothing.csv", "\n", "has no rows"),
        ("gaps.csv", "1,2\nnan,1\n", "NaN"),
    ],
)
def test_tables_that_are_none_are_refused(here, name, text, says):
    (here / name).write_text(text)
    with pytest.raises(DataError, match=says):
        datasets.load(name)


def test_a_configuration_of_transformers_is_a_model(surefoot, here):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    limits = {"vocab_size": 20, "max_position_embeddings": 16}
    (here / "config.json").write_text(json.dumps({"model_type": "bert", **sizes, **limits}))
    arguments = ("--batch", 2, "--eval", "--center", "weights", "--radius", 1e-3, "--json")
    found = json.loads(surefoot("certify", "hf:.", *arguments).stdout)
    assert found["input"] == "2×16"
    assert found["certified"]
    wider = json.loads(surefoot("certify", "hf:config.json@intermediate_size=16", *arguments).stdout)
    assert wider["certificate"]["lipschitz"] != found["certificate"]["lipschitz"]
    transformers = importlib.import_module("transformers")
    model = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(here))
    torch.save({name: value / 2 for name, value in model.state_dict().items()}, here / "halves.pt")
    given = ("--weights", "halves.pt", "--input", "3,5")
    halves = json.loads(surefoot("certify", "hf:.", *given, *arguments[2:]).stdout)
    assert halves["input"] == "3×5"
    assert halves["certified"]
    missing = surefoot("certify", "hf:nowhere")
    assert missing.exit_code == 2
    assert "config.json" in missing.stderr
    (here / "config.json").write_text('{"model_type": "nosuch"}')
    assert "no configuration of a model" in surefoot("certify", "hf:config.json").stderr


def test_a_model_that_fails_does_not_lose_the_others(surefoot, here):
    found = surefoot("compare", "mlp", "nosuch", "mlp@activation=tanh", "--json", "--report", "page.html")
    assert found.exit_code == 0
    document = json.loads(found.stdout)
    assert [each["model"] for each in document["models"]] == ["mlp", "mlp@activation=tanh"]
    assert "no model 'nosuch'" in document["failed"]["nosuch"]
    assert (here / "page.html").exists()
    none = surefoot("compare", "nosuch", "neither")
    assert none.exit_code == 2
    assert none.stdout == ""


def test_the_report_is_written_before_anything_is_printed(surefoot, here, monkeypatch):
    def closed(text):
        raise BrokenPipeError

    monkeypatch.setattr("surefoot.cli.output.result", closed)
    monkeypatch.setattr("surefoot.cli.guard._silence", lambda: None)
    surefoot("certify", "mlp", "--report", "page.html")
    assert "surefoot" in (here / "page.html").read_text()


def test_losses_of_torch_and_targets_beside_them():
    torch.manual_seed(0)
    model, x, y = torch.nn.Linear(3, 2), torch.randn(5, 3), torch.arange(5) % 2
    ours = sf.certify(model, x, objective=sf.CrossEntropy(y), domain=sf.Ball(0.1))
    assert sf.certify(model, x, objective=torch.nn.CrossEntropyLoss(), y=y, domain=sf.Ball(0.1)) == ours
    assert sf.certify(model, x, objective=sf.CrossEntropy(), y=y, domain=sf.Ball(0.1)) == ours
    values = [sf.evaluate(model, x, torch.nn.CrossEntropyLoss(), y), sf.evaluate(model, x, sf.CrossEntropy(y))]
    assert abs(values[0].value - values[1].value) <= values[0].error + values[1].error
    with pytest.raises(sf.errors.SurefootError, match="no targets"):
        sf.certify(model, x, objective=torch.nn.CrossEntropyLoss())
    with pytest.raises(sf.errors.SurefootError, match="has its targets already"):
        sf.certify(model, x, objective=sf.CrossEntropy(y), y=y)
    with pytest.raises(sf.errors.SurefootError, match=r"such as surefoot\.CrossEntropy\(y\)"):
        sf.certify(model, x, objective=torch.nn.functional.cross_entropy, y=y)
    with pytest.raises(sf.errors.SurefootError, match=r"surefoot\.Ball\(0\.1\)"):
        sf.certify(model, x, domain=0.1)

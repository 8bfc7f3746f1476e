"""``certify`` and ``compare`` say what the library says, and exit as promised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import surefoot as sf
from surefoot.data import digits


def test_the_constants_are_those_of_the_library(surefoot):
    """The default is the paper's setting: blocks within 1 of zero, 128 samples, a batch of norm 1."""
    result = surefoot("certify", "mlp", "--json")
    assert result.exit_code == 0
    assert "shapes are certified" in result.stderr
    with torch.device("meta"):
        model, x = sf.zoo.build("mlp"), sf.zoo.example_input("mlp", batch=128)
    expected = sf.certify(model, x, domain=sf.ProductBall(1.0), input_norm=1.0)
    document = json.loads(result.stdout)
    assert document["certificate"]["smoothness"] == float(expected.smoothness)
    assert document["certificate"]["lipschitz"] == float(expected.lipschitz)
    assert document["certified"] is True
    assert (document["model"], document["input"], document["input_norm"]) == ("mlp", "128×16", 1.0)


def test_a_certificate_of_an_objective_on_data(surefoot):
    result = surefoot(
        "certify", "zoo:mlp@sizes=64,6,10@activation=tanh", "--data", "digits", "--batch", 20, "--seed", 3,
        "--objective", "cross-entropy", "--radius", 0.02, "--json",
    )  # fmt: skip
    assert result.exit_code == 0
    torch.manual_seed(3)
    model = sf.zoo.mlp((64, 6, 10), "tanh")
    chosen = torch.randperm(1797, generator=torch.Generator().manual_seed(3))[:20]
    x, y = digits().x.reshape(-1, 64)[chosen], digits().y[chosen]
    expected = sf.certify(model, x, objective=sf.CrossEntropy(y), domain=sf.Ball(0.02))
    certificate = json.loads(result.stdout)["certificate"]
    assert certificate["smoothness"] == float(expected.smoothness)
    assert certificate["step_size"] == expected.step_size > 0
    assert "as initialised" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "domain"),
    [
        (["--radius", "0.5"], sf.ProductBall(0.5)),
        (["--domain", "ball", "--center", "zero"], sf.Ball(1.0, center="origin")),
        (["--domain", "ball"], sf.Ball(0.1)),
        (["--center", "weights", "--domain", "product"], sf.ProductBall(0.1, center="present")),
        (["--wrt", "input", "--radius", "2"], sf.Ball(2.0)),
    ],
)
def test_every_domain(surefoot, arguments, domain):
    result = surefoot("certify", "mlp@sizes=4,5,3", "--input", "6,4", *arguments, "--json", "-q")
    torch.manual_seed(0)
    around, wrt = domain.center != "origin", "input" if "input" in arguments else "params"
    with torch.device("cpu" if around else "meta"):  # a certificate at zero needs no numbers
        model, x = sf.zoo.mlp((4, 5, 3)), sf.zoo.example_input("mlp", 6, sizes=(4, 5, 3))
    expected = sf.certify(model, x, domain=domain, wrt=wrt, input_norm=None if around else 1.0)
    assert json.loads(result.stdout)["certificate"]["smoothness"] == float(expected.smoothness)
    assert result.stderr == ""


@pytest.mark.parametrize("place", ["mine.py:make@width=2", "mine:make@width=2"])
def test_a_model_of_one_s_own(surefoot, folder, place):
    result = surefoot("certify", place, "--input", "6,4", "--json")
    assert json.loads(result.stdout)["certificate"]["rows"][0]["shape"] == [6, 2]
    for more in (("--center", "weights"), ("--wrt", "input")):  # the random input has the type of the model
        assert surefoot("certify", "mine.py:Double", "--input", "2,4", *more).exit_code == 0


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_weights_from_a_file(surefoot, folder, suffix):
    torch.manual_seed(7)
    model = sf.zoo.mlp((4, 5, 3))
    path = folder / f"weights{suffix}"
    if suffix == ".pt":
        torch.save({"state_dict": {f"module.{name}": value for name, value in model.state_dict().items()}}, path)
    else:
        save_file(model.state_dict(), path)
    result = surefoot("certify", "mlp@sizes=4,5,3", "--input", "6,4", "--weights", path, "--json")
    expected = sf.certify(model, sf.zoo.example_input("mlp", 6, sizes=(4, 5, 3)), domain=sf.Ball(0.1))
    assert json.loads(result.stdout)["certificate"]["smoothness"] == float(expected.smoothness)


def test_exit_codes(surefoot, folder):
    assert surefoot("certify", "mlp", "-q").exit_code == 0
    kink = surefoot("certify", "mlp@activation=relu")
    assert kink.exit_code == 1
    assert "∞" in kink.stdout
    assert surefoot("certify", "mlp@activation=relu", "--smooth").exit_code == 0
    refused = surefoot("certify", "mine.py:Singular", "--input", "4,4")
    assert refused.exit_code == 3
    assert "linalg_svd" in refused.stderr
    assert refused.stdout == ""
    dropping = surefoot("certify", "mine.py:Dropping", "--input", "2,4")
    assert dropping.exit_code == 3
    assert "--eval" in dropping.stderr
    assert surefoot("certify", "mine.py:Dropping", "--input", "2,4", "--eval").exit_code == 0
    broken = surefoot("certify", "mine.py:Broken")
    assert broken.exit_code == 70
    assert "no such wheel" in broken.stderr
    assert "Traceback" not in broken.stderr
    assert "Traceback" in surefoot("certify", "mine.py:Broken", "--debug").stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["vgg17"], "did you mean 'vgg16'"),
        (["mlp@size=3"], "did you mean 'sizes'"),
        (["mlp@sizes"], "@name=value"),
        (["mine.py:make"], "--input"),
        (["mine.py:absent"], "no 'absent'"),
        (["absent:make"], "no module 'absent'"),
        (["absent.py:make"], "no file"),
        (["mine.py:number", "--input", "2,4"], "type int"),
        (["mine.py:Net", "--input", "2,5"], "error: "),
        (["mlp", "--radius", "-1"], "finite number ≥ 0"),
        (["mlp", "--input", "8,b"], "8,3,32,32"),
        (["mlp", "--data", "digets"], "digits, mnist-5k"),
        (["mlp", "--objective", "square"], "--data"),
        (["mlp", "--objective", "hinged", "--data", "digits"], "cross-entropy"),
        (["mlp", "--data", "digits", "--input", "8,16"], "give one of them"),
        (["mlp", "--report", "absent/page.html"], "no folder"),
        (["mlp", "--report", "page.pdf"], "ends in .html"),
        (["mlp", "--weights", "absent.pt"], "no file"),
        (["mlp", "--domain", "cube"], "--domain"),
        (["mlp", "--batch", "0"], "at least 1"),
        (["mlp", "--batch", "4", "--input", "8,16"], "give one of them"),
        (["mlp", "--seed", str(10**20)], "64 bits"),
        (["mlp", "--input-norm", "-1"], "finite number ≥ 0"),
        (["mlp", "--input-norm", "1", "--wrt", "input"], "--radius and --center"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(surefoot, folder, arguments, says):
    result = surefoot("certify", *arguments)
    assert result.exit_code == 2, result.stderr
    assert says in " ".join(result.stderr.replace("│", " ").split())
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("vgg16", "--batch", 10**21),
        ("mlp@sizes=4,100000000000000000000000,3",),
        ("mlp@sizes=" + "-" * 20000 + "1",),
        ("mlp@sizes=64,100000000000000000,10", "--data", "digits"),
    ],
)
def test_absurd_sizes_and_depths_are_refused_in_words(surefoot, arguments):
    result = surefoot("certify", *arguments)
    assert result.exit_code == 2, result.stderr
    assert "sizes" in result.stderr


def test_weights_that_do_not_fit(surefoot, folder):
    state = sf.zoo.mlp((4, 5, 3)).state_dict()
    del state["0.bias"]
    torch.save({**state, "extra": torch.ones(1)}, "weights.pt")
    result = surefoot("certify", "mlp@sizes=4,6,3", "--weights", "weights.pt")
    assert result.exit_code == 2
    for part in ("0.weight", "[5, 4]", "0.bias", "extra"):
        assert part in result.stderr
    whole = sf.zoo.mlp((4, 5, 3)).state_dict()
    torch.save({name: value.to(torch.complex64) for name, value in whole.items()}, "complex.pt")
    result = surefoot("certify", "mlp@sizes=4,5,3", "--weights", "complex.pt")
    assert result.exit_code == 2
    assert "complex64" in result.stderr


def test_compare_is_the_paper_s_application(surefoot):
    names = [f"{name}@width=0.0625@image_size=32" for name in ("vgg16", "vgg16-smooth", "vgg16-batchnorm")]
    with torch.device("meta"):
        model = sf.zoo.build("vgg16-smooth", width=0.0625, image_size=32)
        x = torch.empty(128, 3, 32, 32)
    for constants in ("certified", "paper"):
        result = surefoot("compare", *names, "--constants", constants, "--json")
        entries = json.loads(result.stdout)["models"]
        assert [entry["model"] for entry in entries] == names
        proved = [False, True, True] if constants == "certified" else [False] * 3
        assert [entry["certified"] for entry in entries] == proved
        assert result.exit_code == (0 if constants == "certified" else 1)
        expected = sf.certify(model, x, domain=sf.ProductBall(1.0), input_norm=1.0, constants=constants)
        assert entries[1]["certificate"]["smoothness"] == float(expected.smoothness)


def test_compare_shows_a_table_with_ratios(surefoot):
    result = surefoot("compare", "mlp@activation=relu", "mlp", "mlp@activation=tanh")
    assert result.exit_code == 0
    relu, softplus, tanh = (line.split() for line in result.stdout.splitlines()[3:6])
    assert relu[5:7] == ["∞", "–"]
    assert float(softplus[6]) == 1
    assert float(tanh[6]) == pytest.approx(float(tanh[5]) / float(softplus[5]), rel=1e-2)
    assert float(tanh[7]) <= 1 / float(tanh[5]) * (1 + 1e-3)
    assert surefoot("compare", "mlp@activation=relu").exit_code == 1


def test_compare_says_which_model_failed(surefoot, folder):
    result = surefoot("compare", "mine.py:Net", "mine.py:Singular", "--input", "4,4")
    assert result.exit_code == 0
    assert "no certificate for mine.py:Singular" in result.stderr
    assert surefoot("compare", "mine.py:Singular", "--input", "4,4").exit_code == 3


def test_a_search_for_lower_bounds(surefoot):
    arguments = ("mlp@sizes=3,4,2", "--input", "2,3", "--estimate", "--radius", "0.5")
    lines = surefoot("compare", *arguments).stdout.splitlines()
    assert lines[2].endswith("lower L")
    upper, lower = lines[3].split()[5], lines[3].split()[-1]
    assert 0 < float(lower) <= float(upper)
    alone = surefoot("certify", *arguments).stdout
    assert f"{lower} ≤ " in alone
    assert f"≤ {upper}" in alone


def test_a_report_is_written(surefoot, folder):
    result = surefoot("compare", "mlp", "mlp@activation=tanh", "--report", "page.html")
    assert result.exit_code == 0
    assert "mlp@activation=tanh" in Path("page.html").read_text()
    assert "page.html" in result.stderr
    assert "page.html" not in result.stdout
    assert not list(folder.glob(".*"))


def test_what_a_model_prints_is_not_in_the_result(surefoot, folder):
    result = surefoot("certify", "mine.py:Printing", "--input", "2,4", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["certified"] is True
    assert result.stderr.startswith("made\n")
    assert "called" in result.stderr

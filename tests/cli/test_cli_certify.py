"""``surefoot certify`` and ``compare`` say what the library says, and exit as promised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import surefoot as sf
from surefoot.data import digits


def test_the_constants_are_those_of_the_library(surefoot):
    """The default is the paper's setting: blocks within 1 of zero, 128 samples, a batch of norm 1."""
    found = surefoot("certify", "mlp", "--json")
    assert found.exit_code == 0
    with torch.device("meta"):
        model, x = sf.zoo.build("mlp"), sf.zoo.example_input("mlp", batch=128)
    expected = sf.certify(model, x, domain=sf.ProductBall(1.0), input_norm=1.0)
    document = json.loads(found.stdout)
    assert document["certificate"]["smoothness"] == float(expected.smoothness)
    assert document["certificate"]["lipschitz"] == float(expected.lipschitz)
    assert document["certified"] is True
    assert (document["model"], document["input"], document["input_norm"]) == ("mlp", "128×16", 1.0)


def test_a_certificate_of_an_objective_on_data(surefoot):
    found = surefoot(
        "certify", "mlp@sizes=64,6,10@activation=tanh", "--data", "digits", "--batch", 20, "--seed", 3,
        "--objective", "cross-entropy", "--radius", 0.02, "--json",
    )  # fmt: skip
    assert found.exit_code == 0
    torch.manual_seed(3)
    model = sf.zoo.mlp((64, 6, 10), "tanh")
    chosen = torch.randperm(1797, generator=torch.Generator().manual_seed(3))[:20]
    data = digits()
    x, y = data.x.reshape(-1, 64)[chosen], data.y[chosen]
    expected = sf.certify(model, x, objective=sf.CrossEntropy(y), domain=sf.Ball(0.02))
    certificate = json.loads(found.stdout)["certificate"]
    assert certificate["smoothness"] == float(expected.smoothness)
    assert certificate["step_size"] == expected.step_size > 0
    assert "as initialised" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "domain"),
    [
        (["--radius", "0.5"], sf.ProductBall(0.5)),
        (["--domain", "ball", "--center", "zero"], sf.Ball(1.0, center="origin")),
        (["--domain", "ball"], sf.Ball(0.1)),
        (["--around-weights", "--domain", "product"], sf.ProductBall(0.1, center="present")),
        (["--wrt", "input", "--radius", "2"], sf.Ball(2.0)),
    ],
)
def test_every_domain(surefoot, arguments, domain):
    found = surefoot("certify", "mlp@sizes=4,5,3", "--input", "6,4", *arguments, "--json", "-q")
    torch.manual_seed(0)
    model, x = sf.zoo.mlp((4, 5, 3)), torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    around = domain.center != "origin"
    expected = sf.certify(
        model, x, domain=domain, wrt="input" if "input" in arguments else "params",
        input_norm=None if around else 1.0,
    )  # fmt: skip
    if not around:  # a search would need numbers; the certificate at zero knows shapes only
        with torch.device("meta"):
            expected = sf.certify(sf.zoo.mlp((4, 5, 3)), torch.empty(6, 4), domain=domain, input_norm=1.0)
    assert json.loads(found.stdout)["certificate"]["smoothness"] == float(expected.smoothness)
    assert found.stderr == ""


def test_exit_codes(surefoot, here):
    assert surefoot("certify", "mlp", "-q").exit_code == 0
    kink = surefoot("certify", "mlp@activation=relu")
    assert kink.exit_code == 1
    assert "∞" in kink.stdout
    assert surefoot("certify", "mlp@activation=relu", "--smooth").exit_code == 0
    refused = surefoot("certify", "mine:Singular", "--input", "4,4")
    assert refused.exit_code == 3
    assert "linalg_svd" in refused.stderr
    assert refused.stdout == ""


def test_dropout_names_the_option_that_helps(surefoot, here):
    refused = surefoot("certify", "mine:Dropping", "--input", "2,4")
    assert refused.exit_code == 3
    assert "--eval" in refused.stderr
    assert surefoot("certify", "mine:Dropping", "--input", "2,4", "--eval").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["vgg17"], "did you mean 'vgg16'"),
        (["mlp@size=3"], "did you mean 'sizes'"),
        (["mlp@sizes"], "@name=value"),
        (["mine:make"], "--input"),
        (["mine:absent"], "no 'absent'"),
        (["absent:make"], "no module 'absent'"),
        (["mine:number", "--input", "2,4"], "type int"),
        (["absent.pt2"], "no file"),
        (["mlp", "--radius", "-1"], "finite number ≥ 0"),
        (["mlp", "--input", "8,b"], "8,3,32,32"),
        (["mlp", "--data", "digets"], "digits, mnist-5k"),
        (["mlp", "--objective", "square"], "--data"),
        (["mlp", "--objective", "hinged", "--data", "digits"], "cross-entropy"),
        (["mlp", "--data", "digits", "--input", "8,16"], "give one of them"),
        (["mlp", "--around-weights", "--center", "zero"], "contradict"),
        (["mlp", "--report", "absent/page.html"], "no folder"),
        (["mlp", "--report", "page.pdf"], "ends in .html"),
        (["mlp", "--weights", "absent.pt"], "no file"),
        (["mlp", "--domain", "cube"], "--domain"),
        (["mlp", "--batch", "0"], "at least 1"),
        (["mlp", "--batch", "4", "--input", "8,16"], "give one of them"),
        (["mlp", "--input-norm", "-1"], "finite number ≥ 0"),
        (["mlp", "--input-norm", "1", "--wrt", "input"], "--radius and --center"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(surefoot, here, arguments, says):
    found = surefoot("certify", *arguments)
    assert found.exit_code == 2
    assert says in " ".join(found.stderr.replace("│", " ").split())
    assert found.stdout == ""
    assert "Traceback" not in found.stderr


def test_a_fault_has_a_traceback_on_request_only(surefoot, here):
    found = surefoot("certify", "mine:Broken")
    assert found.exit_code == 70
    assert "no such wheel" in found.stderr
    assert "Traceback" not in found.stderr
    assert "Traceback" in surefoot("certify", "mine:Broken", "--debug").stderr


def test_the_paper_s_constants_are_not_called_certified(surefoot):
    found = surefoot("certify", "vgg16-smooth@width=0.0625@image_size=32", "--batch", 4, "--constants", "paper")
    assert found.exit_code == 1
    assert "ERRATA" in found.stdout


def test_compare_is_the_paper_s_application(surefoot):
    names = [f"{name}@width=0.0625@image_size=32" for name in ("vgg16", "vgg16-smooth", "vgg16-batchnorm")]
    found = surefoot("compare", *names, "--constants", "both", "--json")
    assert found.exit_code == 0
    entries = json.loads(found.stdout)["models"]
    assert [(e["model"], e["constants"]) for e in entries] == [
        (n, c) for n in names for c in ("certified", "paper")
    ]
    assert [e["certified"] for e in entries] == [False, False, True, False, True, False]
    with torch.device("meta"):
        model = sf.zoo.build("vgg16-smooth", width=0.0625, image_size=32)
        x = torch.empty(128, 3, 32, 32)
    for entry, constants in zip(entries[2:4], ("certified", "paper"), strict=True):
        expected = sf.certify(model, x, domain=sf.ProductBall(1.0), input_norm=1.0, constants=constants)
        assert entry["certificate"]["smoothness"] == float(expected.smoothness)


def test_compare_shows_a_table_with_ratios(surefoot):
    found = surefoot("compare", "mlp@activation=relu", "mlp", "mlp@activation=tanh")
    lines = found.stdout.splitlines()
    assert found.exit_code == 0
    relu, softplus, tanh = (line.split() for line in lines[3:6])
    assert relu[4:] == ["∞", "–", "0"]
    assert softplus[5] == "1"
    assert float(tanh[5]) == pytest.approx(float(tanh[4]) / float(softplus[4]), rel=1e-2)
    assert float(tanh[6]) <= 1 / float(tanh[4]) * (1 + 1e-3)
    assert surefoot("compare", "mlp@activation=relu").exit_code == 1


def test_compare_with_a_search_has_a_column_for_what_it_found(surefoot):
    found = surefoot("compare", "mlp@sizes=3,4,2", "--input", "2,3", "--estimate", "--radius", "0.5")
    lines = found.stdout.splitlines()
    assert lines[2].endswith("found L")
    upper, lower = float(lines[3].split()[4]), float(lines[3].split()[-1])
    assert 0 < lower <= upper
    alone = surefoot("certify", "mlp@sizes=3,4,2", "--input", "2,3", "--estimate", "--radius", "0.5")
    assert f"{lines[3].split()[-1]} ≤ " in alone.stdout
    assert f"≤ {lines[3].split()[4]}" in alone.stdout


def test_a_search_keeps_within_the_norm_of_several_inputs(surefoot, here):
    found = surefoot(
        "certify", "mine:Adding", "--input", "8,4", "--input", "8,3", "--input-norm", "0.01", "--estimate"
    )
    assert found.exit_code == 0, found.stderr


def test_a_report_is_written(surefoot, here):
    found = surefoot("compare", "mlp", "mlp@activation=tanh", "--report", "page.html")
    assert found.exit_code == 0
    page = Path("page.html").read_text()
    assert "mlp@activation=tanh" in page
    assert "page.html" in found.stderr
    assert "page.html" not in found.stdout
    assert sorted(path.name for path in here.iterdir() if path.is_file()) == ["mine.py", "page.html"]

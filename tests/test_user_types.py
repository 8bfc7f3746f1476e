"""The type hints of the public names pass ``mypy --strict`` in a project that uses them, and say something."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import surefoot

SCRIPT = """
from typing import assert_type

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot as sf
from surefoot.magnitude import Magnitude

model = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 3))
x, y, values = torch.randn(32, 4), torch.arange(32) % 3, torch.randn(32, 3)
loader = DataLoader(TensorDataset(x, y), batch_size=8)


def certificates() -> None:
    certificate = sf.certify(model, x, objective=sf.CrossEntropy(), y=y, effort="quick")
    assert_type(certificate, sf.Certificate)
    assert_type(certificate.step_size, float)
    assert_type(certificate.smoothness, Magnitude)
    assert_type(certificate.to_json(), str)
    assert_type(certificate.iterations(eps=1e-3), int)
    sf.certify(model, x, objective=nn.CrossEntropyLoss(), y=y, regularizer=sf.Ridge(1e-4), domain=sf.Ball(0.1))
    sf.certify(model, x, regularizer=sf.objectives.PseudoHuber(1e-4), domain=sf.Box(-1.0, 1.0))
    sf.certify(sf.smooth(model), x, domain=sf.ProductBall(1.0), input_norm=1.0, constants="paper")
    print(certificate.bracket(sf.estimate(model, x, objective=sf.CrossEntropy(y), domain=sf.Ball(0.1))))
    assert_type(sf.evaluate(model, loader, sf.CrossEntropy()).error, float)


def training() -> None:
    descent = sf.CertifiedDescent(model, sf.CrossEntropy(), direction=torch.optim.Adam, regularizer=sf.Ridge(1e-4))
    assert_type(descent.step(x, y), float)
    assert_type(descent.step(loader), float)
    assert_type(descent.history[-1].proved_decrease, float | None)
    torch.save({"model": model.state_dict(), "optimizer": descent.state_dict()}, "run.pt")
    adam = torch.optim.Adam(model.parameters())
    assert_type(sf.ProvedEpochs(adam, nn.CrossEntropyLoss(), loader, model=model).run(2), float)
    assert_type(descent.done, str)
    assert_type(sf.KeepIfLower(model, adam, nn.CrossEntropyLoss(), loader)(), bool)
    sf.optim.ProjectedGradient(model, sf.CrossEntropy(), (x, y), regularizer=sf.Ridge(1e-3)).step()
    sf.optim.ProjectedSGD(model, sf.CrossEntropy(), [(x, y)], domain=sf.Ball(1.0))
    sf.optim.ProjectedSVRG(model, sf.CrossEntropy(), [(x, y)], domain=sf.Ball(1.0))


def theorems() -> None:
    newton = sf.GaussNewton(model, sf.Square(), proof="evaluation")
    newton.step(x, values)
    verdict = sf.convergence(model, x, sf.Square(values), method="momentum")
    assert_type(verdict, sf.theorems.Convergence)
    assert_type(verdict.proved, bool)
    step = sf.oracles.gauss_newton(sf.Chain(model, x), sf.CrossEntropy(y), kappa=0.1)
    direction: dict[str, Tensor] = dict(step.direction)
    print(direction, sf.cost(model, x), sf.zoo.vgg16())


wrong: str = sf.certify(model, x).step_size  # the one mistake
"""


def test_a_users_project_is_strictly_typed(tmp_path: Path) -> None:
    script = tmp_path / "project.py"
    script.write_text(SCRIPT, encoding="utf-8")
    source = Path(surefoot.__file__).parent.parent
    assert (source / "surefoot" / "py.typed").exists()
    finished = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--config-file=", script.name],
        cwd=tmp_path, env=os.environ | {"MYPYPATH": str(source)}, capture_output=True, text=True,
    )  # fmt: skip
    errors = re.findall(r"^(\S+):(\d+): error: (.*)$", finished.stdout, re.MULTILINE)
    line = SCRIPT[: SCRIPT.index("wrong:")].count("\n") + 1
    assert [(name, int(number)) for name, number, _ in errors] == [("project.py", line)], finished.stdout
    assert '"float"' in errors[0][2]

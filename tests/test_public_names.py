"""The names that other people's scripts rely on, used as they are documented."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.guarantees import GuaranteeError


def _model() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    model = nn.Sequential(nn.Linear(4, 6), nn.Softplus(), nn.Linear(6, 3)).double()
    return model, torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])


def test_certificates() -> None:
    model, x, y = _model()
    at_zero = sf.certify(model, x, domain=sf.ProductBall(1.0))
    printed = sf.certify(model, x, domain=sf.ProductBall(1.0), constants="paper")
    assert 0 < float(at_zero.lipschitz) <= float(printed.lipschitz)
    around = sf.certify(model, x, objective=sf.CrossEntropy(y), domain=sf.Ball(0.03))
    direction = {name: torch.randn_like(value) for name, value in model.named_parameters()}
    along = sf.certify(model, x, objective=sf.CrossEntropy(y), domain=sf.Segment(direction, 0.1))
    inputs = sf.certify(model, x, wrt="input", domain=sf.Ball(0.1))
    normed = sf.certify(model, x, domain=sf.ProductBall(1.0), input_norm=1.0)
    for certificate in (at_zero, printed, around, along, inputs, normed):
        assert float(certificate.bound) >= 0
        assert certificate.lipschitz <= certificate.lipschitz * 2
        assert str(certificate.smoothness)
        assert str(certificate)
        assert json.loads(certificate.to_json())["schema"] == "surefoot/certificate/2"
        assert certificate.to_dict()
    assert around.step_size > 0
    assert around.block_step_sizes.keys() == {"0", "2"}
    assert around.damping > 0
    assert around.iterations(eps=1e3) > 0
    with pytest.raises(GuaranteeError, match="a radius of"):  # the iterates may leave so small a ball
        around.iterations(eps=1e-3)
    on_set = sf.certify(model, x, objective=sf.CrossEntropy(y), domain=sf.ProductBall(1.0))
    assert on_set.iterations(eps=1e-3) > 1
    assert sf.certify(model, x, objective=sf.CrossEntropy(y)).step_size >= around.step_size
    assert along.safe_step >= 0
    assert len(around.to_pandas()) == len(around.rows)
    figure, axes = around.plot()
    assert figure is not None
    assert len(axes) == 2
    assert set(around.by_module()) == {"0", "1", "2", "objective"}
    assert sum(around.by_operation().values()) > 0.99


def test_losses_chains_and_oracles() -> None:
    model, x, y = _model()
    loss = sf.CrossEntropy()
    assert torch.equal(loss(model(x), y), sf.CrossEntropy(y)(model(x)))
    targets = torch.randn(5, 3, dtype=torch.float64)
    half = 0.5 * (model(x) - targets).square().sum() / 5
    assert torch.allclose(sf.Square()(model(x), targets), half, rtol=1e-14)
    chain = sf.Chain(model, x)
    oracle = chain.autodiff(chain.parameters)
    assert torch.allclose(oracle.value, model(x))
    gradient = oracle.pullback(torch.ones_like(oracle.value))
    assert oracle.pushforward(gradient).shape == oracle.value.shape
    step = sf.oracles.gauss_newton(
        chain, sf.CrossEntropy(y), kappa=0.1, method="dual", params=None, regularizer=None
    )
    assert step.direction.keys() == dict(model.named_parameters()).keys()
    assert step.kappa == 0.1
    assert step.calls <= 2 * 15 + 1
    assert step.model_decrease > 0
    assert step.status


def test_optimizers() -> None:
    model, x, y = _model()
    descent = sf.optim.CertifiedDescent(model, sf.CrossEntropy(), proof="segment")
    assert descent.step(x, y) > descent.step(x, y)
    batches = list(zip(x.split(4), y.split(4), strict=True))
    training = sf.optim.ProvedEpochs(torch.optim.Adam(model.parameters()), sf.CrossEntropy(), batches, model=model)
    assert training.run(epochs=2) <= training.history[0].value
    for kind in (sf.optim.GaussNewton, sf.optim.Newton, sf.optim.CertifiedDescent):
        assert issubclass(kind, torch.optim.Optimizer)


def test_the_rest() -> None:
    model, x, _ = _model()
    smooth = sf.smooth(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    assert sf.certify(smooth, x.float(), domain=sf.Ball(0.1)).smoothness.is_finite
    assert sf.cost(model, x).oracles
    found = sf.estimate(model, x, objective=None, domain=sf.Ball(0.1), wrt="params")
    assert float(found.lipschitz) > 0
    assert callable(sf.register_rule("example.operation"))
    assert {"vgg16", "vgg16-smooth", "vgg16-batchnorm", "resnet18"} <= set(sf.zoo.names())
    assert isinstance(sf.zoo.resnet18(), nn.Module)
    assert all(getattr(sf, name) is not None for name in sf.__all__)


def test_mistakes_are_answered_with_what_to_write() -> None:
    model, x, y = _model()
    with pytest.raises(
        sf.errors.SurefootError, match=r"got the class CrossEntropyLoss: write CrossEntropyLoss\(\)"
    ):
        sf.certify(model, x, objective=nn.CrossEntropyLoss, y=y)  # type: ignore[arg-type]
    with pytest.raises(sf.errors.SurefootError, match="has no targets: pass them, as y=…"):
        sf.certify(model, x, objective=nn.CrossEntropyLoss())
    with pytest.raises(sf.errors.SurefootError, match=r"write step\(x, y\)"):
        sf.CertifiedDescent(model, sf.CrossEntropy()).step()
    with pytest.raises(sf.errors.SurefootError, match=r"such as surefoot.Ball\(0.1\)"):
        sf.certify(model, x, domain=0.1)  # type: ignore[arg-type]
    with pytest.raises(sf.errors.SurefootError, match=r"ndarray. .*torch.as_tensor\(x\) makes one"):
        sf.certify(model, x.numpy())
    with pytest.raises(sf.errors.SurefootError, match=r"sizes lists the input's size and that of each layer"):
        sf.zoo.mlp(64)  # type: ignore[arg-type]


def test_names_load_under_any_default_device() -> None:
    script = """
import torch, surefoot as sf
with torch.device("meta"):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softplus())
    names = [getattr(sf, name) for name in sf.__all__]
    print(sf.certify(model, torch.ones(2, 4), domain=sf.ProductBall(1.0), input_norm=1.0).smoothness)
model = model.to_empty(device="cpu")
_ = [torch.nn.init.ones_(value) for value in model.parameters()]  # memory as it was may hold NaN
print(sf.certify(model, torch.ones(2, 4), domain=sf.ProductBall(1.0), input_norm=1.0).smoothness)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    on_meta, on_cpu = run.stdout.split()
    assert on_meta == on_cpu != "inf"


def test_few_names_stand_at_the_top() -> None:
    names = [name for name in sf.__all__ if not isinstance(getattr(sf, name), type(sf))]
    assert len(names) <= 22
    assert sf.__all__ == sorted(sf.__all__)
    assert {*sf.__all__} <= {*dir(sf)}

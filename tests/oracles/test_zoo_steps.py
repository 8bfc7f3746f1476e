"""Every oracle on every architecture of the zoo, as small as its options allow, against dense matrices.

Directions are compared with a dense solve of the Hessian or the Gauss-Newton matrix plus κ, all in double
precision; the gradient with ``torch.autograd.grad``. Normalisations are tested with the statistics of the batch
and with stored ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from judges.steps import DenseModel
from surefoot.objectives import Objective, Ridge
from surefoot.oracles import Step, gauss_newton, gradient, newton

F64 = torch.float64
VECTORS = {"width": 4, "depth": 3, "inputs": 3, "outputs": 3}
IMAGES = {"in_channels": 1, "num_classes": 3}
NORMALISED = {**IMAGES, "small_input": True}
ATTENTION = {"width": 4, "depth": 1, "heads": 2}
TINY: dict[str, dict[str, Any]] = {
    "autoencoder": {"sizes": (5, 4, 2)},
    "autoencoder-convolutional": {"in_channels": 1, "image_size": 4, "channels": (2, 2), "code": 3},
    "dense": {"sizes": (4, 5, 4, 3)},
    "densenet121": {**NORMALISED, "growth": 1, "blocks": (1, 2)},
    "gpt": {"vocabulary": 5, "context": 3, **ATTENTION},
    "highway": VECTORS,
    "mlp": {"sizes": (4, 6, 5, 3)},
    "residual": VECTORS,
    "resnet18": {**NORMALISED, "width": 0.004},
    "resnet50": {**NORMALISED, "width": 0.004},
    "resnet152": {**NORMALISED, "width": 0.004},
    "vgg16": {**IMAGES, "image_size": 32, "width": 0.002},
    "vit": {**IMAGES, "image_size": 4, "patch_size": 2, **ATTENTION},
}
OF_ANY_SIZE = ("densenet121", "resnet18", "resnet50", "resnet152")
MODES = {"train": True, "eval": False}


def base_of(name: str) -> str:
    return name.partition("-")[0]


def options_of(name: str) -> dict[str, Any]:
    chosen = TINY.get(name) or TINY[base_of(name)]
    return {**chosen, "batch_norm": 0.1} if name == "vgg16-batchnorm" else chosen


def build(name: str, mode: str) -> tuple[nn.Module, Tensor]:
    """The model with parameters somewhat larger than usual, so that curvature shows, and its input."""
    base, options = base_of(name), options_of(name)
    torch.manual_seed(0)
    model = sf.zoo.build(name, **options).double().train(MODES[mode])
    size = {"image_size": 4} if base in OF_ANY_SIZE else {}
    batch = 3 if base != "vgg16" else 2 if normalised(model) and model.training else 1
    x = sf.zoo.example_input(name, batch=batch, dtype=F64, **options, **size)
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 0.1  # so that the variance of a few samples is never near zero beside it
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(1.5).add_(0.1 * torch.randn_like(value))
    if base == "gpt":  # a loss of tokens: every position is a row
        model = nn.Sequential(model, nn.Flatten(0, 1))
    if name == "autoencoder-convolutional":
        model = nn.Sequential(model, nn.Flatten(1))
    return model, x


def normalised(model: nn.Module) -> bool:
    return any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def architectures() -> list[Any]:
    found = []
    for name in sf.zoo.names():
        if base_of(name) not in TINY:
            continue
        for mode in MODES:
            if mode == "eval" and not normalised(sf.zoo.build(name, **options_of(name))):
                continue  # the same function
            large = name.startswith(("resnet50", "resnet152")) or (name, mode) == ("vgg16-batchnorm", "train")
            again = name.endswith("-smooth") and mode == "eval"
            marks = [pytest.mark.slow] if large or again else []
            found.append(pytest.param(name, mode, marks=marks))
    return found


def test_no_architecture_is_missing() -> None:
    assert {base_of(name) for name in sf.zoo.names()} <= TINY.keys()


def assert_solves(step: Step, judge: DenseModel, model: str, what: str) -> None:
    assert step.solved or step.residual is None, (what, step.status)  # None: no call was left to measure it
    assert judge.error(step, model) < 1e-8, (what, step.status)
    assert step.model_decrease == pytest.approx(judge.decrease(step, model), rel=1e-7), what


@pytest.mark.parametrize(("name", "mode"), architectures())
def test_every_direction_is_that_of_the_dense_solve(name: str, mode: str) -> None:
    model, x = build(name, mode)
    chain, output = sf.Chain(model, x), model(x).detach()
    labels: Objective = sf.CrossEntropy(torch.arange(len(output)) % output.shape[1])
    square: Objective = sf.Square(torch.randn(output.shape, dtype=F64, generator=torch.Generator().manual_seed(1)))
    layers = Ridge({path: 0.1 * k for k, path in enumerate(chain.graph.blocks)})
    cases = [(labels, layers), (square, None), (labels, None), (square, Ridge(0.2))]
    images = name.startswith(("vgg16", "resnet", "densenet121"))  # their states are large
    for objective, ridge in cases[:2] if images else cases:
        judge = DenseModel(model, x, objective, ridge)
        assert_gradient(chain, judge, objective, ridge)
        for method in ("dual", "dual_gram", "dynamic"):
            given: Any = {"method": method, "regularizer": ridge}
            step = gauss_newton(chain, objective, kappa=0.1, **given)
            assert_solves(step, judge, "gauss_newton", f"{objective} {ridge} {method}")
            assert step.calls > 0
            assert method != "dual" or step.calls <= 2 * output.numel() + 1
        spectrum = torch.linalg.eigvalsh(judge.hessian)
        kappa = max(0.0, -float(spectrum[0])) + 1e-2 * float(spectrum.abs().max())
        for method in ("dynamic", "cg"):
            given = {"method": method, "regularizer": ridge, "double": False, "tolerance": 1e-11}
            step = newton(chain, objective, kappa, **given)
            assert_solves(step, judge, "newton", f"{objective} {ridge} {method}")


def assert_gradient(chain: sf.Chain, judge: DenseModel, objective: Objective, ridge: Ridge | None) -> None:
    step = gradient(chain, objective, kappa=1.0, regularizer=ridge)
    parameters = {path: value for path, value in judge.model.named_parameters() if value.requires_grad}
    buffers = {path: value.clone() for path, value in judge.model.named_buffers()}
    output = torch.func.functional_call(judge.model, {**parameters, **buffers}, (judge.x,))
    loss = objective(output) if ridge is None else objective(output) + ridge(parameters)
    found = torch.autograd.grad(loss, list(parameters.values()))
    expected = torch.cat([slope.reshape(-1) for slope in found])
    assert float((judge.direction(step) + expected).norm()) <= 1e-12 * float(expected.norm())

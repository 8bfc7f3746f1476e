"""Auto-encoders: the objective, its constants, the composition of chains, and steps that descend."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.objectives import ObjectiveError, Reconstruction

X = torch.randn(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def model() -> nn.Module:
    return sf.zoo.autoencoder(sizes=(9, 5, 2), activation="tanh").double()


def test_it_is_the_objective_of_the_paper() -> None:
    outputs = torch.randn_like(X)
    expected = sum((X[i] - outputs[i]).norm() ** 2 for i in range(6)) / 6
    assert torch.allclose(Reconstruction(X)(outputs), expected, rtol=1e-14)
    assert torch.equal(Reconstruction()(outputs, X), Reconstruction(X)(outputs))
    assert torch.equal(Reconstruction().bound_to(X)(outputs), Reconstruction(X)(outputs))


def test_the_composition_of_two_chains_is_that_of_the_models() -> None:
    network = model()
    encoder = sf.Chain(network.encoder, X)
    chain = encoder >> sf.Chain(network.decoder, encoder.value())
    whole = sf.Chain(network, X)
    assert len(chain) == len(whole)
    assert torch.equal(chain.value(), whole.value())
    step = sf.oracles.gauss_newton(chain, Reconstruction(X), kappa=0.3, method="dual").direction
    other = sf.oracles.gauss_newton(whole, Reconstruction(X), kappa=0.3, method="dual").direction
    assert len(step) == len(other)
    for mine, theirs in zip(step.values(), other.values(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12)


def test_the_certificate_holds_at_its_centre_and_around_it() -> None:
    network = model()
    names = [name for name, _ in network.named_parameters()]
    values = [value.detach() for value in network.parameters()]
    sizes = [value.numel() for value in values]

    def objective(flat: torch.Tensor) -> torch.Tensor:
        parts = [p.reshape(v.shape) for p, v in zip(flat.split(sizes), values, strict=True)]
        output = torch.func.functional_call(network, dict(zip(names, parts, strict=True)), (X,))
        return (output - X).square().sum() / 6

    certificate = sf.certify(network, X, objective=Reconstruction(X), domain=sf.Ball(0.05))
    centre = torch.cat([value.reshape(-1) for value in values])
    generator = torch.Generator().manual_seed(0)
    for radius in (0.0, 0.05, 0.05, 0.05):
        direction = torch.randn(centre.shape, dtype=torch.float64, generator=generator)
        point = centre + radius * direction / direction.norm()
        hessian = torch.autograd.functional.hessian(objective, point)
        assert torch.linalg.matrix_norm(hessian, 2) <= float(certificate.smoothness)
        assert torch.func.grad(objective)(point).norm() <= float(certificate.lipschitz)
        assert objective(point) <= float(certificate.bound)


def test_training_without_a_learning_rate_descends() -> None:
    network = model()
    optimizer = sf.optim.CertifiedDescent(network, Reconstruction(), proof="segment")
    losses = [float(optimizer.step(X, X)) for _ in range(5)]
    losses.append(float(Reconstruction(X)(network(X).detach())))
    assert all(after < before for before, after in pairwise(losses))


def test_an_output_of_another_shape_is_refused() -> None:
    with pytest.raises(ObjectiveError, match="which is 6×9: the model returns 6×3"):
        Reconstruction(X)(X[:, :3])
    with pytest.raises(ObjectiveError, match="has the shape of the input"):
        sf.certify(nn.Linear(9, 4).double(), X, objective=Reconstruction(X))

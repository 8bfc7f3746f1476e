"""Keywords of other optimizers are answered with what to write instead."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf

KINDS = (
    sf.CertifiedDescent, sf.GaussNewton, sf.Newton, sf.optim.ProjectedGradient, sf.optim.ProjectedSGD,
    sf.optim.ProjectedSVRG,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [{"lr": 0.1}, {"momentum": 0.9}, {"betas": (0.9, 0.99)}, {"eps": 1e-8}])
def test_there_is_nothing_to_tune(kind: Any, wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(TypeError, match=f"{kind.__name__} takes no {name}=: there is nothing to tune: .*Leave it"):
        kind(nn.Linear(2, 1), sf.Square(), **wrong)


def test_the_fix_in_the_sentence_works() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(TypeError, match=r"direction=torch.optim.SGD\(model.parameters\(\), lr=0.1\)"):
        sf.CertifiedDescent(model, sf.Square(), lr=0.1)  # type: ignore[call-arg]
    optimizer = sf.CertifiedDescent(
        model, sf.Square(), direction=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    assert optimizer.step(torch.eye(2), torch.ones(2, 1)) > 0
    with pytest.raises(TypeError, match=r"regularizer=surefoot.Ridge\(weight_decay\)"):
        sf.GaussNewton(model, sf.Square(), weight_decay=1e-4)
    assert sf.GaussNewton(model, sf.Square(), regularizer=sf.Ridge(1e-4)).step(torch.eye(2), torch.ones(2, 1)) > 0


def test_names_that_are_nearly_right() -> None:
    with pytest.raises(TypeError, match=r"takes no regulariser=: did you mean regularizer=\?"):
        sf.CertifiedDescent(nn.Linear(2, 1), sf.Square(), regulariser=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes no colour=: its arguments are model, objective, proof, direction"):
        sf.CertifiedDescent(nn.Linear(2, 1), sf.Square(), colour="red")  # type: ignore[call-arg]


def test_epochs_take_the_rate_from_the_optimizer() -> None:
    model, data = nn.Linear(2, 1), [(torch.eye(2), torch.ones(2, 1))]
    with pytest.raises(TypeError, match=r"set it where the optimizer is made, torch.optim.Adam\("):
        sf.ProvedEpochs(torch.optim.Adam, sf.Square(), data, model=model, lr=0.1)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_are_copied(kind: Any) -> None:
    optimizer = kind(nn.Linear(2, 1), sf.Square())
    assert type(copy.deepcopy(optimizer)) is kind

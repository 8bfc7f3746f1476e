"""Activations and poolings by name or class."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from surefoot import zoo
from surefoot.zoo.parts import ACTIVATIONS, make_activation, make_pooling


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_each_activation_acts_entry_by_entry_and_not_in_place(name: str) -> None:
    x = torch.randn(4, 5, dtype=torch.float64)
    kept = x.clone()
    y = make_activation(name)(x)
    assert torch.equal(x, kept)
    # One entry at a time: a vectorised kernel may differ in the last digit.
    alone = torch.stack([make_activation(name)(entry) for entry in x.flatten()]).view_as(x)
    torch.testing.assert_close(y, alone, rtol=1e-14, atol=1e-15)


def test_classes_and_functions_are_activations_too() -> None:
    assert type(make_activation(nn.Hardtanh)) is nn.Hardtanh
    assert make_activation(partial(nn.Softplus, beta=10)).beta == 10
    model = zoo.mlp((2, 3, 3, 1), partial(nn.ELU, alpha=0.5))
    assert [module.alpha for module in model if isinstance(module, nn.ELU)] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("Relu", "did you mean 'relu'"),
        (nn.ReLU(), "shared by all layers: pass its class"),
        (dict, "must be a name or make an nn.Module"),
        (None, "must be a name or make an nn.Module"),
    ],
)
def test_what_makes_no_module_is_refused(choice: object, message: str) -> None:
    with pytest.raises(zoo.ZooError, match=message):
        make_activation(choice)


def test_poolings() -> None:
    x = torch.arange(16.0).view(1, 1, 4, 4)
    assert make_pooling("max", 2)(x).flatten().tolist() == [5, 7, 13, 15]
    assert make_pooling("average", 2)(x).flatten().tolist() == [2.5, 4.5, 10.5, 12.5]
    assert make_pooling("max", 3, stride=2, padding=1)(x).flatten().tolist() == [5, 7, 13, 15]
    with pytest.raises(zoo.ZooError, match="there is no pooling 'mean'"):
        make_pooling("mean", 2)

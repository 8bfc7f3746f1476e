"""Programs of models against torch.autograd."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from program.models import table
from surefoot.program import Program, differentiate, trace

CASES = table()


def values_of(program: Program, model: torch.nn.Module, args: tuple[Tensor, ...]) -> dict[str, Tensor]:
    names = [f"x.{k}" if len(args) > 1 else "x" for k in range(len(args))]
    values = {n: v.detach() for n, v in (*model.named_parameters(), *zip(names, args, strict=True))}
    return {name: values[name] for name in program.inputs}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_autograd(name: str) -> None:
    model, args, objective = CASES[name]
    untouched = {key: value.clone() for key, value in model.state_dict().items()}
    program = trace(model, args, objective)
    assert all(torch.equal(value, untouched[key]) for key, value in model.state_dict().items())
    twin = copy.deepcopy(model)
    expected = objective(twin(*args))
    parameters = dict(twin.named_parameters())
    slopes = torch.autograd.grad(expected, list(parameters.values()), allow_unused=True, materialize_grads=True)
    assert program.parameters == tuple(parameters)
    both = differentiate(program)
    # kernels of torch that compute with factors in single precision
    rounded = 1e-8 if any(word in name for word in ("CELU", "Hardsigmoid")) else 1e-12
    value, *gradient = both.results(values_of(both, model, args))
    torch.testing.assert_close(value, expected, rtol=rounded, atol=rounded)
    size = max([float(slope.abs().max()) for slope in slopes], default=0.0)
    for ours, theirs in zip(gradient, slopes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rounded, atol=rounded * max(1.0, size))

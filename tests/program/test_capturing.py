"""Capturing leaves a model as it was, and gives the program of what it computes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from program.models import Calls
from surefoot.errors import CaptureError
from surefoot.program import capture, differentiate, values_of

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def remembering(self: Any, x: Tensor) -> Tensor:
    """Keeps what no later call reads."""
    self.calls += 1
    self.shapes.append(tuple(x.shape))
    self.last = self.layer(x)
    return self.last


def test_a_model_stays_as_it_was() -> None:
    model = nn.Sequential(Calls(remembering, layer=nn.Linear(3, 3), calls=0, shapes=[]), nn.BatchNorm1d(3))
    activations: dict[str, Tensor] = {"old": X}
    model[1].register_forward_hook(lambda module, inputs, output: activations.update(new=output))
    model[0].layer.weight.grad = torch.ones(3, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()
    capture(model, X)
    assert model[0].calls == 0
    assert model[0].shapes == []
    assert not hasattr(model[0], "last")
    assert list(activations) == ["old"]
    assert torch.equal(model[0].layer.weight.grad, torch.ones(3, 3))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_the_mode_of_the_caller_does_not_matter(mode: Any) -> None:
    model, loss = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), sf.Square(torch.zeros(4, 3))
    with mode():
        program = capture(model, X, loss)
    assert program is capture(model, X, loss)
    value, *gradient = differentiate(program).results(values_of(program, model, X))
    expected = loss(model(X))
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient, list(torch.autograd.grad(expected, list(model.parameters()))))


def test_an_objective_and_its_targets_are_part_of_what_is_captured() -> None:
    model = nn.Linear(3, 3)
    y = torch.tensor([0, 1, 2, 0])
    loss = sf.CrossEntropy(y)
    program = capture(model, X, loss)
    assert capture(model, X, loss) is program
    assert capture(model, X, sf.CrossEntropy(torch.tensor([0, 1, 1, 0]))) is not program
    loss.targets[0] = 2
    assert capture(model, X, loss) is not program


def test_ids_are_part_of_what_is_captured() -> None:
    model, ids = nn.Embedding(5, 2), torch.tensor([[0, 1]])
    program = capture(model, ids)
    assert capture(model, ids.clone()) is program
    torch.testing.assert_close(
        capture(model, ids + 1).results(values_of(program, model, ids))[0], model(ids + 1).detach()
    )


def test_models_on_meta_have_programs_with_true_masks() -> None:
    options = sf.zoo.small_options("gpt")
    with torch.device("meta"):
        model = sf.zoo.build("gpt", **options)
    ids = sf.zoo.example_input("gpt", **options)
    program = capture(model, ids.to("meta"))
    real = sf.zoo.build("gpt", **options)
    assert all(not value.is_meta for value in program.constants.values())
    assert str(capture(real, ids).outputs) == str(program.outputs)


def test_batch_statistics_are_no_state_that_is_read() -> None:
    for device in ("cpu", "meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device)
        names = [node.primitive.name for node in capture(model, X.to(device)).nodes]
        assert names.count("normalize") == 1
        capture(model.eval(), X.to(device))


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * 3


class Right(Wrong):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * 2


def test_a_backward_that_is_no_derivative_is_refused() -> None:
    for function, is_right in ((Wrong, False), (Right, True)):
        model = Calls(lambda self, x, f=function: f.apply(self.layer(x)), layer=nn.Linear(3, 3))
        if is_right:
            capture(model, X)
        else:
            with pytest.raises(CaptureError, match=r"the backward of 'Wrong' \(torch\.autograd\.Function\)"):
                capture(model, X)

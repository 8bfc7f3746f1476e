"""The analysis of a model knows whether it is still true."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.calculus.adjoint.backward import backward
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.forward import Shared, forward
from surefoot.domains import DomainError
from surefoot.enclosure import norm
from surefoot.program.checks import as_inputs, selected


class Scaled(nn.Module):
    """Reads a plain attribute, a large buffer and a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.scale = 1.0
        self.register_buffer("wide", torch.ones(5000))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.scale * self.norm(self.first(x)) * self.wide[:5]))


def is_current(analysis: Analysis) -> bool:
    return Analysis.of(analysis.model, analysis.x, analysis.objective, analysis) is analysis


def verify(analysis: Analysis) -> None:
    """Compare the centre with what the model computes: half of the digits of its type have to agree."""
    if not is_current(analysis):
        raise ValueError("the model has changed since it was analysed")
    args, kwargs = as_inputs(analysis.x)
    buffers = {name: value.clone() for name, value in analysis.model.named_buffers(remove_duplicate=False)}
    live = torch.func.functional_call(analysis.model, buffers, args, kwargs)
    live = live if analysis.objective is None else analysis.objective(selected(live))
    centre = analysis.centre[analysis.reading.graph.outputs[0]]
    away = float((live.detach().double() - centre).abs().max())
    if not away <= torch.finfo(live.dtype).eps ** 0.5 * (1 + float(centre.abs().max())):
        raise ValueError(f"the graph computes {centre}, the model {live}")


def setting() -> tuple[Scaled, Tensor, nn.Module]:
    torch.manual_seed(0)
    return Scaled().eval(), torch.randn(6, 3), sf.CrossEntropy(torch.tensor([0, 1, 1, 0, 1, 0]))


def in_place(model: Scaled) -> None:
    with torch.no_grad():
        model.first.weight.add_(1e-3)


def through_data(model: Scaled) -> None:
    model.first.weight.data[0, 0] += 1e-3


def through_numpy(model: Scaled) -> None:
    np.asarray(model.last.bias.detach())[0] += 1e-3


def another_parameter(model: Scaled) -> None:
    model.last.bias = nn.Parameter(torch.ones(2))


def attribute(model: Scaled) -> None:
    model.scale = 2.0


def mode(model: Scaled) -> None:
    model.train()


def flag(model: Scaled) -> None:
    model.first.weight.requires_grad_(False)


def buffer(model: Scaled) -> None:
    model.norm.running_mean += 1.0


def large_buffer(model: Scaled) -> None:
    model.wide.data[0] = 3.0


CHANGES = [
    in_place,
    through_data,
    through_numpy,
    another_parameter,
    attribute,
    mode,
    flag,
    buffer,
    large_buffer,
]


@pytest.mark.parametrize("change", CHANGES)
def test_it_notices_every_change(change) -> None:
    model, x, objective = setting()
    analysis = Analysis.of(model, x, objective)
    assert is_current(analysis)
    assert Analysis.of(model, x, objective, analysis) is analysis
    change(model)
    assert not is_current(analysis)
    with pytest.raises(ValueError, match="has changed"):
        verify(analysis)
    renewed = Analysis.of(model, x, objective, analysis)
    assert renewed is not analysis
    verify(renewed)


@pytest.mark.parametrize("change", CHANGES)
def test_a_segment_is_one_of_the_model_as_it_is(change) -> None:
    from surefoot.calculus.segment.along import Along

    model, x, objective = setting()
    along = Along(model, x, objective)
    along.majorant(along.steepest_descent(), 0.1, 3)
    change(model)
    with torch.no_grad():
        live = float(objective(model(x)))
    bound = along.majorant(along.steepest_descent(), 0.1, 3)
    assert bound.value == pytest.approx(live, rel=1e-5)
    assert bound.slope < 0


def test_what_holds_for_all_weights_is_kept() -> None:
    model, x, objective = setting()
    first = Analysis.of(model, x, objective)
    in_place(model)
    second = Analysis.of(model, x, objective, first)
    assert second.reading is first.reading
    attribute(model)
    assert Analysis.of(model, x, objective, second).reading is not first.reading


def test_other_data_is_another_analysis() -> None:
    model, x, objective = setting()
    first = Analysis.of(model, x, objective)
    assert Analysis.of(model, x.clone(), objective.bound_to(objective.targets.clone()), first) is first
    assert Analysis.of(model, 2 * x, objective, first) is not first
    assert Analysis.of(model, x, objective.bound_to(1 - objective.targets), first) is not first
    assert Analysis.of(model, x, None, first) is not first
    assert Analysis.of(setting()[0], x, objective, first) is not first


class Penalty(nn.Module):
    """An objective with an attribute and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.power, self.weight = 2.0, nn.Parameter(torch.ones(2))

    def forward(self, outputs: Tensor) -> Tensor:
        return (self.weight * outputs**self.power).mean()


def test_it_notices_a_change_of_the_objective() -> None:
    model, x, _ = setting()
    objective = Penalty()
    analysis = Analysis.of(model, x, objective)
    assert is_current(analysis)
    objective.weight.data = torch.tensor([2.0, 1.0])
    assert not is_current(analysis)
    analysis = Analysis.of(model, x, objective, analysis)
    verify(analysis)
    objective.power = 4.0
    assert not is_current(analysis)
    verify(Analysis.of(model, x, objective, analysis))


def test_values_are_those_of_the_moment_it_was_made() -> None:
    model, x, objective = setting()
    analysis = Analysis.of(model, x, objective)
    expected = float(objective(model(x)).detach())
    in_place(model)
    (output,) = analysis.reading.graph.outputs
    assert float(analysis.centre[output]) == pytest.approx(expected, rel=1e-6)


def test_costates_are_the_derivatives() -> None:
    model, x, objective = setting()
    analysis = Analysis.of(model, x, objective)
    objective(model(x)).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(analysis.gradient[name].float(), parameter.grad, atol=1e-6)
    assert float(analysis.costates[analysis.reading.graph.outputs[0]]) == 1.0


def test_verifying_leaves_the_model_as_it_was() -> None:
    model, x, objective = setting()
    model.train()
    analysis = Analysis.of(model, x, objective)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    verify(analysis)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert is_current(analysis)


def test_another_function_is_noticed() -> None:
    model, x, objective = setting()
    analysis = Analysis.of(model, x, objective)
    analysis.centre[analysis.reading.graph.outputs[0]] += 1.0
    with pytest.raises(ValueError, match="the graph computes"):
        verify(analysis)


def test_without_values() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(3, 1), torch.empty(2, 3)
    analysis = Analysis.of(model, x)
    assert is_current(analysis)
    with pytest.raises(DomainError, match="meta device"):
        analysis.centre  # noqa: B018  the property raises


@pytest.mark.parametrize("change", [attribute, mode])
def test_a_step_is_proved_for_the_function_whose_gradient_it_follows(change) -> None:
    model, x, objective = setting()
    model = model.double()
    optimizer = sf.optim.CertifiedDescent(model, sf.CrossEntropy(), proof="segment")
    for _ in range(3):
        optimizer.step(x.double(), objective.targets)
    change(model)
    before = optimizer.value(x.double(), objective.targets)
    optimizer.step(x.double(), objective.targets)
    promised = optimizer.history[-1].proved_decrease
    assert 0 < promised <= before - optimizer.value(x.double(), objective.targets) + 1e-12


def test_norms_are_remembered_only_of_tensors_that_nobody_writes_to() -> None:
    """A pass over tensors of somebody else, written to afterwards, leaves no norm of what they were."""
    model, x, objective = setting()
    analysis = Analysis.of(model.double(), x.double(), objective)
    leaves, region = analysis.enclosed(sf.Ball(0.1))
    weight = model.first.weight.detach()
    (name,) = (leaf.name for leaf in analysis.reading.graph.parameters if leaf.path == "first.weight")
    leaves[name] = replace(leaves[name], value=weight)
    forward(analysis.reading.prepared, leaves, region, keep=True)
    before = norm(weight)
    weight.mul_(3.0)
    assert 2.99 < float(norm(weight)) / float(before) < 3.01


def test_certificates_that_share_a_centre_are_those_of_single_passes() -> None:
    model, x, objective = setting()
    analysis, shared = Analysis.of(model, x, objective), Shared()
    for radius in (0.0, 0.1, 0.03):
        alone, together = analysis.over(sf.Ball(radius)), analysis.over(sf.Ball(radius), shared=shared)
        for name, enclosure in alone.enclosures.items():
            assert torch.equal(enclosure.value, together.enclosures[name].value)
            assert enclosure.bound == together.enclosures[name].bound
            assert enclosure.spread == together.enclosures[name].spread
        assert backward(alone).pulled.keys() == backward(together).pulled.keys()

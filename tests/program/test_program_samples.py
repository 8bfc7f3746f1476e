"""Labels of samples: what changes when one sample does is labelled, and independent models are seen to be so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from program.models import table
from program.test_tracing import values_of
from surefoot.program import differentiate, interacting, samples, trace

CASES = {name: case for name, case in table().items() if case[1][0].is_floating_point()}
APART = (
    "mlp", "cnn", "grouped", "transposed", "conv1d", "conv3d", "vgg", "resnet block in eval", "group norm",
        "instance",
    "layer norm", "rms norm", "local", "weight norm", "rnn", "gru", "lstm", "cell", "attention", "causal", "sdpa",
    "encoder", "decoder", "bilinear", "pinn", "tangent", "einsum", "two inputs", "functional", "hessian",
        "resized",
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_changes_with_a_sample_is_labelled_by_it(name: str) -> None:
    model, args, objective = CASES[name]
    program = differentiate(trace(model, args, objective))
    names = [n for n in program.inputs if n == "x" or n.startswith("x.")]
    labels = samples(program, dict.fromkeys(names, 0))
    values = values_of(program, model, args)
    plain = program.run(values)
    for sample in range(len(args[0])):
        moved = {n: v.clone() for n, v in values.items()}
        for n in names:
            moved[n][sample] += 0.1 * torch.randn_like(moved[n][sample])
        for node, before, after, (first, last) in zip(
            program.nodes, plain, program.run(moved), labels, strict=True
        ):
            assert first.shape == last.shape == node.shape
            changed = before != after
            if before.is_floating_point():
                changed = (before - after).abs() > 1e-9 * before.abs().max()
            assert bool(((first <= sample) & (sample <= last) | ~changed).all()), node


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith(APART)])
def test_samples_stay_apart_in_common_models(name: str) -> None:
    model, args, _ = CASES[name]
    program = trace(model, args)
    assert interacting(program, {n: 0 for n in program.inputs if n == "x" or n.startswith("x.")}) is None
    labels = samples(program, {n: 0 for n in program.inputs if n == "x" or n.startswith("x.")})
    shape = program.nodes[program.outputs[0]].shape
    if shape[0] == len(args[0]):  # with the samples first
        own = torch.arange(len(args[0])).reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
        assert all(torch.equal(label, own) for label in labels[program.outputs[0]])


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        return h - h.mean(0, keepdim=True)


@pytest.mark.parametrize(
    ("model", "word"),
    [
        (nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), "'normalize' in module '1'"),
        (Centred(), "'sum' in the model itself"),
        (nn.Sequential(nn.Linear(3, 2), nn.Softmax(0)), "'softmax' in module '1'"),
    ],
)
def test_samples_that_meet_are_named_with_their_place(model: nn.Module, word: str) -> None:
    assert interacting(trace(model, torch.randn(4, 3)), {"x": 0}) == word

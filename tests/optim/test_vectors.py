"""Parameters as one vector: the same numbers, in memory of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.optim.vectors import Layout

SHAPES = [[(2, 3)], [(3, 2), (0,), (), (4,)]]


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("shapes", SHAPES)
def test_a_vector_is_a_copy_and_its_parts_are_views(shapes: list[tuple[int, ...]], kind: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = {str(k): nn.Parameter(torch.randn(*shape, 2, dtype=kind)[..., 0]) for k, shape in enumerate(shapes)}
    layout = Layout.of(tensors)
    vector = layout.pack(tensors)
    assert vector.dtype is torch.float64
    assert not vector.requires_grad
    assert torch.equal(vector, torch.cat([value.detach().double().reshape(-1) for value in tensors.values()]))
    parts = layout.unpack(vector)
    assert all(torch.equal(parts[name], value.detach().double()) for name, value in tensors.items())
    vector.zero_()
    assert not any(part.any() for part in parts.values())
    assert all(value.detach().any() for value in tensors.values() if value.numel())


def test_the_only_parameter_of_a_model_is_watched_too() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2, bias=False).double(), torch.randn(8, 3).double(), torch.randint(2, (8,))
    optimizer = sf.CertifiedDescent(model, sf.CrossEntropy())
    for _ in range(3):
        optimizer.step(x, y)
    assert not any(record.note for record in optimizer.history)
    model.weight.data.mul_(1.5)  # PyTorch does not count this
    optimizer.step(x, y)
    assert "the weights changed" in optimizer.history[-1].note

"""What the page says of weights that lie with several processes, in a group of one, which needs no start."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import surefoot as sf
from surefoot.graph import sharded
from surefoot.graph.placed import Placed, norms
from surefoot.processes import Processes, ProcessLost, answering


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    distributed.init_process_group(
        "gloo", store=distributed.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    yield distributed.group.WORLD
    distributed.destroy_process_group()


class Added(nn.Module):
    """Reads a weight that is computed from two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.more = nn.Parameter(torch.randn(3, 5) / 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return nn.functional.linear(hidden, self.last.weight / self.last.weight.norm() + self.more, self.last.bias)


class Doubled(torch.autograd.Function):
    """Has a hand-written backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return 2 * slopes[0]


class WithBackward(nn.Linear):
    """A linear layer behind one."""

    def forward(self, x: Tensor) -> Tensor:
        doubled: Any = Doubled.apply
        result: Tensor = doubled(super().forward(x))
        return result


def plain() -> nn.Module:
    torch.manual_seed(0)
    return Added().double()


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(6, 4).double(), torch.arange(6) % 3


def shards(model: nn.Module, group: Any) -> nn.Module:
    return fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))


def test_errors_of_a_model_are_its_own() -> None:
    """Which is not lost because a matrix has another shape."""
    with pytest.raises(RuntimeError, match="shapes") as caught, answering(model=True):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not isinstance(caught.value, ProcessLost)


def test_a_weight_that_is_computed_from_others(group: Any) -> None:
    x, y = data()
    found = sf.evaluate(shards(plain(), group), x, sf.CrossEntropy(), y, group=group)
    whole = sf.evaluate(plain(), x, sf.CrossEntropy(y))
    assert abs(found.value - whole.value) <= found.error + whole.error


def test_a_mesh_of_two_dimensions_without_a_group_gathers_all(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    gathered: list[int] = []
    full = sharded._full
    monkeypatch.setattr(sharded, "_full", lambda value: gathered.append(value.numel()) or full(value))
    mesh = DeviceMesh("cpu", torch.zeros(1, 1, dtype=torch.int), mesh_dim_names=("copies", "parts"))
    model = fully_shard(plain(), mesh=mesh)
    value = sf.evaluate(model, x, sf.CrossEntropy(y))
    assert sum(gathered) == sum(parameter.numel() for parameter in plain().parameters())
    assert value.value == pytest.approx(sf.evaluate(plain(), x, sf.CrossEntropy(y)).value, abs=1e-12)


def test_a_hand_written_backward_is_refused(group: Any) -> None:
    torch.manual_seed(0)
    model, (x, y) = WithBackward(4, 3).double(), data()
    assert sf.evaluate(copy.deepcopy(model), x, sf.CrossEntropy(y)).error < 1e-12
    with pytest.raises(sf.errors.SurefootError, match="backward of 'Doubled'"):
        sf.evaluate(shards(model, group), x, sf.CrossEntropy(y), group=group)


def test_norms_of_parts(group: Any) -> None:
    """Those that do not count or have no entries add nothing; squares may overflow in single precision."""
    processes, mesh = Processes(group), DeviceMesh.from_group(group, "cpu")
    place = Placed(distribute_tensor(torch.ones(2, 2), mesh), processes)
    assert place.counts
    parts = [torch.tensor([3.0, 4.0]), torch.ones(7), torch.empty(0), torch.tensor([3e30, 4e30])]
    assert norms(processes, parts, [True, False, True, True]) == pytest.approx([5.0, 0.0, 0.0, 5e30], rel=1e-6)


def test_mini_batches_train_what_was_laid_by_fully_shard(group: Any) -> None:
    x, y = data()
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    whole = plain()
    expected = sf.ProvedEpochs(torch.optim.SGD, sf.CrossEntropy(), batches, model=whole, burst=1).step()
    mesh = DeviceMesh.from_group(group, "cpu")
    model = plain()
    fully_shard(model, mesh=mesh, ignored_params={model.more})  # type: ignore[arg-type]
    training = sf.ProvedEpochs(torch.optim.SGD, sf.CrossEntropy(), batches, model=model, burst=1, group=group)
    assert training.step() == pytest.approx(expected, rel=1e-10)
    for found, value in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(getattr(found, "full_tensor", lambda found=found: found)(), value)
    laid = nn.Linear(4, 3).double()
    laid.weight = nn.Parameter(distribute_tensor(laid.weight.detach(), mesh))
    for given, options in ((model, {}), (laid, {"group": group})):
        with pytest.raises(sf.optim.OptimizerError, match="fully_shard was called on, with group="):
            sf.ProvedEpochs(torch.optim.SGD, sf.CrossEntropy(), batches, model=given, **options)

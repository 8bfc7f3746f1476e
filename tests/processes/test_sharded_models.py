"""Models whose weights are sharded over processes are refused by name, whatever they are passed to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import surefoot as sf

X, Y = torch.ones(6, 4), torch.arange(6) % 3
LOSS = sf.CrossEntropy()
CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "certify": lambda model: sf.certify(model, X, objective=LOSS, y=Y),
    "certify, norms": lambda model: sf.certify(model, X, input_norm=1.0),
    "evaluate": lambda model: sf.evaluate(model, X, LOSS, Y, group=distributed.group.WORLD),
    "estimate": lambda model: sf.estimate(model, X),
    "chain": lambda model: sf.Chain(model, X),
    "convergence": lambda model: sf.convergence(model, X, LOSS.bound_to(Y)),
    "descent": lambda model: sf.CertifiedDescent(model, LOSS).step(X, Y),
    "gauss-newton": lambda model: sf.GaussNewton(model, LOSS, group=distributed.group.WORLD).step(X, Y),
    "epochs": lambda model: sf.ProvedEpochs(torch.optim.SGD, LOSS, [(X, Y)], model=model),
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    store, minute = distributed.HashStore(), timedelta(seconds=60)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=minute)
    yield DeviceMesh.from_group(distributed.group.WORLD, "cpu")
    distributed.destroy_process_group()


def in_use(mesh: DeviceMesh) -> nn.Module:
    """After a forward pass, when the weights of ``fully_shard`` are whole for a while."""
    model = fully_shard(nn.Linear(4, 3), mesh=mesh, reshard_after_forward=False)
    model(X)
    return model


def laid(mesh: DeviceMesh) -> nn.Module:
    model = nn.Linear(4, 3)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh))
    return model


MODELS = {"fully_shard": lambda mesh: fully_shard(nn.Linear(4, 3), mesh=mesh), "in use": in_use, "DTensor": laid}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("model", MODELS)
def test_sharded_weights_are_refused(mesh: DeviceMesh, model: str, call: str) -> None:
    with pytest.raises(sf.errors.SurefootError, match=r"sharded over several processes.*full_state_dict"):
        CALLS[call](MODELS[model](mesh))

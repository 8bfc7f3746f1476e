"""Several processes with a part of the data each have what one has on the joined batch, and all the same."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot as sf
from surefoot.optim import CertifiedDescent, OptimizerError
from surefoot.processes import ProcessError, Processes, ProcessLost

SHARES = {2: (0, 17, 30), 4: (0, 11, 11, 13, 30)}  # where the samples of each process begin: uneven, one empty
STEPS = 5


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    x = torch.randn(30, 4).double()
    return x, (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()


LOSSES: dict[str, Callable[[], Any]] = {
    "plain": sf.CrossEntropy,
    "weighted": lambda: sf.CrossEntropy(weight=[1.0, 2.0, 0.3], ignore_index=1),
    "sum": lambda: sf.CrossEntropy(reduction="sum"),
}
RUNS: dict[str, dict[str, Any]] = {
    "lbfgs": {},
    "conjugate": {"direction": "conjugate", "weight_decay": 0.01},
    "foreign": {"direction": torch.optim.Adam},
}


def refused(action: Callable[[], object]) -> str:
    """What an action is refused with."""
    try:
        action()
    except sf.errors.SurefootError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def work(rank: int, size: int, folder: str) -> None:
    """All that one process does; what it has in the end is saved."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    group = distributed.group.WORLD
    x, y = (part[slice(*SHARES[size][rank : rank + 2])] for part in data())
    loader = DataLoader(TensorDataset(x, y), batch_size=5) if len(y) else []
    found: dict[str, Any] = {}
    for name, build in LOSSES.items():
        ways = {
            "batch": sf.evaluate(network(), x, build(), y, group=group),
            "bound": sf.evaluate(network(), x, build().bound_to(y), group=group),
            "loader": sf.evaluate(network(), loader, build(), group=group),
        }
        found.update({f"{name} {way}": (value.value, value.error) for way, value in ways.items()})
    for name, options in RUNS.items():
        model = network()
        optimizer = CertifiedDescent(model, sf.CrossEntropy(), group=group, **options)
        losses = [optimizer.step(x, y) if name != "conjugate" else optimizer.step(loader) for _ in range(STEPS)]
        found[f"run {name}"] = {
            "weights": {key: value.detach() for key, value in model.named_parameters()},
            "losses": [*losses, optimizer.value(x, y)],
            "history": [repr(record) for record in optimizer.history],
            "sent": optimizer.processes.sent if optimizer.processes else 0,
        }
    found |= refusals(rank, x, y, group)
    if size == 4:
        few = distributed.new_group([1, 3])
        if rank in (1, 3):
            pair = sf.evaluate(network(), x, sf.CrossEntropy(), y, group=few)
            found["pair"] = pair.value, pair.error
        else:
            found["stranger"] = refused(lambda: Processes(few))
    torch.save(found, f"{folder}/{rank}.pt")
    short = distributed.new_group(timeout=timedelta(seconds=2))
    distributed.barrier()
    if rank == size - 1:
        os._exit(0)  # dies without a word
    model = network()
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), group=short)
    found["lost"] = refused(lambda: optimizer.step(x, y)), not optimizer.history
    torch.save(found, f"{folder}/{rank}.pt")
    os._exit(0)  # the group cannot be left in order


def refusals(rank: int, x: Tensor, y: Tensor, group: Any) -> dict[str, Any]:
    """What goes wrong on one process is raised on all, and leaves the weights as they were."""
    found: dict[str, Any] = {}
    spoilt = x.clone()
    if rank == 1:
        spoilt = torch.full((2, 4), torch.nan).double()
    labels = y if rank != 1 else torch.tensor([0, 1])
    found["nan"] = refused(lambda: sf.evaluate(network(), spoilt, sf.CrossEntropy(), labels, group=group))
    model = network()
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), group=group)
    found["nan step"] = refused(lambda: optimizer.step(spoilt, labels))
    found["no targets"] = refused(lambda: optimizer.step(x, y if rank else None))
    found["closure"] = refused(lambda: optimizer.step(x, y, None if rank else lambda: (x, x)))
    found["kept"] = all(map(torch.equal, model.parameters(), network().parameters())), len(optimizer.history)
    optimizer.step(x, y)
    with torch.no_grad():
        next(model.parameters()).add_(rank)
    found["apart"] = refused(lambda: optimizer.step(x, y))
    found["apart value"] = refused(lambda: sf.evaluate(model, x, sf.CrossEntropy(), y, group=group))
    normal = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    for parameter in normal.parameters():
        nn.init.constant_(parameter, 0.5)
    found["normal"] = refused(lambda: sf.evaluate(normal, x, sf.CrossEntropy(), y, group=group))
    found["normal step"] = refused(lambda: CertifiedDescent(normal, sf.CrossEntropy(), group=group).step(x, y))
    value = sf.evaluate(normal.eval(), x, sf.CrossEntropy(), y, group=group)
    found["normal eval"] = value.value, value.error
    return found


@pytest.fixture(scope="module", params=sorted(SHARES))
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    size: int = request.param
    folder: Path = tmp_path_factory.mktemp(f"processes{size}")
    torch.multiprocessing.start_processes(work, (size, str(folder)), size, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


@pytest.mark.parametrize("name", LOSSES)
def test_the_value_is_that_of_the_joined_batch(outcome: list[dict[str, Any]], name: str) -> None:
    x, y = data()
    whole = sf.evaluate(network(), x, LOSSES[name](), y)
    for way in ("batch", "bound", "loader"):
        assert len({part[f"{name} {way}"] for part in outcome}) == 1
        value, error = outcome[0][f"{name} {way}"]
        assert abs(value - whole.value) <= error + whole.error
        assert error < 3 * whole.error


@pytest.mark.parametrize("name", RUNS)
def test_steps_are_those_on_the_joined_batch(outcome: list[dict[str, Any]], name: str) -> None:
    x, y = data()
    model = network()
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), **copy.deepcopy(RUNS[name]))
    losses = [optimizer.step(x, y) for _ in range(STEPS)]
    runs = [part[f"run {name}"] for part in outcome]
    for run in runs:
        assert run["losses"] == runs[0]["losses"]
        assert run["history"] == runs[0]["history"]
        assert len(run["history"]) == STEPS
        for key, value in model.named_parameters():
            assert torch.equal(run["weights"][key], runs[0]["weights"][key])
            assert torch.allclose(run["weights"][key], value, rtol=0, atol=1e-8)
    assert runs[0]["losses"] == pytest.approx([*losses, optimizer.value(x, y)], abs=1e-10)
    assert all(after < before for before, after in pairwise(losses))


def test_numbers_and_gradients_cross_but_no_activations(outcome: list[dict[str, Any]]) -> None:
    size = 8 * sum(value.numel() for value in network().parameters())
    for name in RUNS:
        sent = [part[f"run {name}"]["sent"] for part in outcome]
        passes = 24 * STEPS
        assert STEPS * size < min(sent)
        assert max(sent) <= passes * (2 * size + 1000)


def test_what_goes_wrong_on_one_process_is_raised_on_all(outcome: list[dict[str, Any]]) -> None:
    for rank, part in enumerate(outcome):
        assert "NaN" in part["nan"]
        assert ("process 1 of the group failed" in part["nan"]) == (rank != 1)
        assert "NaN" in part["nan step"]
        assert "targets" in part["no targets"]
        assert "closure" in part["closure"]
        assert part["kept"] == (True, 0)
        assert "other parameters or buffers than process 0" in part["apart"]
        assert "other parameters or buffers than process 0" in part["apart value"]


def test_statistics_of_batches_are_refused(outcome: list[dict[str, Any]]) -> None:
    for part in outcome:
        assert "computes its statistics from each batch" in part["normal"]
        assert "computes its statistics from each batch" in part["normal step"]
        assert part["normal eval"] == outcome[0]["normal eval"]


def test_a_group_may_be_some_of_the_processes(outcome: list[dict[str, Any]]) -> None:
    if len(outcome) == 4:
        x, y = data()
        rows = slice(13, 30)
        whole = sf.evaluate(network(), x[rows], sf.CrossEntropy(), y[rows])
        value, error = outcome[1]["pair"]
        assert outcome[3]["pair"] == (value, error)
        assert abs(value - whole.value) <= error + whole.error
        assert "not in the group" in outcome[0]["stranger"]


def test_a_process_that_dies_raises_on_the_others(outcome: list[dict[str, Any]]) -> None:
    for part in outcome[:-1]:
        message, unchanged = part["lost"]
        assert message.startswith(ProcessLost.__name__)
        assert "start all of them again" in message
        assert unchanged


def test_refusals_without_a_group() -> None:
    x, y = data()
    with pytest.raises(ProcessError, match="init_process_group"):
        sf.evaluate(network(), x, sf.CrossEntropy(), y, group=object())
    for options in ({"proof": "ball"}, {"until": "proved"}, {"direction": "gauss_newton"}):
        with pytest.raises(ValueError, match="with a group"):
            CertifiedDescent(network(), sf.CrossEntropy(), group=object(), **options)
    assert issubclass(OptimizerError, sf.errors.SurefootError)

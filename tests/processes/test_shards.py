"""Models none of whose processes has all weights are evaluated, differentiated and trained as whole ones are."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
from group_oracles import bursts, joint_batches, mini_batches, whole
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import surefoot as sf
from surefoot.graph import outline, placed
from surefoot.graph.fetched import Fetched
from surefoot.optim import ProvedEpochs
from surefoot.processes import ProcessLost

STARTS = (0, 17, 17, 30)  # the samples of three processes, one of which has none
WIDTH, STEPS = 24, 3
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lbfgs": (sf.CertifiedDescent, {"weight_decay": 0.01}),
    "conjugate": (sf.CertifiedDescent, {"direction": "conjugate"}),
    "gradient": (sf.CertifiedDescent, {"regularizer": sf.ElasticNet(0.01, 0.01)}),
}
CERTIFIED: dict[str, dict[str, Any]] = {  # by model
    "deep": {"effort": "quick", "regularizer": sf.Ridge(0.1)},
    "tied": {"domain": sf.Ball(0.02)},
}
TRAINED = ("convolutional", "tied")  # by mini-batches


class Tied(nn.Module):
    """Uses a weight twice, as it is and turned, another in two pieces, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.twice, self.cut = nn.Parameter(torch.randn(8, 8) / 3), nn.Parameter(torch.randn(16, 8) / 3)
        self.last.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        upper, lower = self.cut.chunk(2)
        hidden = torch.tanh(self.first(x) @ self.twice)
        hidden = torch.tanh(hidden @ self.twice.T @ upper) * (hidden @ lower).sigmoid()
        result: Tensor = self.last(hidden)
        return result


def deep() -> nn.Module:
    layers = [part for _ in range(5) for part in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())]
    return nn.Sequential(nn.Linear(6, WIDTH), *layers, nn.Linear(WIDTH, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(10, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {"deep": deep, "convolutional": convolutional, "tied": Tied}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    x = torch.randn(30, 6).double()
    return x, (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()


def shards(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def parts() -> list[tuple[Tensor, Tensor]]:
    """The samples of each process."""
    x, y = data()
    return [(x[first:last], y[first:last]) for first, last in pairwise(STARTS)]


def normalised() -> nn.Module:
    """Has running statistics, and drops units at random."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


def epochs(mesh: DeviceMesh, batches: list[Any], group: Any) -> dict[str, Any]:
    """Of mini-batches: runs to compare, running statistics, and weights that somebody changes on one process."""
    found: dict[str, Any] = {name: bursts(shards(made(name), mesh), batches, group=group) for name in TRAINED}
    model = shards(normalised(), mesh)
    training = ProvedEpochs(torch.optim.Adam, sf.CrossEntropy(), batches, model=model, burst=1, group=group)
    losses = [training.step(), training.step()]
    model(data()[0])  # after which some weights are whole for a while
    saved = training.state_dict()
    with torch.no_grad():
        first = next(model.parameters())
        if group.rank() == 0:
            first.to_local().mul_(2)  # type: ignore[operator]
    training.load_state_dict(saved)
    changed = training.step()
    value = sf.evaluate(model.eval(), batches, sf.CrossEntropy(), group=group).value
    statistics = [buffer.clone() for buffer in model.buffers()]
    found["normalised"] = [*losses, changed, value], training.history[-1].note, statistics, training.rate
    return found


def asked(name: str, mesh: Any, x: Tensor, y: Tensor, batches: list[Any], **group: Any) -> dict[str, Any]:
    """Values and errors, gradient steps, and runs."""
    loss, found = sf.CrossEntropy(), dict[str, Any]()

    def model() -> nn.Module:
        return made(name) if mesh is None else shards(made(name), mesh)

    for key, given in (("batch", (x, loss, y)), ("loader", (batches, loss))):
        value = sf.evaluate(model(), *given, **group)
        found[key] = value.value, value.error
    network = model()
    if name in CERTIFIED:
        certificate = sf.certify(network, batches, objective=loss, **CERTIFIED[name], **group)
        numbers = [certificate.step_size, *map(float, (certificate.smoothness, certificate.lipschitz))]
        found["certified"] = numbers, certificate.block_gradients
    for key, (optimizer, options) in RUNS.items():
        network = model()
        training = optimizer(network, loss, **options, **group)
        losses = [training.step(x, y) for _ in range(STEPS)] + [training.value(x, y)]
        promises = [record.promised_decrease for record in training.history]
        found[key] = losses, promises, {path: whole(value) for path, value in network.named_parameters()}
    return found


class Broken:
    """A loader that does something in the middle of a pass."""

    def __init__(self, batches: list[Any], event: Callable[[], Any]) -> None:
        self._batches, self._event = batches, event

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches[:1]
        self._event()
        yield from self._batches[1:]


class Ending(nn.Tanh):
    """A layer in which a process dies when it is told to."""

    ends = False

    def forward(self, x: Tensor) -> Tensor:
        if self.ends:
            os._exit(0)
        return super().forward(x)


def left(rank: int, batches: list[Any], group: Any) -> str:
    """What a process says when another one dies in the middle of the model, while mini-batches train it."""
    layer = Ending()
    model = shards(
        nn.Sequential(nn.Linear(6, 4), layer, nn.Linear(4, 3)).double(), DeviceMesh.from_group(group, "cpu")
    )
    training = ProvedEpochs(torch.optim.Adam, sf.CrossEntropy(), batches, model=model, burst=1, group=group)
    training.step()
    layer.ends = rank == 1
    with pytest.raises(ProcessLost) as caught:
        training.step()
    return str(caught.value)


class Refused(Exception):
    """Something that goes wrong on one process."""


def refused() -> None:
    raise Refused("the disk is full")


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", 3)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=60))
    group, kept, pair = distributed.group.WORLD, list[Fetched](), distributed.new_group([0, 1])
    mesh = DeviceMesh.from_group(group, "cpu")

    class Counted(Fetched):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            kept.append(self)

    outline.Fetched = Counted  # type: ignore[misc]
    x, y = (part[STARTS[rank] : STARTS[rank + 1]] for part in data())
    batches = list(zip(x.split(5), y.split(5), strict=True)) if len(y) else []
    found: dict[str, Any] = {}
    for name in MODELS:
        placed.SMALL = WIDTH if name == "deep" else 1 << 16  # so that its matrices are gathered one by one
        found[name] = asked(name, mesh, x, y, batches, group=group)
        found[f"{name} most"], found[f"{name} passes"] = max(one.most for one in kept), len(kept)
        kept.clear()
    model = shards(made("deep"), mesh)
    found["alone"] = sf.evaluate(
        model, data()[0], sf.CrossEntropy(data()[1])
    ).value  # each on its own, without a group
    own = sf.certify(model, data()[0], objective=sf.CrossEntropy(data()[1]), effort="quick")
    found["alone certified"] = own.step_size, float(own.smoothness)
    found["resumed"] = resumed(mesh, x, y, group)
    found["reloaded"] = reloaded(rank, folder)
    found["epochs"] = epochs(mesh, mini_batches((x, y), 5), group)
    loader = Broken(batches, refused if rank == 2 else lambda: None)
    try:
        sf.evaluate(model, loader, sf.CrossEntropy(), group=group)
    except Exception as error:
        found["failed"] = f"{type(error).__name__}: {error}"
    found["after"] = sf.evaluate(model, batches, sf.CrossEntropy(), group=group).value
    optimizer = sf.CertifiedDescent(model, sf.CrossEntropy(), group=group)
    before = [whole(value) for value in model.parameters()]
    parts = [value.to_local().clone() for value in model.parameters()]  # type: ignore[operator]
    if rank == 2:
        loader = Broken(batches, lambda: os._exit(0))  # dies in the middle of a pass
    try:
        torch.save(found, f"{folder}/{rank}.pt")
        optimizer.step(loader if rank == 2 else batches)
    except ProcessLost as error:
        found["lost"] = str(error)
    same = [torch.equal(part, value.to_local()) for part, value in zip(parts, model.parameters(), strict=True)]  # type: ignore[operator]
    found["unchanged"] = all(same) and len(before) == len(same)
    torch.save(found, f"{folder}/{rank}.pt")
    found["left"] = left(rank, mini_batches((data()[0][:12], data()[1][:12]), 5), pair)  # rank 1 dies, too
    torch.save(found, f"{folder}/{rank}.pt")
    os._exit(0)  # the group cannot be left in order


def resumed(mesh: DeviceMesh, x: Tensor, y: Tensor, group: Any) -> list[list[float]]:
    """Losses of a run that goes on, of one that was saved by each process and goes on, and of one where all have
    the state of process 0, so that directions begin anew.
    """
    network = shards(made("deep"), mesh)
    first = sf.CertifiedDescent(network, sf.CrossEntropy(), group=group)
    for _ in range(STEPS):
        first.step(x, y)
    weights = [value.to_local().detach().clone() for value in network.parameters()]  # type: ignore[operator]
    assert first.processes is not None
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    own, leading = (
        torch.load(io.BytesIO(one)) for one in (file.getvalue(), first.processes.tell(file.getvalue()))
    )
    found = [[first.step(x, y) for _ in range(3)]]
    for state in (own, leading):
        other = shards(made("deep"), mesh)
        with torch.no_grad():
            for value, part in zip(other.parameters(), weights, strict=True):
                value.to_local().copy_(part)  # type: ignore[operator]
        training = sf.CertifiedDescent(other, sf.CrossEntropy(), group=group)
        training.load_state_dict(state)
        found.append([training.step(x, y) for _ in range(3)])
    return found


def went_on(training: ProvedEpochs) -> list[float]:
    """How a training in mini-batches goes on: losses, with those of before, and the rate."""
    training.step()
    return [*(record.after for record in training.history), training.rate]


DIRECTIONS = ("lbfgs", "conjugate")


def reloaded(rank: int, folder: str) -> dict[str, Any]:
    """Losses after three steps, of runs that go on and of such as were saved by another number of processes; and
    whether one noticed that the weights are others.
    """
    everyone, pair, alone = distributed.group.WORLD, distributed.new_group([0, 1]), distributed.new_group([2])
    groups = {3: everyone, 2: pair, 1: alone}
    found: dict[str, Any] = {}

    def run(direction: str, size: int, saved: int | None) -> None:
        group = groups[size]
        mesh, first = DeviceMesh.from_group(group, "cpu"), distributed.get_rank(group)
        x, y = (part[first::size] for part in data())
        model = shards(made("tied"), mesh)
        training = sf.CertifiedDescent(model, sf.CrossEntropy(), direction=direction, group=group)
        if saved is None:
            for _ in range(STEPS):
                training.step(x, y)
            state = {"model": model.state_dict(), "optimizer": training.state_dict()}
            checkpoint.save(state, checkpoint_id=f"{folder}/{direction}{size}", process_group=group)
        else:
            state = {"model": model.state_dict(), "optimizer": training.state_dict()}
            checkpoint.load(state, checkpoint_id=f"{folder}/{direction}{saved}", process_group=group)
            model.load_state_dict(state["model"])
            training.load_state_dict(state["optimizer"])
        again = training.state_dict()["surefoot"]["vectors"]
        losses = [training.step(x, y) for _ in range(STEPS)]
        found[f"{direction} {saved} {size}"] = losses, [record.run for record in training.history]
        if (saved, size) == (2, 3):
            own = {**state["optimizer"]["surefoot"], "vectors": again}
            training.load_state_dict({**state["optimizer"], "surefoot": own})
            training.step(x, y)  # at other weights
            found[f"{direction} elsewhere"] = training.history[-1].run

    def train(size: int, saved: bool) -> None:
        """A mini-batch is all data, so that it is the same for any number of processes."""
        group = groups[size]
        batches = [[part[distributed.get_rank(group) :: size] for part in data()]]
        model = shards(made("tied"), DeviceMesh.from_group(group, "cpu"))
        training = ProvedEpochs(torch.optim.Adam, sf.CrossEntropy(), batches, model=model, burst=6, group=group)
        before = len(training.optimizer.state)
        losses = [] if saved else [training.step(), training.step()]
        state = {"model": model.state_dict(), "training": training.state_dict()}
        assert len(training.optimizer.state) == before or losses
        if saved:
            checkpoint.load(state, checkpoint_id=f"{folder}/epochs", process_group=group)
            model.load_state_dict(state["model"])
            training.load_state_dict(state["training"])
            found[f"epochs {size}"] = went_on(training)
        else:
            checkpoint.save(state, checkpoint_id=f"{folder}/epochs", process_group=group)

    if rank != 2:
        train(2, False)
    distributed.barrier()
    train(3, True)
    train(1 if rank == 2 else 2, True)
    for direction in DIRECTIONS:
        run(direction, 1 if rank == 2 else 2, None)
        distributed.barrier()
        run(direction, 3, 2)
        run(direction, 1 if rank == 2 else 2, 2 if rank == 2 else 1)
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("shards")
    torch.multiprocessing.start_processes(work, (str(folder),), 3, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt") for rank in range(3)]


@pytest.mark.parametrize("name", MODELS)
def test_values_gradients_and_steps_are_those_of_whole_weights(outcomes: list[dict[str, Any]], name: str) -> None:
    x, y = data()
    batches = [(x[a:b], y[a:b]) for start, end in ((0, 17), (17, 30)) for a, b in
               ((k, min(k + 5, end)) for k in range(start, end, 5))]  # fmt: skip
    expected = asked(name, None, x, y, batches)
    for part in outcomes:
        for key, one in part[name].items():
            single = (key, name) == ("lbfgs", "deep")  # of so many parameters, pairs are kept in single precision
            found, other = ([each[0], each[-1]] for each in (one, expected[key]))
            torch.testing.assert_close(found, other, rtol=1e-12, atol=1e-6 if single else 1e-8)
            assert key != "certified" or one == outcomes[0][name][key]
        for key in ("batch", "loader"):
            (value, error), (other, apart) = part[name][key], expected[key]
            assert part[name][key] == outcomes[0][name][key]
            assert abs(value - other) <= error + apart
            assert error < 3 * apart
        for key in RUNS.keys() & part[name].keys():
            losses, promises, _ = part[name][key]
            assert (losses, promises) == outcomes[0][name][key][:2]
            assert all(after < before for before, after in pairwise(losses))
            if RUNS[key][0] is sf.CertifiedDescent:
                assert all(0 < p <= a - b + 1e-12 for p, (a, b) in zip(promises, pairwise(losses), strict=True))


@pytest.mark.parametrize("name", TRAINED)
def test_mini_batches_train_shards_as_they_do_whole_weights(outcomes: list[dict[str, Any]], name: str) -> None:
    weights, losses, kept, rate = bursts(made(name), joint_batches(parts(), 5))
    for part in outcomes:
        found = part["epochs"][name]
        torch.testing.assert_close(found[0], weights, rtol=0, atol=1e-8)
        assert found[1] == pytest.approx(losses, rel=1e-8)
        assert found[2:] == (kept, pytest.approx(rate, rel=1e-8))
        assert found[1:] == outcomes[0]["epochs"][name][1:]


def test_mini_batches_move_the_same_statistics_everywhere(outcomes: list[dict[str, Any]]) -> None:
    for part in outcomes:
        (first, second, changed, value), note, statistics, rate = part["epochs"]["normalised"]
        assert second <= first
        assert changed == value
        assert "weights or data were changed" in note
        assert (changed, rate) == (
            outcomes[0]["epochs"]["normalised"][0][2],
            outcomes[0]["epochs"]["normalised"][3],
        )
        torch.testing.assert_close(statistics, outcomes[0]["epochs"]["normalised"][2], rtol=0, atol=0)


def test_no_process_has_more_than_a_few_weights_at_a_time(outcomes: list[dict[str, Any]]) -> None:
    sizes = {path: 8 * value.numel() for path, value in made("deep").named_parameters()}
    vectors = sum(8 * value.numel() for value in made("deep").parameters() if value.dim() < 2)
    assert 3 * max(sizes.values()) + vectors < 0.7 * sum(sizes.values())
    for part in outcomes:
        assert part["deep passes"] > 20
        assert max(sizes.values()) < part["deep most"] <= 2 * vectors + 3 * max(sizes.values())  # also directions


def test_each_process_may_evaluate_data_of_its_own(outcomes: list[dict[str, Any]]) -> None:
    x, y = data()
    value = sf.evaluate(made("deep"), x, sf.CrossEntropy(y)).value
    assert all(part["alone"] == pytest.approx(value, abs=1e-12) for part in outcomes)
    expected = sf.certify(made("deep"), x, objective=sf.CrossEntropy(y), effort="quick")
    assert all(
        part["alone certified"] == pytest.approx((expected.step_size, float(expected.smoothness)), rel=1e-12)
        for part in outcomes
    )


def test_a_run_goes_on_with_the_state_of_each_process(outcomes: list[dict[str, Any]]) -> None:
    for part in outcomes:
        going, own, leading = part["resumed"]
        assert own == pytest.approx(going, abs=1e-8)
        assert leading[0] == pytest.approx(going[0], abs=1e-12)
        assert leading[2] < leading[1] < leading[0]
        assert part["resumed"] == outcomes[0]["resumed"]


def test_mini_batches_go_on_with_another_number_of_processes(outcomes: list[dict[str, Any]]) -> None:
    model = made("tied")
    first = ProvedEpochs(torch.optim.Adam, sf.CrossEntropy(), [data()], model=model, burst=6)
    before = [first.step(), first.step()]
    training = ProvedEpochs(torch.optim.Adam, sf.CrossEntropy(), [data()], model=model, burst=6)
    training.load_state_dict(first.state_dict())
    expected = went_on(training)
    assert expected[2] < min(before)
    for part, sizes in zip(outcomes, ((3, 2), (3, 2), (3, 1)), strict=True):
        for size in sizes:
            assert part["reloaded"][f"epochs {size}"] == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_run_goes_on_with_another_number_of_processes(outcomes: list[dict[str, Any]], direction: str) -> None:
    training = sf.CertifiedDescent(made("tied"), sf.CrossEntropy(), direction=direction)
    expected = [training.step(*data()) for _ in range(2 * STEPS)][STEPS:]
    seen = set()
    for part in outcomes:
        for key, one in part["reloaded"].items():
            if key.startswith(direction) and "elsewhere" not in key:
                seen.add(key.removeprefix(direction))
                assert one[0] == pytest.approx(expected, rel=1e-8)
                assert one[1] == [0] * 2 * STEPS
        assert part["reloaded"][f"{direction} elsewhere"] == 1
    assert seen == {" None 1", " None 2", " 2 3", " 2 1", " 1 2"}


def test_what_goes_wrong_in_the_middle_of_a_pass(outcomes: list[dict[str, Any]]) -> None:
    for rank, part in enumerate(outcomes):
        assert "the disk is full" in part["failed"]
        assert ("process 2 of the group failed" in part["failed"]) == (rank != 2)
        assert part["after"] == part["deep"]["loader"][0]
    for part in outcomes[:2]:
        assert "start all of them again" in part["lost"]
        assert part["unchanged"]
    assert "start all of them again" in outcomes[0]["left"]

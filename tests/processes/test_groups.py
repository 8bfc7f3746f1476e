"""Several processes with a part of the data each have what one has on the joined batch, and all the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import group_oracles
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot as sf
from surefoot.objectives import Poisson
from surefoot.optim import CertifiedDescent
from surefoot.processes import ProcessError, Processes, ProcessLost
from surefoot.valuation.streamed import Streamed, StreamedValuer

SHARES = {2: (0, 17, 30), 4: (0, 11, 11, 13, 30)}  # where the samples of each process begin: uneven, one empty
STEPS = 5
Outcome = list[dict[str, Any]]


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
    "gradient": {"direction": "gradient", "weight_decay": 0.01},
    "foreign": {"direction": torch.optim.Adam},
}


class Counted(StreamedValuer):
    """Counts its passes."""

    passes = 0

    def evaluate(self, *given: Any, **options: Any) -> Streamed:
        Counted.passes += 1
        return super().evaluate(*given, **options)


def refused(action: Callable[[], object]) -> str:
    """What an action is refused with."""
    try:
        action()
    except sf.errors.SurefootError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def work(rank: int, folder: str) -> None:
    """All that one of four processes does, in a group of all and in one of the last two; results are saved."""
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", 4)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=60))
    pair, short = distributed.new_group([2, 3]), distributed.new_group(timeout=timedelta(seconds=2))
    patient = distributed.new_group(timeout=timedelta(minutes=10))  # two have more to do
    sf.optim.problem.StreamedValuer = Counted  # type: ignore[misc]
    everyone = distributed.group.WORLD
    four, two = asked(everyone, ["lbfgs"]), {}
    four["answers"] = group_oracles.answers(network(), part_of(everyone), everyone, 4)
    if rank >= 2:
        two = asked(pair, list(RUNS)) | refusals(pair)
        group_oracles.checkpointed(network(), part_of(pair), f"{folder}/two", pair)
        two["resumed"] = group_oracles.resumed(network(), part_of(pair), f"{folder}/one", pair)
        wrapped = nn.parallel.DistributedDataParallel(network(), process_group=pair)
        value = sf.evaluate(wrapped, *part_of(pair)[:1], sf.CrossEntropy(), part_of(pair)[1], group=pair)
        two["wrapped"] = value.value, value.error
        two["answers"] = group_oracles.answers(network(), part_of(pair), pair, 2)
    else:
        four["stranger"] = refused(lambda: Processes(pair))
    distributed.barrier(patient)
    if rank == 3:
        time.sleep(6)  # hangs, then dies without a word
    else:
        model = network()
        optimizer = CertifiedDescent(model, sf.CrossEntropy(), group=short)
        four["hung"] = refused(lambda: optimizer.step(*part_of(short)))
        four["unchanged"] = not optimizer.history and all(
            map(torch.equal, model.parameters(), network().parameters())
        )
        loader = group_oracles.mini_batches(part_of(None), 5)
        died = group_oracles.calls(model, loader, group=everyone)
        four["died"] = {name: refused(call) for name, call in died.items()}
    torch.save((two, four), f"{folder}/{rank}.pt")
    os._exit(0)  # the group cannot be left in order


def part_of(group: Any) -> tuple[Tensor, Tensor]:
    """The samples of this process."""
    rank, starts = distributed.get_rank(group), SHARES[distributed.get_world_size(group)]
    return parts_of(starts)[rank]


def parts_of(starts: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """The samples of each process."""
    x, y = data()
    return [(x[first:last], y[first:last]) for first, last in pairwise(starts)]


def asked(group: Any, runs: list[str]) -> dict[str, Any]:
    """Values and runs of a group."""
    x, y = part_of(group)
    loader = DataLoader(TensorDataset(x, y), batch_size=5) if len(y) else []
    found: dict[str, Any] = {}
    for name, build in LOSSES.items():
        ways = {
            "batch": sf.evaluate(network(), x, build(), y, group=group),
            "bound": sf.evaluate(network(), x, build().bound_to(y), group=group),
            "loader": sf.evaluate(network(), loader, build(), group=group),
        }
        found.update({f"{name} {way}": (value.value, value.error) for way, value in ways.items()})
    parts = parts_of(SHARES[distributed.get_world_size(group)])
    found["views"] = views(group)
    found["other"] = on_other_data(parts, distributed.get_rank(group), group)
    found["overflow"] = overflowing(x, y, group)
    for name in runs:
        model, Counted.passes = network(), 0
        optimizer = CertifiedDescent(model, sf.CrossEntropy(), group=group, **RUNS[name])
        losses = [optimizer.step(x, y) if name != "gradient" else optimizer.step(loader) for _ in range(STEPS)]
        state, passes, sent = optimizer.state_dict(), Counted.passes, counted(optimizer)
        found[f"run {name}"] = {
            "weights": {key: value.detach() for key, value in model.named_parameters()},
            "losses": [*losses, optimizer.value(x, y)],
            "history": [repr(record) for record in optimizer.history],
            "state": state,
            "passes": passes,
            "sent": sent,
        }
    return found


def views(group: Any) -> tuple[list[int], list[Tensor]]:
    """Bytes handed over for two numbers of a long vector, in each way to send them, and what arrives."""
    processes, sent = Processes(group), list[int]()
    few = torch.arange(10_000.0)[7:9]
    found = [processes.gathered(lambda: few)[-1]]
    sent.append(processes.sent)
    found += [one["part"] for one in processes.collected(lambda: {"part": few})]
    sent.append(processes.sent - sent[-1])
    found.append(processes.tell(few))
    return [*sent, processes.sent - sum(sent)], found


def growing() -> nn.Sequential:
    """Whose outputs are exponents."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3)).double()


def far(weights: dict[str, Tensor], slopes: dict[str, Tensor]) -> dict[str, Tensor]:
    """A direction along which the first trials overflow."""
    return {name: -1e4 * slope for name, slope in slopes.items()}


def overflowing(x: Tensor, y: Tensor, group: Any = None) -> tuple[list[float], bool]:
    """Steps whose first trials have no finite value: losses, and whether one was along the direction."""
    optimizer = CertifiedDescent(growing(), Poisson(), direction=far, group=group)
    targets = nn.functional.one_hot(y, 3).double()
    losses = [optimizer.step(x, targets) for _ in range(3)]
    return losses, any(record.note == "" for record in optimizer.history)


def on_other_data(parts: list[tuple[Tensor, Tensor]], rank: int | None, group: Any = None) -> list[float]:
    """Losses of steps: the last process gets other data after one, the first after two, then the model changes.
    ``None`` is one process with all parts.
    """
    model = network()
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), group=group)
    losses = []
    for scales in ((1, 1), (1, 2), (3, 2), (3, 2)):
        scaled = {0: scales[0], len(parts) - 1: scales[1]}
        given = [(x * scaled.get(k, 1), y) for k, (x, y) in enumerate(parts)]
        if rank is None:
            given.append((torch.cat([x for x, _ in given]), torch.cat([y for _, y in given])))
        losses.append(optimizer.step(*given[-1 if rank is None else rank]))
        if len(losses) == 3:
            model[1] = nn.Sigmoid()
    return losses


def counted(optimizer: CertifiedDescent) -> int:
    assert optimizer.processes is not None
    return optimizer.processes.sent


def refusals(group: Any) -> dict[str, Any]:
    """What goes wrong on one process is raised on all, and leaves the weights as they were."""
    found: dict[str, Any] = {}
    (x, y), rank = part_of(group), distributed.get_rank(group)
    spoilt = x.clone()
    if rank == 1:
        spoilt = torch.full((2, 4), torch.nan).double()
    labels = y if rank != 1 else torch.tensor([0, 1])
    found["nan"] = refused(lambda: sf.evaluate(network(), spoilt, sf.CrossEntropy(), labels, group=group))
    model = network()
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), group=group)
    found["nan step"] = refused(lambda: optimizer.step(spoilt, labels))
    loader = [(x, y), (spoilt, labels)]
    spoilt_calls = group_oracles.calls(network(), loader, group=group)
    found["nan calls"] = {name: refused(call) for name, call in spoilt_calls.items()}
    found["no targets"] = refused(lambda: optimizer.step(x, y if rank else None))
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


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("processes")
    group_oracles.checkpointed(network(), data(), f"{folder}/one")
    torch.multiprocessing.start_processes(work, (str(folder),), 4, start_method="spawn")
    found = [torch.load(folder / f"{rank}.pt") for rank in range(4)]
    found[3][0]["two to one"] = group_oracles.resumed(network(), data(), f"{folder}/two")
    return found


@pytest.fixture
def two(outcomes: list[tuple[dict[str, Any], dict[str, Any]]]) -> Outcome:
    return [pair for pair, _ in outcomes[2:]]


@pytest.fixture
def four(outcomes: list[tuple[dict[str, Any], dict[str, Any]]]) -> Outcome:
    return [everyone for _, everyone in outcomes]


def same_value(outcome: Outcome, name: str) -> None:
    """The value is that of the joined batch."""
    x, y = data()
    whole = sf.evaluate(network(), x, LOSSES[name](), y)
    for way in ("batch", "bound", "loader"):
        assert len({part[f"{name} {way}"] for part in outcome}) == 1
        value, error = outcome[0][f"{name} {way}"]
        assert abs(value - whole.value) <= error + whole.error
        assert error < 3 * whole.error


def same_steps(outcome: Outcome, name: str) -> None:
    """Steps are those on the joined batch, on all processes; a run can be resumed in one."""
    x, y = data()
    model, resumed = network(), network()
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), **RUNS[name])
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
    assert all(after < before for before, after in pairwise(runs[0]["losses"]))
    resumed.load_state_dict(runs[0]["weights"])
    other = CertifiedDescent(resumed, sf.CrossEntropy(), **RUNS[name])
    other.load_state_dict(runs[0]["state"])
    optimizer.step(x, y), other.step(x, y)
    for value, expected in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.allclose(value, expected, rtol=0, atol=1e-8)


def test_trials_without_a_finite_value_are_too_long(two: Outcome, four: Outcome) -> None:
    losses, along = overflowing(*data())
    loader = DataLoader(TensorDataset(data()[0], nn.functional.one_hot(data()[1], 3).double()), batch_size=7)
    streamed = CertifiedDescent(growing(), Poisson(), direction=far)
    assert [streamed.step(loader) for _ in range(3)] == pytest.approx(losses, abs=1e-10)
    assert losses[2] < losses[1] < losses[0]
    for part in (*two, *four):
        assert part["overflow"][0] == pytest.approx(losses, abs=1e-10)
        assert part["overflow"][1] == along


def test_other_data_or_another_model_are_noticed(two: Outcome, four: Outcome) -> None:
    for outcome in (two, four):
        losses = on_other_data(parts_of(SHARES[len(outcome)]), None)
        assert len(set(losses)) == 4
        for part in outcome:
            assert part["other"] == outcome[0]["other"]
            assert part["other"] == pytest.approx(losses, abs=1e-8)


def few_bytes(outcome: Outcome, name: str) -> None:
    """Numbers, gradients and weights cross, each as often as is said, and nothing of the size of activations."""
    weights = 8 * sum(value.numel() for value in network().parameters())
    for rank, part in enumerate(outcome):
        run = part[f"run {name}"]
        passes = run["passes"]
        tensors = passes * weights + (0 if rank else (passes + STEPS) * weights)
        assert passes >= STEPS
        assert tensors < run["sent"] < tensors + 700 * (passes + STEPS)


@pytest.mark.parametrize("name", LOSSES)
def test_two_processes_have_the_value_of_the_joined_batch(two: Outcome, name: str) -> None:
    same_value(two, name)


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_step_as_one_does_on_the_joined_batch(two: Outcome, name: str) -> None:
    same_steps(two, name)
    few_bytes(two, name)


def test_four_processes_one_of_them_without_data(four: Outcome) -> None:
    for name in LOSSES:
        same_value(four, name)
    same_steps(four, "lbfgs")
    few_bytes(four, "lbfgs")


def test_what_goes_wrong_on_one_process_is_raised_on_all(two: Outcome) -> None:
    for rank, part in enumerate(two):
        assert "NaN" in part["nan"]
        assert ("process 1 of the group failed" in part["nan"]) == (rank != 1)
        assert "NaN" in part["nan step"]
        for said in part["nan calls"].values():
            assert "batch 1 of the loader" in said
            assert rank == 1 or "process 1 of the group failed" in said
        assert "targets" in part["no targets"]
        assert part["kept"] == (True, 0)
        assert "other parameters or buffers than process 0" in part["apart"]
        assert "other parameters or buffers than process 0" in part["apart value"]


def test_statistics_of_batches_are_refused(two: Outcome) -> None:
    for part in two:
        assert "computes its statistics from each batch" in part["normal"]
        assert "computes its statistics from each batch" in part["normal step"]
        assert part["normal eval"] == two[0]["normal eval"]


def test_a_process_that_is_not_in_the_group_is_told_so(four: Outcome) -> None:
    assert "not in the group" in four[0]["stranger"]


def test_a_process_that_hangs_or_dies_raises_on_the_others(four: Outcome) -> None:
    for part in four[:-1]:
        for said in (part["hung"], *part["died"].values()):
            assert said.startswith(ProcessLost.__name__)
            assert "start all of them again" in said
        assert part["unchanged"]


def test_refusals_without_a_group() -> None:
    x, y = data()
    with pytest.raises(ProcessError, match="init_process_group"):
        sf.evaluate(network(), x, sf.CrossEntropy(), y, group=object())
    with pytest.raises(ValueError, match="one batch"):
        CertifiedDescent(network(), sf.CrossEntropy(), group=object(), proof="segment")


def close(value: Any, expected: Any) -> None:
    """Numbers, tensors and what they are in agree up to 1e-8; everything else is equal."""
    if isinstance(value, Tensor):
        assert torch.allclose(value, expected, rtol=0, atol=1e-8)
    elif isinstance(value, float):
        assert value == pytest.approx(expected, rel=1e-8, abs=1e-12)
    elif isinstance(value, dict):
        assert value.keys() == expected.keys()
        for key, inner in value.items():
            close(inner, expected[key])
    elif isinstance(value, list | tuple):
        assert len(value) == len(expected)
        for one, other in zip(value, expected, strict=True):
            close(one, other)
    else:
        assert value == expected


@pytest.mark.parametrize("size", [2, 4])
def test_oracles_of_several_processes_are_those_of_one(two: Outcome, four: Outcome, size: int) -> None:
    found = [part["answers"]["directions"] for part in (two if size == 2 else four)]
    expected = group_oracles.directions(network(), data())
    for part in found:
        close(part, expected)
        for name, (direction, *numbers) in part.items():
            assert numbers == list(found[0][name][1:])
            assert all(torch.equal(value, found[0][name][0][path]) for path, value in direction.items())


@pytest.mark.parametrize("size", [2, 4])
def test_second_order_steps_of_several_processes(two: Outcome, four: Outcome, size: int) -> None:
    expected, outcome = group_oracles.trained(network(), data()), two if size == 2 else four
    bytes_of_weights = 8 * sum(value.numel() for value in network().parameters())
    for part in outcome:
        for name, (weights, losses, sent, history) in part["answers"]["trained"].items():
            close((weights, losses), expected[name][:2])
            first = outcome[0]["answers"]["trained"][name]
            assert all(torch.equal(value, first[0][path]) for path, value in weights.items())
            assert (losses, history) == (first[1], first[3])
            assert bytes_of_weights < sent < 300 * bytes_of_weights


@pytest.mark.parametrize("size", [2, 4])
def test_second_order_steps_of_several_processes_are_proved(two: Outcome, four: Outcome, size: int) -> None:
    found = [part["answers"]["proved"] for part in (two if size == 2 else four)]
    batches = [part for part in parts_of(SHARES[size]) if len(part[1])]
    expected = group_oracles.proved(network(), batches)
    assert all(0 < promise <= a - b for promise, (a, b) in zip(expected[2], pairwise(expected[1]), strict=True))
    for part in found:
        close(part, expected)
        assert part[1:] == found[0][1:]


@pytest.mark.parametrize("size", [2, 4])
def test_epoch_checks_of_several_processes_are_those_of_one(two: Outcome, four: Outcome, size: int) -> None:
    found = [part["answers"]["checks"] for part in (two if size == 2 else four)]
    expected = group_oracles.checks(network(), [data()])
    assert 1 < sum(expected[2]) < len(expected[2])
    for part in found:
        close(part, expected)
        assert part[1:] == found[0][1:]
        assert all(torch.equal(value, found[0][0][path]) for path, value in part[0].items())


def test_a_checkpoint_is_resumed_on_another_number_of_processes(two: Outcome) -> None:
    optimizer = CertifiedDescent(network(), sf.CrossEntropy())
    losses = [optimizer.step(*data()) for _ in range(group_oracles.STEPS + 2)][group_oracles.STEPS :]
    close(two[1]["two to one"], (losses, len(optimizer.history)))
    for part in two:
        close(part["resumed"], (losses, len(optimizer.history)))


def test_wrapped_models(two: Outcome) -> None:
    x, y = data()
    whole = sf.evaluate(network(), x, sf.CrossEntropy(y))
    for part in two:
        assert abs(part["wrapped"][0] - whole.value) <= part["wrapped"][1] + whole.error


@pytest.mark.parametrize("size", [2, 4])
def test_what_crosses_is_what_the_page_says(two: Outcome, four: Outcome, size: int) -> None:
    parameters, outputs = 67, 90
    pull = 8 * (outputs + parameters), 8 * parameters
    push = 8 * (parameters + outputs), 8 * outputs
    for rank, part in enumerate(two if size == 2 else four):
        *passes, certificate = part["answers"]["sent"]
        for found, predicted in zip(passes, (pull, push), strict=True):
            assert 0 < found - predicted[min(rank, 1)] < 300  # words, and that all went well
        assert 0 < certificate - 8 * (parameters + parameters**2) < 12_000  # constants, and what process 0 returns


@pytest.mark.parametrize("size", [2, 4])
def test_of_a_part_of_a_tensor_that_part_alone_crosses(two: Outcome, four: Outcome, size: int) -> None:
    for part in two if size == 2 else four:
        sent, found = part["views"]
        assert all(bytes_ < 2000 for bytes_ in sent)
        assert all(value.tolist() == [7.0, 8.0] for value in found)


CONSTANTS = "bound", "lipschitz", "smoothness"


@pytest.mark.parametrize("size", [2, 4])
def test_certificates_and_verdicts_of_several_processes(two: Outcome, four: Outcome, size: int) -> None:
    outcome, parts = two if size == 2 else four, parts_of(SHARES[size])
    expected = group_oracles.certificates(network(), parts, group_oracles.asked_of(size))
    few = [(x[:2], y[:2]) for x, y in parts]
    proved = group_oracles.verdict((torch.cat([x for x, _ in few]), torch.cat([y for _, y in few])))
    assert proved[0]
    if size == 2:
        joined = sf.certify(
            network(), data()[0], objective=sf.CrossEntropy(data()[1]), domain=sf.Ball(0.0)
        ).to_dict()
        close([expected["weights"][key] for key in CONSTANTS], [joined[key] for key in CONSTANTS])
    for part in outcome:
        close(part["answers"]["certificates"], expected)
        assert part["answers"]["certificates"] == outcome[0]["answers"]["certificates"]
        close(part["answers"]["verdict"], proved)


@pytest.mark.slow
def test_the_command_on_the_page(tmp_path: Path) -> None:
    """The script of the page runs by the one command that is shown, and ends with a small value that is proved."""
    pages = [Path(__file__).parents[2] / name for name in ("README.md", "docs/processes.md")]
    readme, page = (path.read_text(encoding="utf-8") for path in pages)
    (script,), (command,) = (re.findall(rf"```{kind}\n(.*?)```", page, re.S) for kind in ("python", "bash"))
    assert set(re.findall(r"^[$ ]*(torchrun .*)$", readme, re.M)) == {command.strip()}
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    program, *rest = command.split()
    assert program == "torchrun"
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *rest],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    value, error = (float(number) for number in run.stdout.partition(",")[0].split("±"))
    assert 0 < value < 0.1
    assert 0 < error < 1e-10

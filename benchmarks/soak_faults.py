"""Rounds of the reliability run with files, full disks, commands and several processes."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

import surefoot as sf
from benchmarks.soak_rounds import MET, OPTIMIZERS, Fault, Round, data, deep, network, pick, spoilt, weights
from surefoot.cli.running import save_weights
from surefoot.cli.subject import load_weights
from surefoot.data import read_tensors
from surefoot.errors import SurefootError
from surefoot.optim import GaussNewton
from surefoot.report import write_report

_COMMAND = "import surefoot.cli; surefoot.cli.main()"
_CTRL_C = (
    "import signal; signal.signal(signal.SIGPROF, lambda *_: signal.raise_signal(signal.SIGINT)); "
    "signal.setitimer(signal.ITIMER_PROF, {moment}, 10); "  # in seconds of processor time, then once more
)
_PATIENCE = 30  # seconds after which a process of a group gives the others up
_COMPUTES, _WAITS = 120, 800  # seconds of processor time, and on a busy machine of waiting, that no process takes


def cut_off(dice: random.Random) -> str:
    """A truncated file of weights is refused by a sentence."""
    model = network(dice)
    path = Path(tempfile.mkdtemp()) / pick(dice, "cut off", {n: n for n in ("weights.pt", "weights.safetensors")})
    save_weights(model, path)
    whole, before = path.read_bytes(), weights(model)
    path.write_bytes(whole[: dice.choice((dice.randrange(len(whole)), len(whole) - 1, 0))])
    try:
        load_weights(model, path)
    except SurefootError:
        if not all(map(torch.equal, before, model.parameters())):
            raise Fault("a file that was refused changed the weights") from None
        return "a file that was cut off"
    raise Fault(f"{path.name} was cut off after {path.stat().st_size} of {len(whole)} bytes, and was read")


@contextmanager
def full_after(size: int) -> Iterator[None]:
    """In the body no file can be longer than this: what lies beyond fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full_disk(dice: random.Random) -> str:
    """Where there is no room, weights or a report are as before, and are written later."""
    model, folder = network(dice), Path(tempfile.mkdtemp())
    x = torch.randn(2, 3, dtype=next(model.parameters()).dtype)
    certificate = sf.certify(model, x, objective=sf.Square(torch.zeros(2, 2, dtype=x.dtype)), domain=sf.Ball(0.01))
    kinds: dict[str, Callable[[], Any]] = {
        "weights.pt": lambda: save_weights(model, folder / "weights.pt"),
        "weights.safetensors": lambda: save_weights(model, folder / "weights.safetensors"),
        "report.html": lambda: write_report(folder / "report.html", certificate),
    }
    name, write = pick(dice, "full disk", {name: (name, write) for name, write in kinds.items()})
    write()
    before = (folder / name).read_bytes()
    try:
        with full_after(dice.randrange(max(len(before) // 2, 1))):
            write()
    except (SurefootError, OSError):  # a report is the library's: it raises what Python does
        if (folder / name).read_bytes() != before:
            raise Fault(f"{name} is not as before") from None
        if len(list(folder.iterdir())) > 1:
            raise Fault(f"something is left behind: {list(folder.iterdir())}") from None
        write()
        return "a full disk"
    raise Fault(f"{name} was written to a full disk")


def _limit() -> None:
    """The system ends this process by ``SIGXCPU`` if it computes for too long."""
    resource.setrlimit(resource.RLIMIT_CPU, (_COMPUTES, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _ran(arguments: list[str], before: str = "", largest: int | None = None) -> subprocess.CompletedProcess[str]:
    """A command behind a line of Python, perhaps with a limit on the size of files.

    Raises:
        Fault: if it computes or waits for longer than any does.
    """

    def alone() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # it is ignored by what a shell runs in the background
        _limit()
        if largest is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))

    try:
        run = subprocess.run(
            [sys.executable, "-c", before + _COMMAND, *arguments],
            capture_output=True, text=True, timeout=_WAITS, check=False, preexec_fn=alone,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Fault(f"surefoot {arguments[0]} did not end within {_WAITS} seconds") from None
    if run.returncode == -signal.SIGXCPU:
        raise Fault(f"surefoot {arguments[0]} did not end within {_COMPUTES} seconds of processor time")
    return run


def full_disk_of_a_command(dice: random.Random) -> str:
    """A command that cannot write says so, and leaves no part of a file."""
    folder = Path(tempfile.mkdtemp())
    model = ["mlp@sizes=3,4,2", "--input", "2,3"]
    asked = dice.choice(
        (
            ["certify", *model, "--report", str(folder / "page.html")],
            ["train", "--steps", "2", "--save", str(folder / "run.pt")],
        )
    )
    MET[f"full disk: surefoot {asked[0]}"] += 1
    limit = dice.randrange(100)
    run = _ran(asked, largest=limit)
    if run.returncode != 2 or "could not be written" not in run.stderr or "Traceback" in run.stderr:
        raise Fault(f"exit code {run.returncode}: {run.stderr[-500:]}")
    if any(file.stat().st_size for file in folder.iterdir()):
        raise Fault(f"a part of a file is left: {list(folder.iterdir())}")
    return "a full disk under a command"


def interrupted(dice: random.Random) -> str:
    """Ctrl-C at a random moment: no traceback, and the weights that were reached."""
    folder = Path(tempfile.mkdtemp())
    asked = ["train", "--data", "digits", "--steps", "5000", "--save", str(folder / "weights.safetensors")]
    run = _ran(asked, before=_CTRL_C.format(moment=dice.uniform(0.5, 20)))
    if "Exception ignored in" in run.stderr:  # which is what Python does inside of callbacks and destructors
        MET["fault: Ctrl-C that Python dropped, and another"] += 1
    if "Traceback" in run.stderr and "KeyboardInterrupt" not in run.stderr:
        raise Fault(f"a traceback: {run.stderr[-500:]}")
    if run.returncode == 0:
        raise Fault("Ctrl-C was lost: the command went on to its end")
    if (folder / "weights.safetensors").exists():
        MET["fault: Ctrl-C after the first step of a command"] += 1
        if not all(
            bool(value.isfinite().all()) for value in read_tensors(folder / "weights.safetensors").values()
        ):
            raise Fault("the weights of an interrupted run are not finite")
    if left := [file for file in folder.iterdir() if file.name.startswith(".")]:
        raise Fault(f"something is left behind: {left}")
    return "Ctrl-C"


def ten_thousand(dice: random.Random) -> str:
    """A chain of ten thousand layers has constants."""
    deep(10_000)
    return "a chain of 10,000 layers"


def member(rank: int, folder: str, seed: int, fault: str) -> None:
    """One of two processes: steps on its part of the data, with a fault on the way; what it saw is saved."""
    torch.set_num_threads(1)
    _limit()
    store = distributed.FileStore(f"{folder}/store", 2)
    patience = timedelta(seconds=_PATIENCE)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=patience)
    make, model, x, loss, y, first, victim, moment = drawn(seed)
    mine = slice(0, first) if rank == 0 else slice(first, None)
    optimizer = make(model, loss, group=distributed.group.WORLD)
    x, y = x[mine], y[mine]
    losses: list[float] = []
    said, before = "", weights(model)
    if fault == "killed" and rank == victim:
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, moment)
    try:
        for number in range(3 if fault != "killed" else 100_000):
            before = weights(model)
            spoil = fault == "not finite" and number == 2 and rank == victim and len(x)
            losses.append(optimizer.step(spoilt(random.Random(seed), x) if spoil else x, y))
    except SurefootError as error:
        said = f"{type(error).__name__}: {error}"
    except Exception as error:
        said = f"unexpected {type(error).__name__}: {error}"
    torch.save((said, losses, before, weights(model)), f"{folder}/{rank}.pt")
    signal.raise_signal(signal.SIGKILL)  # the group cannot be left in order


def drawn(seed: int) -> tuple[Any, nn.Module, Any, Any, Any, int, int, float]:
    """The same in each process: optimizer, model, data, loss, targets, the first share, who fails, and when."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    same = {"GaussNewton": lambda m, h, **g: GaussNewton(m, h, method="dual", **g)}  # one chooses others
    make = pick(dice, "optimizer in 2 processes", OPTIMIZERS | same)
    model = network(dice).double()
    x, loss, y = data(dice, model)
    x, y = x.double(), y.double() if y.is_floating_point() else y
    return make, model, x, loss, y, dice.randrange(len(x) + 1), dice.randrange(2), dice.uniform(0.05, 5)


def processes(dice: random.Random) -> str:
    """Two processes: the same as one on all data, a batch that is not finite on one, and one that is killed."""
    fault = pick(dice, "2 processes", {name: name for name in ("no fault", "not finite", "killed")})
    seed, folder = dice.randrange(10**9), tempfile.mkdtemp()
    make, model, x, loss, y, first, victim, _ = drawn(seed)
    size = first if victim == 0 else len(x) - first
    context = get_context("spawn")
    started = [context.Process(target=member, args=(rank, folder, seed, fault)) for rank in range(2)]
    for each in started:
        each.start()
    end = time.monotonic() + _WAITS
    for each in started:
        each.join(max(end - time.monotonic(), 0.1))
    hung = [each for each in started if each.exitcode in (None, -signal.SIGXCPU)]
    for each in hung:
        each.kill()
    if hung:
        raise Fault(f"{len(hung)} of two processes hang, with the fault '{fault}', seed {seed}")
    found = {rank: torch.load(f"{folder}/{rank}.pt") for rank in range(2) if Path(f"{folder}/{rank}.pt").exists()}
    if any(said.startswith("unexpected") for said, *_ in found.values()):
        raise Fault(f"with the fault '{fault}', seed {seed}: {[said for said, *_ in found.values()]}")
    if fault == "killed":
        if 1 - victim not in found:
            raise Fault(f"a process said nothing after the other was killed, seed {seed}")
        said, _, before, after = found[1 - victim]
        if "ProcessLost" not in said:
            raise Fault(f"after the other was killed: {said or 'nothing'}, seed {seed}")
        _not_lost(model, x, loss, y, before, after)
        return "2 processes, one killed"
    if len(found) < 2:
        raise Fault(f"a process ended without a result, with the fault '{fault}', seed {seed}")
    if not all(map(torch.equal, found[0][3], found[1][3])):
        raise Fault(f"the weights of the processes differ, with the fault '{fault}', seed {seed}")
    if fault == "not finite" and size:
        if not found[0][0] or not found[1][0]:
            raise Fault(f"a batch that is not finite was taken, seed {seed}: {found[0][0]} {found[1][0]}")
        if not all(map(torch.equal, found[0][2], found[0][3])):
            raise Fault(f"the weights moved in a step that was refused, seed {seed}")
        return "2 processes, a batch that is not finite on one"
    if found[0][0]:
        raise SurefootError(found[0][0])
    optimizer = make(model, loss)
    expected = [optimizer.step(x, y) for _ in found[0][1]]
    for mine, other in zip(expected, found[0][1], strict=True):
        if abs(mine - other) > 1e-6 * (1 + abs(mine)):
            raise Fault(f"two processes have the losses {found[0][1]}, one has {expected}, seed {seed}")
    return "2 processes, as one"


def _not_lost(model: nn.Module, x: Any, loss: Any, y: Any, before: list[Any], after: list[Any]) -> None:
    """The weights are those before a step or after it, which descends."""
    found = []
    for state in (before, after):
        with torch.no_grad():
            for value, held in zip(model.parameters(), state, strict=True):
                value.copy_(held)
            found.append(float(loss(model(x), y)))
    if not found[1] <= found[0] * (1 + 1e-9) + 1e-12:
        raise Fault(f"a process that lost the other has weights with the loss {found[1]} after {found[0]}")


FAULTS: tuple[Round, ...] = (cut_off, full_disk)
RARE: tuple[Round, ...] = (interrupted, full_disk_of_a_command, processes, processes)
ONCE: tuple[Round, ...] = (ten_thousand,)

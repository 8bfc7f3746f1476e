"""A reliability run: random models, data, losses, oracles and optimizers, with faults put in on purpose.

``make soak`` runs for twenty minutes, ``python -m benchmarks.soak --seconds 60 --seed 7`` for less. Each round has
a seed of its own, which is printed if the round fails. What is asked of a round: an error is a sentence of
surefoot (never another exception), weights are what they were after a refusal, a certificate is not below what is
found nearby, a file is whole or as before. The counts are written to ``docs/reliability.md``.
"""

from __future__ import annotations

import argparse
import io
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.errors import SurefootError
from surefoot.optim import GaussNewton, Newton, ProvedEpochs

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
Round = Callable[[random.Random], str]


class Fault(AssertionError):
    """Something went wrong that must not."""


def _model(dice: random.Random) -> nn.Sequential:
    width, depth = dice.choice((1, 2, 5, 8)), dice.choice((0, 1, 2, 4))
    activation = dice.choice((nn.Tanh, nn.ReLU, nn.Softplus, nn.Sigmoid, nn.GELU, nn.SiLU))
    layers: list[nn.Module] = []
    size = 3
    for _ in range(depth):
        layers += [nn.Linear(size, width, bias=dice.random() < 0.8), activation()]
        if dice.random() < 0.2:
            layers.append(nn.LayerNorm(width))
        size = width
    model = nn.Sequential(*layers, nn.Linear(size, 2))
    return model.double() if dice.random() < 0.7 else model


def _data(dice: random.Random, model: nn.Module) -> tuple[Tensor, Any, Tensor]:
    """Inputs, a loss without targets, and targets."""
    count = dice.choice((1, 2, 9, 16))
    dtype = next(model.parameters()).dtype
    x = torch.randn(count, 3).to(dtype) * 10.0 ** dice.choice((-3, 0, 0, 1))
    if dice.random() < 0.5:
        return x, sf.CrossEntropy(), torch.randint(2, (count,))
    return x, sf.Square(), torch.randn(count, 2).to(dtype)


def _batches(dice: random.Random, x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    size = dice.randint(1, len(x))
    return list(zip(x.split(size), y.split(size), strict=True))


def _weights(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in model.parameters()]


def _spoil(dice: random.Random, x: Tensor) -> Tensor:
    spoilt = x.clone()
    spoilt[dice.randrange(len(x)), 0] = dice.choice((torch.nan, torch.inf))
    return spoilt


def certificates(dice: random.Random) -> str:
    """A certificate is not below the slope and the curvature that are found at points of its ball."""
    model = _model(dice)
    x, loss, y = _data(dice, model)
    radius = 10.0 ** dice.uniform(-4, -1)
    given: Any = _batches(dice, x, y) if dice.random() < 0.5 else x
    objective = loss if given is not x else loss.bound_to(y)
    found = sf.certify(model, given, objective=objective, domain=sf.Ball(radius), effort="quick")
    lower = sf.estimate(model, x, objective=loss.bound_to(y), domain=sf.Ball(radius), seed=dice.randrange(1000))
    if float(lower.smoothness) > float(found.smoothness) * (1 + 1e-6):
        raise Fault(f"the smoothness {found.smoothness} is below what was found, {lower.smoothness}")
    if float(lower.lipschitz) > float(found.lipschitz) * (1 + 1e-6):
        raise Fault(f"the Lipschitz constant {found.lipschitz} is below what was found, {lower.lipschitz}")
    return "certificate"


def steps(dice: random.Random) -> str:
    """Steps descend or leave the weights as they are; a batch that is not finite is refused."""
    model = _model(dice)
    x, loss, y = _data(dice, model)
    make = dice.choice((sf.CertifiedDescent, GaussNewton, lambda m, h: Newton(m, h, method="cg")))
    optimizer = make(model, loss)
    given: tuple[Any, ...] = (_batches(dice, x, y),) if dice.random() < 0.5 else (x, y)
    losses = [optimizer.step(*given) for _ in range(dice.randint(1, 4))]
    if any(after > before * (1 + 1e-5) + 1e-9 for before, after in pairwise(losses)):
        raise Fault(f"the loss rose: {losses}")
    before = _weights(model)
    spoilt = _spoil(dice, x)
    try:
        optimizer.step(*((_batches(dice, spoilt, y),) if len(given) == 1 else (spoilt, y)))
    except SurefootError:
        if not all(map(torch.equal, before, model.parameters())):
            raise Fault("the weights moved in a step that was refused") from None
        return "step, then a batch that is not finite"
    raise Fault("a batch that is not finite was taken")


def oracles(dice: random.Random) -> str:
    """Directions in pieces are those of the joined batch, and descend."""
    model = _model(dice).double()
    x, loss, y = _data(dice, model)
    x, y = x.double(), y.double() if y.is_floating_point() else y
    oracle = dice.choice((sf.oracles.gradient, sf.oracles.gauss_newton, sf.oracles.newton))
    options: dict[str, Any] = {"kappa": 10.0 ** dice.uniform(-1, 2)}
    if oracle is sf.oracles.newton:
        options["method"] = "cg"
    whole = oracle(sf.Chain(model, x), loss.bound_to(y), **options)
    parts = oracle(sf.Chain(model, _batches(dice, x, y)), loss, **options)
    size = max(float(value.abs().max()) for value in whole.direction.values())
    for path, value in whole.direction.items():
        if (
            whole.solved
            and parts.solved
            and float((value - parts.direction[path]).abs().max()) > 1e-6 * (1 + size)
        ):
            raise Fault(f"the direction of '{path}' is another one in pieces")
    return "oracle"


def files(dice: random.Random) -> str:
    """A truncated file of weights or of an exported model is refused by a sentence."""
    model, folder = _model(dice), Path(tempfile.mkdtemp())
    x = torch.randn(2, 3, dtype=next(model.parameters()).dtype)
    exported = dice.random() < 0.3
    path = folder / ("model.pt2" if exported else "weights.pt")
    if exported:
        torch.export.save(torch.export.export(model, (x,)), path)
    else:
        torch.save(model.state_dict(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: dice.randrange(len(whole))])
    from surefoot.cli.exported import load_exported
    from surefoot.cli.suiting import load_weights

    try:
        load_exported(path) if exported else load_weights(model, path)
    except SurefootError:
        return "a file that was cut off"
    raise Fault("a file that was cut off was read")


def sizes(dice: random.Random) -> str:
    """No samples, dimensions of size zero and very deep chains."""
    kind = dice.choice(("empty", "zero", "deep"))
    if kind == "deep":
        depth = dice.choice((100, 300))
        model = nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(2, 2), nn.Tanh())))
        found = sf.certify(model, torch.ones(1, 2), domain=sf.ProductBall(1.0))
        if not found.smoothness.is_finite:
            raise Fault("a deep chain of smooth layers has no smoothness")
        return "a deep chain"
    model = nn.Sequential(
        nn.Linear(3, 0 if kind == "zero" else 2), nn.Tanh(), nn.Linear(0 if kind == "zero" else 2, 2)
    )
    x = torch.ones(0 if kind == "empty" else 2, 3)
    sf.certify(model, x, objective=sf.Square(torch.zeros(len(x), 2)))
    return "a dimension of size zero"


def bursts(dice: random.Random) -> str:
    """Training goes on after the clock jumped, and what is kept is lower."""
    model = _model(dice)
    x, loss, y = _data(dice, model)
    training = ProvedEpochs(torch.optim.SGD(model.parameters(), lr=0.1), loss, _batches(dice, x, y), model=model)
    clock, jump = time.process_time, dice.choice((-1e4, 1e4))
    values = [training.step()]
    time.process_time = lambda: clock() + jump  # type: ignore[assignment]
    try:
        values.append(training.step())
    finally:
        time.process_time = clock
    if values[1] > values[0]:
        raise Fault(f"the objective of all data rose: {values}")
    return "bursts, and the clock jumped"


def resumed(dice: random.Random) -> str:
    """A state that was saved and loaded goes on as if nothing had happened."""
    model = _model(dice)
    x, loss, y = _data(dice, model)
    optimizer = sf.CertifiedDescent(model, loss)
    optimizer.step(x, y)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    expected = [optimizer.step(x, y) for _ in range(2)]
    file.seek(0)
    weights, state = torch.load(file)
    model.load_state_dict(weights)
    other = sf.CertifiedDescent(model, loss)
    other.load_state_dict(state)
    if [other.step(x, y) for _ in range(2)] != expected:
        raise Fault("a resumed run is another one")
    return "a run that was resumed"


_COMMAND = "import surefoot.cli; surefoot.cli.main()"


def interrupted(dice: random.Random) -> str:
    """Ctrl-C at a random moment: no traceback, and a checkpoint that is whole."""
    folder = Path(tempfile.mkdtemp())
    asked = ["train", "--data", "digits", "--steps", "500", "--checkpoint", str(folder / "run.pt"), "--every", "1"]
    run = subprocess.Popen(
        [sys.executable, "-c", _COMMAND, *asked], stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    time.sleep(dice.uniform(1, 30))
    run.send_signal(signal.SIGINT)
    try:
        _, said = run.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        run.kill()
        raise Fault("the command did not end within a minute after Ctrl-C") from None
    if b"Traceback" in said and b"KeyboardInterrupt" not in said:
        raise Fault(f"a traceback: {said[-500:]!r}")
    if (folder / "run.pt").exists():
        torch.load(folder / "run.pt")
    return "Ctrl-C"


def full_disk(dice: random.Random) -> str:
    """Where nothing can be written, the command says so; ``/dev/full`` is such a place."""
    path = Path(tempfile.mkdtemp()) / "rows.jsonl"
    path.symlink_to("/dev/full")
    run = subprocess.run(
        [sys.executable, "-c", _COMMAND, "compare", "mlp@sizes=3,4,2", "--input", "2,3", "--log", str(path)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if run.returncode == 0 or "Traceback" in run.stderr:
        raise Fault(f"exit code {run.returncode}: {run.stderr[-500:]}")
    return "a full disk"


COMMON: tuple[Round, ...] = (certificates, steps, oracles, files, sizes, bursts, resumed)
RARE: tuple[Round, ...] = (interrupted, full_disk)


def run(seconds: float, seed: int) -> tuple[Counter[str], list[str]]:
    """Rounds until the time is over: how often each ended how, and what went wrong."""
    end, counts, wrong, number = time.monotonic() + seconds, Counter[str](), list[str](), 0
    while time.monotonic() < end:
        own = seed * 1_000_003 + number
        dice = random.Random(own)
        torch.manual_seed(own)
        task = dice.choice(RARE) if number % 10 == 9 else dice.choice(COMMON)
        try:
            counts[task(dice)] += 1
        except SurefootError as error:
            counts[f"refused by a sentence ({type(error).__name__}), in {task.__name__}"] += 1
        except Exception as error:
            wrong.append(f"{task.__name__}, seed {own}: {type(error).__name__}: {str(error)[:300]}")
            print(wrong[-1], flush=True)
        number += 1
    return counts, wrong


def page(counts: Counter[str], wrong: list[str], seconds: float, seed: int) -> str:
    """The counts as a page."""
    rows = [f"| {what} | {count} |" for what, count in sorted(counts.items())]
    failed = [f"* {text}" for text in wrong] or ["None."]
    return "\n".join(
        [
            "# Reliability",
            "",
            f"Written by `make soak`: {sum(counts.values()) + len(wrong)} rounds in {seconds / 60:.0f} minutes, "
            f"seed {seed}. A round takes a random model, data, loss, oracle or optimizer, and puts a fault in:",
            "batches that are not finite, files that are cut off, Ctrl-C, a full disk, clocks that jump, sizes of",
            "zero. Processes that hang or die are tested in `tests/processes`.",
            "",
            "| round | times |",
            "| --- | ---: |",
            *rows,
            "",
            "**What went wrong**",
            "",
            *failed,
            "",
        ]
    )


def main() -> None:
    """Run, write the page, and fail if something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(f"seed {given.seed}, {given.seconds:.0f} seconds", flush=True)
    counts, wrong = run(given.seconds, given.seed)
    PAGE.write_text(page(counts, wrong, given.seconds, given.seed), encoding="utf-8")
    for what, count in sorted(counts.items()):
        print(f"{count:6d}  {what}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

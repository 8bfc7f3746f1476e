"""Rounds of the reliability run: each takes a random model, data, loss, set, oracle or optimizer, and raises
:class:`Fault` if something is wrong.
"""

from __future__ import annotations

import copy
import io
import math
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import flint
import torch
from torch import Tensor, distributed, nn

import surefoot as sf
from surefoot.cli.running import save_weights
from surefoot.cli.subject import load_weights
from surefoot.errors import SurefootError
from surefoot.objectives import Huber
from surefoot.report import write_report

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # where the exact judge lives
from judges.exact import exact_value, exactly, holds, settled, stored, truth

Round = Callable[[random.Random], str]
_EXACT = 40  # parameters up to which the exact judge is asked


class Fault(AssertionError):
    """Something went wrong that must not."""


def network(dice: random.Random) -> nn.Sequential:
    """Linear layers, an activation, sometimes normalisation or a convolution, in single or double precision."""
    width, depth = dice.choice((1, 2, 5, 8)), dice.choice((0, 1, 2, 4))
    activation = dice.choice((nn.Tanh, nn.ReLU, nn.Softplus, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU))
    layers: list[nn.Module] = []
    size = 3
    if dice.random() < 0.2:
        layers += [nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), activation(), nn.Flatten()]
        size = 4
    for _ in range(depth):
        layers += [nn.Linear(size, width, bias=dice.random() < 0.8), activation()]
        layers += [nn.LayerNorm(width)] if dice.random() < 0.2 else []
        size = width
    model = nn.Sequential(*layers, nn.Linear(size, 2))
    return model.double() if dice.random() < 0.7 else model


def data(dice: random.Random, model: nn.Module) -> tuple[Tensor, Any, Tensor]:
    """Inputs, a loss without targets, and targets."""
    count, dtype = dice.choice((1, 2, 9, 16)), next(model.parameters()).dtype
    x = torch.randn(count, 3).to(dtype) * 10.0 ** dice.choice((-3, 0, 0, 1))
    loss = dice.choice((sf.CrossEntropy(), sf.Square(), Huber(delta=1.0)))
    if isinstance(loss, sf.CrossEntropy):
        return x, loss, torch.randint(2, (count,))
    return x, loss, torch.randn(count, 2).to(dtype)


def batches(dice: random.Random, x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The same data in pieces."""
    size = dice.randint(1, len(x))
    return list(zip(x.split(size), y.split(size), strict=True))


def weights(model: nn.Module) -> list[Tensor]:
    """As they are now."""
    return [value.detach().clone() for value in model.parameters()]


def spoilt(dice: random.Random, x: Tensor) -> Tensor:
    """With a number that is not finite."""
    copied = x.clone()
    copied[dice.randrange(len(x)), 0] = dice.choice((torch.nan, torch.inf, -torch.inf))
    return copied


def optimizer_of(dice: random.Random) -> Callable[..., Any]:
    """One of several, as a function of model and loss."""
    return dice.choice(
        (
            sf.CertifiedDescent,
            lambda m, h, **g: sf.CertifiedDescent(m, h, direction=torch.optim.Adam, **g),
            # of two processes the same as of one
            lambda m, h, **g: sf.GaussNewton(m, h, solver="dual", adapt=False, **g),
            lambda m, h, **g: sf.Newton(m, h, solver="cg", adapt=False, **g),
        )
    )


def certificates(dice: random.Random) -> str:
    """A certificate is not below the values, slopes and curvatures that are found in its set."""
    model = network(dice)
    x, loss, y = data(dice, model)
    radius = 10.0 ** dice.uniform(-4, -1)
    sets = sf.Ball(radius), sf.ProductBall(radius, center="present"), sf.ProductBall(10 * radius), None
    domain: Any = dice.choice(sets)
    given: Any = batches(dice, x, y) if dice.random() < 0.4 else x
    objective = loss if given is not x else loss.bound_to(y)
    found = sf.certify(model, given, objective=objective, domain=domain, effort="quick")
    if domain is None:
        return "certificate of the longest step"
    targets = y.double() if y.is_floating_point() else y
    _judged(dice, model, lambda judge: loss(judge(x.double()), targets), found, domain)
    if isinstance(domain, sf.Ball):
        lower = sf.estimate(model, x, objective=loss.bound_to(y), domain=domain, seed=dice.randrange(1000))
        for name in ("smoothness", "lipschitz"):
            if float(getattr(lower, name)) > float(getattr(found, name)) * (1 + 1e-6):
                raise Fault(f"the {name} {getattr(found, name)} is below what is found, {getattr(lower, name)}")
    return "certificate"


def _judged(
    dice: random.Random, model: nn.Module, value: Callable[[nn.Module], Tensor], found: Any, domain: Any
) -> None:
    """Values and slopes at random points of the set, in double; on small models exactly, with curvatures."""
    judge = copy.deepcopy(model).double()
    blocks = [block for module in judge.modules() if (block := list(module.parameters(recurse=False)))]
    if isinstance(domain, sf.Ball):
        blocks = [[part for block in blocks for part in block]]
    start, slopes = weights(judge), []
    for _ in range(3):
        with torch.no_grad():
            for mine, old in zip(judge.parameters(), start, strict=True):
                mine.copy_(old * 0 if domain.center == "origin" else old)
            for block in blocks:
                move = [torch.randn_like(part) for part in block]
                length = float(torch.cat([part.flatten() for part in move]).norm())
                share = dice.choice((0.999, dice.random())) * domain.radius / max(length, 1e-300)
                for part, along in zip(block, move, strict=True):
                    part += share * along
        result = value(judge)
        slope = torch.autograd.grad(result, list(judge.parameters()), allow_unused=True, materialize_grads=True)
        point = torch.cat([part.detach().flatten() for part in judge.parameters()])
        slopes.append((float(result), torch.cat([part.flatten() for part in slope]), point))
    bound, lipschitz, smoothness = (float(getattr(found, n)) for n in ("bound", "lipschitz", "smoothness"))
    for (a, g, u), (b, h, v) in pairwise(slopes):
        far, room = float((u - v).norm()), 1e-9 * (1 + abs(a) + float(g.norm()))
        if abs(a) > bound + room or float(g.norm()) > lipschitz + room:
            raise Fault(f"a value {a} or a slope {g.norm()} is above {bound}, {lipschitz}")
        if abs(a - b) > lipschitz * far + room or float((g - h).norm()) > smoothness * far + room:
            raise Fault(f"values or slopes {far:g} apart change more than {lipschitz}, {smoothness} allow")
    if sum(part.numel() for part in judge.parameters()) <= _EXACT and dice.random() < 0.5:
        moves = {part: torch.randn_like(part) for part in judge.parameters()}
        with flint.ctx.workprec(200):
            point_of = {part: stored(part) for part in judge.parameters()}
            exact = truth(lambda: value(judge), judge, point_of, moves)
            for name, claim in (("bound", bound), ("lipschitz", lipschitz), ("smoothness", smoothness)):
                if claim < math.inf and holds(exactly(claim), getattr(exact, name)) is False:
                    raise Fault(f"exactly, the {name} is {getattr(exact, name)}, above {claim}")


def values(dice: random.Random) -> str:
    """The exact value is inside the interval that is proved."""
    model = network(dice)
    x, loss, y = data(dice, model)
    given: tuple[Any, ...] = (batches(dice, x, y), loss) if dice.random() < 0.5 else (x, loss, y)
    found = sf.evaluate(model, *given)
    if sum(part.numel() for part in model.parameters()) * len(x) > 500:
        return "value"

    def inside() -> bool | None:
        away = abs(exact_value(lambda: loss(model(x), y), model) - exactly(found.value))
        return holds(exactly(found.error), away)

    if settled(inside) is False:
        raise Fault(f"the value is outside of {found.value} ± {found.error}")
    return "value, judged exactly"


def inputs(dice: random.Random) -> str:
    """A constant in the input is not below what pairs of inputs show."""
    model = network(dice).double()
    x, radius = torch.randn(1, 3).double(), 10.0 ** dice.uniform(-2, 1)
    found = sf.certify(model, x, wrt="input", domain=sf.Ball(radius))
    moves = torch.randn(20, 1, 3).double()
    points = [x + move * (dice.random() * radius / float(move.norm())) for move in moves]
    for a, b in pairwise(points):
        with torch.no_grad():
            change = float((model(a) - model(b)).norm())
        if change > float(found.lipschitz) * float((a - b).norm()) + 1e-12:
            raise Fault(f"inputs show more than the Lipschitz constant {found.lipschitz}")
    return "certificate in the input"


def steps(dice: random.Random) -> str:
    """Steps descend or leave the weights as they are; a batch that is not finite is refused."""
    model = network(dice)
    x, loss, y = data(dice, model)
    optimizer, pieces = optimizer_of(dice)(model, loss), dice.random() < 0.5
    given: tuple[Any, ...] = (batches(dice, x, y),) if pieces else (x, y)
    losses = [optimizer.step(*given) for _ in range(dice.randint(1, 4))]
    if any(after > before * (1 + 1e-5) + 1e-9 for before, after in pairwise(losses)):
        raise Fault(f"the loss rose: {losses}")
    before, wrong = weights(model), spoilt(dice, x)
    try:
        optimizer.step(*((batches(dice, wrong, y),) if pieces else (wrong, y)))
    except SurefootError:
        if not all(map(torch.equal, before, model.parameters())):
            raise Fault("the weights moved in a step that was refused") from None
        return "steps, then a batch that is not finite"
    raise Fault("a batch that is not finite was taken")


def oracles(dice: random.Random) -> str:
    """Directions in pieces are those of the joined batch."""
    model = network(dice).double()
    x, loss, y = data(dice, model)
    x, y = x.double(), y.double() if y.is_floating_point() else y
    oracle = dice.choice((sf.oracles.gradient, sf.oracles.gauss_newton, sf.oracles.newton))
    options: dict[str, Any] = {"kappa": 10.0 ** dice.uniform(-1, 2)}
    if oracle is sf.oracles.newton:
        options["method"] = "cg"
    whole = oracle(sf.Chain(model, x), loss.bound_to(y), **options)
    parts = oracle(sf.Chain(model, batches(dice, x, y)), loss, **options)
    size = max(float(value.abs().max()) for value in whole.direction.values())
    for path, value in whole.direction.items() if whole.solved and parts.solved else ():
        if float((value - parts.direction[path]).abs().max()) > 1e-6 * (1 + size):
            raise Fault(f"the direction of '{path}' is another one in pieces")
    return "oracle"


def sizes(dice: random.Random) -> str:
    """No samples, dimensions of size zero, deep chains."""
    kind = dice.choice(("no samples", "width zero", "300 layers", "no inputs", "10,000 layers"))
    if "layers" in kind:
        if kind == "300 layers" or dice.random() < 0.05:
            deep(int(kind.split()[0].replace(",", "")))
        return "a deep chain"
    width, features = 0 if kind == "width zero" else 2, 0 if kind == "no inputs" else 3
    model = nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, 2))
    x = torch.ones(0 if kind == "no samples" else 2, features)
    y = torch.zeros(len(x), 2)
    questions: tuple[Callable[[], object], ...] = (
        lambda: sf.certify(model, x, objective=sf.Square(y)),
        lambda: sf.evaluate(model, x, sf.Square(y)),
        lambda: sf.CertifiedDescent(model, sf.Square()).step(x, y),
    )
    dice.choice(questions)()
    return "a dimension of size zero"


def deep(layers: int) -> None:
    """A chain of so many layers, every tenth of them with weights, has constants."""
    parts = [part for _ in range(layers // 10) for part in (nn.Linear(2, 2), *[nn.Tanh()] * 9)]
    found = sf.certify(nn.Sequential(*parts), torch.ones(1, 2), domain=sf.ProductBall(1.0))
    if not found.smoothness.is_finite:
        raise Fault("a deep chain of smooth layers has no smoothness")


def resumed(dice: random.Random) -> str:
    """A state that was saved and loaded goes on as if nothing had happened."""
    model = network(dice)
    x, loss, y = data(dice, model)
    make = optimizer_of(dice)
    optimizer = make(model, loss)
    optimizer.step(x, y)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    expected = [optimizer.step(x, y) for _ in range(2)]
    file.seek(0)
    stored_weights, state = torch.load(file)
    model.load_state_dict(stored_weights)
    other = make(model, loss)
    other.load_state_dict(state)
    if [other.step(x, y) for _ in range(2)] != expected:
        raise Fault("a resumed run is another one")
    return "a run that was resumed"


def interrupted_step(dice: random.Random) -> str:
    """Ctrl-C inside a step leaves the weights before or after it, and the next step descends."""
    model = network(dice)
    x, loss, y = data(dice, model)
    optimizer = optimizer_of(dice)(model, loss)
    optimizer.step(x, y)  # which reads the model
    calls = _counted_until(math.inf, lambda: optimizer.step(x, y))
    before, moment = weights(model), dice.randint(1, calls)
    value, stopped = sf.evaluate(model, x, loss, y), False
    try:
        _counted_until(moment, lambda: optimizer.step(x, y))
    except KeyboardInterrupt:
        stopped = True
    moved, now = not all(map(torch.equal, before, model.parameters())), sf.evaluate(model, x, loss, y)
    if moved and now.value - now.error > value.value + value.error:
        raise Fault(f"an interrupted step went up, from {value} to {now}")
    optimizer.step(x, y)
    last = sf.evaluate(model, x, loss, y)
    if last.value - last.error > now.value + now.error:
        raise Fault(f"the step after an interrupted one went up, from {now} to {last}")
    return "Ctrl-C inside a step" if stopped else "a step that ended before Ctrl-C"


def _counted_until(last: float, action: Callable[[], object]) -> int:
    """How many functions of Python an action calls; Ctrl-C comes as the one with this number begins.

    Moments are counted by calls, so that a seed means the same on a busy machine.
    """
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"
        if count == last and event == "call":
            raise KeyboardInterrupt

    sys.setprofile(seen)
    try:
        action()
    finally:
        sys.setprofile(None)
        torch.set_grad_enabled(True)  # Ctrl-C inside the end of ``torch.no_grad`` leaves gradients off
    return count


def cut_off(dice: random.Random) -> str:
    """A truncated file of weights is refused by a sentence."""
    model = network(dice)
    path = Path(tempfile.mkdtemp()) / dice.choice(("weights.pt", "weights.safetensors"))
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


def full_disk(dice: random.Random) -> str:
    """Where there is no room, weights or a report are as before, and are written later."""
    model, folder = network(dice), Path(tempfile.mkdtemp())
    x = torch.randn(2, 3, dtype=next(model.parameters()).dtype)
    certificate = sf.certify(model, x, objective=sf.Square(torch.zeros(2, 2, dtype=x.dtype)), domain=sf.Ball(0.01))
    name = dice.choice(("weights.pt", "weights.safetensors", "report.html"))

    def write() -> None:
        if name == "report.html":
            write_report(folder / name, certificate)
        else:
            save_weights(model, folder / name)

    write()
    before, limits = (folder / name).read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (dice.randrange(max(len(before) // 2, 1)), limits[1]))
        write()
    except (SurefootError, OSError):  # a report is the library's: it raises what Python does
        if (folder / name).read_bytes() != before or len(list(folder.iterdir())) > 1:
            raise Fault(f"{name} is not as before, or something is left behind") from None
    else:
        raise Fault(f"{name} was written to a full disk")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    write()
    return "a full disk"


def _drawn(seed: int) -> tuple[Callable[..., Any], nn.Module, Tensor, Any, Tensor, int, int]:
    """The same in each process: optimizer, model, data, the first share, and who fails."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    make, model = optimizer_of(dice), network(dice).double()
    x, loss, y = data(dice, model)
    y = y.double() if y.is_floating_point() else y
    return make, model, x.double(), loss, y, dice.randrange(len(x) + 1), dice.randrange(2)


def _member(rank: int, folder: str, seed: int, fault: str) -> None:
    """One of two processes: steps on its part of the data, with a fault on the way; what it saw is saved."""
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    make, model, x, loss, y, first, victim = _drawn(seed)
    mine = slice(0, first) if rank == 0 else slice(first, None)
    optimizer = make(model, loss, group=distributed.group.WORLD)
    x, y = x[mine], y[mine]
    said, losses, before = "", [], weights(model)
    try:
        for number in range(3):
            before, chosen = weights(model), number == 2 and rank == victim
            if chosen and fault == "killed":
                signal.raise_signal(signal.SIGKILL)
            spoil = chosen and fault == "not finite" and len(x)
            losses.append(optimizer.step(spoilt(random.Random(seed), x) if spoil else x, y))
    except SurefootError as error:
        said = f"{type(error).__name__}: {error}"
    torch.save((said, losses, before, weights(model)), f"{folder}/{rank}.pt")
    signal.raise_signal(signal.SIGKILL)  # the group cannot be left in order


def processes(dice: random.Random) -> str:
    """Two processes: the same as one on all data, a batch that is not finite on one, and one that is killed."""
    fault, seed, folder = dice.choice(("none", "not finite", "killed")), dice.randrange(10**9), tempfile.mkdtemp()
    make, model, x, loss, y, first, victim = _drawn(seed)
    context = get_context("spawn")
    started = [context.Process(target=_member, args=(rank, folder, seed, fault)) for rank in range(2)]
    for each in started:
        each.start()
    end = time.monotonic() + 600
    for each in started:
        each.join(max(end - time.monotonic(), 0.1))
    place = f"with the fault '{fault}', seed {seed}"
    if any(each.exitcode is None for each in started):
        for each in started:
            each.kill()
        raise Fault(f"a process hangs, {place}")
    found = {rank: torch.load(f"{folder}/{rank}.pt") for rank in range(2) if Path(f"{folder}/{rank}.pt").exists()}
    if len(found) < 2 - (fault == "killed"):
        raise Fault(f"a process ended without a result, {place}")
    if fault == "killed":
        said, _, before, after = found[1 - victim]
        if "ProcessLost" not in said or not all(map(torch.equal, before, after)):
            raise Fault(f"after the other was killed: {said or 'nothing'}, or the weights moved, seed {seed}")
        return "2 processes, one killed"
    if not all(map(torch.equal, found[0][3], found[1][3])):
        raise Fault(f"the weights of the processes differ, {place}")
    if fault == "not finite" and (first if victim == 0 else len(x) - first):
        if not found[0][0] or not found[1][0] or not all(map(torch.equal, found[0][2], found[0][3])):
            raise Fault(f"a batch that is not finite was taken, or the weights moved, seed {seed}")
        return "2 processes, a batch that is not finite on one"
    if found[0][0]:
        raise SurefootError(found[0][0])
    optimizer = make(model, loss)
    for other in found[0][1]:
        mine = optimizer.step(x, y)
        if abs(mine - other) > 1e-6 * (1 + abs(mine)):
            raise Fault(f"two processes have the loss {other}, one has {mine}, seed {seed}")
    return "2 processes, as one"


# How often each is drawn.
ROUNDS: dict[Round, int] = {
    certificates: 6, values: 3, inputs: 3, steps: 3, oracles: 3, sizes: 3, resumed: 3, interrupted_step: 3,
    cut_off: 3, full_disk: 3, processes: 1,
}  # fmt: skip

"""Rounds of the reliability run inside one process: certificates, steps, oracles, sizes, clocks, interrupts.

Each takes a random model, data, loss, set, oracle or optimizer and raises :class:`Fault` if something is wrong.
``MET`` counts what was drawn.
"""

from __future__ import annotations

import copy
import io
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import flint
import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.errors import SurefootError
from surefoot.objectives import Huber
from surefoot.optim import GaussNewton, Newton, ProvedEpochs

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # where the exact judge lives
from judges.exact import exact_value, exactly, holds, settled, stored, truth

Round = Callable[[random.Random], str]
MET: Counter[str] = Counter()  # what was drawn, by kind and name
_EXACT = 40  # parameters up to which the exact judge is asked


class Fault(AssertionError):
    """Something went wrong that must not."""


def pick(dice: random.Random, kind: str, choices: dict[str, Any]) -> Any:
    """One of several, which is counted."""
    name = dice.choice(list(choices))
    MET[f"{kind}: {name}"] += 1
    return choices[name]


def network(dice: random.Random) -> nn.Sequential:
    """Linear layers, an activation, sometimes normalisation or a convolution, in single or double precision."""
    width, depth = dice.choice((1, 2, 5, 8)), dice.choice((0, 1, 2, 4))
    activations = (nn.Tanh, nn.ReLU, nn.Softplus, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU)
    activation = pick(dice, "model", {kind.__name__: kind for kind in activations})
    layers: list[nn.Module] = []
    size = 3
    if dice.random() < 0.2:
        MET["model: convolution"] += 1
        layers += [nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), activation(), nn.Flatten()]
        size = 4
    for _ in range(depth):
        layers += [nn.Linear(size, width, bias=dice.random() < 0.8), activation()]
        if dice.random() < 0.2:
            MET["model: normalisation"] += 1
            layers.append(nn.LayerNorm(width))
        size = width
    model = nn.Sequential(*layers, nn.Linear(size, 2))
    return model.double() if dice.random() < 0.7 else model


def data(dice: random.Random, model: nn.Module) -> tuple[Tensor, Any, Tensor]:
    """Inputs, a loss without targets, and targets."""
    count = dice.choice((1, 2, 9, 16))
    dtype = next(model.parameters()).dtype
    x = torch.randn(count, 3).to(dtype) * 10.0 ** dice.choice((-3, 0, 0, 1))
    losses = {"cross-entropy": sf.CrossEntropy(), "square": sf.Square(), "Huber": Huber(delta=1.0)}
    loss = pick(dice, "objective", losses)
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


OPTIMIZERS: dict[str, Any] = {
    "CertifiedDescent": sf.CertifiedDescent,
    "CertifiedDescent around Adam": lambda m, h, **g: sf.CertifiedDescent(m, h, direction=torch.optim.Adam, **g),
    "GaussNewton": GaussNewton,
    "Newton": lambda m, h, **g: Newton(m, h, method="cg", **g),
}


def certificates(dice: random.Random) -> str:
    """A certificate is not below the values, slopes and curvatures that are found in its set."""
    model = network(dice)
    x, loss, y = data(dice, model)
    radius = 10.0 ** dice.uniform(-4, -1)
    kinds = {
        "ball": sf.Ball(radius),
        "product of balls": sf.ProductBall(radius, center="present"),
        "around the origin": sf.ProductBall(10 * radius),
        "none given": None,
    }
    domain: Any = pick(dice, "domain", kinds)
    given: Any = batches(dice, x, y) if dice.random() < 0.4 else x
    objective = loss if given is not x else loss.bound_to(y)
    found = sf.certify(model, given, objective=objective, domain=domain, effort="quick")
    if domain is None:
        return "certificate of the longest step"
    _judged(dice, model, lambda judge: loss(judge(x.double()), y.double() if y.is_floating_point() else y),
            list(model.parameters()), found, domain)  # fmt: skip
    if isinstance(domain, sf.Ball):
        seed = dice.randrange(1000)
        lower = sf.estimate(model, x, objective=loss.bound_to(y), domain=domain, seed=seed)
        for name in ("smoothness", "lipschitz"):
            if float(getattr(lower, name)) > float(getattr(found, name)) * (1 + 1e-6):
                raise Fault(f"the {name} {getattr(found, name)} is below what is found, {getattr(lower, name)}")
    return "certificate"


def _judged(
    dice: random.Random, model: nn.Module, value: Callable[[nn.Module], Tensor], at: list[Tensor], found: Any,
    domain: Any,
) -> None:  # fmt: skip
    """Values and slopes at random points of the set, in double; on small models exactly, with curvatures."""
    judge = copy.deepcopy(model).double()
    blocks = [list(module.parameters(recurse=False)) for module in judge.modules()]
    blocks = [block for block in blocks if block]
    if isinstance(domain, sf.Ball):
        blocks = [[part for block in blocks for part in block]]
    start, slopes = [value.detach().double() for value in at], []
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
        MET["judge: exact, 200 bits"] += 1
        moves = {part: torch.randn_like(part) for part in judge.parameters()}
        here = {part: stored(part) for part in judge.parameters()}
        with flint.ctx.workprec(200):
            exact = truth(lambda: value(judge), judge, here, moves)
            for name, claim in (("bound", bound), ("lipschitz", lipschitz), ("smoothness", smoothness)):
                if claim < float("inf") and holds(exactly(claim), getattr(exact, name)) is False:
                    raise Fault(f"exactly, the {name} is {getattr(exact, name)}, above {claim}")


def values(dice: random.Random) -> str:
    """The exact value is inside the interval that is proved."""
    model = network(dice)
    x, loss, y = data(dice, model)
    given: tuple[Any, ...] = (batches(dice, x, y), loss) if dice.random() < 0.5 else (x, loss, y)
    found = sf.evaluate(model, *given)
    if sum(part.numel() for part in model.parameters()) * len(x) > 500:
        return "value"
    MET["judge: exact, 200 bits"] += 1

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
    MET["domain: inputs"] += 1
    points = []
    for _ in range(20):
        move = torch.randn_like(x)
        points.append(x + move * (dice.random() * radius / float(move.norm())))
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
    optimizer = pick(dice, "optimizer", OPTIMIZERS)(model, loss)
    given: tuple[Any, ...] = (batches(dice, x, y),) if dice.random() < 0.5 else (x, y)
    losses = [optimizer.step(*given) for _ in range(dice.randint(1, 4))]
    if any(after > before * (1 + 1e-5) + 1e-9 for before, after in pairwise(losses)):
        raise Fault(f"the loss rose: {losses}")
    before, spoiled = weights(model), spoilt(dice, x)
    try:
        optimizer.step(*((batches(dice, spoiled, y),) if len(given) == 1 else (spoiled, y)))
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
    kinds = {"gradient": sf.oracles.gradient, "Gauss-Newton": sf.oracles.gauss_newton, "Newton": sf.oracles.newton}
    oracle = pick(dice, "oracle", kinds)
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
    kind = pick(dice, "size", {name: name for name in ("no samples", "width zero", "300 layers", "no inputs")})
    if kind == "300 layers":
        deep(300)
        return "a deep chain"
    width = 0 if kind == "width zero" else 2
    model = nn.Sequential(nn.Linear(0 if kind == "no inputs" else 3, width), nn.Tanh(), nn.Linear(width, 2))
    x = torch.ones(0 if kind == "no samples" else 2, 0 if kind == "no inputs" else 3)
    question = dice.choice((sf.certify, sf.evaluate, sf.CertifiedDescent))
    if question is sf.certify:
        sf.certify(model, x, objective=sf.Square(torch.zeros(len(x), 2)))
    elif question is sf.evaluate:
        sf.evaluate(model, x, sf.Square(torch.zeros(len(x), 2)))
    else:
        sf.CertifiedDescent(model, sf.Square()).step(x, torch.zeros(len(x), 2))
    return "a dimension of size zero"


def deep(layers: int) -> None:
    """A chain of so many layers, every tenth of them with weights, has constants."""
    parts = [part for _ in range(layers // 10) for part in (nn.Linear(2, 2), *[nn.Tanh()] * 9)]
    found = sf.certify(nn.Sequential(*parts), torch.ones(1, 2), domain=sf.ProductBall(1.0))
    if not found.smoothness.is_finite:
        raise Fault("a deep chain of smooth layers has no smoothness")


def clocks(dice: random.Random) -> str:
    """Training goes on after the clocks jumped, and what is kept is lower."""
    model = network(dice)
    x, loss, y = data(dice, model)
    MET["optimizer: ProvedEpochs"] += 1
    training = ProvedEpochs(torch.optim.SGD(model.parameters(), lr=0.1), loss, batches(dice, x, y), model=model)
    found, names = [training.step()], ("process_time", "time", "monotonic", "perf_counter")
    kept, jump = {name: getattr(time, name) for name in names}, dice.choice((-1e9, -1e4, 1e4, 1e9))
    for name, clock in kept.items():
        setattr(time, name, lambda clock=clock: clock() + jump)
    try:
        found.append(training.step())
    finally:
        for name, clock in kept.items():
            setattr(time, name, clock)
    found.append(training.step())
    if found[2] > found[0] or found[1] > found[0]:
        raise Fault(f"the objective of all data rose: {found}")
    return "the clocks jumped"


def resumed(dice: random.Random) -> str:
    """A state that was saved and loaded goes on as if nothing had happened."""
    model = network(dice)
    x, loss, y = data(dice, model)
    make = pick(dice, "optimizer", OPTIMIZERS)
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
    optimizer = pick(dice, "optimizer", OPTIMIZERS)(model, loss)
    optimizer.step(x, y)  # which reads the model
    calls = _counted_until(math.inf, lambda: optimizer.step(x, y))
    before, count, moment = weights(model), len(optimizer.history), dice.randint(1, calls)
    value = sf.evaluate(model, x, loss, y)
    try:
        _counted_until(moment, lambda: optimizer.step(x, y))
        stopped = False
    except KeyboardInterrupt:
        stopped = True
    moved = not all(map(torch.equal, before, model.parameters()))
    now = sf.evaluate(model, x, loss, y)
    if moved and now.value - now.error > value.value + value.error:
        raise Fault(f"an interrupted step went up, from {value} to {now}")
    if moved and len(optimizer.history) == count:
        raise Fault("an interrupted step moved the weights and is not in the history")
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


COMMON: tuple[Round, ...] = (
    certificates, certificates, values, inputs, steps, oracles, sizes, clocks, resumed, interrupted_step,
)  # fmt: skip

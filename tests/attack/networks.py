"""Random small networks that nobody tuned, and random domains.

A network starts from rows, signals, images, volumes, sequences or ids, and is a chain of one to four random
layers; a layer may be a combination of branches that are layers themselves. The shape of what flows decides what
may follow. Everything follows from one number, so a network is drawn alike whichever network came before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from attack import parts
from attack.dice import Dice
from attack.layers import layer_for
from attack.moves import Shape
from surefoot.domains import Ball, ProductBall

_LARGEST = 160  # numbers in one tensor, so that a case takes milliseconds
_RADII = [0.0, *(10.0**k for k in (-3, -2, -1.5, -1, -0.5, 0, 0, 0.5, 1))]


@dataclass(frozen=True)
class Case:
    """Where a network is judged, what varies, and what is known: the data, or only a bound on its norm."""

    domain: Ball | ProductBall
    wrt: str
    input_norm: float | None = None


@dataclass(frozen=True)
class Network:
    """A model and a batch, drawn from a seed."""

    model: nn.Module
    x: Tensor
    seed: int = 0

    def case(self, number: int) -> Case:
        """A domain around the origin, the present point or a random one, of the parameters or of the input."""
        dice = Dice(self.seed * 1000 + number)
        trained = [path for path, p in self.model.named_parameters() if p.requires_grad]
        real = self.x.is_floating_point()
        wrt = dice.one_of(*["params"] * bool(trained), *["input"] * real)
        radius: Any = dice.one_of(*_RADII)
        shape: Any = dice.one_of(Ball, ProductBall)
        center: Any = dice.one_of("origin", "present", "present")
        if wrt == "params" and dice.chance(0.2):
            center = {path: torch.randn_like(p).double() for path, p in self.model.named_parameters()}
        if wrt == "params" and shape is ProductBall and dice.chance(0.3):
            blocks = dict.fromkeys(path.rpartition(".")[0] for path in trained)
            radius = {path: radius * 3.0 ** (k % 3 - 1) for k, path in enumerate(blocks)}
        blind = wrt == "params" and real and dice.chance(0.2)
        norm = float(self.x.double().norm()) * (1 + 1e-12) if blind else None
        return Case(shape(radius, center=center), wrt, norm)

    def __repr__(self) -> str:
        kind = str(self.x.dtype).removeprefix("torch.")
        return f"network {self.seed}: {kind} {'×'.join(map(str, self.x.shape))} → {self.model}"


def networks() -> st.SearchStrategy[Network]:
    """All random networks."""
    return st.integers(0, 2**40).map(network)


def network(seed: int) -> Network:
    """A chain of one to four layers on a batch of one to four samples."""
    torch.manual_seed(seed)
    dice = Dice(seed)
    shape, x, chain = _start(dice)
    for _ in range(dice.whole(1, 4)):
        layer = _layer(dice, shape)
        found = _result(layer, torch.randn(shape))
        if found is not None:
            chain.append(layer)
            shape = found
    model = nn.Sequential(*chain)
    scale, frozen = dice.one_of(0.1, 0.5, 1.0, 1.0, 3.0), dice.chance(0.15)
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            parameter.mul_(scale).requires_grad_(not (frozen and k % 2))
    if dice.chance(0.25):
        model, x = model.double(), x.double() if x.is_floating_point() else x
    return Network(model, x, seed)


def _start(dice: Dice) -> tuple[Shape, Tensor, list[nn.Module]]:
    """The shape that flows into the first random layer, the batch, and the layers before."""
    n, a, b = dice.whole(1, 4), dice.whole(1, 4), dice.whole(2, 4)
    kind = dice.one_of("rows", "rows", "sequence", "sequence", "signal", "image", "image", "volume", "ids")
    if kind == "ids":
        embedding = nn.Embedding(5, dice.whole(1, 3))
        return (n, b, embedding.embedding_dim), torch.randint(0, 5, (n, b)), [embedding]
    shapes: dict[str, Shape] = {
        "rows": (n, a + dice.whole(0, 1)),
        "sequence": (n, b, a),
        "signal": (n, min(a, 3), b + 2),
        "image": (n, a, b, dice.whole(2, 4)),
        "volume": (min(n, 2), min(a, 2), 2, 2, b - 1),
    }
    shape = shapes[kind]
    sizes = torch.logspace(-2, 1, shape[0]) if dice.chance(0.4) else torch.ones(shape[0])
    return shape, torch.randn(shape) * sizes.reshape(-1, *[1] * (len(shape) - 1)), []


def _layer(dice: Dice, shape: Shape) -> nn.Module:
    """One layer for this shape, or a combination of branches."""
    if not dice.chance(0.25):
        return layer_for(dice, shape)
    first, second = layer_for(dice, shape), layer_for(dice, shape)
    probe = torch.randn(shape)
    kept = [block for block in (first, second) if _result(block, probe) == shape]
    choices: list[nn.Module] = [kind(block) for block in kept for kind in (parts.Residual, parts.Shared)]
    choices += [parts.Dense(first, 1), parts.Product(first, second), parts.Quotient(first, second)]
    if len(kept) == 2:
        choices += [parts.Highway(first, second)] * 2
    chosen = dice.one_of(*choices)
    return chosen if _result(chosen, probe) is not None else first


def _result(model: nn.Module, x: Tensor) -> Shape | None:
    """The shape a module makes of a batch; ``None`` if it does not fit or becomes too large."""
    try:
        with torch.no_grad():
            shape = tuple(model(x).shape)
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return None
    numbers = int(torch.Size(shape).numel())
    return shape if 0 < numbers <= _LARGEST and len(shape) in (2, 3, 4, 5) else None

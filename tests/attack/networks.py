"""Random small networks that nobody tuned, and random domains.

A network starts from rows, signals, images, sequences or ids, and is a chain of one to four random layers; a layer
may be a combination of branches that are layers themselves. The shape of what flows decides what may follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from attack import parts
from attack.layers import Draw, Shape, table_for
from surefoot.domains import Ball, ProductBall

_LARGEST = 160  # numbers in one tensor, so that a case takes milliseconds


@dataclass(frozen=True)
class Network:
    """A model and a batch, drawn at random."""

    model: nn.Module
    x: Tensor

    def __repr__(self) -> str:
        kind = "ids" if not self.x.is_floating_point() else str(self.x.dtype).removeprefix("torch.")
        return f"{kind} {'×'.join(map(str, self.x.shape))} → {self.model}"


@dataclass(frozen=True)
class Case:
    """Where a network is judged, what varies, and what is known: the data, or only a bound on its norm."""

    domain: Ball | ProductBall
    wrt: str
    input_norm: float | None = None


def _result(model: nn.Module, x: Tensor) -> Shape | None:
    """The shape a module makes of a batch; ``None`` if it does not fit or becomes too large."""
    was = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            shape = tuple(model(x).shape)
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return None
    finally:
        for module, training in was.items():
            module.training = training
    numbers = int(torch.Size(shape).numel())
    return shape if 0 < numbers <= _LARGEST and len(shape) in (2, 3, 4) else None


@st.composite
def layers(draw: Draw, shape: Shape, depth: int = 1) -> nn.Module:
    """One layer for this shape, or a combination of branches."""
    combine = depth > 0 and draw(st.integers(0, 3)) == 0
    if not combine:
        return draw(st.sampled_from(table_for(draw, shape)))(draw, shape)
    first, second = draw(layers(shape, depth - 1)), draw(layers(shape, depth - 1))
    probe = torch.randn(shape)
    kept = [block for block in (first, second) if _result(block, probe) == shape]
    choices: list[nn.Module] = [parts.Residual(block) for block in kept]
    choices += [parts.Shared(block) for block in kept]
    choices += [parts.Dense(first, 1), parts.Product(first, second), parts.Quotient(first, second)]
    if len(kept) == 2:
        choices.append(parts.Highway(first, second))
    chosen: nn.Module = draw(st.sampled_from(choices))
    return chosen if _result(chosen, probe) is not None else first


@st.composite
def networks(draw: Draw) -> Network:
    """A chain of one to four layers on a batch of one to four samples."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    batch = draw(st.integers(1, 4))
    start = draw(st.sampled_from(["rows", "rows", "sequence", "signal", "image", "image", "ids"]))
    side = draw(st.integers(2, 4))
    shape: Shape = {
        "rows": (batch, draw(st.integers(1, 5))),
        "sequence": (batch, side, draw(st.integers(1, 4))),
        "signal": (batch, draw(st.integers(1, 3)), side + 2),
        "image": (batch, draw(st.integers(1, 3)), side, draw(st.integers(2, 4))),
        "ids": (batch, side),
    }[start]
    chain: list[nn.Module] = []
    x = torch.randn(shape) * _row_scales(draw, shape)
    if start == "ids":
        x = torch.randint(0, 5, shape)
        chain.append(nn.Embedding(5, draw(st.integers(1, 3))))
        shape = (*shape, chain[0].embedding_dim)
    for _ in range(draw(st.integers(1, 4))):
        layer = draw(layers(shape))
        found = _result(layer, torch.randn(shape))
        if found is not None:
            chain.append(layer)
            shape = found
    model = nn.Sequential(*chain)
    _scale(model, draw(st.sampled_from([0.1, 0.5, 1.0, 1.0, 3.0])))
    if draw(st.integers(0, 4)) == 0:
        for parameter in list(model.parameters())[1::2]:
            parameter.requires_grad_(False)
    if draw(st.integers(0, 3)) == 0:
        model, x = model.double(), x.double() if x.is_floating_point() else x
    return Network(model, x)


def _row_scales(draw: Draw, shape: Shape) -> Tensor:
    """Samples of one size, or of very different sizes: what holds per sample must not be mixed up."""
    if draw(st.booleans()):
        return torch.ones(())
    return torch.logspace(-2, 1, shape[0]).reshape(-1, *[1] * (len(shape) - 1))


def _scale(model: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


@st.composite
def cases(draw: Draw, network: Network) -> Case:
    """A domain around the origin, the present point or a random one, of the parameters or of the input."""
    trained = [path for path, p in network.model.named_parameters() if p.requires_grad]
    real = network.x.is_floating_point()
    wrt = draw(st.sampled_from(["params"] * bool(trained) + ["input"] * real))
    radius = draw(st.sampled_from([0.0, *(10.0**k for k in (-3, -2, -1.5, -1, -0.5, 0, 0, 0.5, 1))]))
    shape: Any = draw(st.sampled_from([Ball, ProductBall]))
    center: Any = draw(st.sampled_from(["origin", "present", "present"]))
    radii: Any = radius
    if wrt == "params":
        if draw(st.integers(0, 4)) == 0:
            center = {path: torch.randn_like(p).double() for path, p in network.model.named_parameters()}
        if shape is ProductBall and draw(st.integers(0, 2)) == 0:
            blocks = dict.fromkeys(path.rpartition(".")[0] for path in trained)
            radii = {path: radius * 3.0 ** (k % 3 - 1) for k, path in enumerate(blocks)}
    known = wrt == "input" or not real or draw(st.integers(0, 4)) > 0
    norm = None if known else float(network.x.double().norm()) * (1 + 1e-12)
    return Case(shape(radii, center=center), wrt, norm)

r"""How long a step along the gradient can be proved safe, as the depth of a network grows.

Networks 784-100^H-10 with soft-plus, 256 samples, square loss. Along :math:`d = -\nabla F` the longest safe step
is the largest length :math:`e` with :math:`S(e)\,e \le \|\nabla F\|^2`, where on the segment of length e

.. math:: F(\eta) \le F - \eta\|\nabla F\|^2 + \tfrac{S(e)}2\eta^2.

It is compared with :math:`\|\nabla F\|^2/d^\top\nabla^2F\,d`, the step of a quadratic with the true curvature of
that direction; as :math:`S(e) \ge d^\top\nabla^2F\,d`, the ratio is at most 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn

import surefoot as sf
from benchmarks.bracketing import longest
from surefoot.calculus.segment.along import Along

DEPTHS = (1, 2, 4, 8, 16)
ORDERS = (3, 4, 5)
# For comparison, not measured here: the enclosures of autobound, and the recursion of the paper.
AUTOBOUND = {1: 1.0, 2: 0.998, 4: 0.98, 8: 0.64, 16: 0.011}
PAPER = {1: 0.036, 2: 4e-5, 4: 3e-12, 8: 5e-26, 16: 1e-53}
TARGETS = {1: 0.95, 2: 0.95, 4: 0.95, 8: 0.5, 16: 0.5}


@dataclass(frozen=True)
class SafeStep:
    """Safe steps of networks of one depth, as fractions of the step of the true directional curvature.

    Attributes:
        hidden: how many hidden layers.
        fractions: by order, one number per seed.
    """

    hidden: int
    fractions: Mapping[int, Sequence[float]]

    def median(self, order: int) -> float:
        """The median over the seeds."""
        return median(self.fractions[order])

    def smallest(self, order: int) -> float:
        """The smallest over the seeds."""
        return min(self.fractions[order])

    @property
    def target(self) -> float:
        """The fraction that is aimed at."""
        return TARGETS.get(self.hidden, 0.5)

    @property
    def reached(self) -> bool:
        """Whether the highest order reaches the target for every seed."""
        return self.smallest(max(self.fractions)) >= self.target


def network(hidden: int) -> nn.Sequential:
    """784-100^H-10, soft-plus; weights N(0, 2/fan-in), biases 0."""
    sizes = (784, *[100] * hidden, 10)
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layer = nn.Linear(fan_in, fan_out).double()
        nn.init.normal_(layer.weight, std=(2 / fan_in) ** 0.5)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.Softplus()]
    return nn.Sequential(*layers[:-1])


def curvature_along(model: nn.Module, x: Tensor, loss: nn.Module) -> tuple[dict[str, Tensor], float]:
    """Minus the gradient d, and dᵀ∇²F d, both by automatic differentiation of the plain model."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    slopes = torch.autograd.grad(loss(model(x)), parameters, create_graph=True)
    direction = [-slope.detach() for slope in slopes]
    along = sum((slope * d).sum() for slope, d in zip(slopes, direction, strict=True))
    bend = torch.autograd.grad(along, parameters, allow_unused=True)
    curvature = sum(float((b * d).sum()) for b, d in zip(bend, direction, strict=True) if b is not None)
    return dict(zip(names, direction, strict=True)), curvature


def longest_safe_step(along: Along, direction: Mapping[str, Tensor], order: int, guess: float) -> float:
    """The largest length at which the bound still falls, to a thousandth from below."""

    def safe(length: float) -> bool:
        return along.majorant(direction, length, order).step >= length

    return longest(safe, guess)


def fractions(hidden: int, seed: int, orders: Sequence[int] = ORDERS, samples: int = 256) -> dict[int, float]:
    """The safe step of one network over the one of its true directional curvature, by order."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = network(hidden)
        x = torch.randn(samples, 784, dtype=torch.float64) / 28
        loss = sf.Square(torch.randn(samples, 10, dtype=torch.float64))
    direction, curvature = curvature_along(model, x, loss)
    square = sum(float((d * d).sum()) for d in direction.values())
    ideal = square / curvature
    along = Along(model, x, loss)
    return {order: longest_safe_step(along, direction, order, ideal) / ideal for order in orders}


def measure(depths: Sequence[int] = DEPTHS, seeds: Sequence[int] = (0, 1, 2)) -> Iterator[SafeStep]:
    """One result per depth."""
    for hidden in depths:
        found = [fractions(hidden, seed) for seed in seeds]
        yield SafeStep(hidden, {order: tuple(one[order] for one in found) for order in ORDERS})


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two depths, one seed")
    quick = parser.parse_args().quick
    orders = "".join(f"{f'order {order}':>18}" for order in ORDERS)
    print(f"{'H':>3}{orders}{'target':>9}{'autobound':>11}{'paper':>9}")
    for row in measure(DEPTHS[:2], (0,)) if quick else measure():
        cells = "".join(f"{row.median(order):>9.3g} ≥{row.smallest(order):>7.3g}" for order in ORDERS)
        known = f"{AUTOBOUND[row.hidden]:>11g}{PAPER[row.hidden]:>9g}"
        print(f"{row.hidden:>3}{cells}{row.target:>9g}{known}", flush=True)


if __name__ == "__main__":
    main()

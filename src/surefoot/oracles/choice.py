r"""Which way to a second-order step costs least, from counts alone, before any work.

The unit is one multiplication inside a large matrix product. With T the forward pass, N the operations of the
graph, d = n·c the rows of :math:`R^\top J` (n samples, c columns), p the parameters and k the iterations of
conjugate gradients, the costs are

* a call of the automatic-differentiation oracle: 2T and the overhead of 2N operations;
* conjugate gradients on the parameters or on the dual: 2k calls, and k times a few passes over vectors of
  parameters, with the overhead of these;
* the Gram matrix of the parameters: c pull-backs to the layers' results, dp numbers of rows, :math:`dp^2/2` for
  the product, :math:`p^3/6` for its factor;
* that of the dual: the same pull-backs, for linear layers on vectors with q results in all
  :math:`k(4d + 2n^2)q`, or where that is more than :math:`d^2q` and a factor, twice these: they follow iterations
  of the same cost; for all other layers :math:`d^2/2` times their parameters;
* dynamic programming: :func:`surefoot.complexity.layers.newton_layer` for each computation.

A parameter whose rows have no formula, or samples that meet, take a call for every row. k is not known before; it
is taken to be what conjugate gradients need where the damping is not tiny: a few for each factor of ten.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from surefoot.chain import Chain
from surefoot.complexity.layers import computation_cost, newton_layer
from surefoot.operations.common import separate
from surefoot.operations.products import is_linear
from surefoot.oracles.gram import FEW, MOST_DUAL, MOST_ROWS, taps
from surefoot.oracles.kronecker import layers_of
from surefoot.oracles.stages import LARGEST, stages

_OVERHEAD = 2e5  # of launching one operation
_LOOP = 5  # operations on vectors in an iteration of conjugate gradients
_ENTRY = 10.0  # an entry of an element-wise operation or of a vector that is passed over
_VECTOR = 8.0  # a product of a matrix and a vector waits for memory
_FIRST, _LATER = 3.0, 1.8  # iterations for the first factor of ten, and the power of their number for more
_HARDER = 1.2  # times as many for Newton's matrix, where residuals bend as well
_EIGEN = 20.0  # eigenvectors of a matrix of size n: so many times n³
_FACTOR = 3.0  # a Cholesky factor runs at a part of the speed of a product


@dataclass(frozen=True)
class Choice:
    """A method with its predicted cost, and that of the others, in gradients."""

    method: str
    costs: Mapping[str, float]

    def __str__(self) -> str:
        others = sorted((cost, name) for name, cost in self.costs.items() if name != self.method)
        rest = ", ".join(f"{name} {_short(cost)}" for cost, name in others if math.isfinite(cost))
        return f"chosen at about {_short(self.costs[self.method])} gradients" + (f"; {rest}" if rest else "")


def _short(cost: float) -> str:
    return f"{cost:.0f}" if cost < 1e4 else f"{cost:.0e}"


class Sizes:
    """What the costs of all methods are made of.

    Args:
        chain: the network and its batch.
        samples: rows of the output.
        columns: of the factor of the loss, for each sample.
    """

    def __init__(self, chain: Chain, samples: int, columns: int) -> None:
        self.chain, self.n, self.c, self.d = chain, samples, columns, samples * columns
        graph = chain.graph
        layers = [computation_cost(computation) for computation in chain]
        self.layers = layers
        self.p = sum(leaf.spec.numel for leaf in graph.parameters)
        products = sum(layer.products for layer in layers)
        entries = sum(node.numel for node in graph.nodes)
        self.forward = products + _ENTRY * entries + _OVERHEAD * len(graph.nodes)
        self.call = 2 * products + 2 * _ENTRY * entries + 2 * _OVERHEAD * len(graph.nodes)
        self.gradient = self.forward + self.call

    @property
    def rows(self) -> float:
        """To reach the rows of the Jacobian: pull-backs to the layers, a call for each row without a formula."""
        found, graph = taps(self.chain.graph, self.n), self.chain.graph
        if not separate(graph, graph.nodes, [tap.node.name for tap in found], self.n):
            return self.d * self.call
        covered = {path for tap in found for path in tap.paths.values()}
        few = sum(tap.node.numel for tap in found) <= FEW
        launched = _OVERHEAD * len(graph.nodes)  # for all pull-backs together, where results are few
        pulls = self.forward + self.c * (self.call / 2 - launched) + (launched if few else self.c * launched)
        rest = any(leaf.path not in covered for leaf in graph.parameters)
        return pulls + (self.d * self.call if rest else 0.0)

    def iterations(self, tolerance: float, most: int | None) -> float:
        """How many iterations conjugate gradients are taken to need."""
        digits = -math.log10(tolerance)
        return min(most or math.inf, _FIRST * digits**_LATER, self.d, self.p)

    def conjugate(self, k: float, calls: float = 2.0) -> float:
        """Conjugate gradients: the gradient, the graph for push-forwards, iterations, a measurement."""
        return self.gradient + self.call + k * (calls * self.call + 6 * _ENTRY * self.p + _LOOP * _OVERHEAD)

    @cached_property
    def kronecker(self) -> tuple[float, float]:
        """A preconditioner by Kronecker factors: to make it, and to apply it."""
        make, apply = self.gradient, 6 * _ENTRY * self.p
        for tap in layers_of(self.chain.graph):
            outputs, weight = tap.node.specs[0], tap.paths.get("weight")
            o = outputs.shape[-1] if is_linear(tap.node) else outputs.shape[1]
            inputs = 1 + sum(leaf.spec.numel // o for leaf in self.chain.graph.parameters if leaf.path == weight)
            rows = outputs.numel // max(o, 1)
            make += rows * (inputs**2 + o**2) + _EIGEN * (min(inputs, rows) ** 3 + min(o, rows) ** 3)
            apply += 2 * o * inputs * (min(inputs, rows) + min(o, rows)) + 20 * _OVERHEAD
        return make, apply

    @property
    def primal_gram(self) -> float:
        """A Cholesky factor of the Gram matrix of the parameters."""
        if self.d * self.p > MOST_ROWS:
            return math.inf
        rows = self.rows + _ENTRY * self.d * self.p
        return rows + self.d * self.p**2 / 2 + _FACTOR * self.p**3 / 6 + 3 * self.call

    def dual_gram(self, k: float) -> float:
        """The Gram matrix of the dual, by conjugate gradients or by a Cholesky factor."""
        found = taps(self.chain.graph, self.n)
        uses = Counter(path for tap in found for path in tap.paths.values())
        plain = [tap for tap in found if tap.is_outer and all(uses[path] == 1 for path in tap.paths.values())]
        held = sum(tap.node.numel for tap in found) * self.c
        if self.d > MOST_DUAL or held > MOST_ROWS:
            return math.inf
        inside = {path for tap in plain for path in tap.paths.values()}
        dense = sum(leaf.spec.numel for leaf in self.chain.graph.parameters if leaf.path not in inside)
        q, d, n = sum(tap.node.numel // n_ for tap in plain for n_ in [self.n]), self.d, self.n
        rows = self.rows + (_ENTRY * d * dense + d * d * dense / 2 if dense else 0.0)
        iteration = 2 * q * (4 * d + 2 * n * n) / 2 + (_VECTOR * d * d if dense else 0) + _LOOP * _OVERHEAD
        factor = d * d * q * 0.75 + _FACTOR * d**3 / 6
        return rows + (k * iteration if k * iteration <= factor else 2 * factor) + 4 * self.call

    def dynamic(self) -> float:
        """Dynamic programming with full matrices, in double precision; there is none for complex numbers, nor for
        matrices that do not fit into memory.
        """
        graph, several = self.chain.graph, (stages(computation, self.n) for computation in self.chain)
        states = (names for stage in several for names in (stage.interface, stage.after))
        if graph.is_complex or any(sum(map(graph.numel, names)) > LARGEST for names in states):
            return math.inf
        count = sum(newton_layer(layer.state_before, layer.state_after, layer.parameters) for layer in self.layers)
        return count + 40 * _OVERHEAD * len(self.layers)


def choose_gauss_newton(sizes: Sizes, tolerance: float, most: int | None = None, factored: bool = True) -> Choice:
    """The way to a Gauss-Newton step; only dynamic programming takes a loss that is no sum over the rows."""
    k = sizes.iterations(tolerance, most)
    costs = {
        "primal": sizes.conjugate(k),
        "dual": sizes.conjugate(k + 1),
        "primal_gram": sizes.primal_gram,
        "dual_gram": sizes.dual_gram(k),
        "dynamic": sizes.dynamic(),
    }
    return _cheapest(sizes, costs if factored else {"dynamic": costs["dynamic"]})


def choose_newton(sizes: Sizes, tolerance: float, most: int | None = None) -> Choice:
    """The way to a Newton step."""
    k = _HARDER * sizes.iterations(tolerance, most)
    return _cheapest(sizes, {"cg": sizes.conjugate(k, calls=3.0), "dynamic": sizes.dynamic()})


def _cheapest(sizes: Sizes, costs: dict[str, float]) -> Choice:
    relative = {name: cost / sizes.gradient for name, cost in costs.items()}
    return Choice(min(relative, key=relative.__getitem__), relative)

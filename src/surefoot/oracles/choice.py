r"""Which way to a second-order step costs least, from counts alone, before any work.

The unit is one multiplication inside a large matrix product. With T the forward pass, N the operations of the
graph, d = n·c the rows of :math:`R^\top J` (n samples, c columns), p the parameters and k the iterations of
conjugate gradients, the costs are

* a call of the automatic-differentiation oracle: 2T and the overhead of 2N operations;
* conjugate gradients on the parameters or on the dual: 2k calls, and k times a few passes over vectors of
  parameters, with the overhead of these;
* the rows: c pull-backs and dp numbers; a call for each row of what has no formula, or where samples meet;
* the Gram matrix of the parameters: :math:`dp^2/2` for the product, :math:`p^3/6` for its factor;
* that of the dual: :math:`k(4d + 2n^2)q` for layers that are stored as factors with q results in all, and 4kdp for
  all others; or, where that is more than the Gram matrix and its factor, twice these;
* dynamic programming: :func:`surefoot.complexity.layers.newton_layer` for each computation, and a pull-back
  through it for each number of its states and for twice those of its parameters.

k is not known before; it is taken to be what conjugate gradients need where the damping is not tiny: a few for
each factor of ten. What needs a matrix that is too large costs infinitely much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.complexity.layers import computation_cost, newton_layer
from surefoot.oracles.problem import Problem
from surefoot.oracles.quadratic import fits
from surefoot.oracles.samples import FEW, MOST, structure

_OVERHEAD = 2e5  # of launching one operation
_LOOP = 5  # operations on vectors in an iteration of conjugate gradients
_ENTRY = 10.0  # an entry of an element-wise operation or of a vector that is passed over
_MEMORY = 8.0  # a product of a matrix and a vector waits for memory
_FIRST, _LATER = 3.0, 1.8  # iterations for the first factor of ten, and the power of their number for more
_HARDER = 1.2  # times as many for Newton's matrix, where residuals bend as well
_FACTOR = 3.0  # a Cholesky factor runs at a part of the speed of a product
_LARGEST = 1 << 14  # size of a Gram matrix


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


class _Costs:
    """What the costs of all methods are made of, for c columns of the factor of the loss."""

    def __init__(self, problem: Problem, c: int) -> None:
        graph, output = problem.chain.graph, problem.output
        self.problem, self.n, self.c = problem, output.shape[0] if output.dim() else 1, c
        self.d, self.p = self.n * c, problem.size
        self.layers = [computation_cost(computation) for computation in problem.chain]
        work = sum(layer.products for layer in self.layers) + _ENTRY * sum(node.numel for node in graph.nodes)
        self.forward = work + _OVERHEAD * len(graph.nodes)
        self.call, self.gradient = 2 * self.forward, 3 * self.forward

    def iterations(self, tolerance: float, most: int | None) -> float:
        """How many iterations conjugate gradients are taken to need."""
        digits = -math.log10(tolerance)
        return min(most or math.inf, _FIRST * digits**_LATER, self.d, self.p)

    def conjugate(self, k: float, calls: float = 2.0) -> float:
        """Conjugate gradients: the gradient, the graph for push-forwards, iterations, a measurement."""
        return self.gradient + self.call + k * (calls * self.call + 6 * _ENTRY * self.p + _LOOP * _OVERHEAD)

    def gram(self, k: float) -> tuple[float, float]:
        """The Gram matrix of the parameters, and that of the dual."""
        d, p, n, c, graph = self.d, self.p, self.n, self.c, self.problem.chain.graph
        sides = p <= _LARGEST and d * p <= MOST, d <= _LARGEST
        if not any(sides) or self.problem.in_pieces or graph.is_complex:
            return math.inf, math.inf
        plan = structure(self.problem)
        results = {use.node.name: use.labels.numel() for use in plan.uses}
        together = sum(results.values()) <= FEW
        rows = self.forward + c * (self.call / 2 - _OVERHEAD * len(graph.nodes)) + 6 * _OVERHEAD * len(plan.uses)
        rows += _OVERHEAD * len(graph.nodes) * (1 if together else c)
        rows += self.d * self.call if plan.rest else 0.0
        outers = plan.layers(graph, n)
        stored = {*outers, *(bias for _, bias in outers.values())}
        dense = sum(leaf.spec.numel for leaf in graph.parameters if leaf.name not in stored)
        q = sum(results[use.node.name] // n for use, _ in outers.values())
        if not sides[1] or d * dense + c * n * q > MOST:
            sides = sides[0], False
        parameters = rows + _ENTRY * d * p + d * p**2 / 2 + _FACTOR * p**3 / 6 + 4 * _MEMORY * d * p
        iteration = 2 * q * (4 * d + 2 * n * n) / 2 + _MEMORY * 4 * d * dense + _LOOP * _OVERHEAD
        factor = d * d * (0.75 * q + dense) + _FACTOR * d**3 / 6
        dual = rows + _ENTRY * d * dense + min(k * iteration, 2 * factor) + 4 * self.n * p
        return parameters if sides[0] else math.inf, dual if sides[1] else math.inf

    def dynamic(self) -> float:
        """Dynamic programming with full matrices, in double precision."""
        if self.problem.chain.graph.is_complex or self.problem.in_pieces or fits(self.problem.chain)[0]:
            return math.inf
        count = 40 * _OVERHEAD * len(self.layers)
        for layer, computation in zip(self.layers, self.problem.chain, strict=True):
            entries = sum(node.numel for node in computation.nodes)
            pulls = layer.state_before + layer.state_after + 2 * layer.parameters
            count += newton_layer(layer.state_before, layer.state_after, layer.parameters)
            count += 2 * pulls * (layer.products + _ENTRY * entries) + 4 * _OVERHEAD * len(computation.nodes)
        return count

    def cheapest(self, costs: Mapping[str, float]) -> Choice:
        """The method that costs least."""
        relative = {name: cost / self.gradient for name, cost in costs.items()}
        return Choice(min(relative, key=relative.__getitem__), relative)


def choose_gauss_newton(
    problem: Problem, columns: int | None, tolerance: float, most: int | None = None
) -> Choice:
    """The way to a Gauss-Newton step.

    Args:
        problem: the objective around a point.
        columns: of the factor of the loss for each sample; ``None`` for a loss that is no sum over the rows of the
            output, which dynamic programming alone takes.
        tolerance: of the step.
        most: how many iterations may be made.
    """
    costs = _Costs(problem, columns or 1)
    if columns is None:
        return costs.cheapest({"dynamic": costs.dynamic()})
    k = costs.iterations(tolerance, most)
    parameters, dual = costs.gram(k)
    conjugate = {"primal": costs.conjugate(k), "dual": costs.conjugate(k + 1)}
    return costs.cheapest({**conjugate, "primal_gram": parameters, "dual_gram": dual, "dynamic": costs.dynamic()})


def choose_newton(problem: Problem, tolerance: float, most: int | None = None) -> Choice:
    """The way to a Newton step."""
    costs = _Costs(problem, 1)
    k = _HARDER * costs.iterations(tolerance, most)
    return costs.cheapest({"cg": costs.conjugate(k, calls=3.0), "dynamic": costs.dynamic()})

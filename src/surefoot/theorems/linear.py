r"""A network linearised at its weights: the Gram matrix of the Jacobian and the residual, with proved errors.

*Layered networks*: see :mod:`surefoot.theorems.layered`. *Others*: the row of one output is the gradient of
:math:`\langle c, \psi\rangle` with c the unit vector, by the adjoint pass, whose error is proved
(:func:`~surefoot.calculus.adjoint.gradient.proved_gradient`): :math:`\|J_i - \hat J_i\| \le \varepsilon_i`. It is
a pass over one sample where samples do not interact. A Jacobian that does not fit into memory is computed by
panels of rows, and again whenever two panels meet. So

.. math:: |\langle J_i, J_j\rangle - \mathrm{fl}\langle\hat J_i, \hat J_j\rangle| \le \varepsilon_i\|\hat J_j\| +
    \|\hat J_i\|\varepsilon_j + \varepsilon_i\varepsilon_j + \gamma_p\|\hat J_i\|\|\hat J_j\| .
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from surefoot.calculus.adjoint.gradient import proved_gradient
from surefoot.calculus.analysis import Analysis
from surefoot.domains import Ball
from surefoot.graph.nodes import Spec
from surefoot.norms import frobenius_norm
from surefoot.norms.blocked import Symmetric
from surefoot.norms.hermitian import product_error, up
from surefoot.norms.verified import down, largest_eigenvalue, least_solution, smallest_eigenvalue, vector_norm
from surefoot.scalar import Rounded
from surefoot.theorems.layered import Layered, layer_weights

WEIGHED = 1500  # rows from which block weights are found
_PANEL = 512  # rows at a time
_ENTRIES = 2**28  # of a Jacobian that is kept, two gigabytes; twice that while it is written
_PANEL_ENTRIES = 2**26  # of a panel, half a gigabyte


@dataclass(frozen=True, eq=False)
class Linearised:
    """What the theorems need to know at the weights.

    Attributes:
        gram: :math:`JJ^\\top`, by panels of rows.
        residual: :math:`\\psi(u_0) - y`, flat, as computed.
        error: a bound on the norm of its error.
        parameters: how many there are.
    """

    gram: Symmetric
    residual: Tensor
    error: float
    parameters: int

    @property
    def outputs(self) -> int:
        """How many outputs there are, of all samples."""
        return len(self.residual)

    @cached_property
    def sigma(self) -> float:
        """A lower bound of the smallest singular value of J; zero if none is proved."""
        lowest = smallest_eigenvalue(self.gram)
        return down(math.sqrt(lowest)) if lowest > 0 else 0.0

    @cached_property
    def norm(self) -> float:
        """An upper bound of the norm of J."""
        return up(math.sqrt(largest_eigenvalue(self.gram)))

    def steepest(self, samples: int) -> float:
        """An upper bound of the norms of the rows of J that belong to one of so many samples: the root of the
        largest trace of a block on the diagonal.
        """
        sizes = [found.value[:, start:].diagonal() + found.error[:, start:].diagonal()
                 for start, _, found in self.gram.panels()]  # fmt: skip
        return up(math.sqrt(float(torch.cat(sizes).reshape(samples, -1).sum(1).max()) * (1 + 1e-9)))

    @cached_property
    def length(self) -> float:
        """An upper bound of the norm of the residual."""
        return vector_norm(self.residual, self.error)

    @cached_property
    def least(self) -> float:
        """An upper bound of the norm of the least solution of the linearised equations."""
        return least_solution(self.gram, self.residual, self.error, self.sigma) if self.sigma > 0 else math.inf


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of the Jacobian written out.

    Attributes:
        slopes: by path of the parameter, outputs × entries.
        errors: bounds on the norms of the errors of the rows.
    """

    slopes: Mapping[str, Tensor]
    errors: Mapping[str, Tensor]

    def flat(self, weights: Mapping[str, float] | None = None) -> _Flat:
        """All parameters side by side, divided by the roots of weights, which are powers of four: exactly."""
        parts = {path: 1.0 if weights is None else weights[path] ** -0.5 for path in self.slopes}
        rows = torch.cat([self.slopes[path] * part for path, part in parts.items()], 1)
        errors = torch.stack([self.errors[path] * part for path, part in parts.items()])
        return _Flat(rows, torch.linalg.vector_norm(errors, dim=0) * (1 + 1e-12))


@dataclass(frozen=True, eq=False)
class _Flat:
    """Rows with bounds on the norms of their errors."""

    rows: Tensor
    errors: Tensor

    def __getitem__(self, part: slice) -> _Flat:
        return _Flat(self.rows[part], self.errors[part])

    def times(self, other: _Flat) -> Rounded:
        """Inner products with other rows."""
        mine, others = (torch.linalg.vector_norm(one.rows, dim=1) * (1 + 1e-9) for one in (self, other))
        apart = self.errors[:, None] * others + mine[:, None] * other.errors + self.errors[:, None] * other.errors
        apart = apart + product_error(self.rows.shape[1]) * mine[:, None] * others
        return Rounded(self.rows @ other.rows.mT, apart * (1 + 1e-9))


@dataclass(frozen=True, eq=False)
class Panels:
    """A Jacobian that does not fit into memory: panels of rows are computed whenever they are asked for.

    Attributes:
        output: an output, by its number, as a function by itself.
        size: how many outputs there are.
        panel: how many rows there are at a time.
    """

    output: Callable[[int], Analysis]
    size: int
    panel: int

    def part(self, start: int, stop: int) -> Rows:
        """These rows, one adjoint pass each."""
        slopes: dict[str, list[Tensor]] = {}
        errors: dict[str, list[float]] = {}
        for output in map(self.output, range(start, stop)):
            found = proved_gradient(output)
            for leaf in output.reading.graph.parameters:
                if leaf.path in found.slopes:
                    slopes.setdefault(leaf.path, []).append(found.slopes[leaf.path].reshape(-1))
                    errors.setdefault(leaf.path, []).append(found.errors[leaf.path])
        return Rows(
            {path: torch.stack(slopes.pop(path)) for path in list(slopes)},
            {path: torch.tensor(each, dtype=torch.float64) for path, each in errors.items()},
        )


Jacobian = Layered | Rows | Panels


def gram_of(jacobian: Jacobian, weights: Mapping[str, float] | None = None) -> Symmetric:
    """:math:`JJ^\\top` by panels of rows, computed now.

    Args:
        jacobian: the network layer by layer, or its Jacobian.
        weights: :math:`L_b` of parameters by path, powers of four: norms are those of
            :class:`~surefoot.theorems.gradient_steps.SquareOnBall`.
    """
    if isinstance(jacobian, Layered):
        parts = [] if weights is None else layer_weights(jacobian.layers, weights)
        size = jacobian.outputs.value.numel()
        gram = Symmetric(size, lambda start, stop: jacobian.gram_rows(start, stop, parts))
    else:
        if isinstance(jacobian, Rows):
            whole, panel = jacobian.flat(weights), _PANEL
            size, part = len(whole.rows), lambda start, stop: whole[start:stop]
        else:
            size, panel, streamed = jacobian.size, jacobian.panel, jacobian
            part = lambda start, stop: streamed.part(start, stop).flat(weights)  # noqa: E731

        def rows(start: int, stop: int) -> Rounded:
            last = part(start, stop)
            found = [last.times(part(k, min(k + panel, start))) for k in range(0, start, panel)]
            found.append(last.times(last))
            return Rounded(*(torch.cat([getattr(one, name) for one in found], 1) for name in ("value", "error")))

        gram = Symmetric(size, rows, panel)
    return gram.kept()


def linearise(analysis: Analysis, jacobian: Jacobian, gram: Symmetric, targets: Tensor) -> Linearised:
    """The network at its weights, compared with targets of the shape of its outputs."""
    graph = analysis.reading.graph
    parameters = sum(graph.numel(leaf.name) for leaf in graph.parameters if leaf.trainable)
    wanted = targets.detach().double().reshape(-1)
    if not isinstance(jacobian, Layered):
        result = analysis.over(Ball(0.0))
        wrong = result.enclosures[result.outputs[0]].error
        residual = analysis.centre[graph.outputs[0]].reshape(-1) - wanted
        return Linearised(gram, residual, up(float(wrong) + 2.0**-52 * frobenius_norm(residual)), parameters)
    return linearised(gram, jacobian.outputs, targets, parameters)


def linearised(gram: Symmetric, outputs: Rounded, targets: Tensor, parameters: int) -> Linearised:
    """The same from the outputs, with bounds on the errors of each."""
    flat = outputs.rearranged(lambda t: t.reshape(-1)) - targets.detach().double().reshape(-1)
    return Linearised(gram, flat.value, frobenius_norm(flat.error), parameters)


def block_weights(jacobian: Jacobian) -> dict[str, float]:
    """:math:`L_b` by path, powers of four and at least one: about in proportion to :math:`\\|J_bJ_b^\\top\\|`,
    so that no block turns the outputs much faster than another. Any weights are right.
    """
    if isinstance(jacobian, Panels):
        jacobian = jacobian.part(0, min(jacobian.panel, jacobian.size))
    if isinstance(jacobian, Rows):
        sizes = {path: float((rows @ rows.mT).norm()) for path, rows in jacobian.slopes.items()}
    else:
        layers, sizes = jacobian.layers, {}
        stop = min(jacobian.count * jacobian.outputs.value.shape[1], WEIGHED)
        for k, layer in enumerate(layers):
            if layer.trains:
                size = float(jacobian.gram_rows(0, stop, [float(k == j) for j in range(len(layers))]).value.norm())
                sizes |= dict.fromkeys(layer.paths, size)
    return in_proportion(sizes)


def in_proportion(sizes: Mapping[str, float]) -> dict[str, float]:
    """Powers of four, at least one, about in proportion to these numbers."""
    least = min((size for size in sizes.values() if size > 0), default=1.0)
    return {path: 4.0 ** round(math.log(max(size / least, 1.0), 4)) for path, size in sizes.items()}


def along(analysis: Analysis, costate: Tensor) -> Analysis:
    """The inner product of the outputs with a vector of their shape."""
    return Analysis.of(analysis.model, analysis.x, _Along(costate))


class _Along(nn.Module):
    """The inner product of the outputs with a vector."""

    costate: Tensor

    def __init__(self, costate: Tensor) -> None:
        super().__init__()
        self.register_buffer("costate", costate)

    def forward(self, outputs: Tensor) -> Tensor:
        """One number."""
        return (outputs * self.costate).sum()


def single_outputs(analysis: Analysis) -> Callable[[int], Analysis]:
    """Each output of a network, by its number, as a function by itself; all share one reading."""
    spec = analysis.reading.graph.spec(analysis.reading.graph.outputs[0])
    assert isinstance(spec, Spec)
    like = next(iter(analysis.values.values()))
    weighted = along(analysis, torch.zeros(spec.shape, dtype=torch.float64, device=like.device))
    names = [name for name in weighted.values
             if name not in analysis.values and weighted.values[name].shape == spec.shape]  # fmt: skip
    if len(names) != 1:
        raise RuntimeError("the graph of a linear function of the outputs is not what was expected")

    def output(number: int) -> Analysis:
        unit = torch.zeros(math.prod(spec.shape), dtype=torch.float64, device=like.device)
        unit[number] = 1.0
        return replace(weighted, values={**weighted.values, names[0]: unit.reshape(spec.shape)})

    return output


def jacobian_rows(analysis: Analysis, output: Callable[[int], Analysis] | None = None) -> Rows | Panels:
    """The Jacobian, one adjoint pass for each row; by panels if it does not fit into so much memory.

    Args:
        analysis: the network.
        output: an output as a function by itself; by default of all samples.
    """
    graph = analysis.reading.graph
    entries = sum(graph.numel(leaf.name) for leaf in graph.parameters if leaf.trainable)
    size = graph.numel(graph.outputs[0])
    panels = Panels(
        output or single_outputs(analysis), size, min(max(_PANEL_ENTRIES // max(entries, 1), 1), _PANEL)
    )
    return panels.part(0, size) if size * entries <= _ENTRIES else panels

r"""A network linearised at its weights: the Gram matrix of the Jacobian and the residual, with proved errors.

*Layered networks*: see :mod:`surefoot.theorems.layered`. *Others*: the row of one output is the gradient of
:math:`\langle c, \psi\rangle` with c the unit vector, by the adjoint pass, whose error is proved
(:func:`~surefoot.calculus.adjoint.gradient.proved_gradient`): :math:`\|J_i - \hat J_i\| \le \varepsilon_i`. Where
samples do not interact, the pass is over one sample. A Jacobian that does not fit into memory is computed by
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
from surefoot.graph.nodes import Spec
from surefoot.graph.structure import Graph
from surefoot.norms import frobenius_norm
from surefoot.norms.blocked import Symmetric
from surefoot.norms.hermitian import product_error, up
from surefoot.norms.verified import (
    down,
    largest_eigenvalue,
    least_solution,
    norm_of,
    product,
    smallest_eigenvalue,
    vector_norm,
)
from surefoot.scalar import Rounded
from surefoot.theorems.layered import Layered

_PANEL = 512  # rows at a time
_ENTRIES = 2**28  # entries of a Jacobian that is kept: two gigabytes, twice that while it is written
_PANEL_ENTRIES = 2**26  # entries of a panel: half a gigabyte


@dataclass(frozen=True, eq=False)
class Linearised:
    """The Gram matrix and the residual at the weights, and the numbers that theorems need of them."""

    gram: Symmetric  # :math:`JJ^\\top`, by panels of rows
    residual: Tensor  # :math:`\\psi(u_0) - y`, flat, as computed
    error: float  # a bound on the norm of its error

    @staticmethod
    def of(gram: Symmetric, outputs: Tensor, error: float, targets: Tensor) -> Linearised:
        """The linearised network, from outputs that are known up to an error and from the targets."""
        residual = outputs.reshape(-1) - targets.detach().double().reshape(-1)
        return Linearised(gram, residual, up(error + 2.0**-52 * frobenius_norm(residual)))

    @cached_property
    def sigma(self) -> float:
        """A lower bound on the smallest singular value of J; zero if none is proved."""
        lowest = smallest_eigenvalue(self.gram)
        return down(math.sqrt(lowest)) if lowest > 0 else 0.0

    @cached_property
    def norm(self) -> float:
        """An upper bound on the norm of J."""
        return up(math.sqrt(largest_eigenvalue(self.gram)))

    def steepest(self, samples: int) -> float:
        """An upper bound on the norm of the rows of J that belong to one of this many samples.

        It is the root of the largest trace of a block on the diagonal of :math:`JJ^\\top`.
        """
        sizes = [panel.value[:, start:].diagonal() + panel.error[:, start:].diagonal()
                 for start, _, panel in self.gram.panels()]  # fmt: skip
        return up(math.sqrt(float(torch.cat(sizes).reshape(samples, -1).sum(1).max()) * (1 + 1e-9)))

    @cached_property
    def length(self) -> float:
        """An upper bound on the norm of the residual."""
        return vector_norm(self.residual, self.error)

    @cached_property
    def least(self) -> float:
        """An upper bound on the norm of the least solution of the linearised equations."""
        return least_solution(self.gram, self.residual, self.error, self.sigma) if self.sigma > 0 else math.inf


class _Written:
    """Rows of the Jacobian that can be written out, ``panel`` of them at a time."""

    panel = _PANEL

    def part(self, start: int, stop: int) -> Rows:
        """These rows."""
        raise NotImplementedError

    def times(
        self, start: int, stop: int, other: _Written, end: int, factors: Mapping[str, float] | None = None
    ) -> Rounded:
        """As :meth:`~surefoot.theorems.layered.Layered.times`; factors are powers of four or zero, so that their
        roots are exact.
        """
        rows, products = self.part(start, stop).flat(factors), []
        for k in range(0, end, other.panel):
            last = min(k + other.panel, end)
            same = other is self and (k, last) == (start, stop)
            products.append(_inner_products(rows, rows if same else other.part(k, last).flat(factors)))
        return Rounded(*(torch.cat([getattr(one, name) for one in products], 1) for name in ("value", "error")))


@dataclass(frozen=True, eq=False)
class Rows(_Written):
    """Rows of the Jacobian written out."""

    slopes: Mapping[str, Tensor]  # by path of the parameter, outputs × entries
    errors: Mapping[str, Tensor]  # bounds on the norms of the errors of the rows

    def part(self, start: int, stop: int) -> Rows:
        """These rows."""
        parts = (
            {path: each[start:stop] for path, each in by_path.items()} for by_path in (self.slopes, self.errors)
        )
        return Rows(*parts)

    def flat(self, factors: Mapping[str, float] | None = None) -> tuple[Tensor, Tensor]:
        """All parameters side by side, each times the root of its factor; and bounds on the errors of rows."""
        parts = {path: 1.0 if factors is None else factors[path] ** 0.5 for path in self.slopes}
        parts = {path: part for path, part in parts.items() if part}
        rows = torch.cat([self.slopes[path] * part for path, part in parts.items()], 1)
        errors = torch.stack([self.errors[path] * part for path, part in parts.items()])
        return rows, torch.linalg.vector_norm(errors, dim=0) * (1 + 1e-12)


def _inner_products(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Rounded:
    """The inner products of rows that come with bounds on the norms of their errors."""
    (rows, errors), (others, other_errors) = first, second
    sizes, other_sizes = (torch.linalg.vector_norm(each, dim=1) * (1 + 1e-9) for each in (rows, others))
    apart = errors[:, None] * other_sizes + sizes[:, None] * other_errors + errors[:, None] * other_errors
    apart = apart + product_error(rows.shape[1]) * sizes[:, None] * other_sizes
    return Rounded(rows @ others.mT, apart * (1 + 1e-9))


@dataclass(frozen=True, eq=False)
class Panels(_Written):
    """A Jacobian that does not fit into memory: panels of rows are computed each time they are needed."""

    output: Callable[[int], Analysis]  # an output, by its number, as a function by itself
    panel: int  # number of rows of a panel

    def part(self, start: int, stop: int) -> Rows:
        """These rows, one adjoint pass each."""
        slopes: dict[str, list[Tensor]] = {}
        errors: dict[str, list[float]] = {}
        for output in map(self.output, range(start, stop)):
            gradient = proved_gradient(output)
            for leaf in output.reading.graph.parameters:
                if leaf.path in gradient.slopes:
                    slopes.setdefault(leaf.path, []).append(gradient.slopes[leaf.path].reshape(-1))
                    errors.setdefault(leaf.path, []).append(gradient.errors[leaf.path])
        return Rows(
            {path: torch.stack(slopes.pop(path)) for path in list(slopes)},
            {path: torch.tensor(each, dtype=torch.float64) for path, each in errors.items()},
        )


Jacobian = Layered | Rows | Panels


def written(jacobian: Jacobian, start: int, stop: int) -> Rows:
    """Rows of a Jacobian, written out."""
    if not isinstance(jacobian, Layered):
        return jacobian.part(start, stop)
    slopes, errors = {}, {}
    for path, rows in jacobian.rows(start, stop):
        wide = rows.expand(rows.value.shape)
        slopes[path] = wide.value
        errors[path] = torch.linalg.vector_norm(wide.error, dim=1) * (1 + 1e-9)
    return Rows(slopes, errors)


def normal_matrix(
    jacobian: Jacobian, order: Mapping[str, int], outer: Rounded, most: float
) -> tuple[Tensor, float]:
    r""":math:`J^\top CJ`, symmetric, and a bound on the norm of its error.

    ``order`` says how many columns each parameter has, by path. C, of norm at most ``most``, is one symmetric
    matrix for each sample. If a panel of J is known up to e in the Frobenius norm, the product is off by at most
    :math:`\|C\|e(2\|J\|_F + e)`.
    """
    count, width = outer.value.shape[:2]
    step = max(_PANEL // width, 1)
    outer = outer.expand(outer.value.shape)
    total, wrong, sizes = outer.value.new_zeros(2 * (sum(order.values()),)), 0.0, 0.0
    for start in range(0, count, step):
        stop = min(start + step, count)
        rows = written(jacobian, start * width, stop * width)
        none = outer.value.new_zeros((stop - start) * width, 1)
        flat = torch.cat([rows.slopes.get(path, none.expand(-1, n)) for path, n in order.items()], 1)
        apart = math.sqrt(sum(float(error.square().sum()) for error in rows.errors.values())) * (1 + 1e-9)
        exact = Rounded.exact(flat.reshape(stop - start, width, -1))
        inner = product(Rounded(outer.value[start:stop], outer.error[start:stop]), exact)
        part = product(Rounded.exact(flat.mT.contiguous()), inner.rearranged(lambda t: t.flatten(0, 1)))
        total += part.value
        sizes += frobenius_norm(part.value)
        wrong += norm_of(part.error) + most * apart * (2 * frobenius_norm(flat) + apart)
    total = 0.5 * (total + total.mT)
    return total, up(wrong + (count + 4) * 2.0**-52 * sizes, 2 * count + 8)


def in_proportion(sizes: Mapping[str, float]) -> dict[str, float]:
    """Powers of four, at least one, roughly in proportion to these numbers."""
    least = min((size for size in sizes.values() if size > 0), default=1.0)
    return {path: 4.0 ** round(math.log(max(size / least, 1.0), 4)) for path, size in sizes.items()}


class Along:
    """Inner products of the outputs of a network with vectors; batches of one shape share a reading."""

    def __init__(self) -> None:
        self._readings: dict[Graph, tuple[Analysis, str]] = {}

    def __call__(self, analysis: Analysis, costate: Tensor) -> Analysis:
        """The inner product with a vector of the shape of the outputs."""
        graph = analysis.reading.graph
        if graph not in self._readings:
            self._readings[graph] = _with_vector(analysis)
        weighted, name = self._readings[graph]
        inputs = {leaf.name: analysis.values[leaf.name] for leaf in graph.inputs}
        return replace(weighted, x=analysis.x, values={**weighted.values, **inputs, name: costate})


def _with_vector(analysis: Analysis) -> tuple[Analysis, str]:
    """The inner product with a vector, and the name of the vector."""
    spec = analysis.reading.graph.spec(analysis.reading.graph.outputs[0])
    assert isinstance(spec, Spec)
    like = next(iter(analysis.values.values()))
    vector = torch.zeros(spec.shape, dtype=torch.float64, device=like.device)
    weighted = Analysis.of(analysis.model, analysis.x, _InnerProduct(vector))
    names = [name for name in weighted.values
             if name not in analysis.values and weighted.values[name].shape == spec.shape]  # fmt: skip
    if len(names) != 1:
        raise RuntimeError("the graph of a linear function of the outputs is not what was expected")
    return weighted, names[0]


class _InnerProduct(nn.Module):
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
    zero = torch.zeros_like(analysis.centre[analysis.reading.graph.outputs[0]], dtype=torch.float64)
    along = Along()

    def output(number: int) -> Analysis:
        unit = zero.clone()
        unit.view(-1)[number] = 1.0
        return along(analysis, unit)

    return output


def rows_at_once(entries: int) -> int:
    """The number of rows of this many entries that are written out together."""
    return max(_PANEL_ENTRIES // max(entries, 1), 1)


def jacobian_rows(analysis: Analysis, output: Callable[[int], Analysis] | None = None) -> Rows | Panels:
    """The Jacobian, one adjoint pass for each row; by panels if it does not fit into memory.

    ``output`` gives an output by its number, as a function by itself; by default a function of all samples.
    """
    graph = analysis.reading.graph
    entries = sum(graph.numel(leaf.name) for leaf in graph.parameters if leaf.trainable)
    size = graph.numel(graph.outputs[0])
    panels = Panels(output or single_outputs(analysis), min(rows_at_once(entries), _PANEL))
    return panels.part(0, size) if size * entries <= _ENTRIES else panels

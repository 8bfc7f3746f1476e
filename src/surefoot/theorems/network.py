r"""A network at its weights: outputs, Jacobian and its Gram matrix with proved errors, and K on balls.

*Layered networks*: see :mod:`surefoot.theorems.layered` and :mod:`surefoot.theorems.bending`.

*Networks that are affine in what is trained*, :math:`\psi(u) = \psi(0) + Ju`, for example because only the last
layer is: the columns of J are :math:`\psi(e_j) - \psi(0)`, values of the network, whose errors are bounded entry
by entry (:mod:`surefoot.calculus.folding`). K is zero.

*Others*: the row of one output is the gradient of :math:`\langle c, \psi\rangle` with c the unit vector, by the
adjoint pass, whose error is proved (:func:`~surefoot.calculus.adjoint.gradient.proved_gradient`). K is the
smoothness of the outputs by the calculus (:mod:`surefoot.calculus.assemble`), either of the whole batch or, as
:math:`\|D^2\psi[v, v]\|^2 = \sum_n\|D^2\psi_n[v, v]\|^2`, the root of the sum of squares over single samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.calculus.adjoint.gradient import proved_gradient
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.assemble import assemble, smoothness, terms, weighted_curvature
from surefoot.calculus.breakdown import reasons
from surefoot.calculus.folding import fold
from surefoot.domains import Ball
from surefoot.enclosure import Enclosure
from surefoot.graph.nodes import Node, Ref
from surefoot.graph.structure import Graph
from surefoot.guarantees import GuaranteeError
from surefoot.norms import frobenius_norm
from surefoot.norms.blocked import Symmetric
from surefoot.norms.hermitian import up
from surefoot.norms.verified import (
    down,
    largest_eigenvalue,
    least_solution,
    product,
    smallest_eigenvalue,
    vector_norm,
)
from surefoot.objectives import Objective
from surefoot.operations.common import separate
from surefoot.operations.forms import Degree, degree_of
from surefoot.operations.record import Form, record_of
from surefoot.scalar import Rounded
from surefoot.theorems.bending import Bending, bending
from surefoot.theorems.layered import Layered, read_layers

_ROWS = 10_000  # outputs of all samples
_ENTRIES = 2**28  # of a Jacobian that is written out: two gigabytes
_AFFINE = 1000  # parameters of an affine network: each needs one evaluation
_SAMPLES = 64  # of which K is computed one by one
_SIZES = ("shape", "size", "sizes")  # arguments of layout operations that are the shape of the result


class Network:
    """The network with its data and its objective, and the numbers that theorems need of them.

    Attributes:
        objective: the loss, bound to its targets.
        layered: the network layer by layer; ``None`` if it is anything else.
        order: the sizes of the trained parameters by path.
        is_affine: whether the outputs are affine in the trained parameters, and the network is not layered.
    """

    def __init__(self, model: nn.Module, x: Any, objective: Objective) -> None:
        self.model, self.x, self.objective = model, x, objective
        self.analysis = Analysis.of(model, x)
        self.analysis.require_values()
        self.layered: Layered | None = read_layers(self.analysis)
        leaves = [leaf for leaves in self.analysis.variables().values() for leaf in leaves]
        self.order = {leaf.path: math.prod(leaf.spec.shape) for leaf in leaves}
        self.parameters = sum(self.order.values())
        self.is_affine = self.layered is None and _is_affine(self.analysis.reading.graph)
        self._bendings: dict[float, Bending] = {}

    @cached_property
    def whole(self) -> Analysis:
        """The objective."""
        return Analysis.of(self.model, self.x, self.objective)

    @property
    def _values(self) -> Tensor:
        outputs: Tensor = self.analysis.centre[self.analysis.reading.graph.outputs[0]]
        return outputs

    @property
    def shape(self) -> torch.Size:
        """The shape of the outputs."""
        return self._values.shape

    @cached_property
    def outputs(self) -> Rounded:
        """The outputs at the weights, samples × outputs, with errors whose norm is that of the outputs' error."""
        value = self._values.double().reshape(*self.shape[:1] or (1,), -1)
        if self.layered is not None:
            return self.layered.outputs.expand(value.shape)
        if self.is_affine:
            return self._evaluated(dict(self.analysis.values)).rearranged(lambda t: t.reshape(value.shape))
        result = self.analysis.over(Ball(0.0))
        return Rounded(value, torch.full_like(value, float(result.enclosures[result.outputs[0]].error)))

    @cached_property
    def residual(self) -> tuple[Tensor, float]:
        """The outputs minus the targets of a square loss, flat, and a bound on the norm of the error."""
        outputs, exact = self.outputs, self.layered is not None or self.is_affine
        residual = outputs.value.reshape(-1) - self.objective.chosen().double().reshape(-1)
        error = frobenius_norm(outputs.error) if exact else float(outputs.error.max())
        return residual, up(error + 2.0**-52 * frobenius_norm(residual))

    @cached_property
    def jacobian(self) -> Rounded:
        """The Jacobian written out, one row per output, parameters in their order."""
        if self.outputs.value.numel() * self.parameters > _ENTRIES:
            raise GuaranteeError(
                f"the Jacobian has {self.outputs.value.numel()} × {self.parameters} entries, and only that of "
                "linear layers and element-wise functions does not have to be written out: take at most "
                f"{_ENTRIES} entries"
            )
        if self.layered is not None:
            parts = dict(self.layered.rows(0, self.outputs.value.numel()))
            rows = [parts[path].expand(parts[path].value.shape) for path in self.order]
            return Rounded(*(torch.cat([getattr(row, name) for row in rows], 1) for name in ("value", "error")))
        return self._columns() if self.is_affine else self._rows()

    def _evaluated(self, weights: Mapping[str, Tensor]) -> Rounded:
        """The outputs of an affine network at some weights, by name, in one column."""
        graph = self.analysis.reading.graph
        at = {name: value.detach().double() for name, value in weights.items() if name not in self._constants}
        folded = fold(graph, at, self._constants)[graph.outputs[0]]
        radius = folded.entry_radius()
        assert radius is not None
        return Rounded(folded.value, radius).rearranged(lambda t: t.reshape(-1, 1))

    @cached_property
    def _constants(self) -> dict[str, Enclosure]:
        """What does not depend on the trained parameters."""
        graph = self.analysis.reading.graph
        trained = {leaf.name for leaf in graph.parameters if leaf.trainable}
        return fold(graph, {name: v for name, v in self.analysis.values.items() if name not in trained})

    def _columns(self) -> Rounded:
        names = {leaf.path: leaf.name for leaf in self.analysis.reading.graph.parameters}
        zeros = {names[path]: torch.zeros_like(self.analysis.values[names[path]]).double() for path in self.order}
        origin, columns = self._evaluated(zeros), []
        for name, zero in zeros.items():
            units = torch.eye(zero.numel(), dtype=torch.float64, device=zero.device)
            columns += [self._evaluated({**zeros, name: u.reshape(zero.shape)}) - origin for u in units]
        return Rounded(
            *(torch.cat([getattr(column, part) for column in columns], 1) for part in ("value", "error"))
        )

    def _rows(self) -> Rounded:
        values, errors = [], []
        alone = self._alone or [self.analysis]
        each = self.outputs.value.numel() // len(alone)
        for one in alone:
            zero = torch.zeros(each, dtype=torch.float64, device=self._values.device)
            for k in range(each):
                unit = zero.clone()
                unit[k] = 1.0
                gradient = proved_gradient(self.along(unit, one))
                none = torch.zeros((), dtype=torch.float64)
                parts = [gradient.slopes.get(path, none.expand(n)).reshape(-1) for path, n in self.order.items()]
                wrong = [gradient.errors.get(path, 0.0) for path in self.order]
                values.append(torch.cat(parts))
                errors.append(torch.cat([torch.full_like(p, e) for p, e in zip(parts, wrong, strict=True)]))
        return Rounded(torch.stack(values), torch.stack(errors))

    def along(self, costate: Tensor, analysis: Analysis | None = None) -> Analysis:
        """The inner product of the outputs, of all samples or of one, with a vector; readings are shared."""
        analysis = analysis or self.analysis
        shape = analysis.reading.graph.specs(analysis.reading.graph.outputs[0])[0].shape
        if analysis.reading.graph not in self._weighted:
            vector = torch.zeros(shape, dtype=torch.float64, device=costate.device)
            weighted = Analysis.of(analysis.model, analysis.x, _InnerProduct(vector))
            new = [n for n, v in weighted.values.items() if n not in analysis.values and v.shape == shape]
            if len(new) != 1:
                raise RuntimeError("the graph of a linear function of the outputs is not what was expected")
            self._weighted[analysis.reading.graph] = weighted, new[0]
        weighted, name = self._weighted[analysis.reading.graph]
        inputs = {leaf.name: analysis.values[leaf.name] for leaf in analysis.reading.graph.inputs}
        values = {**weighted.values, **inputs, name: costate.reshape(shape)}
        return replace(weighted, x=analysis.x, values=values)

    @cached_property
    def _weighted(self) -> dict[Graph, tuple[Analysis, str]]:
        return {}

    @cached_property
    def _alone(self) -> list[Analysis]:
        """The network on each sample; empty if samples interact, or a single one is treated differently."""
        x, graph = self.x, self.analysis.reading.graph
        if not isinstance(x, Tensor) or x.ndim < 2 or len(graph.inputs) != 1 or len(x) < 2:
            return []
        if not separate(graph, graph.nodes, [graph.inputs[0].name], len(x)):
            return []
        alone = [Analysis.of(self.model, x[n : n + 1]) for n in range(len(x))]
        return alone if all(_same(graph, one.reading.graph) for one in alone) else []

    # numbers of the linearised network

    @cached_property
    def gram(self) -> Symmetric:
        """:math:`JJ^\\top`."""
        if self.outputs.value.numel() > _ROWS:
            raise GuaranteeError(
                f"there are {self.outputs.value.numel()} outputs of all samples, and the theorem needs the inner "
                f"products of their gradients: take at most {_ROWS}"
            )
        if self.layered is not None:
            return Symmetric.dense(self.layered.gram)
        return Symmetric.dense(product(self.jacobian, self.jacobian.rearranged(lambda t: t.mT)))

    @cached_property
    def sigma(self) -> float:
        """A lower bound on the smallest singular value of J; zero if none is proved."""
        lowest = smallest_eigenvalue(self.gram)
        return down(math.sqrt(lowest)) if lowest > 0 else 0.0

    @cached_property
    def norm(self) -> float:
        """An upper bound on the norm of J."""
        return up(math.sqrt(largest_eigenvalue(self.gram)))

    @cached_property
    def length(self) -> float:
        """An upper bound on the norm of the residual."""
        return vector_norm(*self.residual)

    @cached_property
    def least(self) -> float:
        """An upper bound on the norm of the least solution of the linearised equations."""
        return least_solution(self.gram, *self.residual, self.sigma) if self.sigma > 0 else math.inf

    # K

    def bending(self, radius: float) -> Bending:
        """K on a ball."""
        if radius not in self._bendings:
            self._bendings[radius] = self._bending(radius)
        return self._bendings[radius]

    def _bending(self, radius: float) -> Bending:
        if self.layered is not None:
            return bending(self.layered, radius)
        if self.is_affine:
            return Bending(0.0)
        whole = _by_calculus(self.analysis, radius)
        if len(self._alone) > _SAMPLES or not self._alone or not math.isfinite(whole.constant):
            return whole
        parts = [_by_calculus(one, radius).constant for one in self._alone]
        return replace(whole, constant=min(whole.constant, up(math.hypot(*parts), len(parts))))


class _InnerProduct(nn.Module):
    """The inner product of the outputs with a vector."""

    costate: Tensor

    def __init__(self, costate: Tensor) -> None:
        super().__init__()
        self.register_buffer("costate", costate)

    def forward(self, outputs: Tensor) -> Tensor:
        """One number."""
        return (outputs * self.costate).sum()


def _by_calculus(analysis: Analysis, radius: float) -> Bending:
    result = analysis.over(Ball(radius))
    summands = terms(result, weighted_curvature(result))
    constant = float(smoothness(assemble(summands, len(result.region.variables))))
    return Bending(constant, () if math.isfinite(constant) else tuple(reasons(summands)))


def _is_affine(graph: Graph) -> bool:
    """Whether the network is written as affine in its parameters, and they are few."""
    trained = [leaf.name for leaf in graph.parameters if leaf.trainable]
    degrees = {name: Degree(0, 1) for name in trained}
    for node in graph.nodes:
        degrees[node.name] = degree_of(node, degrees)
    few = 0 < sum(graph.numel(name) for name in trained) <= _AFFINE
    return few and degrees.get(graph.outputs[0], Degree()).parameters in (0, 1)


def _same(batch: Graph, one: Graph) -> bool:
    """Whether two graphs are the same, except that the first has several samples and the second has one.

    Only the shapes that layout operations get as arguments may differ, by the number of samples: where they slice
    depends on the batch, a sample alone is another function.
    """
    samples = batch.inputs[0].spec.shape[0]
    return (
        batch.held.keys() == one.held.keys()
        and len(batch.nodes) == len(one.nodes)
        and [leaf.path for leaf in batch.parameters] == [leaf.path for leaf in one.parameters]
        and all(torch.equal(value, one.held[name]) for name, value in batch.held.items())
        and all(_alike(first, second, samples) for first, second in zip(batch.nodes, one.nodes, strict=True))
    )


def _alike(first: Node, second: Node, samples: int) -> bool:
    """Whether two operations are the same up to the number of samples in the sizes of their results."""
    if (first.op, first.name, len(first.specs)) != (second.op, second.name, len(second.specs)):
        return False
    for several, one in zip(first.specs, second.specs, strict=True):
        if several.shape != one.shape and (several.shape[:1], one.shape) != ((samples,), (1, *several.shape[1:])):
            return False
    moves, others = record_of(first).form_of(first) is Form.LAYOUT, second.arguments
    return first.arguments.keys() == others.keys() and all(
        _equal(value, others[name], samples if moves and name in _SIZES else None)
        for name, value in first.arguments.items()
    )


def _equal(a: Any, b: Any, samples: int | None) -> bool:
    """Whether two arguments are equal; in sizes, a number of samples and one are."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_equal(s, t, samples) for s, t in zip(a, b, strict=True))
    if isinstance(a, Ref) or isinstance(b, Ref):
        return bool(a == b)
    return type(a) is type(b) and bool(a == b or (a, b) == (samples, 1))

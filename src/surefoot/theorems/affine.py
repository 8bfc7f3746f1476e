r"""Networks that are affine in the trained parameters, for example because only the last layer is trained.

Then :math:`\psi(u) = \psi(0) + Ju` with one matrix J, whose columns are :math:`\psi(e_j) - \psi(0)`. These are
values of the network, whose errors are bounded entry by entry (:mod:`surefoot.calculus.folding`), whereas the
errors of derivatives are bounded in norm. The square loss is a convex quadratic function of u.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.calculus.analysis import Analysis
from surefoot.calculus.folding import fold
from surefoot.norms import frobenius_norm
from surefoot.operations.forms import Degree, degree_of
from surefoot.scalar import Rounded
from surefoot.theorems.linear import Rows

_MOST = 1000  # parameters; each needs one evaluation


class Affine:
    """An affine network at its weights.

    Attributes:
        rows: J.
        outputs: the outputs at the weights, in one column.
        by_sample: the same as samples × outputs.
    """

    def __init__(self, analysis: Analysis) -> None:
        graph, values = analysis.reading.graph, dict(analysis.values)
        paths = {leaf.name: leaf.path for leaf in graph.parameters if leaf.trainable}
        constants = fold(graph, {name: value for name, value in values.items() if name not in paths})

        def outputs(weights: dict[str, Tensor]) -> Rounded:
            folded = fold(graph, weights, constants)[graph.outputs[0]]
            radius = folded.entry_radius()
            assert radius is not None
            return Rounded(folded.value, radius).rearranged(lambda t: t.reshape(-1, 1))

        zeros = {name: torch.zeros_like(values[name], dtype=torch.float64) for name in paths}
        origin = outputs(zeros)
        slopes, errors = {}, {}
        for name, path in paths.items():
            units = torch.eye(zeros[name].numel(), dtype=torch.float64, device=zeros[name].device)
            columns = [outputs({**zeros, name: unit.reshape(zeros[name].shape)}) - origin for unit in units]
            slopes[path] = torch.cat([column.value for column in columns], 1)
            wrong = torch.cat([column.error for column in columns], 1)
            errors[path] = torch.tensor([frobenius_norm(row) for row in wrong], dtype=torch.float64)
        self.rows, self.outputs = Rows(slopes, errors), outputs({name: values[name].double() for name in paths})
        samples = len(analysis.centre[graph.outputs[0]])
        self.by_sample = self.outputs.rearranged(lambda t: t.reshape(samples, -1))
        self._shapes = {path: values[name].shape for name, path in paths.items()}

    @staticmethod
    def of(analysis: Analysis) -> Affine | None:
        """The affine network; ``None`` if it is not written as affine in its parameters, or they are too many."""
        graph = analysis.reading.graph
        trained = [leaf.name for leaf in graph.parameters if leaf.trainable]
        degrees = {name: Degree(0, 1) for name in trained}
        for node in graph.nodes:
            degrees[node.name] = degree_of(node, degrees)
        affine = degrees.get(graph.outputs[0], Degree()).parameters in (0, 1)
        few = sum(graph.numel(name) for name in trained) <= _MOST
        return Affine(analysis) if affine and few and trained else None

    def gradient(self, weight: float, targets: Tensor) -> list[tuple[str, Tensor, float]]:
        r"""The gradient of :math:`\frac{\mu_h}2\|\psi - y\|^2` by path, with bounds on the norms of its errors.

        If the residual r is known up to :math:`e` and J up to :math:`E` in the Frobenius norm, :math:`J^\top r` is
        off by at most :math:`\|J\|_Fe + E(\|r\| + e)`, plus :math:`\gamma_n\|J\|_F\|r\|` for computing it;
        :math:`\mu_h` is rounded a few times.
        """
        residual = self.outputs - targets.detach().double().reshape(-1, 1)
        length, wrong = frobenius_norm(residual.value), frobenius_norm(residual.error.expand_as(residual.value))
        gradient = []
        for path, rows in self.rows.slopes.items():
            slope = weight * (rows.mT @ residual.value).reshape(self._shapes[path])
            size, apart = frobenius_norm(rows), frobenius_norm(self.rows.errors[path])
            rounding = (len(rows) + 16) * 2.0**-52 * size * length
            error = weight * (size * wrong + apart * (length + wrong) + rounding) * (1 + 1e-9) + 1e-290
            gradient.append((path, slope, error))
        return gradient

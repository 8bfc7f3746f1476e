r"""A network linearised at its weights: the Gram matrix of the Jacobian and the residual, with proved errors.

*Layered networks*: see :mod:`surefoot.theorems.layered`. *Others*: the row of one output is the gradient of
:math:`\langle c, \psi\rangle` with c the unit vector, by the adjoint pass, whose error is proved
(:func:`~surefoot.calculus.adjoint.gradient.proved_gradient`): :math:`\|J_i - \hat J_i\| \le \varepsilon_i`. So

.. math:: |\langle J_i, J_j\rangle - \mathrm{fl}\langle\hat J_i, \hat J_j\rangle| \le \varepsilon_i\|\hat J_j\| +
    \|\hat J_i\|\varepsilon_j + \varepsilon_i\varepsilon_j + \gamma_p\|\hat J_i\|\|\hat J_j\| .
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from surefoot.calculus.adjoint.gradient import proved_gradient
from surefoot.calculus.analysis import Analysis
from surefoot.domains import Ball
from surefoot.graph.nodes import Spec
from surefoot.norms import frobenius_norm
from surefoot.norms.hermitian import product_error, up
from surefoot.norms.verified import down, largest_eigenvalue, least_solution, smallest_eigenvalue, vector_norm
from surefoot.scalar import Rounded
from surefoot.theorems.layered import Layered


@dataclass(frozen=True, eq=False)
class Linearised:
    """What the theorems need to know at the weights.

    Attributes:
        gram: :math:`JJ^\\top`.
        residual: :math:`\\psi(u_0) - y`, flat, as computed.
        error: a bound on the norm of its error.
        parameters: how many there are.
    """

    gram: Rounded
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

    @cached_property
    def length(self) -> float:
        """An upper bound of the norm of the residual."""
        return vector_norm(self.residual, self.error)

    @cached_property
    def least(self) -> float:
        """An upper bound of the norm of the least solution of the linearised equations."""
        return least_solution(self.gram, self.residual, self.error, self.sigma) if self.sigma > 0 else math.inf


def linearise(analysis: Analysis, layered: Layered | None, targets: Tensor) -> Linearised:
    """The network at its weights, compared with targets of the shape of its outputs."""
    graph = analysis.reading.graph
    parameters = sum(graph.numel(leaf.name) for leaf in graph.parameters if leaf.trainable)
    wanted = targets.detach().double().reshape(-1)
    if layered is not None:
        outputs = layered.outputs.expand(layered.outputs.value.shape)
        flat = Rounded(outputs.value.reshape(-1), outputs.error.reshape(-1)) - wanted
        return Linearised(layered.gram, flat.value, frobenius_norm(flat.error), parameters)
    result = analysis.over(Ball(0.0))
    wrong = result.enclosures[result.outputs[0]].error
    value = analysis.centre[graph.outputs[0]].reshape(-1)
    residual = value - wanted
    error = up(float(wrong) + 2.0**-52 * frobenius_norm(residual))
    rows, errors = _rows(analysis, len(value))
    return Linearised(_gram(rows, errors), residual, error, parameters)


class _Along(nn.Module):
    """The inner product of the outputs with a vector."""

    costate: Tensor

    def __init__(self, costate: Tensor) -> None:
        super().__init__()
        self.register_buffer("costate", costate)

    def forward(self, outputs: Tensor) -> Tensor:
        """One number."""
        return (outputs * self.costate).sum()


def _rows(analysis: Analysis, count: int) -> tuple[Tensor, Tensor]:
    """The rows of the Jacobian, and bounds on the norms of their errors."""
    spec = analysis.reading.graph.spec(analysis.reading.graph.outputs[0])
    assert isinstance(spec, Spec)
    shape = spec.shape
    like = next(iter(analysis.values.values()))
    costate = torch.zeros(shape, dtype=torch.float64, device=like.device)
    along = Analysis.of(analysis.model, analysis.x, _Along(costate))
    names = [name for name in along.values if name not in analysis.values and along.values[name].shape == shape]
    if len(names) != 1:
        raise RuntimeError("the graph of a linear function of the outputs is not what was expected")
    rows, errors = [], []
    for k in range(count):
        unit = torch.zeros(count, dtype=torch.float64)
        unit[k] = 1.0
        found = proved_gradient(replace(along, values={**along.values, names[0]: unit.reshape(shape)}))
        own = [leaf.path for leaf in along.reading.graph.parameters if leaf.path in found.slopes]
        rows.append(torch.cat([found.slopes[path].reshape(-1) for path in own]))
        errors.append(up(math.hypot(*(found.errors[path] for path in own))))
    return torch.stack(rows), torch.tensor(errors, dtype=torch.float64)


def _gram(rows: Tensor, errors: Tensor) -> Rounded:
    sizes = torch.linalg.vector_norm(rows, dim=1) * (1 + 1e-9)
    cross = errors[:, None] * sizes[None, :]
    apart = cross + cross.mT + errors[:, None] * errors[None, :]
    apart = apart + product_error(rows.shape[1]) * sizes[:, None] * sizes[None, :]
    return Rounded(rows @ rows.mT, apart * (1 + 1e-9))

r"""The second derivative at the centre, bounded sample by sample.

With :math:`M_n^{ss'}` the second derivatives of F in the injections of two linear layers
(:mod:`surefoot.calculus.adjoint.samples`) and :math:`K_n = \partial x_{t,n}/\partial e_{s,n}`,

.. math:: D^2F[v, v'] = \sum_{ss'}\sum_n (\dot W_sx_{s,n})^\top M_n^{ss'} (\dot W'_{s'}x_{s',n})
    + \sum_{t,s}\sum_n \lambda_{t,n}^\top \big(\dot W_t K_n \dot W'_s + \dot W'_t K_n \dot W_s\big) x_{s,n},

a bias counting as a weight on the input 1. The inputs of a layer often share one direction. With a unit vector q,
:math:`\dot Wx_n = c_n\,\dot Wq + \dot W_\perp r_n`, :math:`c_n = \langle q, x_n\rangle`, :math:`r_n = x_n -
c_nq`, and :math:`\|\dot Wq\|^2 + \|\dot W_\perp\|_F^2 = \|\dot W\|_F^2`, so the first sum is at most the norm
of the 2 × 2 matrix of

* :math:`\|\sum_nc_nc'_nM_n\|_2`, where samples cancel as they do in the second derivative itself;
* :math:`\|(\sqrt{\mu_n}c_n)_n\|\,\|\mathrm{diag}(\sqrt{\mu_n})R'\|_2` and the like, with
  :math:`\mu_n \ge \|M_n\|_2`, by Cauchy-Schwarz over the samples, as
  :math:`\sum_n\mu_n\|\dot W_\perp r_n\|^2 \le \|\dot W_\perp\|_F^2\|\mathrm{diag}(\sqrt{\mu_n})R\|_2^2`.

The second is at most the norm of :math:`(\|\sum_nc_n\lambda_{t,n} \otimes K_n\|,\ \|\Lambda_t\|_2
\|\mathrm{diag}(\|K_n\|)R\|_2)`. What rounding adds is in :mod:`surefoot.calculus.adjoint.cotangents`.

Where the variables hold few numbers, both sums are added up to the matrix that they are (:class:`Assembled`). Its
norm counts what cancels between samples, layers and parallel branches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from surefoot.calculus.adjoint.samples import Hessian, Samples, Source
from surefoot.enclosure import row_norms
from surefoot.magnitude import Magnitude
from surefoot.norms import frobenius_norm, spectral_norm
from surefoot.norms.hermitian import gamma, singles_are_exact, times_power

_SINGLE = 0.005  # the part of norms of samples that may be given away for products in single precision
_ENTRIES = 4.0e6  # numbers held at a time for a product
_SLACK = 1 + 1e-9  # for norms of two numbers, and the norm of a direction


@dataclass(frozen=True)
class Feature:
    """What a variable is multiplied by in each sample: a part along one direction, and the rest."""

    variable: int  # its position
    leading: Tensor  # :math:`c_n`
    rest: Tensor | None  # the matrix R of the :math:`r_n`; ``None`` if there is none
    exponent: int = 0  # both are stored divided by 2 to this power, so that their products do not underflow

    def rest_norm(self, sizes: Tensor) -> float:
        """The norm of diag(sizes) R."""
        return 0.0 if self.rest is None else spectral_norm(sizes[:, None] * self.rest)

    def leading_norm(self, sizes: Tensor) -> float:
        """The norm of diag(sizes) c."""
        return frobenius_norm(sizes * self.leading)


def features(source: Source) -> list[Feature]:
    """The variables of a linear layer with what they are multiplied by."""
    found = []
    inputs = source.inputs
    if source.weight is not None:
        largest = float(inputs.abs().max()) if inputs.numel() else 0.0
        exponent = math.frexp(largest)[1] if 0 < largest < math.inf else 0
        scaled = times_power(inputs, -exponent)
        direction = _leading(scaled)
        leading = scaled @ direction
        found.append(Feature(source.weight, leading, scaled - leading[:, None] * direction, exponent))
    if source.bias is not None:
        found.append(Feature(source.bias, inputs.new_ones(len(inputs)), None))
    return found


def _leading(inputs: Tensor) -> Tensor:
    """Close to the direction in which the inputs are largest, of norm one; any direction makes a valid bound."""
    gram = inputs.mT @ inputs
    vector = gram.sum(dim=1)
    for _ in range(8):
        vector = gram @ (vector / vector.norm().clamp(min=1e-300))
    size = vector.norm()
    if not bool(size > 0):
        vector = torch.zeros_like(vector)
        vector[:1] = 1.0
        return vector
    return vector / size


@dataclass(frozen=True)
class Centre:
    """Bounds at the centre, as computed."""

    count: int  # the number of samples
    matrix: Magnitude  # of the second derivative between variables
    jacobians: dict[str, Magnitude]  # norms of the derivatives of some tensors in the injections, samples × layers
    curvature: Magnitude  # norms of the second derivatives in the injections, samples × layers × layers
    error: float  # the relative round-off, as a part of what products of norms give
    norm: Magnitude  # of the second derivative; infinite if it was not added up, or is kept
    hessian: Hessian | None = None  # the second derivative, if it is kept


class Assembled:
    r"""The second derivative at the centre, as a matrix of all numbers of the variables.

    *Round-off.* An entry adds up at most q blocks of products of three numbers over N samples, so it is off by at
    most :math:`\gamma_{N+q+2}` of the sum of their absolute values. The Frobenius norm of a matrix of such sums is
    at most the sum over blocks and samples of products of the Frobenius norms of the factors, e.g. of
    :math:`\|x_{s,n}\|\|M_n\|_F\|x_{s',n}\|`. Entries are moderate, so that what underflows is less than is added.

    Args:
        found: the function sample by sample.
        lengths: how many numbers each variable holds.
    """

    def __init__(self, found: Samples, lengths: Sequence[int]) -> None:
        starts, inputs = np.cumsum([0, *lengths]), found.sources[0].inputs
        self.matrix = torch.zeros(int(starts[-1]), int(starts[-1]), dtype=torch.float64, device=inputs.device)
        self.places, self.features = [], []  # of every layer: of its weight and bias, what these are multiplied by
        for source in found.sources:
            held = []
            if source.weight is not None:
                held.append((source.weight, source.inputs.double()))
            if source.bias is not None:
                held.append((source.bias, self.matrix.new_ones(len(inputs), 1)))
            shapes = [(starts[k], (source.width, part.shape[1])) for k, part in held]
            places = [start + torch.arange(math.prod(shape)).reshape(shape) for start, shape in shapes]
            self.places.append(torch.cat(places, 1).to(inputs.device))
            self.features.append(torch.cat([part for _, part in held], 1))
        self.blocks, self.amount = 0, Magnitude.zero()

    def add_curvature(self, first: int, second: int, forms: Tensor) -> None:
        """The first sum between two layers."""
        factors = forms[:, :, None, :], self.features[first][:, None, :, None]
        self._add(self.places[first], second, factors, first != second)

    def add_jacobian(self, reader: int, other: int, costates: Tensor, jacobian: Tensor) -> None:
        """The second sum between the weight of a layer and a layer before."""
        factors = costates[:, :, None, None], jacobian[:, None]
        self._add(self.places[reader][:, : jacobian.shape[1]], other, factors, True)

    def _add(self, places: Tensor, other: int, factors: tuple[Tensor, Tensor], twice: bool) -> None:
        """The sum over the samples of the product of two factors and of what another layer is multiplied by."""
        right, columns, rows = self.features[other], self.places[other].flatten(), places.flatten()
        once = max(1, int(_ENTRIES / (len(rows) * len(self.places[other]))))
        for a, b, c in zip(*(part.split(once) for part in (*factors, right)), strict=True):
            block = ((a * b).flatten(1).mT @ c).reshape(len(rows), -1)
            self.matrix[rows[:, None], columns] += block
            if twice:
                self.matrix[columns[:, None], rows] += block.mT
            self.blocks += 2
        sizes = row_norms(factors[0]) * row_norms(factors[1]) * row_norms(right)
        self.amount = self.amount + sizes.sum() * 2.0

    @property
    def hessian(self) -> Hessian:
        """The matrix with a bound on its error."""
        rounding = gamma(len(self.features[0]) + self.blocks + 2)
        return Hessian(self.matrix, self.amount * rounding + 2.0**-700)


def at_the_centre(
    found: Samples, variables: int, error: float, lengths: Sequence[int] = (), keep: bool = False
) -> Centre:
    """The second derivative of the output, and the first derivatives of what linear layers and the loss read.

    With the ``lengths`` of the variables the former is added up to one matrix, too; with ``keep`` that is kept,
    instead of its norm.
    """
    whole = Assembled(found, lengths) if lengths else None
    amounts: dict[tuple[int, int], list[float]] = {}  # logarithms, to base two
    held = [features(source) for source in found.sources]
    count, layers = len(found.injected[0]), len(held)
    second_order = np.zeros((count, layers, layers))
    layers_of = {name: [k for k, s in enumerate(found.sources) if s.reads == name] for name in found.read}
    exact = [*found.read, *(source.name for source in found.sources if source.reads is not None)]
    jacobians = {name: np.zeros((count, layers)) for name in exact}
    for k, source in enumerate(found.sources):
        if source.reads is not None:
            jacobians[source.name][:, k] = 1.0

    def add(first: Feature, second: Feature, amount: float, exponent: int, twice: bool) -> None:
        size = float(Magnitude.of(amount).log2) + exponent
        pair = first.variable, second.variable
        for place in (pair, pair[::-1]) if twice else (pair,):
            amounts.setdefault(place, []).append(size)

    for last in range(layers):
        for other, curvature in enumerate(found.curvatures(last)):
            norms = sample_norms(curvature)
            second_order[:, last, other] = second_order[:, other, last] = norms.cpu().numpy()
            if whole is not None:
                whole.add_curvature(last, other, curvature)
            for first, second, amount in _bilinear(held[last], held[other], curvature, norms.sqrt()):
                add(first, second, amount, first.exponent + second.exponent, last != other)
    for name in found.read:
        readers = [k for k in layers_of[name] if found.sources[k].weight is not None]
        for other, jacobian in enumerate(found.jacobians(name)):
            if not bool(jacobian.any()):
                continue
            norms = sample_norms(jacobian)
            jacobians[name][:, other] = norms.cpu().numpy()
            for k in layers_of[name]:
                through = sample_norms(found.sources[k].matrix @ jacobian)
                jacobians[found.sources[k].name][:, other] = through.cpu().numpy()
            if whole is not None:
                for k in readers:
                    whole.add_jacobian(k, other, found.slopes[k].detach(), jacobian)
            for second in held[other]:
                rest = second.rest_norm(norms)
                for k in readers:
                    costates = found.slopes[k].detach()
                    joint = (costates * second.leading[:, None]).mT @ jacobian.flatten(1)
                    lead = spectral_norm(joint.reshape(-1, jacobian.shape[2]))
                    size = math.hypot(lead, spectral_norm(costates) * rest)
                    add(held[k][0], second, size, second.exponent, True)
    total, infinite = np.full((variables, variables), -math.inf), Magnitude.infinity()
    hessian = None if whole is None else whole.hessian
    for place, sizes in amounts.items():
        total[place] = Magnitude(np.array(sizes)).sum().log2
    return Centre(
        count,
        Magnitude(total) * _SLACK,
        {name: Magnitude.of(norms) for name, norms in jacobians.items()},
        Magnitude.of(second_order),
        error,
        infinite if hessian is None or keep else Magnitude.of(spectral_norm(hessian.matrix)) + hessian.error,
        hessian if keep else None,
    )


def _bilinear(
    firsts: list[Feature], seconds: list[Feature], forms: Tensor, roots: Tensor
) -> Iterator[tuple[Feature, Feature, float]]:
    """The norm of the first sum between the variables of two layers."""
    rests = {id(feature): feature.rest_norm(roots) for feature in (*firsts, *seconds)}
    leads = {id(feature): feature.leading_norm(roots) for feature in (*firsts, *seconds)}
    for first in firsts:
        for second in seconds:
            joint = ((first.leading * second.leading) @ forms.flatten(1)).reshape(forms.shape[1:])
            (a, b), (c, d) = ((rests[id(feature)], leads[id(feature)]) for feature in (first, second))
            matrix = np.array([[spectral_norm(joint), b * c], [a * d, a * c]])
            yield first, second, float(np.linalg.norm(matrix, 2))


def sample_norms(matrices: Tensor, squarings: int = 2) -> Tensor:
    r"""Upper bounds of :math:`\|A_n\|_2` for a batch of matrices: :math:`\|A\|_2^{4\cdot2^q} \le \|(A^\top
    A)^{2^q}\|_F^2`.

    For square matrices of 64 rows and random entries they are too large by 69, 17 and 3 % with q = 0, 1, 2
    squarings. With d the smaller and m the larger side, a computed product errs by at most a relative :math:`e =
    d(m + 8)u` of the square of the spectral norm, as :math:`\|A\|_F \le \sqrt d\,\|A\|_2`, rounding of the entries
    of A included. For :math:`P_0 = \mathrm{fl}(A^\top A)` and :math:`P_{i+1} = \mathrm{fl}(P_i^\top P_i)` this
    gives :math:`\|A\|^2(1-e) \le \|P_0\|` and :math:`\|P_i\|^2(1-e) \le \|P_{i+1}\|`, so :math:`\|A\| \le
    \|P_q\|_F^{1/2^{q+1}}/(1-e)`. The largest entry of A is one, so that what underflows disappears in e. Products
    are in single precision where e is then below half a percent and
    :func:`~surefoot.norms.hermitian.singles_are_exact`.
    """
    smaller = matrices if matrices.shape[1] >= matrices.shape[2] else matrices.mT
    rows, columns = smaller.shape[1:]
    scale = smaller.abs().amax(dim=(1, 2), keepdim=True)
    power = smaller / torch.where(scale > 0, scale, 1.0)
    single = columns * (rows + 8) * 2.0**-24 <= _SINGLE and singles_are_exact(matrices.device)
    power = power.to(torch.float32) if single else power
    for _ in range(squarings + 1):
        power = power.mT @ power
    norms = torch.linalg.matrix_norm(power.double()) ** (0.5 / 2**squarings)
    off = 2.0 * columns * (rows + 8) * (2.0**-24 if single else 2.0**-53)
    return norms * scale[:, 0, 0] * ((1 + 1e-12) / (1 - off))

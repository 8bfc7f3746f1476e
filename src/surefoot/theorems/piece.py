r"""One batch of the data: the network and the objective on it, and the numbers that theorems need of it.

Let :math:`F = \sum_bw_bF_b` with shares :math:`w_b` of batches, :math:`F_b = h_b\circ\psi_b`, and :math:`\psi` the
outputs of all batches, one below the other. So :math:`h = \sum_bw_bh_b`, each term about other outputs:
:math:`\nabla h` is the stack of :math:`w_b\nabla h_b`, :math:`\nabla^2h` is block-diagonal, of norm
:math:`\max_bw_b\|\nabla^2h_b\|`, and so is its change. These are exactly the derivatives of the loss of all
samples. Sums over batches are :math:`\nabla^2F`, :math:`J^\top\nabla^2hJ`, :math:`\langle\nabla h,
D^2\psi\rangle`, and bounds of these and of how far they move.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor

from surefoot.calculus.adjoint.bounds import scalar_bounds
from surefoot.calculus.analysis import Analysis
from surefoot.domains import Ball
from surefoot.magnitude import Magnitude
from surefoot.norms import frobenius_norm
from surefoot.objectives import Objective
from surefoot.scalar import Rounded
from surefoot.theorems.affine import Affine
from surefoot.theorems.bending import Bending, bending
from surefoot.theorems.hessian import LossDerivatives, Written, loss_derivatives, unit_bends
from surefoot.theorems.layered import Layered, read_layers
from surefoot.theorems.linear import Along, Jacobian, jacobian_rows, normal_matrix
from surefoot.theorems.samples import Single, first_alone, outputs_of_samples, single_samples
from surefoot.value.loader import weight_of


@dataclass(frozen=True)
class Told:
    """The numbers of a batch that are computed once and kept."""

    outputs: Tensor  # samples × outputs, as computed
    error: float  # a bound on the norm of the error of the outputs
    shape: tuple[int, ...]  # the shape of the outputs of a sample
    targets: Tensor  # the targets of the batch
    weight: Fraction  # the divisor of the mean over the batch


class Piece:
    """The network on a batch.

    Args:
        network: the network on the batch.
        objective: the loss, bound to the targets of the batch if one of them has a weight.
        targets: the targets; ``None`` where only outputs are needed.
        along: inner products of outputs with vectors.
        thorough: whether outputs of single samples are bounded one by one.
    """

    share = 1.0  # :math:`w_b`, up to a relative 2u
    is_all = False  # whether there is no other batch

    def __init__(
        self, network: Analysis, objective: Objective, targets: Tensor | None, along: Along, thorough: bool
    ) -> None:
        self.network, self.objective, self._targets = network, objective, targets
        self._along, self._thorough = along, thorough
        self.layered: Layered | None = read_layers(network)
        leaves = [leaf for leaves in network.variables().values() for leaf in leaves]
        self.order = {leaf.path: math.prod(leaf.spec.shape) for leaf in leaves}

    @cached_property
    def whole(self) -> Analysis:
        """The objective."""
        return Analysis.of(self.network.model, self.network.x, self.objective)

    @cached_property
    def affine(self) -> Affine | None:
        """The network, if it is affine in the trained parameters, is not layered, and has no other batch, as this
        takes many passes.
        """
        return Affine.of(self.network) if self.is_all and self.layered is None else None

    @cached_property
    def jacobian(self) -> Jacobian:
        """The Jacobian at the weights: layer by layer, written out, or by panels."""
        if self.layered is not None:
            return self.layered
        if self.affine is not None:
            return self.affine.rows
        return jacobian_rows(self.network, outputs_of_samples(self.network))

    @cached_property
    def outputs(self) -> Rounded:
        """The outputs at the weights, samples × outputs."""
        if self.layered is not None:
            return self.layered.outputs.expand(self.layered.outputs.value.shape)
        if self.affine is not None:
            return self.affine.by_sample.expand(self.affine.by_sample.value.shape)
        value = self._values.reshape(*self._values.shape[:1] or (1,), -1)
        return Rounded(value, torch.full_like(value, self._off))

    @property
    def _values(self) -> Tensor:
        outputs: Tensor = self.network.centre[self.network.reading.graph.outputs[0]]
        return outputs

    @cached_property
    def _off(self) -> float:
        """A bound on the norm of the error of the outputs."""
        if self.layered is not None or self.affine is not None:
            return frobenius_norm(self.outputs.error)
        result = self.network.over(Ball(0.0))
        return float(result.enclosures[result.outputs[0]].error)

    def told(self, is_mean: bool) -> Told:
        """The numbers that are kept; refuses targets that do not fit."""
        assert self._targets is not None
        weight, graph = Fraction(0), self.network.reading.graph
        if self.objective.targets is not None:
            whole, options = self.whole.reading.graph, self.objective.options
            weight = weight_of(whole, options, self._targets) if is_mean else Fraction(1)
        shape = graph.specs(graph.outputs[0])[0].shape[1:]
        return Told(self.outputs.value, self._off, shape, self._targets, weight)

    def count(self) -> int | None:
        """The number of samples; ``None`` if they interact, are not the rows of one tensor, or if a sample by
        itself is treated differently.
        """
        x = self.network.x
        if isinstance(x, Tensor) and x.shape[:1] == self._values.shape[:1] == (1,):
            return 1
        return None if first_alone(self.network) is None else len(self._values)

    @cached_property
    def _samples(self) -> tuple[Single, ...]:
        return single_samples(self.network, self._thorough)

    def bending(self, radius: float, weights: Mapping[str, float] | None) -> Bending:
        """K on a ball, of a network that is not layered."""
        return bending(self.network, radius, self._samples, weights)

    # The loss of all data, of which this batch has a share

    def outer(self) -> LossDerivatives | None:
        """The derivatives of the loss in the outputs of the batch; ``None`` if they are not known."""
        loss = loss_derivatives(self.objective, self.outputs)
        return None if loss is None else loss.scaled(self.share)

    def slopes(self) -> tuple[float, float, float, float] | None:
        """The norm of the gradient as computed and of its error, and bounds on the norm of the second derivative
        and of its change; ``None`` if they are not known.
        """
        loss = self.outer()
        if loss is None:
            return None
        gradient = loss.gradient.expand(loss.gradient.value.shape)
        return frobenius_norm(gradient.value), frobenius_norm(gradient.error), loss.smoothness, loss.variation

    def bent(self, radius: float) -> list[Magnitude] | None:
        r"""Bounds on :math:`\langle\nabla h, D^2\psi\rangle` with the gradient as computed, by pairs of variables,
        on a ball and of how far it moves there; ``None`` if they are not known.
        """
        loss = self.outer()
        assert loss is not None
        scalar = self._along(self.network, loss.gradient.value.detach().reshape(self._values.shape))
        here = scalar_bounds(scalar.over(Ball(radius)))
        if here is None:
            return None
        return [here.matrix, here.matrix + Magnitude.infinity() if here.variation is None else here.variation]

    def units(self) -> tuple[Tensor, float] | None:
        """See :func:`~surefoot.theorems.hessian.unit_bends`."""
        loss = self.outer()
        return None if loss is None or self.layered is None else unit_bends(self.layered, loss.gradient)

    def normal(self, weighted: bool) -> tuple[Tensor, float]:
        r""":math:`J^\top\nabla^2hJ`, or :math:`J^\top J`."""
        value = self.outputs.value
        unit = torch.eye(value.shape[1], dtype=torch.float64, device=value.device).expand(len(value), -1, -1)
        loss = self.outer() if weighted else None
        outer, most = (Rounded.exact(unit), 1.0) if loss is None else (loss.hessian, loss.smoothness)
        return normal_matrix(self.jacobian, self.order, outer, most)

    @cached_property
    def _written(self) -> Written | None:
        return Written.of(self.whole)

    def hessian(self) -> tuple[Tensor, float] | None:
        """The share of the Hessian as written, and a bound on its error; ``None`` if it is not known."""
        if self._written is None:
            return None
        value, part = self._written.value, self.share
        off = self.apart([0.0])[0]
        return (value, off) if part == 1 else (value * part, off + 2.0**-51 * part * frobenius_norm(value))

    def apart(self, radii: Sequence[float]) -> list[float]:
        """For each radius the share of the distance between the Hessian on the ball and the written one."""
        assert self._written is not None
        return [self._written.apart(radius) * self.share * (1 + 2.0**-50) for radius in radii]

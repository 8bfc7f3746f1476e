r"""Long chains: errors and costates from state to state by derivatives of many operations together, not by norms.

In recurrent networks, solvers of differential equations and flows errors go through hundreds of operations. The
slopes of these multiply to :math:`10^{34}` where the derivative of all of them together has a norm below one. So
some tensors are chosen as *states* (:func:`joints_of`), narrow enough for the derivatives between them to be
computed, sample by sample, by pulling back a basis.

*Errors.* Let :math:`D_x = x(s) - \hat x` as in :mod:`surefoot.valuation.propagation`, so that :math:`\|D_x\| \le
e_x`. With derivatives at the computed tensors and curvature C between them and :math:`x(s)`,

.. math:: D_x = \sum_iJ_iD_i + q_x - (1 - s)\delta_x , \qquad \|q_x\| \le \tfrac12\sum_{ij}C_{ij}e_ie_j ,

and :math:`\|q_x\| \le 2\sum_iJ_ie_i` wherever slopes are bounded, kinks or not. Insert this for all arguments that
are no states, and so on: :math:`D_x = \sum_jM_{jx}D_j + w_x` over states j, with the derivatives
:math:`M_{jx}` along all ways from j to x without other states, and :math:`\|w_x\| \le \sum_iJ_i\|w_i\| + \|q_x\| +
\epsilon_x`, where states count with zero. In particular, with :math:`A_{jk} = M_{jk}` for states k,

.. math:: D_k = \sum_jA_{jk}D_j + w_k , \qquad D_k = \sum_{m\le k}P_{mk}w_m , \qquad
    e_k \le \sum_{m\le k}\|P_{mk}\|\|w_m\| ,

where P is the inverse of the triangular matrix :math:`I - A`: the derivatives along all ways. All that is needed
for :math:`e_k` is known before k, so nothing has to be small for this to be true.

*Costates.* For :math:`\Delta_x = \lambda_x(s) - \hat\lambda_x`, over the readers z of x,

.. math:: \Delta_x = \sum_z\big(J_z^\top\Delta_z + (J_z(s) - J_z)^\top\lambda_z(s) - \rho_z\big) ,

of which the second is at most :math:`\sum_jC_je_j(\|\hat\lambda_z\| + d_z)`, near kinks :math:`2J(\dots)`. As
before, with :math:`v_x` for all but what comes from states, :math:`\Delta_j = \sum_kA_{jk}^\top\Delta_k + v_j` and
:math:`d_j \le \sum_{k\ge j}\|P_{jk}\|\|v_k\|`.

*Norms of P.* Let :math:`\hat A` be what is computed, :math:`\|\hat A_{jm} - A_{jm}\| \le \eta_{jm}`, and let R be
any matrices with :math:`R_{kk} = I`. Multiply :math:`D_m - \sum_jA_{jm}D_j = w_m` by :math:`R_{mk}` and add up:

.. math:: P_{ik} = R_{ik} + \sum_{i\le j<k}G_{jk}P_{ij} , \qquad G_{jk} = \sum_mR_{mk}A_{jm} - R_{jk} .

With :math:`R_{jk} = \mathrm{fl}(\sum_mR_{mk}\hat A_{jm})`, sums of N products,

.. math:: \|G_{jk}\| \le g_{jk} = \sum_m\|R_{mk}\|_F\,\theta_{jm} , \qquad
    \theta_{jm} = \eta_{jm} + \gamma_{N+2}\|\hat A_{jm}\|_F ,

so that :math:`\|P_{ik}\| \le \|R_{ik}\|_F + \sum_jg_{jk}\|P_{ij}\|`, which is solved in the order of k. Round-off
is multiplied by norms of computed products here, not by products of norms.

*Round-off of* :math:`\hat A`. Its rows are unit vectors pulled back. Through an operation one is off by at most
:math:`\rho = 2^{-30}J\|\lambda\|`, or what the tape says (``pulls``). Along a way of slopes :math:`J_1, J_2, …`
this makes :math:`\prod_iJ_i(\prod_i(1 + \rho_i) - 1)`; the sum over all ways from j is carried along forward. A
state of n numbers in all samples has at most n rows that are off, hence the factor :math:`\sqrt n`.

*Samples.* Where all operations between states keep samples apart (:func:`surefoot.valuation.samples.are_apart`),
all matrices are block-diagonal, their norm is the largest of the blocks, and one pull-back serves all samples.
Elsewhere the whole tensor is one block, if it is small.

The cost: per state as many pull-backs to the states before as it has numbers per sample. In all, one pass and
about as many gradients as the states are wide, batched. So it is done only where errors of second order prevail.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.graph import Graph, Node, Spec
from surefoot.valuation.samples import Amount, are_apart, some

_WIDEST = 128  # numbers per sample of the states at one place
_LOW, _HIGH = 2.0**3, 2.0**8  # how much errors may grow from one place to the next
_UNIT, _SLACK = 2.0**-53, 1 + 1e-9


@dataclass(frozen=True)
class Joints:
    """The states of a tape.

    Attributes:
        names: in the order in which they are computed.
        before: for each, the states from which it is reached without others between.
        samples: how many stay apart on the way; 1 if they may not.
    """

    names: tuple[str, ...]
    before: Mapping[str, tuple[str, ...]]
    samples: int


def joints_of(nodes: tuple[Node, ...], graph: Graph, slopes: Mapping[str, Mapping[str, float]]) -> Joints | None:
    """States to cut long chains at; ``None`` where errors do not grow, or there is no narrow place.

    Args:
        nodes: what varies, in order.
        graph: of all.
        slopes: of each of them in its arguments, by name.
    """
    by_name = {node.name: node for node in nodes}
    places = [(name, by_name[name].specs[0].shape[0]) for name in _places(nodes, slopes)]
    samples = max(Counter(count for _, count in places).items(), key=lambda item: item[1], default=(1, 0))[0]
    names = tuple(name for name, count in places if count == samples)
    if len(names) < 2:
        return None
    before: dict[str, tuple[str, ...]] = {}
    reached: dict[str, tuple[set[str], set[str]]] = {}  # from which states, and through which operations
    for node in nodes:
        states, way = reached[node.name] = set(), set()
        for argument in node.inputs:
            if argument in before:
                states.add(argument)
            elif argument in reached:
                states |= reached[argument][0]
                way |= reached[argument][1]
        if states:
            way.add(node.name)
        if node.name in names:
            before[node.name] = tuple(sorted(states, key=names.index))
    between = {name for state in names for name in reached[state][1]}
    moving = before.keys() | {name for name, (states, _) in reached.items() if states}
    if not are_apart(graph, tuple(node for node in nodes if node.name in between), moving, samples):
        samples = 1
        if max(by_name[name].numel for name in names) > _WIDEST:
            return None
    return Joints(names, before, samples)


def _places(nodes: tuple[Node, ...], slopes: Mapping[str, Mapping[str, float]]) -> tuple[str, ...]:
    """The tensors where ways are cut: before errors of unit size, made anywhere since the last place, have grown
    too much, where what is computed since then and read soon has the fewest numbers.
    """
    readers: dict[str, list[int]] = {}
    for k, node in enumerate(nodes):
        for argument in node.inputs:
            readers.setdefault(argument, []).append(k)
    gain: dict[str, float] = {}
    found: list[str] = []
    best: tuple[float, int, list[str]] | None = None
    last, k = -1, 0
    while k < len(nodes):
        known = ((amount, gain[name]) for name, amount in slopes[nodes[k].name].items() if name in gain)
        gain[nodes[k].name] = min(1 + sum(amount * grown for amount, grown in known), 1e300)
        front = []
        for node in nodes[last + 1 : k + 1]:
            reading = readers.get(node.name, [])
            after = bisect_right(reading, k)
            if after < len(reading) and reading[after] <= k + max(k - last, 1):
                front.append(node)
        top = max((gain[node.name] for node in front), default=0.0)
        if top >= _LOW:
            front = [node for node in front if gain[node.name] >= math.sqrt(top)]
            width = sum(_width(node.specs) for node in front)
            if width <= _WIDEST and (best is None or width <= best[0]):
                best = width, k, [node.name for node in front]
        if top > _HIGH and best is not None:
            _, last, names = best
            found += names
            gain |= dict.fromkeys(names, 1.0)
            best, k = None, last
        k += 1
    return tuple(found)


def _width(specs: tuple[Spec, ...]) -> float:
    """Numbers per row of one real tensor."""
    shape = specs[0].shape
    usual = len(specs) == 1 and specs[0].dtype.is_floating_point and specs[0].numel and shape
    return specs[0].numel / shape[0] if usual else math.inf


class Links:
    """The derivatives between states, computed in a pass."""

    def __init__(self, joints: Joints) -> None:
        self.joints = joints
        self.closed = False  # while derivatives are computed: nothing passes a state
        self._states: dict[str, Tensor] = {}
        self._slopes: dict[tuple[str, str], Tensor] = {}  # samples × numbers × numbers before

    def join(self, name: str, value: Tensor) -> Tensor:
        """The same as a state, after its derivatives in the states before."""
        samples = self.joints.samples
        before, size = self.joints.before[name], value.numel() // samples
        if before:
            basis = torch.eye(size, dtype=value.dtype, device=value.device)
            costates = basis[:, None].expand(size, samples, size).reshape(size, *value.shape)
            self.closed = True
            found = self._pulled(value, [self._states[one] for one in before], costates)
            self.closed = False
            for one, slope in zip(before, found, strict=True):
                if slope is not None:
                    self._slopes[one, name] = slope.reshape(size, samples, -1).transpose(0, 1).contiguous()
        self._states[name] = _State.apply(value, self)
        return self._states[name]

    @staticmethod
    def _pulled(value: Tensor, states: list[Tensor], costates: Tensor) -> list[Tensor | None]:
        """Several costates pulled back, at once where torch can do that; ``None`` where no way leads back."""
        pull = partial(torch.autograd.grad, value, states, retain_graph=True)
        try:
            return list(pull(costates, is_grads_batched=True, allow_unused=True))
        except RuntimeError:
            rows = [pull(costate, allow_unused=True, materialize_grads=True) for costate in costates]
            return [torch.stack(parts) for parts in zip(*rows, strict=True)]

    def heard(self, hook: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """A hook that is not called meanwhile."""
        return lambda costate: None if self.closed else hook(costate)

    @cached_property
    def norms(self) -> tuple[np.ndarray, np.ndarray]:
        """Bounds on the norms of R, from row to column, and :math:`\\gamma_{N+2}` times those of single links."""
        names = self.joints.names
        sizes = [self._states[name].numel() // self.joints.samples for name in names]
        starts, count = np.cumsum([0, *sizes]), len(names)
        composed, rounded = np.zeros((count, count)), np.zeros((count, count))
        after: dict[int, Tensor] = {}
        for j in reversed(range(count)):
            like = self._states[names[j]].detach()
            rows = like.new_zeros(self.joints.samples, int(starts[-1] - starts[j]), sizes[j])
            rows[:, : sizes[j]] = torch.eye(sizes[j], dtype=like.dtype, device=like.device)
            for m in range(j + 1, count):
                slope = self._slopes.pop((names[j], names[m]), None)
                if slope is not None:
                    rows[:, starts[m] - starts[j] :] += after[m] @ slope
                    rounded[j, m] = (2 * starts[-1] + 8) * _UNIT * _largest(slope)
            after[j] = rows
            waiting = {name for pair in self._slopes for name in pair[1:]}
            after = {m: part for m, part in after.items() if m == j or names[m] in waiting}
            for k in range(j, count):
                composed[j, k] = _largest(rows[:, starts[k] - starts[j] : starts[k + 1] - starts[j]])
        np.fill_diagonal(composed, 1.0)
        self._states.clear()
        return composed, rounded


def _largest(blocks: Tensor) -> float:
    """A bound on the largest norm of several matrices; infinite where one is not finite."""
    size = float(torch.linalg.vector_norm(blocks, dim=(1, 2)).amax()) * _SLACK + 2.0**-400
    return size if size < math.inf else math.inf


class _State(torch.autograd.Function):
    """The identity, through which nothing is pulled back while links are closed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, links: Links) -> Tensor:
        ctx.links = links
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, costate: Tensor) -> tuple[Tensor | None, None]:
        return (None if ctx.links.closed else costate), None


@dataclass
class Composed:
    """Errors and costates of one pass, from state to state."""

    links: Links
    _norms: np.ndarray = field(init=False)  # on P
    _doubts: np.ndarray = field(init=False)  # θ
    _index: dict[str, int] = field(init=False)
    _rest: dict[str, Amount] = field(default_factory=dict)  # w, zero for states
    _back: dict[str, Amount] = field(default_factory=dict)  # v
    _reach: dict[str, np.ndarray] = field(default_factory=dict)  # slopes along all ways from states
    _off: dict[str, np.ndarray] = field(default_factory=dict)  # round-off of pulling back along them
    _forward: list[Amount] = field(default_factory=list)  # w of states
    _backward: dict[int, Amount] = field(default_factory=dict)  # v of states

    def __post_init__(self) -> None:
        self._index = {name: k for k, name in enumerate(self.links.joints.names)}
        self._norms, self._doubts = np.zeros((2, len(self._index), len(self._index)))

    def passed(self, node: Node, jacobian: Mapping[str, Amount], added: Amount, pull: float) -> Amount:
        """Carry errors through an operation that adds so much by itself; a bound on the error of a state, infinite
        for others.
        """
        name, rest = node.name, added
        reach, off = np.zeros((2, len(self._index)))
        for argument, amount in jacobian.items():
            before = self._rest.get(argument, 0.0)
            rest = rest + amount * before if some(before) else rest
            if argument in self._reach:
                more = float(np.max(amount)) * self._reach[argument]
                off += (1 + pull) * float(np.max(amount)) * self._off[argument] + pull * more
                reach += more
        k = self._index.get(name)
        if k is None:
            self._rest[name] = rest * _SLACK
            if reach.any():
                self._reach[name], self._off[name] = reach * _SLACK, off * _SLACK
            return math.inf
        composed, rounded = self.links.norms
        self._doubts[:, k] = rounded[:, k] + math.sqrt(node.numel) * off * _SLACK
        lost = self._doubts[:, : k + 1] @ composed[: k + 1, k]  # g
        column = (composed[:, k] + self._norms[:, :k] @ lost[:k]) * _SLACK
        self._norms[:, k] = np.where(np.isnan(column), math.inf, column)
        self._forward.append(rest * _SLACK)
        self._reach[name], self._off[name] = np.eye(len(self._index))[k], np.zeros(len(self._index))
        return self._summed(self._norms[: k + 1, k], dict(enumerate(self._forward)))

    def pulled(self, name: str, jacobian: Mapping[str, Amount], changes: Mapping[str, Amount]) -> None:
        """Carry what costates are off by through an operation, with what it changes by itself, by argument."""
        here = 0.0 if name in self._index else self._back.get(name, 0.0)
        for argument, amount in jacobian.items():
            more = (amount * here if some(here) else 0.0) + changes.get(argument, 0.0)
            self._back[argument] = (self._back.get(argument, 0.0) + more) * _SLACK

    def costate(self, name: str) -> Amount:
        """How far the costate of a state may be off; infinite for others. Those after it are known."""
        k = self._index.get(name)
        if k is None:
            return math.inf
        self._backward[k] = self._back.get(name, 0.0)
        return self._summed(self._norms[k], self._backward)

    def _summed(self, norms: np.ndarray, amounts: Mapping[int, Amount]) -> Amount:
        total: Amount = 0.0
        for k, amount in amounts.items():
            if some(amount):
                total = total + float(norms[k]) * amount
        return total * _SLACK

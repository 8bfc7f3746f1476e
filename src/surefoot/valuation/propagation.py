r"""The error of a value, from the errors of its operations, by reverse mode.

Let :math:`z_k = f_k(x_1, …)` be the operations, :math:`\hat z_k = f_k(\hat x_1, …) + \delta_k` what is computed,
and :math:`\|\delta_k\| \le \epsilon_k`. Write :math:`z(s)` for the tensors where the errors :math:`s\delta_k` are
made instead, so that :math:`z(1) = \hat z`, the output of :math:`z(0)` is the exact value F and that of
:math:`z(1)` the computed one. Its derivative in s is
:math:`\sum_k\langle\lambda_k(s), \delta_k\rangle` with the costates at :math:`z(s)`, hence

.. math:: |\hat F - F| \le \sum_k \epsilon_k \sup_s\|\lambda_k(s)\| .

*How far apart* :math:`z(s)` and :math:`\hat z` are: with Jacobians bounded on the way between them,
:math:`e_k = \sum_i J_ie_i + \epsilon_k`.

*How far the costates are from the computed ones.* Both obey the chain rule, at different points, so

.. math:: \|\lambda_x(s) - \hat\lambda_x\| \le d_x = \sum_z\Big(J d_z
    + \sum_j C_j\,e_j\,\|\hat\lambda_z\| + \rho_z\Big)

over the readers z of x, where :math:`\rho` is the round-off of pulling back. It is of second order in the result,
so a rough bound does: :math:`\rho = 2^{-30}J\|\hat\lambda_z\|` and, for sums of n terms, :math:`8nu` of it if
that is more. A costate is also at most :math:`\sum_zJ\sup\|\lambda_z\|`, which needs no curvature; the smaller of
the two counts. Where the computed costate was not measured, it is at most :math:`\sum_zJ(1 + 2^{-30})` times
those of the readers.

*Masks.* Where -10⁹ is added to scores, :math:`\epsilon_k` is 10⁻⁷, of entries that do not count. For such sums the
entries :math:`\delta_{ki}` are bounded one by one, and
:math:`|\langle\lambda_k(s), \delta_k\rangle| \le \sum_i|\hat\lambda_{ki}||\delta_{ki}| + d_k\epsilon_k`.

*Kinks.* A scalar function is :math:`a(x) - a(y) = q(x - y)` with q between its slopes. Where no entry is nearer
to a break than :math:`e`, q moves as the curvature of the pieces says; where some are, their parts of the costate
count with twice the largest slope. The same argument with q in place of derivatives proves the sums above, as
every operation is then a product of its arguments' differences with such slopes.

*Several operations as one.* What the calculus knows as one function g of x, such as a step of a recurrent network
from its state and its gates, is less steep and less curved than its parts one after another. Let f be what the
parts are off by if x is exact, by the sum for e. Then :math:`e_z \le \sum_iJ_ie_i + f_z` with the slopes of g.
Through the parts, at points within f of those that belong to x, a costate is pulled back to
:math:`g'(x)^\top\lambda_z` up to what the sum for d says with f in place of e and no error of :math:`\lambda_z`.
So costates of x are as far apart as the sum for d says with slopes and curvature of g, if :math:`\rho_z` is that,
once for :math:`\lambda(s)` and once for :math:`\hat\lambda`. Costates of the parts themselves are as far apart as
always. All this is so if only parts read parts; where others do, the error is that of the forward mode.

*Long chains.* Where slopes multiply too much, :math:`e` and d of some tensors come from derivatives of many
operations together instead (:mod:`surefoot.valuation.joints`), if these are smaller.

What no parameter enters is exact, or a leaf with the error e of its own computation, which counts as one more
:math:`\delta`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from surefoot.enclosure import Enclosure, constant
from surefoot.graph.nodes import in_double
from surefoot.magnitude import Magnitude, minimum
from surefoot.operations.call import Call
from surefoot.operations.record import rule_for
from surefoot.valuation.joints import Composed
from surefoot.valuation.passes import NEAR, Run
from surefoot.valuation.rounding import rounding
from surefoot.valuation.samples import Amount, least, paired, some, together
from surefoot.valuation.single import SMALL, UNIT
from surefoot.valuation.slopes import Slope, Slopes, slope_of
from surefoot.valuation.tape import Tape

_SLACK = 1 + 1e-9  # round-off of the sums below
_NONE = Magnitude.zero((0,))


@dataclass(frozen=True)
class Errors:
    """The errors of one run.

    Attributes:
        total: of the output.
        leading: the same without what is of second order, by reverse mode.
        apart: how far each tensor may be from its exact value, by name.
        own: what each operation adds, by name; per sample where these stay apart.
    """

    total: float
    leading: float
    apart: Mapping[str, Amount]
    own: Mapping[str, Amount]


class _Local(NamedTuple):
    """One operation at the point of a run: what is claimed of it, and its slopes there; if it stands for several,
    what these are off by where its arguments are exact.
    """

    slope: Slope
    jacobian: Mapping[str, Amount]
    curvature: Mapping[tuple[str, str], Amount]
    parts: Mapping[str, Amount] = {}

    @property
    def plain(self) -> Mapping[str, Amount]:
        """Its slopes, if it stands for itself alone."""
        return {self.slope.node.inputs[0]: 1.0} if self.slope.parts else self.jacobian


def forward_errors(tape: Tape, run: Run, slopes: Slopes) -> Errors:
    """How far every tensor is off, from one forward pass; the total is that of the output."""
    if not run.samples:
        return _forward(tape, run, slopes)[0]
    with np.errstate(all="ignore"):  # what is not a number is not known
        return _in_all(_forward(tape, run, slopes)[0])


def _in_all(found: Errors) -> Errors:
    """The same for all samples together."""
    norms = {id(amount): together(amount) for amount in found.apart.values()}  # many are the same array
    return replace(found, apart={name: norms[id(amount)] for name, amount in found.apart.items()})


def _forward(tape: Tape, run: Run, slopes: Slopes) -> tuple[Errors, dict[str, _Local], Composed | None]:
    """The same, with the slopes of all operations there, and errors from state to state if links are known."""
    composed = None if run.links is None else Composed(run.links)
    apart: dict[str, Amount] = {}
    own: dict[str, Amount] = {}
    local: dict[str, _Local] = {}
    distances, by_name, sizes, in_all = slopes.distances(run), slopes.by_name, run.each, run.sizes
    real, narrow, exactly, output = tape.real, tape.narrow, run.constants.exact, tape.output
    varying = tape.moving if tape.single else frozenset()
    for node in tape.graph.nodes:
        name = node.name
        slope = by_name.get(name) if name in real else None
        if name in exactly:
            apart[name] = own[name] = 0.0
            continue
        if slope is None:  # no parameter enters, and nothing is known: exact if nothing is computed
            exact = name not in tape.rounding and not any(
                some(apart.get(argument, 0.0)) for argument in node.inputs
            )
            apart[name] = own[name] = 0.0 if exact or name not in real else math.inf
            if composed is not None:
                composed.passed(node, {}, own[name], 0.0)
            continue
        jacobian, curvature = slope.at(distances), slope.curvature
        single = name in narrow
        rounded = name in varying and not single and name != output
        if slope.moves_only and not rounded:
            [argument] = jacobian
            apart[name], own[name] = apart.get(argument, 0.0), 0.0
            local[name] = _Local(slope, jacobian, curvature)
            if composed is not None:
                apart[name] = least(apart[name], _composed(tape, run, composed, local[name], apart, 0.0))
            continue
        if name in run.losses and not slope.pointwise:
            first, loss = node.inputs[0], run.losses[name]
            off = apart.get(first, 0.0)
            jacobian = {first: least(jacobian[first], loss.slope(off))}
            curvature, own[name] = {(first, first): loss.curvature(off)}, loss.error
        elif name in run.facts:
            first = node.inputs[0]
            steepness, bend = run.facts[name].slopes(apart.get(first, 0.0))
            jacobian, curvature = {first: steepness}, {(first, first): bend}
            own[name] = run.facts[name].error
        elif slope.needs_values:
            inputs = slope.node.inputs
            call = Call(
                slope.node,
                {argument: _known(run, argument, together(apart.get(argument, 0.0))) for argument in inputs},
            )
            if slope.pointwise:
                slope = slope_of(slope.node, rule_for(slope.node, tape.graph)(call))
                jacobian, curvature = slope.jacobian, slope.curvature
            value = run.values.get(name)
            value = in_double(value.detach()) if isinstance(value, Tensor) else value
            own[name] = rounding(slope, jacobian, sizes, in_all, single=single, call=call, value=value)
        elif name in tape.matched and slope.product is not None:
            own[name] = rounding(slope, jacobian, sizes, in_all, _together(run, *tape.matched[name]))
            jacobian = _by_matrices(run, slope, jacobian, *tape.matched[name], apart)
        elif slope.parts:
            parts = _of_parts(slope, local, own)
            own[name] = 0.0  # that of the parts
            local[name] = _Local(slope, jacobian, curvature, parts)
        elif name in run.masked:
            own[name] = run.masked[name]
        else:
            own[name] = rounding(slope, jacobian, sizes, in_all, single=single)
        if rounded:
            own[name] = (own[name] + UNIT * sizes[name] + math.sqrt(node.numel) * SMALL) * (1 + 2.0**-20)
        if not slope.parts:
            local[name] = _Local(slope, jacobian, curvature)
        if run.samples and name != output and isinstance(own[name], float) and own[name]:
            own[name] = np.full(run.samples, own[name])  # a bound for each, not for all together
        moved = local[name].parts[node.inputs[0]] if slope.parts else own[name]
        for argument, amount in jacobian.items():
            off = apart.get(argument)  # none for a leaf
            if off is not None and some(off):
                moved = moved + (paired(amount, off) if name == output else amount * off)
        apart[name] = moved * _SLACK
        if slope.parts:
            apart[name] = least(apart[name], apart[node.inputs[0]])
        if composed is not None and name != output:
            apart[name] = least(apart[name], _composed(tape, run, composed, local[name], apart, own[name]))
    return Errors(apart[output], 0.0, apart, own), local, composed


def _composed(
    tape: Tape, run: Run, composed: Composed, known: _Local, apart: Mapping[str, Amount], own: Amount
) -> Amount:
    """The error of a state from those of the states before; infinite for others, which are on the way."""
    node = known.slope.node
    added = own if known.slope.parts else own + _remainder(run, known, apart)
    return composed.passed(node, known.plain, added, tape.pulls.get(node.name, 0.0))


def _remainder(run: Run, known: _Local, apart: Mapping[str, Amount]) -> Amount:
    """How far a result is from what the derivative at the computed arguments says."""
    rough: Amount = 0.0
    for argument, steepness in known.jacobian.items():
        rough = rough + 2 * _times(steepness, apart.get(argument, 0.0))
    if known.slope.breaks and not all(_is_clear(run, known.slope, name, apart) for name in known.jacobian):
        return rough
    bend: Amount = 0.0
    for (first, second), amount in known.curvature.items():
        if some(apart.get(first, 0.0)) and some(apart.get(second, 0.0)):
            bend = bend + (0.5 if first == second else 1.0) * amount * apart[first] * apart[second]
    return least(bend, rough) * _SLACK


def _of_parts(slope: Slope, local: Mapping[str, _Local], own: Mapping[str, Amount]) -> dict[str, Amount]:
    """How far the parts of an operation are off where its arguments are exact, by name."""
    found: dict[str, Amount] = {}
    for part in slope.parts:
        moved = own[part.name]
        for argument, amount in local[part.name].jacobian.items():
            moved = moved + _times(amount, found.get(argument, 0.0))
        found[part.name] = moved * _SLACK
    return found


def _by_matrices(
    run: Run, slope: Slope, jacobian: Mapping[str, Amount], first: str, second: str, apart: Mapping[str, Amount]
) -> Mapping[str, Amount]:
    r"""Where both factors vary and meet matrix by matrix, the slope in one is at most the largest operator norm of
    a matrix of the other: :math:`\|\delta A_kB_k\| \le \|\delta A_k\|\|B_k\|_2`.
    """
    assert slope.product is not None
    if first == second:
        return jacobian
    found = dict(jacobian)
    for name, other in ((first, second), (second, first)):
        size = (run.operators.get(other, 0.0) + apart.get(other, 0.0)) * slope.product[2] * _SLACK
        found[name] = least(found[name], size)
    return found


def _together(run: Run, first: str, second: str) -> Amount:
    r"""Of factors that meet matrix by matrix,
    :math:`\sum_k\|A_k\|^2\|B_k\|^2 \le \max_k\|A_k\|^2\,\|B\|^2`.
    """
    return least(*(run.matrices.get(a, math.inf) * run.each[b] for a, b in ((first, second), (second, first))))


@np.errstate(all="ignore")
def errors(tape: Tape, run: Run, slopes: Slopes) -> Errors:
    """The error of the value by reverse mode; never more than that of the forward mode."""
    first, local, composed = _forward(tape, run, slopes)
    if tape.output not in local or not tape.varying:
        return _in_all(first)
    size, apart = run.costate_sizes, first.apart
    varying = tape.reached
    off: dict[str, Amount] = {tape.output: 0.0}  # between costates and what is computed of them
    bound: dict[str, Amount] = {tape.output: 1.0}  # on costates, from those of the readers
    reach: dict[str, Amount] = {tape.output: 1.0}  # on computed costates
    total = leading = 0.0
    inner = {part.name for known in local.values() for part in known.slope.parts}
    for node in reversed(tape.varying):
        name = node.name
        if name not in bound:
            continue
        if name in run.watching:
            reach[name] = least(size.get(name, 0.0), reach[name])
        if composed is not None:
            off[name] = least(off[name], composed.costate(name))
        here, away = reach[name], off[name]
        costate = least(bound[name], here + away)
        if some(first.own[name]):
            met = run.met.get(name, math.inf)
            total += min(paired(first.own[name], costate), met + paired(first.own[name], away))
            leading += min(paired(first.own[name], least(here, costate)), met)
        known, pull, lost = local[name], tape.pulls[name], tape.lost[name]
        if composed is not None:
            composed.pulled(name, known.plain, _changes(run, known, apart, pull, here, away))
        inside = _pulled_through(tape, run, local, known, here + costate)
        flows = {**known.jacobian, node.inputs[0]: 1.0} if known.parts else known.jacobian
        for argument, steepness in flows.items():
            whole = bool(known.parts) and argument == node.inputs[0]
            if argument in inner and not (name in inner or whole):
                return _in_all(first)  # a part that others read
            if argument not in varying or (name in inner and argument not in inner):
                continue
            change = rough = inside.get(argument, 0.0)
            if not known.parts:
                change = _changed(run, known, argument, apart, pull, here)
                rough = _times(steepness * pull, here)
            elif not whole:
                change = change + _changed(run, known, argument, apart, 0.0, here)
            change = change + _times(steepness, away) + lost
            off[argument] = (off.get(argument, 0.0) + change) * _SLACK
            reach[argument] = (reach.get(argument, 0.0) + _times(steepness, here) + rough + lost) * _SLACK
            more = _times(steepness, costate) + (rough if known.parts else 0.0)
            bound[argument] = (bound.get(argument, 0.0) + more) * _SLACK
    for name in tape.boundary:
        if some(apart[name]) and name in bound:
            costate = least(bound[name], least(size.get(name, 0.0), reach[name]) + off[name])
            total += together(apart[name]) * float(np.sum(costate))  # all samples may read the same numbers
    total = math.nan if math.isnan(first.total) else min(total * _SLACK, first.total)
    return _in_all(Errors(total, leading, apart, first.own))


def _changes(
    run: Run, known: _Local, apart: Mapping[str, Amount], pull: float, here: Amount, away: Amount
) -> dict[str, Amount]:
    """What a costate that is off by so much changes by besides, where it is pulled back to each argument."""
    if known.slope.parts:
        return {}
    found: dict[str, Amount] = {}
    for argument, steepness in known.jacobian.items():
        turned = _bent(known, argument, apart)
        if known.slope.breaks and not _is_clear(run, known.slope, argument, apart):
            turned = 2 * steepness
        found[argument] = _changed(run, known, argument, apart, pull, here) + _times(turned, away)
    return found


def _bent(known: _Local, argument: str, apart: Mapping[str, Amount]) -> Amount:
    """How much the slope in an argument changes at other points."""
    bend: Amount = 0.0
    for pair, amount in known.curvature.items():
        if argument in pair and some(apart.get(pair[pair[0] == argument], 0.0)):
            bend = bend + amount * apart[pair[pair[0] == argument]]
    return bend


def _changed(
    run: Run, known: _Local, argument: str, apart: Mapping[str, Amount], pull: float, whole: Amount
) -> Amount:
    """What a costate changes by where it is pulled back to an argument: at other points, and by round-off."""
    slope, steepness = known.slope, known.jacobian[argument]
    if not some(whole):
        return 0.0
    bend = _bent(known, argument, apart)
    change = _near_kinks(run, slope, argument, apart, steepness, whole) if slope.breaks else 0.0
    return change + (bend + pull * steepness) * whole


def _times(slope: Amount, amount: Amount) -> Amount:
    """The product; nothing where there is nothing, however steep it is."""
    return slope * amount if some(amount) else 0.0


def _pulled_through(
    tape: Tape, run: Run, local: Mapping[str, _Local], known: _Local, whole: Amount
) -> dict[str, Amount]:
    """How far what is pulled back through the parts of an operation is from its derivative, by argument."""
    off: dict[str, Amount] = {}
    reach: dict[str, Amount] = {known.slope.node.inputs[0]: whole} if known.parts else {}
    for part in reversed(known.slope.parts):
        here, away, pull = reach.get(part.name, 0.0), off.get(part.name, 0.0), tape.pulls[part.name]
        for argument, steepness in local[part.name].jacobian.items():
            change = _changed(run, local[part.name], argument, known.parts, pull, here) + _times(steepness, away)
            off[argument] = (off.get(argument, 0.0) + change) * _SLACK
            reach[argument] = (reach.get(argument, 0.0) + _times(steepness * (1 + pull), here)) * _SLACK
    return off


def _near_kinks(
    run: Run, slope: Slope, argument: str, apart: Mapping[str, Amount], steepness: float, whole: Amount
) -> Amount:
    """What the costate may change by at entries that are as near to a kink as they may be off."""
    if not slope.breaks or not some(whole) or _is_clear(run, slope, argument, apart):
        return 0.0
    wide, near = _wide(slope, argument, apart), run.near.get(slope.node.name)
    if near is None or near.distances is None or len(near.costates) != 1 or wide >= NEAR:
        return 2 * steepness * whole
    close = near.costates[0][near.distances <= wide]
    return 2 * steepness * least(whole, float(torch.linalg.vector_norm(close)) * _SLACK + 2.0**-500)


def _is_clear(run: Run, slope: Slope, argument: str, apart: Mapping[str, Amount]) -> bool:
    """Whether no entry is as near to a kink as it may be off."""
    near = run.near.get(slope.node.name)
    if not some(apart.get(argument, 0.0)):
        return True
    return near is not None and near.nearest > _wide(slope, argument, apart)


def _wide(slope: Slope, argument: str, apart: Mapping[str, Amount]) -> float:
    return together(apart[argument]) * _SLACK + 2.0**-50 * max(map(abs, slope.breaks))


def _known(run: Run, name: str, apart: float) -> Enclosure:
    """A tensor within its error of what was computed."""
    value = run.values[name]
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return constant(value if isinstance(value, Tensor) else value[0].detach(), 0)
    exact = constant(value.detach(), 0)
    if name not in run.moving and not apart:
        return exact
    spread = Magnitude.of(math.inf if math.isnan(apart) else apart)
    return Enclosure(
        exact.spec, exact.value, exact.bound + spread, exact.peak + minimum(spread, exact.bound + spread), spread,
        None, spread, _NONE,
    )  # fmt: skip

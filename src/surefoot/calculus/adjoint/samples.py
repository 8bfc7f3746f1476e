r"""The function sample by sample: derivatives at the centre with respect to what linear layers add to each sample.

Where rows (samples) never interact, F is a sum of functions of one sample each, and a linear layer
:math:`\omega_{s,n} = W_sx_{s,n} + b_s` passes a change of its parameters on as a change :math:`e_{s,n} = \dot
W_sx_{s,n} + \dot b_s` of its result. Derivatives with respect to the :math:`e_{s,n}` are small matrices, one per
sample, found for all samples at once by differentiating sums over the samples.

Operations whose derivatives are more than numbers of their arguments are replaced by what has the same first two
derivatives at the centre, with proved errors: with :math:`d = x - \hat x`, which is zero, a scalar function by its
Taylor polynomial :math:`a_0 + a_1d + a_2d^2` (:func:`surefoot.scalar.rounded_derivatives`), and losses,
normalisations, soft-max, lengths and variances by theirs (``near`` of the record). With an operation of which no
errors are proved, one that is solved or that somebody else registered, products of norms have to do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.calculus.effort import NORMAL, Effort
from surefoot.calculus.forward import Pass, Step
from surefoot.enclosure import Enclosure
from surefoot.graph.structure import Spec
from surefoot.magnitude import Magnitude
from surefoot.operations.call import Call
from surefoot.operations.evaluation import run_in_double
from surefoot.operations.products import is_linear
from surefoot.operations.record import Form, record_of
from surefoot.scalar import Rounded, rounded_derivatives

_LARGEST = 1e75
SLACK_UNIT = 2 * 16.0**2 * 2.0**-53
# derivatives are entries of the arguments, or quotients of such without a subtraction
PLAIN = (Form.LAYOUT, Form.LINEAR, Form.PRODUCT, Form.QUOTIENT)


@dataclass(frozen=True)
class Hessian:
    """A second derivative at the centre, as computed."""

    matrix: Tensor  # of which the symmetric part counts
    error: Magnitude  # a bound on the norm of its error


@dataclass(frozen=True)
class Source:
    """A linear layer with parameters that vary."""

    step: Step  # the operation
    inputs: Tensor  # its input at the centre, samples × features
    matrix: Tensor  # its weight at the centre
    weight: int | None  # the position of its weight among the variables; ``None`` if it is fixed
    bias: int | None  # likewise

    @property
    def name(self) -> str:
        """The name of its result."""
        return self.step.node.name

    @property
    def reads(self) -> str | None:
        """The tensor that it reads, if that varies."""
        return self.step.names.get("input")

    @property
    def width(self) -> int:
        """How many numbers it adds to each sample."""
        return self.step.node.specs[0].shape[-1]


@dataclass(frozen=True)
class Samples:
    """A function that is a sum over samples, at the centre and ready to be differentiated."""

    sources: tuple[Source, ...]  # the linear layers, in order
    injected: tuple[Tensor, ...]  # what is added to the result of each, zero
    live: dict[str, Tensor]  # every tensor as a function of that
    slopes: tuple[Tensor, ...]  # the derivative of the output in each injection
    read: tuple[str, ...]  # the tensors that linear layers and the last operation read, and that vary
    # for every operation two numbers :math:`b_1, b_2`: a first derivative is off by at most δ times its norm plus
    # :math:`b_1`, a second one by δ times its norm plus :math:`b_2`, δ being at least :data:`SLACK_UNIT`; see
    # :mod:`surefoot.calculus.adjoint.cotangents`
    slack: Mapping[str, tuple[float, float]]

    def jacobians(self, name: str) -> list[Tensor]:
        """The derivatives of a tensor in the injections of every source: samples × entries × width."""
        return self._differentiated(self.live[name].reshape(len(self.live[name]), -1), len(self.sources))

    def curvatures(self, last: int) -> list[Tensor]:
        """The second derivatives of the output between a source and all earlier ones and itself: samples × width
        of the last × width of the other.
        """
        return self._differentiated(self.slopes[last], last + 1)

    def _differentiated(self, tensor: Tensor, count: int) -> list[Tensor]:
        """The derivatives of every column of a tensor in the first injections, sample by sample."""
        columns = tensor.shape[1]
        if not tensor.requires_grad:
            return [tensor.new_zeros(len(tensor), columns, e.shape[1]) for e in self.injected[:count]]
        units = torch.eye(columns, dtype=tensor.dtype, device=tensor.device)
        found = torch.autograd.grad(
            tensor,
            self.injected[:count],
            units[:, None, :].expand(columns, len(tensor), columns),
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=True,
        )
        require_moderate(*(part for part in found if part is not None))
        return [
            tensor.new_zeros(len(tensor), columns, e.shape[1]) if part is None else part.transpose(0, 1).detach()
            for part, e in zip(found, self.injected, strict=False)
        ]


def require_moderate(*tensors: Tensor) -> None:
    """Refuse entries so large that a sum of products of four of them may overflow."""
    if not all(bool((tensor.abs() <= _LARGEST).all()) for tensor in tensors):
        raise OverflowError("derivatives at the centre are beyond the range of double precision")


def samples(result: Pass, effort: Effort = NORMAL) -> Samples | None:
    """The function sample by sample; ``None`` if samples interact or it would cost too much.

    Raises:
        OverflowError: if entries are too large.
        RuntimeError: if autograd does not know a derivative.
    """
    last = result.steps[-1]
    reads = set(last.names.values())
    if len(reads) != 1 or reads & set(result.region.variables) or last.node.name != result.outputs[0]:
        return None
    (spec,) = (result.enclosures[name].spec for name in reads)
    if not isinstance(spec, Spec) or not spec.shape:
        return None
    count = spec.shape[0]
    found = [_source(result, step) for step in result.steps]
    if not all(_separate(result, step, source, count) for step, source in zip(result.steps, found, strict=True)):
        return None
    sources = [source for source in found if source is not None]
    affordable = sources and effort.separates([source.width for source in sources], count)
    return _replayed(result, sources) if affordable else None


def _separate(result: Pass, step: Step, source: Source | None, count: int) -> bool:
    """Whether each row of a result, or each summand of the output, depends on one row of what varies.

    Variables are read as weights and biases of linear layers only.
    """
    parameters = set() if source is None else {"weight", "bias"}
    others = {slot: name for slot, name in step.names.items() if slot not in parameters}
    if any(slot not in step.row_slots or name in result.region.variables for slot, name in others.items()):
        return False
    output = step.node.name == result.outputs[0]
    return output or (isinstance(step.node.spec, Spec) and step.node.spec.shape[:1] == (count,))


def _source(result: Pass, step: Step) -> Source | None:
    """The step as a source, if it is a linear layer on samples with parameters among the variables."""
    if not is_linear(step.node):
        return None
    names = {slot: name for slot, name in step.names.items() if slot != "input"}
    variables = result.region.variables
    place = {slot: variables.index(name) for slot, name in names.items() if name in variables}
    inputs: Enclosure = result.enclosures[step.node.args[0].name]
    if not place or len(place) != len(names) or len(inputs.shape) != 2:
        return None
    matrix = result.enclosures[step.node.args[1].name].value
    return Source(step, inputs.value, matrix, place.get("weight"), place.get("bias"))


def _replayed(result: Pass, sources: list[Source]) -> Samples | None:
    """Run the operations once more, with injections; ``None`` if a layer does not reach the output."""
    injected: list[Tensor] = []
    live: dict[str, Tensor] = {}
    slack: dict[str, tuple[float, float]] = {}
    named = {source.name for source in sources}
    with torch.enable_grad():
        for step in result.steps:
            reads = {name: live.get(name, result.enclosures[name].value) for name in step.node.inputs}
            value, slack[step.node.name] = _evaluated(result, step, reads)
            if step.node.name in named:
                injected.append(torch.zeros_like(value, requires_grad=True))
                value = value + injected[-1]
            live[step.node.name] = value
        slopes = torch.autograd.grad(live[result.outputs[0]], injected, create_graph=True, allow_unused=True)
    if any(slope is None for slope in slopes):
        return None
    require_moderate(*slopes, *(s.inputs for s in sources), *(s.matrix for s in sources))
    read = [source.reads for source in sources if source.reads is not None] + list(result.steps[-1].names.values())
    return Samples(tuple(sources), tuple(injected), live, slopes, tuple(dict.fromkeys(read)), slack)


def _evaluated(result: Pass, step: Step, reads: Mapping[str, Any]) -> tuple[Any, tuple[float, float]]:
    """The result of an operation, differentiable, and its slack; see the module."""
    record = record_of(step.node)
    if step.node.op == "surefoot.scalar":
        x = reads[step.names["x"]]
        first, second, third = rounded_derivatives(
            step.node.arguments["function"], Rounded.exact(x.detach().double()), 2
        )
        move = x - x.detach()
        errors = (float(second.error.max()), 2 * float(third.error.max())) if x.numel() else (0.0, 0.0)
        value = first.value + second.value * move + third.value * move.square()
        return value, (errors[0] / SLACK_UNIT, errors[1] / SLACK_UNIT)
    x = reads[next(iter(step.names.values()))]
    if record.near is not None and len(step.names) == 1 and isinstance(x, Tensor):
        near = record.near(Call(step.node, result.enclosures), x - x.detach())
        if near is not None and not math.isfinite(near.first + near.second):
            raise OverflowError(f"no error of the derivatives of {step.node.name} at the centre is known")
        if near is not None:
            return result.enclosures[step.node.name].value + near.change, (
                near.first / SLACK_UNIT,
                near.second / SLACK_UNIT,
            )
    if record.rounds_at(step.node) and record.form_of(step.node) not in (*PLAIN, Form.ELEMENTWISE):
        raise OverflowError(f"no error of the derivatives of {step.node.op} at the centre is known")
    return run_in_double(step.node, reads), (0.0, 1.0)

r"""One function at many weights: its value, its gradient, and how far the value is from that in exact arithmetic.

Let :math:`z_k = f_k(z_{<k})` be the tensors of a program, :math:`\hat z_k = f_k(\hat z_{<k}) + \delta_k` what is
computed, and :math:`z(s)` the tensors where the errors :math:`s\delta_k` are made instead. The output of
:math:`z(0)` is the exact value F, that of :math:`z(1)` the computed one, and its derivative in s is
:math:`\sum_k\langle\lambda_k(s), \delta_k\rangle` with the costates :math:`\lambda(s)` at :math:`z(s)`. Hence

.. math:: |\hat F - F| \le \sum_k\sum_i\sup_s|\lambda_{ki}(s)||\delta_{ki}| ,
 so that depth does not multiply the error. Costates are tensors of the same program (of value and gradient), so
the same rules say how far :math:`\lambda(s)` is from the computed :math:`\hat\lambda`. With :math:`|\lambda| \le
|\hat\lambda| + e` the sum has a part of first order, from the tensors as they are, and one of second order, by
norms (:mod:`surefoot.value.norms`) and, where these do not decide, by entries (:mod:`surefoot.value.entries`).
Where a function has kinks, :math:`\lambda(s)` is any slope between those on both sides.

What rounds counts, also where no weight enters: tensors that the data alone determine are computed once, in double
precision; where that rounds they are inputs with an error, and have costates.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.errors import EvaluationError, describe
from surefoot.norms.hermitian import singles_are_exact
from surefoot.norms.matrix import spectral_norm
from surefoot.program import capture
from surefoot.program.checks import as_inputs
from surefoot.torch_private import norms_together
from surefoot.value.entries import Entries
from surefoot.value.joint import Bound, Joint
from surefoot.value.norms import Norms, count_near
from surefoot.value.rounding import FLOOR, UNIT, charges, row_norms
from surefoot.value.running import Runner

_SLACK = 1 + 1e-5  # round-off of the bounds themselves
_AGAIN = 16  # after so many runs by entries, norms are tried again
_MINOR = 0.3  # of the first order: what is left to norms
_ROOMS = (
    (2.0,),
    (2.0, 1.1, 1.01, 1 + 1e-6),
)  # sizes that the second order is worked out for, over those of tensors


class InfiniteValue(EvaluationError):
    """A value that is not finite: too far away, or wrong data."""


@dataclass(frozen=True)
class Evaluation:
    """The value of a function in exact arithmetic, at the weights as they are stored.

    Attributes:
        value: as computed.
        error: how far the exact value may be from it.

    >>> evaluation = sf.evaluate(nn.Linear(2, 1), torch.eye(2), sf.Square(torch.ones(2, 1)))
    >>> evaluation.lower < evaluation.value < evaluation.upper
    True
    """

    value: float
    error: float

    @property
    def lower(self) -> float:
        """A number that the exact value is not below."""
        return math.nextafter(self.value - self.error, -math.inf)

    @property
    def upper(self) -> float:
        """A number that the exact value is not above."""
        return math.nextafter(self.value + self.error, math.inf)

    def __str__(self) -> str:
        return f"{self.value:.17g} ± {self.error * (1 + 1e-2):.1e}"


@dataclass(frozen=True)
class _Sizes:
    """Norms and largest entries of tensors at these nodes, distances from poles, norms of matrices of a batch."""

    places: list[int]
    norms: list[float]
    peaks: list[float]
    least: dict[int, float]
    batches: dict[int, float]
    given: dict[int, float]


@dataclass(frozen=True)
class _Bounds:
    """The second order, or an error by norms, and the sizes up to which it holds; the norms of local errors."""

    second: float
    n: list[float]
    limits: tuple[list[float], list[float]]
    near: dict[int, tuple[float, int]]
    least: dict[int, float]
    batches: dict[int, float]
    given: dict[int, float]
    anchors: dict[int, float]
    local: list[float]

    def hold(self, sizes: _Sizes, norm_of: Callable[[int], float], near: Callable[[int, float], int]) -> bool:
        """Whether tensors of these sizes are within."""
        limits = zip(self.limits, (sizes.norms, sizes.peaks), strict=True)
        return (
            all(all(map(operator.le, values, limit)) for limit, values in limits)
            and all(near(k, reach) <= count for k, (reach, count) in self.near.items())
            and all(value >= self.least[k] for k, value in sizes.least.items())
            and all(sizes.given.get(k, 0.0) <= value for k, value in self.given.items())
            and all(sizes.batches[k] <= value for k, value in self.batches.items())
            and all(norm_of(k) <= bound for k, bound in self.anchors.items())
        )


def _peak(t: Tensor) -> float:
    low, high = torch.aminmax(t) if t.numel() else (t.new_zeros(()), t.new_zeros(()))
    return max(-float(low), float(high))


@dataclass(eq=False)
class Run:
    """One pass at some weights.

    Attributes:
        weights: by name.
        tensors: of the program, by node; costates once they are asked for.
        value: as computed.
        given: the errors of what the data determine, by node.
    """

    weights: Mapping[str, Tensor]
    tensors: list[Any]
    value: float
    given: Mapping[int, Tensor]
    has_costates: bool = False
    sizes: dict[tuple[int, int], _Sizes] = field(default_factory=dict)


def is_exact_here(weights: Mapping[str, Tensor]) -> bool:
    """Whether torch multiplies numbers of single precision as they are, where these tensors live."""
    return all(map(singles_are_exact, {w.device for w in weights.values()}))


class Valuer:
    """Evaluates one function at many weights.

    Args:
        joint: its program, of value and gradient.
        single: whether it is run in single precision, as far as that may decide.
        trainable: the weights whose gradient is asked for, all by default.

    Attributes:
        in_single: the same in single precision, where that may decide.
        obstacle: in words, the operation beyond which nothing was proved at the last run.
    """

    def __init__(self, joint: Joint, *, single: bool = False, trainable: Container[str] | None = None) -> None:
        self.joint, self.single = joint, single
        self.in_single: Valuer | None = None
        self._trainable = [n for n in joint.parameters if trainable is None or n in trainable]
        program = self.program = joint.program
        self.dtypes = joint.dtypes(single)
        self._units = [UNIT[dtype] for dtype in self.dtypes]
        self._output = program.outputs[0]
        gradients = dict(zip(joint.parameters, program.outputs[1:], strict=False))
        self._gradients = {name: gradients[name] for name in self._trainable}
        linked = *joint.linked, *(program.costates[k] for k in joint.linked)
        self._wanted = {self._output, *self._gradients.values(), *linked}
        self._given = {node.index for node in program.nodes if not node.inputs}
        self._runner = Runner(program, self._wanted, self._given, program.costates, self.dtypes)
        self._norms = Norms(
            program, self._judged(), self._runner.skipped, self._units, joint.given, program.constants
        )
        self._fixed = {k: self._narrowed(k, v) for k, v in program.constants.items()}
        self._level = 0  # 0: Frobenius norms, 1: spectral norms and largest entries, 2: entries
        self._bounds: _Bounds | None = None
        self._ahead: _Bounds | None = None  # of a pass without costates
        self._major: set[int] = set()  # the nodes whose part of the first order is worked out by entries
        self._spectral: dict[int, tuple[Tensor, float]] = {}
        self._turns = itertools.count(1)  # by entries
        self.obstacle = ""

    def _judged(self) -> list[int]:
        """The nodes whose errors count: gradients in weights do not."""
        nodes, costates = self.program.nodes, self.program.costates
        judged = {self._output, *self.joint.linked, *(costates[k] for k in self.joint.linked)}
        for node in reversed(nodes):
            if node.index in judged:
                judged.update(node.inputs)
        return sorted(judged)

    @classmethod
    def of(cls, model: nn.Module, x: Any, objective: nn.Module | None = None, *, single: bool = False) -> Valuer:
        """The valuer for the objective of a model on a batch, or of the number that it returns; with that in
        single precision, if there is one and it is asked for.

        Raises:
            CaptureError: if the model cannot be read.
            ObjectiveError: if the objective does not fit the outputs.
        """
        args, kwargs = as_inputs(x)
        # in double precision, so that targets are not rounded to the type of the outputs
        goal = None if objective is None else lambda out: objective(out.double())
        frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
        trainable = {name for name, p in model.named_parameters() if p.requires_grad}
        try:
            for p in frozen:  # whose round-off counts as well
                p.requires_grad_()
            program = capture(model, x, goal)
        finally:
            for p in frozen:
                p.requires_grad_(False)
        names = [f"x.{k}" if len(args) > 1 else "x" for k in range(len(args))]
        joint = Joint(program, {**dict(zip(names, args, strict=True)), **kwargs})
        valuer = cls(joint, trainable=trainable)
        if single and joint.fits_single and all(p.dtype == torch.float32 for p in model.parameters()):
            valuer.in_single = cls(joint, single=True, trainable=trainable)
        return valuer

    def foreseen(self, run: Run, enough: float) -> Run:
        """The pass itself: costates can be computed whenever they are needed."""
        return run

    def evaluate(self, weights: Mapping[str, Tensor], enough: float = 0.0) -> Evaluation:
        """The interval at these weights: in single precision, if there is such a valuer and that is enough."""
        narrow = self.in_single if enough and is_exact_here(weights) else None
        if narrow is not None:
            run = narrow.run(weights)
            evaluation = narrow.enclosed(run, enough) if math.isfinite(run.value) else None
            if evaluation is not None and evaluation.error <= enough:
                return evaluation
        return self.enclosed(self.run(weights), enough)

    # Passes.

    def _narrowed(self, k: int, value: Tensor) -> Tensor:
        return value.to(self.dtypes[k]) if value.is_floating_point() else value

    def run(
        self, weights: Mapping[str, Tensor], *, derivatives: bool = True, light: bool = False,
        bound: Bound | None = None,
    ) -> Run:  # fmt: skip
        """One pass.

        Args:
            weights: by name.
            derivatives: whether costates are computed at once, and not only when they are needed.
            light: that they are not.
            bound: what other data determine; by default, those of the program.
        """
        bound = self.joint.bound if bound is None else bound
        tensors: list[Any] = [None] * len(self.program.nodes)
        for k, value in self._fixed.items():
            tensors[k] = value
        for k, value in bound.tensors.items():
            tensors[k] = self._narrowed(k, value)
        for name in self.joint.parameters:
            k = self.program.inputs[name]
            tensors[k] = weights[name].detach().to(self.dtypes[k])
        with torch.no_grad():
            self._runner.run(tensors, upto=self._output)
        run = Run(weights, tensors, float(tensors[self._output]), bound.errors)
        if derivatives and not light:
            self._back(run)
        return run

    def _back(self, run: Run) -> None:
        if not run.has_costates:
            with torch.no_grad():
                self._runner.run(run.tensors, after=self._output)
            run.has_costates = True

    def gradient(self, run: Run) -> dict[str, Tensor]:
        """The gradient of a pass by name, in double precision."""
        self._back(run)
        gradients = self._gradients.items()
        return {name: run.tensors[k].double().reshape(run.weights[name].shape) for name, k in gradients}

    # Errors.

    @torch.no_grad()
    def enclosed(self, run: Run, enough: float = 0.0) -> Evaluation:
        """The interval of the exact value.

        Args:
            run: the pass.
            enough: an error that need not be made smaller.

        Raises:
            InfiniteValue: if the value is not finite.
        """
        if not math.isfinite(run.value):
            raise InfiniteValue(
                f"the objective is {run.value} at these weights: check data and weights for NaN and huge entries"
            )
        if not run.has_costates and enough > 0:
            error = self._forward_error(run)
            if error <= enough:
                return Evaluation(run.value, error)
        self._back(run)
        found = self._error(run, enough) if self._level < 2 else None
        if found is not None:
            return Evaluation(run.value, found)
        if self.single:
            return Evaluation(run.value, math.inf)
        return self._by_entries(run)

    def _error(self, run: Run, enough: float) -> float | None:
        """The error by the first order and the second one by norms; None where this is too much."""
        total = math.inf
        while self._level < 2:
            sizes = self._sizes(run, len(self.program.nodes))
            for room in _ROOMS[self._level]:
                bounds = self._bounds
                if bounds is None or not self._hold(bounds, run, sizes):
                    bounds = self._bounds = self._bounded(run, sizes, room)
                first = self._first_order(run, sizes, bounds)
                total = min(total, (first + bounds.second) * _SLACK)
                sharp = bounds.second <= (0.5 if room > 1.5 else 3.0) * first < math.inf
                if sharp or total <= enough:
                    return total
                self._bounds = None
            self._level += 1
        self._level = 1 if self.single else 2
        return total if self.single else None

    def _hold(self, bounds: _Bounds, run: Run, sizes: _Sizes) -> bool:
        """Whether bounds hold at this run."""
        spectral = lambda k: self._spectral_norm(run.tensors, k)  # noqa: E731
        return bounds.hold(sizes, spectral, lambda k, reach: self._near(run, k, reach))

    def _near(self, run: Run, k: int, reach: float) -> int:
        return count_near(self.program.nodes[k], lambda i: self._tensor(run, i), reach)

    def _forward_error(self, run: Run) -> float:
        """How far the value is off by norms alone, from a pass without costates."""
        sizes = self._sizes(run, self._output + 1)
        bounds = self._ahead
        if bounds is None or not self._hold(bounds, run, sizes):
            bounds = self._ahead = self._bounded(run, sizes, 2.0, self._output)
        return bounds.second

    def _sizes(self, run: Run, end: int) -> _Sizes:
        """Norms of the tensors before a node; their largest entries too where these are asked for."""
        if (end, self._level) not in run.sizes:
            t, norms, nodes = run.tensors, self._norms, self.program.nodes
            places = norms.measured if end == len(nodes) else [k for k in norms.measured if k < end]
            n = torch.stack(norms_together([t[k] for k in places], 2, torch.float64)).tolist() if places else []
            asked = norms.peaked | norms.small if self._level else norms.small
            p = [_peak(t[k]) if k in asked else size for k, size in zip(places, n, strict=True)]
            batched = [k for k in norms.batched if k < end] if self._level else []
            batches = {k: float(torch.linalg.vector_norm(t[k], dim=(-2, -1)).max()) for k in batched}
            least = {k: float(t[nodes[k].inputs[0]].abs().min()) for k in norms.poles if k < end}
            given = {k: float(torch.linalg.vector_norm(e)) for k, e in run.given.items()}
            run.sizes[end, self._level] = _Sizes(places, n, p, least, batches, given)
        return run.sizes[end, self._level]

    def _bounded(self, run: Run, sizes: _Sizes, room: float, upto: int | None = None) -> _Bounds:
        """The second order for sizes up to so many times these; up to a node, the error of that."""
        nodes, costates = self.program.nodes, self.program.costates
        n, p = [0.0] * len(nodes), [0.0] * len(nodes)
        for k, (size, peak) in self._fixed_sizes.items():
            n[k], p[k] = size, peak if self._level else size
        for k, size, peak in zip(sizes.places, sizes.norms, sizes.peaks, strict=True):
            n[k], p[k] = size * room, peak * room
        limits = [size * room for size in sizes.norms], [size * room for size in sizes.peaks]
        counted: dict[int, tuple[float, int]] = {}

        def near(k: int, reach: float) -> int:
            counted[k] = reach, self._near(run, k, reach)
            return counted[k][1]

        least = {k: value / room for k, value in sizes.least.items()}
        batches = {k: value * room for k, value in sizes.batches.items()}
        given = {k: value * room for k, value in sizes.given.items()}
        anchors: dict[int, float] = {}

        def spectral(k: int) -> float:
            if not self._level:
                return n[k]
            k = self._norms.matrix(k)
            if k not in anchors:
                anchors[k] = self._spectral_norm(run.tensors, k) * room
            return anchors[k]

        e, local = self._norms.errors(n, p, near, least, spectral, batches, given, upto)
        if upto is not None:
            return _Bounds(e[upto] * _SLACK, n, limits, counted, least, batches, given, anchors, e)
        second = 0.0
        for k in self.joint.linked:
            c = costates[k]
            own = given.get(k, local[k])
            second += own * e[c] + FLOOR[self.dtypes[k]] * math.sqrt(nodes[k].shape.numel()) * (n[c] + e[c])
        return _Bounds(
            second if second == second else math.inf, n, limits, counted, least, batches, given, anchors, local
        )

    @cached_property
    def _fixed_sizes(self) -> dict[int, tuple[float, float]]:
        """Norms and largest entries of what the data determine."""
        real = {k: t.double() for k, t in self._fixed.items() if t.is_floating_point() and t.numel()}
        return {k: (float(t.norm()) * (1 + 1e-6), float(t.abs().max())) for k, t in real.items()}

    def _spectral_norm(self, tensors: list[Any], k: int) -> float:
        """A bound of the norm of an exact matrix: as it was, and how far it has moved since."""
        k = self._norms.matrix(k)
        matrix = tensors[k]
        if k in self._spectral:
            old, norm = self._spectral[k]
            moved = float((matrix - old).norm()) * (1 + 1e-6)
            if moved <= 0.1 * norm:
                return norm + moved
        self._spectral[k] = matrix.clone(), spectral_norm(matrix.double().flatten(1))
        return self._spectral[k][1]

    def _first_order(self, run: Run, sizes: _Sizes, bounds: _Bounds) -> float:
        """The sum of local errors times costates as they are: by entries where it matters, else by norms."""
        rest = self._by_norms(sizes, bounds)
        while True:
            total = self._by_parts(run)
            minor = sum([value for k, value in rest.items() if k not in self._major])
            if minor <= _MINOR * total or len(self._major) == len(rest):
                return total + minor
            if not math.isfinite(total):
                return math.inf
            order, tail = sorted(rest, key=rest.__getitem__), 0.0
            least = len(self._major) + 1  # the largest, until what is left is small enough
            allowed = 0.5 * _MINOR * max(total, minor / 8)
            for place, k in enumerate(order):
                tail += rest[k]
                if tail > allowed or place >= len(order) - least:
                    break
            self._major = set(order[place:])

    def _by_norms(self, sizes: _Sizes, bounds: _Bounds) -> dict[int, float]:
        """The parts of the first order by norms."""
        n, local, leading = [*bounds.n], bounds.local, self._norms.leading
        for k, norm in zip(sizes.places, sizes.norms, strict=True):
            n[k] = norm
        parts = {}
        for k in self.joint.linked:
            known = leading.get(k)
            own = local[k] if known is None else known[0] * math.prod([n[i] for i in known[1]])
            parts[k] = sizes.given.get(k, own) * n[self.program.costates[k]]
        return parts

    def _by_parts(self, run: Run) -> float:
        """The parts of the first order that matter, by entries."""
        t, costates, given = run.tensors, self.program.costates, run.given
        total = sum(float((given[k] * t[costates[k]].abs()).sum()) for k in self._major if k in given)
        for unit in {self._units[k] for k in self._major}:
            nodes = [self.program.nodes[k] for k in self._major if k not in given and self._units[k] == unit]
            total += charges(nodes, lambda i: self._tensor(run, i), [t[costates[n.index]] for n in nodes], unit)
        return total

    @cached_property
    def _plain(self) -> Runner:
        """The program in double precision with all its tensors."""
        return Runner(self.program, self._wanted, self._given, self.program.costates, plain=True)

    def _tensor(self, run: Run, k: int) -> Tensor:
        if run.tensors[k] is None:
            node = self.program.nodes[k]
            return node.primitive.run([self._tensor(run, i) for i in node.inputs], **node.options)
        return run.tensors[k]

    def _by_entries(self, run: Run) -> Evaluation:
        """Value and error from a pass in which all tensors are there, by errors of entries and of rows."""
        program, costates = self.program, self.program.costates
        runner = self._plain
        tensors: list[Any] = [None if k not in self._given else v for k, v in enumerate(run.tensors)]
        self._level = 0 if next(self._turns) % _AGAIN == 0 else 2
        runner.run(tensors)
        order = self._judged()
        found = Entries(
            program, lambda k: tensors[k], order, run.given, program.costates,
            lambda k: self._spectral_norm(tensors, k),
        )  # fmt: skip
        total = 0.0
        for k in self.joint.linked:
            own = run.given.get(k, found.local.get(k))
            if own is None:
                continue
            c = costates[k]
            own = own.expand(program.nodes[k].shape)
            total += float((own * tensors[c].abs()).sum())
            if c in found.error:
                second = float((own * found.error[c]).sum())
                if c in found.rows:
                    f, dims = found.rows[c]
                    second = min(second, float((row_norms(own, dims) * f).sum()))
                total += second
            total += FLOOR[torch.float64] * float(tensors[c].abs().sum())
        first = next((k for k in order if k in found.error and not bool(found.error[k].isfinite().all())), None)
        node = None if first is None else program.nodes[first]
        self.obstacle = "" if node is None else f"'{node.primitive.name}' in {describe(node.path)}"
        value = float(tensors[self._output])
        error = (total * _SLACK + abs(value - run.value)) * (1 + 2.0**-50)
        return Evaluation(run.value, error if error == error else math.inf)
